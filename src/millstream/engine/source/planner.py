"""The source of a run: plans batches over the log, reads it, perhaps in workers, and yields frames.

The planner (one for each run) decides where batches begin and end. The workers read segment files
from the log's folder, or ranges of offsets from brokers; they decode, filter, aggregate partially and divide
into buckets before anything reaches Spark: see :mod:`millstream.kernels.ingest`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millstream.client.open import open_reader
from millstream.client.reader import RecordReader
from millstream.engine.frame_files import FrameFiles
from millstream.engine.source.alignment import Paces
from millstream.engine.source.event_times import EventTimesFile
from millstream.engine.source.missed_deletions import (
    check_deletions,
    last_removals,
    topics_of_tables,
)
from millstream.engine.source.offsets import (
    EndOffsets,
    LogSnapshot,
    SourceOffset,
    Split,
    divide,
    next_offset,
)
from millstream.engine.source.split_reader import SplitReader
from millstream.kernels.decode.archive_columns import ArchivedRecords
from millstream.kernels.frames import FrameRow
from millstream.kernels.ingest import Ingest, RecordCount, SplitInput
from millstream.kernels.plan import SourcePlan
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.time.watermarks import PartitionProgress, SourceTime

_ARROW_SCHEMA = pa.schema([("port", pa.int32()), ("bucket", pa.int32()), ("frame", pa.binary())])
_DETAILS = ("offset", "key", "headers", "value")
_TASK_ROWS_MIN = 20_000
_YIELD_BYTES = 64 << 20
# A batch up to these limits is read by the planner or the sink. A task in a Python worker costs tens of milliseconds
# besides its work; these take about 10 for a batch of 1,000 small records.
_DRIVER_ROWS_MAX = 5_000
_DRIVER_BYTES_MAX = 8 << 20
_WAIT_S = 0.1
_LOOK_S = 0.01


@dataclass(frozen=True)
class SourceSpec:
    """The settings of the source.

    ``stop_request``, ``stop_acknowledged`` and ``event_times`` are files: see :class:`LogPlanner`.
    ``heartbeat_ms``: how often operators need a batch that only advances time. ``frame_files`` takes
    large frames. ``first_offsets`` say where partitions begin, of topics that do not begin at their first record.
    ``planner_reads``: the planner reads small batches; else the sink does.
    """

    log: Path | str = field(repr=False)  # an option of kafka:// may be a password
    sources: tuple[SourcePlan, ...]
    buckets: Buckets
    rows_max: int
    tasks: int
    stop_request: Path
    stop_acknowledged: Path
    event_times: Path
    heartbeat_ms: int | None
    frame_files: FrameFiles
    first_offsets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    planner_reads: bool = True


@dataclass(frozen=True)
class Task:
    """What one task reads, and the planned time: one entry per source of the plan.

    ``topic_ids`` are the ids of the topics of the splits; ``removals`` see :class:`SourceOffset`.
    """

    splits: tuple[Split, ...]
    planned: tuple[SourceTime, ...]
    topic_ids: Mapping[str, str]
    removals: Mapping[str, tuple[int, ...]]


class LogPlanner:
    """Decides where batches begin and end. Lives as long as the query, in one process.

    Unless the sink does so, it also reads small batches, and gives their frames to Spark together with the plan,
    which saves a task in a worker. Workers read all other batches. All run the same code over the same offsets.

    A request to stop is a file, which the planner checks between batches: from then on it plans no further
    batch, and writes the file ``stop_acknowledged``. As batches run one after the other, the last one is
    complete then, and the query can be stopped.

    It reads the event times of partitions from the file ``event_times``, which the sink writes.

    It reads the topics that exist when it begins. It refuses offsets of other topics with the same names,
    and topics that are created again later. It also refuses offsets behind which compaction has removed
    deletions that a table needs.
    """

    def __init__(self, spec: SourceSpec) -> None:
        self._spec = spec
        log = open_reader(spec.log)
        self._topic_ids = {
            topic: log.topic_id(topic) for topic in sorted({s.topic for s in spec.sources})
        }
        self._log = log.pinned(self._topic_ids)
        self._event_times = EventTimesFile(spec.event_times)
        self._paces = Paces()
        # the wall clock, and the end offsets after it
        self._pinned: tuple[int, EndOffsets] | None = None
        self._clock: tuple[int, float] | None = None  # clock_ms at our start, and when that was
        self._tables = topics_of_tables(spec.sources)
        self._checked_deletions = False

    def initial_offset(self, starts: Mapping[str, Sequence[int]] | None = None) -> dict[str, Any]:
        """Return the offset before the records at ``starts``, by topic and partition.

        By default before those at the ``first_offsets`` of the settings, and before all records of other partitions.
        """
        given = self._spec.first_offsets if starts is None else starts
        topics = {}
        for source in self._spec.sources:
            known = given.get(source.topic, ())
            others = self._log.offsets(source.topic)[len(known) :]
            begins = (*known, *(start for start, _ in others))
            topics[source.topic] = tuple(PartitionProgress(start, 0) for start in begins)
        removals: dict[str, tuple[int, ...]] = dict.fromkeys(self._tables, ())
        offset = SourceOffset(0, topics, {}, topic_ids=self._topic_ids, removals=removals)
        return self._with_removals(offset).to_json()

    def pin_end_offsets(self, ends: EndOffsets | None = None) -> None:
        """Read up to some end offsets only, by default the present ones, and plan no batch that only advances time."""
        wall_ms, present = self._end_offsets()
        self._pinned = wall_ms, present if ends is None else ends

    def next_offset(self, start: dict[str, Any]) -> dict[str, Any]:
        """Return where the batch that begins at ``start`` ends; ``start`` if none is due."""
        if self._spec.stop_request.exists():
            self._spec.stop_acknowledged.touch()
            return start
        at = SourceOffset.from_json(start)
        at.check_topics(self._topic_ids)
        self._check_deletions(at)
        clock_ms = self._clock_ms(at)
        wall_ms, ends = self._pinned or self._end_offsets()
        event_times = self._event_times.read()
        self._paces.update({topic: at.offsets(topic) for topic in at.topics}, event_times)
        offset = next_offset(
            at,
            LogSnapshot(clock_ms, wall_ms, ends, event_times, self._paces.known),
            self._spec.sources,
            rows_max=self._spec.rows_max,
            heartbeat_ms=self._spec.heartbeat_ms,
            beats=self._pinned is None,
        )
        return self._with_arrival_times(at, self._with_removals(offset)).to_json()

    def await_next_offset(
        self, start: dict[str, Any], timeout_s: float = _WAIT_S
    ) -> dict[str, Any]:
        """Return where the batch that begins at ``start`` ends, as soon as one is due; ``start`` if none is in that time.

        While nothing is due it looks at the ends of the log alone, which costs a hundredth of a plan. Records are
        noticed within 10 milliseconds, and a batch that time makes due within ``timeout_s``.
        """
        end = self.next_offset(start)
        if end != start or self._pinned is not None or self._spec.stop_request.exists():
            return end
        at = SourceOffset.from_json(start)
        seen = {topic: at.offsets(topic) for topic in at.topics}
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
            if self._end_offsets()[1] != seen:
                return self.next_offset(start)
        return start

    def records_left(self, at: dict[str, Any]) -> int:
        """Return how many offsets are between an offset and the pinned ends."""
        assert self._pinned is not None, "the ends are pinned"
        ends, read = self._pinned[1], SourceOffset.from_json(at)
        return sum(
            end - offset
            for topic in read.topics
            for offset, end in zip(read.offsets(topic), ends[topic], strict=False)
        )

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Task]:
        """Divide a batch into tasks."""
        return plan_tasks(self._spec, start, end)

    def read_on_driver(
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> Iterator[pa.RecordBatch] | None:
        """Return a small batch's frames, read here: see :func:`read_small`; None lets others read it."""
        if not self._spec.planner_reads:
            return None
        rows = read_small(self._spec, start, end)
        return None if rows is None else iter(list(record_batches(iter(rows))))

    def read(self, task: Task) -> Iterator[pa.RecordBatch]:
        """Read a task's records, in a worker."""
        yield from record_batches(run_task(self._spec, task))

    def _end_offsets(self) -> tuple[int, dict[str, list[int]]]:
        """Return the wall clock, and the end offsets read after it.

        Those of what rows are looked up in come last: so what arrived before a row is there.
        """
        wall_ms = time.time_ns() // 1_000_000
        levels = {source.topic: source.looked_up for source in self._spec.sources}
        return wall_ms, {
            topic: [end for _, end in self._log.offsets(topic)]
            for topic in sorted(levels, key=lambda topic: levels[topic])
        }

    def _check_deletions(self, at: SourceOffset) -> None:
        """Refuse, as a run begins, offsets behind which a table has missed deletions; later, tasks do."""
        if not self._checked_deletions:
            for topic in self._tables:
                read = [one for one in enumerate(at.offsets(topic)) if one[1]]
                _check_deletions(self._spec, self._log, topic, read, at.removals)
            self._checked_deletions = True

    def _with_removals(self, offset: SourceOffset) -> SourceOffset:
        """Add the last removals of partitions that begin to be read.

        An offset of a version that knew of none has none at all: then all of them count.
        """
        removals = dict(offset.removals)
        for topic in self._tables:
            count = len(offset.topics[topic])
            known = removals.get(topic, (0,) * count)
            if len(known) < count:
                known += last_removals(self._log, topic, count)[len(known) :]
            removals[topic] = known
        return offset if removals == offset.removals else replace(offset, removals=removals)

    def _with_arrival_times(self, before: SourceOffset, after: SourceOffset) -> SourceOffset:
        """Add the latest arrival times, for sources whose event time is the time of arrival."""
        for topic in {s.topic for s in self._spec.sources if s.rule.settle_us is not None}:
            known = [at.offset for at in before.topics[topic]]
            starts = known + [0] * (len(after.topics[topic]) - len(known))
            latest = [
                self._latest_arrival_ms(topic, partition, start, end)
                for partition, (start, end) in enumerate(
                    zip(starts, after.offsets(topic), strict=True)
                )
            ]
            after = after.with_arrival_times(topic, latest)
        return after

    def _latest_arrival_ms(self, topic: str, partition: int, start: int, end: int) -> int:
        stamps = self._log.read(topic, partition, start, end, columns=("timestamp",))
        return max(
            (pc.max(batch.column(0)).cast(pa.int64()).as_py() for batch in stamps), default=0
        )

    def _clock_ms(self, at: SourceOffset) -> int:
        """Return the running time: that of the offset, and what has passed since this process began.

        Time in which the job did not run does not count: it makes no partition idle.
        """
        now = time.monotonic()
        if self._clock is None:
            self._clock = (at.clock_ms, now)
        began_ms, began = self._clock
        return began_ms + int((now - began) * 1000)


