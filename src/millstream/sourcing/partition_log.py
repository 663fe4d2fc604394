"""One partition of the event topic, as a lane needs it: read to the end, append only if nothing came since.

The whole of event sourcing rests on one promise: an :class:`Append` puts its events behind exactly the events that
the caller has read, or appends nothing. Of two writers who decide at once, one is refused, reads on and
decides again. A folder compares the end in its one owner (``folder_partition``); brokers cannot compare, so
there one writer at a time has the partition (``kafka_partition``).

Where a writer may stop for good, and what is there then:

===============================================  ====================================================
it stops                                         then
===============================================  ====================================================
before the append                                nothing was appended; the command was never handled
in the append, before the batch is whole         recovery cuts it (folder); the transaction is aborted
                                                 by the next writer, and readers skip it (brokers)
in the append, once the batch is whole           all events of all its commands are there; a command sent
                                                 again with its id finds its events
after the append, before the index has it        the index is behind; the next writer reads on from where
                                                 the index is
in a flush of the index                          SQLite's transaction: the index is as before or as after
===============================================  ====================================================

A batch is never divided, so the events of a command are all there or none is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from millstream.errors import CorruptionError, MillstreamError
from millstream.log.compaction.offset_map import numbers
from millstream.log.encoding import SimpleRecord
from millstream.log.varint import Int64s
from millstream.sourcing.stored_event import RawEvent, decode_events
from millstream.sourcing.stream_index import EventRun

COLUMNS = ("offset", "timestamp", "value")


class PartitionLog(Protocol):
    """One partition of the topic."""

    topic: str
    topic_id: str
    partition: int

    @property
    def exclusive(self) -> bool:
        """Whether nobody else can append, so that there is nothing to read before each append."""

    def acquire(self) -> bool:
        """Become the one who may append, where there is only one; return whether that is new.

        Raises:
            TopicRecreatedError: the topic was deleted and made anew; every call raises it.
            MillstreamError: no broker responds.
        """

    def bounds(self) -> tuple[int, int]:
        """Return ``[start, end)``: what can be read now."""

    def read(self, start: int, end: int, runs: Sequence[EventRun] = ()) -> Iterator[RawEvent]:
        """Yield the events with offsets in [start, end); with ``runs``, only those in them. Any thread.

        Raises:
            OffsetOutOfRangeError: some of them are gone.
            CorruptionError: a record is no event.
        """

    def close(self) -> None:
        """Release the partition."""


class Append(NamedTuple):
    """Records to append to a partition as one: all of them at ``expected_end``, or none."""

    log: PartitionLog
    records: Sequence[SimpleRecord]
    expected_end: int


AppendAll = Callable[[Sequence[Append]], Sequence[int | MillstreamError]]
"""Makes appends to different partitions in one step; one thread at a time.

Returns for each the offset of its first record, or what it came to:

- EndMovedError: the partition does not end there; nothing was appended.
- FencedError: another writer has the partition now; nothing was appended.
- TopicRecreatedError: the topic was deleted and made anew; nothing was appended.
- another MillstreamError, which may be raised, too: they may have been appended.
"""


def events_deleted(log: PartitionLog, start: int, end: int) -> CorruptionError:
    """Return the error of events that were deleted before they were read: a fold without them is another one."""
    return CorruptionError(
        f"the events at offsets [{start}, {end}) of {log.topic}/{log.partition} were deleted from the topic, and were "
        "not read before. Restore the topic from a backup"
    )


def events_of(
    topic: str,
    partition: int,
    batches: Iterable[pa.RecordBatch],
    runs: Sequence[EventRun] = (),
) -> Iterator[RawEvent]:
    """Yield the events of Arrow batches with ``COLUMNS``; with ``runs``, which must be in order, only those in them."""
    firsts = np.array([run.first_offset for run in runs], np.int64)
    ends = np.array([run.first_offset + run.length for run in runs], np.int64)
    for batch in batches:
        offsets = numbers(batch.column(0), np.int64)
        if runs:
            # What lies between is skipped here, before it costs anything.
            at = np.searchsorted(firsts, offsets, "right") - 1
            inside = (at >= 0) & (offsets < ends[at])
            if not inside.all():
                batch = batch.take(_as_array(np.flatnonzero(inside)))  # noqa: PLW2901
        yield from decode_events(
            topic,
            partition,
            numbers(batch.column(0), np.int64).tolist(),
            numbers(batch.column(1), np.int64).tolist(),
            batch.column(2).to_pylist(),
        )


def _as_array(rows: Int64s) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(rows)])
