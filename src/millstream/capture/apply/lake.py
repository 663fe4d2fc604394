"""Lakes as targets: a folder with a table for each captured table, and beside them the state, with a redo log.

Formats of lakes commit one table at a time. So a batch is first written down as a whole, and then each table takes
its part, with a marker that says which batch it has:

=========================================  =============================================================
a crash after                              leaves
=========================================  =============================================================
1. the batch's files are written, synced   files that no state names; the next batch overwrites them
2. the state is replaced; it names them    the batch, committed: the next run gives it to the tables
3. some tables have committed              the same; those that have the marker are passed over
4. all tables have                         the same; there is nothing left to do
=========================================  =============================================================

A table always is as after whole transactions, and tables may be some moments apart. The lock of the folder is held
as long as the target is open, so nobody else writes. What a key was replaced by earlier in a batch is held in memory.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import ipc

from millstream.capture.apply.applied_table import AppliedTable, Row, RowBatch
from millstream.capture.apply.batch_writer import comparable_key
from millstream.capture.apply.lake_values import LakeColumns
from millstream.capture.apply.table_notes import note_of, table_from_note
from millstream.errors import ConfigError, ConflictError, CorruptionError, RetriableError
from millstream.log.files import DISK, replace_file

FOLDER = "_millstream"
BATCH_S = 10.0  # each commit of a table costs files, so a batch gathers for a while


@dataclass(frozen=True)
class LakeChange:
    """The part of a batch that is of one table. ``marker`` rises from batch to batch."""

    marker: int
    columns: LakeColumns
    truncate: bool
    upserts: pa.Table
    deletes: pa.Table


class LakeTable(Protocol):
    """A table of a lake, in one of the formats."""

    def marker(self) -> int:
        """Return the marker of the last change; -1 where there is no table."""

    def schema(self) -> pa.Schema | None:
        """Return the schema; None where there is no table."""

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows; none where there is no table."""

    def apply(self, change: LakeChange) -> None:
        """Commit a change with its marker, at once. The table is made, or gets new columns, if need be."""


@dataclass
class _Pending:
    """What a batch has done to a table so far."""

    table: AppliedTable
    truncate: bool = False
    rows: dict[bytes, Row | None] = field(default_factory=dict)


