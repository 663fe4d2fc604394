"""Lost datagrams, by the sequence numbers of their senders.

A sender counts its datagrams and puts a line into each, ``datagram.sequence:N|g|#sender:NAME``, which other
servers read as a gauge. A datagram missing between two numbers is lost, unless it arrives late. A number that
is far behind means that the sender restarted.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

BEHIND_MAX = 1024
"""How late a datagram may be; a number further behind is a restart."""

GAP_MAX = 1_000_000
"""A larger gap is a restart, too: no sender loses so many and continues."""

SENDERS_MAX = 10_000
"""Beyond so many senders the one that was idle for longest is evicted, with its missing numbers."""


@dataclass(slots=True)
class _Sender:
    next_number: int
    missing: set[int] = field(default_factory=set)


class SequenceTracker:
    """Tracks the sequence numbers of all senders."""

    def __init__(self) -> None:
        self.lost = 0
        self.repeated = 0
        self.restarts = 0
        self._senders: OrderedDict[str, _Sender] = OrderedDict()

    @property
    def senders(self) -> int:
        """How many senders number their datagrams."""
        return len(self._senders)

    def observe(self, sender: str, number: int) -> None:
        """Count a datagram with this number."""
        known = self._senders.get(sender)
        if known is None:
            self._senders[sender] = _Sender(number + 1)
            if len(self._senders) > SENDERS_MAX:
                self._senders.popitem(last=False)
            return
        self._senders.move_to_end(sender)
        ahead = number - known.next_number
        if ahead > GAP_MAX or ahead < -BEHIND_MAX or (number == 0 and known.next_number > 1):
            self.restarts += 1
            self._senders[sender] = _Sender(number + 1)
        elif ahead >= 0:
            self.lost += ahead
            newest = range(max(known.next_number, number - BEHIND_MAX), number)
            known.missing = {n for n in known.missing if n >= number - BEHIND_MAX} | set(newest)
            known.next_number = number + 1
        elif number in known.missing:
            known.missing.remove(number)
            self.lost -= 1
        else:
            self.repeated += 1
