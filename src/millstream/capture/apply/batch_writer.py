"""Changes of transactions into the last state of each key, which a target writes.

Changes of a table are gathered, over transactions, up to a number of rows. Then each key is written once, as it is
after the last of them. A column that the source did not give keeps its value: that of an earlier change, or else of
the row in the target, which is read for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from millstream.capture.apply.applied_table import AppliedTable, Row, RowBatch
from millstream.capture.apply.captured_types import comparable
from millstream.capture.apply.change_record import AppliedChange, key_row
from millstream.capture.apply.table_versions import TableVersions
from millstream.capture.apply.target import ApplyTarget
from millstream.capture.envelope import to_json
from millstream.errors import ConfigError, ConflictError

# What makes the source log whole rows, so that compaction takes no value.
_WHOLE_ROWS = {
    "postgresql": "Give the table REPLICA IDENTITY FULL, or capture it",
    **dict.fromkeys(
        ("mariadb", "mysql"),
        "Have the sessions that change it leave binlog_row_image as FULL, or capture it",
    ),
}
GATHERED_MAX = 10_000  # changes of all tables that are held in memory


@dataclass
class BatchWriter:
    """Writes changes to a target, within one of its batches.

    ``tables`` are those that the target has, by their names in the log, as they were defined there.
    """

    target: ApplyTarget
    versions: TableVersions
    tables: dict[str, AppliedTable]
    gathered_max: int = GATHERED_MAX
    changes: int = 0
    _gathered: dict[str, list[AppliedChange]] = field(default_factory=dict)
    _count: int = 0

    def apply(self, changes: Iterable[AppliedChange]) -> None:
        """Take the changes of a transaction, in their order.

        Raises:
            ConfigError: a table has no key, or cannot be as it is defined.
            ConflictError: the value of a column is nowhere.
        """
        for change in changes:
            self.changes += bool(change.op)
            if change.op == "t":
                self._truncate(change.collection)
                continue
            if change.key is None:
                raise ConfigError(
                    f"{change.collection} has no key, so its rows cannot be told apart. Name the tables to apply "
                    "(--tables) without it; or give it a primary key, and capture it under another name."
                )
            # Never between the two halves of a change of the key: the second may need what the first deletes.
            if self._count >= self.gathered_max and change.carry_from is None:
                self.flush()
            if change.after is not None:
                self._define(change)
            elif change.collection not in self.tables:
                continue  # a deletion from a table that never had a row here
            self._gathered.setdefault(change.collection, []).append(change)
            self._count += 1

    def flush(self) -> None:
        """Write what was gathered."""
        for collection in list(self._gathered):
            self._flush_table(collection)

    def _define(self, change: AppliedChange) -> None:
        """Have the table as it was defined for this row."""
        assert change.after is not None
        columns = (*change.after, *change.unavailable)
        table = self.versions.of_row(change.collection, columns)
        known = self.tables.get(change.collection)
        if known is table:
            return
        if known is None or known != table:
            self._flush_table(change.collection)
            self.target.define(table, known)
        self.tables[change.collection] = table

    def _truncate(self, collection: str) -> None:
        self._count -= len(self._gathered.pop(collection, ()))
        if collection in self.tables:
            self.target.truncate(self.tables[collection])

    def _flush_table(self, collection: str) -> None:
        changes = self._gathered.pop(collection, None)
        if not changes:
            return
        self._count -= len(changes)
        table = self.tables[collection]
        last = _Fold(table, self._base_rows(table, changes)).fold(changes)
        upserts = [row for row in last.values() if row is not None]
        deletes = [key_row(key) for key, row in last.items() if row is None]
        self.target.write(RowBatch(table, upserts, deletes))

    def _base_rows(self, table: AppliedTable, changes: list[AppliedChange]) -> dict[bytes, Row]:
        """Return the rows of the target, by key, from which changes may need the value of a column."""
        needed = {one.carry_from or one.key for one in changes if one.unavailable}
        keys = [key_row(key) for key in needed if key is not None]
        found = self.target.rows(table, keys) if keys else ()
        return {comparable_key(table, row): row for row in found}


def comparable_key(table: AppliedTable, row: Row) -> bytes:
    """Return the key of a row in the one form that it has in all databases."""
    return to_json([comparable(table.types[name], row[name]) for name in table.key])


def key_hash(key: bytes) -> int:
    """Return a number that keys are divided by, the same in every process."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


@dataclass
class _Fold:
    """The last state of each key of a table: a row, or None where it is gone."""

    table: AppliedTable
    base: dict[bytes, Row]
    last: dict[bytes, Row | None] = field(default_factory=dict)
    deleted: tuple[bytes | None, Row | None] = (None, None)

    def fold(self, changes: list[AppliedChange]) -> dict[bytes, Row | None]:
        for change in changes:
            key = change.key
            assert key is not None
            if change.after is None:
                self.deleted = (key, self._known(key))
                self.last[key] = None
            elif change.unavailable:
                self.last[key] = self._completed(change)
            else:
                self.last[key] = change.after
        return self.last

    def _known(self, key: bytes) -> Row | None:
        if key in self.last or not self.base:
            return self.last.get(key)
        return self.base.get(comparable_key(self.table, key_row(key)))

    def _completed(self, change: AppliedChange) -> Row:
        """Return the row with the columns that the change does not give."""
        assert change.after is not None
        key = change.carry_from or change.key
        assert key is not None
        row = self._known(key)
        if change.carry_from is not None and self.deleted[0] == key:
            row = self.deleted[1]
        if row is None or any(name not in row for name in change.unavailable):
            raise ConflictError(
                f"the row {key.decode()} of {change.collection} has no value for {', '.join(change.unavailable)} in the "
                "log any more: a change that left it as it was is all that compaction kept. "
                f"{_WHOLE_ROWS.get(self.table.connector, 'Capture it')} with --cleanup delete, under another name."
            )
        return {**change.after, **{name: row[name] for name in change.unavailable}}
