"""What a batch's time went into, and what all batches of a job have cost together.

A batch has phases, one after the other:

===========  =====================================================================================
phase        from … to
===========  =====================================================================================
``plan``     the planner begins it … Spark calls the sink
``read``     … the source's rows are on the driver: read, decoded, and through the stateless steps
``stages``   … the operators have run, and what they keep is durable
``outputs``  … the rows of all outputs are together; of large ones, written by tasks
``commit``   … every sink and the state store have it
===========  =====================================================================================

The totals are in the job's status, which the batch commits. So the commit of a batch is counted with the
next one, and that of a run's last batch not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PHASES = ("plan", "read", "stages", "outputs", "commit")


class BatchPhase(NamedTuple):
    """One phase of a batch. Times are in seconds of a monotonic clock."""

    name: str
    began_s: float
    ended_s: float


class BatchTimer:
    """Measures the phases of the batch that is worked on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.phases: list[BatchPhase] = []

    def begin(self, planned_s: float) -> None:
        """Begin a batch whose planning began at ``planned_s``."""
        self.phases = [BatchPhase("plan", planned_s, self._clock())]

    def clear(self) -> None:
        """Forget a batch that has ended."""
        self.phases = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase, also one that fails."""
        began_s = self._clock()
        try:
            yield
        finally:
            self.phases.append(BatchPhase(name, began_s, self._clock()))


@dataclass
class BatchFigures:
    """The costs of all batches of a job: seconds by phase, requests to an object store by name."""

    phase_s: dict[str, float] = field(default_factory=dict)
    object_store: dict[str, int] = field(default_factory=dict)
    _counted: int = 0  # phases of the present batch

    @classmethod
    def from_status(cls, status: Mapping[str, Any]) -> BatchFigures:
        """Return the costs up to the batch whose status this is; none, before the first."""
        known = status.get("costs", {})
        return cls(dict(known.get("phase_s", {})), dict(known.get("object_store", {})))

    def add_phases(self, phases: list[BatchPhase]) -> None:
        """Add the phases of a batch that are not counted yet."""
        for phase in phases[self._counted :]:
            seconds = phase.ended_s - phase.began_s
            self.phase_s[phase.name] = self.phase_s.get(phase.name, 0.0) + seconds
        self._counted = len(phases)

    def add_requests(self, requests: Mapping[str, int]) -> None:
        """Add the requests of a batch."""
        for name, count in requests.items():
            self.object_store[name] = self.object_store.get(name, 0) + count

    def end_batch(self, phases: list[BatchPhase]) -> None:
        """Add what is left of a batch that is committed."""
        self.add_phases(phases)
        self._counted = 0

    def to_status(self) -> dict[str, Any]:
        """Return what the status keeps, under ``costs``."""
        return {
            "phase_s": {name: round(seconds, 6) for name, seconds in self.phase_s.items()},
            "object_store": dict(self.object_store),
        }
