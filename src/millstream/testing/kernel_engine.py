"""The in-process engine of the test kit: the job's own plan and kernels, batch by batch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from millstream.errors import ConfigError
from millstream.kernels.frames import FrameRow
from millstream.kernels.ingest import Ingest, Lane
from millstream.kernels.plan import JobPlan, SourcePlan
from millstream.kernels.sorted_runs import MemoryRunStore
from millstream.kernels.stage import run_stage
from millstream.kernels.watermarks import PartitionProgress, idle_partitions
from millstream.views.commit import gather
from millstream.views.outputs import open_targets

if TYPE_CHECKING:
    from millstream.testing.run import Arrival

_JOB = "main"


@dataclass
class MemoryBucketState:
    """The state of one stage in one bucket, in memory."""

    stored: bytes | None = None
    stores: dict[int, MemoryRunStore] = field(default_factory=dict)

    def manifest(self) -> bytes | None:
        return self.stored

    def put_manifest(self, manifest: bytes) -> None:
        self.stored = manifest

    def runs(self, port: int) -> MemoryRunStore:
        return self.stores.setdefault(port, MemoryRunStore())


@dataclass
class KernelEngine:
    """Runs a plan over arrivals: partitions in lists, state in memory, targets that are real."""

    plan: JobPlan
    views: Path
    partition_counts: Mapping[str, int]
    dice: random.Random
    clock_ms: int = 0
    logs: dict[str, list[list[bytes]]] = field(default_factory=dict)
    progress: dict[str, list[PartitionProgress]] = field(default_factory=dict)
    states: dict[tuple[int, int], MemoryBucketState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.plan.natives:
            raise ConfigError(
                f"The app has a native Spark step, {self.plan.natives[0].name!r}. Run it with "
                'engine="spark".'
            )
        for topic in {source.topic for source in self.plan.sources}:
            count = self.partition_counts[topic]
            self.logs[topic] = [[] for _ in range(count)]
            self.progress[topic] = [PartitionProgress(0, 0)] * count

    def run(self, arrivals: Mapping[str, Sequence[Arrival | int]], batches: int) -> None:
        """Run all arrivals, cut into about ``batches`` batches; Ticks make batches of their own."""
        with open_targets(self.plan, self.views, self.views.parent) as targets:
            targets.begin_run(_JOB, "in-memory")
            for batch_id, rows in enumerate(self._batches(arrivals, batches)):
                targets.commit(batch_id, gather(self.plan, rows), {})

    def _batches(
        self, arrivals: Mapping[str, Sequence[Arrival | int]], batches: int
    ) -> Iterator[list[FrameRow]]:
        for section in _sections(arrivals):
            for topic, part in section.rows.items():
                if topic in self.logs:
                    for arrival in part:
                        self.logs[topic][arrival.partition].append(arrival.value)
            for _ in range(batches - 1):
                yield self._batch(self._cut())
            yield self._batch({t: [len(log) for log in logs] for t, logs in self.logs.items()})
            if section.tick_ms:
                self.clock_ms += section.tick_ms
                yield self._batch({t: [len(log) for log in logs] for t, logs in self.logs.items()})

    def _cut(self) -> dict[str, list[int]]:
        """Choose where the next batch ends: somewhere in what each partition still holds."""
        return {
            topic: [
                self.dice.randint(at.offset, len(log))
                for at, log in zip(self.progress[topic], logs, strict=True)
            ]
            for topic, logs in self.logs.items()
        }

    def _batch(self, ends: Mapping[str, Sequence[int]]) -> list[FrameRow]:
        before = {topic: list(progress) for topic, progress in self.progress.items()}
        for topic, goals in ends.items():
            self.progress[topic] = [
                PartitionProgress(goal, self.clock_ms if goal > at.offset else at.active_ms)
                for at, goal in zip(before[topic], goals, strict=True)
            ]
        rows: list[FrameRow] = []
        for source in self.plan.sources:
            rows += self._ingest(source, before[source.topic])
        for depth, stage in enumerate(self.plan.stages):
            rows = [
                out
                for label in self.plan.bucket_labels
                for out in run_stage(
                    stage,
                    label,
                    self.plan.bucket_labels,
                    [row for row in rows if row.bucket == label],
                    self.states.setdefault((depth, label), MemoryBucketState()),
                )
            ]
        return rows

    def _ingest(self, source: SourcePlan, before: Sequence[PartitionProgress]) -> list[FrameRow]:
        after = self.progress[source.topic]
        logs = self.logs[source.topic]
        behind = [at.offset < len(log) for at, log in zip(after, logs, strict=True)]
        idle = idle_partitions(after, behind, self.clock_ms, source.rule.idle_ms)
        lanes = [
            lane
            for partition, (start, end) in enumerate(zip(before, after, strict=True))
            for lane in self._lanes(logs[partition], partition, start.offset, end.offset)
        ]
        middle = self.dice.randint(0, len(lanes))  # as if two tasks had read them
        rows: list[FrameRow] = []
        for part in (lanes[:middle], lanes[middle:]):
            ingest = Ingest(source, self.plan.bucket_labels)
            rows += ingest.run(part, len(logs), idle)
        return rows

    def _lanes(self, log: list[bytes], partition: int, start: int, end: int) -> list[Lane]:
        """Read a range as one or two lanes, and each lane as one or two record batches."""
        middle = self.dice.randint(start, end)
        ranges = [(start, middle), (middle, end)]
        return [
            Lane(partition, number, stop, [_records(log, at, stop)])
            for number, (at, stop) in enumerate(r for r in ranges if r[0] < r[1])
        ]


@dataclass
class _Section:
    """The rows between two Ticks, and the Tick that ends them."""

    rows: dict[str, list[Arrival]]
    tick_ms: int


def _sections(arrivals: Mapping[str, Sequence[Arrival | int]]) -> list[_Section]:
    """Divide at Ticks: the n-th Ticks of all topics are one and the same."""
    sections: list[_Section] = []
    for topic, items in arrivals.items():
        number = 0
        for item in items:
            while len(sections) <= number:
                sections.append(_Section({}, 0))
            if isinstance(item, int):
                sections[number].tick_ms = item
                number += 1
            else:
                sections[number].rows.setdefault(topic, []).append(item)
    return sections or [_Section({}, 0)]


def _records(log: list[bytes], start: int, end: int) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "offset": pa.array(range(start, end), pa.int64()),
            "timestamp": pa.array([0] * (end - start), pa.timestamp("ms", "UTC")),
            "value": pa.array(log[start:end], pa.binary()),
        }
    )
