"""Looks at the rows of a step: a part of the log is run through a plan in memory, and nothing is kept.

The planner, the decoding, the kernels are those of a run; state begins empty and is thrown away. Nothing of the app or the log is
written: the planner's files are in a folder that is removed.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import polars as pl

from millstream.client.open import open_reader
from millstream.client.reader import Reader
from millstream.engine.frame_files import FrameFiles
from millstream.engine.job import Job
from millstream.engine.source.event_times import EventTimesFile
from millstream.engine.source.planner import LogPlanner, SourceSpec, run_task
from millstream.errors import ConfigError
from millstream.kernels.frames import DIFF, FrameRow
from millstream.kernels.plan import JobPlan
from millstream.kernels.stage import run_stage
from millstream.kernels.state.journal import MemoryJournal
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.state.memory_bucket import MemoryBucketState
from millstream.views.commit.committer import BatchResult, collect_results
from millstream.views.retractions import DIFF_COLUMN

PeekedEnd = Literal["last", "first"]
_BATCH_ROWS = 2_000  # the time is looked at between batches


@dataclass(frozen=True)
class PeekLimits:
    """How many rows are wanted, from which end, and how many records and seconds that may take.

    ``by`` is a column that says the time of rows which have no place in the log.
    """

    rows: int
    end: PeekedEnd
    records: int
    timeout_s: float
    by: str | None = None


def peek_rows(job: Job, limits: PeekLimits) -> pl.DataFrame:
    """Return rows of the one output of a job. Where rows may be taken back, ``_diff`` is -1 of those that are.

    Warns:
        UserWarning: rows became dead letters, or the time was over before all was read.

    Raises:
        ConfigError: a step is computed by Spark.
    """
    plan = job.compile(Buckets(job.bucket_count))
    for name in plan.spark_steps:
        raise ConfigError(f"{name!r} is computed by Spark, and peek has none. Peek above it.")
    log = open_reader(job.log)
    known = log.topics()
    if any(source.topic not in known for source in plan.sources):  # a run would create it
        return _shown([], plan, limits)
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = replace(job, folder=Path(folder))
        spec = elsewhere.source_spec(
            plan, rows_max=_BATCH_ROWS, tasks=1, frame_files=FrameFiles(None)
        )
        return _Peek(plan, spec, log, limits).run()


@dataclass
class _Peek:
    """One look."""

    plan: JobPlan
    spec: SourceSpec
    log: Reader
    limits: PeekLimits
    states: dict[tuple[int, int], MemoryBucketState] = field(default_factory=dict)
    journal: MemoryJournal = field(default_factory=MemoryJournal)

    def run(self) -> pl.DataFrame:
        ends = time.monotonic() + self.limits.timeout_s
        found: list[pl.DataFrame] = []
        dead: list[pl.DataFrame] = []
        for result in self._results():
            found += result.rows.values()
            if result.dead_letters is not None and result.dead_letters.height:
                dead.append(result.dead_letters)
            enough = sum(frame.height for frame in found) >= self.limits.rows
            if self.limits.end == "first" and enough:
                break
            if time.monotonic() >= ends:
                warnings.warn(
                    f"peek has read for {self.limits.timeout_s:g} seconds, and not all: give a longer timeout=, or fewer "
                    "records=.",
                    stacklevel=4,
                )
                break
        if dead:
            letters = pl.concat(dead, how="diagonal")
            warnings.warn(
                f"{letters.height:,} of the rows became dead letters; the first at {letters['step'][0]!r}: "
                f"{letters['reason'][0]}",
                stacklevel=4,
            )
        return _shown(found, self.plan, self.limits)

    def _results(self) -> Iterator[BatchResult]:
        """Yield what each batch gives, up to the present end of the log."""
        planner = LogPlanner(self.spec)
        planner.pin_end_offsets()
        offset = planner.initial_offset(self._starts())
        batch_id = 0
        while (end := planner.next_offset(offset)) != offset:
            tasks = planner.partitions(offset, end)
            read = [row for task in tasks for row in run_task(self.spec, task)]
            rows = self._through_stages(batch_id, read)
            EventTimesFile(self.spec.event_times).add(rows)
            yield collect_results(self.plan, rows)
            batch_id, offset = batch_id + 1, end

    def _starts(self) -> dict[str, list[int]]:
        """Return where each topic begins to be read: so far before its end, or at its start."""
        starts = {}
        for topic in {source.topic for source in self.plan.sources}:
            offsets = self.log.offsets(topic)
            share = -(-self.limits.records // len(offsets))
            starts[topic] = [
                start if self.limits.end == "first" else max(start, end - share)
                for start, end in offsets
            ]
        return starts

    def _through_stages(self, batch_id: int, rows: list[FrameRow]) -> list[FrameRow]:
        for depth, stage in enumerate(self.plan.stages):
            rows = [
                out
                for bucket in self.plan.buckets.numbers
                for out in run_stage(
                    stage,
                    bucket,
                    self.plan.buckets,
                    [row for row in rows if row.bucket == bucket],
                    self._state(depth, bucket, batch_id),
                )
            ]
        return rows

    def _state(self, depth: int, bucket: int, batch_id: int) -> MemoryBucketState:
        state = self.states.setdefault((depth, bucket), MemoryBucketState(prefix=f"{bucket}/"))
        state.journals = replace(self.journal, scope=(str(batch_id), str(bucket)))
        return state


def _shown(found: list[pl.DataFrame], plan: JobPlan, limits: PeekLimits) -> pl.DataFrame:
    """Return the rows that are wanted, with the columns of the step."""
    schema = dict(plan.sinks[0].schema)
    if not found:
        return pl.DataFrame(schema=schema)
    rows = pl.concat(found, how="diagonal")
    if limits.by is not None:  # buckets give theirs one after the other
        rows = rows.sort(pl.nth(rows.columns.index(limits.by)), maintain_order=True)
    rows = rows.head(limits.rows) if limits.end == "first" else rows.tail(limits.rows)
    signs = [pl.col(DIFF).alias(DIFF_COLUMN)] if DIFF in rows.columns else []
    return rows.select(*(pl.nth(rows.columns.index(name)) for name in schema), *signs)
