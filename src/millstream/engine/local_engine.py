"""The engine without a JVM: a job's batches one after the other, in this process.

It is for development and small apps. The plan, the kernels, the state, the commit and the reports are those of
Spark's engine, and so is the log of plans (`plan_log.py`): an app moves between the two from one run to the next.
What this one has of its own is the loop: when a batch is planned, and that all of it runs here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream.engine.batch_runner import BatchRunner
from millstream.engine.frame_files import FrameFiles
from millstream.engine.interrupts import Interrupts, count_interrupts
from millstream.engine.job import BegunRun, Job, RunOptions, run_on
from millstream.engine.plan_log import PlanLog
from millstream.engine.source.event_times import EventTimesFile
from millstream.engine.source.planner import LogPlanner, SourceSpec, plan_tasks, run_task
from millstream.errors import ConfigError, CorruptionError, FencedError
from millstream.kernels.frames import FrameRow
from millstream.kernels.plan import JobPlan
from millstream.views.runs.control_files import stop_request_file
from millstream.views.runs.dead_letter_share import DeadLetterShare
from millstream.views.runs.progress import Report
from millstream.views.runs.skew import SkewWatch

_POLL_S = 0.05  # how long new records wait at most, while nothing else is to be done
_FENCE_CHECK_S = 1.0  # how long an idle run stays that another one has replaced


class LocalEngine:
    """Runs the batches of a job in this process."""

    def check(self, plan: JobPlan, options: RunOptions) -> None:
        """Refuse what only Spark has."""
        for name in plan.spark_steps:
            raise ConfigError(
                f'{name!r} is computed by Spark, and the engine "local" has none. Run the app with engine="spark", or '
                "write the step with the stream's own: map, enrich, process."
            )
        for name in ("master", "settings"):
            if getattr(options, name):
                raise ConfigError(
                    f'run was given {name}=, which is for Spark, and engine="local". Leave one of them out.'
                )

    def run(self, begun: BegunRun) -> tuple[str, BatchRunner]:
        """Run batches to the end of a run; return why it ended, and what ran them."""
        plans = PlanLog(begun.job.folder.absolute() / "checkpoint")
        plans.create()
        runner = BatchRunner(
            begun.plan,
            begun.committer,
            begun.log,
            begun.options.on_progress,
            EventTimesFile(begun.job.event_times),
            FrameFiles(None),
            DeadLetterShare(begun.options.dead_max, begun.options.on_alarm),
            SkewWatch(begun.options.on_notice),
            plans.plan,
            on_begin=begun.checkpoint.save,
            rows_max=begun.options.rows_per_batch,
        )
        return _LocalLoop(begun, runner, plans).run(), runner


def run_local(job: Job, options: RunOptions) -> Report:
    """Run a job in this process until its end; return its report. See :meth:`millstream.App.run`."""
    return run_on(LocalEngine(), job, options)


@dataclass
class _LocalLoop:
    """One run of a job, batch by batch."""

    begun: BegunRun
    runner: BatchRunner
    plans: PlanLog
    _deadline: float | None = field(init=False)
    _interrupts: Interrupts = field(default_factory=Interrupts)
    _next_fence_check: float = 0.0

    def __post_init__(self) -> None:
        timeout_s = self.begun.options.timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def run(self) -> str:
        """Run batches to the end; return why it ended."""
        begun, runner = self.begun, self.runner
        begun.clear_stop()
        begun.options.on_phase("planning the first batch")
        planner = LogPlanner(self._spec)
        if begun.options.until == "caught-up":
            planner.pin_end_offsets()
        if begun.plan.stages:
            runner.stages = begun.stages(runner.frame_files, None)
        runner.start()
        begun.options.on_started(begun.to_start())
        try:
            with count_interrupts(second_raises=True) as self._interrupts:
                return self._run_batches(planner)
        except KeyboardInterrupt:  # the second one: the next run repeats the batch
            return "stopped"
        except FencedError:
            raise
        except Exception:
            # A newer run removes files of this one, which can fail in many ways: report only the cause.
            begun.committer.check_not_fenced()
            raise
        finally:
            begun.clear_stop()
            if runner.stages is not None:
                runner.stages.close()

    def _run_batches(self, planner: LogPlanner) -> str:
        batch_id = self.begun.next_batch_id
        offset = self._offset_before(batch_id, planner)
        while True:
            ended = self._why_ended()
            if ended is not None:
                return ended
            end = self.plans.plan(batch_id) or self._plan(planner, batch_id, offset)
            if end is None and self.begun.options.until == "caught-up":
                return self._why_ended() or "caught-up"  # a request to stop ends the plans, too
            if end is None:
                self._wait()
                continue
            self._run_batch(batch_id, offset, end)
            batch_id, offset = batch_id + 1, end

    def _offset_before(self, batch_id: int, planner: LogPlanner) -> dict[str, Any]:
        """Return the source offset at which the first batch of the run begins."""
        if batch_id == 0:
            return planner.initial_offset()
        offset = self.plans.plan(batch_id - 1)
        if offset is None:
            raise CorruptionError(
                f"{self.plans.checkpoint} has no plan of batch {batch_id - 1}, behind which this run begins. Restore "
                "the checkpoint and the state store of one time, or start over from the log: `millstream reset`."
            )
        return offset

    def _plan(
        self, planner: LogPlanner, batch_id: int, start: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Plan the batch that begins at an offset, and write the plan down; None if none is due."""
        end = planner.next_offset(start)
        if end == start:
            return None
        # A run that was replaced while it was paused leaves no plan behind: Spark fails where it finds one.
        self.begun.committer.check_not_fenced()
        return self.plans.add(batch_id, end)

    def _wait(self) -> None:
        """Wait for records a moment.

        Raises:
            FencedError: a newer run has begun. A run that commits nothing learns it only by asking.
        """
        if time.monotonic() >= self._next_fence_check:
            self.begun.committer.check_not_fenced()
            self._next_fence_check = time.monotonic() + _FENCE_CHECK_S
        time.sleep(_POLL_S)

    def _run_batch(self, batch_id: int, start: dict[str, Any], end: dict[str, Any]) -> None:
        def read() -> Sequence[FrameRow]:
            tasks = plan_tasks(self._spec, start, end)
            return [row for task in tasks for row in run_task(self._spec, task)]

        self.runner.run(batch_id, read)
        self.plans.mark_committed(batch_id)

    def _why_ended(self) -> str | None:
        """Return why the run ends before its next batch; None if it does not."""
        if self._interrupts.count > 0 or stop_request_file(self.begun.job.folder).exists():
            return "stopped"
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "timeout"
        totals = self.runner.totals
        return None if totals.last is None else self.begun.why_ended(totals)

    @property
    def _spec(self) -> SourceSpec:
        return self.begun.job.source_spec(
            self.begun.plan,
            rows_max=self.begun.options.rows_per_batch,
            tasks=1,
            frame_files=self.runner.frame_files,
        )
