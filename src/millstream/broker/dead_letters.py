"""Copies of records that a share group gives up, in its dead-letter topic.

1. A transaction is opened, and the copies are appended. A crash leaves a transaction without a decision,
   and the records doomed as they were: it is aborted, and all is done again.
2. One commit of control.db holds the decision and the records as archived. *This is the moment at which
   they are given up.* A crash leaves both, without markers: the next owner appends them.
3. Markers are appended, and readers of committed records see the copies.

A copy has the key, value, timestamp and headers of its record, and headers that tell where it came from
and why. Of a record that retention has removed meanwhile there is nothing to copy. For one that the topic
has no room for with these headers they go alone, and say so: the others are not to wait for it for ever.

Source: KIP-1191 for the names of the headers.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from millstream.broker.share_partition import Span, State
from millstream.errors import MillstreamError, TopicExistsError, UnknownTopicError
from millstream.log.batch import ProducerStamp, stamp
from millstream.log.batches import BatchReader
from millstream.log.encoding import Row, encode_rows
from millstream.log.shares import ShareKey, ShareState, put_share
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition, left_out

PRODUCER = "millstream.dead-letters"  # the transactional id of those who copy
_BATCH_BYTES = 512 * 1024
_READ_BYTES = 1 << 20
_LEFT_OUT = "__dlq.errors.value.left.out"
_WHY = {State.REJECTED: "rejected by a member", State.EXHAUSTED: "delivered as often as allowed"}
_log = logging.getLogger(__name__)


class Grave(NamedTuple):
    """Which records of a share partition go to which topic."""

    topic: str
    key: ShareKey
    name: TopicPartition
    spans: tuple[Span, ...]


def bury(
    writer: LogWriter,
    reader: BatchReader,
    grave: Grave,
    before: ShareState | None,
    after: ShareState,
) -> None:
    """Copy records and archive them; durable when this returns. In a thread, one at a time.

    Args:
        before: What control.db has of the share partition.
        after: The same, with the records archived.

    Raises:
        UnknownTopicError: the records' topic was deleted; nothing was done.
        MillstreamError: it could not be done, and nothing was.
    """
    if grave.topic not in writer.topics():
        with suppress(TopicExistsError):
            writer.create_topic(grave.topic)
    count = writer.partition_count(grave.topic)
    transactions = writer.transactions
    identity = transactions.register(PRODUCER)
    transactions.begin(identity)
    try:
        sequence = 0
        if grave.topic != grave.name.topic:  # else they would come again, and again be given up
            bytes_max = writer.partition(TopicPartition(grave.topic, 0)).config.max_message_bytes
            for rows in _copies(reader, grave, bytes_max):
                sender = ProducerStamp(*identity, sequence)
                batch = stamp(encode_rows(rows), sender, transactional=True)
                writer.append(grave.topic, grave.name.partition % count, [batch])
                sequence += len(rows)
        transactions.end(
            identity,
            commit=True,
            also=lambda connection: put_share(connection, grave.key, before, after),
        )
    except BaseException as error:
        with suppress(MillstreamError):  # else its timeout does
            transactions.end(identity, commit=False)
        if isinstance(error, sqlite3.IntegrityError):
            raise UnknownTopicError(f"topic {grave.name.topic!r} was deleted") from error
        raise
    _log.warning(
        "group %r gave up %d records of %s/%d; %d copies are in %s",
        grave.key.group,
        sum(one.end - one.first for one in grave.spans),
        *grave.name,
        sequence,
        grave.topic,
    )


def _copies(reader: BatchReader, grave: Grave, bytes_max: int) -> Iterator[list[Row]]:
    """Yield the records as they are to be written, in batches of a bounded size."""
    rows: list[Row] = []
    size = 0
    for span in grave.spans:
        for row in _records(reader, grave, span, bytes_max):
            if rows and size + row.size > _BATCH_BYTES:
                yield rows
                rows, size = [], 0
            rows.append(row)
            size += row.size
    if rows:
        yield rows


def _records(reader: BatchReader, grave: Grave, span: Span, bytes_max: int) -> Iterator[Row]:
    start = max(span.first, reader.state(*grave.name).log_start)
    if start >= span.end:
        return
    columns = ("offset", "timestamp", "key", "value", "headers")
    for batch in reader.read(*grave.name, start, span.end, columns=columns, bytes_max=_READ_BYTES):
        times = np.asarray(batch["timestamp"].cast(pa.int64())).tolist()
        keys, values = batch["key"].to_pylist(), batch["value"].to_pylist()
        headers = batch["headers"].to_pylist()
        for place, offset in enumerate(batch["offset"].to_pylist()):
            own = tuple((one["key"], one["value"]) for one in headers[place] or ())
            told = _told(grave, offset, span)
            row = Row(times[place], keys[place], values[place], (*own, *told))
            yield row if row.size <= bytes_max else _notice(row, told)


def _notice(row: Row, told: tuple[tuple[str, bytes], ...]) -> Row:
    return Row(row.timestamp_ms, None, None, (*told, left_out(row.value, _LEFT_OUT)))


def _told(grave: Grave, offset: int, span: Span) -> tuple[tuple[str, bytes], ...]:
    """Return the headers that say where a record came from, and why it was given up."""
    about = {
        "topic": grave.name.topic,
        "partition": grave.name.partition,
        "offset": offset,
        "group": grave.key.group,
        "delivery.count": span.deliveries,
        "message": _WHY[span.state],
    }
    return tuple((f"__dlq.errors.{name}", str(value).encode()) for name, value in about.items())
