"""What a broker has accepted, refused and handled since its start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

REFUSAL_REASONS = ("limit", "unauthenticated", "malformed", "unsupported", "timeout", "fault")


def _none_refused() -> Counter[str]:
    # Each is there from the start: of one that appears at 3, Prometheus sees no increase.
    return Counter(dict.fromkeys(REFUSAL_REASONS, 0))


@dataclass(slots=True)
class BrokerCounters:
    """Counters of connections and requests. The event loop counts; any thread reads.

    ``refusals`` are connections that the broker ended, by reason: REFUSAL_REASONS. ``requests`` are by the name of
    their kind.
    """

    connections: int = 0
    accepted: int = 0
    refusals: Counter[str] = field(default_factory=_none_refused)
    requests: Counter[str] = field(default_factory=Counter)

    def count_accepted(self, *, open_now: int) -> None:
        """Count a connection that was accepted; with it so many are open."""
        self.accepted += 1
        self.connections = open_now
