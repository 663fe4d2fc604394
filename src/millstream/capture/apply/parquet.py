"""Tables as Parquet files, merged by key: each row is in one file, and each version of a table is a list of files.

A row belongs to one of the table's buckets, by a hash of its key, and a bucket is one file. A change writes the files
of its buckets anew, and then the manifest, which names the files that are the table. So a table has as many files as
buckets, whatever its history: there is nothing left to compact. Earlier manifests stay, with their files, as versions
of the table.

=========================================  =============================================================
a crash after                              leaves
=========================================  =============================================================
1. files are written and synced            files that no manifest names; the next change removes them
2. the manifest is kept as a version       a version that is not current yet; it is written again
3. the current manifest is replaced        the change, done
4. old versions are removed                some of them; the next change removes the rest
=========================================  =============================================================
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millstream.capture.apply.batch_writer import comparable_key, key_hash
from millstream.capture.apply.lake import LakeChange
from millstream.capture.apply.lake_values import LakeColumns
from millstream.errors import ConfigError, CorruptionError
from millstream.log.files import DISK, replace_file

MANIFEST = "_manifest.json"
VERSIONS = "_versions"
VERSIONS_KEPT = 100
BUCKET_ROWS_MAX = 200_000  # on average; a table that has more gets twice as many buckets
_FORMAT = 1


@dataclass(frozen=True)
class ParquetVersion:
    """A version of a table: its marker, its files, and the number of rows in them. ``files`` are names, by bucket."""

    marker: int
    schema: pa.Schema
    buckets: int
    files: dict[int, str]
    rows: dict[int, int]

    def to_json(self) -> bytes:
        """Return the manifest."""
        described = base64.b64encode(self.schema.serialize().to_pybytes()).decode()
        return json.dumps(
            {
                "format": _FORMAT,
                "marker": self.marker,
                "schema": described,
                "buckets": self.buckets,
                "files": [
                    {"path": self.files[bucket], "bucket": bucket, "rows": self.rows[bucket]}
                    for bucket in sorted(self.files)
                ],
            }
        ).encode()


def read_version(path: Path) -> ParquetVersion:
    """Return the version of a manifest.

    Raises:
        CorruptionError: it is none.
    """
    try:
        found = json.loads(path.read_bytes())
        return ParquetVersion(
            found["marker"],
            pa.ipc.read_schema(pa.py_buffer(base64.b64decode(found["schema"]))),
            found["buckets"],
            {one["bucket"]: one["path"] for one in found["files"]},
            {one["bucket"]: one["rows"] for one in found["files"]},
        )
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise CorruptionError(
            f"{path} is no manifest of an applied table: {error}. Restore it, or apply into a new folder."
        ) from error


def parquet_files(folder: Path | str, version: int | None = None) -> list[str]:
    """Return the paths of the Parquet files that are a table, for any tool that reads Parquet.

    Args:
        folder: The folder of the table: ``<lake>/<schema>.<table>``.
        version: Of which version, by its number; the current one if not given.

    Raises:
        ConfigError: there is no table, or the version is not kept.
    """
    folder = Path(folder)
    path = folder / MANIFEST if version is None else folder / VERSIONS / _version_name(version)
    if not path.exists():
        kept = parquet_versions(folder)
        known = f"the versions {kept[0]} to {kept[-1]} are kept" if kept else "it has no manifest"
        raise ConfigError(f"{folder} has no applied table of that version: {known}.")
    found = read_version(path)
    return [str(folder / found.files[bucket]) for bucket in sorted(found.files)]


def parquet_versions(folder: Path | str) -> list[int]:
    """Return the numbers of the versions of a table that are kept, oldest first."""
    names = sorted(path.stem for path in (Path(folder) / VERSIONS).glob("*.json"))
    return [int(name) for name in names]


def _version_name(version: int) -> str:
    return f"{version:012}.json"


class ParquetTable:
    """See :class:`millstream.capture.apply.lake.LakeTable`."""

    def __init__(
        self, folder: Path, kept: int = VERSIONS_KEPT, bucket_rows_max: int = BUCKET_ROWS_MAX
    ) -> None:
        self._folder, self._kept, self._bucket_rows_max = folder, kept, bucket_rows_max

    def _current(self) -> ParquetVersion | None:
        path = self._folder / MANIFEST
        return read_version(path) if path.exists() else None

    def marker(self) -> int:
        found = self._current()
        return -1 if found is None else found.marker

    def schema(self) -> pa.Schema | None:
        found = self._current()
        return None if found is None else found.schema

    def rows(self) -> Iterator[pa.RecordBatch]:
        found = self._current()
        if found is not None:
            for bucket in sorted(found.files):
                yield from self._read(found, bucket).to_batches()

    def _read(self, version: ParquetVersion, bucket: int) -> pa.Table:
        """Return the rows of a bucket, with the columns that the table has now."""
        if bucket not in version.files:
            return version.schema.empty_table()
        found = pq.read_table(self._folder / version.files[bucket], partitioning=None)
        return _with_schema(found, version.schema)

    def apply(self, change: LakeChange) -> None:
        (self._folder / VERSIONS).mkdir(parents=True, exist_ok=True)
        before = self._current()
        empty = ParquetVersion(-1, change.upserts.schema, 1, {}, {})
        old = before or empty
        schema = _joined(old.schema, change.upserts.schema)
        old = ParquetVersion(old.marker, schema, old.buckets, old.files, old.rows)
        if change.truncate:
            old = ParquetVersion(old.marker, schema, 1, {}, {})
        files, rows = dict(old.files), dict(old.rows)
        buckets = old.buckets
        upserts, deletes = (
            _by_bucket(change.columns, part, buckets) for part in (change.upserts, change.deletes)
        )
        for bucket in sorted({*upserts, *deletes}):
            gone = [part[bucket] for part in (upserts, deletes) if bucket in part]
            kept = _without(self._read(old, bucket), gone, change.columns)
            new = [_with_schema(upserts[bucket], schema)] if bucket in upserts else []
            self._put(change.marker, bucket, pa.concat_tables([kept, *new]), files, rows)
        made = ParquetVersion(change.marker, schema, buckets, files, rows)
        if sum(rows.values()) > buckets * self._bucket_rows_max:
            made = self._divided(made, change.columns)
        self._commit(made)

    def _put(
        self, marker: int, bucket: int, table: pa.Table, files: dict[int, str], rows: dict[int, int]
    ) -> None:
        """Write the file of a bucket: one without rows has none."""
        files.pop(bucket, None)
        rows.pop(bucket, None)
        if len(table):
            files[bucket] = f"{marker:012}-{bucket:05}.parquet"
            rows[bucket] = len(table)
            _write(self._folder / files[bucket], table)

    def _divided(self, version: ParquetVersion, columns: LakeColumns) -> ParquetVersion:
        """Return the version with twice as many buckets; the files of the one given are removed later."""
        buckets = version.buckets * 2
        files: dict[int, str] = {}
        rows: dict[int, int] = {}
        for bucket in version.files:
            for half, table in _by_bucket(columns, self._read(version, bucket), buckets).items():
                files[half] = f"{version.marker:012}-{buckets}-{half:05}.parquet"
                rows[half] = len(table)
                _write(self._folder / files[half], table)
        return ParquetVersion(version.marker, version.schema, buckets, files, rows)

    def _commit(self, made: ParquetVersion) -> None:
        DISK.sync_folder(self._folder)
        replace_file(DISK, self._folder / VERSIONS / _version_name(made.marker), made.to_json())
        replace_file(DISK, self._folder / MANIFEST, made.to_json())
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove versions beyond those that are kept, and the files that no version names."""
        versions = sorted((self._folder / VERSIONS).glob("*.json"))
        for path in versions[: -self._kept]:
            path.unlink()
        named = {
            name for path in versions[-self._kept :] for name in read_version(path).files.values()
        }
        for path in self._folder.glob("*.parquet"):
            if path.name not in named:
                path.unlink()


