"""How much the broker holds in memory for its connections, so that none can take it all.

A request waits until there is room for it, in the order in which requests came. Small requests take
room when they are there, in a part that is theirs alone; so nobody who announces much, or sends it
slowly, keeps them waiting. A large one takes room when its first bytes have come, all that it
announced; while others wait for room, it has less time to come in whole. A response is never refused,
but made smaller as room gets scarce: a client asks for the rest in its next request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from millstream.broker.codes import Code, Refused

SMALL_BYTES_MAX = 64 * 1024  # of a request that takes room only once it is there
_SMALL_SHARE = 4  # small requests have this part of the memory
RESPONSE_BYTES_MIN = 64 * 1024
MEMBER_BYTES = 1024  # of a member of a group, besides what it says
_SHARE = 8  # no response takes more than this part of what is left


class RequestMemory:
    """Room for requests from when they come in until they are answered. In the event loop only.

    Args:
        bytes_max: For all requests together.
        whole_s: How long a large request may take to come in, once it has room.
        contended_s: The same, while others wait for room.
    """

    def __init__(self, bytes_max: int, *, whole_s: float, contended_s: float) -> None:
        small = max(bytes_max // _SMALL_SHARE, SMALL_BYTES_MAX)
        self._small, self._large = _Room(small), _Room(bytes_max - small)
        # There can never be room for a larger one.
        self.request_bytes_max = max(bytes_max - small, SMALL_BYTES_MAX)
        self._whole_s, self._contended_s = whole_s, contended_s
        self._halves: dict[asyncio.Timeout, float] = {}  # and when each began to come in

    def _room(self, size: int) -> _Room:
        return self._small if size <= SMALL_BYTES_MAX else self._large

    async def reserve(self, size: int) -> None:
        """Return when there is room, and it is taken."""
        room = self._room(size)
        if room is self._large and not room.has(size):
            for timeout, began_s in self._halves.items():
                if not timeout.expired():  # one that is, refuses; it is about to go
                    timeout.reschedule(began_s + self._contended_s)
        await room.take(size)

    def release(self, size: int) -> None:
        """Give the room of a request back."""
        self._room(size).release(size)

    @asynccontextmanager
    async def coming_in(self) -> AsyncIterator[None]:
        """Bound the time in which the rest of a large request, which has room, comes in.

        Raises:
            TimeoutError: it did not.
        """
        began_s = asyncio.get_running_loop().time()
        for_s = self._contended_s if self._large.waited_for else self._whole_s
        async with asyncio.timeout_at(began_s + for_s) as timeout:
            self._halves[timeout] = began_s
            try:
                yield
            finally:
                del self._halves[timeout]


class _Room:
    """A number of bytes that is shared in the order of asking."""

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waited_for(self) -> bool:
        return bool(self._queue)

    def has(self, size: int) -> bool:
        return not self._queue and size <= self._left

    async def take(self, size: int) -> None:
        """Return when there is room, and it is taken; ``size`` is at most all there is."""
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
        """Give room back."""
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
    """Room for what members of groups say of themselves and are assigned. In the event loop only.

    Args:
        bytes_max: For all groups together.
        members_max: Of one group.
    """

    def __init__(self, bytes_max: int, members_max: int) -> None:
        self._left = bytes_max
        self._members_max = members_max

    def check_one_more(self, members: int) -> None:
        """Refuse one more member of a group that has so many.

        Raises:
            Refused: there are too many.
        """
        if members >= self._members_max:
            raise Refused(
                Code.GROUP_MAX_SIZE_REACHED, f"a group has at most {self._members_max} members"
            )

    def resize(self, before: int, after: int) -> None:
        """Hold ``after`` bytes in the place of ``before``.

        Raises:
            Refused: there is no room; what was held still is.
        """
        if after - before > max(self._left, 0):
            raise Refused(
                Code.GROUP_MAX_SIZE_REACHED,
                f"{after:,} bytes of a member of a group; there is room for {self._left:,}",
            )
        self._left -= after - before


class ResponseMemory:
    """Room for responses until they are sent. In the event loop only."""

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max

    def take(self, wanted: int) -> int:
        """Take room for a response of up to ``wanted`` bytes; return for how many there is."""
        granted = min(wanted, max(self._left // _SHARE, RESPONSE_BYTES_MIN))
        self._left -= granted
        return granted

    def release(self, size: int) -> None:
        """Give room back."""
        self._left += size
