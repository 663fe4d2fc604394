"""Tables of Delta Lake, through delta-rs: a change is one commit, with the marker as its transaction's version.

Every commit is a version that can be read for as long as its files are kept: nothing is vacuumed here. Small files
are made into larger ones after some commits, in a commit of its own.

Source: Delta Lake's protocol, "Transaction Identifiers"; delta-rs, ``DeltaTable.merge``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from millstream.capture.apply.lake import LakeChange
from millstream.errors import ConfigError, RetriableError

COMPACT_COMMITS = 20
_APP = "millstream-apply"
_GONE = "_millstream_deleted"


class DeltaLakeTable:
    """See :class:`millstream.capture.apply.lake.LakeTable`."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def _open(self) -> DeltaTable | None:
        return DeltaTable(self._path) if DeltaTable.is_deltatable(self._path) else None

    def marker(self) -> int:
        found = self._open()
        version = None if found is None else found.transaction_version(_APP)
        return -1 if version is None else int(version)

    def schema(self) -> pa.Schema | None:
        found = self._open()
        return None if found is None else pa.schema(found.schema().to_arrow())

    def rows(self) -> Iterator[pa.RecordBatch]:
        found = self._open()
        if found is not None:
            yield from found.to_pyarrow_dataset().to_batches()

    def apply(self, change: LakeChange) -> None:
        try:
            self._apply(change)
        except CommitFailedError as error:
            raise RetriableError(
                f"the Delta table {self._path} could not be written: {error}. It is tried again."
            ) from error
        except DeltaError as error:
            raise ConfigError(
                f"the Delta table {self._path} refused what was applied: {error}. Correct the table, or apply into a new "
                "folder."
            ) from error

    def _apply(self, change: LakeChange) -> None:
        properties = CommitProperties(app_transactions=[Transaction(_APP, change.marker)])
        found = self._open()
        options: dict[str, Any] = {"commit_properties": properties}
        if found is None:
            write_deltalake(self._path, change.upserts, **options)
        elif change.truncate:
            # Columns that were dropped in the source stay, and are null.
            whole = _with_columns(change.upserts, pa.schema(found.schema().to_arrow()))
            write_deltalake(found, whole, mode="overwrite", schema_mode="merge", **options)
        else:
            self._add_columns(found, change.upserts.schema)
            self._merge(found, change, properties)
        if change.marker % COMPACT_COMMITS == COMPACT_COMMITS - 1:
            DeltaTable(self._path).optimize.compact()

    def _add_columns(self, found: DeltaTable, schema: pa.Schema) -> None:
        """Add columns that are new: in a commit of its own, which a crash may leave alone. They are null."""
        known = {field.name for field in found.schema().fields}
        new = [field for field in Schema.from_arrow(schema).fields if field.name not in known]
        if new:
            found.alter.add_columns(new)

    def _merge(self, found: DeltaTable, change: LakeChange, properties: CommitProperties) -> None:
        key = change.columns.table.key
        names = change.upserts.schema.names
        gone = pa.schema([*change.upserts.schema.remove_metadata(), pa.field(_GONE, pa.bool_())])
        source = pa.concat_tables(
            [
                change.upserts.append_column(_GONE, pa.array([False] * len(change.upserts))),
                _with_columns(change.deletes, change.upserts.schema).append_column(
                    _GONE, pa.array([True] * len(change.deletes))
                ),
            ],
            promote_options="permissive",
        )
        source = pa.table(source.columns, names=gone.names)
        same = " AND ".join(f"t.{_quoted(name)} = s.{_quoted(name)}" for name in key)
        values = {_quoted(name): f"s.{_quoted(name)}" for name in names}
        merger = found.merge(
            source,
            same,
            source_alias="s",
            target_alias="t",
            commit_properties=properties,
        )
        (
            merger.when_matched_delete(f"s.{_GONE}")
            .when_matched_update(values)
            .when_not_matched_insert(values, f"NOT s.{_GONE}")
            .execute()
        )


def _with_columns(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows with all columns of a schema; those that they lack are null."""
    columns, fields = [], []
    for one in (*schema, *(one for one in rows.schema if one.name not in schema.names)):
        known = one.name in rows.schema.names
        columns.append(rows.column(one.name) if known else pa.nulls(len(rows), one.type))
        fields.append(pa.field(one.name, columns[-1].type))
    return pa.table(columns, schema=pa.schema(fields))


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
