"""Memory budgets of the broker, so that no connection can use all of it.

A request waits until its memory is reserved, in the order of arrival. Small requests reserve memory once
they are complete, in a part of their own; so a client that announces a large request, or sends it slowly,
does not delay them. A large request reserves its announced size when its first bytes have arrived; while
others wait for memory, it has less time to arrive. A response is never rejected, but gets smaller as
memory gets scarce: a client fetches the rest with its next request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from millstream.broker.protocol.error_codes import ApiError, ErrorCode

SMALL_BYTES_MAX = 64 * 1024  # of a request that reserves memory only once it is complete
_SMALL_SHARE = 4  # small requests have this fraction of the memory
RESPONSE_BYTES_MIN = 64 * 1024
MEMBER_BYTES = 1024  # of a member of a group, besides its metadata
_SHARE = 8  # no response takes more than this fraction of what is left


class RequestMemory:
    """Memory of requests from their arrival until the response. In the event loop only.

    Args:
        bytes_max: For all requests together.
        whole_s: How long a large request may take to arrive, once its memory is reserved.
        contended_s: The same, while others wait for memory.
    """

    def __init__(self, bytes_max: int, *, whole_s: float, contended_s: float) -> None:
        small = max(bytes_max // _SMALL_SHARE, SMALL_BYTES_MAX)
        self._small, self._large = _Budget(small), _Budget(bytes_max - small)
        # A larger one could never be reserved.
        self.request_bytes_max = max(bytes_max - small, SMALL_BYTES_MAX)
        self._whole_s, self._contended_s = whole_s, contended_s
        self._arriving: dict[
            asyncio.Timeout, float
        ] = {}  # large requests, by the time of their first bytes

    @property
    def held_bytes(self) -> int:
        """How much requests hold. From any thread."""
        return self._small.held_bytes + self._large.held_bytes

    def _budget(self, size: int) -> _Budget:
        return self._small if size <= SMALL_BYTES_MAX else self._large

    async def reserve(self, size: int) -> None:
        """Return when the memory is reserved."""
        budget = self._budget(size)
        if budget is self._large and not budget.has(size):
            for timeout, began_s in self._arriving.items():
                if not timeout.expired():  # an expired one cannot be rescheduled
                    timeout.reschedule(began_s + self._contended_s)
        await budget.take(size)

    def release(self, size: int) -> None:
        """Release the memory of a request."""
        self._budget(size).release(size)

    @asynccontextmanager
    async def receive_deadline(self) -> AsyncIterator[None]:
        """Limit the time in which the rest of a large request, whose memory is reserved, arrives.

        Raises:
            TimeoutError: it was not complete in time.
        """
        began_s = asyncio.get_running_loop().time()
        for_s = self._contended_s if self._large.waited_for else self._whole_s
        async with asyncio.timeout_at(began_s + for_s) as timeout:
            self._arriving[timeout] = began_s
            try:
                yield
            finally:
                del self._arriving[timeout]


class _Budget:
    """A number of bytes, granted in the order of requests."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = self._left = bytes_max
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held_bytes(self) -> int:
        return self._bytes_max - self._left

    @property
    def waited_for(self) -> bool:
        return bool(self._queue)

    def has(self, size: int) -> bool:
        return not self._queue and size <= self._left

    async def take(self, size: int) -> None:
        """Return when the bytes are reserved; ``size`` is at most the whole budget."""
        if self.has(size):
            self._left -= size
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((size, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.release(size)
            self._grant()
            raise

    def release(self, size: int) -> None:
        """Release bytes."""
        self._left += size
        self._grant()

    def _grant(self) -> None:
        while self._queue:
            size, granted = self._queue[0]
            if not granted.cancelled():
                if size > self._left:
                    return
                self._left -= size
                granted.set_result(None)
            self._queue.popleft()


class MemberMemory:
    """Memory of the metadata and assignments of members of groups. In the event loop only.

    Args:
        bytes_max: For all groups together.
        members_max: Of one group.
    """

    def __init__(self, bytes_max: int, members_max: int) -> None:
        self._left = bytes_max
        self._members_max = members_max

    def check_members(self, members: int) -> None:
        """Reject one more member of a group that has so many.

        Raises:
            ApiError: there are too many.
        """
        if members >= self._members_max:
            raise ApiError(
                ErrorCode.GROUP_MAX_SIZE_REACHED, f"a group has at most {self._members_max} members"
            )

    def resize(self, before: int, after: int) -> None:
        """Hold ``after`` bytes instead of ``before``.

        Raises:
            ApiError: there is not enough; the bytes held before are kept.
        """
        if after - before > max(self._left, 0):
            raise ApiError(
                ErrorCode.GROUP_MAX_SIZE_REACHED,
                f"{after:,} bytes of a member of a group; {self._left:,} are left",
            )
        self._left -= after - before


class ResponseMemory:
    """Memory of responses until they are sent. In the event loop only."""

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max

    def take(self, wanted: int) -> int:
        """Reserve memory for a response of up to ``wanted`` bytes; return for how many."""
        granted = min(wanted, max(self._left // _SHARE, RESPONSE_BYTES_MIN))
        self._left -= granted
        return granted

    def release(self, size: int) -> None:
        """Release bytes."""
        self._left += size
