"""Captured changes that each write or delete the row of one key, applied all at once.

They are what most batches consist of. Of each key the last change counts. The rules are those of
:mod:`millstream.kernels.tables.captured_table`, which takes every other batch: one with a truncate, a change of a key, a
value that is left out, a record that could not be read, a row that is marked as outdated, or a change that is older than
the row of its key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.changes import concat_present, group_numbers, with_diff
from millstream.kernels.columns import filter_rows
from millstream.kernels.decode.captured import UNAVAILABLE
from millstream.kernels.decode.fields import Mask
from millstream.kernels.frames import DELETED, HASH, KIND, ORDER, ROWS, TIME, WEIGHT
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.tables.waiting_changes import COMMIT, PLACE

SPOILT = "__spoilt"  # Boolean: a record of the key could not be read since, so unavailable values are not known
GONE, TRUNCATED = "gone", "truncated"
CAUSES = (TIME, ORDER, COMMIT, PLACE)
OFFSET_BITS = 40
_VERSION = (COMMIT, PLACE, ORDER)


@dataclass
class PlainChanges:
    """A batch of changes, with their hashes, in the order of their versions; and what the table holds of their keys.

    ``values`` are those of the state. ``by_transactions``: versions order the changes of all partitions.
    """

    step: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    rows: pl.DataFrame
    held: pl.DataFrame | None
    values: dict[str, Any]
    by_transactions: bool
    _kept: int = field(init=False)

    @staticmethod
    def may_be(rows: pl.DataFrame) -> bool:
        """Whether changes are of the kinds that this takes."""
        plain = rows[KIND].is_in(["upsert", "delete"]).all()
        return plain and not (rows[UNAVAILABLE].list.len() > 0).any()

    def __post_init__(self) -> None:
        self._kept = 0 if self.held is None else self.held.height
        keys = [self.rows[[*self.key]]]
        if self.held is not None:
            keys = [self.held[[*self.key]], *keys]
        self._numbers = np.asarray(group_numbers(pl.concat(keys), self.key))
        self._count = int(self._numbers.max()) + 1
        self._of_rows = self._numbers[self._kept :]
        self._upserts: Mask = (self.rows[KIND] == "upsert").to_numpy()
        # Of each key the place of its row in ``held``, and of its last change, or -1.
        self._held_at = np.full(self._count, -1)
        self._held_at[self._numbers[: self._kept]] = np.arange(self._kept)
        self._last_at = np.full(self._count, -1)
        self._last_at[self._of_rows] = np.arange(self.rows.height)

    # ── whether it can be done so ───────────────────────────────────────────────────────────

    def is_plain(self) -> bool:
        """Whether no row is marked as outdated, and no change older than what it meets."""
        truncated = tuple(self.values.get(TRUNCATED, (-2, -2, -2)))
        first = tuple(self.rows[0, name] for name in _VERSION)
        if first < truncated:
            return False
        if self.held is not None:
            if self.held[SPOILT].any():
                return False
            at = self._held_at[self._of_rows]
            met = at >= 0
            if self._is_older(filter_rows(self.rows, met), self.held[at[met]]):
                return False
        return self.by_transactions or self._in_one_partition()

    @staticmethod
    def _is_older(rows: pl.DataFrame, held: pl.DataFrame) -> bool:
        older = np.zeros(rows.height, np.bool_)
        for name in reversed(_VERSION):
            one, other = rows[name].to_numpy(), held[name].to_numpy()
            older = (one < other) | ((one == other) & older)
        return bool(older.any())

    def _in_one_partition(self) -> bool:
        orders = [self.rows[ORDER].to_numpy()]
        if self.held is not None:
            orders = [self.held[ORDER].to_numpy(), *orders]
        partitions = np.concatenate(orders) >> OFFSET_BITS
        of_key = np.zeros(self._count, np.int64)
        of_key[self._numbers] = partitions
        return bool((of_key[self._numbers] == partitions).all())

    # ── doing it ────────────────────────────────────────────────────────────────────────────

    def apply(self, kept: KeyedRows) -> pl.DataFrame | None:
        """Keep what the table is then; return the signed changes from the table before to the table after."""
        deletions, causes = self._deletions()
        gone = self._last_gone(deletions)
        touched = np.zeros(self._count, np.bool_)
        touched[self._of_rows[self._upserts]] = True
        touched[self._of_rows[deletions]] = True
        was_gone = self._was_gone()
        if was_gone >= 0 and (touched[was_gone] or len(deletions)):
            touched[was_gone] = True
        live = self._last_at[(self._last_at >= 0)]
        live = np.sort(live[self._upserts[live]])
        self._store(kept, touched, live, gone, causes)
        return self._changes(touched, live)

    def _deletions(self) -> tuple[Int64s, Int64s]:
        """Return which changes delete a row that is there, and where its values are: in ``held`` if below ``_kept``."""
        order = np.argsort(self._of_rows, kind="stable")
        numbers = self._of_rows[order]
        previous = np.full(self.rows.height, -1)
        same = np.flatnonzero(numbers[1:] == numbers[:-1])
        previous[order[same + 1]] = order[same]
        first = previous < 0
        source = np.where(first, -1, previous + self._kept)
        source[~first & ~self._upserts[previous]] = -1
        if self.held is not None:
            alive = ~self.held[DELETED].to_numpy()
            at = self._held_at[self._of_rows]
            source = np.where(first & (at >= 0) & alive[at], at, source)
        deletions = np.flatnonzero(~self._upserts & (source >= 0))
        return deletions, source

    def _was_gone(self) -> int:
        """Return the number of the key whose row was deleted last, before the batch; -1 if there is none."""
        if self.held is None:
            return -1
        found = np.flatnonzero(self.held[DELETED].to_numpy())
        return int(self._numbers[found[-1]]) if len(found) else -1

    def _last_gone(self, deletions: Int64s) -> int:
        """Return the last deletion of the batch if its key has no row since; else -1."""
        if not len(deletions):
            return -1
        last = int(deletions[-1])
        later = self._upserts[last:] & (self._of_rows[last:] == self._of_rows[last])
        return -1 if later.any() else last

    def _store(
        self, kept: KeyedRows, touched: Mask, live: Int64s, gone: int, source: Int64s
    ) -> None:
        ledger = StateLedger(self.step, (kept.runs,))
        if not touched.any():
            ledger.check()
            return
        hashes = self._hashes(touched)
        before = None
        parts: list[pl.DataFrame | None] = [self._stored(self.rows[live], deleted=False)]
        if self.held is not None:
            near = np.isin(self.held[HASH].to_numpy(), hashes)
            before = filter_rows(self.held, near)
            others = near & ~touched[self._numbers[: self._kept]]
            parts.append(filter_rows(self.held, others))
        if gone >= 0:
            parts.append(self._deleted_row(gone, int(source[gone])))
        names = [*self.columns, *CAUSES, HASH, SPOILT, DELETED]
        stored = pl.concat([part[names] for part in parts if part is not None])
        stored = stored.with_columns(pl.lit(1, pl.Int64).alias(ROWS))
        self.values.pop(GONE, None)
        if gone >= 0:
            self.values[GONE] = self.rows[HASH][gone]
        elif self._keeps_gone(touched):
            self.values[GONE] = self.held[HASH][int(self._held_at[self._was_gone()])]  # type: ignore[index]
        ledger.events_in += stored.height
        ledger.events_out += 0 if before is None else before.height
        kept.put(hashes, stored, before)
        ledger.check()

    def _keeps_gone(self, touched: Mask) -> bool:
        number = self._was_gone()
        return number >= 0 and not touched[number]

    def _hashes(self, touched: Mask) -> Any:
        found = [self.rows[HASH].to_numpy()[touched[self._of_rows]]]
        if self.held is not None:
            found.append(self.held[HASH].to_numpy()[touched[self._numbers[: self._kept]]])
        return sorted_distinct(np.concatenate(found))

    def _stored(self, rows: pl.DataFrame, *, deleted: bool) -> pl.DataFrame:
        return rows.with_columns(pl.lit(value=False).alias(SPOILT), pl.lit(deleted).alias(DELETED))

    def _deleted_row(self, change: int, source: int) -> pl.DataFrame:
        """Return the row that was deleted last, with its deletion as the cause."""
        if source < self._kept:
            assert self.held is not None
            row = self.held[source : source + 1]
        else:
            at = source - self._kept
            row = self.rows[at : at + 1]
        causes = self.rows[change : change + 1]
        return self._stored(row.with_columns(causes[name] for name in CAUSES), deleted=True)

    def _changes(self, touched: Mask, live: Int64s) -> pl.DataFrame | None:
        names = [*self.columns, TIME]
        parts = [self.rows[live][names].with_columns(pl.lit(1, pl.Int64).alias(WEIGHT))]
        if self.held is not None:
            went = touched[self._numbers[: self._kept]] & ~self.held[DELETED].to_numpy()
            before = filter_rows(self.held, went)[names]
            parts = [before.with_columns(pl.lit(-1, pl.Int64).alias(WEIGHT)), *parts]
        found = concat_present(parts)
        return None if found is None else with_diff(found)
