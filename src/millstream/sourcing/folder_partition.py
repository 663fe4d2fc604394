"""A partition of a log in a folder: the owner of the folder compares the end before it appends.

Any number of threads and processes may write. The comparison is in the owner's group commit, under the lock
that orders all appends, so it and the append are one step. A client of the owner sends it along; a
request that is sent again after its response was lost finds its batch, as each batch has a producer and a
sequence. The topic's id is compared as the end is: a topic that was made anew meanwhile may end at the same offset.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from millstream.client.folder.log import FolderLog
from millstream.errors import MillstreamError
from millstream.log.encoding import encode_records
from millstream.log.group_commit import PendingAppend
from millstream.log.reader import LogReader
from millstream.record import TopicPartition
from millstream.sourcing.partition_log import COLUMNS, Append, events_of
from millstream.sourcing.stored_event import RawEvent
from millstream.sourcing.stream_index import EventRun


class FolderAppender:
    """Appends to partitions of a log in a folder; those of one step share a sync. One thread at a time."""

    def __init__(self, log: FolderLog) -> None:
        self._writer = log.batch_writer()

    def append_all(self, appends: Sequence[Append]) -> list[int | MillstreamError]:
        """Make appends in one step; see ``partition_log``."""
        pending = [
            PendingAppend(
                TopicPartition(one.log.topic, one.log.partition),
                encode_records(one.records),
                expected_end=one.expected_end,
                topic_id=one.log.topic_id,
            )
            for one in appends
        ]
        self._writer.commit(pending)
        return [one.offset if one.error is None else one.error for one in pending]

    def close(self) -> None:
        """Close the connection to the owner, if there is one."""
        self._writer.close()


class FolderPartition:
    """One partition of a topic in a folder; see ``PartitionLog``."""

    exclusive = False

    def __init__(self, log: FolderLog, topic: str, partition: int, topic_id: str) -> None:
        self.topic, self.topic_id, self.partition = topic, topic_id, partition
        self._log = log
        self._readers = threading.local()  # a reader belongs to one thread

    def acquire(self) -> bool:
        return False  # everybody may append

    def bounds(self) -> tuple[int, int]:
        return self._reader().bounds(self.topic, self.partition)

    def read(self, start: int, end: int, runs: Sequence[EventRun] = ()) -> Iterator[RawEvent]:
        batches = self._reader().read(self.topic, self.partition, start, end, columns=COLUMNS)
        return events_of(self.topic, self.partition, batches, runs)

    def close(self) -> None:
        """Do nothing: files are read without holding them."""

    def _reader(self) -> LogReader:
        reader = getattr(self._readers, "reader", None)
        if reader is None:
            reader = self._log.reader({self.topic: self.topic_id})
            self._readers.reader = reader
        return reader
