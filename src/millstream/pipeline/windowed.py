"""Windows over a stream: how they emit, what they aggregate, and the types that come out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import TYPE_CHECKING, Any, get_args

import polars as pl

from millstream.choices import choose
from millstream.errors import ConfigError
from millstream.kernels.aggregates import Aggregate
from millstream.kernels.aggregation import Aggregation
from millstream.kernels.emission import EachBatch, Emission, Firing, Mode
from millstream.kernels.frames import HIDDEN_PREFIX, WINDOW, visible
from millstream.kernels.pane_values import PANE_COLUMNS
from millstream.kernels.window_aggregate import WindowAggregate
from millstream.kernels.window_panes import WindowPanes
from millstream.kernels.window_step import WindowStep
from millstream.kernels.windows import TimeWindows
from millstream.pipeline.graph import OperatorNode
from millstream.pipeline.schema import Columns
from millstream.pipeline.session_words import EventWindow, aggregated
from millstream.pipeline.window_types import LATE_COLUMNS, WINDOW_COLUMNS, typed_aggregation
from millstream.pipeline.window_words import FiringWord, firing

if TYPE_CHECKING:
    from millstream.pipeline.streams import Stream


@dataclass(frozen=True)
class Windowed:
    """A stream divided into windows; say how it emits, then what it aggregates."""

    stream: Stream
    window: TimeWindows | EventWindow
    by: tuple[str, ...]
    name: str | None = None
    emission: Emission = field(default_factory=Emission)

    def emit(
        self,
        mode: Mode = "final",
        *,
        early: FiringWord | EllipsisType = ...,
        late: FiringWord | EllipsisType = ...,
        suppress_unchanged: bool = True,
        panes: bool = False,
    ) -> Windowed:
        """Say when results come out, and what each row says.

        Args:
            mode: ``"final"``: one row per key once the window can get no more events (with the
                stream's ``late="correct"``: when the watermark reaches its end, and again for what
                comes late). ``"update"``: early, on time and late; a later row replaces an earlier
                one, and of sessions the rows that none replaces are taken back (``_diff`` -1). ``"discard"``: each row tells only what came since the one before.
                ``"retract"``: as update, and a row that is replaced is taken back first.
            early: When rows come out before the watermark reaches the window's end: with every
                ``"batch"`` (so by default, but for final), with ``"each"`` event, a duration of
                running time after the first event that no row tells of, ``ms.after_count(n)``, or
                None: not at all.
            late: The same for events that come after that, within the stream's lateness; by default
                with every batch. None: the window closes with the on-time row.
            suppress_unchanged: Leave out a row that says what the one before said (of discard: one
                that nothing came for).
            panes: Add ``pane_kind`` ("early", "on_time", "late"), ``pane_index``, ``pane_first`` and
                ``pane_last``.

        Guarantees: with ``panes``, on-time values, and panes by count of one key in one partition, depend
            on the events alone. Rows by batch or running time depend on these; what they add up to does
            not. An event that is late by its own partition, while others lag, is in the next early row; with
            ``panes``, or early rows by count, it waits for the row on time.
        """
        choose("emit", mode, get_args(Mode))
        if mode == "final" and not isinstance(early, EllipsisType) and early is not None:
            raise ConfigError(
                f'emit("final") has early={early!r}, but a final row comes once, at the end. Choose '
                '"update", "discard" or "retract" for early rows.'
            )
        if mode == "final" and self.stream.late_policy != "correct" and _given(late, panes):
            raise ConfigError(
                'emit("final") gives one row per window, so it has no late rows and no panes. Read '
                'the stream with late="correct", or choose "update", "discard" or "retract".'
            )
        if late is None and self.stream.late_policy == "correct":
            raise ConfigError(
                'emit has late=None over a stream with late="correct": nothing would correct. Leave '
                "one of them out."
            )
        by_default: Firing | None = None if mode == "final" else EachBatch()
        emission = Emission(
            mode=mode,
            early=by_default if isinstance(early, EllipsisType) else firing(early, "emit's early"),
            late=EachBatch() if isinstance(late, EllipsisType) else firing(late, "emit's late"),
            late_policy=self.stream.late_policy,
            suppress_unchanged=suppress_unchanged,
            panes=panes,
        )
        if mode == "discard" and self.stream.mode == "retract":
            raise ConfigError(
                'emit("discard") comes after emit("retract"): rows that take others back cannot be '
                'told as parts. Choose "final", "update" or "retract".'
            )
        return replace(self, emission=emission)

    def agg(self, **aggregates: Aggregate) -> Stream:
        """Aggregate each window and key: ``agg(shown=ms.count(), cost=ms.sum("cost"))``.

        The rows that come out have window_start, window_end, the ``by`` columns and the
        aggregates; their event time is the last microsecond of the window. Over a stream read with
        ``late="side"``, the ``late`` of the result are the rows that came too late.
        """
        self._check_names(aggregates)
        if isinstance(self.window, EventWindow):
            return aggregated(self, self.window, aggregates)
        weighted = self.stream.mode == "retract"
        name = self.name or f"{self.window} by {', '.join(self.by)}"
        name = self.stream.app.unique_name(name.removesuffix(" by "))
        aggregation = Aggregation(self.by, tuple(aggregates.items()), weighted)
        emission = replace(self.emission, late_policy=self.stream.late_policy)
        once = emission.mode == "final" and emission.late_policy != "correct"
        kernel = (WindowAggregate if once else WindowPanes)(
            name=name,
            window=self.window,
            aggregation=aggregation,
            emission=emission,
            lateness_us=self.stream.lateness_us,
        )
        kernel, columns = _typed(kernel, self.stream.columns)
        return replace(
            self.stream,
            node=OperatorNode((self.stream.node,), kernel),
            columns=columns,
            lateness_us=0,
            late_policy="drop",
            key=self.by,
            apart_by=WINDOW_COLUMNS[:1],
            mode=emission.mode if once or emission.mode != "final" else "update",
            late_columns=(
                {**self.stream.columns, **LATE_COLUMNS} if emission.late_policy == "side" else None
            ),
        )

    def _check_names(self, aggregates: dict[str, Aggregate]) -> None:
        if not aggregates:
            raise ConfigError("agg has no aggregates. Name at least one: agg(n=ms.count()).")
        taken = (*WINDOW_COLUMNS, *self.by, *(PANE_COLUMNS if self.emission.panes else ()))
        for name, aggregate in aggregates.items():
            if name in taken or name.startswith(HIDDEN_PREFIX):
                raise ConfigError(f"The aggregate's name {name!r} is taken. Choose another.")
            if not hasattr(aggregate, "partial"):
                raise ConfigError(
                    f"The aggregate {name!r} is {aggregate!r}. Use one of Millstream's, such as "
                    "ms.count, ms.sum or ms.mean."
                )


def _given(late: FiringWord | EllipsisType, panes: bool) -> bool:  # noqa: FBT001 - as emit has it
    return panes or not (late is None or isinstance(late, EllipsisType))


def _typed(kernel: WindowStep, columns: Columns) -> tuple[Any, Columns]:
    """Find the types of partials and results by running the aggregates on no rows."""
    aggregation, rows = typed_aggregation(kernel.name, kernel.aggregation, columns)
    kernel = replace(kernel, aggregation=aggregation)
    merged = aggregation.merge(aggregation.reduce(rows, WINDOW), WINDOW, *kernel.by)
    results = kernel.read_off(merged)
    result_columns = {name: results.schema[name] for name in visible(results.columns)}
    if kernel.emission.panes:
        result_columns |= _PANE_TYPES
    return kernel, result_columns


_PANE_TYPES: Columns = dict(
    zip(PANE_COLUMNS, (pl.String(), pl.Int64(), pl.Boolean(), pl.Boolean()), strict=True)
)
