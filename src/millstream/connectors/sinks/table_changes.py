"""From records to the changes of a table that has been there before: rows that replace those of their key, are added, or deleted.

A row replaces all columns that are the sink's; a field that it lacks is the column's default. With a key, the record's key must be that
of its row: a tombstone has no other, and the order of rows is kept for each key of the topic alone.

Source: ISO/IEC 9075-2 (SQL), MERGE and DEFAULT.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from millstream.choices import did_you_mean
from millstream.connectors.sinks.column_values import ColumnValue, ToColumn
from millstream.connectors.sinks.connector import RefusedRecord, SinkRecord
from millstream.errors import ConfigError

ExtraFields = Literal["refuse", "skip"]
RowKey: TypeAlias = tuple[ColumnValue, ...]
_PARTS = 32  # into which changes are divided when one of them is refused


class ColumnDefault(Enum):
    """What stands for the default of a column that a row lacks."""

    DEFAULT = "default"


DEFAULT = ColumnDefault.DEFAULT


class TableMismatchError(ValueError):
    """A row that has other columns than the table."""


class RowsRefusedError(Exception):
    """The database refuses one of some rows, and has written none of them; the text is its reason."""


@dataclass(frozen=True)
class SinkColumn:
    """A column that the sink writes.

    Attributes:
        type: As the database has it.
        to_column: Makes values of the column; None if there is no way to write it.
        is_required: A row must have it: it is neither null nor has a default.
        is_nullable: Null may be written.
        default: What is written where a row lacks it, as an expression of the database; None if that is null.
        from_key: Makes a value of a record's key, where that is no text.
    """

    name: str
    type: str
    to_column: ToColumn | None
    is_required: bool
    is_nullable: bool
    default: str | None = None
    from_key: Callable[[bytes], ColumnValue] | None = None

    def value_of(self, given: object) -> ColumnValue | None:
        """Return what is written for a value of JSON.

        Raises:
            ValueError: it cannot be written.
        """
        if given is None:
            if not self.is_nullable:
                raise ValueError(f"{self.name} is null, and the column is NOT NULL")
            return None
        if self.to_column is None:
            raise ValueError(
                f"the column {self.name} is of the type {self.type}, which no sink writes"
            )
        try:
            return self.to_column(given)
        except TableMismatchError:
            raise
        except ValueError as error:
            raise ValueError(f"{self.name} ({self.type}): {error}") from None
        except RecursionError:
            raise ValueError(f"{self.name}: its lists and objects are nested too deeply") from None


@dataclass(frozen=True)
class SinkTable:
    """A table, and what of it the sink writes. ``key`` is empty where rows are added."""

    shown: str
    columns: Mapping[str, SinkColumn]
    key: tuple[str, ...]
    extra: ExtraFields

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names, in the order of ``SinkChange.values``."""
        return tuple(self.columns)


class SinkChange(NamedTuple):
    """A row that is written, or deleted where ``values`` is None, by a record. ``key`` is empty where rows are added."""

    partition: int
    offset: int
    key: RowKey
    values: tuple[ColumnValue | ColumnDefault | None, ...] | None


@dataclass
class SinkChanges:
    """The changes of a batch, in its order, and the records that are none. ``mismatch`` is the first row that has other columns."""

    changes: list[SinkChange] = field(default_factory=list)
    refused: list[RefusedRecord] = field(default_factory=list)
    mismatch: str = ""


def table_changes(table: SinkTable, records: Iterable[SinkRecord]) -> SinkChanges:
    """Return what records change in a table."""
    found = SinkChanges()
    for record in records:
        try:
            found.changes.append(_change(table, record))
        except ValueError as error:
            if isinstance(error, TableMismatchError):
                found.mismatch = found.mismatch or str(error)
            found.refused.append(RefusedRecord(record.partition, record.offset, str(error)))
    return found


def refuse_other_table(table: SinkTable, found: SinkChanges) -> None:
    """Raise if the first batch of a new sink has rows, and none of them has columns of the table.

    Raises:
        ConfigError: it is so.
    """
    if found.mismatch and all(change.values is None for change in found.changes):
        raise ConfigError(
            f"no row of the first batch can be written to {table.shown}. The first of them: {found.mismatch}. The table has "
            f"{', '.join(f'{column.name} {column.type}' for column in table.columns.values())}. Correct the table, or give "
            "columns=, key= or extra='skip', and start the sink again: it begins with the same batch."
        )


