"""What all answers share: the log, the threads that work on it, and who waits for what."""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from millstream.broker.appending import Appender
from millstream.broker.closings import Closings
from millstream.broker.coordinator import Groups
from millstream.broker.memory import MemberMemory, ResponseMemory
from millstream.broker.offset_commits import OffsetCommits
from millstream.broker.schema import Api
from millstream.broker.settings import Settings
from millstream.broker.share_groups import ShareGroup, ShareGroups
from millstream.broker.share_sessions import Sessions
from millstream.broker.shares import Shares
from millstream.broker.watch import Watch
from millstream.broker.wire import Message
from millstream.errors import MillstreamError, SyncFailedError
from millstream.log.batches import BatchReader
from millstream.log.clocks import wall_clock_ms
from millstream.log.files import DISK
from millstream.log.owner import read_format
from millstream.log.shares import ShareMember, forget_members, put_members
from millstream.log.signal import signal_of
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition
from millstream.threads import Threads

if TYPE_CHECKING:
    from millstream.broker.authentication import Login

READING_THREADS, CHANGING_THREADS = 4, 2
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Call:
    """One request, and what is known of who sent it.

    ``host`` and ``port`` are where the client reached the broker, so that it can be told to go on
    there. ``connection`` is greater for one that came later. ``login`` is who the client is, where the
    broker has users. ``held_bytes`` is what the answer holds of the memory for responses until it is
    sent.
    """

    api: Api
    version: int
    correlation_id: int
    client_id: str
    request: Message
    host: str
    port: int
    client_host: str
    connection: int = 0
    login: Login | None = None
    held_bytes: int = 0


class Node:
    """The broker as its answers see it. Lives in one event loop.

    Args:
        on_failure: Called when the log takes nothing any more.
    """

    def __init__(
        self,
        writer: LogWriter,
        settings: Settings,
        *,
        on_failure: Callable[[MillstreamError], None],
    ) -> None:
        self.writer = writer
        self.settings = settings
        self.node_id = settings.broker_id
        self.loop = asyncio.get_running_loop()
        self.watch = Watch(self.loop)
        self.responses = ResponseMemory(settings.responses_bytes_max)
        self.fail = on_failure
        self.appender = Appender(writer, self.loop, settings, on_failure=on_failure)
        directory_id = read_format(writer.folder, DISK)
        assert directory_id is not None, "a log that is open has a name"
        self.cluster_id = base64.urlsafe_b64encode(bytes.fromhex(directory_id)).decode().rstrip("=")
        members = MemberMemory(settings.members_bytes_max, settings.group_members_max)
        self.groups = Groups(settings, members)
        self.closings = Closings()
        self.shares = Shares(self)
        self.share_sessions = Sessions()
        self.share_groups = ShareGroups(
            memory=members, on_change=self._share_group_changed, on_gone=self._share_member_gone
        )
        self._noting: dict[str, asyncio.Task[None]] = {}
        self.commits = OffsetCommits(self.loop, self.change, writer)
        self.clock_ms = wall_clock_ms
        self.spoke: dict[int, int] = {}  # by producer id: the last connection to its coordinator
        self._connections = 0
        self._topic_names: dict[str, str] = {}  # by id, as far as they were asked for
        self._readers = threading.local()
        self._closing = ExitStack()
        # What waits for the one lock of control.db must not keep reads waiting.
        self._reading = Threads(READING_THREADS, "millstream-broker-reading")
        self._changing = Threads(CHANGING_THREADS, "millstream-broker-changing")

    def start(self) -> None:
        """Begin to work."""
        self._closing.callback(self._reading.close)
        self._closing.callback(self._changing.close)
        self._closing.enter_context(signal_of(self.writer.folder).listened(self.watch.changed))
        self.appender.start()
        self._closing.callback(self.appender.stop)

    def close(self) -> None:
        """End what is at work."""
        self._closing.close()
        self.closings.sum_up(at_end=True)

    async def begin(self) -> None:
        """Go on with what the last owner left of share groups."""
        await self.change(lambda: forget_members(self.writer.control))
        await self.shares.resume()

    async def end(self) -> None:
        """Answer all who wait, and write down what share groups still have to."""
        self.groups.close()
        self.share_groups.close()
        await self.shares.close()
        await asyncio.gather(*self._noting.values(), return_exceptions=True)

    # -- members that come and go -------------------------------------------------------------

    def connection_closed(self, connection: int) -> None:
        """Take members for dead whose sessions lived on a connection."""
        for session in self.share_sessions.of_connection(connection):
            self.share_sessions.end(session.group, session.member)
            self.shares.release(session.group, session.member)

    def _share_member_gone(self, group: str, member: str) -> None:
        self.share_sessions.end(group, member)
        self.shares.release(group, member)

    def _share_group_changed(self, group: ShareGroup) -> None:
        """Note who is in a share group, for those who look at it from elsewhere."""
        before = self._noting.get(group.name)
        self._noting[group.name] = self.loop.create_task(self._note_members(group, before))

    async def _note_members(self, group: ShareGroup, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        members = [
            ShareMember(one.member_id, one.client_id, one.client_host, _by_topic(one.assignment))
            for one in group.members.values()
        ]
        try:
            await self.change(lambda: put_members(self.writer.control, group.name, members))
        except MillstreamError as error:
            _log.warning("the members of group %r could not be noted: %s", group.name, error)
        if self._noting.get(group.name) is asyncio.current_task():
            del self._noting[group.name]

    # -- threads ------------------------------------------------------------------------------

    def next_connection(self) -> int:
        """Return the number of a connection that has just come."""
        self._connections += 1
        return self._connections

    def topic_name(self, topic_id: str) -> str | None:
        """Return the name of the topic with this id; None: there is none. It may just have been deleted."""
        if topic_id not in self._topic_names:
            topics = self.writer.topics()
            self._topic_names = {info.topic_id: name for name, info in topics.items()}
        return self._topic_names.get(topic_id)

    def reader(self) -> BatchReader:
        """Return the reader of the thread that asks."""
        found: BatchReader | None = getattr(self._readers, "reader", None)
        if found is None:
            found = BatchReader(self.writer.folder, control=self.writer.control)
            self._readers.reader = found
        return found

    async def run(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, which reads; it may wait for the disk."""
        return await asyncio.wrap_future(self._reading.submit(work))

    async def change(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, which changes something besides records."""
        try:
            return await asyncio.wrap_future(self._changing.submit(work))
        except SyncFailedError as error:
            self.fail(error)
            raise


def _by_topic(places: Iterable[TopicPartition]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for place in places:
        found.setdefault(place.topic, []).append(place.partition)
    return found
