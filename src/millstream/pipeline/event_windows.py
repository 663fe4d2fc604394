"""The operators of windows that depend on the events: session, sliding, count_window."""

from __future__ import annotations

from dataclasses import dataclass, replace

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.aggregates.protocol import Aggregate
from millstream.kernels.aggregation import Aggregation
from millstream.kernels.frames import ORDER, TIME, visible
from millstream.kernels.operator import Operator
from millstream.kernels.sessions.operator import SessionOperator
from millstream.kernels.sessions.panes import OVERLAPS, SessionPanes
from millstream.kernels.sessions.signed_sessions import SignedSessionOperator
from millstream.kernels.sessions.spans import END, EXPIRED_END, START, TILL, SessionWindow
from millstream.kernels.trigger import EachBatch, EmitStrategy
from millstream.kernels.windows.count_panes import CountPaneOperator
from millstream.kernels.windows.count_windows import NUMBER, CountWindow, CountWindowOperator
from millstream.kernels.windows.pane_values import PANE_COLUMNS, PANE_TYPES
from millstream.kernels.windows.signed_count_windows import SignedCountWindowOperator
from millstream.kernels.windows.sliding_panes import SlidingPaneOperator
from millstream.kernels.windows.sliding_triggers import SlidingTriggerOperator
from millstream.kernels.windows.sliding_windows import Sliding, SlidingWindowOperator
from millstream.pipeline.checks import type_of
from millstream.pipeline.refused_emits import check_emitted
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import EqualRows, StreamShape, windowed_shape
from millstream.pipeline.window_columns import WINDOW_COLUMNS, typed_aggregation
from millstream.pipeline.windows import EventWindow


def aggregate_event_windows(
    shape: StreamShape,
    window: EventWindow,
    by: tuple[str, ...],
    aggregates: dict[str, Aggregate],
    *,
    name: str,
    emission: EmitStrategy,
) -> tuple[Operator, StreamShape]:
    """Build the operator of windows that depend on the events; the aggregates' names are checked."""
    signed = shape.mode == "retract"
    check_emitted(window, emission, taken_back=signed)
    builder = _EventWindowBuilder(
        shape,
        emission,
        shape.names.unique(name),
        Aggregation(by, tuple(aggregates.items()), weighted=signed),
    )
    if isinstance(window, SessionWindow):
        kernel, columns, key = builder.session(window)
    elif isinstance(window, Sliding):
        kernel, columns, key = builder.sliding(window)
    else:
        kernel, columns, key = builder.count_window(window)
    window_key = builder.window_key(window)
    starts = WINDOW_COLUMNS if isinstance(window, Sliding) else ()
    ends = WINDOW_COLUMNS[1:] if isinstance(window, SessionWindow) else starts
    shape_out = windowed_shape(
        shape,
        emission,
        columns,
        key,
        window_key,
        row_keys=_row_keys(window, window_key, by),
        stable=() if signed else (*starts, *by),
        timed=ends,
        equal_rows=builder.equal_rows(window),
        no_windows=builder.no_windows_after(window),
    )
    return kernel, shape_out


