"""A job: an app's plan, and what is common to its runs on all engines, from the start to the report."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from millstream.client import connect
from millstream.client.address import absolute_address
from millstream.client.open import open_reader
from millstream.client.reader import Reader
from millstream.client.start_position import LogStart
from millstream.engine.batch_runner import BatchRunner, RunTotals
from millstream.engine.checkpoint_copy import CheckpointStore, may_be_elsewhere
from millstream.engine.disk_room import translate_full_disk
from millstream.engine.first_offsets import (
    FirstOffsets,
    load_or_create_first_offsets,
    wanted_starts,
)
from millstream.engine.frame_files import FrameFiles
from millstream.engine.job_metadata import (
    JobMetadata,
    check_checkpoint_current,
    load_or_create_job_metadata,
)
from millstream.engine.machine import cores_available
from millstream.engine.rescale import divide_state
from millstream.engine.source.planner import SourceSpec
from millstream.engine.stages.executor import StageExecutor, StageTasks
from millstream.engine.stages.journal_place import JournalPlace
from millstream.engine.state_place import begin_at_place, load_or_create_place
from millstream.engine.topic_ids import check_same_topics, save_log_brokers, save_topic_ids
from millstream.engine.whole_topics import check_not_compacted
from millstream.errors import TopicRecreatedError
from millstream.kernels.plan import JobPlan
from millstream.kernels.state.keyhash import Buckets
from millstream.object_store.address import ObjectUrl
from millstream.object_store.place import StatePlace
from millstream.views.commit.committer import BatchCommitter
from millstream.views.commit.open_committer import open_committer
from millstream.views.runs.control_files import (
    check_no_reset,
    hold_run_lock,
    stop_acknowledged_file,
    stop_request_file,
)
from millstream.views.runs.failure import record_failure
from millstream.views.runs.progress import Progress, Report, Until, describe_created_topic
from millstream.views.runs.version_folders import drop_expired
from millstream.views.schema import JOB
from millstream.views.sink import RunStart
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import StoreLocation, prepare_state_store
from millstream.views.store_note import check_same_store, note_store

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """An app, as it is run. ``compile`` returns the plan for given buckets."""

    app: str
    log: Path | str = field(repr=False)  # an option of kafka:// may be a password
    folder: Path
    state_store: StoreLocation
    topics: Mapping[str, int]  # name → partitions, for those that do not exist yet
    bucket_count: int
    compile: Callable[[Buckets], JobPlan]
    dashboard: Sequence[Mapping[str, Any]] = ()  # panels, as plain values
    state: ObjectUrl | None = None  # where runs of state are, if not in the folder
    starts: Mapping[str, LogStart] = field(default_factory=dict)  # where topics begin, as declared
    first_offsets: FirstOffsets = field(default_factory=dict)  # and where they began: set by a run

    @property
    def runs(self) -> Path:
        """The folder of the runs of state, if these are in a folder, and of journals."""
        return self.folder.absolute() / "runs"

    @property
    def event_times(self) -> Path:
        """The file of the event times that partitions have been read to."""
        return self.folder.absolute() / "event-times.json"

    @property
    def frames(self) -> Path:
        """The folder of large frames, with a folder for each run."""
        return self.folder.absolute() / "frames"

    def source_spec(
        self,
        plan: JobPlan,
        *,
        rows_max: int,
        tasks: int,
        frame_files: FrameFiles,
        planner_reads: bool = True,
    ) -> SourceSpec:
        """Return the settings of the source of a plan."""
        return SourceSpec(
            log=absolute_address(self.log),
            sources=plan.sources,
            buckets=plan.buckets,
            rows_max=rows_max,
            tasks=tasks,
            stop_request=stop_request_file(self.folder.absolute()),
            stop_acknowledged=stop_acknowledged_file(self.folder.absolute()),
            event_times=self.event_times,
            heartbeat_ms=plan.heartbeat_ms,
            frame_files=frame_files,
            first_offsets=self.first_offsets,
            planner_reads=planner_reads,
        )


@dataclass(frozen=True)
class RunOptions:
    """How to run: see :meth:`millstream.App.run`."""

    until: Until
    timeout_s: float | None
    count: int | None
    on_progress: Callable[[Progress], None] | None
    cores: int | None
    rows_per_batch: int
    settings: Mapping[str, str]
    master: str | None = None
    same_expressions: bool = False
    dead_max: float = 1.0
    start: LogStart | None = None
    on_alarm: Callable[[str], None] | None = None
    on_phase: Callable[[str], None] = _log.info  # called with what is being started
    on_notice: Callable[[str], None] = _log.warning
    on_started: Callable[[RunStart], None] = lambda _start: None  # when batches may come


@dataclass(frozen=True)
class BegunRun:
    """A run that has begun, and fences those before: what an engine runs batches with."""

    job: Job
    options: RunOptions
    metadata: JobMetadata
    committer: BatchCommitter
    log: Reader
    place: StatePlace | None
    checkpoint: CheckpointStore
    next_batch_id: int

    @property
    def plan(self) -> JobPlan:
        return self.committer.plan

    def to_start(self) -> RunStart:
        """Return what names the run."""
        checkpoint_id = self.committer.state_store.checkpoint_id(self.job.app, JOB)
        assert checkpoint_id is not None, "the run has begun"
        return RunStart(self.job.app, JOB, self.committer.run, checkpoint_id)

    def stages(self, frame_files: FrameFiles, tasks: StageTasks | None) -> StageExecutor:
        """Return the stages of the plan, with the state that the last batch left."""
        return StageExecutor(
            self.plan,
            self.job.runs,
            self.committer.run,
            frame_files,
            self.metadata.partitions,
            tasks,
            self.committer.state_store.state_manifests(self.job.app, JOB),
            self.place,
        )

    def why_ended(self, totals: RunTotals) -> str | None:
        """Return why the batches so far end the run; None if they do not."""
        assert totals.last is not None
        if self.options.count is not None and totals.read >= self.options.count:
            return "count"
        if callable(self.options.until) and self.options.until(totals.last):
            return "condition"
        return None

    def clear_stop(self) -> None:
        """Remove what earlier requests to stop have left."""
        for path in (stop_request_file(self.job.folder), stop_acknowledged_file(self.job.folder)):
            path.unlink(missing_ok=True)


class Engine(Protocol):
    """What runs the batches of a job. The plan, the state and the commit are the same with all engines."""

    def check(self, plan: JobPlan, options: RunOptions) -> None:
        """Refuse a plan or an option that the engine cannot run, before anything is changed."""
        ...

    def has_output_tasks(self, options: RunOptions) -> bool:
        """Return whether tasks write the large outputs of a batch, beside the driver."""
        ...

    def run(self, begun: BegunRun) -> tuple[str, BatchRunner]:
        """Run batches to the end of a run; return why it ended, and what ran them."""
        ...


def run_on(engine: Engine, job: Job, options: RunOptions) -> Report:
    """Run a job until its end; return its report. See :meth:`millstream.App.run`."""
    # The failure is recorded before the run's lock is released.
    with ExitStack() as running, record_failure(job.folder), translate_full_disk(job.folder):
        return _run(engine, job, options, running)


def _run(engine: Engine, job: Job, options: RunOptions, running: ExitStack) -> Report:
    began = time.monotonic()
    _prepare_folder(job, options)
    metadata = _job_metadata(job, options.cores or cores_available())
    plan = job.compile(Buckets(metadata.bucket_count, metadata.hash_seed))
    engine.check(plan, options)
    wanted = wanted_starts(plan, job.starts, options.start)
    log = open_reader(job.log)
    # before a missing topic is created
    check_same_topics(job.app, job.state_store, plan, log)
    created = create_topics(job)
    for name in created.names:
        options.on_notice(describe_created_topic(name, created.others))
    check_not_compacted(plan, log)
    with open_committer(
        plan,
        job.state_store,
        job.log,
        options.on_notice,
        tasks_write=engine.has_output_tasks(options),
    ) as committer:
        # before this run replaces another one, or is noted as begun
        place = load_or_create_place(job.app, committer.state_store, job.state, job.folder)
        checkpoint = CheckpointStore(
            job.app, job.folder, committer, may_be_elsewhere(plan, place, job.state_store)
        )
        next_batch_id = committer.begin_run(
            JOB,
            checkpoint.load_or_create_id(),
            partitioning=metadata.partitioning,
            same_expressions=options.same_expressions,
        )
        checkpoint.restore(next_batch_id, options.on_notice)
        _describe(job, committer.state_store, plan, log)
        check_checkpoint_current(job.folder, next_batch_id, job.state_store)
        if place is not None:
            begin_at_place(place, committer)
        start = RunStart(job.app, JOB, committer.run, checkpoint.load_or_create_id())
        job = _begin_reading(
            job, start, log, committer, wanted=wanted, batch_id=next_batch_id, options=options
        )
        divide_state(
            committer.state_store,
            start,
            plan,
            metadata,
            next_batch_id=next_batch_id,
            journals=JournalPlace(job.runs, place),
        )
        watermark = watermark_before(committer.state_store, job.app)
        FrameFiles(job.frames / "0").remove_earlier_runs()
        begun = BegunRun(job, options, metadata, committer, log, place, checkpoint, next_batch_id)
        running.enter_context(hold_run_lock(job.folder, committer.run))
        check_no_reset(job.folder)  # again, now that a reset would see this run
        try:
            reason, runner = engine.run(begun)
        except TopicRecreatedError:
            # this error says what had been read
            check_same_topics(job.app, job.state_store, plan, log)
            raise
    report = _report(job.app, reason, runner, watermark, time.monotonic() - began)
    read = {source.topic for source in plan.sources}
    empty = tuple(name for name in created.names if name in read)
    return replace(report, created_topics=empty, other_topics=created.others)


def _prepare_folder(job: Job, options: RunOptions) -> None:
    """Make sure that a run may begin in the job's folder and store, and that both are there."""
    check_no_reset(job.folder)
    check_same_store(job.app, job.folder, job.state_store)
    if not isinstance(job.state_store, Path):
        options.on_phase("opening the state store")
    prepare_state_store(job.state_store, options.on_notice)
    options.on_phase("opening the log")
    job.folder.mkdir(parents=True, exist_ok=True)
    drop_expired(job.folder, datetime.now(UTC))


