"""Runs the stages of a batch whose rows an engine has read, and commits the batch once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from millstream.client.reader import Reader
from millstream.engine.frame_files import FrameFiles, MappedFrames
from millstream.engine.source.event_times import EventTimesFile
from millstream.engine.source.offsets import first_offset, with_declared
from millstream.engine.stages.executor import Manifests, StageExecutor
from millstream.errors import StagedRowsLostError
from millstream.kernels.dedup.operator import FALSE_POSITIVE_RATE
from millstream.kernels.frames import FrameRow
from millstream.kernels.plan import JobPlan
from millstream.object_store.store import RequestCounts
from millstream.views.commit.batch_history import PhaseTimer, batch_record
from millstream.views.commit.committer import BatchCommitter, BatchResult, collect_results
from millstream.views.commit.time_status import time_status
from millstream.views.position import merge_positions
from millstream.views.questions.requests import RequestAnswers
from millstream.views.runs.batch_figures import BatchFigures
from millstream.views.runs.batch_spans import emit_batch_spans
from millstream.views.runs.dead_letter_share import DeadLetterShare
from millstream.views.runs.log_fields import set_log_fields
from millstream.views.runs.progress import Progress, largest_batch
from millstream.views.runs.skew import SkewWatch
from millstream.views.schema import JOB
from millstream.views.staging import StagedRows

_log = logging.getLogger(__name__)


@dataclass
class RunTotals:
    """The counts of a run's batches, added up."""

    batches: int = 0
    read: int = 0
    late: int = 0
    filtered: int = 0
    dead: int = 0
    duplicate: int = 0
    last: Progress | None = None

    def add(self, progress: Progress) -> None:
        self.batches += 1
        self.read += progress.read
        self.late += progress.late
        self.filtered += progress.filtered
        self.dead += progress.dead
        self.duplicate += progress.duplicate
        self.last = progress


class FrameStore(Protocol):
    """Has the large frames of a batch, where these are not in files."""

    def get(self, rows: Sequence[FrameRow]) -> list[FrameRow]:
        """Return rows with their frames."""
        ...

    def remove_batch(self) -> None:
        """Release the frames of a committed batch."""
        ...


class OutputStager(Protocol):
    """Writes the large outputs of a batch ahead of its commit."""

    def stage(
        self, batch_id: int, rows: Sequence[FrameRow]
    ) -> tuple[list[FrameRow], dict[str, StagedRows]]:
        """Stage large outputs; return the other rows, and what was staged by output."""
        ...


