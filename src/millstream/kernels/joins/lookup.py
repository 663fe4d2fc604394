"""The look-up of each row of a stream in a table as it was when the row arrived.

The inputs are the stream and the table. Of a table made directly of a topic the operator gets the versions,
and keeps of each key the one that counts, by the rule of the table (:mod:`millstream.kernels.tables.upserts`).
Rows and versions of one batch are taken in the order in which they arrived in the log: a row sees the versions
that came before it, or in the same millisecond. Versions without a time of arrival (after a window, or of a
DataFrame) are taken before all rows of the batch, and rows without one after all versions.

Of a derived table come signed changes. They have no time of arrival: those of a batch are applied before its
rows.

A row is emitted in the batch that brought it, as it came, with the columns of the table; so the operator waits
for no watermark. Of two topics the order of arrival is that of their clocks, and a batch takes of each what
is there: read again, a row may see another version. The as-of join does not depend on that.

Source: Kafka Streams, KStream-KTable join.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.changes import concat_present, consolidate, total_weight, with_weight
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import ARRIVED, DELETED, DIFF, HASH, ROWS, TIME, WEIGHT
from millstream.kernels.joins.asof_join import AsofKind
from millstream.kernels.joins.asof_match import (
    key_numbers,
    last_before,
    taken,
    with_match,
    without_deletions,
)
from millstream.kernels.joins.join_input import JoinedColumns
from millstream.kernels.joins.join_operator import JoinOperator
from millstream.kernels.joins.versions import TIE, row_order, with_deletions
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.pass_through import in_arrival_order
from millstream.kernels.state.arrangement import Arrangement
from millstream.kernels.state.hash_order import last_of_key, sorted_distinct
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.keyhash import Hashes, hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState

_FIRST = np.iinfo(np.int64).min
LAST_ARRIVED = np.iinfo(np.int64).max
_HELD = "__held"  # Boolean: the row is in state
_RANK = "__rank"  # UInt32: which of two versions of a key is the later one
_STEP = "__step"  # UInt32: in which order versions arrived
_FAMILY = "table"


@dataclass(frozen=True)
class Lookup(JoinOperator):
    """The operator of a look-up.

    ``signed``: of the table come signed changes, and not versions. ``by_offset``: of two versions of a key
    that counts which is later in the log, and not that with the later event time.
    """

    name: str
    how: AsofKind
    columns: JoinedColumns
    signed: bool = False
    by_offset: bool = False
    nulls_equal: bool = False

    @property
    def transparent(self) -> bool:
        return True

    @property
    def ordered(self) -> bool:
        return True

    def columns_read(self, number: int) -> set[str]:
        return self.columns.right.columns_read if number else set(self.columns.left.on)

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int) -> Prepared:
        """Take rows as they are, with their keys; of the table keys, columns, and what orders it."""
        if not number:
            left = self.columns.left
            keys = [rows[name].alias(key) for name, key in zip(left.on, left.keys, strict=True)]
            return Prepared(_arrived(rows, LAST_ARRIVED).hstack(keys))
        if self.signed:
            prepared = with_weight(self.columns.right.project(rows, (TIME, DIFF)))
        else:
            prepared = self._versions(rows)
        return Prepared(prepared) if self.nulls_equal else self.without_null_keys(prepared)

    def _versions(self, rows: pl.DataFrame) -> pl.DataFrame:
        right = self.columns.right
        versions = _arrived(right.project(rows, (TIME, ARRIVED, DELETED)), _FIRST)
        versions = with_deletions(versions.hstack([row_order(rows)]), right.names)
        return versions[[*right.keys, *right.names, TIME, ARRIVED, TIE, DELETED]]

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Emit the rows with what the table had when they arrived; keep how the table changes."""
        result = OperatorResult(counts=Counter())
        rows = in_arrival_order(inputs[0]) if inputs.get(0) else None
        changes = concat_present(inputs.get(1, ()))
        changes = None if changes is None else self.hashed(changes, context.seed)
        table = self.table_of(state, rows, changes, context)
        result.counts.update(held=0 if changes is None else changes.height)
        if rows is not None:
            result.rows = self._looked_up(rows, table)
            result.counts.update(
                emitted=result.rows.height, filtered=rows.height - result.rows.height
            )
        return result

    def table_of(
        self,
        state: OperatorState,
        rows: pl.DataFrame | None,
        changes: pl.DataFrame | None,
        context: BatchContext,
    ) -> pl.DataFrame | None:
        """Apply a batch to the table; return what it has, and had meanwhile, of the keys of rows."""
        touched = [] if rows is None else [hash_columns(rows, self.by, context.seed)]
        touched += [] if changes is None else [changes[HASH].to_numpy()]
        if not touched:
            return None
        hashes = sorted_distinct(np.concatenate(touched))
        if self.signed:
            return _derived_table(self.name, state, hashes, changes)
        return _VersionedTable(self, state, hashes, changes).take()

    def _looked_up(self, rows: pl.DataFrame, table: pl.DataFrame | None) -> pl.DataFrame:
        """Return rows with the columns of the table as it was when each arrived."""
        table = self.or_no_rows(table)
        matches = self.matches(rows, table)
        if self.how == "inner":
            rows, matches = with_match(rows, matches)
        return rows.drop(*self.by).hstack(taken(table, self.columns.right.names, matches))

    def or_no_rows(self, table: pl.DataFrame | None) -> pl.DataFrame:
        """Return the table, which has no rows where there is none."""
        if table is not None:
            return table
        hidden = {ARRIVED: pl.Int64(), _STEP: pl.UInt32(), DELETED: pl.Boolean()}
        return self.columns.right.empty(**hidden)

    def matches(self, rows: pl.DataFrame, table: pl.DataFrame) -> Int64s:
        """Return for each row the position of the one that the table had when it arrived, or ``NO_MATCH``."""
        of_rows, of_table = key_numbers(rows, table, self.by, nulls_equal=self.nulls_equal)
        matches = last_before(
            (of_rows, rows[ARRIVED].to_numpy()),
            (of_table, table[ARRIVED].to_numpy(), table[_STEP].cast(pl.Int64).to_numpy()),
            allow_equal=True,
        )
        return without_deletions(matches, table[DELETED])


