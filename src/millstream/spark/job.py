"""A job: an app's plan as one streaming query, from its start until its last batch is complete."""

from __future__ import annotations

import logging
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from millstream.client import connect
from millstream.client.address import absolute_address
from millstream.client.open import open_reader
from millstream.client.reader import Reader
from millstream.errors import ConfigError, FencedError, TopicRecreatedError
from millstream.kernels.frames import plain_schema
from millstream.kernels.plan import JobPlan
from millstream.kernels.state.keyhash import Buckets
from millstream.object_store.address import ObjectUrl
from millstream.object_store.place import StatePlace
from millstream.spark.checkpoint_copy import DESCRIPTION, CheckpointCopy, may_be_elsewhere
from millstream.spark.dataframes import add_dataframe, add_native_step, to_dataframe
from millstream.spark.failures import to_millstream_error
from millstream.spark.frame_blocks import FrameBlocks
from millstream.spark.frame_files import FrameFiles
from millstream.spark.frame_tasks import FrameTasks
from millstream.spark.job_metadata import (
    JobMetadata,
    check_checkpoint_current,
    load_or_create_checkpoint_id,
    load_or_create_job_metadata,
)
from millstream.spark.output_tasks import OutputTasks
from millstream.spark.rescale import divide_state
from millstream.spark.runtime.session import cores_available, start_session, stop_session
from millstream.spark.serializable import check_serializable
from millstream.spark.sink import CommitSink
from millstream.spark.source.data_source import SOURCE_NAME, LogSource
from millstream.spark.source.event_times import EventTimesFile
from millstream.spark.source.offsets import planned_offset
from millstream.spark.source.planner import SourceSpec
from millstream.spark.stages.executor import StageExecutor
from millstream.spark.stages.journal_place import JournalPlace
from millstream.spark.state_place import begin_at_place, load_or_create_place
from millstream.spark.topic_ids import check_same_topics, save_log_brokers, save_topic_ids
from millstream.spark.whole_topics import check_not_compacted
from millstream.views.commit.committer import BatchCommitter
from millstream.views.commit.open_committer import open_committer
from millstream.views.runs.control_files import (
    check_no_reset,
    hold_run_lock,
    stop_acknowledged_file,
    stop_request_file,
)
from millstream.views.runs.dead_letter_share import DeadLetterShare
from millstream.views.runs.failure import record_failure
from millstream.views.runs.progress import Progress, Report, Until, describe_created_topic
from millstream.views.runs.skew import SkewWatch
from millstream.views.runs.version_folders import drop_expired
from millstream.views.schema import JOB
from millstream.views.sink import RunStart
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import StoreLocation, prepare_state_store
from millstream.views.store_note import check_same_store, note_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame as DataFrame  # noqa: PLC0414 - given on to the pipeline
    from pyspark.sql import SparkSession as SparkSession  # noqa: PLC0414 - as above
    from pyspark.sql.streaming.query import StreamingQuery

_WHOLE_STAGE = "spark.sql.codegen.wholeStage"
_POLL_S = 0.02
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
    on_alarm: Callable[[str], None] | None = None
    on_phase: Callable[[str], None] = _log.info  # called with what is being started
    on_notice: Callable[[str], None] = _log.warning
    on_started: Callable[[RunStart], None] = lambda _start: None  # when batches may come


def run_job(job: Job, options: RunOptions) -> Report:
    """Run a job until its end; return its report. See :meth:`millstream.App.run`."""
    # The failure is recorded before the run's lock is released.
    with ExitStack() as running, record_failure(job.folder):
        return _run(job, options, running)


