"""One look at a store for all who wait for it, and one computation for all who ask for the same.

However many subscribers there are, each store is asked once per turn whether anything was committed.
Nothing is queued for a subscriber: each reads on from where it is, at its own pace, so a slow one
holds up nobody and costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread

from millstream.errors import MillstreamError
from millstream.views.server.catalog import ViewCatalog

POLL_S = 0.2
_THREADS = 8  # of readers; each may have a connection to each store
_KEPT_S = 2.0  # those who follow the same view are at the same place for so long

T = TypeVar("T")
Version = tuple[int, ...]


class ReadExecutor:
    """Runs what reads in threads, few at a time, and what several ask for at once only once."""

    def __init__(self) -> None:
        self._limiter = CapacityLimiter(_THREADS)
        self._results: dict[Hashable, tuple[float, asyncio.Future[Any]]] = {}

    async def run(self, read: Callable[[], T]) -> T:
        """Call a function in a thread."""
        return await to_thread.run_sync(read, limiter=self._limiter)

    async def shared(self, key: Hashable, read: Callable[[], T], keep_s: float = _KEPT_S) -> T:
        """Return what ``read`` gives; who asks with the same key soon after gets the same result."""
        self.evict()
        if key in self._results:
            reading = self._results[key][1]
        else:
            # A task of its own: that who asked first goes away must not end it for the others.
            reading = asyncio.ensure_future(self.run(read))
            self._results[key] = (time.monotonic() + keep_s, reading)
        result: T = await asyncio.shield(reading)
        return result

    def evict(self) -> None:
        """Let go of what is old, and of what failed: the next who asks tries again."""
        now = time.monotonic()
        for key, (until, reading) in list(self._results.items()):
            failed = reading.done() and (reading.cancelled() or reading.exception() is not None)
            if failed or (until < now and reading.done()):
                del self._results[key]


@dataclass
class _Watched:
    version: Version = ()
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0


class StoreWatcher:
    """Wakes those who wait for a store when something was committed to it."""

    def __init__(self, catalog: ViewCatalog, reading: ReadExecutor, poll_s: float = POLL_S) -> None:
        self._catalog = catalog
        self._reading = reading
        self._poll_s = poll_s
        self._stores: dict[str, _Watched] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closing = asyncio.Event()

    def close(self) -> None:
        """Let all who wait go, from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.closing.set)

    async def run(self) -> None:
        """Look at the stores that somebody waits for, until cancelled."""
        self._loop = asyncio.get_running_loop()
        while True:
            self._reading.evict()
            for name, watched in list(self._stores.items()):
                if watched.waiting:
                    self._update(watched, await self.version(name))
            await asyncio.sleep(self._poll_s)

    async def version(self, store_name: str) -> Version:
        """Return the version of a store as it is now; () if it cannot be read."""

        def look() -> Version:
            return self._catalog.store(store_name).version()

        try:
            return await self._reading.run(look)
        except MillstreamError:
            return ()

    def _update(self, watched: _Watched, version: Version) -> None:
        if version != watched.version:
            watched.version = version
            watched.changed.set()
            watched.changed = asyncio.Event()

    async def wait_for_newer(self, store_name: str, than: Version, timeout_s: float) -> Version:
        """Wait until a store's version is another than ``than``; return it as it is after that.

        Returns sooner when time is up or the server closes.
        """
        watched = self._stores.setdefault(store_name, _Watched())
        end = time.monotonic() + timeout_s
        watched.waiting += 1
        try:
            while watched.version == than or not watched.version:
                left = end - time.monotonic()
                if left <= 0 or self.closing.is_set():
                    break
                await self._either(watched.changed, left)
        finally:
            watched.waiting -= 1
        return watched.version

    async def pause(self, seconds: float) -> bool:
        """Let time pass; return False, at once, when the server closes."""
        try:
            await asyncio.wait_for(self.closing.wait(), seconds)
        except TimeoutError:
            return True
        return False

    async def _either(self, event: asyncio.Event, timeout_s: float) -> None:
        waits = [asyncio.ensure_future(each.wait()) for each in (event, self.closing)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
