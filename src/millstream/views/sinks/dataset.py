"""The sink for Parquet datasets: files with unique names, and one manifest that lists those that count.

A batch is committed in these steps, under the lock of the folder:

=====================================  ==========================================================
a crash after                          leaves
=====================================  ==========================================================
1. the batch's files are written and   files that no manifest names: nobody reads them, and the
   synced, with their folders, here    next start removes them
   or before it by tasks
2. merged files are written and synced the same; what they replace is still named
3. the new manifest is written and     a stray ``_manifest.json.new``, which the next one overwrites
   synced beside the old
4. it is renamed over the old one      the old manifest or the new one, whole, with its fence
5. the folder is synced                the batch is done
6. files replaced long ago are removed some of them are left; the next commit removes them
=====================================  ==========================================================
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import polars as pl

from millstream.errors import ConfigError, CorruptionError, FencedError, RetriableError
from millstream.kernels.plan import DatasetSinkSpec, SinkPlan
from millstream.log.files import DISK, Files
from millstream.views.coverage import CoverageSpan, partial_note, sink_label, warn_if_partial
from millstream.views.retractions import DIFF_COLUMN, with_diff_column
from millstream.views.schema import Fence
from millstream.views.sink import RunStart, SinkBatch, check_written
from millstream.views.sinks.dataset_files import FILE_NAME, DatasetStager, DatasetWriter
from millstream.views.sinks.dataset_manifest import (
    FILE,
    DataFile,
    DatasetFence,
    Manifest,
    ReplacedFile,
    dataset_lock,
    encode_columns,
    read_manifest,
    write_manifest,
)
from millstream.views.sinks.dataset_merge import files_to_merge

REPLACED_FILES_RETENTION_MS = 10 * 60_000
"""How long a file that was merged into another stays, for readers that began before."""

_NAME_PREFIX = "the dataset "


def _identity(manifest: Manifest) -> str:
    return f"dataset:{manifest.identity}"


class DatasetSink:
    """Writes one dataset; see :class:`millstream.views.sink.Sink` for the methods.

    Args:
        files: The file system; only tests give another one.
        clock_ms: Milliseconds since 1970; only tests give another clock.
    """

    has_fence = True

    def __init__(
        self,
        sink: SinkPlan,
        *,
        files: Files = DISK,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        assert isinstance(sink.spec, DatasetSinkSpec)
        self.folder = Path(sink.spec.path).absolute()
        self.name = f"{_NAME_PREFIX}{self.folder}"
        self._sink = sink
        self._where = sink.name, sink_label(sink)
        self._partition_by = sink.spec.partition_by
        self._schema = dict(sink.schema)
        self._files = files
        self._clock_ms = clock_ms
        self._checkpoint_id = ""
        self._create()

    @property
    def identity(self) -> str:
        return _identity(self._manifest())

    @property
    def _writer(self) -> DatasetWriter:
        return DatasetWriter(self.folder, self._sink.schema, self._partition_by, self._files)

    def _create(self) -> None:
        """Create the folder and an empty manifest, unless they are there."""
        missing = [one for one in (self.folder, *self.folder.parents) if not one.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            self._files.sync_folder(folder.parent)
        with dataset_lock(self.folder):
            if read_manifest(self.folder) is None:
                foreign = [one.name for one in self.folder.iterdir() if one.name[0] not in "._"]
                if foreign:
                    raise ConfigError(
                        f"{self.folder} holds {foreign[0]!r} and is no dataset of Millstream. Give "
                        "an empty folder, or one that does not exist."
                    )
                columns = encode_columns(self._schema)
                fresh = Manifest(uuid.uuid4().hex, columns, self._partition_by)
                write_manifest(self.folder, fresh, self._files)

    def _manifest(self) -> Manifest:
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise FencedError(
                f"{self.folder / FILE} was deleted while a run was writing to the dataset. Stop "
                "this run; restore the dataset, or give the output another folder."
            )
        return manifest

    def begin_run(self, start: RunStart) -> int | None:
        self._checkpoint_id = start.checkpoint_id
        with dataset_lock(self.folder):
            manifest = self._manifest()
            self._check_declared(manifest)
            last = self._check_owner(manifest, start)
            fence = DatasetFence(start.app, start.job, start.run, start.checkpoint_id, last)
            coverage = tuple(start.coverage.get(self._where, manifest.coverage))
            write_manifest(
                self.folder, replace(manifest, fence=fence, coverage=coverage), self._files
            )
            self._remove_leftovers(manifest)
        return last

    def _check_declared(self, manifest: Manifest) -> None:
        there = {name: dtype for name, dtype in manifest.schema.items() if name != DIFF_COLUMN}
        if there == self._schema and manifest.partition_by == self._partition_by:
            return
        differing = {*there.items()} ^ {*self._schema.items()}
        what = ", ".join(sorted({name for name, _ in differing})) or "partition_by, or the order"
        raise ConfigError(
            f"{self.name} was written with other columns or another partition_by; what differs: "
            f"{what}. Give the output another folder."
        )

    def _check_owner(self, manifest: Manifest, start: RunStart) -> int | None:
        """Return the last committed batch; refuse a dataset of another job or of a newer run."""
        fence = manifest.fence
        if fence is None or (fence.batch_id is None and fence.checkpoint_id != start.checkpoint_id):
            return None
        if (fence.app, fence.job) != (start.app, start.job):
            raise ConfigError(
                f"{self.name} belongs to the job {fence.job!r} of the app {fence.app!r}. Give the "
                "output a folder of its own."
            )
        if fence.checkpoint_id != start.checkpoint_id:
            raise ConfigError(
                f"{self.name} holds batches up to {fence.batch_id} of {start.job_label} that were made "
                "with another checkpoint. Restore the app's folder. Where that is lost, remove the "
                "dataset's folder to build it again."
            )
        if fence.run > start.run:
            raise FencedError(
                f"Run {start.run} of {start.job_label} was replaced by run {fence.run}, which {self.name} "
                "knows. Close this run. If no newer one runs, the app's own views were restored "
                "from an older time: restore both from the same."
            )
        return fence.batch_id

    def _remove_leftovers(self, manifest: Manifest) -> None:
        """Remove the files that a crash left: those that the manifest does not name."""
        named = {file.path for file in manifest.files} | {file.path for file in manifest.replaced}
        for path in list(self.folder.rglob("*.parquet")):
            ours = FILE_NAME.fullmatch(path.name)
            if ours and path.relative_to(self.folder).as_posix() not in named:
                path.unlink()

    def participates(self, part: SinkBatch) -> bool:
        return part.has(self._sink.name)

    def stager(self, fence: Fence, output: str) -> DatasetStager | None:
        if output != self._sink.name:
            return None
        return DatasetStager(self._writer, self._manifest().identity, fence.batch_id)

    def commit(self, fence: Fence, part: SinkBatch) -> bool:
        try:
            return self._commit(fence, part)
        except OSError as error:
            raise RetriableError(
                f"Writing to {self.name} failed, and nothing of batch {fence.batch_id} counts: "
                f"{error}. Free some space or repair the disk, then run again."
            ) from error

    def _commit(self, fence: Fence, part: SinkBatch) -> bool:
        with dataset_lock(self.folder):
            manifest = self._manifest()
            if not self._admit(manifest, fence):
                return False
            written, has_diff = self._written(part, fence.batch_id)  # step 1
            if has_diff and DIFF_COLUMN not in manifest.schema:
                manifest = replace(
                    manifest, columns=encode_columns({**self._schema, DIFF_COLUMN: pl.Int8()})
                )
            added = [*manifest.files, *written]
            files, gone = self._merge_small_files(added, fence.batch_id)  # step 2
            assert manifest.fence is not None, "checked by _admit"
            old, kept = self._split_expired(manifest.replaced)
            now_ms = self._clock_ms()
            manifest = replace(
                manifest,
                fence=replace(manifest.fence, batch_id=fence.batch_id),
                files=tuple(files),
                replaced=(*kept, *(ReplacedFile(file.path, now_ms) for file in gone)),
            )
            write_manifest(self.folder, manifest, self._files)  # steps 3 to 5
            for file in old:  # step 6
                (self.folder / file.path).unlink(missing_ok=True)
        return True

    def _admit(self, manifest: Manifest, fence: Fence) -> bool:
        known = manifest.fence
        # The checkpoint, too: an app that starts over counts its runs from 1 again.
        ours = (fence.app, fence.job, fence.run, self._checkpoint_id)
        if known is None or (known.app, known.job, known.run, known.checkpoint_id) != ours:
            newest = "none" if known is None else f"run {known.run} of the app {known.app!r}"
            raise FencedError(
                f"Run {fence.run} of the job {fence.job!r} of the app {fence.app!r} was replaced: "
                f"{self.name} knows {newest}, so batch {fence.batch_id} is refused. Close this run."
            )
        return known.batch_id is None or known.batch_id < fence.batch_id

    def _split_expired(
        self, replaced: Sequence[ReplacedFile]
    ) -> tuple[list[ReplacedFile], list[ReplacedFile]]:
        """Split replaced files into those that no reader can still use, and the rest."""
        before_ms = self._clock_ms() - REPLACED_FILES_RETENTION_MS
        old = [file for file in replaced if file.since_ms < before_ms]
        return old, [file for file in replaced if file.since_ms >= before_ms]

    def _written(self, part: SinkBatch, batch_id: int) -> tuple[list[DataFile], bool]:
        """Return the files of a batch, which tasks may have written, and whether they have ``_diff``."""
        staged = part.staged.get(self._sink.name)
        if staged is None:
            rows = with_diff_column(part.rows[self._sink.name])
            given, has_diff = rows.height, DIFF_COLUMN in rows.columns
            written = self._writer.write(rows, batch_id)
        else:
            for each in staged.parts:
                each.check_seen_in(self.folder)
            given, has_diff = staged.rows, any(each.has_diff for each in staged.parts)
            written = [file for each in staged.parts for file in each.files]
        check_written(self.name, given, sum(file.rows for file in written))
        return written, has_diff

    def _merge_small_files(
        self, files: list[DataFile], batch_id: int
    ) -> tuple[list[DataFile], list[DataFile]]:
        """Merge small files, durably; return the files that are left, and those replaced."""
        gone: list[DataFile] = []
        while group := files_to_merge(files):
            tables = [self._read(file) for file in group]
            merged = pl.concat([_add_diff_column(table, tables) for table in tables])
            files = [file for file in files if file not in group]
            files.append(self._writer.write_file(merged, group[0].partition, batch_id))
            gone += group
        return files, gone

    def _read(self, file: DataFile) -> pl.DataFrame:
        try:
            return pl.read_parquet(self.folder / file.path, hive_partitioning=False)
        except (pl.exceptions.PolarsError, OSError) as error:
            raise CorruptionError(
                f"{self.folder / file.path} is part of {self.name} and cannot be read: {error}. "
                "Keep it, and restore it from a backup."
            ) from error

    def close(self) -> None:
        """Nothing is open between two batches."""


def _add_diff_column(table: pl.DataFrame, tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Add the column ``_diff`` to a table without it, if another table has it; all its rows are inserts."""
    if DIFF_COLUMN in table.columns or all(DIFF_COLUMN not in other.columns for other in tables):
        return table
    return table.with_columns(pl.lit(1, pl.Int8).alias(DIFF_COLUMN))