def _run(job: Job, options: RunOptions, running: ExitStack) -> Report:
    began = time.monotonic()
    check_no_reset(job.folder)
    check_same_store(job.app, job.folder, job.state_store)
    if not isinstance(job.state_store, Path):
        options.on_phase("opening the state store")
    prepare_state_store(job.state_store, options.on_notice)
    options.on_phase("opening the log")
    job.folder.mkdir(parents=True, exist_ok=True)
    drop_expired(job.folder, datetime.now(UTC))
    metadata = _job_metadata(job, options.cores or cores_available())
    plan = job.compile(Buckets(metadata.bucket_count, metadata.hash_seed))
    check_serializable(plan)
    log = open_reader(job.log)
    # before a missing topic is created
    check_same_topics(job.app, job.state_store, plan, log)
    created = _create_topics(job)
    for name in created.names:
        options.on_notice(describe_created_topic(name, created.others))
    check_not_compacted(plan, log)
    with open_committer(plan, job.state_store, job.log, options.on_notice) as committer:
        # before this run replaces another one, or is noted as begun
        place = load_or_create_place(job.app, committer.state_store, job.state, job.folder)
        checkpoint = _CheckpointStore(
            job, committer, may_be_elsewhere(plan, place, job.state_store)
        )
        next_batch_id = committer.begin_run(
            JOB,
            checkpoint.load_or_create_id(),
            partitioning=metadata.partitioning,
            same_expressions=options.same_expressions,
        )
        checkpoint.restore(next_batch_id, options.on_notice)
        save_topic_ids(job.app, committer.state_store, plan, log)
        save_log_brokers(job.app, committer.state_store, job.log)
        committer.state_store.put_description(job.app, "dashboard", job.dashboard)
        note_store(job.folder, job.state_store)
        check_checkpoint_current(job.folder, next_batch_id, job.state_store)
        if place is not None:
            begin_at_place(place, committer)
        divide_state(
            committer.state_store,
            RunStart(job.app, JOB, committer.run, checkpoint.load_or_create_id()),
            plan,
            metadata,
            next_batch_id=next_batch_id,
            journals=JournalPlace(_runs(job), place),
        )
        watermark = watermark_before(committer.state_store, job.app)
        FrameFiles(_frames(job) / "0").remove_earlier_runs()
        sink = _make_sink(options, log, place, checkpoint)
        running.enter_context(hold_run_lock(job.folder, committer.run))
        check_no_reset(job.folder)  # again, now that a reset would see this run
        try:
            with _session(job, options) as spark:
                reason = _Query(job, options, plan, metadata, sink, spark, place).run()
        except TopicRecreatedError:
            # this error says what had been read
            check_same_topics(job.app, job.state_store, plan, log)
            raise
    report = _report(job.app, reason, sink, watermark, time.monotonic() - began)
    read = {source.topic for source in plan.sources}
    empty = tuple(name for name in created.names if name in read)
    return replace(report, created_topics=empty, other_topics=created.others)


def _make_sink(
    options: RunOptions, log: Reader, place: StatePlace | None, checkpoint: _CheckpointStore
) -> CommitSink:
    """Make what Spark calls with each batch of a run that has begun."""
    job, committer = checkpoint.job, checkpoint.committer
    share = shares_disk(options.master, committer.plan, place)
    return CommitSink(
        committer.plan,
        committer,
        log,
        options.on_progress,
        EventTimesFile(_event_times(job)),
        FrameFiles(
            _frames(job) / str(committer.run) if share else None,
            rewrites=is_one_machine(options.master),
        ),
        DeadLetterShare(options.dead_max, options.on_alarm),
        SkewWatch(options.on_notice),
        partial(planned_offset, job.folder / "checkpoint"),
        None if share else FrameBlocks(),
        checkpoint.save,
        rows_max=options.rows_per_batch,
    )


