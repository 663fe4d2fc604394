"""How loaded a job is, from the history of its last batches: rates, and where its time goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from millstream.views.commit.batch_history import PHASES, with_commits

RECENT_BATCHES = 60
"""How many of the last batches the load is of."""


@dataclass(frozen=True)
class StepLoad:
    """What a step did in some batches: events read, milliseconds of work in all tasks, and the state after them."""

    step: str
    read: int
    worked_ms: float
    state_bytes: int
    state_rows: int
    late: int
    dead: int


@dataclass(frozen=True)
class BatchLoad:
    """The load of some batches that follow one another.

    ``arriving_per_s`` and ``read_per_s`` are records by the clock, ``capacity_per_s`` records by the time that batches
    took; each None where it isn't known, as of a single batch. ``busy`` is the share of the time in which a batch was
    at work. ``phases_ms`` is phase → milliseconds in all, in the order of the phases; ``steps`` has those that
    worked longest first.
    """

    batches: int
    seconds: float
    arriving_per_s: float | None
    read_per_s: float | None
    capacity_per_s: float | None
    busy: float | None
    phases_ms: Mapping[str, float]
    steps: tuple[StepLoad, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**asdict(self), "steps": [asdict(step) for step in self.steps]}

    def catch_up_s(self, unread: int) -> float | None:
        """Return in how many seconds the unread records are read; None if never, or not known."""
        if not unread:
            return 0.0
        if self.capacity_per_s is None or self.arriving_per_s is None:
            return None
        spare = self.capacity_per_s - self.arriving_per_s
        return unread / spare if spare > 0 else None


def batch_load(records: Sequence[Mapping[str, Any]]) -> BatchLoad:
    """Return the load of the batches of some records, which are of the newest run alone."""
    run = records[-1]["run"] if records else 0
    batches = with_commits([one for one in records if one["run"] == run])
    phases = Counter[str]()
    for one in batches:
        phases.update(one["phases"])
    took_s = sum(one["duration_ms"] + one["phases"].get("commit", 0.0) for one in batches) / 1000
    read = sum(one["read"] for one in batches)
    capacity = read / took_s if took_s and read else None
    steps = _steps(batches)
    ordered = {name: phases[name] for name in PHASES if name in phases}
    first, last = (batches[0], batches[-1]) if batches else ({}, {})
    seconds = (_at(last) - _at(first)).total_seconds() if batches else 0.0
    if seconds <= 0:
        return BatchLoad(len(batches), 0.0, None, None, capacity, None, ordered, steps)
    after_first = read - first["read"]
    arrived = after_first + last["unread"] - first["unread"]
    busy_s = took_s - first["duration_ms"] / 1000
    return BatchLoad(
        len(batches),
        seconds,
        max(0.0, arrived / seconds),
        after_first / seconds,
        capacity,
        min(1.0, busy_s / seconds),
        ordered,
        steps,
    )


def _at(record: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(record["at"])


def _steps(batches: Sequence[Mapping[str, Any]]) -> tuple[StepLoad, ...]:
    totals: dict[str, Counter[str]] = {}
    for one in batches:
        for step, counts in one["steps"].items():
            totals.setdefault(step, Counter()).update(counts)
    state = batches[-1]["state"] if batches else {}
    for step in state:
        totals.setdefault(step, Counter())
    found = [
        StepLoad(
            step,
            int(counts["read"]),
            float(counts["worked"]),
            state.get(step, {}).get("bytes", 0),
            state.get(step, {}).get("rows", 0),
            int(counts["late"]),
            int(counts["dead"]),
        )
        for step, counts in totals.items()
    ]
    return tuple(sorted(found, key=lambda step: -step.worked_ms))