def plan_tasks(spec: SourceSpec, start: dict[str, Any], end: dict[str, Any]) -> list[Task]:
    """Divide a batch from one source offset to another into tasks."""
    before, after = SourceOffset.from_json(start), SourceOffset.from_json(end)
    planned = tuple(after.time_of(source) for source in spec.sources)
    divided = divide(before, after, spec.sources, tasks=spec.tasks, rows_min=_TASK_ROWS_MIN)
    return [Task(tuple(splits), planned, after.topic_ids, after.removals) for splits in divided]


def read_small(
    spec: SourceSpec, start: dict[str, Any], end: dict[str, Any]
) -> list[FrameRow] | None:
    """Return the frames of a small batch, read in this process; None lets workers read it.

    After an error here, too, workers read it: there the error is retried, and reported as for all
    batches.
    """
    tasks = plan_tasks(spec, start, end)
    if start == end or len(tasks) > 1:  # Spark calls once with an empty range, at the start
        return None
    (task,) = tasks
    if sum(split.end - split.start for split in task.splits) > _DRIVER_ROWS_MAX:
        return None
    try:
        return list(_within(run_task(spec, task, _DRIVER_BYTES_MAX), _DRIVER_BYTES_MAX))
    except Exception:  # noqa: BLE001 - see above
        return None


