"""Takes a batch through the stages of a job: here where there is little to do, in workers where there is much.

The driver has the frames of a batch by name (see `frame_files.py`), which is little, and leads them from
stage to stage. What a stage is to take in, in bytes, decides where it runs. A task in a worker costs tens of
milliseconds besides its work, and there are as many in a batch as stages and partitions; the kernels
of a small batch take less. So a small batch costs one task of Spark's at most, that of its source, and a
large one uses all cores where it is large: what a window has reduced is small again.

Either way the same kernels run over the same rows and state. The state of a stage in a bucket is a manifest,
and runs in files that it names. The manifests are here, between batches: a task is given those of its
buckets and gives them back, moved on, and the state store commits them together with the batch's rows. So
there is no commit of state beside that of the views, and no order between the two to be kept.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark import cloudpickle

from millstream.kernels.frames import PORT_TIME, FrameRow, decode_message
from millstream.kernels.plan import JobPlan, StagePlan
from millstream.kernels.stage import run_stage
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.state.operator_state import run_names
from millstream.spark.frame_files import FrameFiles
from millstream.spark.stages.run_files import FilesInUse, RunFiles

if TYPE_CHECKING:
    from pyspark import SparkContext

# What the driver works on by itself. The kernels take about 5 ns for a byte; see above for a task.
DRIVER_BYTES_MAX = 8 << 20

Manifests = dict[tuple[int, int], bytes]  # by stage and bucket


class BucketInput(NamedTuple):
    """What one bucket of a stage takes in of a batch, and its manifest before it."""

    bucket: int
    rows: list[FrameRow]
    manifest: bytes | None


class BucketOutput(NamedTuple):
    """What came of it. Frames of some size lie in files."""

    bucket: int
    rows: list[FrameRow]
    manifest: bytes


@dataclass
class FileBucketState:
    """The state of one stage in one bucket while a batch is worked on; its runs lie in files."""

    stored: bytes | None
    files: RunFiles

    def manifest(self) -> bytes | None:
        """Give the manifest as it is now."""
        return self.stored

    def put_manifest(self, manifest: bytes) -> None:
        """Take the manifest of after the batch."""
        self.stored = manifest

    def runs(self, _key: str) -> RunFiles:
        """Give the store of an operator's runs: all have one, as names are unique."""
        return self.files


@dataclass(frozen=True)
class StageRunner:
    """A stage's plan, where its runs lie, and where large frames do. ``number`` is that of the app's run."""

    stage: StagePlan
    buckets: Buckets
    folder: Path
    number: int
    frame_files: FrameFiles

    def run(self, work: Iterable[BucketInput], files: RunFiles) -> Iterator[BucketOutput]:
        """Run one batch in some buckets. What is given is durable once ``files`` are settled."""
        for bucket, rows, manifest in work:
            state = FileBucketState(manifest, files)
            frames = map(self.frame_files.get, rows)
            made = list(run_stage(self.stage, bucket, self.buckets, frames, state))
            assert state.stored is not None
            yield BucketOutput(bucket, made, state.stored)

    def run_task(self, work: Iterable[BucketInput]) -> list[BucketOutput]:
        """Run some buckets as a task of Spark's, which gives its frames away by name."""
        files = RunFiles(self.folder, self.number)
        done = [
            each._replace(rows=[self.frame_files.put(row) for row in each.rows])
            for each in self.run(work, files)
        ]
        files.sync()
        return done


@dataclass(frozen=True)
class _Task:
    """What travels to the workers: a runner, packed, so that it is opened where rows come in."""

    packed: bytes

    def __call__(self, work: Iterable[list[BucketInput]]) -> Iterator[BucketOutput]:
        runner: StageRunner = pickle.loads(self.packed)  # noqa: S301 - made by Stages, in this job
        for part in work:
            yield from runner.run_task(part)


@dataclass
class StageExecutor:
    """The stages of a job between the batches of one run.

    ``partitions`` is the number of tasks that a large batch is divided into. Not thread-safe: one batch is
    worked on at a time.
    """

    plan: JobPlan
    folder: Path
    number: int
    frame_files: FrameFiles
    partitions: int
    context: SparkContext
    manifests: Manifests
    _new_manifests: Manifests = field(default_factory=dict)
    _files_in_use: FilesInUse = field(init=False)
    _runners: list[StageRunner] = field(init=False)
    _tasks: dict[int, _Task] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._files_in_use = FilesInUse(self.folder)
        for manifest in self.manifests.values():
            self._files_in_use.replace_manifest((), _run_names(manifest))
        self._files_in_use.sweep(self.number)
        self._runners = [
            StageRunner(stage, self.plan.buckets, self.folder, self.number, self.frame_files)
            for stage in self.plan.stages
        ]

    def run(self, rows: Iterable[FrameRow]) -> tuple[list[FrameRow], Manifests]:
        """Take the source's rows of a batch through all stages.

        Give the rows for the sinks, and the manifests to be committed with them. Nothing is moved on
        before :meth:`on_commit` is called.
        """
        self._new_manifests = {}
        files = RunFiles(self.folder, self.number)
        sorting = _FrameRouter.of(self.plan)
        sorting.add(rows)
        for depth in range(len(self._runners)):
            waiting = sorting.waiting.pop(depth, {})
            work = [
                BucketInput(bucket, waiting[bucket], self.manifests.get((depth, bucket)))
                for bucket in self.plan.buckets.numbers  # one order, however the work is divided
                if bucket in waiting
            ]
            for done in self._run(depth, work, files):
                self._new_manifests[depth, done.bucket] = done.manifest
                sorting.add(done.rows)
        files.sync()
        return sorting.out, self._new_manifests

    def on_commit(self) -> None:
        """Take it that the batch that was run last is committed: the state has moved on."""
        for place, manifest in self._new_manifests.items():
            self._files_in_use.replace_manifest(
                _run_names(self.manifests.get(place)), _run_names(manifest)
            )
        self.manifests |= self._new_manifests
        self._new_manifests = {}

    def _run(self, depth: int, work: list[BucketInput], files: RunFiles) -> Iterable[BucketOutput]:
        if self._is_small(work):
            return self._runners[depth].run(work, files)
        parts: dict[int, list[BucketInput]] = {}
        for each in work:
            rows = [self.frame_files.put(row) for row in each.rows]
            parts.setdefault(each.bucket % self.partitions, []).append(each._replace(rows=rows))
        tasks = self.context.parallelize(list(parts.values()), len(parts))
        done: list[BucketOutput] = tasks.mapPartitions(self._task(depth)).collect()
        return sorted(done, key=lambda each: each.bucket)

    def _is_small(self, work: list[BucketInput]) -> bool:
        frames = (row.frame for each in work for row in each.rows)
        return sum(map(self.frame_files.size_bytes, frames)) <= DRIVER_BYTES_MAX

    def _task(self, depth: int) -> _Task:
        if depth not in self._tasks:
            packed: bytes = cloudpickle.dumps(self._runners[depth])  # type: ignore[no-untyped-call]
            self._tasks[depth] = _Task(packed)
        return self._tasks[depth]


@dataclass
class _FrameRouter:
    """Sorts rows by the stage that takes them, and by bucket; the others are for the sinks."""

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


def _run_names(manifest: bytes | None) -> set[str]:
    """Name the runs that a manifest holds on to."""
    if manifest is None:
        return set()
    operators: dict[str, Any] = json.loads(manifest)
    return {name for message in operators.values() for name in run_names(message)}
