"""Watches stores for commits, and shares reads between requests.

However many subscribers there are, each store is polled once per interval. Nothing is queued for a
subscriber: each reads on from its own position at its own pace, so a slow one delays nobody and costs
nothing.
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
_THREADS = 8  # each may have a connection to each store
_KEPT_S = 2.0  # subscribers of one view need the same changes within this time

T = TypeVar("T")
Version = tuple[int, ...]


class ReadExecutor:
    """Runs reads in a few threads; a read that several requests need at a time is done once."""

    def __init__(self) -> None:
        self._limiter = CapacityLimiter(_THREADS)
        self._results: dict[Hashable, tuple[float, asyncio.Future[Any]]] = {}

    async def run(self, read: Callable[[], T]) -> T:
        """Call a function in a thread."""
        return await to_thread.run_sync(read, limiter=self._limiter)

    async def shared(self, key: Hashable, read: Callable[[], T], keep_s: float = _KEPT_S) -> T:
        """Return the result of ``read``; calls with the same key share it for ``keep_s``."""
        self.evict()
        if key in self._results:
            reading = self._results[key][1]
        else:
            # A task of its own: if the first request is cancelled, the others still get the result.
            reading = asyncio.ensure_future(self.run(read))
            self._results[key] = (time.monotonic() + keep_s, reading)
        result: T = await asyncio.shield(reading)
        return result

    def evict(self) -> None:
        """Drop old results, and failures: the next call reads again."""
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
    """Wakes the subscribers of a store after each commit to it."""

    def __init__(
        self, catalog: ViewCatalog, executor: ReadExecutor, poll_s: float = POLL_S
    ) -> None:
        self._catalog = catalog
        self._executor = executor
        self._poll_s = poll_s
        self._stores: dict[str, _Watched] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closing = asyncio.Event()

    def close(self) -> None:
        """Wake all subscribers, which then end. From any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.closing.set)

    async def run(self) -> None:
        """Poll the stores that have subscribers, until cancelled."""
        self._loop = asyncio.get_running_loop()
        while True:
            self._executor.evict()
            for name, watched in list(self._stores.items()):
                if watched.waiting:
                    self._update(watched, await self.version(name))
            await asyncio.sleep(self._poll_s)

    async def version(self, store_name: str) -> Version:
        """Return the version of a store as it is now; () if it cannot be read."""

        def look() -> Version:
            return self._catalog.store(store_name).version()

        try:
            return await self._executor.run(look)
        except MillstreamError:
            return ()

    def _update(self, watched: _Watched, version: Version) -> None:
        if version != watched.version:
            watched.version = version
            watched.changed.set()
            watched.changed = asyncio.Event()

    async def wait_for_newer(self, store_name: str, than: Version, timeout_s: float) -> Version:
        """Wait until a store's version differs from ``than``; return the version.

        Returns the same version after the timeout, and when the server closes.
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
        """Sleep; return False, at once, when the server closes."""
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
