"""Runs a plan over a log in this process, without a JVM: the same planner, stages and commits as a job.

It is for state that is computed beside a job: of an edited program, up to the position of the program that
runs. So it reads up to given offsets, and resumes where it was stopped or killed.

Each batch is one transaction of the state store: rows, position, manifests, and in the status the source
offset, which a job has in Spark's checkpoint instead.

===============================================  ===================================================================
a crash after                                    leaves
===============================================  ===================================================================
1. the run has its number, and fences others     the batches before
2. stages have written runs of state             files that no manifest names: the next run removes them
3. the batch is committed                        the batch, and the offset where the next one begins
===============================================  ===================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from millstream.client.address import absolute_address
from millstream.client.reader import RecordReader
from millstream.engine.frame_files import FrameFiles
from millstream.engine.source.event_times import EventTimesFile
from millstream.engine.source.offsets import EndOffsets, SourceOffset, with_declared
from millstream.engine.source.planner import LogPlanner, SourceSpec, plan_tasks, run_task
from millstream.engine.stages.executor import StageExecutor
from millstream.errors import ConfigError
from millstream.kernels.frames import FrameRow
from millstream.kernels.plan import JobPlan
from millstream.views.commit.committer import BatchCommitter, collect_results
from millstream.views.commit.ledger import Position
from millstream.views.commit.open_committer import open_committer
from millstream.views.commit.time_status import time_status
from millstream.views.position import SOURCE_OFFSET
from millstream.views.questions.requests import RequestAnswers
from millstream.views.schema import JOB, Fence, ViewChange
from millstream.views.store_location import StoreLocation

_CHECKPOINT_ID = "local-run"  # there is no checkpoint that could be another one
_ROWS_PER_BATCH = 100_000


@dataclass(frozen=True)
class LocalProgress:
    """One committed batch: how many offsets it read and are left, and the position after it."""

    batch_id: int
    read: int
    left: int
    position: Position


@dataclass(frozen=True)
class LocalRun:
    """Runs a plan in this process. ``folder`` has its runs of state, ``store`` all else.

    Raises:
        ConfigError: the plan has steps or sources of Spark's own.
    """

    plan: JobPlan
    log: Path | str
    folder: Path
    store: StoreLocation
    rows_per_batch: int = _ROWS_PER_BATCH

    def __post_init__(self) -> None:
        for name in self.plan.spark_steps:
            raise ConfigError(
                f"{name!r} is computed by Spark, and cannot be computed without it. Give the app another "
                "name to compute its results again."
            )

    def run(
        self,
        ends: EndOffsets | None = None,
        on_batch: Callable[[LocalProgress], None] | None = None,
        *,
        starts: Mapping[str, Sequence[int]] | None = None,
        partitioning: dict[str, int] | None = None,
        same_expressions: bool = False,
    ) -> None:
        """Read from where the last run stopped up to the offsets ``ends``, by topic and partition.

        By default up to the present end of the log. The first run begins at ``starts``, by default the start of
        the log. ``on_batch`` is called after every committed batch; if it
        raises, that batch is done. ``partitioning`` is kept with the program, as a job's metadata;
        ``same_expressions`` is as in :meth:`millstream.App.run`.

        Raises:
            ConfigError: the store has the state of another program.
        """
        planner = LogPlanner(self._spec)
        planner.pin_end_offsets(ends)
        with open_committer(self.plan, self.store, self.log) as committer:
            batch_id = committer.begin_run(
                JOB, _CHECKPOINT_ID, partitioning=partitioning, same_expressions=same_expressions
            )
            stages = self._stages(committer)
            offset = committer.state_store.status(self.plan.app, JOB).get(SOURCE_OFFSET)
            offset = offset or planner.initial_offset(starts)
            while (end := planner.next_offset(offset)) != offset:
                rows = self._rows(planner, offset, end)
                self._commit(committer, stages, batch_id, rows, (offset, end))
                if on_batch is not None:
                    left = planner.records_left(end)
                    read = planner.records_left(offset) - left
                    on_batch(LocalProgress(batch_id, read, left, committer.position))
                batch_id, offset = batch_id + 1, end
            stages.close()

    def run_planned(
        self,
        offsets: Sequence[dict[str, Any]],
        records: RecordReader | None = None,
        on_batch: Callable[[LocalProgress], None] | None = None,
        *,
        partitioning: dict[str, int],
    ) -> None:
        """Run batches as they were planned elsewhere: one from each of some source offsets to the next.

        Their records are in ``records``, or else in the log. The store has what was before them: see
        :meth:`begin_from`. ``on_batch`` is as in :meth:`run`.
        """
        with open_committer(self.plan, self.store, self.log) as committer:
            batch_id = committer.begin_run(JOB, _CHECKPOINT_ID, partitioning=partitioning)
            stages = self._stages(committer)
            for start, end in pairwise(offsets):
                rows = (
                    row
                    for task in plan_tasks(self._spec, start, end)
                    for row in run_task(self._spec, task, records=records)
                )
                self._commit(committer, stages, batch_id, rows, (start, end))
                if on_batch is not None:
                    read, left = _read_between(start, end), _read_between(end, offsets[-1])
                    on_batch(LocalProgress(batch_id, read, left, committer.position))
                batch_id += 1
            stages.close()

    def begin_from(
        self,
        offset: Mapping[str, Any],
        position: Position,
        views: Sequence[ViewChange],
        manifests: Mapping[tuple[int, int], bytes],
        *,
        partitioning: Mapping[str, int],
    ) -> None:
        """Begin with what another store of the same program has, as if it were the first batch. One transaction.

        Args:
            offset: The source offset up to which that was computed, of all topics that it read.
            position: The same as a position, of the topics that the plan reads.
        """
        known = SourceOffset.from_json(offset)
        read = {
            source.topic for source in self.plan.sources
        }  # a position lacks those without a record
        own = replace(
            known,
            topics={topic: known.topics[topic] for topic in read},
            behind={},
            topic_ids={topic: known.topic_ids[topic] for topic in read},
            removals={t: last for t, last in known.removals.items() if t in read},
        )
        with open_committer(self.plan, self.store, self.log) as committer:
            committer.begin_run(JOB, _CHECKPOINT_ID, partitioning=partitioning)
            committer.state_store.commit(
                Fence(self.plan.app, JOB, committer.run, 0),
                views,
                position=position,
                status={SOURCE_OFFSET: own.to_json()},
                state=manifests,
            )

    def _rows(
        self, planner: LogPlanner, start: dict[str, Any], end: dict[str, Any]
    ) -> Iterator[FrameRow]:
        for task in planner.partitions(start, end):
            yield from run_task(self._spec, task)

    def _commit(
        self,
        committer: BatchCommitter,
        stages: StageExecutor,
        batch_id: int,
        rows: Iterator[FrameRow],
        planned: tuple[dict[str, Any], dict[str, Any]],
    ) -> None:
        """Run one batch, from one source offset to another, and commit it."""
        start, end = planned
        given, state = stages.run(batch_id, rows)
        result = collect_results(self.plan, given)
        answers = RequestAnswers(self.plan)
        answers.put(result, batch_id, committer, stages.state_after_batch)
        at = datetime.now(UTC)
        before = committer.state_store.status(self.plan.app, JOB)
        watermark = result.watermark
        status = {
            "batch_id": batch_id,
            "at": at.isoformat(),
            "watermark": None if watermark is None else watermark.isoformat(),
            **time_status(before, self.plan, result, batch_id, at),
            SOURCE_OFFSET: SourceOffset.from_json(end).to_json(),
        }
        offsets = {batch_id + 1: with_declared(end, self.plan)}
        if batch_id == 0:
            offsets[0] = start
        committer.commit(batch_id, result, status, state, source_offsets=offsets)
        stages.on_commit()
        EventTimesFile(self._spec.event_times).add(given)

    def _stages(self, committer: BatchCommitter) -> StageExecutor:
        manifests = committer.state_store.state_manifests(self.plan.app, JOB)
        return StageExecutor(
            self.plan,
            self.folder / "runs",
            committer.run,
            FrameFiles(None),
            partitions=1,
            tasks=None,
            manifests=manifests,
        )

    @property
    def _spec(self) -> SourceSpec:
        return SourceSpec(
            log=absolute_address(self.log),
            sources=self.plan.sources,
            buckets=self.plan.buckets,
            rows_max=self.rows_per_batch,
            tasks=1,
            stop_request=self.folder / "stop-request",
            stop_acknowledged=self.folder / "stop-acknowledged",
            event_times=self.folder / "event-times.json",
            heartbeat_ms=None,
            frame_files=FrameFiles(None),
        )


def _read_between(start: Mapping[str, Any], end: Mapping[str, Any]) -> int:
    """Count the offsets between two source offsets. Partitions that were added between them begin at 0."""
    before, after = SourceOffset.from_json(start), SourceOffset.from_json(end)
    return sum(sum(after.offsets(topic)) - sum(before.offsets(topic)) for topic in after.topics)
