"""The owner's face of the log: opens a folder for writing, recovers it, appends, makes topics.

One :class:`LogWriter` per folder on the whole machine (see ``owner``). An append returns when the
records are on stable storage and visible to every reader. For reading see ``reader``.
"""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from millstream.errors import (
    ConfigError,
    CorruptionError,
    DiskFullError,
    FencedError,
    MillstreamError,
    TopicExistsError,
)
from millstream.log.batch import EncodedBatch
from millstream.log.files import DISK, Files, replace_file
from millstream.log.group_commit import GroupCommit, PendingAppend
from millstream.log.index import SEGMENT_BYTES_LIMIT
from millstream.log.owner import FolderLock, make_format
from millstream.log.partition import Partition
from millstream.log.recovery import DurableEnd, Recovery
from millstream.log.segment import SEGMENT_BYTES_MAX, Segment, segment_offsets
from millstream.log.signal import signal_of
from millstream.log.state_file import (
    CLEAN,
    FolderState,
    StateFile,
    check_same_folder,
)
from millstream.log.topics import (
    Catalog,
    Topic,
    check_topic_name,
    partition_folder,
    unknown_topic,
)
from millstream.record import TopicInfo, TopicPartition

NEEDS_VERIFY = "NEEDS_VERIFY"
_open_writers: weakref.WeakSet[LogWriter] = weakref.WeakSet()


