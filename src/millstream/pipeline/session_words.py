"""The words for windows that events make themselves: session, sliding, count_window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import polars as pl

from millstream.durations import Duration, to_us
from millstream.errors import ConfigError
from millstream.kernels.aggregates import Aggregate
from millstream.kernels.aggregation import Aggregation
from millstream.kernels.count_windows import NUMBER, CountAggregate, CountWindow
from millstream.kernels.emission import EachBatch, Emission
from millstream.kernels.frames import ORDER, TIME, visible
from millstream.kernels.operator import Operator
from millstream.kernels.session_panes import OVERLAPS, SessionPanes
from millstream.kernels.session_spans import BELOW, END, START, TILL, Session
from millstream.kernels.sessions import SessionAggregate
from millstream.kernels.sliding import Sliding, SlidingAggregate
from millstream.pipeline.checks import type_of
from millstream.pipeline.graph import OperatorNode
from millstream.pipeline.schema import Columns
from millstream.pipeline.window_types import LATE_COLUMNS, typed_aggregation

if TYPE_CHECKING:
    from millstream.pipeline.streams import Stream
    from millstream.pipeline.windowed import Windowed

EventWindow = Session | Sliding | CountWindow


def session(
    gap: Duration | pl.Expr,
    *,
    gap_inclusive: bool = True,
    strict: bool = False,
    max_length: Duration | None = None,
    max_gap: Duration | None = None,
) -> Session:
    """Sessions: activity of a key without a pause longer than ``gap``, as ``[first, last + gap)``.

    Events may come in any order: an event between two sessions makes them one, also when both have
    been emitted already (emit ``"retract"`` takes them back then). The rows have a column
    ``overlaps_closed``, for an event that came when the session that it belongs to had expired, but
    one of its own had not: it makes a second session, which overlaps the first.

    Args:
        gap: A duration, or an expression that gives each event the pause that may follow it, as a
            Duration: ``pl.duration(seconds="gap_s")``. A session ends at the largest of its events'
            times plus their gaps. Null and gaps not above zero count as one microsecond, and longer
            ones than ``max_gap`` as that. Two sessions may then begin at the same time, when the
            first had expired: ``window_end`` tells them apart too, and is part of a view's key.
        gap_inclusive: Whether events exactly ``gap`` apart are in one session. It is then complete
            when the watermark is above its end: an event at the end is not late before that.
        strict: An event that would make a session overlapping one that has expired is late instead.
        max_length: Sessions that never end are cut at the multiples of this since 1970 UTC, so none
            is longer: with ``"1 day"``, at midnight UTC. None: they are kept for as long as they go
            on, as one row of state each.
        max_gap: The longest gap of an event, where ``gap`` is an expression: where sessions ended is
            kept for so long, to know what overlaps them.

    An event is too late when its own session, from its time to its gap after it, has expired for
    its partition and no session that is still open covers it.
    """
    gap_us = _longest_gap_us(gap, max_gap)
    length_us = None if max_length is None else _above_zero(max_length, "session's max_length")
    if length_us is not None and not isinstance(gap, pl.Expr) and length_us < gap_us:
        raise ConfigError(
            f"session's max_length is {max_length!r}, less than its gap of {gap!r}. Give at least "
            "the gap."
        )
    return Session(
        gap_us,
        gap if isinstance(gap, pl.Expr) else None,
        inclusive=gap_inclusive,
        strict=strict,
        max_length_us=length_us,
    )


def _longest_gap_us(gap: Duration | pl.Expr, max_gap: Duration | None) -> int:
    if not isinstance(gap, pl.Expr):
        if max_gap is not None:
            raise ConfigError(
                f"session has the gap {gap!r} and max_gap={max_gap!r}. A longest gap is for gaps that "
                "an expression gives: leave it out."
            )
        return _above_zero(gap, "session's gap")
    if max_gap is None:
        raise ConfigError(
            "session's gap is an expression and there is no max_gap. Say how long a gap can be: "
            'max_gap="1 day". Where sessions ended is kept for so long, to tell which overlap them.'
        )
    return _above_zero(max_gap, "session's max_gap")


def sliding(size: Duration) -> Sliding:
    """One row per event, over what its key did in the time up to it: ``[t - size, t]``.

    Both ends are included, and events at the same time see each other, as in SQL's ``RANGE BETWEEN
    size PRECEDING AND CURRENT ROW``. ``window_end`` is the event's own time. With ``"final"`` the row
    comes when nothing that it counts can come any more; with ``"update"`` or ``"retract"`` with the
    batch that brought the event, and again for each late event that it counts. An event is too late
    when its partition has passed its time by more than the lateness.

    For windows of one size that begin at regular times, see :func:`millstream.hopping`.
    """
    return Sliding(_above_zero(size, "sliding's size"))


def count_window(
    count: int,
    *,
    unbounded: bool = False,
    slide: int | None = None,
    timeout: Duration | None = None,
) -> CountWindow:
    """Windows of ``count`` events of a key, in the order of their arrival.

    That order is the partition's: for the answer to depend on the events alone, the key must decide
    the partition. The rows have ``window_number``, from 0 for each key; ``window_start`` is the time
    of the event that opened the window, ``window_end`` just after the latest. No event is late. Of
    every key that ever came a row of state is kept.

    Args:
        count: How many events a window takes.
        unbounded: Must be said: the state has a row of every key that ever came, and never
            forgets one.
        slide: Begin a window with every ``slide``-th event; by default windows do not overlap.
        timeout: Complete a window as it is when the watermark has reached this much after the
            event that opened it. By default it stays open until it is full.

    ``emit("update")`` also shows windows that are still open, with every batch that adds to them.
    ``"retract"`` and ``"discard"`` are not offered: the time of an open window moves with its events, so
    a row that takes an earlier one back would be late for windows over it.
    """
    _check_whole(count, "count_window's count", 1 << 31)
    if unbounded is not True:
        raise ConfigError(
            "count_window keeps a row of state for every key that ever came, and of its aggregates "
            "besides, for ever: some 100 bytes each, so of a million new keys a day 36 GB a year. "
            f"Where keys are few, say so: count_window({count}, unbounded=True). Where new ones "
            "keep coming, use windows of time."
        )
    if slide is not None:
        _check_whole(slide, "count_window's slide", count)
    if timeout is not None and slide not in (None, count):
        raise ConfigError(
            "count_window has a slide and a timeout. A window that is timed out ends early, so that "
            "none could begin at every slide: leave one of them out."
        )
    timeout_us = None if timeout is None else _above_zero(timeout, "count_window's timeout")
    return CountWindow(count, slide or count, timeout_us)


def _check_whole(value: int, what: str, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{what} is {value!r}. Give a whole number from 1 to {most}.")


def aggregated(windowed: Windowed, window: EventWindow, aggregates: dict[str, Aggregate]) -> Stream:
    """Aggregate windows that events make themselves; the names of the aggregates are checked."""
    stream = windowed.stream
    if stream.mode == "retract":
        raise ConfigError(
            f'{window} comes after emit("retract"), whose rows take others back. It takes rows that '
            'stay: emit "final" there.'
        )
    name = windowed.name or f"{window} by {', '.join(windowed.by)}"
    declared = _Declared(
        windowed,
        stream.app.unique_name(name.removesuffix(" by ")),
        Aggregation(windowed.by, tuple(aggregates.items())),
    )
    if isinstance(window, Session):
        kernel, columns, key = declared.session(window)
    elif isinstance(window, Sliding):
        kernel, columns, key = declared.sliding(window)
    else:
        kernel, columns, key = declared.count_window(window)
    emission = declared.emission
    corrected = emission.mode == "final" and emission.late_policy == "correct"
    late_columns = {**stream.columns, **LATE_COLUMNS}
    return replace(
        stream,
        node=OperatorNode((stream.node,), kernel),
        columns=columns,
        lateness_us=0,
        late_policy="drop",
        key=key,
        mode="update" if corrected else emission.mode,
        late_columns=late_columns if emission.late_policy == "side" else None,
        apart_by=declared.apart_by(window),
    )


Built = tuple[Operator, Columns, tuple[str, ...]]


@dataclass(frozen=True)
class _Declared:
    """What is aggregated, as declared; builds the kernel, its columns and the key of its rows."""

    windowed: Windowed
    name: str
    untyped: Aggregation

    @property
    def emission(self) -> Emission:
        return replace(self.windowed.emission, late_policy=self.windowed.stream.late_policy)

    def apart_by(self, window: EventWindow) -> tuple[str, ...]:
        """Name what tells the rows of a key apart in a view, besides the key of the stream.

        The parts that ``discard`` tells of a session are counted anew when it becomes one with others.
        """
        if not isinstance(window, Session):
            return ("window_start",)
        return (
            ("window_start", "window_end") if self.emission.mode == "discard" else window.apart_by
        )

    def session(self, window: Session) -> Built:
        aggregation = self._typed(OVERLAPS)
        stream = self.windowed.stream
        if window.gap is not None:
            self._check_gap(window.gap)
        closes_on_time = self.emission.late is None and self.emission.mode != "final"
        panes = SessionPanes(
            self.emission,
            aggregation,
            0 if closes_on_time else stream.lateness_us,
            window.apart_by,
            window.joins_after_end_us,
        )
        columns = self._results(panes)
        panes = replace(panes, result_schema=tuple(columns.items()), empty=self._empty(aggregation))
        rows = tuple(stream.columns.items()) if self.emission.late_policy == "side" else ()
        return SessionAggregate(self.name, window, panes, rows), columns, aggregation.by

    def sliding(self, window: Sliding) -> Built:
        self._check_emission("sliding", "final", "update", "retract")
        aggregation = self._typed()
        stream = self.windowed.stream
        kernel = SlidingAggregate(self.name, aggregation, self.emission, window, stream.lateness_us)
        columns = kernel.result_schema(pl.DataFrame(schema=stream.columns))
        return kernel, columns, aggregation.by

    def count_window(self, window: CountWindow) -> Built:
        self._check_emission("count_window", "final", "update")
        if self.emission.late_policy != "drop":
            raise ConfigError(
                f'count_window comes after late="{self.emission.late_policy}", but no event is late '
                "for it. Leave it out."
            )
        aggregation = self._typed(NUMBER)
        kernel = CountAggregate(self.name, aggregation, self.emission, window)
        columns = self.windowed.stream.columns
        keys = {name: columns[name] for name in aggregation.by}
        results = kernel.read_off(pl.DataFrame(schema={**keys, **kernel.state_schema}))
        return kernel, dict(results.drop(TIME).schema), (*aggregation.by, NUMBER)

    def _check_emission(self, window: str, *modes: str) -> None:
        """Make sure that windows which emit by batch are not told to emit otherwise."""
        emission = self.emission
        if emission.mode not in modes:
            allowed = ", ".join(f'"{mode}"' for mode in modes)
            raise ConfigError(f'{window} cannot emit "{emission.mode}". Choose one of {allowed}.')
        by_batch = (emission.early in (None, EachBatch()), emission.late == EachBatch())
        if emission.panes or not all(by_batch):
            raise ConfigError(
                f"{window} emits with every batch what that changed, and has no panes. Leave early, "
                "late and panes out of emit."
            )

    def _typed(self, *taken: str) -> Aggregation:
        for name in (*self.untyped.by, *self.untyped.names):
            if name in taken:
                raise ConfigError(
                    f"The column {name!r} is one that {self.name} gives. Choose another name."
                )
        return typed_aggregation(self.name, self.untyped, self.windowed.stream.columns)[0]

    def _check_gap(self, gap: pl.Expr) -> None:
        dtype = type_of(gap, self.windowed.stream.columns, f"session's gap in {self.name!r}")
        if not isinstance(dtype, pl.Duration):
            raise ConfigError(
                f"session's gap is of type {dtype}. Give an expression that makes a Duration, such as "
                'pl.duration(seconds="gap_s").'
            )

    def _results(self, panes: SessionPanes) -> Columns:
        aggregation = panes.aggregation
        state = {
            **{name: self.windowed.stream.columns[name] for name in aggregation.by},
            **dict(aggregation.schema),
            START: pl.Int64(),
            END: pl.Int64(),
            TILL: pl.Int64(),
            BELOW: pl.Int64(),
            **replace(panes, result_schema=()).schema,
        }
        results = panes.read_off(pl.DataFrame(schema=state), pl.lit(0))
        return {name: results.schema[name] for name in visible(results.columns)}

    def _empty(self, aggregation: Aggregation) -> pl.DataFrame:
        if self.emission.mode != "discard":  # no other says that nothing came
            return pl.DataFrame(schema=dict(aggregation.schema))
        hidden = {TIME: pl.Int64(), ORDER: pl.Int64()}
        rows = pl.DataFrame(schema={**self.windowed.stream.columns, **hidden})
        made = [e for name, a in aggregation.aggregates for e in a.partial(name)]
        schema = dict(aggregation.schema)
        count = pl.len().alias(aggregation.partials[-1])
        return rows.select(*made, count).cast(schema)  # type: ignore[arg-type]


def _above_zero(duration: Duration, what: str) -> int:
    duration_us = to_us(duration, what=what)
    if duration_us == 0:
        raise ConfigError(f"{what} is 0. Give one above zero, such as '30 minutes'.")
    return duration_us
