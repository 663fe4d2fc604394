"""What a broker has accepted, refused and handled since its start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class BrokerCounters:
    """Counters of connections and requests. The event loop counts; any thread reads.

    ``refusals`` are connections that the broker ended, by reason: ``limit``, ``unauthenticated``,
    ``malformed``, ``unsupported``, ``timeout``, ``fault``. ``requests`` are by the name of their kind.
    """

    connections: int = 0
    accepted: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)

    def count_accepted(self, *, open_now: int) -> None:
        """Count a connection that was accepted; with it so many are open."""
        self.accepted += 1
        self.connections = open_now