@dataclass(frozen=True)
class _CheckpointStore:
    """The copy of a job's checkpoint in its state store, if the job ``may_move`` to another folder."""

    job: Job
    committer: BatchCommitter
    may_move: bool

    def load_or_create_id(self) -> str:
        copy = self._copy()
        return load_or_create_checkpoint_id(self.job.folder) if copy is None else copy.checkpoint_id

    def restore(self, next_batch_id: int, on_notice: Callable[[str], None]) -> None:
        """Make the folder's checkpoint again if the app has run elsewhere since. The run has begun."""
        copy = self._copy()
        if copy is not None and copy.restore(self.job.folder / "checkpoint", next_batch_id):
            on_notice(
                f"{self.job.app} has run in another folder before: this run goes on from batch {next_batch_id}, as "
                "the state store has it."
            )

    def save(self, batch_id: int) -> None:
        """Keep the plan of a batch before anything is done for it."""
        if self.may_move:
            copy = CheckpointCopy.read(self.job.folder / "checkpoint", batch_id)
            start = RunStart(self.job.app, JOB, self.committer.run, copy.checkpoint_id)
            store = self.committer.state_store
            store.put_run_description(start, DESCRIPTION, copy.to_message())

    def _copy(self) -> CheckpointCopy | None:
        if not self.may_move:
            return None
        found = self.committer.state_store.description(self.job.app, DESCRIPTION)
        return CheckpointCopy.from_message(found)


def _runs(job: Job) -> Path:
    return job.folder.absolute() / "runs"


def _event_times(job: Job) -> Path:
    return job.folder.absolute() / "event-times.json"


def to_spark(job: Job) -> DataFrame:
    """Return the one output of a job as a streaming DataFrame. The session stays open.

    Raises:
        ConfigError: a step before the output keeps state.
    """
    plan = job.compile(Buckets(job.bucket_count))
    if plan.stages:
        steps = ", ".join(
            repr(operator.kernel.name) for stage in plan.stages for operator in stage.operators
        )
        raise ConfigError(
            f"A stream whose steps keep state can't be given to Spark by to_spark(): {steps}. Write "
            "the stream with .to(topic) or .dataset(path), and read that with Spark."
        )
    _create_topics(job)
    spark = start_session(job.app, folder=job.folder)
    frame_files = FrameFiles(None)  # the end of a batch of the user's query is not known
    frames = build_frames(
        spark, job, plan, rows_max=1_000_000, tasks=cores_available(), frame_files=frame_files
    )
    schema = plain_schema(dict(plan.sinks[0].schema))
    return to_dataframe(frames, plan.sinks[0].port, schema, frame_files)


def _job_metadata(job: Job, cores: int) -> JobMetadata:
    # A Spark partition without a bucket would take a task of its own in every batch, for nothing.
    partitions = min(cores, job.bucket_count)
    seed = secrets.randbits(63)  # a secret: keys come from outside, and could be made to collide
    return load_or_create_job_metadata(
        job.app, job.state_store, JobMetadata(job.bucket_count, partitions, partitions, seed)
    )


def _frames(job: Job) -> Path:
    return job.folder.absolute() / "frames"


def shares_disk(master: str | None, plan: JobPlan, place: StatePlace | None) -> bool:
    """Return whether executors have the app's folder: then large frames go through it, else through Spark.

    They have it on this machine, and on a cluster where they keep the runs of state there.
    """
    return is_one_machine(master) or (place is None and bool(plan.stages))


def tasks_write_outputs(master: str | None) -> bool:
    """Return whether tasks write the large outputs of a batch: on a cluster; else the driver writes all."""
    return not is_one_machine(master)


def is_one_machine(master: str | None) -> bool:
    """Return whether Spark runs in this process and its workers alone."""
    return master is None or re.fullmatch(r"local(\[.*\])?", master) is not None


def build_frames(
    spark: SparkSession,
    job: Job,
    plan: JobPlan,
    *,
    rows_max: int,
    tasks: int,
    frame_files: FrameFiles,
) -> DataFrame:
    """Return what is before the stages as a streaming DataFrame of frames: sources and native steps."""
    spec = SourceSpec(
        log=absolute_address(job.log),
        sources=plan.sources,
        buckets=plan.buckets,
        rows_max=rows_max,
        tasks=tasks,
        stop_request=stop_request_file(job.folder.absolute()),
        stop_acknowledged=stop_acknowledged_file(job.folder.absolute()),
        event_times=_event_times(job),
        heartbeat_ms=plan.heartbeat_ms,
        frame_files=frame_files,
    )
    spark.dataSource.register(LogSource)
    frames = spark.readStream.format(SOURCE_NAME).option("spec", spec.to_option()).load()
    for source in plan.frames:
        frames = add_dataframe(frames, source, plan.buckets, frame_files)
    for native in plan.natives:  # after all sources: its rows may come from any
        frames = add_native_step(frames, native, plan.buckets, frame_files)
    return frames


