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
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl

from millstream.errors import RetriableError, StagedRowsLostError
from millstream.kernels.column_types import of_one_zero
from millstream.log.files import DISK, Files, NewFile
from millstream.views.retractions import DIFF_COLUMN, with_diff_column
from millstream.views.sinks.dataset_manifest import DataFile, read_manifest

FILE_NAME = re.compile(r"\d{12,}-[0-9a-f]{12}\.parquet")  # batch_id, and what makes it unique
_NAME_BYTES_MAX = 120  # of a column or a value; a file system takes 255 for both
_BEGINNING_BYTES = 60
_HASH_DIGITS = 32
_CUT_ESCAPE = re.compile(r"%[0-9A-F]?$")
_NULL = "__HIVE_DEFAULT_PARTITION__"  # null in Hive's layout


@dataclass(frozen=True)
class DatasetWriter:
    """Writes files of a dataset, durably. ``files`` is the file system; only tests give another one."""

    folder: Path
    schema: tuple[tuple[str, pl.DataType], ...]
    partition_by: tuple[str, ...]
    files: Files = DISK

    def write(self, rows: pl.DataFrame, batch_id: int) -> list[DataFile]:
        """Write rows, one file per partition; return what was written."""
        types = {
            **dict(self.schema),
            **({DIFF_COLUMN: pl.Int8()} if DIFF_COLUMN in rows.columns else {}),
        }
        rows = pl.DataFrame({name: rows[name].cast(dtype) for name, dtype in types.items()})
        return [self.write_file(part, folder, batch_id) for folder, part in self._partitions(rows)]

    def write_file(self, rows: pl.DataFrame, partition: str, batch_id: int) -> DataFile:
        """Write one file of a partition."""
        buffer = io.BytesIO()
        rows.write_parquet(buffer)
        name = f"{batch_id:012}-{uuid.uuid4().hex[:12]}.parquet"
        path = self.folder / partition / name
        missing = [one for one in path.parents if not one.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        with NewFile(self.files, path) as file:
            file.write(buffer.getvalue())
            file.sync()
        for folder in {path.parent, *(one.parent for one in missing)}:
            self.files.sync_folder(folder)
        return DataFile(path.relative_to(self.folder).as_posix(), rows.height, partition)

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

    def check_seen_in(self, folder: Path) -> None:
        """Make sure that the driver has in its folder what the task has written into its own.

        Raises:
            StagedRowsLostError: it has not.
        """
        for file, size_bytes in zip(self.files, self.sizes_bytes, strict=True):
            try:
                found = (folder / file.path).stat().st_size
            except FileNotFoundError:
                found = None
            if found != size_bytes:
                raise StagedRowsLostError(
                    f"A task has written {folder / file.path} with {size_bytes} bytes, and the driver finds "
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
        """Return whether the dataset is in the folder, as this process sees it."""
        try:
            manifest = read_manifest(self.writer.folder)
        except OSError:
            return False
        return manifest is not None and manifest.identity == self.identity

    def stage(self, rows: pl.DataFrame) -> StagedFiles:
        """Write rows. A crash leaves files that no manifest names."""
        shown = with_diff_column(rows)
        try:
            files = self.writer.write(shown, self.batch_id)
        except OSError as error:
            raise RetriableError(
                f"A task could not write to the dataset {self.writer.folder}, and nothing of batch "
                f"{self.batch_id} counts: {error}. Free some space or repair the disk, then run again."
            ) from error
        sizes = (self.writer.folder.joinpath(file.path).stat().st_size for file in files)
        return StagedFiles(tuple(files), tuple(sizes), DIFF_COLUMN in shown.columns)


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
