"""What all requests together may hold: beyond it they are told to come later, before they cost anything.

A request that is refused has appended nothing. One that was let in is answered with what became of its
events, so nobody is acknowledged what is not in the log, and memory has a bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millstream.errors import OverloadError

# Measured, with lines of 10 and of 170 bytes: a body is there as it came, in lines, as records and as a
# batch; and a line is an event, a future, and a record on its way.
_COPIES = 4
_LINE_BYTES = 1000


class Ticket:
    """What one request holds."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._size = 0

    def hold(self, body_bytes: int, lines: int = 0) -> None:
        """Hold what a body of this size takes, if that is more than it holds.

        Raises:
            OverloadError: there is no room for it.
        """
        size = _COPIES * body_bytes + _LINE_BYTES * lines
        if size > self._size:
            self._admission.take(size - self._size, alone=self._admission.held_bytes == self._size)
            self._size = size

    def give_back(self) -> None:
        """Hold nothing any more."""
        self._admission.give_back(self._size)
        self._size = 0


class Admission:
    """Counts bytes and requests on their way. Belongs to one thread, the event loop's.

    Args:
        bytes_max: Of memory that all bodies together take, about. One alone always has room.
        requests_max: How many requests may append at a time.
    """

    def __init__(self, bytes_max: int, requests_max: int) -> None:
        self.bytes_max = bytes_max
        self.requests_max = requests_max
        self.held_bytes = 0
        self.requests = 0
        self.refused = 0

    @contextmanager
    def ticket(self) -> Iterator[Ticket]:
        """Let a request in until the block ends.

        Raises:
            OverloadError: there are too many.
        """
        if self.requests >= self.requests_max:
            self.refused += 1
            raise OverloadError(
                f"{self.requests:,} requests are appending, which is the limit; nothing of this one was "
                "appended: send it again a moment later"
            )
        self.requests += 1
        ticket = Ticket(self)
        try:
            yield ticket
        finally:
            ticket.give_back()
            self.requests -= 1

    def take(self, size: int, *, alone: bool) -> None:
        """Hold so many bytes more, for a request that is ``alone`` in any case.

        Raises:
            OverloadError: there is no room for them.
        """
        if not alone and self.held_bytes + size > self.bytes_max:
            self.refused += 1
            raise OverloadError(
                f"requests take {self.held_bytes:,} bytes, and {size:,} more would be over the limit of "
                f"{self.bytes_max:,}; nothing of this one was appended: send it again a moment later"
            )
        self.held_bytes += size

    def give_back(self, size: int) -> None:
        """Let go of so many bytes."""
        self.held_bytes -= size
