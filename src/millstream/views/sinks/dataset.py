"""The sink for Parquet datasets: files with unique names, and one manifest that lists those that count.

A batch is committed in these steps, under the lock of the folder; for one under a URL, see ``dataset_url.py``:

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import polars as pl

from millstream.errors import ConfigError, CorruptionError, FencedError, RetriableError
from millstream.kernels.plan import DatasetSinkSpec, SinkPlan
from millstream.log.files import DISK, Files
from millstream.views.coverage import (
    CoverageSpan,
    OutputSink,
    partial_note,
    sink_label,
    warn_if_partial,
)
from millstream.views.retractions import DIFF_COLUMN, with_diff_column
from millstream.views.schema import Fence
from millstream.views.sink import RunStart, SinkBatch, check_written
from millstream.views.sinks.dataset_address import place_of
from millstream.views.sinks.dataset_files import DatasetStager, DatasetWriter
from millstream.views.sinks.dataset_manifest import (
    DataFile,
    DatasetFence,
    Manifest,
    ReplacedFile,
    encode_columns,
)
from millstream.views.sinks.dataset_merge import files_to_merge
from millstream.views.sinks.dataset_place import DatasetPlace, ManifestReplacedError

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
        self.place = place_of(sink.spec.path, files)
        self.name = f"{_NAME_PREFIX}{self.place.text}"
        self._sink = sink
        self._where = sink.name, sink_label(sink)
        self._partition_by = sink.spec.partition_by
        self._schema = dict(sink.schema)
        self._clock_ms = clock_ms
        self._checkpoint_id = ""
        self._create()

    @property
    def identity(self) -> str:
        return _identity(self._manifest())

    def _writer(self, manifest: Manifest, run: int) -> DatasetWriter:
        stamp = self.place.stamp(manifest, run)
        return DatasetWriter(self.place, self._sink.schema, self._partition_by, stamp)

    def _create(self) -> None:
        """Make the place and an empty manifest, unless they are there."""
        columns = encode_columns(self._schema)
        self.place.create(Manifest(uuid.uuid4().hex, columns, self._partition_by))

    def _manifest(self) -> Manifest:
        manifest = self.place.read()
        if manifest is None:
            raise FencedError(
                f"The manifest of {self.place.text} was deleted while a run was writing to the dataset. Stop "
                "this run; restore the dataset, or give the output another folder."
            )
        return manifest

    def begin_run(self, start: RunStart) -> int | None:
        self._checkpoint_id = start.checkpoint_id
        while True:
            with suppress(ManifestReplacedError):  # by an older run, which will be refused
                return self._begin_run(start)

    def _begin_run(self, start: RunStart) -> int | None:
        with self.place.lock():
            manifest = self._manifest()
            self._check_declared(manifest)
            last = self._check_owner(manifest, start)
            fence = DatasetFence(start.app, start.job, start.run, start.checkpoint_id, last)
            coverage = tuple(start.coverage.get(self._where, manifest.coverage))
            self.place.write(replace(manifest, fence=fence, coverage=coverage))
            self._remove_leftovers(manifest, fence)
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

    def _remove_leftovers(self, manifest: Manifest, fence: DatasetFence) -> None:
        """Remove the files that a crash of an earlier run left: those that the manifest does not name.

        A run that replaces this one may have a lower number, if the app starts over. Its files come after its manifest. So
        none of them is in a list that was made while the manifest was still this run's.
        """
        named = {file.path for file in manifest.files} | {file.path for file in manifest.replaced}
        found = self.place.files(manifest, before_run=fence.run)
        newest = self.place.read()
        if newest is not None and newest.fence == fence:
            self.place.remove(found.keys() - named)

    def end_offsets(self) -> Mapping[OutputSink, Sequence[int]]:
        """Return {}: rows have no offsets here."""
        return {}

    def participates(self, part: SinkBatch) -> bool:
        return part.has(self._sink.name)

    def stager(self, fence: Fence, output: str) -> DatasetStager | None:
        if output != self._sink.name:
            return None
        manifest = self._manifest()
        writer = self._writer(manifest, fence.run)
        return DatasetStager(writer, manifest.identity, fence.batch_id)

    def commit(self, fence: Fence, part: SinkBatch) -> bool:
        try:
            while True:
                with suppress(
                    ManifestReplacedError
                ):  # mostly by a newer run, which then refuses this one
                    return self._commit(fence, part)
        except OSError as error:
            raise RetriableError(
                f"Writing to {self.name} failed, and nothing of batch {fence.batch_id} counts: "
                f"{error}. Free some space or repair the disk, then run again."
            ) from error

    def _commit(self, fence: Fence, part: SinkBatch) -> bool:
        with self.place.lock():
            manifest = self._manifest()
            if not self._admit(manifest, fence):
                return False
            writer = self._writer(manifest, fence.run)
            written, has_diff = self._written(part, writer, fence.batch_id)  # step 1
            if has_diff and DIFF_COLUMN not in manifest.schema:
                manifest = replace(
                    manifest, columns=encode_columns({**self._schema, DIFF_COLUMN: pl.Int8()})
                )
            added = [*manifest.files, *written]
            files, gone = self._merge_small_files(added, writer, fence.batch_id)  # step 2
            assert manifest.fence is not None, "checked by _admit"
            old, kept = self._split_expired(manifest.replaced)
            now_ms = self._clock_ms()
            manifest = replace(
                manifest,
                fence=replace(manifest.fence, batch_id=fence.batch_id),
                files=tuple(files),
                replaced=(*kept, *(ReplacedFile(file.path, now_ms) for file in gone)),
            )
            self.place.write(manifest)  # steps 3 to 5
            self.place.remove(file.path for file in old)  # step 6
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

    def _written(
        self, part: SinkBatch, writer: DatasetWriter, batch_id: int
    ) -> tuple[list[DataFile], bool]:
        """Return the files of a batch, which tasks may have written, and whether they have ``_diff``."""
        staged = part.staged.get(self._sink.name)
        if staged is None:
            rows = with_diff_column(part.rows[self._sink.name])
            given, has_diff = rows.height, DIFF_COLUMN in rows.columns
            written = writer.write(rows, batch_id)
        else:
            for each in staged.parts:
                each.check_seen_in(self.place)
            given, has_diff = staged.rows, any(each.has_diff for each in staged.parts)
            written = [file for each in staged.parts for file in each.files]
        check_written(self.name, given, sum(file.rows for file in written))
        return written, has_diff

    def _merge_small_files(
        self, files: list[DataFile], writer: DatasetWriter, batch_id: int
    ) -> tuple[list[DataFile], list[DataFile]]:
        """Merge small files, durably; return the files that are left, and those replaced."""
        gone: list[DataFile] = []
        while group := files_to_merge(files, self.place.merged_tiers):
            tables = [self._read(file) for file in group]
            merged = pl.concat([_add_diff_column(table, tables) for table in tables])
            files = [file for file in files if file not in group]
            files.append(writer.write_file(merged, group[0].partition, batch_id))
            gone += group
        return files, gone

    def _read(self, file: DataFile) -> pl.DataFrame:
        try:
            return pl.read_parquet(self.place.open_file(file.path), hive_partitioning=False)
        except (pl.exceptions.PolarsError, OSError) as error:
            raise CorruptionError(
                f"{self.place.address_of(file.path)} is part of {self.name} and cannot be read: {error}. "
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

    def __init__(self, place: DatasetPlace) -> None:
        self._place = place

    def __repr__(self) -> str:
        return f"Dataset({self._place.text!r})"

    @property
    def files(self) -> list[Path | str]:
        """The Parquet files of the dataset now, for any tool that reads Parquet: paths, or URLs."""
        return [self._place.address_of(file.path) for file in self._manifest().files]

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
        paths = [file.path for file in manifest.files]
        found = self._place.scan(paths, schema, some_lack=DIFF_COLUMN in schema)
        return (
            found.with_columns(pl.col(DIFF_COLUMN).fill_null(1)) if DIFF_COLUMN in schema else found
        )

    def _manifest(self) -> Manifest:
        manifest = self._place.read()
        if manifest is None:
            raise ConfigError(
                f"There is no dataset in {self._place.text}. Correct the path, or run the pipeline that "
                "writes it."
            )
        return manifest


def dataset(path: Path | str) -> Dataset:
    """Open a dataset that a pipeline writes, for reading: by the path of its folder, or its URL.

    Warns:
        PartialOutputWarning: The dataset was not always written, so rows are missing; the text says
            since when it is complete. So does ``Dataset.partial_note``.

    Raises:
        ConfigError: There is none in that folder, or under that URL.
    """
    opened = Dataset(place_of(path))
    warn_if_partial(f"The dataset {path}", opened.coverage)  # a wrong path shows here
    return opened


def dataset_address(name: str) -> str:
    """Return the folder's path, or the URL, of a dataset, given the name of its sink."""
    return name.removeprefix(_NAME_PREFIX)


def owned_dataset_identity(
    address: str, app: str, job: str, checkpoint_id: str | None
) -> str | None:
    """Return the identity of the dataset at an address if a job wrote it with this checkpoint, else None."""
    manifest = place_of(address).read()
    if manifest is None or manifest.fence is None:
        return None
    fence = manifest.fence
    ours = (fence.app, fence.job, fence.checkpoint_id) == (app, job, checkpoint_id)
    return _identity(manifest) if ours else None


def dataset_files(address: str, identity: str) -> dict[str, int] | None:
    """Return the Parquet files of a dataset, replaced ones included, and their sizes; None if it is missing, or another."""
    place = place_of(address)
    manifest = place.read()
    if manifest is None or _identity(manifest) != identity:
        return None
    return place.files(manifest)


def delete_dataset(address: str, identity: str) -> None:
    """Delete a dataset, so that a job can begin it again; nothing if it is another one.

    Raises:
        RetriableError: a run still writes to it.
    """
    try:
        place_of(address).delete(identity.removeprefix("dataset:"))
    except ManifestReplacedError:
        raise RetriableError(
            f"The dataset {address} is written to by a run of another machine. Stop it, and reset the app again."
        ) from None
