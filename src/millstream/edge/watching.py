"""Knows of each topic that somebody follows where its partitions end, and wakes those who wait for more.

One thread a topic, however many follow it; none for a topic that nobody follows.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from millstream.client.reading import Reader
from millstream.errors import MillstreamError
from millstream.record import TopicInfo

_LOOK_S = 0.5  # how often a thread looks whether anybody still follows its topic


class Followed:
    """One topic, as its followers see it. All but the thread belongs to the event loop."""

    def __init__(self, ends: Sequence[int]) -> None:
        self.ends = list(ends)
        self.failure: MillstreamError | None = None
        self.followers = 0
        self.stopped = threading.Event()
        self._changed = asyncio.Event()

    def told(self, ends: Sequence[int]) -> None:
        """Take in where the partitions end now."""
        self.ends = list(ends)
        self.wake()

    def failed(self, error: MillstreamError) -> None:
        """Take in that the topic cannot be read any more."""
        self.failure = error
        self.wake()

    def wake(self) -> None:
        """Let all go who wait."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, timeout_s: float) -> bool:
        """Wait until there is news; return False if there was none in time."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
            return True
        return False


class Watching:
    """Follows topics for whoever asks; belongs to the event loop.

    Args:
        open_reader: Makes a reader of the log, for one thread.
    """

    def __init__(self, open_reader: Callable[[], Reader]) -> None:
        self._open_reader = open_reader
        self._topics: dict[str, Followed] = {}  # by the topic's id
        self.closing = False

    @contextmanager
    def followed(self, topic: TopicInfo, ends: Sequence[int]) -> Iterator[Followed]:
        """Follow a topic until the block ends.

        Args:
            ends: Where its partitions ended a moment ago.
        """
        followed = self._topics.get(topic.topic_id)
        if followed is None or followed.failure is not None:
            followed = self._topics[topic.topic_id] = Followed(ends)
            loop = asyncio.get_running_loop()
            threading.Thread(
                target=self._run,
                args=(topic, followed, list(ends), loop),
                name=f"millstream edge {topic.name}",
                daemon=True,
            ).start()
        followed.followers += 1
        try:
            yield followed
        finally:
            followed.followers -= 1
            if not followed.followers:
                followed.stopped.set()
                if self._topics.get(topic.topic_id) is followed:
                    del self._topics[topic.topic_id]

    @property
    def followers(self) -> int:
        """How many streams are open."""
        return sum(followed.followers for followed in self._topics.values())

    def close(self) -> None:
        """Let all go who wait."""
        self.closing = True
        for followed in self._topics.values():
            followed.wake()

    def _run(
        self,
        topic: TopicInfo,
        followed: Followed,
        ends: Sequence[int],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            try:
                self._look(topic, followed, ends, loop)
            except MillstreamError as error:
                loop.call_soon_threadsafe(followed.failed, error)
            except Exception as error:  # noqa: BLE001 - whatever it is, the streams must be told
                failure = MillstreamError(f"Topic {topic.name!r} could not be followed: {error!r}.")
                failure.__cause__ = error
                loop.call_soon_threadsafe(followed.failed, failure)

    def _look(
        self,
        topic: TopicInfo,
        followed: Followed,
        ends: Sequence[int],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        # Pinned: a topic that is made anew is an error, and never more of this one.
        reader = self._open_reader().pinned({topic.name: topic.topic_id})
        while not followed.stopped.is_set():
            if reader.wait(topic.name, ends, _LOOK_S):
                ends = [end for _, end in reader.offsets(topic.name)]
                loop.call_soon_threadsafe(followed.told, ends)
