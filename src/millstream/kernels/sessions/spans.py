"""Which events make a session: spans of time that overlap, in whatever order they came.

An event at ``ts`` with gap ``g`` makes the session ``[ts, ts + g)`` on its own, which others can join
up to and including ``ts + g`` (where the gap is exclusive: up to the microsecond before). Sessions that
overlap so far are one. That alone would let an event join a session that was given out as final long
ago. So an event reaches back only as far as nothing has expired for its own split: where the split had
reached ``r`` before the event, and the lateness is L, it joins what overlaps

    ``[max(ts, r - L), ts + g]``

and is too late when that is empty (``ts + g + L < r``) and no open session holds all that lies
between. These *reaches* are fixed when an event is read, and overlapping is all that counts: so
sessions are the connected parts of a set of intervals, the same for every order of arrival and every
division into batches, and joining sessions is as good as joining events.

A session is complete once the watermark W has passed all that can join it and is not late, so where the
gap is inclusive once it is *above* the end; and has expired once it has passed that by the lateness.
A session that has expired by W is never joined again: whatever comes later has ``r >= W``. An event
that would have joined it makes a session that overlaps it.

Sessions that are cut at a longest length lie in cells: nothing that begins in one reaches the next.

Source: Akidau et al., "The Dataflow Model", VLDB 2015, section 2.2.2 (window merging); Kafka Streams
closes a session when its last event's time is less than the stream's time less gap and grace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.durations import format_us
from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.frames import HASH, TIME, WATERMARK_SEEN

START = "__start"  # Int64: time of the earliest event
END = "__end"  # Int64: the end, outside the session
FROM = "__from"  # Int64: how far back it reaches
TILL = "__till"  # Int64: how far on, inclusive: spans join when one's FROM <= the other's TILL
# Int64: the latest TILL of an expired session of its key; null: not looked up yet
EXPIRED_END = "__expired_end"
DEFERRED = "__deferred"  # Boolean: the row is an event that waits, not a session
PART = "__part"  # Int64: number of the connected part that a span is in
SPAN = [START, END, FROM, TILL]


@dataclass(frozen=True)
class SessionWindow:
    """Sessions: activity with no pause longer than a gap. Microseconds.

    ``gap`` is an expression that gives each event its own gap, as a Duration; then ``gap_us`` is the
    longest: a longer one counts as that. ``inclusive``: events exactly a gap apart are in one
    session. ``strict``: an event that would make a session overlapping a closed one is late instead.
    ``max_length_us``: sessions end at its multiples since 1970 UTC.
    """

    gap_us: int
    gap: pl.Expr | None = None
    inclusive: bool = True
    strict: bool = False
    max_length_us: int | None = None

    def __str__(self) -> str:
        return f"session({format_us(self.gap_us) if self.gap is None else 'gap'})"

    @property
    def columns_read(self) -> set[str]:
        return set() if self.gap is None else set(self.gap.meta.root_names())

    @property
    def window_key(self) -> tuple[str, ...]:
        """The columns that distinguish the sessions of a key: with gaps per event two may share a start."""
        return ("window_start",) if self.gap is None else ("window_start", "window_end")

    @property
    def joins_after_end_us(self) -> int:
        """How long after the end of a session an event may come that still joins it."""
        return int(self.inclusive)

    def with_end(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Add to each row the end of the session that it makes on its own, and how far on it reaches."""
        gap = pl.lit(self.gap_us, pl.Int64) if self.gap is None else self._whole_us(self.gap)
        end = pl.col(TIME) + gap
        till = end - (1 - self.joins_after_end_us)
        if self.max_length_us is not None:
            cut = (pl.col(TIME) // self.max_length_us + 1) * self.max_length_us
            end, till = pl.min_horizontal(end, cut), pl.min_horizontal(till, cut - 1)
        return rows.with_columns(end.alias(END), till.alias(TILL))

    def _whole_us(self, gap: pl.Expr) -> pl.Expr:
        """Return gaps in whole microseconds; none, and none above zero, count as one."""
        return gap.dt.total_microseconds().fill_null(1).clip(1, self.gap_us).cast(pl.Int64)

    def with_reach(self, rows: pl.DataFrame, lateness_us: int) -> pl.DataFrame:
        """Add to rows with ``__watermark`` how far they reach back, and their start."""
        return rows.with_columns(
            pl.max_horizontal(TIME, pl.col(WATERMARK_SEEN) - lateness_us).alias(FROM),
            pl.col(TIME).alias(START),
        )

    def assign_parts(self, spans: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
        """Sort spans by key and time, and number the connected part that each is in."""
        spans = spans.sort(HASH, FROM)
        if (_same(spans, [HASH]) & ~_same(spans, by)).any():  # keys that share a hash
            spans = spans.sort(HASH, *by, FROM)
        apart = ~_same(spans, [HASH, *by])
        till = _running_max(spans[TILL].to_numpy(), np.cumsum(apart))
        apart[1:] |= spans[FROM].to_numpy()[1:] > till[:-1]
        return spans.with_columns(pl.Series(PART, np.cumsum(apart)).set_sorted())


def shares_part(spans: pl.DataFrame) -> pl.Series:
    """Return which spans are not alone in their part; they stand one part after another."""
    follows = _same(spans, [PART])
    return pl.Series(follows | np.append(follows[1:], values=[False]))


def earliest_from(spans: pl.DataFrame) -> pl.Series:
    """Return how far each span's part reaches back, as its first does; they stand in parts, by FROM."""
    numbers = np.arange(spans.height)
    first = np.maximum.accumulate(np.where(_same(spans, [PART]), 0, numbers))
    return spans[FROM].gather(first)


def whole_spans(spans: pl.DataFrame) -> list[pl.Series]:
    """Return the span of each part, and the latest watermark of its splits, one part after another."""
    begins = np.flatnonzero(~_same(spans, [PART]))
    least, most = (START, FROM), (END, TILL, WATERMARK_SEEN)
    return [
        *(pl.Series(name, np.minimum.reduceat(spans[name].to_numpy(), begins)) for name in least),
        *(pl.Series(name, np.maximum.reduceat(spans[name].to_numpy(), begins)) for name in most),
    ]


def as_points(events: pl.DataFrame) -> pl.DataFrame:
    """Let events that wait take part as sessions; one that reaches nothing stands at its end."""
    return events.with_columns(
        pl.min_horizontal(FROM, TILL).alias(FROM), pl.lit(value=False).alias(DEFERRED)
    )


def _same(rows: pl.DataFrame, columns: Sequence[str]) -> Bools:
    """Return for each row whether it equals the one before in these columns; the first does not."""
    same = np.ones(rows.height, np.bool_)
    same[:1] = False
    for name in columns:
        column = rows[name]
        equal = column.eq_missing(column.shift(1)).to_numpy()
        same[1:] &= equal[1:]
    return same


def _running_max(values: Int64s, groups: Int64s) -> Int64s:
    """Return the largest value so far within each group; groups stand one after another."""
    if not len(values):
        return values
    low = int(values.min())
    width = int(values.max()) - low + 1
    if width * int(groups[-1] + 1) < 1 << 62:
        shifts = groups * width - low  # each group above all before it, so that one pass does
        return np.maximum.accumulate(values + shifts) - shifts
    frame = pl.DataFrame({"value": values, "group": groups})
    return frame.select(pl.col("value").cum_max().over("group")).to_series().to_numpy()
