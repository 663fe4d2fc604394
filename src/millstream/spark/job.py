"""The engine on Spark: an app's plan as one streaming query, from its start until its last batch is complete."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from millstream.engine.frame_files import FrameFiles
from millstream.engine.interrupts import Interrupts, count_interrupts
from millstream.engine.job import BegunRun, Job, RunOptions, create_topics, run_on
from millstream.engine.machine import cores_available
from millstream.engine.source.event_times import EventTimesFile
from millstream.engine.source.offsets import planned_offset
from millstream.engine.source.planner import SourceSpec, read_planned
from millstream.engine.stages.executor import StageExecutor
from millstream.errors import ConfigError, FencedError
from millstream.kernels.frames import plain_schema
from millstream.kernels.plan import JobPlan
from millstream.kernels.state.keyhash import Buckets
from millstream.object_store.place import StatePlace
from millstream.spark.data_source import SOURCE_NAME, LogSource
from millstream.spark.dataframes import add_dataframe, add_native_step, to_dataframe
from millstream.spark.failures import to_millstream_error
from millstream.spark.frame_blocks import FrameBlocks
from millstream.spark.frame_tasks import FrameTasks
from millstream.spark.output_tasks import OutputTasks
from millstream.spark.runtime import internals
from millstream.spark.runtime.session import start_session, stop_session
from millstream.spark.serializable import check_serializable
from millstream.spark.sink import CommitSink
from millstream.spark.source_spec import to_option
from millstream.spark.stage_tasks import SparkStageTasks
from millstream.views.runs.control_files import stop_acknowledged_file, stop_request_file
from millstream.views.runs.dead_letter_share import DeadLetterShare
from millstream.views.runs.progress import Report
from millstream.views.runs.skew import SkewWatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame as DataFrame  # noqa: PLC0414 - given on to the pipeline
    from pyspark.sql import SparkSession as SparkSession  # noqa: PLC0414 - as above
    from pyspark.sql.streaming.query import StreamingQuery

_WHOLE_STAGE = "spark.sql.codegen.wholeStage"
_POLL_S, _POLL_LAST_S = 0.02, 0.1  # whether the query is active is asked of the JVM
_POLL_GROWTH = 1.05  # while no batch comes: 0.1 s after one and a half


class SparkEngine:
    """Runs a job as one streaming query of Spark's."""

    def check(self, plan: JobPlan, options: RunOptions) -> None:  # noqa: ARG002 - Spark has all options
        """Refuse functions that cannot be sent to workers."""
        check_serializable(plan)

    def has_output_tasks(self, options: RunOptions) -> bool:
        """Return whether tasks write large outputs."""
        return tasks_write_outputs(options.master)

    def run(self, begun: BegunRun) -> tuple[str, CommitSink]:
        """Run the query to its end; return why it ended, and what ran its batches."""
        sink = _make_sink(begun)
        with _session(begun.job, begun.options) as spark:
            return _Query(begun, sink, spark).run(), sink


def run_job(job: Job, options: RunOptions) -> Report:
    """Run a job on Spark until its end; return its report. See :meth:`millstream.App.run`."""
    return run_on(SparkEngine(), job, options)


def _make_sink(begun: BegunRun) -> CommitSink:
    """Make what Spark calls with each batch of a run that has begun."""
    job, options, committer = begun.job, begun.options, begun.committer
    share = shares_disk(options.master, begun.plan, begun.place)
    return CommitSink(
        begun.plan,
        committer,
        begun.log,
        options.on_progress,
        EventTimesFile(job.event_times),
        FrameFiles(
            job.frames / str(committer.run) if share else None,
            rewrites=is_one_machine(options.master),
        ),
        DeadLetterShare(options.dead_max, options.on_alarm),
        SkewWatch(options.on_notice),
        partial(planned_offset, job.folder / "checkpoint"),
        None
        if share
        else FrameBlocks(sources_repeat=not (begun.plan.frames or begun.plan.natives)),
        begun.checkpoint.save,
        rows_max=options.rows_per_batch,
    )


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
    create_topics(job)
    spark = start_session(job.app, folder=job.folder)
    frame_files = FrameFiles(None)  # the end of a batch of the user's query is not known
    spec = job.source_spec(
        plan, rows_max=1_000_000, tasks=cores_available(), frame_files=frame_files
    )
    frames = build_frames(spark, plan, spec)
    schema = plain_schema(dict(plan.sinks[0].schema))
    return to_dataframe(frames, plan.sinks[0].port, schema, frame_files)


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


def build_frames(spark: SparkSession, plan: JobPlan, spec: SourceSpec) -> DataFrame:
    """Return what is before the stages as a streaming DataFrame of frames: sources and native steps."""
    spark.dataSource.register(LogSource)
    frames = spark.readStream.format(SOURCE_NAME).option("spec", to_option(spec)).load()
    for source in plan.frames:
        frames = add_dataframe(frames, source, plan.buckets, spec.frame_files)
    for native in plan.natives:  # after all sources: its rows may come from any
        frames = add_native_step(frames, native, plan.buckets, spec.frame_files)
    return frames


