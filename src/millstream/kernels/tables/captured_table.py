"""A table of captured changes: what each record does to its key's row, or to several, one after the other.

The rows are those of :mod:`millstream.kernels.decode.captured`. They are applied in the order of their versions:

``(commit, total, order)``  of a record in a transaction: the place of the transaction's END, that of the record in
                            the transaction, and that in the log
``(-1, -1, order)``         where transactions are not known: the place in the log

With transactions (:mod:`millstream.kernels.tables.transactions`), rows wait until it is said that their transaction
is complete; a record outside of any, until all before it in its partition are applied, whose greatest version it
takes over. So versions come in order, but for such records of other partitions, and what is older than
the row of its key, or than the last truncate, changes nothing.

A value that a record leaves out is that of the row that it replaces, or of the row that ``move`` and
``carry`` name. Without one, or if a record in between could not be read, the record is a dead letter. The
row that was deleted last stays in state, so that the next record can carry values over from it.

All rows of a table are in one bucket, because a record may concern several keys. The result are signed changes, or
(``versions``) every row that counted for a time, and deletions, in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from millstream.errors import UserCodeError
from millstream.kernels.arrays import Int64s
from millstream.kernels.changes import concat_present, group_numbers, with_diff
from millstream.kernels.columns import filter_rows
from millstream.kernels.decode.captured import TOTAL, TRANSACTION, UNAVAILABLE
from millstream.kernels.errors.dead_letter_collector import FailedRows
from millstream.kernels.frames import (
    ARRIVED,
    DELETED,
    HASH,
    KIND,
    ORDER,
    ROWS,
    SPLIT,
    TIME,
    WATERMARK_SEEN,
    WEIGHT,
    nulls_like,
)
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.operator_base import OperatorBase
from millstream.kernels.queryable import KeyColumns, QueryKeys, held_by_key
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.keyhash import Hashes, hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.tables.plain_changes import (
    CAUSES,
    GONE,
    OFFSET_BITS,
    SPOILT,
    TRUNCATED,
    PlainChanges,
)
from millstream.kernels.tables.waiting_changes import COMMIT, NEW, PLACE, WaitingChanges

_FAMILY = "rows"
_PASSED = (SPLIT, WATERMARK_SEEN, ARRIVED)
NO_ROW = "and there is no row to keep it from"
OUTDATED = "and the record before it could not be read, so the row may have another"

Version = tuple[int, int, int]


@dataclass(frozen=True)
class CapturedTable(OperatorBase):
    """The operator. Its inputs are the rows and, with ``transactions``, what those say of table ``number``.

    ``by`` is nothing, so all rows are in one bucket; ``key`` is the table's key, ``columns`` are all with their types.
    """

    name: str
    key: tuple[str, ...]
    columns: tuple[tuple[str, pl.DataType], ...]
    transactions: bool = False
    versions: bool = False
    number: int = 0
    by: tuple[str, ...] = ()

    @property
    def transparent(self) -> bool:
        return self.versions

    @property
    def ordered(self) -> bool:
        return True

    def columns_read(self, number: int) -> set[str]:
        if number:
            return {"table", "transaction", "partition", "floor", "commit", "total"}
        return {name for name, _ in self.columns}

    # ── what is held between batches ────────────────────────────────────────────────────────

    @property
    def query_key(self) -> KeyColumns | None:
        return tuple((name, dict(self.columns)[name]) for name in self.key)

    def current_rows(
        self,
        state: OperatorState,
        keys: QueryKeys | None,
        watermark_us: int,  # noqa: ARG002 - it goes by transactions
    ) -> pl.DataFrame:
        """Return the rows of the table."""
        held = held_by_key(KeyedRows(state, _FAMILY, ROWS), keys, self.key)
        if held is None:
            return pl.DataFrame(schema=dict(self.columns))
        return held.filter(~held[DELETED])[[name for name, _ in self.columns]]

    # ── what was given out ──────────────────────────────────────────────────────────────────

    @property
    def row_key(self) -> tuple[str, ...]:
        return self.key

    @property
    def rows_family(self) -> str:
        return _FAMILY

    def given_out(self, state: OperatorState, rows_max: int) -> Iterator[pl.DataFrame]:
        """Yield the rows of the table. What waits for its transaction was not given out."""
        for rows in KeyedRows(state, _FAMILY, ROWS).parts(rows_max):
            there = rows.filter(~rows[DELETED])[[*dict(self.columns), TIME]]
            yield with_diff(there.with_columns(pl.lit(1, pl.Int64).alias(WEIGHT)))

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int) -> Prepared:
        """Leave out what changes nothing in the table."""
        if number:
            own = rows.filter(rows["table"].is_null() | (rows["table"] == self.number))
            counts = {"filtered": rows.height - own.height, "held": own.height}
            return Prepared(own, counts=counts)
        kept = rows.filter(rows[KIND] != "mark")
        passed = [name for name in _PASSED if self.versions and name in rows.columns]
        hidden = [TIME, ORDER, KIND, UNAVAILABLE, TRANSACTION, TOTAL, *passed]
        named = [name for name, _ in self.columns]
        return Prepared(kept[[*named, *hidden]], counts={"filtered": rows.height - kept.height})

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Apply the rows that came or waited no longer; return how the table changes."""
        result = OperatorResult(counts=Counter())
        came = concat_present(inputs.get(0, ()))
        count = 0 if came is None else came.height
        rows = self._due(state, came, concat_present(inputs.get(1, ())), result)
        if rows is None:
            result.counts.update(held=count - result.counts["duplicate"])
            return result
        order = (COMMIT, PLACE, ORDER, rows[KIND] == "upsert")  # behind what carries over to it
        rows = rows.sort(order, maintain_order=True)
        rows = rows.hstack([pl.Series(HASH, hash_columns(rows, self.key, context.seed))])
        if (
            not self.versions
            and PlainChanges.may_be(rows)
            and self._apply_plain(state, rows, result)
        ):
            result.counts.update(held=count - result.counts["duplicate"])
            return result
        batch = _CapturedBatch(self, state, rows)
        batch.apply()
        result.rows, result.failed = batch.output(), batch.failed()
        dead = sum(batch.is_new(at) for at in batch.dead)
        emitted = sum(batch.is_new(at) for at in batch.emitting) if self.versions else 0
        exit_ = "filtered" if self.versions else "held"
        result.counts.update(
            {
                "dead": dead,
                "emitted": emitted,
                exit_: count - dead - emitted - result.counts["duplicate"],
            }
        )
        return result

    def _apply_plain(
        self, state: OperatorState, rows: pl.DataFrame, result: OperatorResult
    ) -> bool:
        """Apply rows at once; return whether that could be done."""
        kept = KeyedRows(state, _FAMILY, ROWS)
        held = held_of(kept, state, rows)
        names = tuple(name for name, _ in self.columns)
        changes = PlainChanges(
            self.name, self.key, names, rows, held, state.values, self.transactions
        )
        if not changes.is_plain():
            return False
        result.rows = changes.apply(kept)
        return True

    def _due(
        self,
        state: OperatorState,
        came: pl.DataFrame | None,
        decided: pl.DataFrame | None,
        result: OperatorResult,
    ) -> pl.DataFrame | None:
        """Return the rows to apply now, with their versions."""
        if self.transactions:
            waiting = WaitingChanges(state, self.name)
            due = waiting.take(came, decided)
            result.gauges["rows_waiting"] = float(waiting.rows)
            result.counts.update(duplicate=waiting.duplicates)
            return due
        if came is None:
            return None
        none = pl.lit(-1, pl.Int64)
        return came.drop(TRANSACTION, TOTAL).with_columns(
            none.alias(COMMIT), none.alias(PLACE), pl.lit(value=True).alias(NEW)
        )