@dataclass
class BatchRunner:
    """Runs batch after batch of a run that has begun; an error here ends the run and is kept for the caller.

    It may be given a batch again that was committed before a crash: the fence is found, and nothing
    is done. ``stages`` is set before the first batch if the plan has any. Large frames are in ``blocks``, if it is
    given, and otherwise in ``frame_files``. ``outputs`` has tasks write large outputs; None: this process writes
    all. ``on_begin`` is called before anything is done for a batch. ``rows_max`` is how many records one may read.
    """

    plan: JobPlan
    committer: BatchCommitter
    log: Reader
    on_progress: Callable[[Progress], None] | None
    event_times: EventTimesFile
    frame_files: FrameFiles
    dead_letter_share: DeadLetterShare = field(default_factory=lambda: DeadLetterShare(1.0))
    skew: SkewWatch = field(default_factory=lambda: SkewWatch(_log.warning))
    planned_offset: Callable[[int], dict[str, Any] | None] = lambda _batch_id: None
    blocks: FrameStore | None = None
    on_begin: Callable[[int], None] = lambda _batch_id: None
    stages: StageExecutor | None = None
    outputs: OutputStager | None = None
    rows_max: int | None = None
    totals: RunTotals = field(default_factory=RunTotals)
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    error: BaseException | None = None
    _mapped: MappedFrames = field(init=False)
    _answers: RequestAnswers = field(init=False)
    _ended: float = field(default_factory=time.monotonic)
    _arrived_ms: dict[str, int] = field(default_factory=dict)  # topic/partition → last record read
    _time: dict[str, Any] | None = None  # the part of the last status about time
    _largest: dict[str, Any] | None = None  # what the status says of the speed
    _figures: BatchFigures = field(default_factory=BatchFigures)

    def __post_init__(self) -> None:
        self._mapped = MappedFrames(self.frame_files)
        self._answers = RequestAnswers(self.plan)

    def run(self, batch_id: int, read: Callable[[], Sequence[FrameRow]]) -> None:
        """Run a batch whose rows ``read`` returns, and commit it, unless it is committed."""
        try:
            self._commit(batch_id, read)
            # Not before: what the batch had of its frames is gone now.
            self.frame_files.remove_batch(self._mapped.close())
        except BaseException as error:
            self.error = error
            emit_batch_spans(self._names(batch_id), self.timer.phases, error)
            raise

    def _source_offsets(self, batch_id: int, result: BatchResult) -> dict[int, dict[str, Any]]:
        """Return where the source is after a batch, and where it was before the first one."""
        end = self.planned_offset(batch_id)
        if end is None:
            return {}
        found = {batch_id + 1: with_declared(end, self.plan)}
        if batch_id == 0:
            starts = {
                source.topic: {
                    partition: min(start for start, *_ in read)
                    for partition, read in result.ranges.get(source.name, {}).items()
                }
                for source in self.plan.sources
            }
            found[0] = first_offset(end, starts)
        return found

    def _names(self, batch_id: int) -> dict[str, Any]:
        """Return what a batch is named by, in spans and logs."""
        return {
            "app": self.plan.app,
            "job": JOB,
            "run": self.committer.run,
            "batch_id": batch_id,
        }

    def _commit(self, batch_id: int, read: Callable[[], Sequence[FrameRow]]) -> None:
        if not self.committer.is_next(batch_id):
            return
        self.timer.begin((time.monotonic() - self._batch_start(batch_id)) * 1000)
        set_log_fields(**self._names(batch_id))
        self.on_begin(batch_id)
        with self.timer.phase("read"):
            given = read()
        state: Manifests = {}
        if self.stages is not None:
            with self.timer.phase("stages"):
                given, state = self.stages.run(batch_id, given)
        left, staged = given, dict[str, StagedRows]()
        if self.outputs is not None:
            with self.timer.phase("outputs"):
                left, staged = self.outputs.stage(batch_id, given)
        with self.timer.phase("collect"):
            rows = self._fetch(left)
            result = self._result_of(batch_id, rows, staged)
        progress = self._progress(result, batch_id)
        status = self._status(result, progress)
        record = batch_record(progress, result, self.timer, self.committer.run, self.rows_max)

        def commit(result: BatchResult) -> None:
            offsets = self._source_offsets(batch_id, result)
            self.committer.commit(batch_id, result, status, state, record, source_offsets=offsets)

        with self.timer.phase("commit"):
            try:
                commit(result)
            except StagedRowsLostError:  # sinks that have the batch find their fences
                result = self._result_of(batch_id, self._fetch(given), {})
                commit(result)
        if self.stages is not None:
            self.stages.on_commit()
        self.event_times.add(rows)
        if self.blocks is not None:
            self.blocks.remove_batch()
        self.totals.add(progress)
        self.dead_letter_share.observe(result.step_counts)
        self.skew.observe(result.hot_keys, result.sent)
        counts = {"read": progress.read, "late": progress.late, "dead": progress.dead}
        emit_batch_spans({**self._names(batch_id), **counts}, self.timer.phases)
        self.timer.forget_phases()
        _log.info("batch %d is committed: read %d, late %d, dead %d", batch_id, *counts.values())
        if self.on_progress is not None:
            self.on_progress(progress)

    def _result_of(
        self, batch_id: int, rows: Sequence[FrameRow], staged: Mapping[str, StagedRows]
    ) -> BatchResult:
        """Return the result of a batch, with the answers to its requests."""
        result = collect_results(self.plan, rows, staged)
        if self.stages is not None:
            state = self.stages.state_after_batch
            self._answers.put(result, batch_id, self.committer, state)
        return result

    def _status(self, result: BatchResult, progress: Progress) -> dict[str, Any]:
        """Return the status that a batch commits.

        A batch that failed ends the run; so what is carried on here is of committed ones.
        """
        if self._time is None:
            self._time = self.committer.state_store.status(self.plan.app, JOB)
            self._largest = self._time.get("largest_batch")
            self._figures = BatchFigures.from_status(self._time)
        self._time = time_status(self._time, self.plan, result, progress.batch_id, progress.at)
        self._largest = largest_batch(self._largest, progress)
        self._figures.add_phases(self.timer.took_ms, self.timer.commit_before_ms)
        self._figures.add_requests(progress.object_store)
        return {
            **progress.to_dict(),
            "largest_batch": self._largest,
            "forgotten_producers": result.forgotten_producers,
            "gauges": result.gauges,
            "state": {name: dict(held) for name, held in result.state.items()},
            "costs": self._figures.to_status(),
            **self._time,
        }

    def _fetch(self, rows: Sequence[FrameRow]) -> Sequence[FrameRow]:
        """Return rows with their frames."""
        if self.blocks is not None:
            return self.blocks.get(rows)
        return [self._mapped.get(row) for row in rows]

    def _progress(self, result: BatchResult, batch_id: int) -> Progress:
        began, self._ended = self._batch_start(batch_id), time.monotonic()
        lag = self._lag(result)
        return Progress(
            app=self.plan.app,
            batch_id=batch_id,
            at=datetime.now(UTC),
            duration_ms=(self._ended - began) * 1000,
            read=result.read(self.plan),
            emitted=result.emitted,
            held=result.total("held"),
            late=result.late(self.plan),
            filtered=result.total("filtered"),
            dead=result.total("dead"),
            duplicate=result.total("duplicate"),
            watermark=result.watermark,
            lag=lag,
            behind_s=self._behind_s(result, lag, self._ended - began),
            state_bytes=result.state_bytes,
            false_positive_rates=result.gauge(FALSE_POSITIVE_RATE),
            object_store=self._requests(),
        )

    def _requests(self) -> Mapping[str, int]:
        requests = RequestCounts() if self.stages is None else self.stages.requests
        return {name: count for name, count in asdict(requests).items() if count}

    def start(self) -> None:
        """Begin to measure: the time before the first batch is planned belongs to none."""
        self._ended = time.monotonic()

    def _batch_start(self, batch_id: int) -> float:
        """Return when the planner began the batch, or else when the one before it ended.

        Never before the run's start: a repeated batch was planned in an earlier run.
        """
        planned = self.planned_offset(batch_id)
        if planned is None:
            return self._ended
        planned_s: float = planned["wall_ms"] / 1000
        return max(self._ended, time.monotonic() - max(0.0, time.time() - planned_s))

    def _behind_s(self, result: BatchResult, lag: Mapping[str, int], took_s: float) -> float | None:
        """Return about the age of the oldest unread record: that of the last record read before it."""
        for topic, arrived in result.arrived_ms.items():
            self._arrived_ms |= {f"{topic}/{number}": ms for number, ms in arrived.items()}
        if not self._arrived_ms:
            return None
        unread = [ms for name, ms in self._arrived_ms.items() if lag.get(name)]
        return max(0.0, time.time() - min(unread) / 1000) if unread else took_s

    def _lag(self, result: BatchResult) -> dict[str, int]:
        """Count the unread records, also in partitions that this batch did not read: they may have grown."""
        position = merge_positions(self.committer.position, result.position)
        lag: dict[str, int] = {}
        for topic in sorted({source.topic for source in self.plan.sources}):
            read = position.get(topic, {})
            for partition, (start, end) in enumerate(self.log.offsets(topic)):
                lag[f"{topic}/{partition}"] = end - max(start, read.get(str(partition), start))
        return lag
