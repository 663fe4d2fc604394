"""The part that all windowing operators share: windows and lateness, before the shuffle and after.

Before the shuffle rows become partials per slice of time, key and split, and rows that are too late for
all of their windows are left out. The split's watermark before its first row is known only after the
shuffle, so lateness is decided there again (:mod:`millstream.kernels.late`). Two numbers travel with each
partial and say how late it is. They count windows that hold its slice:

=====================  ==========================================================================
``__late_windows``     how many had ended by the watermark of its split, before the events were read
``__expired_windows``  how many had expired by then; all of them: the events are too late
=====================  ==========================================================================

The watermark only rises, so of two decisions the larger number holds. A row that takes part in panes by
count, or that may go to the side output, is not reduced before the shuffle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels import late
from millstream.kernels.aggregation import event_count
from millstream.kernels.arrays import Int64s
from millstream.kernels.changes import divide_by
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import (
    HASH,
    ROWS,
    SPLIT,
    TIME,
    WATERMARK_SEEN,
    WEIGHT,
    WINDOW,
    to_datetimes,
)
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.time.log_order import in_log_order
from millstream.kernels.time.watermarks import delayed_watermark
from millstream.kernels.windows.aggregate_operator import AggregateOperator
from millstream.kernels.windows.assigners import WindowAssigner

SLICE = "__slice"  # Int64: start of the slice of time that a row or partial belongs to
LATE_WINDOWS = "__late_windows"
EXPIRED_WINDOWS = "__expired_windows"
SLOTS_OPEN_MAX = 8  # an open span of time is divided into about this many slots
_SAMPLED_MIN = 100_000  # rows
_SAMPLE = np.uint64(1 << 58)  # hashes below: of 64 keys one
_APART = 0.8


@dataclass(frozen=True)
class WindowOperator(AggregateOperator):
    """A windowing operator, but for what it does with what comes in. Durations in microseconds."""

    window: WindowAssigner
    lateness_us: int

    @property
    def by_arrival(self) -> bool:
        """Whether panes follow events one by one, in the order of their arrival."""
        return False

    @property
    def ordered(self) -> bool:
        return self.by_arrival or self.aggregation.ordered

    @property
    def reduces(self) -> bool:
        """Whether rows become partials before the shuffle."""
        return not self.side_output and not self.by_arrival

    @property
    def expires_after_us(self) -> int:
        """How long after its end a window still takes events."""
        return self.lateness_us

    @property
    def tracks_late(self) -> bool:
        """Whether it matters that an event is late for a window that still takes it."""
        return False

    def output_watermark(self, watermark_us: int) -> int:
        """Return the watermark of what this operator emits, given that of what it takes in."""
        return delayed_watermark(watermark_us, self.expires_after_us)

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Reduce rows to one partial per slice, key and split; leave out what is late or in a gap."""
        rows = rows.hstack([self.window.slices(rows[TIME]).alias(SLICE)])
        counts: Counter[str] = Counter()
        if not self.window.tiled:
            held = filter_rows(rows, self.window.counts(rows[SLICE].to_numpy()) > 0)
            counts["filtered"], rows = rows.height - held.height, held
        if not self.reduces:
            return Prepared(rows.drop(SLICE), 0, counts)
        late_rows = late_by_us = 0
        if WATERMARK_SEEN in rows.columns:
            rows, late_rows, late_by_us = self._judge_lateness(
                rows, rows[WATERMARK_SEEN].to_numpy(), counts
            )
        else:
            rows = rows.with_columns(
                pl.lit(0, pl.Int64).alias(name) for name in self.lateness_columns
            )
        return Prepared(self._reduced(rows), late_rows, counts, late_by_us)

    def _reduced(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Make partials; rows are mostly in time, so they are not grouped by what is zero for all."""
        split = [SPLIT] if SPLIT in rows.columns else []
        same = [name for name in self.lateness_columns if not (rows[name] != 0).any()]
        varying = [name for name in self.lateness_columns if name not in same]
        partials = self.aggregation.reduce(rows, SLICE, *varying, *split)
        zeros = [pl.zeros(partials.height, pl.Int64, eager=True).alias(name) for name in same]
        own = [SLICE, *self.lateness_columns, *split, *self.by, *self.aggregation.partials]
        return partials.hstack(zeros)[own]

    @property
    def lateness_columns(self) -> list[str]:
        """The columns that say how late a partial is; a window that is alone is gone or it is not."""
        gone = [] if self.window.tiled else [EXPIRED_WINDOWS]
        return [*gone, LATE_WINDOWS] if self.tracks_late else gone

    def _judge_lateness(
        self, rows: pl.DataFrame, reached: Int64s, counts: Counter[str]
    ) -> tuple[pl.DataFrame, int, int]:
        """Decide on rows or partials by the watermark of their split; leave out, and count, the late ones.

        Numbers of windows that they have already can only grow. Return what is left, how many events
        were late, and the most by which one of them missed its deadline.
        """
        slices = rows[SLICE].to_numpy()
        gone = self.window.count_ended(slices, reached - self.expires_after_us)
        before = rows[EXPIRED_WINDOWS].to_numpy() if EXPIRED_WINDOWS in rows.columns else 0
        gone = np.maximum(gone, before)
        stands_for = rows[ROWS].to_numpy() if ROWS in rows.columns else 1
        missed = int(((gone - before) * stands_for).sum())
        judged = {EXPIRED_WINDOWS: gone}
        if self.tracks_late:
            ended = self.window.count_ended(slices, reached)
            judged[LATE_WINDOWS] = (
                np.maximum(ended, rows[LATE_WINDOWS].to_numpy())
                if LATE_WINDOWS in rows.columns
                else ended
            )
        if self.lateness_columns:
            rows = rows.with_columns(
                pl.Series(name, judged[name]) for name in self.lateness_columns
            )
        if not missed:
            return rows, 0, 0
        counts["windows_missed"] += missed
        found = late.split_late(rows, reached, self._deadlines(slices), late.WINDOW)
        late_rows = event_count(found.late) if ROWS in rows.columns else found.late.height
        return found.in_time, late_rows, found.late_by_us

    def _deadlines(self, slices: Int64s) -> Int64s:
        """Return when the last window that holds each slice expires."""
        return self.window.ends(self.last_windows(slices)) + self.expires_after_us

    def last_windows(self, slices: Int64s) -> Int64s:
        """Return the label of the last window that holds each slice."""
        first: Int64s = self.window.first(slices)
        return first + (self.window.counts(slices) - 1) * self.window.slide_us

    def pack(self, tables: Sequence[pl.DataFrame], number: int = 0) -> pl.DataFrame:  # noqa: ARG002
        """Merge the partials of several tables, split by split; rows only stand one after another.

        Where nearly every partial has a key of its own, they are left as they are: merging them would
        take more than it spares, and after the shuffle they are merged in any case.
        """
        table = pl.concat(tables)
        if len(tables) == 1 or not self.reduces or self._keys_mostly_distinct(table):
            return table
        split = [SPLIT] if SPLIT in table.columns else []
        merged = self.aggregation.merge(table, SLICE, *self.lateness_columns, *split, *self.by)
        return merged.select(table.columns)

    def _keys_mostly_distinct(self, table: pl.DataFrame) -> bool:
        """Return whether there are nearly as many keys as rows, by a sample of the keys."""
        if table.height < _SAMPLED_MIN:
            return False
        hashes = hash_columns(table, self.by)
        sample = hashes[hashes < _SAMPLE]
        return len(sorted_distinct(sample)) > _APART * len(sample)

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def take_in_time(
        self,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
        result: OperatorResult,
    ) -> pl.DataFrame | None:
        """Return what came in time for at least one window, with slice and judgements, and count.

        Partials, or rows in the order of their arrival if panes are by count.
        """
        kept: list[pl.DataFrame] = []
        late_tables: list[pl.DataFrame] = []
        for table in inputs.get(0, ()):
            reached = context.watermarks_seen(table)
            if self.reduces:
                in_time, late_rows, by_us = self._judge_lateness(table, reached, result.counts)
                held = event_count(in_time)
            else:
                in_time, too_late, by_us = self._split_late(table, reached, result.counts)
                held, late_rows = in_time.height, too_late.height
                late_tables.append(too_late)
            result.late_by_us = max(result.late_by_us, by_us)
            result.counts.update(held=held, late=late_rows)
            kept.append(in_time[[name for name in in_time.columns if name != SPLIT]])
        if self.side_output and any(table.height for table in late_tables):
            result.late = in_log_order(pl.concat(late_tables))
        rows = [table for table in kept if table.height]
        if not rows:
            return None
        table = pl.concat(rows) if len(rows) > 1 else rows[0]
        if self.by_arrival:
            return in_log_order(table)
        if self.side_output:
            return self.aggregation.reduce(table, SLICE, *self.lateness_columns)
        return table

    def _split_late(
        self, rows: pl.DataFrame, reached: Int64s, counts: Counter[str]
    ) -> tuple[pl.DataFrame, pl.DataFrame, int]:
        """Part rows that came as they are into those in time and those too late, and by how much."""
        rows = rows.drop(WATERMARK_SEEN, strict=False)
        rows = rows.with_columns(self.window.slices(rows[TIME]).alias(SLICE))
        too_late = late.is_late(reached, self._deadlines(rows[SLICE].to_numpy()), late.WINDOW)
        late_rows = self._side_output(filter_rows(rows, too_late), reached[too_late])
        in_time, _, missed_by_us = self._judge_lateness(rows, reached, counts)
        return in_time, late_rows, missed_by_us

    def _side_output(self, rows: pl.DataFrame, reached: Int64s) -> pl.DataFrame:
        """Say of rows that are too late why, by how much, and for which window at the last."""
        labels = self.last_windows(rows[SLICE].to_numpy())
        late_by_us = reached - rows[TIME].to_numpy()
        last_us = self.window.starts(labels), self.window.ends(labels)
        return late.side_output(rows.drop(SLICE), late_by_us, late.WINDOW, last_us)

    def with_hash(self, partials: pl.DataFrame, seed: int) -> pl.DataFrame:
        """Add the hash of the key."""
        return partials.hstack([pl.Series(HASH, hash_columns(partials, self.by, seed))])

    def explode_windows(self, slices: pl.DataFrame) -> pl.DataFrame:
        """Return every row once for each window that holds its slice and is not gone for it.

        ``__late_windows`` becomes whether the row is late for that window.
        """
        starts = slices[SLICE].to_numpy()
        if self.window.tiled:
            spread = slices.rename({SLICE: WINDOW})
            return spread.with_columns(pl.col(LATE_WINDOWS) > 0) if self.tracks_late else spread
        gone = slices[EXPIRED_WINDOWS].to_numpy()
        counts = self.window.counts(starts) - gone
        at = np.repeat(np.arange(len(starts)), counts)
        number = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts) + gone[at]
        windows = self.window.first(starts)[at] + number * self.window.slide_us
        spread = slices.drop(SLICE, EXPIRED_WINDOWS)[at].with_columns(pl.Series(WINDOW, windows))
        if self.tracks_late:
            spread = spread.with_columns(pl.col(LATE_WINDOWS) > pl.Series(number))
        return spread

    def count_by_window(self, slices: pl.DataFrame) -> int:
        """Count the events of slices, once for each window that holds them and is not gone for them."""
        events = (
            slices[ROWS].to_numpy() if ROWS in slices.columns else np.ones(slices.height, np.int64)
        )
        if self.window.tiled:
            return int(events.sum())
        windows = self.window.counts(slices[SLICE].to_numpy()) - slices[EXPIRED_WINDOWS].to_numpy()
        return int((events * windows).sum())

    def result_rows(self, merged: pl.DataFrame, *columns: pl.Expr) -> pl.DataFrame:
        """Turn merged partials into result rows, whose time is their window's last microsecond."""
        labels = merged[WINDOW].to_numpy()
        ends = self.window.ends(labels)
        return merged.select(
            to_datetimes(pl.Series("window_start", self.window.starts(labels))),
            to_datetimes(pl.Series("window_end", ends)),
            *self.by,
            *self.aggregation.results,
            *columns,
            pl.Series(TIME, ends - 1),
        )

    def open_windows(self, partials: Sequence[pl.DataFrame], watermark_us: int) -> pl.DataFrame:
        """Return the values of the windows that still take events, from partials by window and key."""
        types = {WINDOW: pl.Int64(), **dict(self.aggregation.keys), **dict(self.aggregation.schema)}
        rows = pl.concat([pl.DataFrame(schema=types), *(part[[*types]] for part in partials)])
        ends = self.window.ends(rows[WINDOW].to_numpy())
        expired_us = delayed_watermark(watermark_us, self.expires_after_us)
        rows = filter_rows(rows, ends > expired_us)
        merged = self.aggregation.merge(rows, WINDOW, *self.by).sort(WINDOW, *self.by)
        if self.aggregation.weighted:
            merged = merged.filter(pl.col(WEIGHT) != 0)
        return self.result_rows(merged)

    # ── slots of state ──────────────────────────────────────────────────────────────────────

    @property
    def slot_us(self) -> int:
        """The width of a slot of state: a few windows where many are open at a time."""
        windows = -(-self.expires_after_us // (self.window.slide_us * SLOTS_OPEN_MAX))
        return self.window.slide_us * max(1, windows)

    def first_end(self, slot: int) -> int:
        """Return the earliest end of a window that holds anything of a slot."""
        if self.window.tiled:
            return self.window.latest_end(slot)
        return int(self.window.ends(self.window.first(np.array([slot], np.int64)))[0])

    def slot_expiry(self, slot: int) -> int:
        """Return the watermark at which all windows of a slot have expired."""
        return self.window.latest_end(slot + self.slot_us - 1) + self.expires_after_us

    def by_slot(self, rows: pl.DataFrame, column: str) -> Iterator[tuple[int, pl.DataFrame]]:
        """Divide rows among the slots of their times."""
        if rows.height:
            offset = self.window.latest_end(0)
            times = rows[column].to_numpy()
            slots = (times - offset) // self.slot_us * self.slot_us + offset
            yield from divide_by(rows, slots)