def _describe(job: Job, state_store: StateStore, plan: JobPlan, log: Reader) -> None:
    """Store what later runs, and what looks at the app without its program, are to know of it."""
    save_topic_ids(job.app, state_store, plan, log)
    save_log_brokers(job.app, state_store, job.log)
    state_store.put_description(job.app, "dashboard", job.dashboard)
    note_store(job.folder, job.state_store)


def _begin_reading(
    job: Job,
    start: RunStart,
    log: Reader,
    committer: BatchCommitter,
    *,
    wanted: Mapping[str, LogStart],
    batch_id: int,
    options: RunOptions,
) -> Job:
    """Return the job with the offsets at which it began to read, or begins now."""
    first = load_or_create_first_offsets(
        committer.state_store,
        start,
        log,
        wanted,
        checkpoint=job.folder.absolute() / "checkpoint",
        next_batch_id=batch_id,
        on_notice=options.on_notice,
    )
    if batch_id == 0:
        read = {source.topic for source in committer.plan.sources}
        committer.begin_at({topic: offsets for topic, offsets in first.items() if topic in read})
    return replace(job, first_offsets=first)


def _job_metadata(job: Job, cores: int) -> JobMetadata:
    # A Spark partition without a bucket would take a task of its own in every batch, for nothing.
    partitions = min(cores, job.bucket_count)
    seed = secrets.randbits(63)  # a secret: keys come from outside, and could be made to collide
    return load_or_create_job_metadata(
        job.app, job.state_store, JobMetadata(job.bucket_count, partitions, partitions, seed)
    )


