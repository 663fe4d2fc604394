"""From a stream of rows to a table: of each key the latest row counts, and a deletion removes it.

What comes out are signed changes: the row that was, with -1, and the row that is, with +1. Which of two rows
of a key is later is decided by ``order``:

``time``    the one with the later event time; of equal times, the one that is later in the log
``offset``  the one that is later in the log (by topic, partition, offset), whatever its event time

So the table after all rows is the same however they are divided into batches. A row that is older than the
one held changes nothing.

A deletion is a row with ``__deleted``. By time, an older row may still come after it, so the key stays in
state with the time of its deletion. By offset nothing is left of it, because the key chooses the partition
and a partition is read in order. A key whose rows are found in two partitions stops the job.

With a *ttl* a key is gone once the operator's watermark is above the time of its latest row plus the ttl: its row is
taken back, and nothing is left of it. A latest row for which that is so when it comes removes the key at once. So the
table is a function of the rows that were read and the watermark. By time, whatever comes later and counts for less
than a row that is gone has expired, too; so nothing is remembered of it, and of a deletion neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from millstream.errors import UserCodeError
from millstream.kernels.changes import with_diff
from millstream.kernels.columns import constant, filter_rows
from millstream.kernels.errors.user_code import UnusableRowError
from millstream.kernels.frames import (
    DELETED,
    HASH,
    ORDER,
    RELEASED_TIE,
    ROWS,
    TIME,
    WEIGHT,
    nulls_like,
    visible,
)
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.operator_base import OperatorBase
from millstream.kernels.queryable import KeyColumns, QueryKeys, held_by_key
from millstream.kernels.state.hash_order import last_of_key, sorted_distinct
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.keyhash import Hashes, hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.row_digest import digest_rows
from millstream.kernels.state.timers import Timers, slot_width_us
from millstream.kernels.time.log_order import partitions_of

VersionOrder = Literal["time", "offset"]

_TIE = "__tie"  # Int64: orders rows of one time: the place in the log, or a digest of the row
_PARTITION = "__partition"
_HELD = "__held"  # Boolean: the row is in state
_FAMILY = "rows"


@dataclass(frozen=True)
class Upserts(OperatorBase):
    """The operator that keeps the latest row of each key, and emits how that changes.

    ``by`` is the key; ``columns`` are all columns with their types. ``deleted`` is true of a row that deletes
    its key, as ``__deleted`` is. ``ttl_us``: for how long after its time a row is kept.
    """

    name: str
    by: tuple[str, ...]
    columns: tuple[tuple[str, pl.DataType], ...]
    order: VersionOrder = "time"
    deleted: pl.Expr | None = None
    ttl_us: int | None = None

    @property
    def ordered(self) -> bool:
        return True

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - it has one input
        conditions = set() if self.deleted is None else set(self.deleted.meta.root_names())
        return {name for name, _ in self.columns} | conditions

    # ── what is held between batches ────────────────────────────────────────────────────────

    @property
    def query_key(self) -> KeyColumns | None:
        return tuple((name, dict(self.columns)[name]) for name in self.by)

    def current_rows(
        self,
        state: OperatorState,
        keys: QueryKeys | None,
        watermark_us: int,  # noqa: ARG002 - what has expired is not held
    ) -> pl.DataFrame:
        """Return the rows of the table."""
        held = held_by_key(KeyedRows(state, _FAMILY, ROWS), keys, self.by)
        if held is None:
            return pl.DataFrame(schema=dict(self.columns))
        return held.filter(~held[DELETED])[[name for name, _ in self.columns]]

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Take the columns, the time, the place in the log, and whether the row is a deletion.

        Raises:
            UnusableRowError: the key of a row is null.
        """
        for name in self.by:
            if rows[name].null_count():
                raise UnusableRowError(f"the key {name!r} is null")
        named = [rows[name] for name, _ in self.columns]
        deleted = self._deleted(rows)
        places = [name for name in (ORDER, RELEASED_TIE) if name in rows.columns]
        tie = rows[places[0]] if places else _digest(rows, deleted)
        if deleted.any():
            # What is no longer wanted is not kept.
            named = [
                column if column.name in self.by else column.zip_with(~deleted, nulls_like(column))
                for column in named
            ]
        return Prepared(pl.DataFrame([*named, rows[TIME], tie.alias(_TIE), deleted]))

    def _deleted(self, rows: pl.DataFrame) -> pl.Series:
        deleted = constant(False, rows.height, pl.Boolean, DELETED)
        if DELETED in rows.columns:
            deleted |= rows[DELETED].fill_null(value=False)
        if self.deleted is not None:
            deleted |= self._condition(rows)
        return deleted.alias(DELETED)

    def _condition(self, rows: pl.DataFrame) -> pl.Series:
        assert self.deleted is not None, "there is a condition"
        # Of an expression such as pl.all(), the columns are those of the stream, and no others.
        plain = rows[[name for name, _ in self.columns]]
        true = plain.select(self.deleted.fill_null(value=False)).to_series()
        return true if len(true) == rows.height else true.new_from_index(0, rows.height)

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Return how the table changes with the batch; keep the latest row of each key."""
        result = OperatorResult(counts=Counter())
        kept = KeyedRows(state, _FAMILY, ROWS)
        ledger = StateLedger(self.name, (kept.runs,))
        timers = None if self.ttl_us is None else Timers(state, "ttl", slot_width_us(self.ttl_us))
        rows, touched, due = None, [], _NO_HASHES
        if tables := inputs.get(0, ()):
            rows = pl.concat(tables)
            rows = rows.hstack([pl.Series(HASH, hash_columns(rows, self.by, context.seed))])
            touched.append(rows[HASH].to_numpy())
            result.counts.update(held=rows.height)
        if timers is not None:
            due = timers.due(context.watermark_us - 1)
            touched.append(due)
        hashes = sorted_distinct(np.concatenate(touched)) if touched else _NO_HASHES
        if len(hashes):
            batch = _UpsertBatch(self, kept, hashes, rows, context.watermark_us)
            result.rows = batch.take(ledger, timers, due)
        ledger.check()
        return result

    # ── what was given out ──────────────────────────────────────────────────────────────────

    @property
    def row_key(self) -> tuple[str, ...]:
        return self.by

    @property
    def rows_family(self) -> str:
        return _FAMILY

    def given_out(self, state: OperatorState, rows_max: int) -> Iterator[pl.DataFrame]:
        """Yield the table as far as a bucket has it: the latest row of each key was given out, and nothing else holds."""
        for rows in KeyedRows(state, _FAMILY, ROWS).parts(rows_max):
            yield with_diff(_changes(rows[[*dict(self.columns), TIME, DELETED]], 1))

    def check_partitions(self, rows: pl.DataFrame) -> None:
        """Make sure that all rows of a key are in one partition, so that offsets order them.

        Raises:
            UserCodeError: they are not.
        """
        hashes, partitions = rows[HASH].to_numpy(), partitions_of(rows[_TIE].to_numpy())
        if (partitions == partitions[0]).all():
            return
        order = np.argsort(hashes, kind="stable")
        alike = hashes[order[1:]] == hashes[order[:-1]]
        suspect = order[1:][alike & (partitions[order[1:]] != partitions[order[:-1]])]
        if not len(suspect):
            return
        found = rows.hstack([pl.Series(_PARTITION, partitions)])
        found = _with_hashes(found, sorted_distinct(hashes[suspect]))
        # Numbers for names: polars takes a name such as "^a.*$" for a pattern.
        keys = found[[*self.by, _PARTITION]].rename({k: str(n) for n, k in enumerate(self.by)})
        numbers = keys.columns[:-1]
        spread = keys.group_by(numbers, maintain_order=True).agg(pl.col(_PARTITION).n_unique())
        moved = spread.filter(pl.col(_PARTITION) > 1)
        if moved.height:
            key = ", ".join(repr(value) for value in moved[numbers].row(0))
            raise UserCodeError(
                f"step {self.name!r} has rows of the key {key} in several partitions, and offsets order "
                "only those of one. Did the topic get more partitions, or another key? Say "
                'order="time" for the table, or write the rows to a topic whose key is the table\'s.',
                step=self.name,
            )


_NO_HASHES: Hashes = np.empty(0, np.uint64)


@dataclass
class _UpsertBatch:
    """The rows of some keys in one batch: those held, and those that came."""

    upserts: Upserts
    kept: KeyedRows
    hashes: Hashes
    rows: pl.DataFrame | None
    watermark_us: int

    def take(self, ledger: StateLedger, timers: Timers | None, due: Hashes) -> pl.DataFrame | None:
        """Keep the latest row of each key; return how the table changes. ``due``: whose timers have come."""
        known = self.kept.get(self.hashes)
        tables = []
        if self.rows is not None:
            tables.append(self.rows.with_columns(pl.lit(value=False).alias(_HELD)))
        if known is not None:
            # Behind the new ones, so that of two equal versions the one held stays.
            tables.append(known.drop(ROWS).with_columns(pl.lit(value=True).alias(_HELD)))
        if not tables:
            return None
        every = pl.concat(table[tables[0].columns] for table in tables)
        if self.upserts.order == "offset":
            self.upserts.check_partitions(every)
        version = [TIME, _TIE] if self.upserts.order == "time" else [_TIE]
        every = every.sort(version, maintain_order=True)
        latest = last_of_key(every, self.upserts.by)
        expired = self._expired(every)
        current = every.filter(latest & ~expired)
        new = current.filter(~current[_HELD])
        gone = every.filter(every[_HELD] & (~latest | expired))
        changes = [_changes(gone, -1), _changes(new, 1)]
        changed = pl.concat([table for table in changes if table.height] or changes[:1])
        self._keep(known, current, pl.concat([gone[HASH], new[HASH]]), ledger)
        if timers is not None and self.upserts.ttl_us is not None:
            timed = pl.concat([self._without_timer(new, gone), _with_hashes(current, due)])
            timers.add(timed[TIME].to_numpy() + self.upserts.ttl_us, timed[HASH].to_numpy())
        return with_diff(changed) if changed.height else None

    def _without_timer(self, new: pl.DataFrame, gone: pl.DataFrame) -> pl.DataFrame:
        """Return the new rows that do not replace a row which expires before them, and so has a timer that does.

        That timer is set again, for the row that is there, when it comes. So a key that changes often has one.
        """
        both = pl.concat([new, gone]).sort(TIME, descending=True, maintain_order=True)
        return both.filter(last_of_key(both, self.upserts.by) & ~both[_HELD])

    def _expired(self, rows: pl.DataFrame) -> pl.Series:
        """Return which rows the watermark has passed by more than the ttl."""
        if self.upserts.ttl_us is None:
            return constant(False, rows.height, pl.Boolean)
        return rows[TIME] < self.watermark_us - self.upserts.ttl_us

    def _keep(
        self,
        known: pl.DataFrame | None,
        current: pl.DataFrame,
        changed: pl.Series,
        ledger: StateLedger,
    ) -> None:
        """Keep the current rows of the keys that changed, with all others that share their hashes."""
        hashes = sorted_distinct(changed.to_numpy())
        if not len(hashes):
            return
        stored = _with_hashes(current, hashes).drop(_HELD)
        if self.upserts.order == "offset":
            stored = stored.filter(~stored[DELETED])
        stored = stored.with_columns(pl.lit(1, pl.Int64).alias(ROWS))
        before = None if known is None else _with_hashes(known, hashes)
        ledger.events_in += stored.height
        ledger.events_out += 0 if before is None else before.height
        self.kept.put(hashes, stored, before)


def _changes(rows: pl.DataFrame, weight: int) -> pl.DataFrame:
    there = rows.filter(~rows[DELETED])
    weights = constant(weight, there.height, pl.Int64, WEIGHT)
    return there[[*visible(there.columns), TIME]].hstack([weights])


def _with_hashes(rows: pl.DataFrame, hashes: Hashes) -> pl.DataFrame:
    return filter_rows(rows, np.isin(rows[HASH].to_numpy(), hashes))


def _digest(rows: pl.DataFrame, deleted: pl.Series) -> pl.Series:
    """Return a number by which rows of one time are ordered that have no place in the log."""
    return pl.Series(digest_rows([*(rows[name] for name in visible(rows.columns)), deleted]))
