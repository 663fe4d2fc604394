"""Windows over a stream: how they emit, what they aggregate, and the types that come out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import polars as pl

from millstream.durations import describe_us
from millstream.errors import ConfigError
from millstream.kernels.aggregates import Aggregate
from millstream.kernels.frames import HIDDEN_PREFIX, TIME, WINDOW, visible
from millstream.kernels.window_aggregate import EmitMode, WindowAggregate
from millstream.kernels.windows import Tumbling
from millstream.pipeline.aggregate_types import bound_aggregates
from millstream.pipeline.checks import wrong_columns
from millstream.pipeline.graph import OperatorNode
from millstream.pipeline.schema import Columns

if TYPE_CHECKING:
    from millstream.pipeline.streams import Stream

WINDOW_COLUMNS = ("window_start", "window_end")


@dataclass(frozen=True)
class Windowed:
    """A stream divided into windows; say how it emits, then what it aggregates."""

    stream: Stream
    window: Tumbling
    by: tuple[str, ...]
    name: str | None = None
    mode: EmitMode = "final"

    def emit(self, mode: EmitMode) -> Windowed:
        """Say when results come out.

        ``"final"``: one row per key once the window can get no more events. ``"update"``: after
        every batch a row for each key that changed; a later row replaces an earlier one.
        """
        if mode not in ("final", "update"):
            raise ConfigError(f'emit is {mode!r}. Choose "final" or "update".')
        return replace(self, mode=mode)

    def agg(self, **aggregates: Aggregate) -> Stream:
        """Aggregate each window and key: ``agg(shown=ms.count(), cost=ms.sum("cost"))``.

        The rows that come out have window_start, window_end, the ``by`` columns and the
        aggregates; their event time is the last microsecond of the window.
        """
        self._check_names(aggregates)
        name = self.name or f"tumbling({describe_us(self.window.size_us)}) by {', '.join(self.by)}"
        name = self.stream.app.unique_name(name.removesuffix(" by "))
        kernel = WindowAggregate(
            name=name,
            window=self.window,
            by=self.by,
            aggregates=bound_aggregates(aggregates, self.stream.columns, step=name),
            mode=self.mode,
            lateness_us=self.stream.lateness_us,
            partial_schema=(),
        )
        kernel, columns = _typed(kernel, self.stream.columns)
        node = OperatorNode((self.stream.node,), kernel)
        return replace(
            self.stream, node=node, columns=columns, lateness_us=0, key=self.by, mode=self.mode
        )

    def _check_names(self, aggregates: dict[str, Aggregate]) -> None:
        if not aggregates:
            raise ConfigError("agg has no aggregates. Name at least one: agg(n=ms.count()).")
        for name, aggregate in aggregates.items():
            if name in (*WINDOW_COLUMNS, *self.by) or name.startswith(HIDDEN_PREFIX):
                raise ConfigError(f"The aggregate's name {name!r} is taken. Choose another.")
            if not hasattr(aggregate, "partial"):
                raise ConfigError(
                    f"The aggregate {name!r} is {aggregate!r}. Use one of Millstream's, such as "
                    "ms.count, ms.sum or ms.mean."
                )


def _typed(kernel: WindowAggregate, columns: Columns) -> tuple[WindowAggregate, Columns]:
    """Find the types of partials and results by running the kernel on no rows."""
    rows = pl.DataFrame(schema={**columns, TIME: pl.Int64})
    try:
        partials = kernel.prepare(rows).table
    except pl.exceptions.PolarsError as error:
        raise wrong_columns(kernel.name, error, columns) from error
    own = [name for name in partials.columns if name not in (WINDOW, *kernel.by)]
    schema = tuple((name, partials.schema[name]) for name in own)
    kernel = replace(kernel, partial_schema=schema)
    results = kernel.read_off(kernel.merge(kernel.prepare(rows).table))
    return kernel, {name: results.schema[name] for name in visible(results.columns)}
