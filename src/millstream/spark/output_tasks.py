"""Large outputs of a batch are written by tasks, so that they grow with the cluster and not with the driver.

Tasks stage the rows (`views/staging.py`, which says what a crash leaves), and the sink commits what they
staged. A small output goes through the driver, as all outputs do on one machine: a round of tasks takes some
ten milliseconds, more than the rows.

Where rows of a key replace or cancel one another, all of a key have to be together, in the order of the batch. So
there tasks first divide the frames by the hash of the key, and then other tasks stage one share each, with the
code by which the driver would.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import polars as pl

from millstream.kernels.frames import FrameRow, cut_for_frames, decode_frame, encode_frame
from millstream.kernels.plan import JobPlan, SinkPlan
from millstream.kernels.state.keyhash import Buckets, buckets_of, hash_columns
from millstream.kernels.time.log_order import in_log_order
from millstream.spark.frame_blocks import PORT_RESULT, NumberedFrame
from millstream.spark.frame_tasks import FrameTasks
from millstream.views.staging import StagedRows, Stager

DRIVER_BYTES_MAX = 8 << 20
"""The largest output of a batch that the driver writes itself."""

_STAGED_BYTES_MAX = 128 << 20  # of frames that a task stages at once, where any division will do
_NUMBER = "__number"  # Int64: which frame of the batch a row was in
_BUCKET = "__bucket"


class _TaskResult(NamedTuple):
    """What a task did: how many rows it was given, and what it staged; None if it could not reach the sink."""

    rows: int
    part: Any | None


@dataclass(frozen=True)
class _DivideByKey:
    """Divides frames by the hash of a key."""

    key: tuple[str, ...]
    buckets: Buckets

    def __call__(self, frames: Iterator[NumberedFrame]) -> Iterator[FrameRow]:
        for number, row in frames:
            table = decode_frame(row.frame)
            plain = tuple(name for name in self.key if not table.schema[name].is_nested())
            buckets = buckets_of(hash_columns(table, plain, self.buckets.seed), self.buckets.count)
            numbers = pl.repeat(number, table.height, dtype=pl.Int64, eager=True).alias(_NUMBER)
            divided = table.hstack([numbers, pl.Series(_BUCKET, buckets)]).partition_by(
                _BUCKET, as_dict=True, include_key=False
            )
            for (bucket,), part in divided.items():
                for cut in cut_for_frames(part):
                    yield FrameRow(row.port, int(bucket), encode_frame(cut))


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
        tables = [
            decode_frame(row.frame) for _, row in sorted(frames, key=lambda each: each.number)
        ]
        table = pl.concat(tables, how="diagonal")
        if _NUMBER in table.columns:
            table = table.sort(_NUMBER, maintain_order=True).drop(_NUMBER)
        reachable = self.stager.is_reachable()
        part = self.stager.stage(in_log_order(table)) if reachable else None
        return FrameRow(PORT_RESULT, 0, pickle.dumps(_TaskResult(table.height, part)))


@dataclass
class OutputTasks:
    """Stages the large outputs of batch after batch. Not thread-safe: batches run one at a time.

    ``stager`` returns what stages the rows of an output of a batch, if anything can. ``on_notice`` is called
    with one line when executors cannot reach a sink, whose rows then go through the driver.
    """

    plan: JobPlan
    tasks: FrameTasks
    stager: Callable[[int, SinkPlan], Stager | None]
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
            found = None if stager is None else self._stage(stager, own)
            if found is not None:
                staged[sink.name] = found
            elif stager is not None:
                self._give_up(sink)
        gone = {sink.port for sink in self.plan.sinks if sink.name in staged}
        return [row for row in rows if row.port not in gone], staged

    def _stage(self, stager: Stager, rows: Sequence[FrameRow]) -> StagedRows | None:
        stage = _Stage(stager)
        if stager.key is None:
            out = self.tasks.map(stage, rows)
        else:
            buckets = Buckets(self.tasks.partitions, self.plan.buckets.seed)
            out = self.tasks.map_buckets(
                stage, self.tasks.map(_DivideByKey(stager.key, buckets), rows)
            )
        done = list(_results(out))
        if any(each.part is None for each in done):
            return None
        return StagedRows(sum(each.rows for each in done), tuple(each.part for each in done))

    def _give_up(self, sink: SinkPlan) -> None:
        self._unreachable.add(sink.name)
        self.on_notice(
            f"not all executors reach what {sink.name!r} is written to, so all its rows go through the driver in "
            "this run. Have them see its folder under the same path, or reach its database with the credentials "
            "in their environment."
        )


def _results(rows: Iterable[FrameRow]) -> Iterator[_TaskResult]:
    for row in rows:
        result: _TaskResult = pickle.loads(row.frame)  # noqa: S301 - made by a task, in this job
        yield result