@dataclass
class _Query:
    """One run of a job as a streaming query."""

    job: Job
    options: RunOptions
    plan: JobPlan
    metadata: JobMetadata
    sink: CommitSink
    spark: SparkSession
    place: StatePlace | None = None

    def run(self) -> str:
        """Run the query to its end; return why it ended."""
        self._clear_stop()
        self.options.on_phase("planning the first batch")
        query = self._start()
        try:
            self._report_started()
            reason = self._wait(query)
            # Read before the stop: a stop interrupts a batch that a DataFrame of the user's has begun
            # meanwhile. That is no failure, as the next run repeats the batch.
            failure = self.sink.error or query.exception()
        finally:
            query.stop()
            self._clear_stop()
            self.sink.frame_files.remove_all()
            if self.sink.stages is not None:
                self.sink.stages.close()
        if failure is not None and not isinstance(failure, FencedError):
            # A newer run removes files of this one, which can fail in many ways: report only the cause.
            self.sink.committer.check_not_fenced()
        if isinstance(failure, (PySparkException, Py4JError)):
            raise to_millstream_error(
                failure, self.job.app, self.job.folder / "spark.log"
            ) from None
        if failure is not None:
            raise failure
        return reason

    def _report_started(self) -> None:
        committer = self.sink.committer
        checkpoint_id = committer.state_store.checkpoint_id(self.job.app, JOB)
        assert checkpoint_id is not None, "the run has begun"
        self.options.on_started(RunStart(self.job.app, JOB, committer.run, checkpoint_id))

    def _start(self) -> StreamingQuery:
        # For native steps that have state of Spark's own: it freezes this number in the checkpoint.
        self.spark.conf.set("spark.sql.shuffle.partitions", self.metadata.shuffle_partitions)
        only_frames = not (self.plan.frames or self.plan.natives)
        # They are few rows: writing and compiling code for them takes longer than to do without, in each batch.
        mode = "NO_CODEGEN" if only_frames else "FALLBACK"
        self.spark.conf.set("spark.sql.codegen.factoryMode", mode)
        whole_stage = self.spark.conf.get(_WHOLE_STAGE) or "true"
        frames = build_frames(
            self.spark,
            self.job,
            self.plan,
            rows_max=self.options.rows_per_batch,
            tasks=self.options.cores or cores_available(),
            frame_files=self.sink.frame_files,
        )
        if self.plan.stages:
            self.sink.stages = self._stages()
        if tasks_write_outputs(self.options.master):
            self.sink.outputs = self._outputs()
        writer = (
            frames.writeStream.queryName(self.job.app)
            .foreachBatch(self.sink)
            .outputMode("append")
            .option("checkpointLocation", str(self.job.folder.absolute() / "checkpoint"))
        )
        if self.options.until == "caught-up":
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime="0 seconds")
        self.sink.start()
        self.spark.conf.set(_WHOLE_STAGE, "false" if only_frames else whole_stage)
        try:
            return writer.start()  # the query has a copy of the settings
        finally:
            self.spark.conf.set(_WHOLE_STAGE, whole_stage)

    def _stages(self) -> StageExecutor:
        committer = self.sink.committer
        return StageExecutor(
            self.plan,
            _runs(self.job),
            committer.run,
            self.sink.frame_files,
            self.metadata.partitions,
            self.spark.sparkContext,
            committer.state_store.state_manifests(self.job.app, JOB),
            self.place,
            self.sink.blocks,
        )

    def _outputs(self) -> OutputTasks:
        tasks = FrameTasks(
            self.spark.sparkContext,
            self.options.cores or cores_available(),  # no state: buckets do not bound it
            self.sink.frame_files,
            self.sink.blocks,
        )
        return OutputTasks(self.plan, tasks, self.sink.committer.stager, self.options.on_notice)

    def _wait(self, query: StreamingQuery) -> str:
        """Wait for the end: the query's own, a time, a condition, a request, or Ctrl-C."""
        deadline = (
            None if self.options.timeout_s is None else time.monotonic() + self.options.timeout_s
        )
        checked = 0
        with _interrupts() as interrupts:
            while query.isActive:
                if interrupts.count > 0 or stop_request_file(self.job.folder).exists():
                    return self._drain(query, interrupts, "stopped")
                if deadline is not None and time.monotonic() >= deadline:
                    return self._drain(query, interrupts, "timeout")
                if self.sink.totals.batches > checked:
                    checked = self.sink.totals.batches
                    ended = self._ended_by_batch()
                    if ended is not None:
                        return self._drain(query, interrupts, ended)
                time.sleep(_POLL_S)
        return "caught-up"

    def _ended_by_batch(self) -> str | None:
        """Return why the batches so far end the run; None if they do not."""
        totals = self.sink.totals
        assert totals.last is not None
        if self.options.count is not None and totals.read >= self.options.count:
            return "count"
        if callable(self.options.until) and self.options.until(totals.last):
            return "condition"
        return None

    def _drain(self, query: StreamingQuery, interrupts: _Interrupts, reason: str) -> str:
        """Let the running batch finish: ask the source for no more, and wait for its acknowledgement.

        A second interrupt ends the wait.
        """
        before = interrupts.count
        stop_request_file(self.job.folder).touch()
        acknowledged = stop_acknowledged_file(self.job.folder)
        while query.isActive and not acknowledged.exists() and interrupts.count == before:
            time.sleep(_POLL_S)
        return reason

    def _clear_stop(self) -> None:
        for path in (stop_request_file(self.job.folder), stop_acknowledged_file(self.job.folder)):
            path.unlink(missing_ok=True)


