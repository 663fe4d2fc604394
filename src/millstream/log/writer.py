"""The writer of a log: opens a folder for writing, recovers it, appends, creates topics.

One :class:`LogWriter` per folder on the whole machine (see ``owner``). An append returns when the
records are on stable storage and visible to every reader. For reading see ``reader``.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from millstream.errors import ConfigError, DiskFullError, FencedError, MillstreamError
from millstream.log.batch import EncodedBatch
from millstream.log.clocks import running_time_ms, wall_clock_ms
from millstream.log.config import TopicConfig, change_settings
from millstream.log.control import ControlDb
from millstream.log.coordinator_log import OpenPartition, open_partitions_of
from millstream.log.files import DISK, Files, sync_names
from millstream.log.fork_guard import guard, unguard
from millstream.log.group_commit import Durability, GroupCommit, PendingAppend
from millstream.log.groups import Offsets, check_offsets, put_offsets
from millstream.log.maintenance import LogMaintenance, MaintenanceReport
from millstream.log.owner import lock_folder, make_format, remove_socket
from millstream.log.partition import Partition
from millstream.log.producers import ProducerStates
from millstream.log.recovery import RecoveredPartition, Recovery
from millstream.log.segment import Segment
from millstream.log.signal import signal_of
from millstream.log.state_file import CLEAN, FolderState, StateFile, check_same_folder
from millstream.log.takeover import (
    NEEDS_VERIFY,
    check_files_open,
    leaving_to_maintenance,
    mark_needs_verify,
    partition_folders,
    recover_partitions,
    remove_deleted_topics,
    remove_leftovers,
    remove_topic,
    translate_opening_errors,
)
from millstream.log.topics import (
    Catalog,
    TopicMetadata,
    check_topic_id,
    check_topic_name,
    fewer_partitions,
    no_partition,
    partition_folder,
    topic_exists,
    unknown_topic,
)
from millstream.log.transactions import TransactionCoordinator
from millstream.record import TopicInfo, TopicPartition

MAINTENANCE_S = 30.0
_log = logging.getLogger(__name__)


class LogWriter:
    """The one writer of a log folder. Thread-safe; unusable in a forked child.

    Args:
        folder: Made if it is missing.
        segment_bytes: A segment is closed before it grows past this, in topics that do not say.
        files: The file system; only tests pass another one.
        control: The content of control.db; only tests give another one.
        clock_ms: Milliseconds since 1970; only tests give another clock.
        running_ms: Monotonic milliseconds; only tests give others.
        sync_threads: How many partitions are synced at the same time.
        server: Serves other processes; entered as soon as the folder is owned, and left when it is
            about to be released.
        background: Run maintenance (retention, compaction, timeouts) and sync from threads; without it,
            the caller does: :meth:`run_maintenance`, :meth:`sync`.

    Raises:
        FolderOwnedError: another process writes to this folder.
        CorruptionError: whole files are missing; nothing was changed. See ``recovery``.
        ConfigError: the folder is of another format version, or parts of two folders were mixed.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        segment_bytes: int | None = None,
        files: Files = DISK,
        control: ControlDb | None = None,
        clock_ms: Callable[[], int] = wall_clock_ms,
        running_ms: Callable[[], int] | None = None,
        sync_threads: int = 4,
        server: AbstractContextManager[object] | None = None,
        background: bool = True,
    ) -> None:
        self.folder = Path(folder)
        self._files = files
        self._clock_ms = clock_ms
        self.running_ms = running_ms or (running_time_ms if clock_ms is wall_clock_ms else clock_ms)
        self._defaults = {} if segment_bytes is None else {"segment.bytes": str(segment_bytes)}
        TopicConfig.parse(self._defaults)
        self._topics_lock = threading.Lock()
        self._closing = ExitStack()
        with ExitStack() as undo, translate_opening_errors(self.folder, files):
            files.make_folder(self.folder)
            lock = lock_folder(self.folder, files)
            undo.callback(lock.release)
            remove_socket(self.folder, files)  # whose owner is dead
            if server is not None:
                undo.enter_context(server)
            directory_id = make_format(self.folder, files)
            self._state = StateFile(self.folder, files, write=True)
            undo.callback(self._state.close)
            self.control = control or ControlDb.open(self.folder, write=True)
            if control is None:
                undo.callback(self.control.close)
            self._catalog = Catalog(self.control)
            self._signal = signal_of(self.folder)
            undo.enter_context(self._signal.writer_active())
            self._take_over(directory_id, sync_threads, background=background)
            self._closing = undo.pop_all()
        guard(self)
        self.maintenance = LogMaintenance(self, every_s=MAINTENANCE_S if background else None)

    # -- opening ------------------------------------------------------------------------------

    def _take_over(self, directory_id: str, sync_threads: int, *, background: bool) -> None:
        """Recover every partition, and only then become visible as the owner."""
        before = self._state.header()
        if before is not None:
            check_same_folder(before, directory_id, self.folder)
        boot_id = self._files.boot_id()
        exact = before is not None and boot_id == before.boot_id and any(boot_id)
        self._topics: Mapping[str, TopicMetadata] = self._catalog.topics()
        remove_leftovers(self._files, self.folder, self._catalog, self._topics)
        clean = before is not None and bool(before.flags & CLEAN)
        verify = self._files.exists(self.folder / NEEDS_VERIFY)
        recovery = Recovery(self._files, self.folder / "quarantine", clean=clean, verify=verify)
        check_files_open(sum(len(topic.slots) for topic in self._topics.values()))
        partitions: dict[TopicPartition, Partition] = {}
        for topic, number, found in recover_partitions(
            self._files, self.folder, recovery, self._state, self._topics.values(), exact=exact
        ):
            if not clean or verify:
                found.producers.touch(self._clock_ms())
            partitions[TopicPartition(topic.name, number)] = self._partition(topic, number, found)
        # Neither of these is ever changed in place: any thread may be going through them.
        self._partitions: Mapping[TopicPartition, Partition] = partitions
        self.leader_epoch = self._catalog.next_leader_epoch()
        self._header = FolderState(
            directory_id=bytes.fromhex(directory_id),
            boot_id=boot_id,
            owner_pid=os.getpid(),
            leader_epoch=self.leader_epoch,
            flags=0,
            catalog_version=(before.catalog_version if before else 0) + 1,
        )
        self._commit = GroupCommit(
            leader_epoch=self.leader_epoch,
            admit=self._admit,
            publish=self._publish,
            stop=partial(mark_needs_verify, self._files, self.folder),
            sync_threads=sync_threads,
            background=background,
        )
        clocks = {"clock_ms": self._clock_ms, "running_ms": self.running_ms}
        self.transactions = TransactionCoordinator(self.control, self, **clocks)
        # 1. The partitions were recovered and synced; 2. their state and the header are published;
        # 3. state.mm is synced; 4. the mark is removed. A crash before 4 means verifying again.
        self._publish(self._partitions.values())
        self._state.publish_header(self._header)
        self._state.flush()
        if verify:
            self._files.remove(self.folder / NEEDS_VERIFY)
            sync_names(self._files, self.folder)
        # Markers that the last owner did not append come last: they are appends like any other.
        with suppress(DiskFullError):
            self.transactions.recover()

    def _partition(self, topic: TopicMetadata, number: int, found: RecoveredPartition) -> Partition:
        return Partition(
            self._files,
            partition_folder(self.folder, topic, number),
            TopicPartition(topic.name, number),
            sealed=found.sealed,
            active=found.active,
            log_start=found.log_start,
            log_end_offset=found.log_end_offset,
            producers=found.producers,
            config=self.config_of(topic),
            clock_ms=self._clock_ms,
            running_ms=self.running_ms,
        )

    def config_of(self, topic: TopicMetadata) -> TopicConfig:
        """Return the effective settings of a topic."""
        return TopicConfig.parse({**self._defaults, **topic.settings})

    # -- topics -------------------------------------------------------------------------------

    def topics(self) -> dict[str, TopicInfo]:
        """Return the topics by name."""
        return {name: topic.info for name, topic in sorted(self._topics.items())}

    def partition_count(self, topic: str) -> int:
        """Return how many partitions a topic has.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        return len(self._topic(topic).slots)

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = 1,
        settings: Mapping[str, str] | None = None,
        topic_id: str | None = None,
    ) -> TopicInfo:
        """Create a topic; when this returns it survives the loss of power.

        1. Make the folders and an empty segment in each, and sync all folders up to the log's. A
           crash leaves folders that no topic owns and that hold nothing: the next owner removes
           them.
        2. Commit the topic to control.db. A crash leaves a whole topic that readers do not see
           yet: the next owner publishes it.
        3. Publish its partitions, then the new catalog version, in state.mm.

        Args:
            settings: Under Kafka's names, see ``config``.
            topic_id: 32 hexadecimal digits that no other topic has; random if not given.

        Raises:
            TopicExistsError: the name is taken.
            ConfigError: the name, the number of partitions or a setting is not possible, or this
                process may not have twice as many files open as there are partitions.
        """
        check_topic_name(name)
        if partitions < 1:
            raise ConfigError(f"a topic of {partitions} partitions is not possible; give 1 or more")
        TopicConfig.parse(settings or {})
        with self._topics_lock:
            self._commit.check_open()
            if name in self._topics:
                raise topic_exists(name)
            slots = self._catalog.free_slots(partitions)
            topic = TopicMetadata(name, topic_id or uuid.uuid4().hex, slots, dict(settings or {}))
            self._check_files_open(partitions)
            with (
                self._commit.stopping(),
                partition_folders(self._files, self.folder, topic, 0) as segments,
            ):
                self._catalog.insert(topic)
            self._publish_partitions(topic, segments, 0)
        return topic.info

    def alter_topic(
        self,
        name: str,
        *,
        settings: Mapping[str, str | None] | None = None,
        partitions: int | None = None,
    ) -> TopicInfo:
        """Change settings of a topic (None takes one back to its default), or add partitions.

        Steps as in :meth:`create_topic`. Records remain where they are: with more partitions, a key
        may go to another one from now on.

        Raises:
            UnknownTopicError: there is no such topic.
            ConfigError: a setting is not possible, or there would be fewer partitions.
        """
        with self._topics_lock:
            self._commit.check_open()
            before = self._topic(name)
            count = len(before.slots)
            wanted = count if partitions is None else partitions
            if wanted < count:
                raise fewer_partitions(name, count, wanted)
            kept = change_settings(before.settings, settings or {})
            slots = before.slots + self._catalog.free_slots(wanted - count)
            topic = replace(before, slots=slots, settings=kept)
            if wanted > count:
                self._check_files_open(wanted - count)
            with (
                self._commit.stopping(),
                partition_folders(self._files, self.folder, topic, count) as segments,
            ):
                self._catalog.update(topic, partitions_before=count)
            self._publish_partitions(topic, segments, count)
            for number in range(count):
                self._partitions[TopicPartition(name, number)].config = self.config_of(topic)
        return topic.info

    def settings(self, name: str) -> dict[str, str]:
        """Return every setting of a topic, under Kafka's names.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        return self.config_of(self._topic(name)).settings()

    def explicit_settings(self, name: str) -> dict[str, str]:
        """Return those of a topic's :meth:`settings` that were given and are not defaults."""
        return dict(self._topic(name).settings)

    def _publish_partitions(
        self, topic: TopicMetadata, segments: Sequence[Segment], first: int
    ) -> None:
        """Begin to use partitions from ``first`` on, and let readers see them."""
        fresh = [
            self._partition(topic, number, RecoveredPartition([], segment, 0, 0, ProducerStates()))
            for number, segment in enumerate(segments, start=first)
        ]

        def show() -> None:
            self._partitions = {**self._partitions, **{one.name: one for one in fresh}}
            self._topics = {**self._topics, topic.name: topic}
            self._publish(fresh)

        self._commit.exclusively(show)  # a client may use a partition before it is published
        self._bump_catalog_version()

    def _check_files_open(self, more: int) -> None:
        """Reject partitions that would leave too few files for as many connections."""
        count = len(self._partitions) + more
        check_files_open(count, readers=count)

    def delete_topic(self, name: str) -> None:
        """Remove a topic and all its records, for good. Steps: :meth:`Catalog.mark_deleted`.

        Files that cannot be removed now are left to maintenance.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        with self._topics_lock:
            self._commit.check_open()
            topic = self._topic(name)

            def unlink() -> None:
                self._catalog.mark_deleted(topic)
                self._topics = {key: one for key, one in self._topics.items() if key != name}
                before = self._partitions
                self._partitions = {key: one for key, one in before.items() if key.topic != name}
                for number in range(len(topic.slots)):
                    with suppress(OSError):  # nothing is written to it any more
                        before[TopicPartition(name, number)].close()

            self._commit.exclusively(unlink)
            self._bump_catalog_version()
            with leaving_to_maintenance():
                remove_topic(self._files, self.folder, self._catalog, topic)

    def remove_deleted_topics(self) -> None:
        """Try again to remove the files of deleted topics.

        Raises:
            OSError, RetriableError: some of it remains.
        """
        with self._topics_lock:
            remove_deleted_topics(self._files, self.folder, self._catalog)

    def _topic(self, name: str) -> TopicMetadata:
        topic = self._topics.get(name)
        if topic is None:
            raise unknown_topic(name, self._topics)
        return topic

    def _bump_catalog_version(self) -> None:
        self._header = self._header._replace(catalog_version=self._header.catalog_version + 1)
        self._state.publish_header(self._header)
        self._signal.notify()

    # -- appending ----------------------------------------------------------------------------

    def append(
        self,
        topic: str,
        partition: int,
        batches: Sequence[EncodedBatch],
        *,
        durability: Durability = "synced",
    ) -> list[int]:
        """Append batches to one partition; return the offset of the first record of each.

        When this returns, the records are on stable storage and readers see them, unless a lower
        durability is requested (see ``group_commit``).

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition; a record has no key
                in a compacted topic.
            DiskFullError: some of the batches, from one on, were not appended. Make room, retry.
            SyncFailedError: the disk failed; open the folder again.
            ProducerFencedError, OutOfOrderSequenceError, TransactionAbortedError: see ``producers``
                and ``transactions``.
        """
        appends = [PendingAppend(TopicPartition(topic, partition), one) for one in batches]
        self.commit(appends, durability)
        for append in appends:
            if append.error is not None:
                raise append.error
        return [append.offset for append in appends]

    def commit(self, appends: Sequence[PendingAppend], durability: Durability = "synced") -> None:
        """Return when each append has its offset, or its ``error``; see ``group_commit``.

        An append to a partition that does not exist has UnknownTopicError or ConfigError, one for a topic of
        another id TopicRecreatedError.
        """
        for append in appends:
            if append.partition is None:
                try:
                    append.partition = self.partition(append.name)
                    # After the partition: of a topic deleted since, it is closed, and is not written to.
                    topic = self._topic(append.name.topic)
                    check_topic_id(topic.name, append.topic_id, topic.topic_id)
                except MillstreamError as error:
                    append.error = error
        self._commit.append([one for one in appends if one.error is None], durability)

    def partition(self, name: TopicPartition) -> Partition:
        """Return a partition. Change it only :meth:`exclusively`.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        found = self._partitions.get(name)
        if found is None:
            raise no_partition(*name, len(self._topic(name.topic).slots))
        return found

    def partitions(self) -> list[Partition]:
        """Return every partition there is now."""
        return list(self._partitions.values())

    def _admit(self, batch: EncodedBatch) -> None:
        self.transactions.admit(batch)

    # -- what transactions and maintenance need ------------------------------------------------

    def exclusively(self, action: Callable[[], None]) -> None:
        """Run ``action`` while nothing is being appended."""
        self._commit.exclusively(action)

    def sync(self) -> None:
        """Return when everything appended is durable and visible.

        Raises:
            SyncFailedError: the disk failed; open the folder again.
        """
        self._commit.sync()

    def open_partitions(self) -> dict[int, list[OpenPartition]]:
        """Return where transactions are open, by producer id."""
        found: list[dict[int, list[OpenPartition]]] = []
        self._commit.exclusively(
            lambda: found.append(open_partitions_of(self._partitions, self._topics))
        )
        return found[0]

    def append_markers(self, markers: Sequence[tuple[TopicPartition, EncodedBatch]]) -> None:
        """Append control batches; they are durable and visible when this returns.

        Those of partitions that were deleted meanwhile are left out.

        Raises:
            DiskFullError: some were not appended; appending all of them again does no harm.
            SyncFailedError: the disk failed; open the folder again.
        """
        there = self._partitions
        appends = [PendingAppend(name, one, there[name]) for name, one in markers if name in there]
        self.commit(appends)
        for append in appends:
            if append.error is not None and not there[append.name].closed:
                raise append.error

    def topic_ids(self, names: Sequence[str]) -> dict[str, str]:
        """Return the ids of topics.

        Raises:
            UnknownTopicError: one of them does not exist.
        """
        return {name: self._topic(name).topic_id for name in names}

    def commit_offsets(self, group: str, offsets: Offsets) -> None:
        """Commit offsets of a group; durable when this returns.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition, or an offset is
                not possible; nothing was committed.
        """
        check_offsets(group, offsets)
        for name in offsets:
            self.partition(name)
        topic_ids = self.topic_ids(sorted({name.topic for name in offsets}))
        with self.control.commit() as connection:
            put_offsets(connection, group, offsets, topic_ids=topic_ids, now_ms=self._clock_ms())

    def delete_records(self, name: TopicPartition, before_offset: int) -> int:
        """Delete the records below ``before_offset``; return the log start. Durable on return.

        1. Publish the log start, and sync state.mm. A crash leaves segments below the log start:
           recovery removes them.
        2. Remove the segments that are below it; what cannot be removed is left to maintenance.

        Raises:
            OffsetOutOfRangeError: the offset is above the high watermark.
            UnknownTopicError, ConfigError: there is no such topic or partition.
            SyncFailedError: the disk failed; open the folder again.
        """
        partition = self.partition(name)
        partition.check_holds(before_offset)
        self.move_log_start(partition, before_offset)
        return partition.log_start

    def move_log_start(self, partition: Partition, offset: int) -> None:
        """Make ``offset`` the first that can be read; see :meth:`delete_records` for the steps."""

        def move() -> None:
            if partition.closed:
                return
            if offset > partition.log_start:
                partition.log_start = offset
                self._publish([partition])
                self._state.flush()
            try:
                partition.drop_below_start()
            except OSError as error:  # they are gone for readers; maintenance retries
                _log.warning("segments below the log start are left for later: %s", error)

        self._commit.check_open()
        self._commit.exclusively(move, synced=True)
        self._commit.check_open()

    def run_maintenance(self, now_ms: int | None = None) -> MaintenanceReport:
        """Run a pass of maintenance now; return what was done."""
        return self.maintenance.run_pass(self._clock_ms() if now_ms is None else now_ms)

    def _publish(self, partitions: Iterable[Partition]) -> None:
        published = []
        for partition in partitions:
            topic = self._topics.get(partition.name.topic)
            if topic is not None:
                slot = topic.slots[partition.name.partition]
                partition.publish(self._state, slot, topic.topic_id)
                published.append(partition.name)
        self._signal.notify(published)

    @property
    def failure(self) -> MillstreamError | None:
        """Why nothing more is accepted; None while the log works."""
        return self._commit.failure

    # -- closing ------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish running commits, mark the folder as closed cleanly, and release it.

        Raises:
            SyncFailedError: records that were acknowledged when they were written may be lost.
        """
        if not unguard(self):
            return
        self.maintenance.stop()
        try:
            self._commit.close(FencedError(f"the log {self.folder} was closed; connect again"))
        finally:
            # One that is being made is closed, too.
            with self._closing, self._topics_lock, self._commit.stopping():
                healthy = self._commit.healthy
                for partition in self._partitions.values():
                    partition.close(seal=healthy)
                if healthy:
                    self._state.publish_header(self._header._replace(flags=CLEAN, owner_pid=0))
                    self._state.flush()

    def disable_after_fork(self) -> None:
        """Refuse every call in a forked child: the log belongs to the parent."""
        self._commit.disable(
            FencedError(
                f"the log {self.folder} was opened before a fork; connect again in the child, "
                "to read, or let the parent write"
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