def _arrived(rows: pl.DataFrame, otherwise: int) -> pl.DataFrame:
    """Return rows with a time of arrival."""
    if ARRIVED in rows.columns:
        return rows
    return rows.with_columns(pl.lit(otherwise, pl.Int64).alias(ARRIVED))


def _derived_table(
    name: str, state: OperatorState, hashes: Hashes, changes: pl.DataFrame | None
) -> pl.DataFrame | None:
    """Apply signed changes; return the rows that the table has of these hashes."""
    kept = Arrangement(state, _FAMILY)
    ledger = StateLedger(name, (kept.runs,))
    held = kept.look_up(hashes)
    if changes is not None:
        ledger.events_in = total_weight(changes)
        held = changes if held is None else pl.concat([held[changes.columns], changes])
        held = consolidate(held)
        kept.add(changes)
    ledger.check()
    if held is None:
        return None
    return held.filter(held[WEIGHT] > 0).with_columns(
        pl.lit(_FIRST, pl.Int64).alias(ARRIVED),
        pl.lit(0, pl.UInt32).alias(_STEP),
        pl.lit(value=False).alias(DELETED),
    )


@dataclass
class _VersionedTable:
    """The versions of some keys in one batch: those held, and those that came."""

    lookup: Lookup
    state: OperatorState
    hashes: Hashes
    changes: pl.DataFrame | None

    def take(self) -> pl.DataFrame | None:
        """Keep the version of each key that counts now; return all that counted during the batch."""
        kept = KeyedRows(self.state, _FAMILY, ROWS)
        ledger = StateLedger(self.lookup.name, (kept.runs,))
        known = kept.get(self.hashes)
        if self.changes is None:
            return None if known is None else self._resting(known)
        # Most keys of a batch's rows have no new version: there is nothing to rank among theirs.
        new = sorted_distinct(self.changes[HASH].to_numpy())
        changed = None if known is None else _with_hashes(known, new)
        tables = [] if changed is None else [changed.drop(ROWS).with_columns(*_HELD_BEFORE)]
        tables.append(self.changes.with_columns(pl.lit(value=False).alias(_HELD)))
        table = self._that_counted(pl.concat(table[tables[0].columns] for table in tables))
        self._keep(kept, changed, table, ledger)
        ledger.check()
        if known is None:
            return table
        resting = filter_rows(known, ~np.isin(known[HASH].to_numpy(), new))
        return pl.concat([self._resting(resting)[table.columns], table])

    def _resting(self, known: pl.DataFrame) -> pl.DataFrame:
        """Return versions that are held, and to which no others came."""
        step = pl.lit(0, pl.UInt32).alias(_STEP)
        return known.drop(ROWS).with_columns(*_HELD_BEFORE, step)

    def _that_counted(self, versions: pl.DataFrame) -> pl.DataFrame:
        """Return the versions that were the latest of their key when they arrived, in that order."""
        keys = list(self.lookup.by)
        by_offset = self.lookup.by_offset
        ranked = versions.sort([TIE] if by_offset else [TIME, TIE], maintain_order=True)
        ranked = ranked.with_row_index(_RANK)
        if by_offset:  # the clock of a log may go back, its offsets do not
            ranked = ranked.with_columns(pl.col(ARRIVED).cum_max().over(keys))
        came = ranked.sort(~ranked[_HELD], ARRIVED, TIE, maintain_order=True).with_row_index(_STEP)
        return came.filter(pl.col(_RANK) == pl.col(_RANK).cum_max().over(keys)).drop(_RANK)

    def _keep(
        self,
        kept: KeyedRows,
        known: pl.DataFrame | None,
        table: pl.DataFrame,
        ledger: StateLedger,
    ) -> None:
        """Keep the last version of the keys that changed, with all others that share their hashes."""
        latest = table.filter(last_of_key(table, self.lookup.by))
        hashes = sorted_distinct(latest.filter(~latest[_HELD])[HASH].to_numpy())
        if not len(hashes):
            return
        stored = _with_hashes(latest, hashes).drop(_HELD, _STEP, ARRIVED)
        if self.lookup.by_offset:
            stored = stored.filter(~stored[DELETED])
        stored = stored.with_columns(pl.lit(1, pl.Int64).alias(ROWS))
        before = None if known is None else _with_hashes(known, hashes)
        ledger.events_in += stored.height
        ledger.events_out += 0 if before is None else before.height
        kept.put(hashes, stored, before)


_HELD_BEFORE = (pl.lit(value=True).alias(_HELD), pl.lit(_FIRST, pl.Int64).alias(ARRIVED))


def _with_hashes(rows: pl.DataFrame, hashes: Hashes) -> pl.DataFrame:
    return filter_rows(rows, np.isin(rows[HASH].to_numpy(), hashes))
