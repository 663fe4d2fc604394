"""The windowing kernel: aggregates per window and key, with partials in sorted runs.

``prepare`` turns rows into partials before the shuffle; ``process`` takes the partials of one
bucket and batch into state and gives what is to be emitted. With W the watermark after the batch
and L the allowed lateness, a window ``[s, e)`` expires when ``W ≥ e + L``:

====================  ==========================================================================
event of the batch    too late when its lane's baseline ≥ e + L: counted, and left out
``mode="final"``      one row per key when the window expires, and none before
``mode="update"``     in each batch one row per key that the batch touched, with the value so far
expired windows       leave the state; a slot all of whose windows have expired is dropped whole
====================  ==========================================================================

Runs hold partials, not values: what is known of a key is the merge of its partials, so taking a
batch in needs no look-up, and only ``update`` looks up the keys that it must report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import polars as pl

from millstream.kernels.aggregates import Aggregate
from millstream.kernels.aggregates.order import with_order
from millstream.kernels.frames import HASH, LANE, REACHED, ROWS, TIME, WINDOW
from millstream.kernels.keyhash import hash_columns
from millstream.kernels.operator import Moment, OperatorState, Outcome, Prepared
from millstream.kernels.sorted_runs import SortedRuns
from millstream.kernels.watermarks import UNSEEN
from millstream.kernels.windows import Tumbling

EmitMode = Literal["final", "update"]
_SLOT = "__slot"
_PARTIALS = "partials"
SLOTS_OPEN_MAX = 8  # an open span of time is divided into about this many slots


@dataclass(frozen=True)
class WindowAggregate:
    """One windowing operator. Durations in microseconds.

    ``partial_schema`` gives the types of the partial columns, as found when the pipeline was built.
    """

    name: str
    window: Tumbling
    by: tuple[str, ...]
    aggregates: tuple[tuple[str, Aggregate], ...]
    mode: EmitMode
    lateness_us: int
    partial_schema: tuple[tuple[str, pl.DataType], ...]

    @property
    def transparent(self) -> bool:
        return False

    @property
    def ordered(self) -> bool:
        return any(aggregate.needs_order for _, aggregate in self.aggregates)

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - it has one input
        return set(self.by).union(*(a.columns_read for _, a in self.aggregates))

    def fingerprint(self) -> dict[str, Any]:
        """Describe what the state depends on: windows, keys, lateness and the types of partials."""
        return {
            "window_us": [self.window.size_us, self.window.offset_us],
            "by": list(self.by),
            "lateness_us": self.lateness_us,
            "state": [[name, str(dtype)] for name, dtype in self.partial_schema],
        }

    @property
    def slot_us(self) -> int:
        """The width of a slot of state: a few windows where many are open at a time."""
        windows = -(-self.lateness_us // (self.window.size_us * SLOTS_OPEN_MAX))
        return self.window.size_us * max(1, windows)

    def holds_back(self, watermark_us: int) -> int:
        """Give the watermark of what this operator emits, given that of what it takes in."""
        return watermark_us - self.lateness_us if watermark_us > UNSEEN else UNSEEN

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def assign(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Add each row's window."""
        return rows.with_columns(self.window.start(pl.col(TIME)).alias(WINDOW))

    @property
    def expires_after_us(self) -> int:
        """How long after its start a window expires."""
        return self.window.size_us + self.lateness_us

    def expiry(self) -> pl.Expr:
        """Give the watermark at which a row's window expires."""
        return pl.col(WINDOW) + self.expires_after_us

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Reduce rows to one partial per window, key and lane; leave out what is late."""
        rows = self.assign(rows)
        late = 0
        if REACHED in rows.columns:
            in_time = rows.filter(self.expiry() > pl.col(REACHED))
            late, rows = rows.height - in_time.height, in_time
        return Prepared(self._reduce(rows), late)

    def _reduce(self, rows: pl.DataFrame) -> pl.DataFrame:
        lane = [LANE] if LANE in rows.columns else []
        if self.ordered:
            rows = with_order(rows)
        partials = [e for name, a in self.aggregates for e in a.partial(name)]
        grouped = rows.group_by(WINDOW, *lane, *self.by).agg(
            *partials, pl.len().cast(pl.Int64).alias(ROWS)
        )
        return grouped.cast(dict(self.partial_schema))

    def pack(self, tables: Sequence[pl.DataFrame], number: int = 0) -> pl.DataFrame:  # noqa: ARG002
        """Merge the partials of several tables, lane by lane."""
        table = pl.concat(tables)
        if len(tables) == 1:
            return table
        if LANE not in table.columns:
            return self.merge(table)
        lanes = table.partition_by(LANE, as_dict=True, include_key=False)
        return pl.concat(
            self.merge(part).with_columns(pl.lit(lane, pl.Int64).alias(LANE))
            for (lane,), part in lanes.items()
        )

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def merge(self, partials: pl.DataFrame) -> pl.DataFrame:
        """Merge the partials of each window and key into one."""
        merged = [e for name, a in self.aggregates for e in a.merge(name)]
        carried = [pl.col(HASH).first()] if HASH in partials.columns else []
        return partials.group_by(WINDOW, *self.by).agg(*merged, pl.col(ROWS).sum(), *carried)

    def process(
        self, state: OperatorState, arrived: Mapping[int, Sequence[pl.DataFrame]], moment: Moment
    ) -> Outcome:
        """Take the batch's partials into state; give the rows to emit."""
        outcome = Outcome(counts=Counter())
        kept = [self._in_time(partials, moment, outcome) for partials in arrived.get(0, ())]
        kept = [partials for partials in kept if partials.height]
        partials = None
        if kept:
            partials = self.merge(pl.concat(kept))
            partials = partials.hstack([pl.Series(HASH, hash_columns(partials, self.by))])
        runs = state.runs(_PARTIALS)
        emitted = (
            self._expired(runs, partials, moment.watermark_us, moment.before_us)
            if self.mode == "final"
            else self._touched(runs, partials)
        )
        self._hold(runs, partials, moment.watermark_us)
        if emitted is not None:
            outcome.rows = self.read_off(emitted.sort(WINDOW, HASH))
        return outcome

    def _in_time(self, partials: pl.DataFrame, moment: Moment, outcome: Outcome) -> pl.DataFrame:
        """Leave out the partials that came too late, and count."""
        expiry = partials[WINDOW].to_numpy() + self.expires_after_us
        late = expiry <= moment.reached(partials)
        in_time = partials.filter(pl.Series(~late)) if late.any() else partials
        held = rows_in(in_time)
        outcome.counts.update(held=held, late=rows_in(partials) - held)
        return in_time.drop(LANE, strict=False)

    def _expired(
        self, runs: SortedRuns, partials: pl.DataFrame | None, watermark_us: int, before_us: int
    ) -> pl.DataFrame | None:
        """Gather and merge the partials of the windows that this batch expires."""
        expiring = (self.expiry() <= watermark_us) & (self.expiry() > before_us)
        pieces: list[pl.DataFrame] = []
        for slot in runs.slots:
            if slot + self.expires_after_us <= watermark_us:
                pieces += [rows.filter(expiring) for rows in runs.scan(slot)]
        if partials is not None:
            pieces.append(partials.filter(self.expiry() <= watermark_us))
        pieces = [piece for piece in pieces if piece.height]
        return self.merge(pl.concat(pieces)) if pieces else None

    def _touched(self, runs: SortedRuns, partials: pl.DataFrame | None) -> pl.DataFrame | None:
        """Merge the partials of the batch with the old ones of the same windows and keys."""
        if partials is None:
            return None
        keys = [WINDOW, *self.by]
        known: list[pl.DataFrame] = []
        for slot, touched in self._by_slot(partials):
            hashes = np.unique(touched[HASH].to_numpy())
            for rows in runs.look_up(slot, hashes):
                same = rows.join(partials, on=keys, how="semi", nulls_equal=True)
                known.append(same.select(partials.columns))
        return self.merge(pl.concat([partials, *known])) if known else partials

    def _hold(self, runs: SortedRuns, partials: pl.DataFrame | None, watermark_us: int) -> None:
        """Put what is still open into the runs, and drop the slots whose time has passed."""
        for slot in [s for s in runs.slots if self._slot_expiry(s) <= watermark_us]:
            runs.drop_slot(slot)
        if partials is None:
            return
        for slot, rows in self._by_slot(self._open(partials, watermark_us)):
            runs.add(slot, rows, lambda pieces: self.merge(self._open(pieces, watermark_us)))

    def _open(self, partials: pl.DataFrame, watermark_us: int) -> pl.DataFrame:
        """Leave out the windows that have expired."""
        is_open = partials[WINDOW].to_numpy() + self.expires_after_us > watermark_us
        return partials if is_open.all() else partials.filter(pl.Series(is_open))

    def _slot_expiry(self, slot: int) -> int:
        return slot + self.slot_us + self.lateness_us

    def _by_slot(self, rows: pl.DataFrame) -> list[tuple[int, pl.DataFrame]]:
        if not rows.height:
            return []
        offset_us = self.window.offset_us
        windows = rows[WINDOW].to_numpy()
        slots = (windows - offset_us) // self.slot_us * self.slot_us + offset_us
        if slots.min() == slots.max():
            return [(int(slots[0]), rows)]
        divided = rows.hstack([pl.Series(_SLOT, slots)]).partition_by(
            _SLOT, as_dict=True, include_key=False
        )
        return [(int(slot), part) for (slot,), part in sorted(divided.items())]

    def read_off(self, merged: pl.DataFrame) -> pl.DataFrame:
        """Turn merged partials into result rows, whose time is their window's last microsecond."""
        end_us = pl.col(WINDOW) + self.window.size_us
        return merged.select(
            pl.from_epoch(WINDOW, "us").dt.replace_time_zone("UTC").alias("window_start"),
            pl.from_epoch(end_us, "us").dt.replace_time_zone("UTC").alias("window_end"),
            *self.by,
            *(a.result(name) for name, a in self.aggregates),
            (end_us - 1).alias(TIME),
        )


def rows_in(partials: pl.DataFrame) -> int:
    """Count the events that a table of partials stands for."""
    return int(partials[ROWS].sum())
