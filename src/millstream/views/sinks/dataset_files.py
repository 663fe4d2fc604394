"""Writes the Parquet files of a dataset: by its sink on the driver, or by tasks for the sink to commit.

A file counts from when the dataset's manifest names it. Its name is unique to the attempt that writes it, so
attempts never meet, and files that no manifest names are removed by the next run.
"""

from __future__ import annotations

import io
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import quote

import polars as pl

from millstream.errors import EnvironmentProblem, RetriableError, StagedRowsLostError
from millstream.kernels.column_types import of_one_zero
from millstream.kernels.frames import sliced
from millstream.views.retractions import DIFF_COLUMN, with_diff_column
from millstream.views.sinks.dataset_manifest import DataFile
from millstream.views.sinks.dataset_place import DatasetPlace

_FILE_BYTES_MAX = 128 << 20  # in memory; under a URL a file is put in one request
_NAME_BYTES_MAX = 120  # of a column or a value; a file system takes 255 for both
_BEGINNING_BYTES = 60
_HASH_DIGITS = 32
_CUT_ESCAPE = re.compile(r"%[0-9A-F]?$")
_NULL = "__HIVE_DEFAULT_PARTITION__"  # null in Hive's layout


def in_partition_folder(path: str, partition_by: Sequence[str]) -> bool:
    """Return whether a file lies where a dataset with these columns has its files.

    A dataset may lie inside another one's folder, as may a copy of it: their files are not its own.
    """
    *folders, _ = path.split("/")
    return len(folders) == len(partition_by) and all(
        folder.startswith(f"{_folder_component(name)}=")
        for folder, name in zip(folders, partition_by, strict=True)
    )


@dataclass(frozen=True)
class DatasetWriter:
    """Writes files of a dataset, durably. ``stamp`` is what their names have of the place and the run."""

    place: DatasetPlace
    schema: tuple[tuple[str, pl.DataType], ...]
    partition_by: tuple[str, ...]
    stamp: str = ""

    def write(self, rows: pl.DataFrame, batch_id: int) -> list[DataFile]:
        """Write rows, one file per partition, or several of a large one; return what was written."""
        types = {
            **dict(self.schema),
            **({DIFF_COLUMN: pl.Int8()} if DIFF_COLUMN in rows.columns else {}),
        }
        rows = pl.DataFrame({name: rows[name].cast(dtype) for name, dtype in types.items()})
        return [
            self.write_file(part, folder, batch_id)
            for folder, whole in self._partitions(rows)
            for part in sliced(whole, _FILE_BYTES_MAX)
        ]

    def write_file(self, rows: pl.DataFrame, partition: str, batch_id: int) -> DataFile:
        """Write one file of a partition."""
        buffer = io.BytesIO()
        rows.write_parquet(buffer)
        name = f"{batch_id:012}-{self.stamp}{uuid.uuid4().hex[:12]}.parquet"
        path = f"{partition}/{name}" if partition else name
        self.place.put(path, buffer.getvalue())
        return DataFile(path, rows.height, partition, int(rows.estimated_size()))

    def _partitions(self, rows: pl.DataFrame) -> Iterable[tuple[str, pl.DataFrame]]:
        if not self.partition_by:
            return [("", rows)]
        named = pl.DataFrame([rows[c].alias(str(n)) for n, c in enumerate(self.partition_by)])
        named = named.select(_canonical_text(column) for column in named.iter_columns())
        groups = named.with_row_index("at").group_by(named.columns, maintain_order=True)
        return [(self._folder_name(values), rows[group["at"]]) for values, group in groups]

    def _folder_name(self, values: Sequence[Any]) -> str:
        return "/".join(
            f"{_folder_component(name)}={_NULL if value is None else _folder_component(value)}"
            for name, value in zip(self.partition_by, values, strict=True)
        )


@dataclass(frozen=True)
class StagedFiles:
    """What a task has written of a batch: files, with their sizes, and whether they have ``_diff``."""

    files: tuple[DataFile, ...]
    sizes_bytes: tuple[int, ...]
    has_diff: bool

    def check_seen_in(self, place: DatasetPlace) -> None:
        """Make sure that the driver finds what the task has written.

        Raises:
            StagedRowsLostError: it has not.
        """
        for file, size_bytes in zip(self.files, self.sizes_bytes, strict=True):
            found = place.size_bytes(file.path)
            if found != size_bytes:
                raise StagedRowsLostError(
                    f"A task has written {place.address_of(file.path)} with {size_bytes} bytes, and the driver finds "
                    f"{'no such file' if found is None else f'{found}'}. Nothing of the batch was committed there. "
                    "Where executors have a copy of the folder, and not the same one, remove the copies; then run again."
                )


@dataclass(frozen=True)
class DatasetStager:
    """Has tasks write files of a batch; see :class:`millstream.views.staging.Stager`."""

    writer: DatasetWriter
    identity: str
    batch_id: int
    key: None = None

    def is_reachable(self) -> bool:
        """Return whether this process finds the dataset under its address, and may read it."""
        try:
            manifest = self.writer.place.read()
        except (OSError, EnvironmentProblem):
            return False
        return manifest is not None and manifest.identity == self.identity

    def stage(self, rows: pl.DataFrame) -> StagedFiles:
        """Write rows. A crash leaves files that no manifest names."""
        shown = with_diff_column(rows)
        place = self.writer.place
        try:
            files = self.writer.write(shown, self.batch_id)
            sizes = tuple(place.size_bytes(file.path) or 0 for file in files)
        except OSError as error:
            raise RetriableError(
                f"A task could not write to the dataset {place.text}, and nothing of batch "
                f"{self.batch_id} counts: {error}. Free some space or repair the disk, then run again."
            ) from error
        return StagedFiles(tuple(files), sizes, DIFF_COLUMN in shown.columns)


def _canonical_text(column: pl.Series) -> pl.Series:
    """Return the values of a column as texts, the same for equal values."""
    column = of_one_zero(column)
    if column.dtype == pl.Binary:
        return column.bin.encode("hex")
    if isinstance(column.dtype, pl.Datetime | pl.Duration):
        return column.dt.to_string("iso:strict")
    return column.cast(pl.String)


def _folder_component(value: str) -> str:
    """Return a value, or a column's name, as a part of the name of a folder.

    A long text is cut and gets a hash; the column in the files has the whole.
    """
    name = quote(value, safe="")
    if value == _NULL:  # a text that looks like null
        return name.replace("_", "%5F")
    if len(name) <= _NAME_BYTES_MAX:
        return name
    digits = sha256(value.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{_CUT_ESCAPE.sub('', name[:_BEGINNING_BYTES])}+{digits}"
