"""A job: an app's plan as one streaming query, from its start to its drained stop."""

from __future__ import annotations

import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from millstream.client import connect
from millstream.client.reading import absolute, open_reader
from millstream.errors import FencedError, TopicRecreatedError
from millstream.kernels.frames import plain_schema
from millstream.kernels.keyhash import Buckets
from millstream.kernels.plan import JobPlan
from millstream.spark.birth import HOME, Birth, born, checkpoint_of, require_current
from millstream.spark.event_times import EventTimesFile
from millstream.spark.failures import as_ours
from millstream.spark.frame_files import FrameFiles
from millstream.spark.log_source import SOURCE_NAME, LogSource
from millstream.spark.native import add_frame, add_native, rows_of
from millstream.spark.sendable import require_sendable
from millstream.spark.session import cores_available, start_session, stop_session
from millstream.spark.shuffle import bucket_labels
from millstream.spark.sink import CommitSink
from millstream.spark.source import SourceSpec
from millstream.spark.source_offsets import planned_at
from millstream.spark.stage import add_stage
from millstream.spark.stage_runner import StageRunner
from millstream.spark.stages import Stages
from millstream.spark.topic_ids import note_topics, require_same_topics
from millstream.views.dead_share import DeadShare
from millstream.views.failure import failure_noted
from millstream.views.outputs import open_targets
from millstream.views.progress import Progress, Report, Until, created_in_words
from millstream.views.running import marked, require_no_reset, stop_request, stop_seen
from millstream.views.schema import JOB
from millstream.views.store import ViewStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame as DataFrame  # noqa: PLC0414 - given on to the pipeline
    from pyspark.sql import SparkSession as SparkSession  # noqa: PLC0414 - as above
    from pyspark.sql.streaming.query import StreamingQuery

_POLL_S = 0.02
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """An app as what runs it sees it. ``compile`` makes the plan for given bucket labels."""

    app: str
    log: Path | str = field(repr=False)  # an option of kafka:// may be a password
    folder: Path
    topics: Mapping[str, int]  # name → partitions, for those that do not exist yet
    bucket_count: int
    compile: Callable[[Buckets], JobPlan]
    dashboard: Sequence[Mapping[str, Any]] = ()  # panels, as plain values


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
    on_phase: Callable[[str], None] = _log.info  # what is being done, until there are batches
    on_notice: Callable[[str], None] = _log.warning


def run_job(job: Job, options: RunOptions) -> Report:
    """Run a job until it is to end; give its report. See :meth:`millstream.App.run`."""
    with ExitStack() as running, failure_noted(job.folder):  # noted before it runs no more
        return _run(job, options, running)


def _run(job: Job, options: RunOptions, running: ExitStack) -> Report:
    began = time.monotonic()
    require_no_reset(job.folder)
    options.on_phase("opening the log")
    job.folder.mkdir(parents=True, exist_ok=True)
    birth = _birth(job, options.cores or cores_available())
    plan = job.compile(_labels(birth))
    require_sendable(plan)
    log = open_reader(job.log)
    require_same_topics(job.app, job.folder / HOME, plan, log)  # before a missing one is made
    created = _make_topics(job)
    for name in created.names:
        options.on_notice(created_in_words(name, created.others))
    with open_targets(plan, job.folder / HOME, job.log) as targets:
        next_batch_id = targets.begin_run(
            JOB,
            checkpoint_of(job.folder),
            sharing=birth.sharing,
            same_expressions=options.same_expressions,
        )
        note_topics(job.app, targets.home, plan, log)
        targets.home.describe(job.app, "dashboard", job.dashboard)
        require_current(job.folder, next_batch_id)
        reached = reached_before(targets.home, job.app)
        frame_files = _frame_files(job, targets.run)
        frame_files.begin()
        sink = CommitSink(
            plan,
            targets,
            log,
            options.on_progress,
            EventTimesFile(_event_times(job)),
            frame_files,
            DeadShare(options.dead_max, options.on_alarm),
            partial(planned_at, job.folder / "checkpoint"),
        )
        running.enter_context(marked(job.folder, targets.run))
        require_no_reset(job.folder)  # now that a reset would see this run
        try:
            with _session(job, options) as spark:
                reason = _Query(job, options, plan, birth, sink, spark).run()
        except TopicRecreatedError:
            require_same_topics(job.app, job.folder / HOME, plan, log)  # says what had been read
            raise
    report = _report(job.app, reason, sink, reached, time.monotonic() - began)
    read = {source.topic for source in plan.sources}
    empty = tuple(name for name in created.names if name in read)
    return replace(report, created_topics=empty, other_topics=created.others)


