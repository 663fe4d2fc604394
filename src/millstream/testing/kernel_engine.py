"""The in-process engine of the test kit: the job's own plan and kernels, batch by batch."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args
from unittest import mock

import pyarrow as pa

from millstream.errors import ConfigError
from millstream.kernels.frames import FrameRow
from millstream.kernels.ingest import Ingest, SplitInput
from millstream.kernels.plan import JobPlan, SourcePlan
from millstream.kernels.rescale import rescale_manifests
from millstream.kernels.stage import run_stage
from millstream.kernels.state.journal import MemoryJournal
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.state.memory_bucket import MemoryBucketState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.kernels.time.split_clocks import PartitionPunctuation
from millstream.kernels.time.watermarks import PartitionProgress, SourceTime, idle_partitions
from millstream.log.decoding import SCHEMA
from millstream.testing.disk import SimulatedCrash
from millstream.testing.inputs import InputRecord, Item, Tick, WatermarkAdvance
from millstream.views.commit.committer import BatchCommitter, collect_results
from millstream.views.commit.open_committer import open_committer
from millstream.views.commit.time_status import time_status
from millstream.views.questions.requests import RequestAnswers, StateAfterBatch
from millstream.views.store_location import StoreLocation, place_of

_JOB = "main"
CrashPoint = Literal["before the commit", "between the commits", "after the commit"]
CRASH_POINTS: tuple[CrashPoint, ...] = get_args(CrashPoint)


@dataclass
class MemoryPartition:
    """One partition in memory: records, and punctuations between them.

    ``taken`` counts the items that batches have read, ``active_ms`` says when (in running time) a
    record was last among them.
    """

    items: list[InputRecord | PartitionPunctuation] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])  # records before each item
    stamps_ms: list[int] = field(default_factory=list)  # of the records, by offset
    arrived_ms: list[int] = field(default_factory=lambda: [0])  # the largest stamp before each
    taken: int = 0
    active_ms: int = 0

    def append(self, item: InputRecord | PartitionPunctuation, stamp_ms: int) -> None:
        """Put an item at the end."""
        self.items.append(item)
        if isinstance(item, PartitionPunctuation):
            self.offsets.append(self.offsets[-1])
        else:
            self.offsets.append(self.offsets[-1] + 1)
            self.stamps_ms.append(stamp_ms)
            self.arrived_ms.append(max(self.arrived_ms[-1], stamp_ms))

    def read(self, start: int, end: int) -> Iterator[pa.RecordBatch | PartitionPunctuation]:
        """Return the items ``[start, end)``, with neighbouring records as one record batch."""
        waiting: list[InputRecord] = []
        offset = self.offsets[start]
        for item in self.items[start:end]:
            if isinstance(item, InputRecord):
                waiting.append(item)
                continue
            if waiting:
                yield self._records(waiting, offset)
            yield item
            offset, waiting = offset + len(waiting), []
        if waiting:
            yield self._records(waiting, offset)

    def _records(self, records: list[InputRecord], offset: int) -> pa.RecordBatch:
        stamps_ms = self.stamps_ms[offset : offset + len(records)]
        headers = [
            [{"key": name, "value": value} for name, value in record.headers] for record in records
        ]
        return pa.record_batch(
            {
                "offset": pa.array(range(offset, offset + len(records)), pa.int64()),
                "timestamp": pa.array(stamps_ms, pa.timestamp("ms", "UTC")),
                "key": pa.array([record.key for record in records], pa.binary()),
                "value": pa.array([record.value for record in records], pa.binary()),
                "headers": pa.array(headers, SCHEMA.field("headers").type),
            }
        )


@dataclass
class KernelEngine:
    """Runs a plan on inputs: partitions in lists, state in memory, real sinks.

    ``clock_ms`` is running time, which only Ticks move; ``now_ms`` is the time of day, which
    arrivals move, too.
    """

    plan: JobPlan
    views: StoreLocation
    partition_counts: Mapping[str, int]
    dice: random.Random
    clock_ms: int = 0
    now_ms: int = 0
    logs: dict[str, list[MemoryPartition]] = field(default_factory=dict)
    states: dict[tuple[int, int], MemoryBucketState] = field(default_factory=dict)
    batch_id: int = 0
    journal: MemoryJournal = field(default_factory=MemoryJournal)  # outlives crashes
    log: Path | None = None  # what topics are written to; by default the folder of the views
    buckets: Buckets = field(init=False)
    rescales: int = 0

    def __post_init__(self) -> None:
        self.buckets = self.plan.buckets
        if self.plan.natives:
            raise ConfigError(
                f"The app has a native Spark step, {self.plan.natives[0].name!r}. Run it with "
                'engine="spark".'
            )
        if self.plan.frames:
            raise ConfigError(
                f"The app takes in a DataFrame of Spark's, {self.plan.frames[0].name!r}. Run it with "
                'engine="spark".'
            )
        for topic in {source.topic for source in self.plan.sources}:
            self.logs[topic] = [MemoryPartition() for _ in range(self.partition_counts[topic])]

    def run(self, inputs: Mapping[str, Sequence[Item]], batches: int, crashes: int = 0) -> None:
        """Run all inputs, cut into about ``batches`` batches; Ticks make batches of their own.

        ``crashes`` times a batch is interrupted, and run again by a new run.
        """
        self.now_ms = _beginning_ms(inputs)
        to_come = self._crashes(inputs, batches, crashes)
        with ExitStack() as opened:
            committer = self._begin(opened)
            for batch_id, ends in enumerate(self._ends(inputs, batches)):
                self.batch_id = batch_id
                for point in to_come.get(batch_id, ()):
                    self._crash(committer, batch_id, ends, point)
                    opened.close()
                    committer = self._begin(opened)
                self._commit(committer, batch_id, self._batch(ends))

    def _begin(self, opened: ExitStack) -> BatchCommitter:
        log = self.log or place_of(self.views)
        assert isinstance(log, Path), "a store in a database is in no folder: give a log"
        committer = opened.enter_context(open_committer(self.plan, self.views, log))
        committer.begin_run(_JOB, "in-memory")
        return committer

    def _crashes(
        self, inputs: Mapping[str, Sequence[Item]], batches: int, crashes: int
    ) -> dict[int, list[CrashPoint]]:
        """Choose the batches to interrupt, and the points of the crashes."""
        ticks = sum(section.tick is not None for section in _sections(inputs))
        count = len(_sections(inputs)) * batches + ticks
        chosen: dict[int, list[CrashPoint]] = {}
        for _ in range(crashes):
            point = self.dice.choice(CRASH_POINTS)
            chosen.setdefault(self.dice.randrange(count), []).append(point)
        return chosen

    def _crash(
        self,
        committer: BatchCommitter,
        batch_id: int,
        ends: Mapping[str, Sequence[int]],
        point: CrashPoint,
    ) -> None:
        """Run a batch up to a point; undo what was not committed by then."""
        states = {place: state.copy() for place, state in self.states.items()}
        buckets = self.buckets
        read = [(p, p.taken, p.active_ms) for logs in self.logs.values() for p in logs]
        rows = self._batch(ends)
        if point == "after the commit":
            self._commit(committer, batch_id, rows)
        elif (
            point == "between the commits"
        ):  # the other sinks have the batch, the state store does not
            died = mock.patch.object(committer.state_store, "commit", side_effect=SimulatedCrash)
            with died, suppress(SimulatedCrash):
                self._commit(committer, batch_id, rows)
        self.states, self.buckets = states, buckets
        for partition, taken, active_ms in read:
            partition.taken, partition.active_ms = taken, active_ms

    def _commit(self, committer: BatchCommitter, batch_id: int, rows: list[FrameRow]) -> None:
        result = collect_results(self.plan, rows)
        answers = RequestAnswers(replace(self.plan, buckets=self.buckets))
        answers.put(result, batch_id, committer, lambda: self._after(batch_id))
        watermark = result.watermark
        at = datetime.fromtimestamp(self.now_ms / 1000, UTC)
        known = committer.state_store.status(self.plan.app, _JOB)
        status = {
            "watermark": None if watermark is None else watermark.isoformat(),
            "forgotten_producers": result.forgotten_producers,
            "gauges": result.gauges,
            "lag": {
                f"{topic}/{number}": len(partition.items) - partition.taken
                for topic, logs in self.logs.items()
                for number, partition in enumerate(logs)
            },
            **time_status(known, self.plan, result, batch_id, at),
        }
        committer.commit(batch_id, result, status)

    def _after(self, batch_id: int) -> StateAfterBatch:
        """Return the state after the batch that was run last."""
        return StateAfterBatch(
            {place: state.stored for place, state in self.states.items() if state.stored},
            self._all_runs(),
            lambda key: replace(self.journal, scope=(str(batch_id), "0", key)),
        )

    def _all_runs(self) -> MemoryRunStore:
        """Return all runs that are held, for reading. No two have one name."""
        stores = (store for state in self.states.values() for store in state.stores.values())
        return MemoryRunStore({name: run for store in stores for name, run in store.tables.items()})

    def _batches(
        self, inputs: Mapping[str, Sequence[Item]], batches: int
    ) -> Iterator[list[FrameRow]]:
        for batch_id, ends in enumerate(self._ends(inputs, batches)):
            self.batch_id = batch_id
            yield self._batch(ends)

    def _ends(
        self, inputs: Mapping[str, Sequence[Item]], batches: int
    ) -> Iterator[Mapping[str, Sequence[int]]]:
        """Yield where each batch ends, once the one before is done."""
        for section in _sections(inputs):
            self._append(section)
            for cuts in range(batches - 1, 0, -1):
                yield self._cut(cuts)
            yield self._all()
            if section.tick is not None:
                passing_ms = section.tick.milliseconds(self.now_ms)
                self.clock_ms += passing_ms
                self.now_ms += passing_ms
                yield self._all()

    def _append(self, section: _Section) -> None:
        """Append a section's rows to the partitions; a row without a time arrives with the one before."""
        began_ms = self.now_ms
        for topic, items in section.items.items():
            stamp_ms = began_ms
            partitions = self.logs.get(topic, [])
            for item in items if partitions else ():
                if isinstance(item, WatermarkAdvance):
                    marked = partitions if item.partition is None else [partitions[item.partition]]
                    for partition in marked:
                        partition.append(PartitionPunctuation(item.at_us), stamp_ms)
                else:
                    stamp_ms = stamp_ms if item.at_ms is None else item.at_ms
                    partitions[item.partition].append(item, stamp_ms)
                    self.now_ms = max(self.now_ms, stamp_ms)

    def _all(self) -> dict[str, list[int]]:
        return {topic: [len(p.items) for p in logs] for topic, logs in self.logs.items()}

    def _cut(self, cuts: int) -> dict[str, list[int]]:
        """Choose where the next batch ends: in each partition, at the first of ``cuts`` places that
        are anywhere in what it still holds. So a batch is as large as another, but for chance.
        """
        return {
            topic: [
                min(self.dice.randint(p.taken, len(p.items)) for _ in range(cuts)) for p in logs
            ]
            for topic, logs in self.logs.items()
        }

    def _batch(self, ends: Mapping[str, Sequence[int]]) -> list[FrameRow]:
        rows = self._read(ends)
        for depth, stage in enumerate(self.plan.stages):
            rows = [
                out
                for bucket in self.buckets.numbers
                for out in run_stage(
                    stage,
                    bucket,
                    self.buckets,
                    [row for row in rows if row.bucket == bucket],
                    self._state(depth, bucket),
                )
            ]
        return rows

    def rescale(self, bucket_count: int) -> None:
        """Divide the state into another number of buckets, between two batches."""
        before = self.buckets.count
        self.rescales += 1
        self.buckets = replace(self.buckets, count=bucket_count)
        stored = {place: state.stored for place, state in self.states.items() if state.stored}
        tables: dict[tuple[int, str], dict[str, pa.Table]] = {}
        for (depth, _), state in self.states.items():
            for key, store in state.stores.items():
                tables.setdefault((depth, key), {}).update(store.tables)
        made = rescale_manifests(self.plan.stages, stored, before, bucket_count)
        self.states = {
            place: MemoryBucketState(
                manifest,
                {
                    key: MemoryRunStore(
                        dict(found), 0, f"{self._prefix(place[1])}{key}/", keeps_all=True
                    )
                    for (depth, key), found in tables.items()
                    if depth == place[0]
                },
            )
            for place, manifest in made.items()
        }

    def _prefix(self, bucket: int) -> str:
        """Return how names of runs begin that no bucket has used, before a rescale or after it."""
        return f"{self.rescales}/{bucket}/"

    def _state(self, depth: int, bucket: int) -> MemoryBucketState:
        """Return the state of a stage in a bucket, with the journals of the batch."""
        state = self.states.setdefault(
            (depth, bucket), MemoryBucketState(prefix=self._prefix(bucket))
        )
        state.journals = replace(self.journal, scope=(str(self.batch_id), str(bucket)))
        return state

    def _read(self, ends: Mapping[str, Sequence[int]]) -> list[FrameRow]:
        """Read up to the ends; return the rows of the sources."""
        before = {topic: [p.taken for p in logs] for topic, logs in self.logs.items()}
        for topic, goals in ends.items():
            for partition, goal in zip(self.logs[topic], goals, strict=True):
                if partition.offsets[goal] > partition.offsets[partition.taken]:
                    partition.active_ms = self.clock_ms
                partition.taken = goal
        rows: list[FrameRow] = []
        for source in self.plan.sources:
            rows += self._ingest(source, before[source.topic])
        return rows

    def _ingest(self, source: SourcePlan, before: Sequence[int]) -> list[FrameRow]:
        partitions = self.logs[source.topic]
        splits = [
            split
            for number, (partition, start) in enumerate(zip(partitions, before, strict=True))
            for split in self._splits(partition, number, start)
        ]
        planned = self._planned(source)
        middle = self.dice.randint(0, len(splits))  # as if two tasks had read them
        rows: list[FrameRow] = []
        for part in (splits[:middle], splits[middle:]):
            rows += Ingest(source, self.buckets).run(part, planned)
        return rows

    def _planned(self, source: SourcePlan) -> SourceTime:
        partitions = self.logs[source.topic]
        behind = [p.taken < len(p.items) for p in partitions]
        progress = [PartitionProgress(p.offsets[p.taken], p.active_ms) for p in partitions]
        idle = idle_partitions(progress, behind, self.clock_ms, source.rule.idle_ms)
        latest_ms = max(p.active_ms for p in partitions)
        return SourceTime(
            (),
            len(partitions),
            idle,
            self.clock_ms,
            frozenset(number for number, waits in enumerate(behind) if waits),
            self.now_ms * 1000,
            self.clock_ms - latest_ms if len(idle) == len(partitions) else 0,
        )

    def _splits(self, partition: MemoryPartition, number: int, start: int) -> list[SplitInput]:
        """Read a range as one or two splits, and each split as one or more record batches."""
        end = partition.taken
        middle = self.dice.randint(start, end)
        ranges = [(start, middle), (middle, end)]
        return [
            SplitInput(
                number,
                split,
                partition.offsets[at],
                partition.offsets[stop],
                self._cut_batches(partition, at, stop),
                partition.arrived_ms[partition.offsets[at]],
            )
            for split, (at, stop) in enumerate(r for r in ranges if r[0] < r[1])
        ]

    def _cut_batches(
        self, partition: MemoryPartition, start: int, end: int
    ) -> list[pa.RecordBatch | PartitionPunctuation]:
        middle = self.dice.randint(start, end)
        return [*partition.read(start, middle), *partition.read(middle, end)]


@dataclass
class _Section:
    """The items between two Ticks, and the Tick that ends them."""

    items: dict[str, list[InputRecord | WatermarkAdvance]]
    tick: Tick | None


def _sections(inputs: Mapping[str, Sequence[Item]]) -> list[_Section]:
    """Divide at Ticks: the n-th Ticks of all topics are one and the same."""
    sections: list[_Section] = []
    for topic, items in inputs.items():
        number = 0
        for item in items:
            while len(sections) <= number:
                sections.append(_Section({}, None))
            if isinstance(item, Tick):
                sections[number].tick = item
                number += 1
            else:
                sections[number].items.setdefault(topic, []).append(item)
    return sections or [_Section({}, None)]


def _beginning_ms(inputs: Mapping[str, Sequence[Item]]) -> int:
    """Return the time at which the test begins: the earliest one in its inputs, or the present."""
    given = [
        item.at_ms if isinstance(item, InputRecord) else item.milliseconds(0)
        for items in inputs.values()
        for item in items
        if (isinstance(item, InputRecord) and item.at_ms is not None)
        or (isinstance(item, Tick) and item.at is not None)
    ]
    return min((at for at in given if at is not None), default=time.time_ns() // 1_000_000)
