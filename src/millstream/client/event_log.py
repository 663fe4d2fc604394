"""What every log can do, whichever address leads to it: the face of a folder and of Kafka.

:func:`millstream.connect` returns one. The folder's is ``embedded``; that of a broker, ours or Apache
Kafka, is ``kafka``. What each promises is in ``docs/log-contract.md``, by number, with what differs.
FolderOwnedError is of folders: a broker has many writers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

import pyarrow as pa

from millstream.client.consumer import Consumer, Start
from millstream.client.groups import Lag
from millstream.client.producer import BUFFER_BYTES_MAX, LINGER_MS, Overload, Producer
from millstream.durations import Duration
from millstream.errors import ConfigError
from millstream.log.archiving import PartitionArchive, ValueColumns
from millstream.log.archiving import Progress as ArchiveProgress
from millstream.log.compression import CompressionName
from millstream.log.decoding import COLUMNS
from millstream.log.group_commit import Durability
from millstream.log.groups import CommittedOffset, Offsets
from millstream.log.housekeeping import KeepingReport
from millstream.log.reader import Isolation
from millstream.log.retention import RetentionRisk
from millstream.record import TopicInfo, TopicPartition

if TYPE_CHECKING:
    from millstream.client.kafka.producer import KafkaProducer

LogProducer: TypeAlias = "Producer | KafkaProducer"


class EventLog(ABC):
    """A connection to a log; :func:`millstream.connect` makes it.

    Of a folder, one process is the owner. What another one writes goes through the owner, and when that
    ends or dies, the next that writes takes the folder over: docs/log.md.

    Guarantees: thread-safe, but a consumer belongs to one thread. Close it, or use it in ``with``.
    """

    @property
    @abstractmethod
    def identity(self) -> str:
        """What tells this log from one that was put in its place.

        Raises:
            FolderOwnedError: the folder's owner lets nobody join it, or does not answer.
        """

    # -- topics -------------------------------------------------------------------------------

    @abstractmethod
    def create_topic(
        self,
        name: str,
        *,
        partitions: int = 1,
        retention: Duration | None = None,
        retention_bytes: int | None = None,
        cleanup: str = "delete",
        settings: Mapping[str, str] | None = None,
        exist_ok: bool = False,
    ) -> TopicInfo:
        """Make a topic; it is durable and visible when this returns.

        Args:
            retention: How long records are kept, by their timestamps, such as "7 days"; for ever if
                not given. They are removed by whole segments.
            retention_bytes: How many bytes of each partition are kept at least; all if not given.
            cleanup: "delete", "compact" (the last record of each key is kept) or "compact,delete".
            settings: Any others, under Kafka's names, such as {"segment.bytes": "1048576"}.
            exist_ok: Whether a topic of this name may be there already; it is left as it is.

        Raises:
            TopicExistsError: the name is taken.
            ConfigError: the name, the number of partitions or a setting is not possible.
            FolderOwnedError: the folder's owner lets nobody join it, or does not answer.
        """

    @abstractmethod
    def alter_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        settings: Mapping[str, str | None] | None = None,
    ) -> TopicInfo:
        """Add partitions to a topic, or change its settings (None: back to the default).

        Records stay where they are: with more partitions, a key may go to another one from now on.

        Raises:
            UnknownTopicError: there is no such topic.
            ConfigError: a setting is not possible, or there would be fewer partitions.
            FolderOwnedError: the folder's owner lets nobody join it, or does not answer.
        """

    @abstractmethod
    def topic_settings(self, name: str) -> dict[str, str]:
        """Return every setting of a topic, under Kafka's names.

        Raises:
            UnknownTopicError: there is no such topic.
        """

    @abstractmethod
    def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        """Give up the records of a partition below an offset; return where it begins now.

        Raises:
            OffsetOutOfRangeError: the offset is above the end.
            UnknownTopicError, ConfigError: there is no such topic or partition.
            FolderOwnedError: the folder's owner lets nobody join it, or does not answer.
        """

    @abstractmethod
    def delete_topic(self, name: str) -> None:
        """Remove a topic and all its records, for good.

        Raises:
            UnknownTopicError: there is no such topic.
            FolderOwnedError: the folder's owner lets nobody join it, or does not answer.
        """

    @abstractmethod
    def topics(self) -> dict[str, TopicInfo]:
        """Return the topics by name; empty for a folder that does not exist yet."""

    @abstractmethod
    def offsets(self, topic: str) -> list[tuple[int, int]]:
        """Return for each partition ``[log start, end)``: what can be read now.

        Raises:
            UnknownTopicError: there is no such topic.
        """

    def end_offsets(self, topic: str) -> list[int]:
        """Return for each partition the offset after the last record that can be read.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        return [end for _, end in self.offsets(topic)]

    @abstractmethod
    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """Return the first offset with this timestamp or a later one; the end if there is none.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """

    # -- writing ------------------------------------------------------------------------------

    @abstractmethod
    def producer(
        self,
        *,
        linger_ms: float = LINGER_MS,
        compression: CompressionName = "none",
        durability: Durability = "synced",
        overload: Overload = "block",
        buffer_bytes: int = BUFFER_BYTES_MAX,
        block_timeout: Duration = "1 minute",
        transactional_id: str | None = None,
        transaction_timeout: Duration = "1 minute",
        name: str | None = None,
    ) -> LogProducer:
        """Return a producer: ``send`` one record, ``send_many`` columns; both give futures.

        Args:
            linger_ms: How long a record may wait for others to share its batch.
            compression: "none", "gzip", "snappy", "lz4" or "zstd", for whole batches.
            durability: When a record is acknowledged. "synced": it is on stable storage. "written":
                it survives the process, not the loss of power. "periodic": the same, with fewer
                syncs. Readers see records only when they are synced.
            overload: What gives way when more than ``buffer_bytes`` wait. "block": ``send`` waits,
                up to ``block_timeout``. "drop_newest", "drop_oldest": records are dropped, counted,
                and their futures fail. "spill": records wait on disk, in order; needs ``name``.
            transactional_id: For ``producer.transaction()``. A producer with the same id that is
                still about is fenced off.
            transaction_timeout: A transaction that is open for longer is aborted.
            name: Under which records that were spilled are found again after a restart.

        Raises:
            ConfigError: a setting is not possible.
            FolderOwnedError: the folder's owner lets nobody join it, or does not answer.
        """

    @abstractmethod
    def fence(self, writer: str) -> int | None:
        """Return the batch id at which the fence of ``writer`` stands; None if it has none.

        A fence moves with the transaction that commits a batch: see ``Producer.transaction``.
        """

    @abstractmethod
    def fences(self, prefix: str = "") -> dict[str, int]:
        """Return the batch ids at which fences stand, of the writers whose names begin so."""

    @abstractmethod
    def forget_fences(self, prefix: str) -> int:
        """Forget the fences of the writers whose names begin so; return how many.

        For writers whose output is gone as well: they could commit their batches once more.

        Raises:
            ConfigError: the prefix is empty.
        """

    @abstractmethod
    def own(self) -> None:
        """Become the owner of the folder now, instead of with the first write.

        Raises:
            FolderOwnedError: another process owns the folder; writing goes through that one.
        """

    @abstractmethod
    def keep_house(self) -> KeepingReport:
        """Do now what the owner does every half minute: retention, compaction, timeouts.

        Raises:
            FolderOwnedError: the folder's owner lets nobody join it, or does not answer.
            ConfigError: the log is Kafka's, whose brokers keep house themselves.
        """

    @abstractmethod
    def on_retention_risk(self, callback: Callable[[RetentionRisk], None]) -> None:
        """Call ``callback`` when a group is about to lose records that it has not read.

        Once when the risk begins and once when records are lost, from a thread of the owner.

        Raises:
            FolderOwnedError: another process owns this folder, and watches over it.
            ConfigError: the log is Kafka's: ``lag`` tells what was lost.
        """

    @abstractmethod
    def archive(
        self,
        topic: str,
        columns: ValueColumns,
        *,
        roll: bool = False,
        progress: ArchiveProgress | None = None,
    ) -> list[PartitionArchive]:
        """Lay columnar copies beside the closed segments of a topic, where there are none yet.

        What is to be said of the values' columns only a schema knows: see
        :meth:`millstream.Topic.archive`, which calls this.

        Only the owner can: another process is asked to give the folder up, and joins this one.

        Raises:
            UnknownTopicError: there is no such topic.
            DiskFullError: there is no room; what is archived stays so.
            FolderOwnedError: the owner does not give the folder up: it is a broker, or at work.
        """

    # -- groups -------------------------------------------------------------------------------

    @abstractmethod
    def commit_offsets(
        self, group: str, offsets: Offsets, *, topic_ids: Mapping[str, str] | None = None
    ) -> None:
        """Note how far a group has read: the next offset of each partition. Durable on return.

        Any process on the machine may do so.

        Args:
            topic_ids: The ids of the topics that these are offsets of, by name. Without them, they
                are of the topics that have these names now.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition, or an offset is
                not possible; nothing was noted.
            TopicRecreatedError: a topic has another id.
        """

    @abstractmethod
    def committed_offsets(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        """Return what a group has committed; empty for a group that has committed nothing."""

    @abstractmethod
    def groups(self) -> list[str]:
        """Return the names of all groups that have committed something, sorted."""

    @abstractmethod
    def forget_group(self, group: str, topic: str | None = None) -> int:
        """Forget what a group has committed, of one topic or of all; return how many offsets."""

    @abstractmethod
    def lag(self, group: str | None = None) -> list[Lag]:
        """Return how far groups are behind, by group, topic and partition.

        Args:
            group: One group; all of them if not given.
        """

    # -- reading ------------------------------------------------------------------------------

    @abstractmethod
    def consumer(
        self,
        topic: str,
        *,
        group: str | None = None,
        start: Start = "earliest",
        commit: Literal["auto", "manual"] = "auto",
        follow: bool = True,
        partitions: Sequence[int] | None = None,
        isolation: Isolation = "read_committed",
        topic_id: str | None = None,
    ) -> Consumer:
        """Return an iterator over the records of a topic, in offset order within each partition.

        Args:
            group: Go on where this group has committed, and commit for it.
            start: Where to begin (in a group: where it has committed nothing): the first or next
                record; a time (the first record at it or later); or offsets by partition (only
                these partitions are read).
            commit: "auto": a record counts as read when the next one is asked for, or the consumer
                is closed; committed every second and when it is closed. "manual": only
                ``consumer.commit()``.
            follow: Wait for more at the end; otherwise stop at the end seen by this call.
            partitions: Read these only.
            isolation: "read_committed" gives nothing of a transaction that is open or was aborted.
            topic_id: Of the topic that offsets given as ``start`` belong to, where you keep them: a
                consumer has it as ``topic_id``.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic, partition or start.
            OffsetOutOfRangeError: the offset asked for, or committed, is gone or not yet there.
            TopicRecreatedError: the topic was deleted and created again; from the iterator, too.
        """

    @abstractmethod
    def read(
        self,
        topic: str,
        partition: int,
        start: int | None = None,
        end: int | None = None,
        *,
        columns: Sequence[str] = COLUMNS,
        isolation: Isolation = "read_committed",
    ) -> pa.Table:
        """Return the records with offsets in [start, end) of one partition as an Arrow table.

        Offsets without a record (markers of transactions, aborted records, what compaction removed)
        are left out.

        Args:
            start: Where the partition begins if not given.
            end: Where it ends if not given.
            columns: Of offset, timestamp, key, value, headers; what is not asked for is not decoded.
            isolation: "read_committed" gives nothing of a transaction that is open or was aborted.

        Raises:
            OffsetOutOfRangeError: some of [start, end) is gone or not committed.
            CorruptBatchError: some of [start, end) is damaged; the error has the offsets.
            UnknownTopicError, ConfigError: there is no such topic, partition or column.
        """

    # -- closing ------------------------------------------------------------------------------

    @abstractmethod
    def close(self) -> None:
        """Send what producers still hold, stop consumers, give up the folder.

        Raises:
            MillstreamError: records that a producer held could not be sent.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def checked_prefix(prefix: str) -> str:
    """Return what the names of writers begin with, whose fences are to be forgotten.

    Raises:
        ConfigError: it is empty, and would mean all of them.
    """
    if not prefix:
        raise ConfigError("the prefix is empty, and would forget every fence; name the writers")
    return prefix