def held_of(kept: KeyedRows, state: OperatorState, rows: pl.DataFrame) -> pl.DataFrame | None:
    """Return the rows of state that share a hash with these, and the one that was deleted last."""
    hashes = rows[HASH].to_numpy()
    if GONE in state.values:
        hashes = np.append(hashes, np.uint64(state.values[GONE]))
    return kept.get(sorted_distinct(hashes))


@dataclass
class _Entry:
    """The row of a key: where its values are, and which row is the cause of it, by their places.

    ``filled``: where the values of some columns are instead. ``deleted``: it is no longer in the table.
    """

    values: int
    cause: int
    version: Version
    filled: Mapping[str, int] = field(default_factory=dict)
    spoilt: bool = False
    deleted: bool = False

    def place(self, column: str) -> int:
        return self.filled.get(column, self.values)


@dataclass
class _CapturedBatch:
    """The rows of a batch, in the order of their versions, and the rows of the table that they meet."""

    table: CapturedTable
    state: OperatorState
    rows: pl.DataFrame
    entries: dict[int, _Entry] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)
    emitting: dict[int, None] = field(default_factory=dict)
    # What comes out as a version: the row that caused it, the row of the key, and whether that goes.
    out: list[tuple[int, _Entry, bool]] = field(default_factory=list)
    touched: dict[int, None] = field(default_factory=dict)
    before: dict[int, _Entry] = field(default_factory=dict)
    last_deleted: int | None = None  # the key whose row was deleted last, of which the row is kept

    def __post_init__(self) -> None:
        self.kept = KeyedRows(self.state, _FAMILY, ROWS)
        self.ledger = StateLedger(self.table.name, (self.kept.runs,))
        self.truncated: Version = tuple(self.state.values.get(TRUNCATED, (-2, -2, -2)))
        self.carried: tuple[int, _Entry | None] | None = None
        self.held = self._held()
        tables = [self.held, self.rows] if self.held is not None else [self.rows]
        self.every = pl.concat(tables, how="diagonal")
        self.start = 0 if self.held is None else self.held.height
        self.numbers = group_numbers(self.every, self.table.key).tolist()
        self.versions: list[Version] = list(
            zip(*(self.every[name].to_list() for name in _VERSION), strict=True)
        )
        self._begin()

    def _held(self) -> pl.DataFrame | None:
        """Return the rows of state that the batch may touch: all of them, if there is a truncate."""
        if (self.rows[KIND] == "truncate").any():
            return self.kept.scan()
        return held_of(self.kept, self.state, self.rows)

    def _begin(self) -> None:
        if self.held is None:
            return
        flags = zip(self.held[SPOILT].to_list(), self.held[DELETED].to_list(), strict=True)
        for at, (spoilt, deleted) in enumerate(flags):
            entry = _Entry(at, at, self.versions[at], spoilt=spoilt, deleted=deleted)
            self.entries[self.numbers[at]] = entry
            if deleted and not spoilt:
                self.last_deleted = self.numbers[at]
        self.before = dict(self.entries)

    def is_new(self, at: int) -> bool:
        """Whether a row came with this batch."""
        return bool(self.every[NEW][at])

    # ── one row after the other ─────────────────────────────────────────────────────────────

    def apply(self) -> None:
        """Apply all rows, and keep what the table is then."""
        unavailable = self.rows[UNAVAILABLE].to_list()
        for number, kind in enumerate(self.rows[KIND].to_list()):
            at = self.start + number
            if kind == "truncate":
                self._truncate(at)
            elif not self._is_stale(at):
                self._apply_to_key(at, kind, unavailable[number] or ())
        self._keep()

    def _apply_to_key(self, at: int, kind: str, unavailable: Sequence[str]) -> None:
        key = self.numbers[at]
        entry = self.entries.get(key)
        there = entry if entry is not None and not entry.deleted else None
        if kind == "carry":
            self.carried = (at, entry)
        elif kind == "spoil":
            if there is not None:
                self._put(key, replace(there, spoilt=True))
        elif kind == "upsert":
            self._upsert(at, key, there, unavailable)
        else:
            if kind == "move":
                self.carried = (at, there)
            self._delete(at, key, there, moved=kind == "move")

    def _is_stale(self, at: int) -> bool:
        version = self.versions[at]
        entry = self.entries.get(self.numbers[at])
        if entry is not None and not self.table.transactions:
            self._check_partition(at, entry)
        return version < self.truncated or (entry is not None and version < entry.version)

    def _check_partition(self, at: int, entry: _Entry) -> None:
        """Make sure that all rows of a key are in one partition, so that offsets order them."""
        if self.versions[at][2] >> OFFSET_BITS == entry.version[2] >> OFFSET_BITS:
            return
        values = ", ".join(repr(self.every[name][at]) for name in self.table.key)
        raise UserCodeError(
            f"step {self.table.name!r} has records of the key {values} in several partitions, and offsets "
            "order only those of one. Did the topic get more partitions? Say "
            "debezium(transactions=…), which orders them, or reset the app over a topic that is written anew.",
            step=self.table.name,
        )

    def _put(self, key: int, entry: _Entry | None) -> None:
        self.touched[key] = None
        if entry is None:
            self.entries.pop(key, None)
        else:
            self.entries[key] = entry

    def _upsert(self, at: int, key: int, there: _Entry | None, unavailable: Sequence[str]) -> None:
        filled: dict[str, int] = {}
        if unavailable:
            source = there
            if self.carried is not None and self._same_record(self.carried[0], at):
                source = self.carried[1]
            if source is None or source.spoilt:
                why = NO_ROW if source is None else OUTDATED
                self.dead[at] = f"the value of {unavailable[0]!r} is unavailable, {why}"
                return
            filled = {name: source.place(name) for name in unavailable}
        entry = _Entry(at, at, self.versions[at], filled)
        if key == self.last_deleted:
            self.last_deleted = None
        self._put(key, entry)
        self._emit(at, entry, goes=False)

    def _same_record(self, one: int, other: int) -> bool:
        return self.versions[one][2] == self.versions[other][2]

    def _delete(self, at: int, key: int, there: _Entry | None, *, moved: bool) -> None:
        """Take a row away; remember it as the last one. With transactions also remember which keys moved.

        A row that moved away in another partition than its earlier records may come behind the move.
        """
        moved = moved and self.table.transactions
        if there is not None:
            self._emit(at, replace(there, cause=at), goes=True)
        if moved:
            values = at if there is None else there.values
            self._put(key, _Entry(values, at, self.versions[at], spoilt=True, deleted=True))
        elif there is not None:
            self._forget_last_deleted()
            if there.spoilt:
                self._put(key, None)
            else:
                self._put(key, replace(there, cause=at, version=self.versions[at], deleted=True))
                self.last_deleted = key

    def _forget_last_deleted(self) -> None:
        if self.last_deleted is not None:
            self._put(self.last_deleted, None)
        self.last_deleted = None

    def _truncate(self, at: int) -> None:
        version = self.versions[at]
        for key, entry in list(self.entries.items()):
            if entry.version < version:
                self._put(key, None)
                if key == self.last_deleted:
                    self.last_deleted = None
                if not entry.deleted:
                    self._emit(at, replace(entry, cause=at), goes=True)
        self.truncated = max(self.truncated, version)
        self.state.values[TRUNCATED] = list(self.truncated)

    def _emit(self, at: int, entry: _Entry, *, goes: bool) -> None:
        if self.table.versions:
            self.out.append((at, entry, goes))
            self.emitting[at] = None

    # ── what comes of it ────────────────────────────────────────────────────────────────────

    def output(self) -> pl.DataFrame | None:
        """Return the versions, or the changes from the table before to the table after."""
        if self.table.versions:
            return self._versions() if self.out else None
        changes = []
        for entries, other, weight in (
            (self.before, self.entries, -1),
            (self.entries, self.before, 1),
        ):
            changed = [
                entry
                for key in self.touched
                if (entry := entries.get(key)) is not None
                and not entry.deleted
                and not _same_row(entry, other.get(key))
            ]
            rows = self._rows(changed)[[*(name for name, _ in self.table.columns), TIME]]
            changes.append(rows.with_columns(pl.lit(weight, pl.Int64).alias(WEIGHT)))
        changed_rows = concat_present(changes)
        return None if changed_rows is None else with_diff(changed_rows)

    def _versions(self) -> pl.DataFrame:
        rows = self._rows([entry for _, entry, _ in self.out])
        named = [name for name, _ in self.table.columns]
        deleted = pl.Series(DELETED, [goes for _, _, goes in self.out])
        kept = [
            rows[name]
            if name in self.table.key
            else rows[name].zip_with(~deleted, nulls_like(rows[name]))
            for name in named
        ]
        causes = self.every[[at for at, _, _ in self.out]]
        hidden = [name for name in (TIME, ORDER, *_PASSED) if name in causes.columns]
        return pl.DataFrame([*kept, *causes[hidden].get_columns(), deleted])

    def failed(self) -> tuple[FailedRows, ...]:
        """Return the rows that became dead letters."""
        if not self.dead:
            return ()
        rows = self.every[list(self.dead)].drop(SPLIT, strict=False)
        rows = rows[[*(name for name, _ in self.table.columns), ORDER]]
        # So that the letters name the records, which the order does.
        rows = rows.with_columns(pl.lit(0, pl.Int64).alias(SPLIT))
        return (FailedRows(self.table.name, rows, list(self.dead.values())),)

    def _rows(self, entries: Sequence[_Entry]) -> pl.DataFrame:
        """Return the rows of entries, with what they are known by in state."""
        values = np.array([entry.values for entry in entries], np.int64)
        columns = []
        for name, _ in self.table.columns:
            places = values
            if any(name in entry.filled for entry in entries):
                places = np.array([entry.place(name) for entry in entries], np.int64)
            columns.append(_taken(self.every[name], places))
        causes = np.array([entry.cause for entry in entries], np.int64)
        columns += [_taken(self.every[name], causes) for name in CAUSES]
        columns.append(_taken(self.every[HASH], values))
        columns.append(pl.Series(SPOILT, [entry.spoilt for entry in entries], pl.Boolean))
        columns.append(pl.Series(DELETED, [entry.deleted for entry in entries], pl.Boolean))
        return pl.DataFrame(columns)

    def _keep(self) -> None:
        """Keep the rows of the keys that were touched, with all others that share their hashes."""
        if not self.touched:
            self.ledger.check()
            return
        hash_of = dict(zip(self.numbers, self.every[HASH].to_list(), strict=True))
        self.state.values.pop(GONE, None)
        if self.last_deleted is not None:
            self.state.values[GONE] = hash_of[self.last_deleted]
        touched = {hash_of[key] for key in self.touched}
        hashes = np.array(sorted(touched), np.uint64)
        kept = [entry for key, entry in self.entries.items() if hash_of[key] in touched]
        stored = self._rows(kept).with_columns(pl.lit(1, pl.Int64).alias(ROWS))
        before = None if self.held is None else _with_hashes(self.held, hashes)
        self.ledger.events_in += stored.height
        self.ledger.events_out += 0 if before is None else before.height
        self.kept.put(hashes, stored, before)
        self.ledger.check()


_VERSION = (COMMIT, PLACE, ORDER)


def _taken(column: pl.Series, places: Int64s) -> pl.Series:
    # By another name: polars takes a name such as "^a.*$" for a pattern.
    return column.alias("0").gather(places).alias(column.name)


def _same_row(one: _Entry, other: _Entry | None) -> bool:
    """Return whether two entries of a key are one row, as where it was only marked as outdated."""
    return (
        other is not None
        and not other.deleted
        and (one.values, one.cause) == (other.values, other.cause)
    )


def _with_hashes(rows: pl.DataFrame, hashes: Hashes) -> pl.DataFrame:
    return filter_rows(rows, np.isin(rows[HASH].to_numpy(), hashes))
