"""Rows of windows that no pane has yet, and when their pane is due.

Pending partials are in sorted runs, in rows of window, key, ``__step`` and partials; the value of
a key and step is the merge of its rows. A step is one pane that has not fired:

===============  ================================================================================
``AfterTime``    the running time at which it is due; at that time it fires, and its rows are stale
``AfterCount``   its number, the count of earlier events divided by the pane's; stale once complete
otherwise        0; it comes with the on-time pane, or when the window expires
===============  ================================================================================

So nothing is ever deleted: row and time say whether a row is live. *Timers* find the panes due by
running time: runs of keys, in slots by when they are due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import polars as pl

from millstream.kernels.aggregation import Aggregation, event_count
from millstream.kernels.changes import concat_present
from millstream.kernels.frames import HASH, ROWS, WINDOW
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.sorted_runs import SortedRuns
from millstream.kernels.trigger import AfterCount, AfterTime, EachBatch, Trigger

STEP = "__step"
_KNOWN = "__known"
Division = Callable[[pl.DataFrame], Iterable[tuple[int, pl.DataFrame]]]


@dataclass(frozen=True)
class PendingUpdate:
    """The result of taking rows in: the pending rows, and the panes that they complete."""

    pending: pl.DataFrame
    complete: pl.DataFrame


@dataclass(frozen=True)
class PendingPanes:
    """The pending rows of one phase of windows.

    ``slots`` divides rows by the slots of ``runs``. ``deferred``: nothing fires before the phase ends.
    ``clock_ms`` is the running time.
    """

    aggregation: Aggregation
    trigger: Trigger | None
    runs: SortedRuns
    timers: SortedRuns
    slots: Division
    clock_ms: int
    deferred: bool = False

    @property
    def key(self) -> list[str]:
        return [WINDOW, *self.aggregation.by]

    @property
    def columns(self) -> list[str]:
        return [*self.key, STEP, *self.aggregation.partials, HASH]

    @property
    def input_columns(self) -> list[str]:
        """The columns of partials as they are taken in."""
        return [*self.key, *self.aggregation.partials, HASH]

    # ── taking in ───────────────────────────────────────────────────────────────────────────

    def add(self, rows: pl.DataFrame) -> PendingUpdate:
        """Take in partials (rows in their order, if panes are by count); nothing is stored yet."""
        if isinstance(self.trigger, AfterCount):
            return self._count(rows, self.trigger.count)
        if isinstance(self.trigger, AfterTime) and not self.deferred:
            return PendingUpdate(self._time(rows, self.trigger.delay_ms), self._none(rows))
        rows = rows.hstack([pl.zeros(rows.height, pl.Int64, eager=True).alias(STEP)])[self.columns]
        if isinstance(self.trigger, EachBatch) and not self.deferred:
            return PendingUpdate(rows.clear(), rows)
        return PendingUpdate(rows, rows.clear())

    def _none(self, rows: pl.DataFrame) -> pl.DataFrame:
        return rows.with_columns(pl.lit(0, pl.Int64).alias(STEP)).select(self.columns).clear()

    def _time(self, rows: pl.DataFrame, delay_ms: int) -> pl.DataFrame:
        """Add rows to the open panes; where there is none, begin one and set its timer."""
        due_ms = self.clock_ms + delay_ms
        making = self.alive(self.known(rows)).select(*self.key, STEP)
        joined = rows.join(making, on=self.key, how="left", nulls_equal=True)
        begun = joined.filter(pl.col(STEP).is_null()).select(*self.key, HASH)
        if begun.height:
            self.timers.add(due_ms, begun, lambda keys: keys)
        return joined.with_columns(pl.col(STEP).fill_null(due_ms)).select(self.columns)

    def _count(self, rows: pl.DataFrame, count: int) -> PendingUpdate:
        """Cut the rows of each key into panes by number, and see which are complete."""
        if not rows.height:
            empty = self.aggregation.reduce(
                rows.with_columns(pl.lit(0, pl.Int64).alias(STEP)), WINDOW, STEP
            )
            empty = empty.with_columns(pl.lit(0, pl.UInt64).alias(HASH)).select(self.columns)
            return PendingUpdate(empty, empty)
        known = self.known(rows)
        latest = known.sort(STEP).unique(self.key, keep="last")
        before = latest.select(*self.key, (pl.col(STEP) * count + pl.col(ROWS)).alias(_KNOWN))
        numbered = rows.join(
            before, on=self.key, how="left", nulls_equal=True, maintain_order="left"
        )
        place = pl.int_range(pl.len()).over(self.key) + pl.col(_KNOWN).fill_null(0)
        numbered = numbered.with_columns((place // count).cast(pl.Int64).alias(STEP))
        cut = self._reduce(numbered)
        if self.deferred:
            return PendingUpdate(cut, cut.clear())
        whole = self.merged(
            pl.concat([known.join(cut, on=[*self.key, STEP], how="semi", nulls_equal=True), cut])
        )
        complete = whole.filter(pl.col(ROWS) == count)
        self.spend(self.of_same_panes(known, complete))
        latest_step = pl.col(STEP).max().over(self.key)
        return PendingUpdate(cut.filter(pl.col(STEP) == latest_step), complete)

    def _reduce(self, numbered: pl.DataFrame) -> pl.DataFrame:
        partials = self.aggregation.reduce(numbered, WINDOW, STEP)
        hashes = numbered.select(*self.key, HASH).unique(self.key)
        return partials.join(hashes, on=self.key, nulls_equal=True).select(self.columns)

    # ── looking ─────────────────────────────────────────────────────────────────────────────

    def known(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return what is stored of the windows and keys of some rows, merged."""
        found = [rows.clear().pipe(self._none_of)]
        for slot, touched in self.slots(rows):
            hashes = sorted_distinct(touched[HASH].to_numpy())
            keys = touched.select(self.key)
            for stored in self.runs.look_up(slot, hashes):
                same = stored.join(keys, on=self.key, how="semi", nulls_equal=True)
                found.append(same.select(self.columns))
        return self.merged(pl.concat(found))

    def _none_of(self, rows: pl.DataFrame) -> pl.DataFrame:
        schema = {
            **{name: rows.schema[name] for name in self.key},
            STEP: pl.Int64(),
            **dict(self.aggregation.schema),
            HASH: pl.UInt64(),
        }
        return pl.DataFrame(schema=schema)

    def merged(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Merge the rows of each window, key and step into one."""
        merged = self.aggregation.merge(rows, *self.key, STEP, first=[HASH])
        return merged.select(self.columns)

    def alive(self, merged: pl.DataFrame) -> pl.DataFrame:
        """Leave out what has been in a pane."""
        if isinstance(self.trigger, AfterTime) and not self.deferred:
            return merged.filter(pl.col(STEP) > self.clock_ms)
        if isinstance(self.trigger, AfterCount) and not self.deferred:
            latest = pl.col(STEP) == pl.col(STEP).max().over(self.key)
            return merged.filter(latest & (pl.col(ROWS) < self.trigger.count))
        return merged

    def due(self) -> pl.DataFrame | None:
        """Return the rows due by running time, merged, and drop their timers."""
        found: list[pl.DataFrame] = []
        for due_ms in sorted(slot for slot in self.timers.slots if slot <= self.clock_ms):
            keys = concat_present(list(self.timers.scan(due_ms)))
            if keys is not None:  # of a share of timers, none may be this bucket's
                known = self.known(keys)
                found.append(known.filter(pl.col(STEP) == due_ms))
            self.timers.drop_slot(due_ms)
        return pl.concat(found) if found else None

    # ── storing ─────────────────────────────────────────────────────────────────────────────

    def store(self, rows: pl.DataFrame, complete: pl.DataFrame | None = None) -> None:
        """Store pending rows, and complete ones that give the number of the next pane."""
        if complete is not None and isinstance(self.trigger, AfterCount):
            self.spend(self.of_same_panes(rows, complete))
        for slot, part in self.slots(self._to_store(rows)):
            self.runs.add(slot, part, self.merged, alive=self._wanted, all_spent_goes=False)

    def spend(self, rows: pl.DataFrame) -> None:
        """Note that stored rows have been in a pane now."""
        for slot, part in self.slots(rows):
            self.runs.spend(slot, event_count(part))

    def of_same_panes(self, rows: pl.DataFrame, fired: pl.DataFrame) -> pl.DataFrame:
        """Return the rows that are of one of the panes of ``fired``."""
        return rows.join(fired, on=[*self.key, STEP], how="semi", nulls_equal=True)

    def _to_store(self, rows: pl.DataFrame) -> pl.DataFrame:
        # The stored rows of a batch must not depend on how many input rows there were.
        return (
            self.aggregation.for_state(self.merged(rows)) if self.aggregation.has_deferred else rows
        )

    def _wanted(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Leave out, when runs are folded, rows that have been in a pane and are not needed any more."""
        if isinstance(self.trigger, AfterTime) and not self.deferred:
            return self.alive(rows)
        if isinstance(self.trigger, AfterCount) and not self.deferred:
            return rows.filter(pl.col(STEP) == pl.col(STEP).max().over(self.key))
        return rows

    def scan(self, slots: Iterable[int]) -> Iterator[pl.DataFrame]:
        """Yield what is stored in some slots."""
        for slot in slots:
            for rows in self.runs.scan(slot):
                yield rows.select(self.columns)