def _write(path: Path, table: pa.Table) -> None:
    with path.open("wb") as file:
        pq.write_table(table, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())


def _by_bucket(columns: LakeColumns, table: pa.Table, buckets: int) -> dict[int, pa.Table]:
    """Divide rows, or keys, by their buckets."""
    if not len(table):
        return {}
    if buckets == 1:
        return {0: table}
    key = columns.table.key
    places: dict[int, list[int]] = {}
    for place, row in enumerate(columns.decode(table.select(list(key)))):
        bucket = key_hash(comparable_key(columns.table, row)) % buckets
        places.setdefault(bucket, []).append(place)
    return {bucket: table.take(found) for bucket, found in places.items()}


def _without(rows: pa.Table, gone: list[pa.Table], columns: LakeColumns) -> pa.Table:
    """Return rows without those of some keys."""
    key = list(columns.table.key)
    if not len(rows):
        return rows
    keys = pa.concat_tables([one.select(key) for one in gone])
    place = "_millstream_place"
    places: Any = rows.select(key).append_column(place, pa.array(range(len(rows)), pa.int64()))
    kept = places.join(keys, keys=key, join_type="left anti").column(place)
    return rows.take(kept.combine_chunks().sort())


def _joined(first: pa.Schema, second: pa.Schema) -> pa.Schema:
    """Return the columns of both."""
    return pa.schema([*first, *(one for one in second if one.name not in first.names)])


def _with_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = [
        table.column(one.name) if one.name in table.schema.names else pa.nulls(len(table), one.type)
        for one in schema
    ]
    return pa.table(columns, schema=schema)