def _row_keys(
    window: EventWindow, window_key: tuple[str, ...], by: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """Return the sets of columns each of which identifies a row."""
    if isinstance(window, Sliding):
        return tuple((label, *window_key[1:], *by) for label in WINDOW_COLUMNS)
    return ((*by, NUMBER),) if isinstance(window, CountWindow) else ((*window_key, *by),)


BuiltOperator = tuple[Operator, ColumnTypes, tuple[str, ...]]


@dataclass(frozen=True)
class _EventWindowBuilder:
    """What is aggregated, as declared; builds the kernel, its columns and the key of its rows."""

    shape: StreamShape
    emission: EmitStrategy
    name: str
    untyped: Aggregation

    @property
    def signed(self) -> bool:
        """Whether the rows that come may be taken back."""
        return self.untyped.weighted

    def window_key(self, window: EventWindow) -> tuple[str, ...]:
        """Return the columns that distinguish the rows of a key in a view, besides the key of the stream.

        The parts of a session that ``discard`` emits are counted from 0 again when it merges with others.
        """
        if isinstance(window, Sliding) and window.rank is not None:
            return ("window_start", window.rank)
        if not isinstance(window, SessionWindow):
            return ("window_start",)
        in_parts = self.emission.mode == "discard" and not self.emission.once
        return ("window_start", "window_end") if in_parts else window.window_key

    def session(self, window: SessionWindow) -> BuiltOperator:
        aggregation = self._typed(OVERLAPS)
        if window.gap is not None:
            self._check_gap(window.gap)
        panes = SessionPanes(
            self.emission,
            aggregation,
            0 if self._closes_on_time else self.shape.lateness_us,
            window.window_key,
            window.joins_after_end_us,
        )
        columns = self._results(panes)
        panes = replace(panes, result_schema=tuple(columns.items()), empty=self._empty(panes))
        rows = tuple(self.shape.columns.items()) if self.emission.late_policy == "side" else ()
        operator = SignedSessionOperator if self.signed else SessionOperator
        return operator(self.name, window, panes, rows), columns, aggregation.by

    def sliding(self, window: Sliding) -> BuiltOperator:
        triggers = self.emission.early, self.emission.late
        triggered = any(trigger not in (None, EachBatch()) for trigger in triggers)
        own = () if window.rank is None else (window.rank,)
        if set(own) & {*WINDOW_COLUMNS, *(PANE_COLUMNS if self.emission.panes else ())}:
            raise ConfigError(
                f"sliding's rank is {window.rank!r}, a column that windows give. Choose another name."
            )
        emission, aggregation = self.emission, self._typed(*own)
        waits = emission.mode != "final" and emission.early is None
        computes_anew = self.signed or emission.panes or waits
        operator = SlidingPaneOperator if computes_anew else SlidingWindowOperator
        operator = SlidingTriggerOperator if triggered else operator
        lateness_us = 0 if self._closes_on_time else self.shape.lateness_us
        kernel = operator(self.name, aggregation, emission, window, lateness_us)
        columns = kernel.result_schema(pl.DataFrame(schema=self.shape.columns))
        if emission.panes:
            columns |= PANE_TYPES
        return kernel, columns, aggregation.by

    def equal_rows(self, window: EventWindow) -> EqualRows | None:
        """Return whether rows may be equal: those of sliding windows of which several look back from one time."""
        if not isinstance(window, Sliding) or window.rank is not None:
            return None
        if self.shape.is_alone(self.untyped.by):
            return None
        once = self.emission.mode == "final" and self.emission.late_policy != "correct"
        return "apart" if self.signed and not once else "together"

    @property
    def _closes_on_time(self) -> bool:
        """Whether a window takes no event after its on-time row."""
        return self.emission.late is None and self.emission.mode != "final"

    def count_window(self, window: CountWindow) -> BuiltOperator:
        if self.signed:
            return self._signed_count_window(window)
        in_panes = self._counts_in_panes(window)
        aggregation = self._typed(NUMBER)
        operator = CountPaneOperator if in_panes else CountWindowOperator
        kernel = operator(self.name, aggregation, self.emission, window)
        results = self._count_columns(kernel)
        if self.emission.panes:
            results |= PANE_TYPES
        return kernel, results, (*aggregation.by, NUMBER)

    def _signed_count_window(self, window: CountWindow) -> BuiltOperator:
        aggregation = self._typed(NUMBER, untyped=replace(self.untyped, weighted=False))
        kernel = SignedCountWindowOperator(
            self.name, aggregation, self.emission, window, self.shape.lateness_us
        )
        return kernel, self._count_columns(kernel), (*aggregation.by, NUMBER)

    def _count_columns(self, kernel: CountWindowOperator) -> ColumnTypes:
        keys = {name: self.shape.columns[name] for name in kernel.by}
        state = {**keys, **kernel.state_schema, NUMBER: pl.Int64()}
        return dict(kernel.result_rows(pl.DataFrame(schema=state)).drop(TIME).schema)

    def _counts_in_panes(self, window: CountWindow) -> bool:
        """Return whether count windows emit otherwise than when full, or with every batch that changes them."""
        emission = self.emission
        plain = emission.early in (None, EachBatch()) and not emission.panes
        if emission.mode == "final" or (emission.mode == "update" and plain):
            return False
        return not (emission.mode == "retract" and plain and window.timeout_us is not None)

    def no_windows_after(self, window: EventWindow) -> str:
        """Say why no window may follow, and what to do; empty if one may."""
        emission = self.emission
        early = emission.mode != "final" and emission.early is not None
        if (
            not isinstance(window, CountWindow)
            or not early
            or emission.mode == "discard"
            or emission.once
        ):
            return ""
        return (
            f'{window} with emit("{emission.mode}"): the time of an open window moves with its events, so a row '
            'that is taken back would be late. Emit "final" or "discard" there.'
        )

    def _typed(self, *taken: str, untyped: Aggregation | None = None) -> Aggregation:
        for name in (*self.untyped.by, *self.untyped.names):
            if name in taken:
                raise ConfigError(
                    f"The column {name!r} is one that {self.name} gives. Choose another name."
                )
        return typed_aggregation(self.name, untyped or self.untyped, self.shape.columns)[0]

    def _check_gap(self, gap: pl.Expr) -> None:
        dtype = type_of(gap, self.shape.columns, f"session's gap in {self.name!r}")
        if not isinstance(dtype, pl.Duration):
            raise ConfigError(
                f"session's gap is of type {dtype}. Give an expression that makes a Duration, such as "
                'pl.duration(seconds="gap_s").'
            )

    def _results(self, panes: SessionPanes) -> ColumnTypes:
        aggregation = panes.aggregation
        state = {
            **{name: self.shape.columns[name] for name in aggregation.by},
            **dict(aggregation.schema),
            START: pl.Int64(),
            END: pl.Int64(),
            TILL: pl.Int64(),
            EXPIRED_END: pl.Int64(),
            **replace(panes, result_schema=()).schema,
        }
        results = panes.result_rows(pl.DataFrame(schema=state), pl.lit(0))
        return {name: results.schema[name] for name in visible(results.columns)}

    def _empty(self, panes: SessionPanes) -> pl.DataFrame:
        aggregation = panes.aggregation
        if not panes.emits_parts:  # no other says that nothing came
            return pl.DataFrame(schema=dict(aggregation.schema))
        hidden = {TIME: pl.Int64(), ORDER: pl.Int64()}
        rows = pl.DataFrame(schema={**self.shape.columns, **hidden})
        schema = dict(aggregation.schema)
        count = pl.len().alias(aggregation.partials[-1])
        return rows.select(*aggregation.partial_expressions, count).cast(schema)  # type: ignore[arg-type]
