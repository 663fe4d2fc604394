"""Runs the stages of a batch: in this process if they have little input, in an engine's tasks if they have much.

This process has the frames of a batch, the large ones perhaps by name (see `frame_files.py`), and passes them
from stage to stage. The size of a stage's input decides where it runs. A task in a worker costs tens of
milliseconds besides its work, for each stage and partition; the kernels of a small batch take less. So a small
batch costs at most one task, that of its source, and a large one uses all cores where it is large: the output of
a window is small again. An engine without tasks runs all stages here.

Either way the same kernels run over the same rows and state. The state of a stage in a bucket is a
manifest, which names sorted runs in files or objects (`run_files.py`). Between batches the manifests are here: a task gets those of its
buckets and returns the new ones, and the state store commits them together with the batch's rows. So there
is no separate commit of state, and no order of two commits to keep. What a batch learns from outside is in
journals (`journal_place.py`), which outlive an attempt at it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from millstream.engine.frame_files import FrameFiles
from millstream.engine.stages.journal_place import JournalPlace
from millstream.engine.stages.run_files import ObjectsInUse, RunFiles
from millstream.kernels.enrichment.operator import Enrichment
from millstream.kernels.frames import PORT_TIME, Frame, FrameRow, decode_message
from millstream.kernels.plan import JobPlan, StagePlan
from millstream.kernels.stage import run_stage
from millstream.kernels.state.journal import Journal
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.state.operator_state import run_names
from millstream.object_store.folder import FolderStore
from millstream.object_store.place import StatePlace
from millstream.object_store.store import ObjectStore, RequestCounts
from millstream.views.questions.requests import StateAfterBatch

# The largest input of a stage that runs in this process, where there are tasks. Kernels take about 5 ns a byte; a task: see above.
DRIVER_BYTES_MAX = 8 << 20

Manifests = dict[tuple[int, int], bytes]  # by stage and bucket


class BucketInput(NamedTuple):
    """The input of one bucket of a stage in a batch, and its manifest before the batch."""

    batch_id: int
    bucket: int
    rows: list[FrameRow]
    manifest: bytes | None


class BucketOutput(NamedTuple):
    """The output of one bucket of a stage in a batch, and its manifest. Large frames are in files.

    ``requests`` are those of a task, with its last bucket.
    """

    bucket: int
    rows: list[FrameRow]
    manifest: bytes
    requests: RequestCounts = RequestCounts()


@dataclass
class FileBucketState:
    """The state of one stage in one bucket during a batch."""

    stored: bytes | None
    files: RunFiles
    journals: JournalPlace
    batch_id: int
    bucket: int

    def manifest(self) -> bytes | None:
        """Return the manifest as it is now."""
        return self.stored

    def put_manifest(self, manifest: bytes) -> None:
        """Set the manifest after the batch."""
        self.stored = manifest

    def runs(self, _key: str) -> RunFiles:
        """Return the store of an operator's runs: one for all operators, as names are unique."""
        return self.files

    def journal(self, key: str) -> Journal:
        """Return the journal of an operator."""
        return self.journals.journal(self.batch_id, key, self.bucket)


@dataclass(frozen=True)
class StageRunner:
    """Runs one stage. ``number`` is that of the app's run.

    ``folder`` has its journals and its sorted runs, unless they are at ``place``.
    """

    stage: StagePlan
    buckets: Buckets
    folder: Path
    number: int
    frame_files: FrameFiles
    place: StatePlace | None = None

    def open_store(self) -> ObjectStore:
        """Open where the sorted runs are."""
        return open_run_store(self.folder, self.place)

    def run(self, work: Iterable[BucketInput], files: RunFiles) -> Iterator[BucketOutput]:
        """Run one batch in some buckets. The state of the output is durable after ``files.sync()``."""
        journals = JournalPlace(self.folder, self.place)
        for batch_id, bucket, rows, manifest in work:
            state = FileBucketState(manifest, files, journals, batch_id, bucket)
            frames = map(self.frame_files.get, rows)
            out = list(run_stage(self.stage, bucket, self.buckets, frames, state))
            assert state.stored is not None
            yield BucketOutput(bucket, out, state.stored)

    def run_task(self, work: Iterable[BucketInput]) -> list[BucketOutput]:
        """Run some buckets as a task of its own, which returns large frames by name."""
        store = self.open_store()
        files = RunFiles(store, self.number)
        done = [
            each._replace(rows=[self.frame_files.put(row) for row in each.rows])
            for each in self.run(work, files)
        ]
        files.sync()
        store.close()
        if done:
            done[-1] = done[-1]._replace(requests=store.requests)
        return done


class StageTasks(Protocol):
    """Runs large stages elsewhere than in this process, and knows where their frames are."""

    def size_bytes(self, frame: Frame) -> int:
        """Return the size of the frame that this is, or names."""
        ...

    def fetch(self, rows: list[FrameRow]) -> list[FrameRow]:
        """Return rows as :class:`StageRunner` reads them in this process."""
        ...

    def run(self, runner: StageRunner, parts: list[list[BucketInput]]) -> Iterable[BucketOutput]:
        """Run the parts of a stage's work, each as a task."""
        ...


