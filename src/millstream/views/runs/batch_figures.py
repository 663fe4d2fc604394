"""What all batches of a job have cost together: the time of each phase, and requests to an object store.

The totals are in the job's status, which each batch commits. So the commit of a batch is counted with the
next one, and that of a run's last batch not at all. The phases: :data:`millstream.views.commit.batch_history.PHASES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class BatchPhase(NamedTuple):
    """One phase of a batch. Times are in seconds of a monotonic clock."""

    name: str
    began_s: float
    ended_s: float


@dataclass
class BatchFigures:
    """The costs of all batches of a job: seconds by phase, requests to an object store by name."""

    phase_s: dict[str, float] = field(default_factory=dict)
    object_store: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_status(cls, status: Mapping[str, Any]) -> BatchFigures:
        """Return the costs up to the batch whose status this is; none, before the first."""
        known = status.get("costs", {})
        return cls(dict(known.get("phase_s", {})), dict(known.get("object_store", {})))

    def add_phases(self, took_ms: Mapping[str, float], commit_before_ms: float | None) -> None:
        """Add the phases of a batch that is about to be committed, and the commit of the one before, if this run did it."""
        before = {} if commit_before_ms is None else {"commit": commit_before_ms}
        for name, one_ms in {**took_ms, **before}.items():
            self.phase_s[name] = self.phase_s.get(name, 0.0) + one_ms / 1000

    def add_requests(self, requests: Mapping[str, int]) -> None:
        """Add the requests of a batch."""
        for name, count in requests.items():
            self.object_store[name] = self.object_store.get(name, 0) + count

    def to_status(self) -> dict[str, Any]:
        """Return what the status keeps, under ``costs``."""
        return {
            "phase_s": {name: round(seconds, 6) for name, seconds in self.phase_s.items()},
            "object_store": dict(self.object_store),
        }
