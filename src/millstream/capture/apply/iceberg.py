"""Tables of Apache Iceberg, through pyiceberg and a catalogue in SQLite: a change is one commit, with its marker.

Keys that are deleted or replaced are deleted, and whole rows appended, in one commit. Every snapshot can be read:
none is expired here. After some commits the table's files are written anew as few, in a commit of its own.

Source: Apache Iceberg's specification, "Snapshots"; pyiceberg, ``Transaction``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
)
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, EqualTo, In, IsNaN, Or
from pyiceberg.table import Table

from millstream.capture.apply.applied_table import AppliedTable
from millstream.capture.apply.lake import LakeChange
from millstream.errors import RetriableError

CATALOG = "catalog.db"
COMPACT_COMMITS = 20
_MARKER = "millstream.apply.marker"
_KEYS = 10_000  # in one condition, of keys of one column
_PAIRS = 500  # of keys of several columns, whose condition is a tree
_COMPACT_ROWS_MAX = 5_000_000  # which are read into memory for it


class IcebergLake:
    """The catalogue of a lake. Its tables are ``<schema>.<table>``, as in the source."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        absolute = folder.resolve()
        self.catalog = SqlCatalog(
            "millstream", uri=f"sqlite:///{absolute / CATALOG}", warehouse=absolute.as_uri()
        )

    def table(self, table: AppliedTable) -> IcebergLakeTable:
        """Return a table, which may not be there yet."""
        return IcebergLakeTable(self.catalog, (table.database, table.table))


class IcebergLakeTable:
    """See :class:`millstream.capture.apply.lake.LakeTable`."""

    def __init__(self, catalog: SqlCatalog, name: tuple[str, str]) -> None:
        self._catalog, self._name = catalog, name

    def _open(self) -> Table | None:
        try:
            return self._catalog.load_table(self._name)
        except NoSuchTableError:
            return None

    def marker(self) -> int:
        found = self._open()
        return -1 if found is None else int(found.properties.get(_MARKER, -1))

    def schema(self) -> pa.Schema | None:
        found = self._open()
        return None if found is None else found.schema().as_arrow()

    def rows(self) -> Iterator[pa.RecordBatch]:
        found = self._open()
        if found is not None:
            yield from found.scan().to_arrow_batch_reader()

    def apply(self, change: LakeChange) -> None:
        try:
            self._apply(change)
        except CommitFailedException as error:
            raise RetriableError(
                f"the Iceberg table {'.'.join(self._name)} could not be written: {error}. It is tried again."
            ) from error

    def _apply(self, change: LakeChange) -> None:
        table = self._open() or self._make(change)
        with warnings.catch_warnings():
            # It says that a deletion matched no row: a key that is new has none.
            warnings.filterwarnings("ignore", message="Delete operation did not match any records")
            with table.transaction() as changes:
                with changes.update_schema() as schema:
                    schema.union_by_name(change.upserts.schema)
                if change.truncate:
                    changes.delete(AlwaysTrue())
                else:
                    for condition in _conditions(change):
                        changes.delete(condition)
                if len(change.upserts):
                    changes.append(change.upserts)
                changes.set_properties({_MARKER: str(change.marker)})
        if change.marker % COMPACT_COMMITS == COMPACT_COMMITS - 1:
            self._compact(table.refresh())

    def _make(self, change: LakeChange) -> Table:
        with suppress(NamespaceAlreadyExistsError):
            self._catalog.create_namespace(self._name[0])
        # Without a marker: a crash here leaves an empty table, which the change is given to again.
        return self._catalog.create_table(self._name, change.upserts.schema)

    def _compact(self, table: Table) -> None:
        rows = table.scan().to_arrow() if table.scan().count() <= _COMPACT_ROWS_MAX else None
        if rows is not None:
            table.overwrite(rows)


def _conditions(change: LakeChange) -> Iterator[BooleanExpression]:
    """Yield conditions that together match every key of a change."""
    key = change.columns.table.key
    keys = pa.concat_tables([change.deletes, change.upserts.select(list(key))]).to_pylist()
    size = _KEYS if len(key) == 1 else _PAIRS
    for first in range(0, len(keys), size):
        part = keys[first : first + size]
        if len(key) == 1:
            values = [row[key[0]] for row in part]
            if any(map(_is_nan, values)):  # which is no literal of an expression
                yield IsNaN(key[0])  # type: ignore[call-arg, arg-type]
                values = [value for value in values if not _is_nan(value)]
            if values:
                yield In(key[0], values)  # type: ignore[call-arg, arg-type]
        else:
            yield _any([_all([_equal(name, row[name]) for name in key]) for row in part])


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and value != value  # noqa: PLR0124 - NaN


def _equal(name: str, value: Any) -> BooleanExpression:
    if _is_nan(value):
        return IsNaN(name)  # type: ignore[call-arg, arg-type]
    return EqualTo(name, value)  # type: ignore[call-arg, arg-type]


def _all(conditions: Sequence[BooleanExpression]) -> BooleanExpression:
    return reduce(And, conditions)


def _any(conditions: Sequence[Any]) -> BooleanExpression:
    """Join conditions as a tree, which is not deeper than it must be."""
    if len(conditions) == 1:
        found: BooleanExpression = conditions[0]
        return found
    middle = len(conditions) // 2
    return Or(_any(conditions[:middle]), _any(conditions[middle:]))
