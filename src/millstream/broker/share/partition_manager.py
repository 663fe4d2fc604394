"""The share partitions of this broker: in memory while they are in use, their state in control.db.

Fetches and acknowledgements change a share partition in the event loop, at once; the change is durable
before the response (``log.share_state`` lists what a crash leaves). All that wait for that share the next
commit of control.db. Undeliverable records follow: if the group has a dead-letter topic, their copies are
appended in a transaction whose decision archives them; else they are archived with the next commit.

If control.db cannot be written, acquisitions are cancelled and acknowledgements are rejected; the next
request tries again. If a copy cannot be written, the records remain undeliverable, other records pass
them, and the write is retried.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from millstream.broker.log_access import LogAccess
from millstream.broker.share.dead_letters import DlqEntry, dead_letter
from millstream.broker.share.partition import (
    UNDELIVERABLE,
    RecordSpan,
    SharePartition,
)
from millstream.broker.share.settings import ShareGroupSettings, parse_settings
from millstream.errors import ConfigError, MillstreamError, UnknownTopicError
from millstream.log.batch_reader import BatchReader
from millstream.log.share_state import (
    ShareKey,
    ShareState,
    group_settings,
    put_share,
    share_state,
    share_states,
)
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

_RETRY_S = 5.0  # between attempts to write undeliverable records to the dead-letter topic
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class LoadedSharePartition:
    """One share partition: its state, its persisted state, and the fetches that wait for it."""

    key: ShareKey
    name: TopicPartition
    partition: SharePartition
    persisted: ShareState | None
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: set[asyncio.Event] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None
    retry: asyncio.TimerHandle | None = None

    def wake_fetches(self) -> None:
        """Wake the fetches that found nothing to acquire."""
        for event in self.waiting:
            event.set()


@dataclass(slots=True)
class _PersistRequest:
    shares: Sequence[LoadedSharePartition]
    done: asyncio.Future[MillstreamError | None]


class SharePartitionManager:
    """Every share partition in use. Lives in the event loop."""

    def __init__(self, log: LogAccess) -> None:
        self._log = log
        self._shares: dict[ShareKey, LoadedSharePartition] = {}
        self._loading: dict[ShareKey, asyncio.Task[LoadedSharePartition]] = {}
        self._settings: dict[str, ShareGroupSettings] = {}
        self._waiting: list[_PersistRequest] = []
        self._tasks: set[asyncio.Task[object]] = set()
        self._at_work: asyncio.Task[object] | None = None
        self._closed = False

    def now_ms(self) -> int:
        """Return the time by which acquisition locks expire."""
        return int(self._log.loop.time() * 1000)

    async def settings(self, group: str) -> ShareGroupSettings:
        """Return the effective settings of a group."""
        if group not in self._settings:
            control = self._log.writer.control
            stored = await self._log.run_read(lambda: group_settings(control, group))
            try:
                self._settings[group] = parse_settings(stored)
            except ConfigError as error:  # of a newer version of this program
                _log.warning("the settings of group %r are not all known: %s", group, error)
                self._settings[group] = ShareGroupSettings()
        return self._settings[group]

    def settings_changed(self, group: str) -> None:
        """Apply changed settings of a group."""
        self._settings.pop(group, None)
        for share in self.loaded_of_group(group):
            self.persist_later([share])

    def loaded_of_group(self, group: str) -> list[LoadedSharePartition]:
        """Return the share partitions of a group that are in memory."""
        return [one for one in self._shares.values() if one.key.group == group]

    def key(self, group: str, name: TopicPartition) -> ShareKey:
        """Return the key of a share partition.

        Raises:
            UnknownTopicError: there is no such topic or partition.
        """
        info = self._log.writer.topics().get(name.topic)
        if info is None or not 0 <= name.partition < info.partitions:
            raise UnknownTopicError(f"there is no partition {name}")
        return ShareKey(group, info.topic_id, name.partition)

    async def load(self, group: str, name: TopicPartition) -> LoadedSharePartition:
        """Return a share partition; the settings say where a group begins that has not read it.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
            RetriableError: control.db cannot be read now.
        """
        key = self.key(group, name)
        found = self._shares.get(key)
        if found is not None:
            return found
        if key not in self._loading:
            task = self._log.loop.create_task(self._load_from_disk(key, name))
            self._loading[key] = task
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        return await asyncio.shield(self._loading[key])

    async def _load_from_disk(self, key: ShareKey, name: TopicPartition) -> LoadedSharePartition:
        settings = await self.settings(key.group)
        now_ms = self._log.clock_ms()

        def load() -> tuple[SharePartition, ShareState | None]:
            persisted = share_state(self._log.writer.control, key)
            if persisted is not None:
                return SharePartition.of(persisted), persisted
            start = _initial_offset(self._log.reader(), name, settings, now_ms)
            return SharePartition(start), None

        share = LoadedSharePartition(key, name, *await self._log.run_read(load))
        self._shares[key] = share
        return share

    async def resume(self) -> None:
        """Dead-letter the undeliverable records that the last owner left."""
        states = await self._log.run_read(lambda: share_states(self._log.writer.control))
        for group, partitions in states.items():
            for name, state in partitions.items():
                if any(one.state in UNDELIVERABLE for one in state.spans):
                    try:
                        self.persist_later([await self.load(group, name)])
                    except MillstreamError as error:
                        _log.warning("undeliverable records of group %r wait: %s", group, error)

    def unload(self, group: str, topic_ids: Iterable[str] | None = None) -> None:
        """Unload the share partitions of a group without members: of some topics, or all."""
        only = None if topic_ids is None else set(topic_ids)
        for share in self.loaded_of_group(group):
            if only is None or share.key.topic_id in only:
                self._drop(share)
        if only is None:
            self._settings.pop(group, None)

    def _drop(self, share: LoadedSharePartition) -> None:
        self._shares.pop(share.key, None)
        for timer in (share.timer, share.retry):
            if timer is not None:
                timer.cancel()
        share.wake_fetches()

    def sweep(self, in_use: Iterable[str]) -> None:
        """Unload share partitions of deleted topics, and settings of groups not in use."""
        existing = {info.topic_id for info in self._log.writer.topics().values()}
        for share in list(self._shares.values()):
            if share.key.topic_id not in existing:
                self._drop(share)
        kept = {*in_use, *(key.group for key in self._shares)}
        self._settings = {group: one for group, one in self._settings.items() if group in kept}

    # -- locks and members --------------------------------------------------------------------

    def schedule_lock_expiry(self, share: LoadedSharePartition) -> None:
        """Schedule the release of acquired records for when their lock expires."""
        due_ms = share.partition.next_expiry_ms()
        if due_ms is None or self._closed:
            return
        due_s = due_ms / 1000
        if share.timer is not None:
            if share.timer.when() <= due_s:
                return
            share.timer.cancel()
        share.timer = self._log.loop.call_at(due_s, self._expire, share)

    def _expire(self, share: LoadedSharePartition) -> None:
        share.timer = None
        limits = self._settings.get(share.key.group, ShareGroupSettings()).limits
        if share.partition.expire(self.now_ms() + 1, limits):
            self._released(share)
        self.schedule_lock_expiry(share)

    def release(self, group: str, member: str) -> None:
        """Release what a member has acquired: it has left."""
        limits = self._settings.get(group, ShareGroupSettings()).limits
        for share in self.loaded_of_group(group):
            if share.partition.release(member, limits):
                self._released(share)

    def _released(self, share: LoadedSharePartition) -> None:
        share.wake_fetches()
        if share.partition.undeliverable():
            self.persist_later([share])

    # -- persisting ---------------------------------------------------------------------------

    def persist_later(self, shares: Sequence[LoadedSharePartition]) -> None:
        """Persist changes; nothing waits for them."""
        if not self._closed:
            self._track_task(self._log.loop.create_task(self.persist(shares)))

    def _track_task(self, task: asyncio.Task[object]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def persist(self, shares: Sequence[LoadedSharePartition]) -> MillstreamError | None:
        """Return None when the changes are durable, or the error."""
        done: asyncio.Future[MillstreamError | None] = self._log.loop.create_future()
        self._waiting.append(_PersistRequest(shares, done))
        if self._at_work is None or self._at_work.done():
            self._at_work = self._log.loop.create_task(self._persist_waiting())
            self._track_task(self._at_work)
        return await done

    async def _persist_waiting(self) -> None:
        while self._waiting:
            requests, self._waiting = self._waiting, []
            shares = list(dict.fromkeys(share for one in requests for share in one.shares))
            try:
                failed = await self._write(shares)
            except Exception as error:  # every waiting request must end
                for one in requests:
                    if not one.done.done():
                        one.done.set_exception(error)
                raise
            for one in requests:
                failure = next((failed[share] for share in one.shares if share in failed), None)
                if not one.done.done():
                    one.done.set_result(failure)
            for share in shares:
                if share not in failed and share.partition.undeliverable():
                    await self._dead_letter(share)

    async def _write(
        self, shares: Sequence[LoadedSharePartition]
    ) -> dict[LoadedSharePartition, MillstreamError]:
        """Write changes; return the share partitions that could not be written, with the errors."""
        changes: list[tuple[LoadedSharePartition, ShareState]] = []
        failed: dict[LoadedSharePartition, MillstreamError] = {}
        for share in shares:
            if not (await self.settings(share.key.group)).dead_letter_topic:
                self._archive_undeliverable(share)
            after = share.partition.persisted()
            if self._shares.get(share.key) is not share:
                failed[share] = UnknownTopicError(
                    "the topic was deleted, or the group was recreated"
                )
            elif after != share.persisted:
                changes.append((share, after))
        if not changes:
            return failed
        rows = [(share.key, share.persisted, after) for share, after in changes]
        errors = await self._log.run_write(partial(_put, self._log.writer, rows))
        for (share, after), error in zip(changes, errors, strict=True):
            if error is None:
                share.persisted = after
            else:
                failed[share] = error
                if isinstance(error, UnknownTopicError):
                    self._drop(share)
        return failed

    def _archive_undeliverable(self, share: LoadedSharePartition) -> None:
        """Archive undeliverable records of a group without a dead-letter topic."""
        for span in share.partition.undeliverable():
            _log.warning(
                "group %r archives undeliverable records of %s, offsets %d to %d: %s, "
                "delivered %d times",
                share.key.group,
                share.name,
                span.first,
                span.end - 1,
                span.state.value,
                span.delivery_count,
            )
        share.partition.archive(share.partition.undeliverable())
        share.wake_fetches()

    async def _dead_letter(self, share: LoadedSharePartition) -> None:
        """Copy undeliverable records to the dead-letter topic and archive them: both, or neither."""
        settings = await self.settings(share.key.group)
        undeliverable, partition = share.partition.undeliverable(), share.partition.copy()
        if not settings.dead_letter_topic or share.retry is not None:
            return
        partition.archive(undeliverable)
        after = partition.persisted()
        entry = DlqEntry(settings.dead_letter_topic, share.key, share.name, tuple(undeliverable))
        writer, reader = self._log.writer, self._log.reader
        try:
            await self._log.run_write(
                lambda: dead_letter(writer, reader(), entry, share.persisted, after)
            )
        except UnknownTopicError:
            self._drop(share)
        except MillstreamError as error:
            _log.error(
                "undeliverable records of group %r wait for the dead-letter topic %s: %s",
                share.key.group,
                settings.dead_letter_topic,
                error,
            )
            share.retry = self._log.loop.call_later(_RETRY_S, self._retry_later, share)
        else:
            share.persisted = after
            self._dead_lettered(share, undeliverable)

    def _dead_lettered(
        self, share: LoadedSharePartition, undeliverable: Sequence[RecordSpan]
    ) -> None:
        share.partition.archive(undeliverable)
        share.wake_fetches()

    def _retry_later(self, share: LoadedSharePartition) -> None:
        share.retry = None
        self.persist_later([share])

    async def close(self) -> None:
        """Complete pending writes, and end."""
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


def _initial_offset(
    reader: BatchReader, name: TopicPartition, settings: ShareGroupSettings, now_ms: int
) -> int:
    state = reader.state(*name)
    if settings.auto_offset_reset == "earliest":
        return state.log_start
    if isinstance(settings.auto_offset_reset, int):
        found = reader.first_since(*name, now_ms - settings.auto_offset_reset)
        return state.high_watermark if found is None else found.offset
    committed = settings.isolation == "read_committed"
    return state.last_stable_offset if committed else state.high_watermark