class LogWriter:
    """The one writer of a log folder. Thread-safe; unusable in a forked child.

    Args:
        folder: Made if it is missing.
        segment_bytes_max: A segment is closed before it grows past this; at most 4 GiB.
        files: The file system; only tests give another one.
        catalog: The list of topics; only tests give another one.
        sync_threads: How many partitions are synced at the same time.

    Raises:
        FolderOwnedError: another process writes to this folder.
        CorruptionError: acknowledged records are damaged; nothing was changed. See ``recovery``.
        ConfigError: the folder is of another format version, or parts of two folders were mixed.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        segment_bytes_max: int = SEGMENT_BYTES_MAX,
        files: Files = DISK,
        catalog: Catalog | None = None,
        sync_threads: int = 4,
    ) -> None:
        if not 0 < segment_bytes_max <= SEGMENT_BYTES_LIMIT:
            raise ConfigError(
                f"segment_bytes_max is {segment_bytes_max}; give 1 to {SEGMENT_BYTES_LIMIT} bytes"
            )
        self.folder = Path(folder)
        self._files = files
        self._segment_bytes_max = segment_bytes_max
        self._topics_lock = threading.Lock()
        self._closing = ExitStack()
        with ExitStack() as undo, _opening(self.folder):
            files.make_folder(self.folder)
            lock = FolderLock(self.folder, files)
            undo.callback(lock.release)
            directory_id = make_format(self.folder, files)
            self._state = StateFile(self.folder, files, write=True)
            undo.callback(self._state.close)
            self._catalog = catalog or Catalog.open(self.folder, write=True)
            if catalog is None:
                undo.callback(self._catalog.close)
            self._signal = signal_of(self.folder)
            undo.enter_context(self._signal.owned())
            self._take_over(directory_id, sync_threads)
            self._closing = undo.pop_all()
        _open_writers.add(self)

    # -- opening ------------------------------------------------------------------------------

    def _take_over(self, directory_id: str, sync_threads: int) -> None:
        """Recover every partition, and only then become visible as the owner."""
        before = self._state.header()
        if before is not None:
            check_same_folder(before, directory_id, self.folder)
        boot_id = self._files.boot_id()
        exact = before is not None and boot_id == before.boot_id and any(boot_id)
        self._topics = self._catalog.topics()
        self._remove_leftovers()
        clean = before is not None and bool(before.flags & CLEAN)
        verify = self._files.exists(self.folder / NEEDS_VERIFY)
        recovery = Recovery(self._files, self.folder / "quarantine", clean=clean, verify=verify)
        self._partitions: dict[TopicPartition, Partition] = {}
        for topic in self._topics.values():
            for number in range(len(topic.slots)):
                self._recover(recovery, topic, number, exact=exact)
        leader_epoch = self._catalog.next_leader_epoch()
        self._header = FolderState(
            directory_id=bytes.fromhex(directory_id),
            boot_id=boot_id,
            owner_pid=os.getpid(),
            leader_epoch=leader_epoch,
            flags=0,
            catalog_version=(before.catalog_version if before else 0) + 1,
        )
        # 1. The partitions were recovered and synced; 2. their state and the header are published;
        # 3. state.mm is synced; 4. the mark is removed. A crash before 4 means verifying again.
        self._publish(self._partitions.values())
        self._state.publish_header(self._header)
        self._state.flush()
        if verify:
            self._files.remove(self.folder / NEEDS_VERIFY)
            self._files.sync_folder(self.folder)
        self._commit = GroupCommit(
            leader_epoch=leader_epoch,
            publish=self._publish,
            stop=self._mark_needs_verify,
            sync_threads=sync_threads,
        )

    def _recover(self, recovery: Recovery, topic: Topic, number: int, *, exact: bool) -> None:
        state = self._state.partition(topic.slots[number], topic.topic_id, number)
        if state is None:
            folder = partition_folder(self.folder, topic, number)
            bases = segment_offsets(self._files.names(folder))
            durable = DurableEnd(0, bases[-1] if bases else 0, published=False, exact=False)
        else:
            durable = DurableEnd(state.log_start, state.high_watermark, published=True, exact=exact)
        folder = partition_folder(self.folder, topic, number)
        found = recovery.partition(folder, durable)
        self._add_partition(topic, number, found.active, found.log_start, found.log_end_offset)

    def _add_partition(
        self, topic: Topic, number: int, active: Segment, log_start: int, end: int
    ) -> None:
        name = TopicPartition(topic.name, number)
        self._partitions[name] = Partition(
            self._files,
            partition_folder(self.folder, topic, number),
            name,
            active=active,
            log_start=log_start,
            log_end_offset=end,
            segment_bytes_max=self._segment_bytes_max,
        )

    def _remove_leftovers(self) -> None:
        """Finish deletions, and remove folders of topics that were never quite created.

        Raises:
            CorruptionError: a folder that no topic owns holds records; it is not touched.
        """
        for topic in self._catalog.deleted_topics().values():
            self._remove_topic(topic)
        known = {topic.folder_name for topic in self._topics.values()}
        for name in self._files.names(self.folder / "t"):
            if name in known:
                continue
            folder = self.folder / "t" / name
            if self._holds_records(folder):
                raise CorruptionError(
                    f"{folder} holds records, but control.db knows no such topic; restore "
                    "control.db from a backup, or move this folder away"
                )
            self._files.remove_folder(folder)

    def _holds_records(self, folder: Path) -> bool:
        for partition in self._files.names(folder):
            for name in self._files.names(folder / partition):
                handle = self._files.open(folder / partition / name)
                try:
                    if self._files.size(handle):
                        return True
                finally:
                    self._files.close(handle)
        return False

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
        self, name: str, *, partitions: int = 1, config: Mapping[str, str] | None = None
    ) -> TopicInfo:
        """Make a topic; when this returns it survives the loss of power.

        1. Make the folders and an empty segment in each, and sync all folders up to the log's. A
           crash leaves folders that no topic owns and that hold nothing: the next owner removes
           them.
        2. Commit the topic to control.db. A crash leaves a whole topic that readers do not see
           yet: the next owner publishes it.
        3. Publish its partitions, then the new catalog version, in state.mm.

        Raises:
            TopicExistsError: the name is taken.
            ConfigError: the name or the number of partitions is not possible.
        """
        check_topic_name(name)
        if partitions < 1:
            raise ConfigError(f"a topic of {partitions} partitions is not possible; give 1 or more")
        self._check_usable()
        with self._topics_lock:
            if name in self._topics:
                raise TopicExistsError(
                    f"there is a topic {name!r} already; use it, or choose another name"
                )
            slots = self._catalog.free_slots(partitions)
            topic = Topic(name, uuid.uuid4().hex, slots, dict(config or {}))
            try:
                segments = self._make_topic_folders(topic)
            except OSError as error:
                raise DiskFullError(
                    f"topic {name!r} could not be made in {self.folder}: {error}; what there is of "
                    "it is removed at the next opening. Make room on the disk, then try again"
                ) from error
            self._catalog.insert(topic)
            for number, segment in enumerate(segments):
                self._add_partition(topic, number, segment, 0, 0)
            self._topics[name] = topic
            self._publish(
                self._partitions[TopicPartition(name, number)] for number in range(partitions)
            )
            self._bump_catalog_version()
        return topic.info

    def delete_topic(self, name: str) -> None:
        """Remove a topic and all its records, for good. Steps: :meth:`Catalog.mark_deleted`.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        self._check_usable()
        with self._topics_lock:
            topic = self._topic(name)

            def unlink() -> None:
                self._catalog.mark_deleted(topic)
                del self._topics[name]
                for number in range(len(topic.slots)):
                    self._partitions.pop(TopicPartition(name, number)).close()

            self._commit.exclusively(unlink)
            self._bump_catalog_version()
            self._remove_topic(topic)

    def _make_topic_folders(self, topic: Topic) -> list[Segment]:
        segments = []
        for number in range(len(topic.slots)):
            folder = partition_folder(self.folder, topic, number)
            self._files.make_folder(folder)
            segments.append(Segment.create(self._files, folder, 0))
        self._files.sync_folder(self.folder / "t" / topic.folder_name)
        self._files.sync_folder(self.folder / "t")
        self._files.sync_folder(self.folder)
        return segments

    def _remove_topic(self, topic: Topic) -> None:
        self._files.remove_folder(self.folder / "t" / topic.folder_name)
        self._catalog.forget(topic.topic_id)

    def _topic(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            raise unknown_topic(name, self._topics)
        return topic

    def _bump_catalog_version(self) -> None:
        self._header = self._header._replace(catalog_version=self._header.catalog_version + 1)
        self._state.publish_header(self._header)
        self._signal.notify()

    # -- appending ----------------------------------------------------------------------------

    def append(self, topic: str, partition: int, batches: Sequence[EncodedBatch]) -> list[int]:
        """Append batches to one partition; return the offset of the first record of each.

        When this returns, the records are on stable storage and readers see them.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
            DiskFullError: some of the batches, from one on, were not appended. Make room, retry.
            SyncFailedError: the disk failed; open the folder again.
        """
        appends = [self.pending(topic, partition, batch) for batch in batches]
        self.commit(appends)
        for append in appends:
            if append.error is not None:
                raise append.error
        return [append.offset for append in appends]

    def pending(self, topic: str, partition: int, batch: EncodedBatch) -> PendingAppend:
        """Return an append to hand to :meth:`commit`, together with others.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        found = self._partitions.get(TopicPartition(topic, partition))
        if found is None:
            count = len(self._topic(topic).slots)
            raise ConfigError(
                f"topic {topic!r} has no partition {partition}; choose one of 0 to {count - 1}"
            )
        return PendingAppend(found, batch)

    def commit(self, appends: Sequence[PendingAppend]) -> None:
        """Return when each append has its offset, or its ``error``; see ``group_commit``."""
        self._commit.append(appends)

    def _publish(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            topic = self._topics.get(partition.name.topic)
            if topic is not None:
                slot = topic.slots[partition.name.partition]
                partition.publish(self._state, slot, topic.topic_id)
        self._signal.notify()

    def _mark_needs_verify(self, error: MillstreamError) -> None:
        try:
            replace_file(self._files, self.folder / NEEDS_VERIFY, f"{error}\n".encode())
        except OSError as second:
            error.add_note(f"and {NEEDS_VERIFY} could not be written: {second}")

    def _check_usable(self) -> None:
        if self._commit.failure is not None:
            raise self._commit.failure

    # -- closing ------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what is being committed, mark the folder as closed cleanly, let the next in."""
        if self in _open_writers:
            _open_writers.discard(self)
            healthy = self._commit.failure is None
            self._commit.close(FencedError(f"the log {self.folder} was closed; connect again"))
            for partition in self._partitions.values():
                partition.close()
            if healthy:
                self._state.publish_header(self._header._replace(flags=CLEAN, owner_pid=0))
                self._state.flush()
            self._closing.close()

    def disable_after_fork(self) -> None:
        """Refuse everything in a forked child: the log belongs to the parent."""
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


@contextmanager
def _opening(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the log {folder} cannot be opened for writing: {error}; check the folder's rights "
            "and the disk, then open it again"
        ) from error


def _disable_in_child() -> None:
    for writer in list(_open_writers):
        writer.disable_after_fork()
    _open_writers.clear()


os.register_at_fork(after_in_child=_disable_in_child)
