"""The API of a log, at whichever address: a folder and brokers have these calls.

:func:`millstream.connect` returns one. The folder's is ``client/folder/log.py``; that of a broker, ours or
Apache Kafka, is ``client/kafka/log.py``. ``docs/log-contract.md`` lists what each promises, by number, and the differences.
Only a folder raises FolderOwnedError: a broker has many writers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

import pyarrow as pa

from millstream.client.consumer import Consumer
from millstream.client.groups import Lag
from millstream.client.producer import Producer, ProducerSettings, takes_settings
from millstream.client.reader import Reader
from millstream.client.start_position import StartPosition
from millstream.durations import Duration
from millstream.errors import ConfigError
from millstream.log.archiver import ArchiveProgress, PartitionArchive, ValueColumns
from millstream.log.decoding import COLUMNS
from millstream.log.groups import CommittedOffset, Offsets
from millstream.log.maintenance import MaintenanceReport
from millstream.log.reader import Isolation
from millstream.log.retention import RetentionRisk
from millstream.record import TopicInfo, TopicPartition


class EventLog(ABC):
    """A connection to a log; :func:`millstream.connect` makes it.

    One process owns a folder. Another one writes through the owner. When the owner ends or dies, the
    next process that writes takes the folder over: docs/log.md.

    Guarantees: thread-safe, but a consumer belongs to one thread. Close it, or use it in ``with``.
    """

    is_folder: ClassVar[bool]
    """Whether the log is in a folder of this machine, rather than behind brokers."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """The identity of this log, which differs from that of another one at the same address.

        Raises:
            FolderOwnedError: the folder's owner accepts no connections, or does not respond.
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
        """Create a topic; it is durable and visible when this returns.

        Args:
            retention: How long records are kept, by their timestamps, such as "7 days"; for ever if
                not given. They are removed by whole segments.
            retention_bytes: How many bytes of each partition are kept at least; all if not given.
            cleanup: "delete", "compact" (the last record of each key is kept) or "compact,delete".
            settings: Any others, under Kafka's names, such as {"segment.bytes": "1048576"}.
            exist_ok: Whether a topic of this name may exist already; it is left as it is.

        Raises:
            TopicExistsError: the name is taken.
            ConfigError: the name, the number of partitions or a setting is not possible.
            FolderOwnedError: the folder's owner accepts no connections, or does not respond.
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
            FolderOwnedError: the folder's owner accepts no connections, or does not respond.
        """

    @abstractmethod
    def topic_settings(self, name: str) -> dict[str, str]:
        """Return every setting of a topic, under Kafka's names.

        Raises:
            UnknownTopicError: there is no such topic.
        """

    @abstractmethod
    def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        """Delete the records of a partition below an offset; return its new start.

        Raises:
            OffsetOutOfRangeError: the offset is above the end.
            UnknownTopicError, ConfigError: there is no such topic or partition.
            FolderOwnedError: the folder's owner accepts no connections, or does not respond.
        """

    @abstractmethod
    def delete_topic(self, name: str) -> None:
        """Remove a topic and all its records, for good.

        Raises:
            UnknownTopicError: there is no such topic.
            FolderOwnedError: the folder's owner accepts no connections, or does not respond.
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

    @takes_settings(ProducerSettings)
    def producer(self, **settings: Any) -> Producer:
        """Return a producer: ``send`` one record, ``send_many`` columns; both give futures.

        Each keyword argument is described in :class:`millstream.client.producer.ProducerSettings`.

        Raises:
            ConfigError: a setting is not possible.
            FolderOwnedError: the folder's owner accepts no connections, or does not respond.
        """
        return self._make_producer(ProducerSettings(**settings))

    @abstractmethod
    def _make_producer(self, settings: ProducerSettings) -> Producer: ...

    @abstractmethod
    def fence(self, writer: str) -> int | None:
        """Return the batch id that the fence of ``writer`` is at; None if it has none.

        A fence moves with the transaction that commits a batch: see ``Producer.transaction``.
        """

    @abstractmethod
    def fences(self, prefix: str = "") -> dict[str, int]:
        """Return the batch ids of the fences of all writers whose names begin with ``prefix``."""

    @abstractmethod
    def delete_fences(self, prefix: str) -> int:
        """Delete the fences of all writers whose names begin with ``prefix``; return how many.

        For writers whose output is gone as well: they could commit their batches once more.

        Raises:
            ConfigError: the prefix is empty.
        """

    @abstractmethod
    def acquire_ownership(self) -> None:
        """Become the owner of the folder now, instead of with the first write.

        Raises:
            FolderOwnedError: another process owns the folder; writing goes through that one.
        """

    @abstractmethod
    def run_maintenance(self) -> MaintenanceReport:
        """Run a pass of maintenance now (the owner does every half minute): retention, compaction, timeouts.

        Raises:
            FolderOwnedError: the folder's owner accepts no connections, or does not respond.
            ConfigError: the log is Kafka's, whose brokers maintain it themselves.
        """

    @abstractmethod
    def on_retention_risk(self, callback: Callable[[RetentionRisk], None]) -> None:
        """Call ``callback`` when a group is about to lose records that it has not read.

        Once when the risk begins and once when records are lost, from a thread of the owner.

        Raises:
            FolderOwnedError: another process owns this folder, and watches over it.
            ConfigError: the log is Kafka's: ``lag`` reports what was lost.
        """

    @abstractmethod
    def archive(
        self,
        topic: str,
        columns: ValueColumns,
        *,
        close_active: bool = False,
        progress: ArchiveProgress | None = None,
    ) -> list[PartitionArchive]:
        """Write columnar copies beside the closed segments of a topic, where there are none yet.

        The columns of the values come from a schema: see :meth:`millstream.Topic.archive`, which calls this.
        Only the owner archives: if another process owns the folder, it hands over, and becomes a client of
        this one.

        Raises:
            UnknownTopicError: there is no such topic.
            DiskFullError: there is no room; archives made before remain.
            FolderOwnedError: the owner does not hand over: it is a broker, or at work.
        """

    # -- groups -------------------------------------------------------------------------------

    @abstractmethod
    def commit_offsets(
        self, group: str, offsets: Offsets, *, topic_ids: Mapping[str, str] | None = None
    ) -> None:
        """Store how far a group has read: the next offset of each partition. Durable on return.

        Any process on the machine may do so.

        Args:
            topic_ids: The ids of the topics that these are offsets of, by name. Without them, they
                are of the topics that have these names now.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition, or an offset is
                not possible; nothing was stored.
            TopicRecreatedError: a topic has another id.
        """

    @abstractmethod
    def committed_offsets(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        """Return what a group has committed; empty for a group that has committed nothing."""

    @abstractmethod
    def groups(self) -> list[str]:
        """Return the names of all groups that have committed something, sorted."""

    @abstractmethod
    def delete_group_offsets(self, group: str, topic: str | None = None) -> int:
        """Delete what a group has committed, of one topic or of all; return how many offsets."""

    @abstractmethod
    def lag(self, group: str | None = None) -> list[Lag]:
        """Return the lag of groups, by group, topic and partition.

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
        start: StartPosition = "earliest",
        commit: Literal["auto", "manual"] = "auto",
        follow: bool = True,
        partitions: Sequence[int] | None = None,
        isolation: Isolation = "read_committed",
        topic_id: str | None = None,
    ) -> Consumer:
        """Return an iterator over the records of a topic, in offset order within each partition.

        Args:
            group: Continue where this group has committed, and commit for it.
            start: Where to begin (in a group: where it has committed nothing): the first or next
                record; a time (the first record at it or later); or offsets by partition (only
                these partitions are read).
            commit: "auto": a record counts as read when the next one is requested, or the consumer
                is closed; committed every second and when it is closed. "manual": only
                ``consumer.commit()``.
            follow: Wait for more at the end; otherwise stop at the end seen by this call.
            partitions: Read these only.
            isolation: "read_committed" gives nothing of a transaction that is open or was aborted.
            topic_id: Of the topic that offsets given as ``start`` belong to, where you keep them: a
                consumer has it as ``topic_id``.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic, partition or start.
            OffsetOutOfRangeError: the start, or committed, offset is gone or not yet there.
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
            columns: Of offset, timestamp, key, value, headers; others are not decoded.
            isolation: "read_committed" gives nothing of a transaction that is open or was aborted.

        Raises:
            OffsetOutOfRangeError: some of [start, end) is gone or not committed.
            CorruptBatchError: some of [start, end) is damaged; the error has the offsets.
            UnknownTopicError, ConfigError: there is no such topic, partition or column.
        """

    @abstractmethod
    def reader(
        self, topic_ids: Mapping[str, str], *, isolation: Isolation = "read_committed"
    ) -> Reader:
        """Return what reads ranges of these topics, by name and id, and refuses another topic of the name.

        Raises:
            FencedError: the log was closed.
        """

    # -- closing ------------------------------------------------------------------------------

    @abstractmethod
    def close(self) -> None:
        """Flush and close producers, stop consumers, release the folder.

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


def check_prefix(prefix: str) -> str:
    """Return the prefix of the writers whose fences are to be deleted.

    Raises:
        ConfigError: it is empty, and would mean all of them.
    """
    if not prefix:
        raise ConfigError("the prefix is empty, and would delete every fence; name the writers")
    return prefix
