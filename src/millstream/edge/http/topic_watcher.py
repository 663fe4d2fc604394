"""Watches the end offsets of topics that have subscribers, and wakes the subscribers.

One thread per topic, however many subscribers it has; none for a topic without.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from millstream.client.reader import Reader
from millstream.errors import MillstreamError
from millstream.record import TopicInfo

_WAIT_S = 0.5  # how often a thread checks whether its topic still has subscribers


class WatchedTopic:
    """One watched topic. Everything but the thread belongs to the event loop."""

    def __init__(self, ends: Sequence[int]) -> None:
        self.ends = list(ends)
        self.failure: MillstreamError | None = None
        self.subscribers = 0
        self.stopped = threading.Event()
        self._changed = asyncio.Event()

    def update_ends(self, ends: Sequence[int]) -> None:
        """Set the end offsets of the partitions."""
        self.ends = list(ends)
        self.wake()

    def fail(self, error: MillstreamError) -> None:
        """Record that the topic cannot be read any more."""
        self.failure = error
        self.wake()

    def wake(self) -> None:
        """Wake all subscribers."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self, timeout_s: float) -> bool:
        """Wait for a change; return False after the timeout."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
            return True
        return False


class TopicWatcher:
    """Watches topics for streams; belongs to the event loop.

    Args:
        open_reader: Opens a reader of the log, for one thread.
    """

    def __init__(self, open_reader: Callable[[], Reader]) -> None:
        self._open_reader = open_reader
        self._topics: dict[str, WatchedTopic] = {}  # by the topic's id
        self.closing = False

    @contextmanager
    def watch(self, topic: TopicInfo, ends: Sequence[int]) -> Iterator[WatchedTopic]:
        """Watch a topic until the block ends.

        Args:
            ends: The last known end offsets of its partitions.
        """
        watched = self._topics.get(topic.topic_id)
        if watched is None or watched.failure is not None:
            watched = self._topics[topic.topic_id] = WatchedTopic(ends)
            loop = asyncio.get_running_loop()
            threading.Thread(
                target=self._run,
                args=(topic, watched, list(ends), loop),
                name=f"millstream edge {topic.name}",
                daemon=True,
            ).start()
        watched.subscribers += 1
        try:
            yield watched
        finally:
            watched.subscribers -= 1
            if not watched.subscribers:
                watched.stopped.set()
                if self._topics.get(topic.topic_id) is watched:
                    del self._topics[topic.topic_id]

    @property
    def subscribers(self) -> int:
        """How many streams are open."""
        return sum(watched.subscribers for watched in self._topics.values())

    def close(self) -> None:
        """Wake all subscribers, whose streams end."""
        self.closing = True
        for watched in self._topics.values():
            watched.wake()

    def _run(
        self,
        topic: TopicInfo,
        watched: WatchedTopic,
        ends: Sequence[int],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            try:
                self._poll(topic, watched, ends, loop)
            except MillstreamError as error:
                loop.call_soon_threadsafe(watched.fail, error)
            except Exception as error:  # noqa: BLE001 - the streams must end with any error
                failure = MillstreamError(f"Topic {topic.name!r} could not be watched: {error!r}.")
                failure.__cause__ = error
                loop.call_soon_threadsafe(watched.fail, failure)

    def _poll(
        self,
        topic: TopicInfo,
        watched: WatchedTopic,
        ends: Sequence[int],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        # Pinned: a topic that is created again is an error, and never more of this one.
        reader = self._open_reader().pinned({topic.name: topic.topic_id})
        while not watched.stopped.is_set():
            if reader.wait(topic.name, ends, _WAIT_S):
                ends = [end for _, end in reader.offsets(topic.name)]
                loop.call_soon_threadsafe(watched.update_ends, ends)