def read_planned(
    spec: SourceSpec, planned: Callable[[int], dict[str, Any] | None], batch_id: int
) -> list[FrameRow] | None:
    """Return the frames of a batch as :func:`read_small`; ``planned`` says at which offset a batch ends.

    None, too, where it does not: the first batch of a job begins where no other has ended.
    """
    start, end = planned(batch_id - 1), planned(batch_id)
    return None if start is None or end is None else read_small(spec, start, end)


def _check_deletions(
    spec: SourceSpec,
    log: RecordReader,
    topic: str,
    positions: Iterable[tuple[int, int]],
    removals: Mapping[str, tuple[int, ...]],
) -> None:
    check_deletions(log, topic, positions, removals.get(topic, ()), spec.stop_request.parent)


class _TooLargeError(Exception):
    """A task has more bytes to read, or to give, than it may."""


def run_task(
    spec: SourceSpec, task: Task, bytes_max: int | None = None, records: RecordReader | None = None
) -> Iterator[FrameRow]:
    """Read a task's records, from the log unless ``records`` has them, and yield their frames; large ones by name."""
    reader = open_reader(spec.log).pinned(task.topic_ids) if records is None else records
    within = _ByteLimit(bytes_max)
    for index, source in enumerate(spec.sources):
        split_reader = SplitReader(reader, source)
        inputs = (
            _split_input(split_reader, split, within)
            for split in task.splits
            if split.source == index
        )
        ingest = Ingest(source, spec.buckets)
        yield from map(spec.frame_files.put, ingest.run(inputs, task.planned[index]))
    for topic in topics_of_tables(spec.sources):
        starts = [
            (split.partition, split.start)
            for split in task.splits
            if spec.sources[split.source].topic == topic
        ]
        _check_deletions(spec, reader, topic, starts, task.removals)


