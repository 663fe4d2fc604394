"""Large outputs of a batch are written by tasks, so that they grow with the cluster and not with the driver.

Tasks stage the rows (`views/staging.py`, which says what a crash leaves), and the sink commits what they
staged. A small output goes through the driver, as all outputs do on one machine: a round of tasks takes some
ten milliseconds, more than the rows.

Where rows of a key replace or cancel one another, all of a key have to be together, in the order of the batch. So
there tasks first divide the frames by the hash of the key, and then other tasks stage one share each, with the
code by which the driver would. Rows for a topic are divided by their partition in the same way.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import polars as pl

from millstream.kernels.columns import constant
from millstream.kernels.frames import FrameRow, cut_for_frames, decode_frame, encode_frame
from millstream.kernels.plan import JobPlan, SinkPlan
from millstream.kernels.state.keyhash import Buckets, buckets_of, hash_columns
from millstream.kernels.time.log_order import in_log_order
from millstream.spark.frame_blocks import PORT_RESULT, NumberedFrame
from millstream.spark.frame_tasks import FrameTasks
from millstream.views.staging import CannotStageError, PartitionStager, StagedRows, Stager

DRIVER_BYTES_MAX = 8 << 20
"""The largest output of a batch that the driver writes itself."""

_STAGED_BYTES_MAX = 128 << 20  # of frames that a task stages at once, where any division will do
_NUMBER = "__number"  # Int64: which frame of the batch a row was in
_BUCKET = "__bucket"


class _TaskResult(NamedTuple):
    """What a task did: how many rows it was given, and what it staged; None if it could not, for a ``reason``."""

    rows: int
    part: Any | None
    reason: str = ""


@dataclass(frozen=True)
class _KeyBuckets:
    """Gives the bucket of each row: by the hash of a key."""

    key: tuple[str, ...]
    buckets: Buckets

    def __call__(self, table: pl.DataFrame, _number: int) -> pl.Series:
        plain = tuple(name for name in self.key if not table.schema[name].is_nested())
        hashes = hash_columns(table, plain, self.buckets.seed)
        return pl.Series(buckets_of(hashes, self.buckets.count))


@dataclass(frozen=True)
class _Divide:
    """Divides frames by the bucket of each row, which ``buckets_of`` gives for a frame and its number."""

    buckets_of: Callable[[pl.DataFrame, int], pl.Series]

    def __call__(self, frames: Iterator[NumberedFrame]) -> Iterator[FrameRow]:
        for number, row in frames:
            table = decode_frame(row.frame)
            buckets = self.buckets_of(table, number).alias(_BUCKET)
            numbers = constant(number, table.height, pl.Int64, _NUMBER)
            divided = table.hstack([numbers, buckets]).partition_by(
                _BUCKET, as_dict=True, include_key=False
            )
            for (bucket,), part in divided.items():
                for cut in cut_for_frames(part):
                    yield FrameRow(row.port, int(bucket), encode_frame(cut))


def _table(frames: Sequence[NumberedFrame]) -> pl.DataFrame:
    """Return the rows of frames in the order of the batch."""
    tables = [decode_frame(row.frame) for _, row in sorted(frames, key=lambda each: each.number)]
    table = pl.concat(tables, how="diagonal")
    if _NUMBER in table.columns:
        table = table.sort(_NUMBER, maintain_order=True).drop(_NUMBER)
    return in_log_order(table)


def _result(result: _TaskResult) -> FrameRow:
    return FrameRow(PORT_RESULT, 0, pickle.dumps(result))


@dataclass(frozen=True)
class _Stage:
    """Stages the rows of frames: at once where all of a key have to be together, else bounded in size."""

    stager: Stager

    def __call__(self, frames: Iterator[NumberedFrame]) -> Iterator[FrameRow]:
        waiting: list[NumberedFrame] = []
        size_bytes = 0
        for each in frames:
            waiting.append(each)
            size_bytes += len(each.row.frame)
            if self.stager.key is None and size_bytes >= _STAGED_BYTES_MAX:
                yield self._stage(waiting)
                waiting, size_bytes = [], 0
        if waiting:
            yield self._stage(waiting)

    def _stage(self, frames: Sequence[NumberedFrame]) -> FrameRow:
        table = _table(frames)
        reachable = self.stager.is_reachable()
        return _result(_TaskResult(table.height, self.stager.stage(table) if reachable else None))


@dataclass(frozen=True)
class _StagePartitions:
    """Stages the rows of partitions, each at once: a task may have several."""

    stager: PartitionStager

    def __call__(self, frames: Iterator[NumberedFrame]) -> Iterator[FrameRow]:
        partitions: dict[int, list[NumberedFrame]] = {}
        for each in frames:
            partitions.setdefault(each.row.bucket, []).append(each)
        for partition, own in partitions.items():
            table = _table(own)
            try:
                part = self.stager.stage(partition, table)
            except CannotStageError as error:
                yield _result(_TaskResult(table.height, None, str(error)))
            else:
                yield _result(_TaskResult(table.height, part))


@dataclass
class OutputTasks:
    """Stages the large outputs of batch after batch. Not thread-safe: batches run one at a time.

    ``stager`` returns what stages the rows of an output of a batch, if anything can. ``on_notice`` is called
    with one line when executors cannot reach a sink, whose rows then go through the driver.
    """

    plan: JobPlan
    tasks: FrameTasks
    stager: Callable[[int, SinkPlan], Stager | PartitionStager | None]
    on_notice: Callable[[str], None]
    _unreachable: set[str] = field(default_factory=set)

    def stage(
        self, batch_id: int, rows: Sequence[FrameRow]
    ) -> tuple[list[FrameRow], dict[str, StagedRows]]:
        """Stage the large outputs of a batch; return the other rows, and what was staged by output."""
        ports: dict[int, list[FrameRow]] = {}
        for row in rows:
            ports.setdefault(row.port, []).append(row)
        staged: dict[str, StagedRows] = {}
        for sink in self.plan.sinks:
            own = ports.get(sink.port)
            if own is None or sink.name in self._unreachable:
                continue
            if self.tasks.size_bytes(own) <= DRIVER_BYTES_MAX:
                continue
            stager = self.stager(batch_id, sink)
            if stager is None:
                continue
            done = self._stage(stager, own)
            if all(each.part is not None for each in done):
                rows_staged = sum(each.rows for each in done)
                staged[sink.name] = StagedRows(rows_staged, tuple(each.part for each in done))
            else:
                self._give_up(sink, next((each.reason for each in done if each.reason), ""))
        gone = {sink.port for sink in self.plan.sinks if sink.name in staged}
        return [row for row in rows if row.port not in gone], staged

    def _stage(
        self, stager: Stager | PartitionStager, rows: Sequence[FrameRow]
    ) -> list[_TaskResult]:
        if isinstance(stager, PartitionStager):
            divided = self.tasks.map(_Divide(stager.partitions_of), rows)
            return list(_results(self.tasks.map_buckets(_StagePartitions(stager), divided)))
        if stager.key is None:
            return list(_results(self.tasks.map(_Stage(stager), rows)))
        buckets = Buckets(self.tasks.partitions, self.plan.buckets.seed)
        divided = self.tasks.map(_Divide(_KeyBuckets(stager.key, buckets)), rows)
        return list(_results(self.tasks.map_buckets(_Stage(stager), divided)))

    def _give_up(self, sink: SinkPlan, reason: str) -> None:
        self._unreachable.add(sink.name)
        why = f" ({reason})" if reason else ""
        self.on_notice(
            f"not all executors reach what {sink.name!r} is written to{why}, so all its rows go through the driver in "
            "this run. Have them see its folder under the same path, or reach its database or brokers with the "
            "credentials and certificates that the driver has."
        )


def _results(rows: Iterable[FrameRow]) -> Iterator[_TaskResult]:
    for row in rows:
        result: _TaskResult = pickle.loads(row.frame)  # noqa: S301 - made by a task, in this job
        yield result
