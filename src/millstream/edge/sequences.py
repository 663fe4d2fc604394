"""Datagrams that were lost, by the numbers that their senders give them.

A sender counts its datagrams and puts a line into each, ``datagram.sequence:N|g|#sender:NAME``, which other
servers take for a gauge. What is missing between two numbers is lost, unless it comes late: then it was
not. A number that is far behind means that the sender began anew.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

BEHIND_MAX = 1024
"""How late a datagram may be; a number further behind is a new beginning."""

GAP_MAX = 1_000_000
"""A larger gap is a new beginning, too: no sender loses so many and goes on."""

SENDERS_MAX = 10_000
"""Beyond so many senders the one that was quiet for longest is forgotten, with what it still owes."""


@dataclass(slots=True)
class _Sender:
    next_number: int
    missing: set[int] = field(default_factory=set)


class Sequences:
    """Keeps the books of all senders."""

    def __init__(self) -> None:
        self.lost = 0
        self.repeated = 0
        self.restarts = 0
        self._senders: OrderedDict[str, _Sender] = OrderedDict()

    @property
    def senders(self) -> int:
        """How many senders number their datagrams."""
        return len(self._senders)

    def came(self, sender: str, number: int) -> None:
        """Note that a datagram came."""
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