class LakeTarget:
    """Applies to a lake; see :class:`millstream.capture.apply.target.ApplyTarget` for the methods.

    Args:
        folder: The lake's folder.
        table_of: Returns the table of a name, which may not be there yet.
        as_text: Columns that are kept as text.
    """

    def __init__(
        self,
        folder: Path,
        table_of: Callable[[AppliedTable], LakeTable],
        as_text: frozenset[str] = frozenset(),
        batch_s: float = BATCH_S,
    ) -> None:
        self.shown = str(folder)
        self.batch_s = batch_s
        self._folder = folder / FOLDER
        self._table_of = table_of
        self._as_text = as_text
        self._pending: dict[str, _Pending] = {}
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise RetriableError(
                f"another `millstream apply` or `millstream reconcile` writes to {self.shown}. It is tried again."
            ) from None

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._lock)

    # ── the state ───────────────────────────────────────────────────────────────────────────

    @property
    def _state_path(self) -> Path:
        return self._folder / f"{self._name}.json"

    def acquire(self, name: str, token: str, *, again: bool) -> str | None:  # noqa: ARG002 - the lock is the fence
        self._name = name
        others = [path.stem for path in self._folder.glob("*.json") if path.stem != name]
        if others:
            raise ConfigError(
                f"{self.shown} has the tables of the capture {others[0]!r}. Apply {name!r} into another folder."
            )
        self._marker, state = -1, None
        if self._state_path.exists():
            try:
                found = json.loads(self._state_path.read_bytes())
                self._marker, state, redo = found["marker"], found["state"], found["redo"]
            except (ValueError, KeyError, TypeError) as error:
                raise CorruptionError(
                    f"{self._state_path} is no state of `millstream apply`: {error}. Restore the folder, or apply into a "
                    "new one."
                ) from error
            self._roll_forward(redo)
        return state

    def _roll_forward(self, redo: Sequence[dict[str, Any]]) -> None:
        """Give the last batch to the tables that do not have it."""
        for number, noted in enumerate(redo):
            table = table_from_note(noted["table"])
            if self._table_of(table).marker() < self._marker:
                columns = LakeColumns(table, self._as_text)
                upserts, deletes = (self._read(number, part) for part in ("upserts", "deletes"))
                truncate = noted["truncate"]
                self._give(LakeChange(self._marker, columns, truncate, upserts, deletes))

    def _read(self, number: int, part: str) -> pa.Table:
        with ipc.open_file(self._redo_path(number, part)) as file:
            return file.read_all()

    def _redo_path(self, number: int, part: str) -> Path:
        return self._folder / f"{self._name}-{number}-{part}.arrow"

    # ── a batch ─────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        self._pending.clear()

    def rollback(self) -> None:
        self._pending.clear()

    def commit(self, state: str) -> None:
        self._refuse_older_state()
        marker, changes = self._marker + 1, []
        for pending in self._pending.values():
            columns = LakeColumns(pending.table, self._as_text)
            upserts = columns.encode([row for row in pending.rows.values() if row is not None])
            gone = [json.loads(key) for key, row in pending.rows.items() if row is None]
            keys = [dict(zip(pending.table.key, key, strict=True)) for key in gone]
            deletes = columns.encode(keys, columns.key_schema())
            changes.append(LakeChange(marker, columns, pending.truncate, upserts, deletes))
        # 1. The batch, as a whole.
        for number, change in enumerate(changes):
            _write(self._redo_path(number, "upserts"), change.upserts)
            _write(self._redo_path(number, "deletes"), change.deletes)
        # 2. The state, which names it.
        redo = [
            {"table": note_of(change.columns.table), "truncate": change.truncate}
            for change in changes
        ]
        noted = {"marker": marker, "state": state, "redo": redo}
        replace_file(DISK, self._state_path, json.dumps(noted).encode())
        self._marker = marker
        # 3. The tables.
        for change in changes:
            self._give(change)
        self._pending.clear()

    def _refuse_older_state(self) -> None:
        """Return if no table has a later batch than the state: that is always written first.

        Raises:
            ConflictError: one has.
        """
        for pending in self._pending.values():
            if self._table_of(pending.table).marker() > self._marker:
                raise ConflictError(
                    f"{pending.table.collection} of {self.shown} has later batches than {self._state_path}, which was set "
                    "back to an older copy. Restore the whole folder, or apply into another one."
                )

    def _give(self, change: LakeChange) -> None:
        try:
            self._table_of(change.columns.table).apply(change)
        except (OSError, pa.ArrowException) as error:
            raise RetriableError(
                f"{change.columns.table.collection} of {self.shown} could not be written: {error}. It is tried again."
            ) from error

    def define(self, table: AppliedTable, before: AppliedTable | None) -> None:
        pending = self._pending.get(table.collection)
        lake = self._table_of(table)
        there = lake.schema()
        if there is not None and before is None:
            # With a marker it is of a state that is gone, and would pass over batches of a new one.
            by_whom = "`millstream apply` has not written"
            if lake.marker() >= 0:
                by_whom = (
                    f"{self._state_path} does not know: its state is gone, or of an older copy"
                )
            raise ConfigError(
                f"{self.shown} has a table {table.collection} that {by_whom}. Apply into another folder."
            )
        emptied = pending is not None and pending.truncate and not pending.rows
        wanted = LakeColumns(table, self._as_text).schema
        differing = [] if there is None else _differing(there, wanted)
        rekeyed = before is not None and before.key != table.key
        if (differing or rekeyed) and not emptied:
            what = ", ".join(differing) or f"its key, which is {', '.join(table.key)} now"
            raise ConfigError(
                f"{table.collection} of {self.shown} differs from its definition in the source in {what}, and lakes keep "
                "their types. Apply into a new folder, from the beginning."
            )
        if differing and emptied:
            raise ConfigError(
                f"{table.collection} of {self.shown} differs from its definition in the source in "
                f"{', '.join(differing)}, and what it was before is kept. Apply into a new folder, from the beginning."
            )
        self._pending_of(table).table = table

    def _pending_of(self, table: AppliedTable) -> _Pending:
        return self._pending.setdefault(table.collection, _Pending(table))

    def truncate(self, table: AppliedTable) -> None:
        self._pending[table.collection] = _Pending(table, truncate=True)

    def write(self, batch: RowBatch) -> None:
        pending = self._pending_of(batch.table)
        pending.table = batch.table
        for key in batch.deletes:
            pending.rows[_key(batch.table, key)] = None
        for row in batch.upserts:
            pending.rows[_key(batch.table, row)] = row

    def rows(self, table: AppliedTable, keys: Sequence[Row]) -> Iterator[Row]:
        pending = self._pending.get(table.collection, _Pending(table))
        wanted = {_key(table, key): key for key in keys}
        for key in list(wanted):
            if key in pending.rows:
                del wanted[key]
                row = pending.rows[key]
                if row is not None:
                    yield {**dict.fromkeys(table.types), **row}
        if wanted and not pending.truncate:
            yield from self._stored(table, wanted)

    def _stored(self, table: AppliedTable, wanted: dict[bytes, Row]) -> Iterator[Row]:
        """Yield the rows of some keys, as they were before the batch."""
        columns = LakeColumns(table, self._as_text)
        first = table.key[0]
        keys = columns.encode(list(wanted.values()), columns.key_schema()).column(first)
        for batch in self._table_of(table).rows():
            near = batch.filter(
                pc.is_in(batch.column(first), keys.cast(batch.schema.field(first).type))
            )
            for row in columns.decode(near):
                if _key(table, row) in wanted:
                    yield row

    def scan(self, table: AppliedTable) -> Iterator[Row]:
        columns = LakeColumns(table, self._as_text)
        for batch in self._table_of(table).rows():
            yield from columns.decode(batch)


def _key(table: AppliedTable, row: Row) -> bytes:
    return comparable_key(table, row)


def _differing(there: pa.Schema, wanted: pa.Schema) -> list[str]:
    """Return the columns that are of another type. Formats may widen how long texts can be."""
    return [
        one.name
        for one in wanted
        if one.name in there.names and _plain(there.field(one.name).type) != _plain(one.type)
    ]


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    return kind


def _write(path: Path, table: pa.Table) -> None:
    with path.open("wb") as file:
        with ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        file.flush()
        os.fsync(file.fileno())
