"""The part that all windowing operators share: windows and lateness, before the shuffle and after.

Before the shuffle rows become partials per piece of time, key and lane; what is too late for all of
its windows is left out. The lane's *baseline*, known only after the shuffle, is judged there. How
late a partial is travels with it as two small numbers, of the windows that hold its piece:

==========  =====================================================================================
``__late``  how many its lane had reached the end of, before the events were read
``__gone``  how many had expired by then; all of them: the events are too late
==========  =====================================================================================

As the watermark only rises, the larger number of two judgements is that of both. A row that takes
part in panes by count, or may have to go aside as it came, is not reduced before the shuffle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from millstream.kernels.aggregating import Aggregating
from millstream.kernels.aggregation import rows_in
from millstream.kernels.frames import HASH, LANE, REACHED, ROWS, TIME, WINDOW
from millstream.kernels.hash_order import distinct
from millstream.kernels.keyhash import hash_columns
from millstream.kernels.log_order import in_log_order
from millstream.kernels.operator import Moment, Outcome, Prepared
from millstream.kernels.watermarks import held_back
from millstream.kernels.windows import Times, TimeWindows

PIECE = "__piece"  # Int64: start of the piece of time that a row or partial belongs to
LATE = "__late"
GONE = "__gone"
SLOTS_OPEN_MAX = 8  # an open span of time is divided into about this many slots
_SLOT = "__slot"
_SAMPLED_MIN = 100_000  # rows
_SAMPLE = np.uint64(1 << 58)  # hashes below: of 64 keys one
_APART = 0.8


@dataclass(frozen=True)
class WindowStep(Aggregating):
    """A windowing operator, but for what it does with what comes in. Durations in microseconds."""

    window: TimeWindows
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
        return not self.aside and not self.by_arrival

    @property
    def expires_after_us(self) -> int:
        """How long after its end a window still takes events."""
        return self.lateness_us

    @property
    def tells_late(self) -> bool:
        """Whether it matters that an event is late for a window that still takes it."""
        return False

    def holds_back(self, watermark_us: int) -> int:
        """Give the watermark of what this operator emits, given that of what it takes in."""
        return held_back(watermark_us, self.expires_after_us)

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Reduce rows to one partial per piece, key and lane; leave out what is late or in a gap."""
        rows = rows.hstack([self.window.pieces(rows[TIME]).alias(PIECE)])
        counts: Counter[str] = Counter()
        if not self.window.tiled:
            held = rows.filter(pl.Series(self.window.counts(rows[PIECE].to_numpy()) > 0))
            counts["filtered"], rows = rows.height - held.height, held
        if not self.reduces:
            return Prepared(rows.drop(PIECE), 0, counts)
        late = late_by_us = 0
        if REACHED in rows.columns:
            rows, late, late_by_us = self._judged(rows, rows[REACHED].to_numpy(), counts)
        else:
            rows = rows.with_columns(pl.lit(0, pl.Int64).alias(name) for name in self.judgements)
        return Prepared(self._reduced(rows), late, counts, late_by_us)

    def _reduced(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Make partials; rows are mostly in time, so they are not grouped by what is zero for all."""
        lane = [LANE] if LANE in rows.columns else []
        same = [name for name in self.judgements if not (rows[name] != 0).any()]
        told = [name for name in self.judgements if name not in same]
        partials = self.aggregation.reduce(rows, PIECE, *told, *lane)
        zeros = [pl.zeros(partials.height, pl.Int64, eager=True).alias(name) for name in same]
        own = [PIECE, *self.judgements, *lane, *self.by, *self.aggregation.partials]
        return partials.hstack(zeros)[own]

    @property
    def judgements(self) -> list[str]:
        """The columns that say how late a partial is; a window that is alone is gone or it is not."""
        gone = [] if self.window.tiled else [GONE]
        return [*gone, LATE] if self.tells_late else gone

    def _judged(
        self, rows: pl.DataFrame, reached: Times, counts: Counter[str]
    ) -> tuple[pl.DataFrame, int, int]:
        """Judge rows or partials by what their lane had reached; leave out, and count, the late ones.

        Judgements that they have already are raised. Give what is left, how many events were late,
        and by how much one of them missed at the most.
        """
        pieces = rows[PIECE].to_numpy()
        gone = self.window.passed(pieces, reached - self.expires_after_us)
        before = rows[GONE].to_numpy() if GONE in rows.columns else 0
        gone = np.maximum(gone, before)
        stands_for = rows[ROWS].to_numpy() if ROWS in rows.columns else 1
        missed = int(((gone - before) * stands_for).sum())
        judged = {GONE: gone}
        if self.tells_late:
            late = self.window.passed(pieces, reached)
            judged[LATE] = np.maximum(late, rows[LATE].to_numpy()) if LATE in rows.columns else late
        if self.judgements:
            rows = rows.with_columns(pl.Series(name, judged[name]) for name in self.judgements)
        if not missed:
            return rows, 0, 0
        counts["windows_missed"] += missed
        too_late = gone >= self.window.counts(pieces)
        out = where(rows, too_late)
        late_rows = rows_in(out) if ROWS in rows.columns else out.height
        missed_by_us = self._missed_by_us(pieces[too_late], reached[too_late])
        return where(rows, ~too_late), late_rows, missed_by_us

    def _missed_by_us(self, pieces: Times, reached: Times) -> int:
        """Tell by how much late events missed the expiry of their last window, at the most."""
        if not len(pieces):
            return 0
        expiry = self.window.ends(self.last_windows(pieces)) + self.expires_after_us
        return int((reached - expiry).max())

    def last_windows(self, pieces: Times) -> Times:
        """Give the start of the last window that holds each piece."""
        first: Times = self.window.first(pieces)
        return first + (self.window.counts(pieces) - 1) * self.window.slide_us

    def pack(self, tables: Sequence[pl.DataFrame], number: int = 0) -> pl.DataFrame:  # noqa: ARG002
        """Merge the partials of several tables, lane by lane; rows only stand one after another.

        Where nearly every partial has a key of its own, they are left as they are: merging them would
        take more than it spares, and after the shuffle they are merged in any case.
        """
        table = pl.concat(tables)
        if len(tables) == 1 or not self.reduces or self._are_apart(table):
            return table
        lane = [LANE] if LANE in table.columns else []
        merged = self.aggregation.merge(table, PIECE, *self.judgements, *lane, *self.by)
        return merged.select(table.columns)

    def _are_apart(self, table: pl.DataFrame) -> bool:
        """Say whether there are nearly as many keys as rows, by a sample of the keys."""
        if table.height < _SAMPLED_MIN:
            return False
        hashes = hash_columns(table, self.by)
        sample = hashes[hashes < _SAMPLE]
        return len(distinct(sample)) > _APART * len(sample)

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def arrivals(
        self, arrived: Mapping[int, Sequence[pl.DataFrame]], moment: Moment, outcome: Outcome
    ) -> pl.DataFrame | None:
        """Give what came in time for at least one window, with piece and judgements, and count.

        Partials, or rows in the order of their arrival if panes are by count.
        """
        kept: list[pl.DataFrame] = []
        aside: list[pl.DataFrame] = []
        for table in arrived.get(0, ()):
            reached = moment.reached(table)
            if self.reduces:
                in_time, late, by_us = self._judged(table, reached, outcome.counts)
                held = rows_in(in_time)
            else:
                in_time, too_late, by_us = self._split(table, reached, outcome.counts)
                held, late = in_time.height, too_late.height
                aside.append(too_late)
            outcome.late_by_us = max(outcome.late_by_us, by_us)
            outcome.counts.update(held=held, late=late)
            kept.append(in_time[[name for name in in_time.columns if name != LANE]])
        if self.aside and any(table.height for table in aside):
            outcome.late = in_log_order(pl.concat(aside))
        rows = [table for table in kept if table.height]
        if not rows:
            return None
        table = pl.concat(rows)
        if self.by_arrival:
            return in_log_order(table)
        if self.aside:
            return self.aggregation.reduce(table, PIECE, *self.judgements)
        return table

    def _split(
        self, rows: pl.DataFrame, reached: Times, counts: Counter[str]
    ) -> tuple[pl.DataFrame, pl.DataFrame, int]:
        """Part rows that came as they are into those in time and those too late, and by how much."""
        rows = rows.drop(REACHED, strict=False)
        rows = rows.with_columns(self.window.pieces(rows[TIME]).alias(PIECE))
        pieces = rows[PIECE].to_numpy()
        too_late = self.window.passed(
            pieces, reached - self.expires_after_us
        ) >= self.window.counts(pieces)
        aside = self._aside(where(rows, too_late), reached[too_late])
        in_time, _, missed_by_us = self._judged(rows, reached, counts)
        return in_time, aside, missed_by_us

    def _aside(self, rows: pl.DataFrame, reached: Times) -> pl.DataFrame:
        """Say of rows that are too late why, by how much, and for which window at the last."""
        pieces = rows[PIECE].to_numpy()
        starts = self.last_windows(pieces)
        late_by = reached - rows[TIME].to_numpy()
        return rows.drop(PIECE).with_columns(
            pl.Series("late_by", late_by, pl.Duration("us")),
            pl.lit("expired_window").alias("late_reason"),
            instants(pl.Series("window_start", starts)),
            instants(pl.Series("window_end", self.window.ends(starts))),
        )

    def hashed(self, partials: pl.DataFrame, seed: int) -> pl.DataFrame:
        """Add the hash of the key."""
        return partials.hstack([pl.Series(HASH, hash_columns(partials, self.by, seed))])

    def each_window(self, pieces: pl.DataFrame) -> pl.DataFrame:
        """Give every row once for each window that holds its piece and is not gone for it.

        ``__late`` becomes whether the row is late for that window.
        """
        starts = pieces[PIECE].to_numpy()
        if self.window.tiled:
            spread = pieces.rename({PIECE: WINDOW})
            return spread.with_columns(pl.col(LATE) > 0) if self.tells_late else spread
        gone = pieces[GONE].to_numpy()
        counts = self.window.counts(starts) - gone
        at = np.repeat(np.arange(len(starts)), counts)
        number = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts) + gone[at]
        windows = self.window.first(starts)[at] + number * self.window.slide_us
        spread = pieces.drop(PIECE, GONE)[at].with_columns(pl.Series(WINDOW, windows))
        if self.tells_late:
            spread = spread.with_columns(pl.col(LATE) > pl.Series(number))
        return spread

    def events_by_window(self, pieces: pl.DataFrame) -> int:
        """Count the events of pieces, once for each window that holds them and is not gone for them."""
        events = (
            pieces[ROWS].to_numpy() if ROWS in pieces.columns else np.ones(pieces.height, np.int64)
        )
        if self.window.tiled:
            return int(events.sum())
        windows = self.window.counts(pieces[PIECE].to_numpy()) - pieces[GONE].to_numpy()
        return int((events * windows).sum())

    def read_off(self, merged: pl.DataFrame, *columns: pl.Expr) -> pl.DataFrame:
        """Turn merged partials into result rows, whose time is their window's last microsecond."""
        ends = self.window.ends(merged[WINDOW].to_numpy())
        return merged.select(
            instants(merged[WINDOW].alias("window_start")),
            instants(pl.Series("window_end", ends)),
            *self.by,
            *self.aggregation.results,
            *columns,
            pl.Series(TIME, ends - 1),
        )

    # ── slots of state ──────────────────────────────────────────────────────────────────────

    @property
    def slot_us(self) -> int:
        """The width of a slot of state: a few windows where many are open at a time."""
        windows = -(-self.expires_after_us // (self.window.slide_us * SLOTS_OPEN_MAX))
        return self.window.slide_us * max(1, windows)

    def first_end(self, slot: int) -> int:
        """Give the earliest end of a window that holds anything of a slot."""
        if self.window.tiled:
            return self.window.latest_end(slot)
        return int(self.window.ends(self.window.first(np.array([slot], np.int64)))[0])

    def slot_expiry(self, slot: int) -> int:
        """Give the watermark at which all windows of a slot have expired."""
        return self.window.latest_end(slot + self.slot_us - 1) + self.expires_after_us

    def by_slot(self, rows: pl.DataFrame, column: str) -> Iterator[tuple[int, pl.DataFrame]]:
        """Divide rows among the slots of their times."""
        if rows.height:
            offset = self.window.latest_end(0)
            times = rows[column].to_numpy()
            slots = (times - offset) // self.slot_us * self.slot_us + offset
            yield from divided(rows, slots)


def divided(rows: pl.DataFrame, slots: Times) -> Iterator[tuple[int, pl.DataFrame]]:
    """Divide rows by a number that each has."""
    if not rows.height:
        return
    if slots.min() == slots.max():
        yield int(slots[0]), rows
        return
    parts = rows.hstack([pl.Series(_SLOT, slots)]).partition_by(
        _SLOT, as_dict=True, include_key=False
    )
    for (slot,), part in sorted(parts.items()):
        yield int(slot), part


def where(rows: pl.DataFrame, mask: npt.NDArray[np.bool_]) -> pl.DataFrame:
    """Give the rows at which the mask is true; all of them without copying."""
    return rows if mask.all() else rows.filter(mask)


def instants(microseconds: pl.Series) -> pl.Series:
    """Give times as UTC datetimes."""
    return microseconds.cast(pl.Datetime("us", "UTC"))