def _runs(job: Job) -> Path:
    return job.folder.absolute() / "runs"


def _event_times(job: Job) -> Path:
    return job.folder.absolute() / "event-times.json"


def stream_to_spark(job: Job) -> DataFrame:
    """Give the one output of a job as a streaming DataFrame. The session stays open."""
    _make_topics(job)
    # The labels must be those of every later start, on however many cores that is. Without a seed: its
    # place is the views, and the state of a user's query is in a checkpoint of its own.
    plan = job.compile(bucket_labels(job.bucket_count, job.bucket_count))
    spark = start_session(job.app, folder=job.folder)
    frame_files = FrameFiles(None)  # nobody tells when a batch of the user's query is over
    frames = build_frames(
        spark, job, plan, rows_max=1_000_000, tasks=cores_available(), frame_files=frame_files
    )
    partitions = int(spark.conf.get("spark.sql.shuffle.partitions") or 0)
    for stage in plan.stages:
        runner = StageRunner(stage, plan.bucket_labels, job.folder.absolute() / "copies")
        frames = add_stage(frames, runner, partitions)
    schema = plain_schema(dict(plan.sinks[0].schema))
    return rows_of(frames, plan.sinks[0].port, schema, frame_files)


def _birth(job: Job, cores: int) -> Birth:
    # A Spark partition without a bucket would take a task of its own in every batch, for nothing.
    partitions = min(cores, job.bucket_count)
    seed = secrets.randbits(63)  # a secret: keys come from outside, and could be made to collide
    return born(job.app, job.folder, Birth(job.bucket_count, partitions, partitions, seed))


def _labels(birth: Birth) -> Buckets:
    return bucket_labels(birth.bucket_count, birth.label_partitions, birth.hash_seed)


def _frame_files(job: Job, run: int) -> FrameFiles:
    return FrameFiles(job.folder.absolute() / "frames" / str(run))


def build_frames(
    spark: SparkSession,
    job: Job,
    plan: JobPlan,
    *,
    rows_max: int,
    tasks: int,
    frame_files: FrameFiles,
) -> DataFrame:
    """Lay out what stands before the stages as a streaming DataFrame of frames: source, native steps."""
    spec = SourceSpec(
        log=absolute(job.log),
        sources=plan.sources,
        bucket_labels=plan.bucket_labels,
        rows_max=rows_max,
        tasks=tasks,
        stop_request=stop_request(job.folder.absolute()),
        stop_seen=stop_seen(job.folder.absolute()),
        event_times=_event_times(job),
        heartbeat_ms=plan.heartbeat_ms,
        frame_files=frame_files,
    )
    spark.dataSource.register(LogSource)
    frames = spark.readStream.format(SOURCE_NAME).option("spec", spec.to_option()).load()
    for source in plan.frames:
        frames = add_frame(frames, source, plan.bucket_labels, frame_files)
    for native in plan.natives:  # behind all sources: its rows may come from any
        frames = add_native(frames, native, plan.bucket_labels, frame_files)
    return frames