def _change(table: SinkTable, record: SinkRecord) -> SinkChange:
    if record.row is None and not table.key:
        raise ValueError("it is a tombstone, and rows are added: with key= it would delete one")
    key = _record_key(table, record) if table.key else ()
    values = None if record.row is None else _values(table, record.row, key)
    return SinkChange(record.partition, record.offset, key, values)


def _values(
    table: SinkTable, row: Mapping[str, object], key: RowKey
) -> tuple[ColumnValue | ColumnDefault | None, ...]:
    """Return the values of a row; what it lacks of the key is that of its record."""
    _check_fields(table, row)
    values: list[ColumnValue | ColumnDefault | None] = []
    for name, column in table.columns.items():
        if name in row:
            values.append(column.value_of(row[name]))
        elif name in table.key:
            values.append(key[table.key.index(name)])
        elif column.is_required:
            raise TableMismatchError(
                f"it lacks {name}, and the column is NOT NULL and has no default"
            )
        else:
            values.append(DEFAULT)
    for name, part in zip(table.key, key, strict=True):
        found = values[table.names.index(name)]
        if found != part:
            raise TableMismatchError(
                f"its key is {_shown(key)}, and {name} in its row is {found!r:.60}: the topic must have the key of the table"
            )
    return tuple(values)


def _check_fields(table: SinkTable, row: Mapping[str, object]) -> None:
    if table.extra == "refuse" and not row.keys() <= table.columns.keys():
        extra = min(name for name in row if name not in table.columns)
        raise TableMismatchError(
            f"it has the field {extra!r:.60}, which is no column that is written to {table.shown}."
            f"{did_you_mean(extra, table.names)} With extra='skip' such fields are left out"
        )
    if row.keys().isdisjoint(table.columns):
        raise TableMismatchError(f"it has no field that is a column of {table.shown}")


def _record_key(table: SinkTable, record: SinkRecord) -> RowKey:
    """Return the key of a row, of its record's key: the text of one column, or a JSON object of several.

    Raises:
        ValueError: it is none.
    """
    if record.key is None:
        raise TableMismatchError(
            f"it has no key, and the rows of {table.shown} are replaced and deleted by it"
        )
    if len(table.key) > 1:
        return _object_key(table, record.key)
    column = table.columns[table.key[0]]
    if column.from_key is not None:
        return (column.from_key(record.key),)
    try:
        text = record.key.decode()
    except UnicodeDecodeError:
        raise ValueError("its key is no UTF-8") from None
    try:
        return (column.value_of(text),)  # type: ignore[return-value]  # None is of None alone
    except ValueError as error:
        raise ValueError(f"its key: {error}") from None


def _object_key(table: SinkTable, key: bytes) -> RowKey:
    try:
        found = json.loads(key)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.keys() != set(table.key):
        raise TableMismatchError(
            f"its key is {key[:60]!r}, and the table's has several columns: it must be an object of JSON that has "
            f"{', '.join(table.key)}"
        )
    try:
        parts = tuple(table.columns[name].value_of(found[name]) for name in table.key)
    except ValueError as error:
        raise ValueError(f"its key: {error}") from None
    if None in parts:
        raise ValueError(f"its key has null for a part of {', '.join(table.key)}")
    return parts  # type: ignore[return-value]  # no part is None, as was looked at


def _shown(key: RowKey) -> str:
    return ", ".join(repr(part) for part in key)[:100]


def last_changes(changes: Iterable[SinkChange]) -> list[SinkChange]:
    """Return the changes without those that a later one of their key replaces; all of them where rows are added."""
    last: dict[RowKey, SinkChange] = {}
    added = []
    for change in changes:
        if change.key:
            last.pop(change.key, None)  # so that it is in the place of the later one
            last[change.key] = change
        else:
            added.append(change)
    return added or list(last.values())


def write_divided(
    changes: Sequence[SinkChange], write: Callable[[Sequence[SinkChange]], None]
) -> list[RefusedRecord]:
    """Write changes in their order, and return those that the database refuses.

    Args:
        write: Writes all of some changes, or raises RowsRefusedError and writes none.
    """
    if not changes:
        return []
    try:
        write(changes)
    except RowsRefusedError as error:
        if len(changes) == 1:
            return [RefusedRecord(changes[0].partition, changes[0].offset, str(error))]
        size = -(-len(changes) // _PARTS)
        parts = (changes[first : first + size] for first in range(0, len(changes), size))
        return [one for part in parts for one in write_divided(part, write)]
    return []
