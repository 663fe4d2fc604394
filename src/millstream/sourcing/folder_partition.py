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
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.group_commit import PendingAppend
from millstream.log.reader import LogReader
from millstream.record import TopicPartition
from millstream.sourcing.partition_log import COLUMNS, events_of
from millstream.sourcing.stored_event import RawEvent
from millstream.sourcing.stream_index import EventRun


class FolderPartition:
    """One partition of a topic in a folder; see ``PartitionLog``."""

    exclusive = False

    def __init__(self, log: FolderLog, topic: str, partition: int, topic_id: str) -> None:
        self.topic, self.partition = topic, partition
        self._log = log
        self._topic_id = topic_id
        self._writer = log.batch_writer()
        self._readers = threading.local()  # a reader belongs to one thread

    def acquire(self) -> bool:
        return False  # everybody may append

    def bounds(self) -> tuple[int, int]:
        return self._reader().bounds(self.topic, self.partition)

    def read(self, start: int, end: int, runs: Sequence[EventRun] = ()) -> Iterator[RawEvent]:
        batches = self._reader().read(self.topic, self.partition, start, end, columns=COLUMNS)
        return events_of(self.topic, self.partition, batches, runs)

    def append(self, records: Sequence[SimpleRecord], expected_end: int) -> int:
        name = TopicPartition(self.topic, self.partition)
        batch = encode_records(records)
        append = PendingAppend(name, batch, expected_end=expected_end, topic_id=self._topic_id)
        self._writer.commit([append])
        if append.error is not None:
            raise append.error
        return append.offset

    def close(self) -> None:
        self._writer.close()

    def _reader(self) -> LogReader:
        reader = getattr(self._readers, "reader", None)
        if reader is None:
            reader = self._log.reader({self.topic: self._topic_id})
            self._readers.reader = reader
        return reader
