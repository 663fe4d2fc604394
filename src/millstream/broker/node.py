"""What all handlers share: the log, groups, sessions and memory budgets."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from millstream.broker.counters import BrokerCounters
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.offset_writer import OffsetWriter
from millstream.broker.log_access import LogAccess
from millstream.broker.log_limiter import ConnectionLogLimiter
from millstream.broker.memory import MemberMemory, ResponseMemory
from millstream.broker.records.appender import Appender
from millstream.broker.settings import BrokerSettings
from millstream.broker.share.group import ShareGroup, ShareGroupCoordinator
from millstream.broker.share.partition_manager import SharePartitionManager
from millstream.broker.share.session import ShareSessionCache
from millstream.broker.watch import PartitionWatch
from millstream.errors import MillstreamError
from millstream.log.files import DISK
from millstream.log.owner import read_format
from millstream.log.producer_identity import ProducerIdentity
from millstream.log.share_state import ShareMember, delete_members, put_members
from millstream.log.signal import signal_of
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

_log = logging.getLogger(__name__)


class BrokerNode:
    """The broker, from the side of its handlers. Lives in one event loop.

    Args:
        on_failure: Called when the log accepts no more appends.
    """

    def __init__(
        self,
        writer: LogWriter,
        settings: BrokerSettings,
        *,
        on_failure: Callable[[MillstreamError], None],
    ) -> None:
        self.settings = settings
        self.node_id = settings.broker_id
        self.loop = asyncio.get_running_loop()
        self.log = LogAccess(writer, self.loop, on_failure=on_failure)
        self.watch = PartitionWatch(self.loop)
        self.responses = ResponseMemory(settings.responses_bytes_max)
        self.fail = on_failure
        self.appender = Appender(writer, self.loop, settings, on_failure=on_failure)
        directory_id = read_format(writer.folder, DISK)
        assert directory_id is not None, "an open log has an id"
        self.cluster_id = base64.urlsafe_b64encode(bytes.fromhex(directory_id)).decode().rstrip("=")
        members = MemberMemory(settings.members_bytes_max, settings.group_members_max)
        self.groups = GroupCoordinator(settings, members)
        self.log_limiter = ConnectionLogLimiter()
        self.counters = BrokerCounters()
        self.shares = SharePartitionManager(self.log)
        self.share_sessions = ShareSessionCache()
        self.share_groups = ShareGroupCoordinator(
            memory=members, on_change=self._share_group_changed, on_left=self._share_member_left
        )
        self._member_writes: dict[str, asyncio.Task[None]] = {}
        self.offset_writer = OffsetWriter(self.log)
        # the connection on which each producer last sent a request to its transaction coordinator
        self.producer_connections: dict[ProducerIdentity, int] = {}
        self._connections = 0
        self._topic_names: dict[str, str] = {}  # by id; a cache
        self._closing = ExitStack()

    def start(self) -> None:
        """Begin to work."""
        self._closing.callback(self.log.close)
        self._closing.enter_context(signal_of(self.log.writer.folder).subscribe(self.watch.notify))
        self.appender.start()
        self._closing.callback(self.appender.stop)

    def close(self) -> None:
        """End the threads, after running work."""
        self._closing.close()
        self.log_limiter.log_suppressed(at_end=True)

    async def resume(self) -> None:
        """Continue with the share groups that the last owner left."""
        await self.log.run_write(lambda: delete_members(self.log.writer.control))
        await self.shares.resume()

    async def drain(self) -> None:
        """Complete waiting requests, and persist the state of share groups."""
        self.groups.close()
        self.share_groups.close()
        await self.shares.close()
        await asyncio.gather(*self._member_writes.values(), return_exceptions=True)

    # -- members of share groups --------------------------------------------------------------

    def connection_refused(self, open_now: int) -> None:
        """Log and count a connection that is closed at once, as so many are open."""
        self.counters.refusals["limit"] += 1
        self.log_limiter.log_closed(f"closed a connection: {open_now} are open, the limit")

    def connection_closed(self, connection: int) -> None:
        """End the share sessions of a connection, and release what their members have acquired."""
        for session in self.share_sessions.of_connection(connection):
            self.share_sessions.end(session.group, session.member)
            self.shares.release(session.group, session.member)

    def _share_member_left(self, group: str, member: str) -> None:
        self.share_sessions.end(group, member)
        self.shares.release(group, member)

    def _share_group_changed(self, group: ShareGroup) -> None:
        """Write the members of a share group to control.db, for readers in other processes."""
        before = self._member_writes.get(group.name)
        self._member_writes[group.name] = self.loop.create_task(self._write_members(group, before))

    async def _write_members(self, group: ShareGroup, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        members = [
            ShareMember(one.member_id, one.client_id, one.client_host, _by_topic(one.assignment))
            for one in group.members.values()
        ]
        try:
            await self.log.run_write(
                lambda: put_members(self.log.writer.control, group.name, members)
            )
        except MillstreamError as error:
            _log.warning("the members of group %r could not be written: %s", group.name, error)
        if self._member_writes.get(group.name) is asyncio.current_task():
            del self._member_writes[group.name]

    # -- connections and topics ---------------------------------------------------------------

    def next_connection(self) -> int:
        """Return the number of a new connection."""
        self._connections += 1
        return self._connections

    def topic_name(self, topic_id: str) -> str | None:
        """Return the name of the topic with this id; None: there is none. It may be deleted just now."""
        if topic_id not in self._topic_names:
            topics = self.log.writer.topics()
            self._topic_names = {info.topic_id: name for name, info in topics.items()}
        return self._topic_names.get(topic_id)


def _by_topic(names: Iterable[TopicPartition]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name in names:
        found.setdefault(name.topic, []).append(name.partition)
    return found
