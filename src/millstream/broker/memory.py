"""How much the broker holds in memory for its connections, so that none can take it all.

A request waits until there is room for it, in the order in which requests came. A response is never
refused, but made smaller as room gets scarce: a client asks for the rest in its next request.
"""

from __future__ import annotations

import asyncio
from collections import deque

RESPONSE_BYTES_MIN = 64 * 1024
_SHARE = 8  # no response takes more than this part of what is left


class RequestMemory:
    """Room for requests from when they come in until they are answered. In the event loop only."""

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def reserve(self, size: int) -> None:
        """Return when there is room, and it is taken; ``size`` is less than all there is."""
        if not self._queue and size <= self._left:
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
