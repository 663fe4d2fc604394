"""Limits the memory of all requests together. A request beyond it is refused with Retry-After.

A refused request has appended nothing. The response of an admitted request says which events were appended.
So nothing is acknowledged that is not in the log, and memory is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millstream.errors import OverloadError

# Measured, with lines of 10 and of 170 bytes: a body is held as bytes, as lines, as records and as a
# batch; and a line is an event, a future, and a record in flight.
_COPIES = 4
_LINE_BYTES = 1000


class Ticket:
    """The memory that one request holds."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._size = 0

    def hold(self, body_bytes: int, lines: int = 0) -> None:
        """Reserve the memory of a body of this size, if that is more than is reserved.

        Raises:
            OverloadError: the limit is reached.
        """
        size = _COPIES * body_bytes + _LINE_BYTES * lines
        if size > self._size:
            self._admission.acquire(
                size - self._size, alone=self._admission.held_bytes == self._size
            )
            self._size = size

    def release(self) -> None:
        """Release all of it."""
        self._admission.release(self._size)
        self._size = 0


class Admission:
    """Counts bytes and requests in flight. Belongs to one thread, the event loop's.

    Args:
        bytes_max: Approximate memory of all bodies together. A single request is always admitted.
        requests_max: How many requests may append at a time.
    """

    def __init__(self, bytes_max: int, requests_max: int) -> None:
        self.bytes_max = bytes_max
        self.requests_max = requests_max
        self.held_bytes = 0
        self.requests = 0
        self.refused = 0

    @contextmanager
    def admit(self) -> Iterator[Ticket]:
        """Admit a request until the block ends.

        Raises:
            OverloadError: there are too many requests.
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
            ticket.release()
            self.requests -= 1

    def acquire(self, size: int, *, alone: bool) -> None:
        """Reserve more bytes; a request that is ``alone`` always gets them.

        Raises:
            OverloadError: the limit is reached.
        """
        if not alone and self.held_bytes + size > self.bytes_max:
            self.refused += 1
            raise OverloadError(
                f"requests take {self.held_bytes:,} bytes, and {size:,} more would be over the limit of "
                f"{self.bytes_max:,}; nothing of this one was appended: send it again a moment later"
            )
        self.held_bytes += size

    def release(self, size: int) -> None:
        """Release bytes."""
        self.held_bytes -= size
