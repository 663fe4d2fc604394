"""The sink: takes a batch's last edge on the driver and commits it, once, with its fence."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from millstream.kernels.frames import FrameRow
from millstream.kernels.plan import JobPlan
from millstream.log.reader import LogReader
from millstream.views.commit import BatchOutcome, Targets, gather
from millstream.views.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

JOB = "main"


@dataclass
class Totals:
    """What the batches of a run add up to."""

    batches: int = 0
    read: int = 0
    late: int = 0
    filtered: int = 0
    dead: int = 0
    last: Progress | None = None

    def add(self, progress: Progress) -> None:
        self.batches += 1
        self.read += progress.read
        self.late += progress.late
        self.filtered += progress.filtered
        self.dead += progress.dead
        self.last = progress


@dataclass
class CommitSink:
    """Spark calls it with every batch; an error here ends the query and is kept for the caller.

    Spark may call it again with a batch that was committed before a crash: the fence is found, and
    nothing changes.
    """

    plan: JobPlan
    targets: Targets
    log: LogReader
    on_progress: Callable[[Progress], None] | None
    totals: Totals = field(default_factory=Totals)
    error: BaseException | None = None
    _ended: float = field(default_factory=time.monotonic)

    def __call__(self, frames: DataFrame, batch_id: int) -> None:
        try:
            self._take(frames, batch_id)
        except BaseException as error:
            self.error = error
            raise

    def _take(self, frames: DataFrame, batch_id: int) -> None:
        outcome = gather(self.plan, collect(frames))
        progress = self._progress(outcome, batch_id)
        status = {**progress.to_dict(), "state_bytes": outcome.state_bytes}
        if self.targets.commit(batch_id, outcome, status):
            self.totals.add(progress)
            if self.on_progress is not None:
                self.on_progress(progress)

    def _progress(self, outcome: BatchOutcome, batch_id: int) -> Progress:
        began, self._ended = self._ended, time.monotonic()
        return Progress(
            app=self.plan.app,
            batch_id=batch_id,
            at=datetime.now(UTC),
            duration_ms=(self._ended - began) * 1000,
            read=outcome.read(self.plan),
            emitted=sum(rows.height for rows in outcome.rows.values()),
            held=outcome.total("held"),
            late=outcome.total("late"),
            filtered=outcome.total("filtered"),
            dead=outcome.total("dead"),
            watermark=outcome.watermark,
            lag=self._lag(outcome),
        )

    def _lag(self, outcome: BatchOutcome) -> dict[str, int]:
        lag: dict[str, int] = {}
        known = self.totals.last.lag if self.totals.last else {}
        for topic in sorted({source.topic for source in self.plan.sources}):
            read = outcome.position.get(topic, {})
            for partition, (_, end) in enumerate(self.log.offsets(topic)):
                name = f"{topic}/{partition}"
                lag[name] = (
                    end - read[str(partition)] if str(partition) in read else known.get(name, 0)
                )
        return lag


def collect(frames: DataFrame) -> Sequence[FrameRow]:
    """Bring the rows of a batch's last edge to the driver."""
    rows: list[Any] = frames.collect()
    return [FrameRow(row[0], row[1], bytes(row[2])) for row in rows]
