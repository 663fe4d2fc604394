"""Functions that run over frames in Spark tasks, whichever way the frames take.

Large frames are files of the app's folder (`frame_files.py`), or stay in Spark's blocks (`frame_blocks.py`). A
function gets frames with their numbers, in the order of the batch, and gives rows, whose large frames go the
same way. It may be called several times for the same frames, as Spark repeats tasks: only what the last call
gave counts.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pyspark import cloudpickle

from millstream.engine.frame_files import FrameFiles
from millstream.kernels.frames import FrameRow
from millstream.spark.frame_blocks import (
    PORT_RESULT,
    FrameBlocks,
    FrameFunction,
    NumberedFrame,
)

if TYPE_CHECKING:
    from pyspark import SparkContext


class BucketFrames(NamedTuple):
    """The frames of one bucket, for a task."""

    bucket: int
    rows: list[FrameRow]


@dataclass(frozen=True)
class _FileTask:
    """What a worker gets: a serialized function, and parts of frames, the large ones by name."""

    packed: bytes
    frame_files: FrameFiles

    def __call__(self, parts: Iterable[Sequence[NumberedFrame]]) -> Iterator[FrameRow]:
        function: FrameFunction = pickle.loads(self.packed)  # noqa: S301 - made by FrameTasks, in this job
        for part in parts:
            frames = (each._replace(row=self.frame_files.get(each.row)) for each in part)
            yield from map(self.frame_files.put, function(frames))


@dataclass(frozen=True)
class _BucketTask:
    """The same for frames in blocks that were divided by bucket."""

    packed: bytes

    def __call__(self, work: list[BucketFrames]) -> Iterable[FrameRow]:
        function: FrameFunction = pickle.loads(self.packed)  # noqa: S301 - made by FrameTasks, in this job
        rows = (row for part in work for row in part.rows)
        return function(NumberedFrame(number, row) for number, row in enumerate(rows))


@dataclass
class FrameTasks:
    """Runs functions over the frames of one port of the batch in hand.

    ``partitions`` is the number of tasks. Large frames are in ``blocks``, if it is given, and otherwise in
    ``frame_files``.
    """

    context: SparkContext
    partitions: int
    frame_files: FrameFiles
    blocks: FrameBlocks | None = None

    def size_bytes(self, rows: Iterable[FrameRow]) -> int:
        """Return how large some frames are together."""
        size_bytes = (self.blocks or self.frame_files).size_bytes
        return sum(size_bytes(row.frame) for row in rows)

    def map(self, function: FrameFunction, rows: Sequence[FrameRow]) -> list[FrameRow]:
        """Have tasks call a function, each with some of the frames, wherever these are."""
        if self.blocks is not None:
            return self.blocks.map(function, rows)
        return self._run(function, self._parts(rows))

    def map_buckets(self, function: FrameFunction, rows: Sequence[FrameRow]) -> list[FrameRow]:
        """Have tasks call a function, each with all frames of some buckets: below ``partitions``, by number."""
        buckets: dict[int, list[FrameRow]] = {}
        for row in rows:
            buckets.setdefault(row.bucket, []).append(row)
        work = [BucketFrames(bucket, buckets[bucket]) for bucket in sorted(buckets)]
        if self.blocks is not None:
            ports = {row.port for row in rows}
            return self.blocks.run_tasks(
                _BucketTask(_packed(function)), [[each] for each in work], ports
            )
        return self._run(
            function, [list(map(NumberedFrame, range(len(w.rows)), w.rows)) for w in work]
        )

    def _parts(self, rows: Sequence[FrameRow]) -> list[list[NumberedFrame]]:
        """Divide frames into parts of about one size, which keep their order."""
        share = max(1, -(-self.size_bytes(rows) // self.partitions))
        parts: list[list[NumberedFrame]] = [[] for _ in range(self.partitions)]
        before = 0
        for number, row in enumerate(rows):
            parts[min(before // share, self.partitions - 1)].append(NumberedFrame(number, row))
            before += self.size_bytes([row])
        return [part for part in parts if part]

    def _run(
        self, function: FrameFunction, parts: Sequence[Sequence[NumberedFrame]]
    ) -> list[FrameRow]:
        task = _FileTask(_packed(function), self.frame_files)
        done: list[FrameRow] = (
            self.context.parallelize(parts, len(parts)).mapPartitions(task).collect()
        )
        return [self.frame_files.get(row) if row.port == PORT_RESULT else row for row in done]


def _packed(function: FrameFunction) -> bytes:
    packed: bytes = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
    return packed