@dataclass(frozen=True)
class CreatedTopics:
    """The topics that a run created, and those that the log had before."""

    names: tuple[str, ...]
    others: tuple[str, ...]


def create_topics(job: Job) -> CreatedTopics:
    """Create the topics that the app declares and the log does not have."""
    there: set[str] = set()
    with suppress(FileNotFoundError):
        there.update(open_reader(job.log).topics())
    missing = tuple(name for name in job.topics if name not in there)
    if missing:
        with connect(job.log) as log:
            for name in missing:
                log.create_topic(name, partitions=job.topics[name], exist_ok=True)
    return CreatedTopics(missing, tuple(sorted(there)))


def watermark_before(state_store: StateStore, app: str) -> datetime | None:
    """Return the watermark of the last batch that was committed; None if none was, or none is set."""
    watermark = state_store.status(app, JOB).get("watermark")
    return None if watermark is None else datetime.fromisoformat(watermark)


def _report(
    app: str, reason: str, runner: BatchRunner, watermark: datetime | None, seconds: float
) -> Report:
    """Return the report of a run; ``watermark`` is the one before the run."""
    totals = runner.totals
    failed = runner.dead_letter_share.failed_steps()
    return Report(
        app=app,
        reason=reason,
        batches=totals.batches,
        seconds=seconds,
        read=totals.read,
        late=totals.late,
        filtered=totals.filtered,
        dead=totals.dead,
        duplicate=totals.duplicate,
        watermark=totals.last.watermark if totals.last else watermark,
        lag=totals.last.lag if totals.last else {},
        false_positive_rates=totals.last.false_positive_rates if totals.last else {},
        alarms=tuple(failed.values()),
        failed_steps=tuple(failed),
    )