@dataclass
class _Query:
    """One run of a job as a streaming query."""

    job: Job
    options: RunOptions
    plan: JobPlan
    birth: Birth
    sink: CommitSink
    spark: SparkSession

    def run(self) -> str:
        """Run the query to its end and say why it ended."""
        self._clear_stop()
        self.options.on_phase("planning the first batch")
        query = self._start()
        try:
            reason = self._wait(query)
            # To stop tears a batch that a DataFrame of the user's has begun meanwhile. That is no
            # failure: the next run does it again.
            failure = self.sink.error or query.exception()
        finally:
            query.stop()
            self._clear_stop()
        if failure is not None and not isinstance(failure, FencedError):
            # A newer run sweeps files of this one, which fails in many ways by that: it says only this.
            self.sink.targets.require_newest()
        if isinstance(failure, (PySparkException, Py4JError)):
            raise as_ours(failure, self.job.app, self.job.folder / "spark.log") from None
        if failure is not None:
            raise failure
        return reason

    def _start(self) -> StreamingQuery:
        # For native steps that have state of Spark's own: it freezes this number in the checkpoint.
        self.spark.conf.set("spark.sql.shuffle.partitions", self.birth.label_partitions)
        # Frames are few rows: to compile code for them only delays the first batches.
        ours_alone = not (self.plan.frames or self.plan.natives)
        mode = "NO_CODEGEN" if ours_alone else "FALLBACK"
        self.spark.conf.set("spark.sql.codegen.factoryMode", mode)
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
        self.sink.begin()
        return writer.start()

    def _stages(self) -> Stages:
        targets = self.sink.targets
        return Stages(
            self.plan,
            _runs(self.job),
            targets.run,
            self.sink.frame_files,
            self.birth.partitions,
            self.spark.sparkContext,
            targets.home.state(self.job.app, JOB),
        )

    def _wait(self, query: StreamingQuery) -> str:
        """Wait for the end: the query's own, a time, a condition, a request, or Ctrl-C."""
        deadline = (
            None if self.options.timeout_s is None else time.monotonic() + self.options.timeout_s
        )
        checked = 0
        with _interrupts() as interrupts:
            while query.isActive:
                if interrupts.count > 0 or stop_request(self.job.folder).exists():
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
        """Say why the batches so far end the run; None when they do not."""
        totals = self.sink.totals
        assert totals.last is not None
        if self.options.count is not None and totals.read >= self.options.count:
            return "count"
        if callable(self.options.until) and self.options.until(totals.last):
            return "condition"
        return None

    def _drain(self, query: StreamingQuery, interrupts: _Interrupts, reason: str) -> str:
        """Let the batch at work finish: ask the source for no more, and wait until it says so."""
        asked = interrupts.count
        stop_request(self.job.folder).touch()
        seen = stop_seen(self.job.folder)
        while query.isActive and not seen.exists() and interrupts.count == asked:
            time.sleep(_POLL_S)
        return reason

    def _clear_stop(self) -> None:
        for path in (stop_request(self.job.folder), stop_seen(self.job.folder)):
            path.unlink(missing_ok=True)


@dataclass
class _Interrupts:
    count: int = 0


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    """Count Ctrl-C and SIGTERM instead of dying by them; outside the main thread, count nothing.

    No event is set: the handler runs in the thread that would wait for it, perhaps while that holds the
    event's lock.
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
                "Spark's classes are kept for faster starts, once on this machine: the program ends "
                "some ten seconds after its answer."
            )


@dataclass(frozen=True)
class _Created:
    """The topics that a run created, and those that the log had before."""

    names: tuple[str, ...]
    others: tuple[str, ...]


def _make_topics(job: Job) -> _Created:
    """Create the topics that the app declares and the log does not have."""
    there: set[str] = set()
    with suppress(FileNotFoundError):
        there.update(open_reader(job.log).topics())
    missing = tuple(name for name in job.topics if name not in there)
    if missing:
        with connect(job.log) as log:
            for name in missing:
                log.create_topic(name, partitions=job.topics[name], exist_ok=True)
    return _Created(missing, tuple(sorted(there)))


def reached_before(home: ViewStore, app: str) -> datetime | None:
    """Return the watermark of the last batch that was committed; None if none was, or none is set."""
    watermark = home.status(app, JOB).get("watermark")
    return None if watermark is None else datetime.fromisoformat(watermark)


def _report(
    app: str, reason: str, sink: CommitSink, reached: datetime | None, seconds: float
) -> Report:
    """Give the report of a run; ``reached`` is the watermark that it found."""
    totals = sink.totals
    failed = sink.dead_share.failed()
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
        watermark=totals.last.watermark if totals.last else reached,
        lag=totals.last.lag if totals.last else {},
        false_positive_rates=totals.last.false_positive_rates if totals.last else {},
        alarms=tuple(failed.values()),
        failed_steps=tuple(failed),
    )
