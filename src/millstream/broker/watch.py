"""Wakes fetches that wait for new records in their partitions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from millstream.record import TopicPartition


class PartitionWatch:
    """Wakes waiting fetches when the log reports changes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[TopicPartition, set[asyncio.Event]] = {}
        self._lock = threading.Lock()
        self._changed: set[TopicPartition] = set()
        self._catalog_changed = False
        self._due = False

    def notify(self, names: Sequence[TopicPartition]) -> None:
        """Note changed partitions; an empty sequence means topics. Called from any thread."""
        if not self._waiting:  # a fetch that begins to wait now reads first, and finds it
            return
        with self._lock:
            self._changed.update(names)
            self._catalog_changed |= not names
            if self._due:
                return
            self._due = True
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the loop has ended, and with it all fetches
            return

    def _wake(self) -> None:
        with self._lock:
            self._due = False
            names, self._changed = self._changed, set()
            every, self._catalog_changed = self._catalog_changed, False
        for name in list(self._waiting) if every else names:
            for event in self._waiting.get(name, ()):
                event.set()

    @contextmanager
    def watching(self, names: Sequence[TopicPartition]) -> Iterator[asyncio.Event]:
        """Yield an event that is set whenever one of these partitions has changed, or any topic."""
        event = asyncio.Event()
        for name in names:
            self._waiting.setdefault(name, set()).add(event)
        try:
            yield event
        finally:
            for name in set(names):
                waiting = self._waiting[name]
                waiting.discard(event)
                if not waiting:
                    del self._waiting[name]
