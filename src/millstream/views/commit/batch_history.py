"""What the history keeps of a batch: how long it took and where, what it read, and what steps hold.

A record is written with the batch, in its transaction, so it costs no sync of its own and is there exactly
when the batch is. It cannot have the time of its own commit, so the next batch of the run has it. The last
:data:`millstream.views.state_store.batch_tables.BATCHES_KEPT` records stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from millstream.views.commit.committer import BatchResult
from millstream.views.runs.batch_figures import BatchPhase
from millstream.views.runs.progress import Progress

PHASES = ("plan", "read", "stages", "outputs", "collect", "commit")
"""The phases of a batch, in their order.

plan: the planner and Spark, until the batch is handed over; read: the source's part, reading to partials; stages: the
operators behind shuffles; outputs: tasks that write large outputs; collect: putting results together; commit: all
sinks, the state store last.
"""
_COUNTS = ("read", "emitted", "held", "late", "dead", "filtered", "duplicate")
_STEP_COUNTS = ("read", "rows_out", "late", "dead", "filtered", "duplicate")


@dataclass
class PhaseTimer:
    """Measures the phases of one batch after another. The commit counts for the batch before."""

    clock: Callable[[], float] = time.monotonic
    took_ms: dict[str, float] = field(default_factory=dict)
    phases: list[BatchPhase] = field(default_factory=list)
    commit_before_ms: float | None = None

    def begin(self, planned_ms: float) -> None:
        """Begin a batch, which took ``planned_ms`` until it was handed over."""
        self.commit_before_ms = self.took_ms.pop("commit", None)
        self.took_ms = {"plan": planned_ms}
        self.phases = []

    def forget_phases(self) -> None:
        """Forget from when to when the phases were: the batch has ended, and its spans are emitted."""
        self.phases = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as a phase of the batch, also if it fails."""
        began_s = self.clock()
        if not self.phases:
            planned_s = self.took_ms.get("plan", 0.0) / 1000
            self.phases.append(BatchPhase("plan", began_s - planned_s, began_s))
        try:
            yield
        finally:
            ended_s = self.clock()
            self.took_ms[name] = self.took_ms.get(name, 0.0) + (ended_s - began_s) * 1000
            self.phases.append(BatchPhase(name, began_s, ended_s))


def batch_record(
    progress: Progress,
    result: BatchResult,
    timer: PhaseTimer,
    run: int,
    rows_max: int | None = None,
) -> dict[str, Any]:
    """Return the record of a batch, as plain values.

    ``phases`` is phase → milliseconds, without the commit; ``commit_before_ms`` is that of the batch before, where
    this run has committed it. ``steps`` is step → its counts that are not 0, and for how many milliseconds it
    ``worked``, in all tasks; ``state`` is operator → ``bytes`` and ``rows``. ``ends`` is topic → partition →
    the offset that comes next, of the partitions that the batch has read; ``unread`` all that was left. ``rows_max`` is
    how many records a batch may read.
    """
    steps: dict[str, dict[str, float]] = {}
    for step, line in result.step_counts.items():
        steps[step] = {name: line[name] for name in _STEP_COUNTS if line[name]}
    for step, took_ms in result.worked_ms.items():
        steps.setdefault(step, {})["worked"] = round(took_ms, 1)
    before = timer.commit_before_ms
    return {
        "batch_id": progress.batch_id,
        "run": run,
        "at": progress.at.isoformat(),
        "duration_ms": round(progress.duration_ms, 1),
        "phases": {name: round(took_ms, 1) for name, took_ms in timer.took_ms.items()},
        "commit_before_ms": None if before is None else round(before, 1),
        **{name: getattr(progress, name) for name in _COUNTS},
        "rows_max": rows_max,
        "unread": sum(progress.lag.values()),
        "behind_s": progress.behind_s,
        "watermark": None if progress.watermark is None else progress.watermark.isoformat(),
        "state_bytes": progress.state_bytes,
        "state": {name: dict(held) for name, held in result.state.items()},
        "steps": steps,
        "ends": result.position,
    }


def with_commits(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return records, each with its own commit among its phases, where the next one tells it."""
    found = [{**record, "phases": dict(record["phases"])} for record in records]
    for record, after in pairwise(found):
        took_ms = after["commit_before_ms"]
        if took_ms is not None and after["batch_id"] == record["batch_id"] + 1:
            record["phases"]["commit"] = took_ms
    return found
