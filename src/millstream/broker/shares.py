"""The share partitions that this broker keeps: in memory as long as they are used, on disk what matters.

Fetches and acknowledgements change a share partition in the event loop, at once; what they changed is
durable before they are answered (``log.shares`` has what a crash leaves). All who wait for that share
the next commit of control.db. Records that are given up follow: where the group has a dead-letter topic,
their copies are appended in a transaction whose decision archives them, else they are archived with the
next commit.

Where control.db cannot be written, deliveries are taken back and acknowledgements are refused, and who
comes next tries again. Where a copy cannot be written, the records stay as they are, in the way of
nobody, and it is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from millstream.broker.dead_letters import Grave, bury
from millstream.broker.share_partition import DOOMED, Kept, SharePartition, Span, State
from millstream.broker.share_settings import GroupSettings, parse
from millstream.errors import ConfigError, MillstreamError, UnknownTopicError
from millstream.log.batches import BatchReader
from millstream.log.shares import (
    ShareKey,
    ShareState,
    SpanRow,
    group_settings,
    put_share,
    share_state,
    share_states,
)
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

if TYPE_CHECKING:
    from millstream.broker.node import Node

_AGAIN_S = 5.0  # until it is tried again to write the copies of records that are given up
_DOOMED_STATES = frozenset(state.value for state in DOOMED)
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Share:
    """One share partition: its state, what of it is on disk, and who waits for it."""

    key: ShareKey
    name: TopicPartition
    partition: SharePartition
    written: ShareState | None
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: set[asyncio.Event] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None
    retry: asyncio.TimerHandle | None = None

    def state(self) -> ShareState:
        """Return what is to be on disk."""
        return state_of(self.partition)

    def wake(self) -> None:
        """Let those look again who found nothing to fetch."""
        for event in self.waiting:
            event.set()


def state_of(partition: SharePartition) -> ShareState:
    """Return what control.db is to keep of a share partition."""
    spans = (SpanRow(*one[:2], one.state.value, one.deliveries) for one in partition.kept())
    return ShareState(partition.start, tuple(spans))


def partition_of(state: ShareState) -> SharePartition:
    """Return a share partition as control.db has kept it."""
    return SharePartition(
        state.start,
        (Kept(one.first, one.end, State(one.state), one.deliveries) for one in state.spans),
    )


@dataclass(slots=True)
class _Settlement:
    shares: Sequence[Share]
    done: asyncio.Future[MillstreamError | None]


class Shares:
    """Every share partition in use. Lives in the event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._shares: dict[ShareKey, Share] = {}
        self._loading: dict[ShareKey, asyncio.Task[Share]] = {}
        self._settings: dict[str, GroupSettings] = {}
        self._waiting: list[_Settlement] = []
        self._tasks: set[asyncio.Task[object]] = set()
        self._at_work: asyncio.Task[object] | None = None
        self._closed = False

    def now_ms(self) -> int:
        """Return the time by which acquisition locks expire."""
        return int(self._node.loop.time() * 1000)

    async def settings(self, group: str) -> GroupSettings:
        """Return the settings of a group in force."""
        if group not in self._settings:
            control = self._node.writer.control
            given = await self._node.run(lambda: group_settings(control, group))
            try:
                self._settings[group] = parse(given)
            except ConfigError as error:  # of a newer version of this program
                _log.warning("the settings of group %r are not all known: %s", group, error)
                self._settings[group] = GroupSettings()
        return self._settings[group]

    def settings_changed(self, group: str) -> None:
        """Note that settings were changed."""
        self._settings.pop(group, None)
        for share in self.of_group(group):
            self.settle_later([share])

    def of_group(self, group: str) -> list[Share]:
        """Return the share partitions of a group that are in memory."""
        return [one for one in self._shares.values() if one.key.group == group]

    def key(self, group: str, name: TopicPartition) -> ShareKey:
        """Return what a share partition is known by.

        Raises:
            UnknownTopicError: there is no such topic or partition.
        """
        info = self._node.writer.topics().get(name.topic)
        if info is None or not 0 <= name.partition < info.partitions:
            raise UnknownTopicError(f"there is no partition {name.topic}/{name.partition}")
        return ShareKey(group, info.topic_id, name.partition)

    async def share(self, group: str, name: TopicPartition) -> Share:
        """Return a share partition; a group that has not read it begins where its settings say.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
            RetriableError: control.db cannot be read now.
        """
        key = self.key(group, name)
        found = self._shares.get(key)
        if found is not None:
            return found
        if key not in self._loading:
            task = self._node.loop.create_task(self._load(key, name))
            self._loading[key] = task
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        return await asyncio.shield(self._loading[key])

    async def _load(self, key: ShareKey, name: TopicPartition) -> Share:
        settings = await self.settings(key.group)
        now_ms = self._node.clock_ms()

        def look() -> tuple[ShareState | None, int]:
            kept = share_state(self._node.writer.control, key)
            if kept is not None:
                return kept, kept.start
            return None, _beginning(self._node.reader(), name, settings, now_ms)

        kept, start = await self._node.run(look)
        partition = SharePartition(start) if kept is None else partition_of(kept)
        share = Share(key, name, partition, kept)
        self._shares[key] = share
        return share

    async def resume(self) -> None:
        """Go on with what the last owner left: records that were to be given up."""
        states = await self._node.run(lambda: share_states(self._node.writer.control))
        for group, places in states.items():
            for name, state in places.items():
                if any(one.state in _DOOMED_STATES for one in state.spans):
                    try:
                        self.settle_later([await self.share(group, name)])
                    except MillstreamError as error:
                        _log.warning("records of group %r wait to be given up: %s", group, error)

    def forget(self, group: str, topic_ids: Iterable[str] | None = None) -> None:
        """Forget share partitions of a group that nobody reads: of some topics, or all."""
        only = None if topic_ids is None else set(topic_ids)
        for share in self.of_group(group):
            if only is None or share.key.topic_id in only:
                self._drop(share)
        if only is None:
            self._settings.pop(group, None)

    def _drop(self, share: Share) -> None:
        self._shares.pop(share.key, None)
        for timer in (share.timer, share.retry):
            if timer is not None:
                timer.cancel()
        share.wake()

    def sweep(self, in_use: Iterable[str]) -> None:
        """Forget share partitions of topics that are gone, and settings of groups not in use."""
        there = {info.topic_id for info in self._node.writer.topics().values()}
        for share in list(self._shares.values()):
            if share.key.topic_id not in there:
                self._drop(share)
        kept = {*in_use, *(key.group for key in self._shares)}
        self._settings = {group: one for group, one in self._settings.items() if group in kept}

    # -- time and death -----------------------------------------------------------------------

    def watch_locks(self, share: Share) -> None:
        """See to it that what is acquired becomes available when its lock expires."""
        due_ms = share.partition.next_expiry_ms()
        if due_ms is None or self._closed:
            return
        due_s = due_ms / 1000
        if share.timer is not None:
            if share.timer.when() <= due_s:
                return
            share.timer.cancel()
        share.timer = self._node.loop.call_at(due_s, self._expire, share)

    def _expire(self, share: Share) -> None:
        share.timer = None
        limits = self._settings.get(share.key.group, GroupSettings()).limits
        if share.partition.expire(self.now_ms() + 1, limits):
            self._released(share)
        self.watch_locks(share)

    def release(self, group: str, member: str) -> None:
        """Make available what a member has: it is gone."""
        limits = self._settings.get(group, GroupSettings()).limits
        for share in self.of_group(group):
            if share.partition.release(member, limits):
                self._released(share)

    def _released(self, share: Share) -> None:
        share.wake()
        if share.partition.doomed():
            self.settle_later([share])

    # -- on disk ------------------------------------------------------------------------------

    def settle_later(self, shares: Sequence[Share]) -> None:
        """Make durable what changed; nobody waits for it."""
        if not self._closed:
            self._keep(self._node.loop.create_task(self.settle(shares)))

    def _keep(self, task: asyncio.Task[object]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self, shares: Sequence[Share]) -> MillstreamError | None:
        """Return when what changed is durable; or why it is not."""
        done: asyncio.Future[MillstreamError | None] = self._node.loop.create_future()
        self._waiting.append(_Settlement(shares, done))
        if self._at_work is None or self._at_work.done():
            self._at_work = self._node.loop.create_task(self._work())
            self._keep(self._at_work)
        return await done

    async def _work(self) -> None:
        while self._waiting:
            settlements, self._waiting = self._waiting, []
            shares = list(dict.fromkeys(share for one in settlements for share in one.shares))
            try:
                failed = await self._write(shares)
            except Exception as fault:  # whoever waits must be told
                for one in settlements:
                    if not one.done.done():
                        one.done.set_exception(fault)
                raise
            for one in settlements:
                error = next((failed[share] for share in one.shares if share in failed), None)
                if not one.done.done():
                    one.done.set_result(error)
            for share in shares:
                if share not in failed and share.partition.doomed():
                    await self._bury(share)

    async def _write(self, shares: Sequence[Share]) -> dict[Share, MillstreamError]:
        """Write what changed; return what could not be written, and why."""
        changes: list[tuple[Share, ShareState]] = []
        failed: dict[Share, MillstreamError] = {}
        for share in shares:
            if not (await self.settings(share.key.group)).dead_letters:
                self._archive(share)
            after = share.state()
            if self._shares.get(share.key) is not share:
                failed[share] = UnknownTopicError("the topic was deleted, or the group made anew")
            elif after != share.written:
                changes.append((share, after))
        if not changes:
            return failed
        rows = [(share.key, share.written, after) for share, after in changes]
        errors = await self._node.change(partial(_put, self._node.writer, rows))
        for (share, after), error in zip(changes, errors, strict=True):
            if error is None:
                share.written = after
            else:
                failed[share] = error
                if isinstance(error, UnknownTopicError):
                    self._drop(share)
        return failed

    def _archive(self, share: Share) -> None:
        """Give up records of which no copy is wanted."""
        for span in share.partition.doomed():
            _log.warning(
                "group %r gives up %s/%d, offsets %d to %d: %s, delivered %d times",
                share.key.group,
                *share.name,
                span.first,
                span.end - 1,
                span.state.value,
                span.deliveries,
            )
        share.partition.bury(share.partition.doomed())
        share.wake()

    async def _bury(self, share: Share) -> None:
        """Copy doomed records to the dead-letter topic, and archive them: both, or neither."""
        settings = await self.settings(share.key.group)
        doomed, partition = share.partition.doomed(), share.partition.copy()
        if not settings.dead_letters or share.retry is not None:
            return
        partition.bury(doomed)
        after = state_of(partition)
        grave = Grave(settings.dead_letters, share.key, share.name, tuple(doomed))
        writer, reader = self._node.writer, self._node.reader
        try:
            await self._node.change(lambda: bury(writer, reader(), grave, share.written, after))
        except UnknownTopicError:
            self._drop(share)
        except MillstreamError as error:
            _log.error(
                "records that group %r gives up wait for their copies in %s: %s",
                share.key.group,
                settings.dead_letters,
                error,
            )
            share.retry = self._node.loop.call_later(_AGAIN_S, self._again, share)
        else:
            share.written = after
            self._buried(share, doomed)

    def _buried(self, share: Share, doomed: Sequence[Span]) -> None:
        share.partition.bury(doomed)
        share.wake()

    def _again(self, share: Share) -> None:
        share.retry = None
        self.settle_later([share])

    async def close(self) -> None:
        """Write what is still to be written, and end."""
        self._closed = True
        for share in self._shares.values():
            for timer in (share.timer, share.retry):
                if timer is not None:
                    timer.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)


def _put(
    writer: LogWriter, changes: Sequence[tuple[ShareKey, ShareState | None, ShareState]]
) -> list[MillstreamError | None]:
    """Write all in one commit; if that fails, each by itself, so that each has its own error."""
    try:
        with writer.control.commit() as connection:
            for change in changes:
                put_share(connection, *change)
    except (MillstreamError, sqlite3.IntegrityError) as error:
        if len(changes) == 1:
            return [_error(error)]
        return [one for change in changes for one in _put(writer, [change])]
    return [None] * len(changes)


def _error(error: MillstreamError | sqlite3.IntegrityError) -> MillstreamError:
    if isinstance(error, MillstreamError):
        return error
    return UnknownTopicError("the topic was deleted")


def _beginning(
    reader: BatchReader, name: TopicPartition, settings: GroupSettings, now_ms: int
) -> int:
    state = reader.state(*name)
    if settings.reset == "earliest":
        return state.log_start
    if isinstance(settings.reset, int):
        found = reader.first_at(*name, now_ms - settings.reset)
        return state.high_watermark if found is None else found.offset
    committed = settings.isolation == "read_committed"
    return state.last_stable_offset if committed else state.high_watermark