def _within(rows: Iterator[FrameRow], bytes_max: int) -> Iterator[FrameRow]:
    """Pass rows on; raise when their frames have more bytes in all: steps may make much of few events."""
    size_bytes = 0
    for row in rows:
        size_bytes += len(row.frame)
        if size_bytes > bytes_max:
            raise _TooLargeError
        yield row


def _split_input(records: SplitReader, split: Split, within: _ByteLimit) -> SplitInput:
    tally = RecordCount()
    return SplitInput(
        split.partition,
        split.number,
        split.start,
        split.end,
        within(records.read(split.partition, split.start, split.end, tally)),
        split.arrived_ms,
        partial(records.reader.read, records.source.topic, split.partition, columns=_DETAILS),
        tally,
    )


@dataclass
class _ByteLimit:
    """Passes record batches through; raises when they have more bytes in all than are allowed."""

    bytes_max: int | None
    bytes_read: int = 0

    def __call__(
        self, batches: Iterator[pa.RecordBatch | ArchivedRecords]
    ) -> Iterator[pa.RecordBatch | ArchivedRecords]:
        for batch in batches:
            self.bytes_read += batch.nbytes
            if self.bytes_max is not None and self.bytes_read > self.bytes_max:
                raise _TooLargeError
            yield batch


def record_batches(rows: Iterator[FrameRow]) -> Iterator[pa.RecordBatch]:
    """Put rows into record batches of bounded size, in the exact types that Spark insists on."""
    waiting: list[FrameRow] = []
    size_bytes = 0
    for row in rows:
        waiting.append(row)
        size_bytes += len(row.frame)
        if size_bytes >= _YIELD_BYTES:
            yield _record_batch(waiting)
            waiting, size_bytes = [], 0
    yield _record_batch(waiting)


def _record_batch(rows: list[FrameRow]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    arrays = [
        pa.array(column, field.type) for column, field in zip(columns, _ARROW_SCHEMA, strict=True)
    ]
    return pa.record_batch(arrays, schema=_ARROW_SCHEMA)
