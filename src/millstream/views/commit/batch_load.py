"""How loaded a job is, from the history of its last batches: rates, and where its time goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

from millstream.views.commit.batch_history import PHASES, with_commits

RECENT_BATCHES = 60
"""How many of the last batches the load is of."""
_BATCHES_MIN = 5  # of which something can be usual
_BACKLOG = 2  # a job that takes all there is leaves as much as it read: what arrived meanwhile


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


class CatchUp(NamedTuple):
    """When a job has read what is unread: in ``seconds``; None if ``never``, or if that cannot be known yet."""

    seconds: float | None
    never: bool = False


class BatchCapacity(NamedTuple):
    """What the fullest quarter of some batches shows of how fast a job reads.

    A batch takes a time even if it is empty. So batches that had little to read say nothing of how fast the job
    reads when there is much, and only the fullest ones count: ``per_s`` is what those read in the time that they took,
    and ``records`` the most that one has read. ``limited``: most of them left at least twice as much unread as they
    read, so that larger ones are not to be expected. ``shortest_s`` is the least that any batch took, and ``fullest_s``
    what the last one took of those that read the most.
    """

    per_s: float | None
    records: int
    limited: bool
    shortest_s: float
    fullest_s: float


@dataclass(frozen=True)
class BatchLoad:
    """The load of some batches that follow one another.

    ``arriving_per_s`` and ``read_per_s`` are records by the clock, None where that isn't known, as of a single batch.
    ``usually_arriving_per_s`` is what arrives half of the time, or less: a burst is not expected to come again. ``busy`` is the share of the time in which a batch was at work. ``phases_ms`` is phase → milliseconds in all, in the
    order of the phases; ``steps`` has those that worked longest first.
    """

    batches: int
    seconds: float
    arriving_per_s: float | None
    usually_arriving_per_s: float | None
    read_per_s: float | None
    capacity: BatchCapacity
    busy: float | None
    phases_ms: Mapping[str, float]
    steps: tuple[StepLoad, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            **asdict(self),
            "capacity": self.capacity._asdict(),
            "steps": [asdict(step) for step in self.steps],
        }

    def catch_up(self, unread: int) -> CatchUp:
        """Return when the unread records will have been read.

        ======================================  ==============================================================
        what is unread                          how it is estimated
        ======================================  ==============================================================
        nothing                                 at once
        no more than a batch has read           one batch: the shortest one's time, and the records at capacity; but
                                                no longer than the batch that read the most
        more; the fullest batches were limited  at what capacity leaves beside what usually arrives; never, if nothing
        more; they were not, or there are few   not known: the next batch is larger than all there were
        ======================================  ==============================================================
        """
        capacity = self.capacity
        if not unread:
            return CatchUp(0.0)
        if capacity.per_s is None or self.usually_arriving_per_s is None:
            return CatchUp(None)
        if unread <= capacity.records:
            return CatchUp(min(capacity.shortest_s + unread / capacity.per_s, capacity.fullest_s))
        if not capacity.limited or self.batches < _BATCHES_MIN:
            return CatchUp(None)
        spare = capacity.per_s - self.usually_arriving_per_s
        return CatchUp(unread / spare) if spare > 0 else CatchUp(None, never=True)


def batch_load(records: Sequence[Mapping[str, Any]]) -> BatchLoad:
    """Return the load of the batches of some records, which are of the newest run alone."""
    run = records[-1]["run"] if records else 0
    batches = with_commits([one for one in records if one["run"] == run])
    phases = Counter[str]()
    for one in batches:
        phases.update(one["phases"])
    took_s = sum(map(_took_s, batches))
    read = sum(one["read"] for one in batches)
    capacity = _capacity(batches)
    steps = _steps(batches)
    ordered = {name: phases[name] for name in PHASES if name in phases}
    first, last = (batches[0], batches[-1]) if batches else ({}, {})
    seconds = (_at(last) - _at(first)).total_seconds() if batches else 0.0
    if seconds <= 0:
        return BatchLoad(len(batches), 0.0, None, None, None, capacity, None, ordered, steps)
    after_first = read - first["read"]
    arrived = after_first + last["unread"] - first["unread"]
    busy_s = took_s - first["duration_ms"] / 1000
    return BatchLoad(
        len(batches),
        seconds,
        max(0.0, arrived / seconds),
        _usually_arriving_per_s(batches),
        after_first / seconds,
        capacity,
        min(1.0, busy_s / seconds),
        ordered,
        steps,
    )


def _took_s(record: Mapping[str, Any]) -> float:
    took_ms: float = record["duration_ms"] + record["phases"].get("commit", 0.0)
    return took_ms / 1000


def _capacity(batches: Sequence[Mapping[str, Any]]) -> BatchCapacity:
    ordered = sorted(batches, key=lambda one: (one["read"], one["batch_id"]))
    fullest = ordered[len(ordered) * 3 // 4 :]
    read, took_s = sum(one["read"] for one in fullest), sum(map(_took_s, fullest))
    left_much = sum(one["unread"] >= _BACKLOG * one["read"] for one in fullest)
    return BatchCapacity(
        read / took_s if read and took_s else None,
        ordered[-1]["read"] if ordered else 0,
        left_much > len(fullest) / 2,
        min(map(_took_s, batches), default=0.0),
        _took_s(ordered[-1]) if ordered else 0.0,
    )


def _usually_arriving_per_s(batches: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the median over time of what arrived from the end of a batch to that of the next."""
    rates: list[tuple[float, float]] = []
    for before, one in pairwise(batches):
        seconds = (_at(one) - _at(before)).total_seconds()
        if seconds > 0:
            arrived = one["read"] + one["unread"] - before["unread"]
            rates.append((max(0.0, arrived / seconds), seconds))
    rates.sort()
    half_s = sum(seconds for _, seconds in rates) / 2
    passed_s = 0.0
    for rate, seconds in rates:
        passed_s += seconds
        if passed_s >= half_s:
            return rate
    return None


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