@dataclass
class StageExecutor:
    """The stages of a job between the batches of one run.

    ``partitions`` is the number of tasks that a large batch is divided into. ``place`` has the sorted runs, if
    ``folder`` does not. Without ``tasks`` all of it runs in this process. ``requests`` are those to an object store
    since the last commit. Not thread-safe: batches run one at a time.
    """

    plan: JobPlan
    folder: Path
    number: int
    frame_files: FrameFiles
    partitions: int
    tasks: StageTasks | None
    manifests: Manifests
    place: StatePlace | None = None
    requests: RequestCounts = field(default_factory=RequestCounts)
    _new_manifests: Manifests = field(default_factory=dict)
    _next_batch_id: int | None = None
    _store: ObjectStore = field(init=False)
    _in_use: ObjectsInUse = field(init=False)
    _runners: list[StageRunner] = field(init=False)

    def __post_init__(self) -> None:
        self._store = open_run_store(self.folder, self.place)
        self._in_use = ObjectsInUse(self._store)
        self._in_use.replace_manifests(((), _run_names(each)) for each in self.manifests.values())
        self._in_use.sweep(self.number)
        self._runners = [
            StageRunner(
                stage, self.plan.buckets, self.folder, self.number, self.frame_files, self.place
            )
            for stage in self.plan.stages
        ]

    def run(self, batch_id: int, rows: Iterable[FrameRow]) -> tuple[list[FrameRow], Manifests]:
        """Run the source's rows of a batch through all stages.

        Return the rows for the sinks, and the manifests to commit with them. The state does not change
        before :meth:`on_commit` is called.
        """
        self._new_manifests, first = {}, self._next_batch_id is None
        if first:  # what earlier runs left
            self._journals.remove(keep=batch_id)
        self._next_batch_id = batch_id + 1
        self.requests = RequestCounts()
        before = self._store.requests
        files = RunFiles(self._store, self.number)
        router = _FrameRouter.of(self.plan)
        router.add(rows)
        for depth in range(len(self._runners)):
            waiting = router.waiting.pop(depth, {})
            work = [
                BucketInput(batch_id, bucket, waiting[bucket], self.manifests.get((depth, bucket)))
                for bucket in self.plan.buckets.numbers  # one order, however the work is divided
                if bucket in waiting
            ]
            for done in self._run(depth, work, files):
                self._new_manifests[depth, done.bucket] = done.manifest
                self.requests += done.requests
                router.add(done.rows)
        files.sync()
        self.requests += self._store.requests - before
        return router.out, self._new_manifests

    def on_commit(self) -> None:
        """Adopt the new manifests: the batch that was run last is committed."""
        self._in_use.replace_manifests(
            (_run_names(self.manifests.get(bucket)), _run_names(manifest))
            for bucket, manifest in self._new_manifests.items()
        )
        self.manifests |= self._new_manifests
        self._new_manifests = {}
        assert self._next_batch_id is not None
        if self._writes_journals:
            self._journals.remove(keep=self._next_batch_id)

    def state_after_batch(self) -> StateAfterBatch:
        """Return the state after the batch that was run last, before it is committed."""
        assert self._next_batch_id is not None, "a batch was run"
        files, journals, batch_id = (
            RunFiles(self._store, self.number),
            self._journals,
            self._next_batch_id - 1,
        )
        return StateAfterBatch(
            {**self.manifests, **self._new_manifests},
            files,
            lambda key: journals.journal(batch_id, key, 0),
        )

    def close(self) -> None:
        """Wait a little for what is being removed from an object store."""
        self._store.close()

    @property
    def _journals(self) -> JournalPlace:
        return JournalPlace(self.folder, self.place)

    @cached_property
    def _writes_journals(self) -> bool:
        operators = (operator for stage in self.plan.stages for operator in stage.operators)
        asks = any(isinstance(operator.kernel, Enrichment) for operator in operators)
        return asks or bool(self.plan.answering)

    def _run(self, depth: int, work: list[BucketInput], files: RunFiles) -> Iterable[BucketOutput]:
        runner = self._runners[depth]
        if self.tasks is None:
            return runner.run(work, files)
        if self._is_small(work):
            here = [each._replace(rows=self.tasks.fetch(each.rows)) for each in work]
            return runner.run(here, files)
        parts: dict[int, list[BucketInput]] = {}
        for each in work:
            rows = [self.frame_files.put(row) for row in each.rows]
            parts.setdefault(each.bucket % self.partitions, []).append(each._replace(rows=rows))
        done = self.tasks.run(runner, list(parts.values()))
        return sorted(done, key=lambda each: each.bucket)

    def _is_small(self, work: list[BucketInput]) -> bool:
        assert self.tasks is not None
        frames = (row.frame for each in work for row in each.rows)
        return sum(map(self.tasks.size_bytes, frames)) <= DRIVER_BYTES_MAX


@dataclass
class _FrameRouter:
    """Sorts rows by the stage that reads them, and by bucket; the others are for the sinks."""

    stages: Mapping[int, int]  # port → stage
    waiting: dict[int, dict[int, list[FrameRow]]] = field(default_factory=dict)
    out: list[FrameRow] = field(default_factory=list)

    @classmethod
    def of(cls, plan: JobPlan) -> _FrameRouter:
        return cls({port: depth for depth, stage in enumerate(plan.stages) for port in stage.ports})

    def add(self, rows: Iterable[FrameRow]) -> None:
        for row in rows:
            port = row.port
            if port == PORT_TIME:
                port = decode_message(row.frame)["to"]
            depth = self.stages.get(port)
            if depth is None:
                self.out.append(row)
            else:
                self.waiting.setdefault(depth, {}).setdefault(row.bucket, []).append(row)


def open_run_store(folder: Path, place: StatePlace | None) -> ObjectStore:
    """Open where the sorted runs are: at a place of its own, or in the app's folder."""
    return FolderStore(folder) if place is None else place.open("runs")


def _run_names(manifest: bytes | None) -> set[str]:
    """Return the names of the runs in a manifest."""
    if manifest is None:
        return set()
    operators: dict[str, Any] = json.loads(manifest)
    return {name for message in operators.values() for name in run_names(message)}