@dataclass
class _Interrupts:
    count: int = 0


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    """Count Ctrl-C and SIGTERM instead of ending the process; outside the main thread, count nothing.

    A counter, not an event: the handler runs in the thread that would wait for the event, and may interrupt
    it while it holds the event's lock.
    """
    seen = _Interrupts()

    def note(_number: int, _frame: Any) -> None:
        seen.count += 1

    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _session(job: Job, options: RunOptions) -> Iterator[SparkSession]:
    spark = start_session(
        job.app,
        folder=job.folder,
        cores=options.cores,
        master=options.master,
        settings=options.settings,
        on_phase=options.on_phase,
    )
    try:
        yield spark
    finally:
        if stop_session(spark):
            options.on_notice(
                "Spark's classes are archived for faster starts, once on this machine: Java needs some "
                "ten seconds for that, and goes on when this program has ended."
            )


@dataclass(frozen=True)
class _CreatedTopics:
    """The topics that a run created, and those that the log had before."""

    names: tuple[str, ...]
    others: tuple[str, ...]


def _create_topics(job: Job) -> _CreatedTopics:
    """Create the topics that the app declares and the log does not have."""
    there: set[str] = set()
    with suppress(FileNotFoundError):
        there.update(open_reader(job.log).topics())
    missing = tuple(name for name in job.topics if name not in there)
    if missing:
        with connect(job.log) as log:
            for name in missing:
                log.create_topic(name, partitions=job.topics[name], exist_ok=True)
    return _CreatedTopics(missing, tuple(sorted(there)))


def watermark_before(state_store: StateStore, app: str) -> datetime | None:
    """Return the watermark of the last batch that was committed; None if none was, or none is set."""
    watermark = state_store.status(app, JOB).get("watermark")
    return None if watermark is None else datetime.fromisoformat(watermark)


def _report(
    app: str, reason: str, sink: CommitSink, watermark: datetime | None, seconds: float
) -> Report:
    """Return the report of a run; ``watermark`` is the one before the run."""
    totals = sink.totals
    failed = sink.dead_letter_share.failed_steps()
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