@dataclass
class _Query:
    """One run of a job as a streaming query."""

    begun: BegunRun
    sink: CommitSink
    spark: SparkSession

    def run(self) -> str:
        """Run the query to its end; return why it ended."""
        self.begun.clear_stop()
        self.begun.options.on_phase("planning the first batch")
        query = self._start()
        try:
            self.begun.options.on_started(self.begun.to_start())
            reason = self._wait(query)
            # Read before the stop: a stop interrupts a batch that a DataFrame of the user's has begun
            # meanwhile. That is no failure, as the next run repeats the batch.
            failure = self.sink.error or query.exception()
        finally:
            query.stop()
            self.begun.clear_stop()
            self.sink.frame_files.remove_all()
            if self.sink.stages is not None:
                self.sink.stages.close()
        if failure is not None and not isinstance(failure, FencedError):
            # A newer run removes files of this one, which can fail in many ways: report only the cause.
            self.sink.committer.check_not_fenced()
        if isinstance(failure, (PySparkException, Py4JError)):
            raise to_millstream_error(
                failure, self.begun.job.app, self.begun.job.folder / "spark.log"
            ) from None
        if failure is not None:
            raise failure
        return reason

    def _start(self) -> StreamingQuery:
        # For native steps that have state of Spark's own: it freezes this number in the checkpoint.
        self.spark.conf.set("spark.sql.shuffle.partitions", self.begun.metadata.shuffle_partitions)
        only_frames = not (self.begun.plan.frames or self.begun.plan.natives)
        # They are few rows: writing and compiling code for them takes longer than to do without, in each batch.
        mode = "NO_CODEGEN" if only_frames else "FALLBACK"
        self.spark.conf.set("spark.sql.codegen.factoryMode", mode)
        self._set_checkpoint_manager(only_frames=only_frames)
        whole_stage = self.spark.conf.get(_WHOLE_STAGE) or "true"
        # To hand its frames to the executors and back would take a task there longer than to read it here.
        here = only_frames and not is_one_machine(self.begun.options.master)
        spec = self.begun.job.source_spec(
            self.begun.plan,
            rows_max=self.begun.options.rows_per_batch,
            tasks=self.begun.options.cores or cores_available(),
            frame_files=self.sink.frame_files,
            planner_reads=not here,
        )
        if here:
            self.sink.read_here = partial(read_planned, spec, self.sink.planned_offset)
        frames = build_frames(self.spark, self.begun.plan, spec)
        if self.begun.plan.stages:
            self.sink.stages = self._stages()
        if tasks_write_outputs(self.begun.options.master):
            self.sink.outputs = self._outputs()
        # The scheme is said, as where there is none Spark takes that of its default file system, perhaps HDFS.
        checkpoint = f"file://{self.begun.job.folder.absolute() / 'checkpoint'}"
        writer = (
            frames.writeStream.queryName(self.begun.job.app)
            .foreachBatch(self.sink)
            .outputMode("append")
            .option("checkpointLocation", checkpoint)
        )
        if self.begun.options.until == "caught-up":
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime="0 seconds")
        self.sink.start()
        self.spark.conf.set(_WHOLE_STAGE, "false" if only_frames else whole_stage)
        try:
            return writer.start()  # the query has a copy of the settings
        finally:
            self.spark.conf.set(_WHOLE_STAGE, whole_stage)

    def _set_checkpoint_manager(self, *, only_frames: bool) -> None:
        """On a cluster, have Spark write a checkpoint as on one machine, if nobody but this machine writes into it.

        With native steps, executors do, perhaps on a file system where a rename is not atomic.
        """
        options, name = self.begun.options, internals.CHECKPOINT_MANAGER_SETTING
        if is_one_machine(options.master) or name in (options.settings or {}):
            return
        if only_frames:
            self.spark.conf.set(name, internals.LOCAL_CHECKPOINT_MANAGER)
        else:
            self.spark.conf.unset(name)  # an app before this one may have set it

    def _stages(self) -> StageExecutor:
        sink = self.sink
        tasks = SparkStageTasks(self.spark.sparkContext, sink.frame_files, sink.blocks)
        return self.begun.stages(sink.frame_files, tasks)

    def _outputs(self) -> OutputTasks:
        tasks = FrameTasks(
            self.spark.sparkContext,
            self.begun.options.cores or cores_available(),  # no state: buckets do not bound it
            self.sink.frame_files,
            self.sink.blocks,
        )
        return OutputTasks(
            self.begun.plan, tasks, self.sink.committer.stager, self.begun.options.on_notice
        )

    def _wait(self, query: StreamingQuery) -> str:
        """Wait for the end: the query's own, a time, a condition, a request, or Ctrl-C."""
        deadline = (
            None
            if self.begun.options.timeout_s is None
            else time.monotonic() + self.begun.options.timeout_s
        )
        checked = 0
        pause_s = _POLL_S
        with count_interrupts() as interrupts:
            while query.isActive:
                if interrupts.count > 0 or stop_request_file(self.begun.job.folder).exists():
                    return self._drain(query, interrupts, "stopped")
                if deadline is not None and time.monotonic() >= deadline:
                    return self._drain(query, interrupts, "timeout")
                pause_s = min(pause_s * _POLL_GROWTH, _POLL_LAST_S)
                if self.sink.totals.batches > checked:
                    checked, pause_s = self.sink.totals.batches, _POLL_S
                    ended = self.begun.why_ended(self.sink.totals)
                    if ended is not None:
                        return self._drain(query, interrupts, ended)
                time.sleep(pause_s)
        return "caught-up"

    def _drain(self, query: StreamingQuery, interrupts: Interrupts, reason: str) -> str:
        """Let the running batch finish: ask the source for no more, and wait for its acknowledgement.

        A second interrupt ends the wait.
        """
        before = interrupts.count
        stop_request_file(self.begun.job.folder).touch()
        acknowledged = stop_acknowledged_file(self.begun.job.folder)
        while query.isActive and not acknowledged.exists() and interrupts.count == before:
            time.sleep(_POLL_S)
        return reason


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