class Dataset:
    """A dataset opened for reading. Each call sees the state of one commit, the newest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __repr__(self) -> str:
        return f"Dataset({str(self.folder)!r})"

    @property
    def files(self) -> list[Path]:
        """The Parquet files of the dataset now, for any tool that reads Parquet."""
        return [self.folder / file.path for file in self._manifest().files]

    @property
    def batch_id(self) -> int | None:
        """The last batch with rows; None before the first."""
        fence = self._manifest().fence
        return None if fence is None else fence.batch_id

    @property
    def coverage(self) -> tuple[CoverageSpan, ...]:
        """The spans that the dataset covers: one without ends if it was always written by one declaration."""
        return self._manifest().coverage

    @property
    def partial_note(self) -> str | None:
        """A text that says what the dataset lacks because it was not always written; None if nothing."""
        return partial_note(self.coverage)

    def scan(self) -> pl.LazyFrame:
        """Return exactly the committed rows, lazily; the files are chosen now, not at collect().

        Collect within ten minutes: files that are merged meanwhile are kept for that long. Where rows are
        retracted, the column ``_diff`` is 1, or -1 for a retraction.
        """
        manifest = self._manifest()
        schema = manifest.schema
        if not manifest.files:
            return pl.LazyFrame(schema=schema)
        found = pl.scan_parquet(
            [self.folder / file.path for file in manifest.files],
            schema=schema,
            missing_columns="insert" if DIFF_COLUMN in schema else "raise",
            hive_partitioning=False,
            glob=False,
        )
        return (
            found.with_columns(pl.col(DIFF_COLUMN).fill_null(1)) if DIFF_COLUMN in schema else found
        )

    def _manifest(self) -> Manifest:
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise ConfigError(
                f"There is no dataset in {self.folder}. Correct the path, or run the pipeline that "
                "writes it."
            )
        return manifest


def dataset(path: Path | str) -> Dataset:
    """Open a dataset that a pipeline writes, for reading.

    Warns:
        PartialOutputWarning: The dataset was not always written, so rows are missing; the text says
            since when it is complete. So does ``Dataset.partial_note``.

    Raises:
        ConfigError: There is none in that folder.
    """
    opened = Dataset(Path(path))
    warn_if_partial(f"The dataset {path}", opened.coverage)  # a wrong path shows here
    return opened


def dataset_folder(name: str) -> Path:
    """Return the folder of a dataset, given the name of its sink."""
    return Path(name.removeprefix(_NAME_PREFIX))


def owned_dataset_identity(path: str, app: str, job: str, checkpoint_id: str | None) -> str | None:
    """Return the identity of the dataset in a folder if a job wrote it with this checkpoint, else None."""
    manifest = read_manifest(Path(path))
    if manifest is None or manifest.fence is None:
        return None
    fence = manifest.fence
    ours = (fence.app, fence.job, fence.checkpoint_id) == (app, job, checkpoint_id)
    return _identity(manifest) if ours else None


def dataset_files(folder: Path, identity: str) -> list[Path] | None:
    """Return the Parquet files of a dataset, replaced ones included; None if it is missing, or another."""
    manifest = read_manifest(folder)
    if manifest is None or _identity(manifest) != identity:
        return None
    return [path for path in folder.rglob("*.parquet") if FILE_NAME.fullmatch(path.name)]


def delete_dataset(folder: Path, identity: str) -> None:
    """Delete a dataset, so that a job can begin it again; nothing if it is another one.

    1. A manifest without files and fence is written: a running job is refused, readers see no rows. It
       keeps the identity, so that a repetition after a crash finds the dataset.
    2. The files are removed. A crash leaves some of them.
    3. The folders of partitions are removed, and then the manifest.
    """
    if not folder.is_dir():
        return
    with dataset_lock(folder):
        files = dataset_files(folder, identity)
        if files is None:
            return
        manifest = read_manifest(folder)
        assert manifest is not None, "it was read just now"
        write_manifest(folder, replace(manifest, fence=None, files=(), replaced=()))
        for path in files:
            path.unlink()
        for inner in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
            with suppress(OSError):  # somebody else's file lies in it
                inner.rmdir()
        (folder / FILE).unlink()
