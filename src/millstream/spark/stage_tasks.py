"""Large stages as Spark tasks: see :class:`millstream.engine.stages.executor.StageTasks`."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark import cloudpickle

from millstream.engine.frame_files import FrameFiles
from millstream.engine.stages.executor import BucketInput, BucketOutput, StageRunner
from millstream.kernels.frames import Frame, FrameRow
from millstream.spark.frame_blocks import PORT_RESULT, FrameBlocks

if TYPE_CHECKING:
    from pyspark import SparkContext


@dataclass(frozen=True)
class _Task:
    """The function that is sent to the workers: a serialized runner, opened when rows come."""

    packed: bytes

    def __call__(self, work: Iterable[list[BucketInput]]) -> Iterator[BucketOutput]:
        runner: StageRunner = pickle.loads(self.packed)  # noqa: S301 - made by SparkStageTasks, in this job
        for part in work:
            yield from runner.run_task(part)


@dataclass(frozen=True)
class _BlockTask:
    """The same for :class:`FrameBlocks`: after the rows of a bucket comes one with its manifest."""

    packed: bytes

    def __call__(self, work: list[BucketInput]) -> Iterator[FrameRow]:
        runner: StageRunner = pickle.loads(self.packed)  # noqa: S301 - made by SparkStageTasks, in this job
        for done in runner.run_task(work):
            yield from done.rows
            yield FrameRow(PORT_RESULT, done.bucket, pickle.dumps(done._replace(rows=[])))


@dataclass
class SparkStageTasks:
    """Runs the parts of a stage as Spark tasks.

    Large frames are in ``blocks``, if it is given, and otherwise in ``frame_files``.
    """

    context: SparkContext
    frame_files: FrameFiles
    blocks: FrameBlocks | None = None
    _packed: dict[int, bytes] = field(
        default_factory=dict
    )  # by the runner, of which a run keeps each

    def size_bytes(self, frame: Frame) -> int:
        """Return the size of the frame that this is, or names."""
        return (self.blocks or self.frame_files).size_bytes(frame)

    def fetch(self, rows: list[FrameRow]) -> list[FrameRow]:
        """Return rows with those frames that are in blocks; a runner reads files itself."""
        return rows if self.blocks is None else self.blocks.get(rows)

    def run(self, runner: StageRunner, parts: list[list[BucketInput]]) -> Iterable[BucketOutput]:
        """Run the parts of a stage's work, each as a task."""
        packed = self._pack(runner)
        if self.blocks is not None:
            return _outputs(self.blocks.run_tasks(_BlockTask(packed), parts, runner.stage.ports))
        tasks = self.context.parallelize(parts, len(parts))
        done: list[BucketOutput] = tasks.mapPartitions(_Task(packed)).collect()
        return done

    def _pack(self, runner: StageRunner) -> bytes:
        key = id(runner)
        if key not in self._packed:
            packed: bytes = cloudpickle.dumps(runner)  # type: ignore[no-untyped-call]
            self._packed[key] = packed
        return self._packed[key]


def _outputs(rows: Iterable[FrameRow]) -> Iterator[BucketOutput]:
    """Put the rows of :class:`_BlockTask` together again, bucket by bucket."""
    waiting: list[FrameRow] = []
    for row in rows:
        if row.port != PORT_RESULT:
            waiting.append(row)
            continue
        done: BucketOutput = pickle.loads(row.frame)  # noqa: S301 - made by a task, in this job
        yield done._replace(rows=waiting)
        waiting = []
