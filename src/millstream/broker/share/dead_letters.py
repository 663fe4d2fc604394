"""Writes undeliverable records of a share group to its dead-letter topic.

1. A transaction begins, and the copies are appended. A crash leaves a transaction without a decision, and
   the records undeliverable as before: the transaction is aborted, and everything is repeated.
2. One commit of control.db holds the decision and the archived state of the records. *From this moment on
   they are dead-lettered.* A crash leaves both, without markers: the next owner appends the markers.
3. Markers are appended, and readers of committed records see the copies.

A dead letter has the key, value, timestamp and headers of its record, and headers that name its origin
and the reason. A record that retention has removed meanwhile has no copy. If a record with these headers is
too large for the topic, its dead letter has only these headers and one that says so. Its own key, value and
headers are left out: otherwise the records after it would wait forever.

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

from millstream.broker.share.partition import RecordSpan
from millstream.errors import MillstreamError, TopicExistsError, UnknownTopicError
from millstream.log.batch import ProducerStamp, stamp
from millstream.log.batch_reader import BatchReader
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.share_state import RecordState, ShareKey, ShareState, put_share
from millstream.log.writer import LogWriter
from millstream.record import Headers, TopicPartition, omitted_value_header

DEAD_LETTER_PRODUCER = "millstream.dead-letters"  # the transactional id of the copying producer
_BATCH_BYTES = 512 * 1024
_READ_BYTES = 1 << 20
_VALUE_OMITTED = "__dlq.errors.value.omitted"
_REASONS = {
    RecordState.REJECTED: "rejected by a member",
    RecordState.EXHAUSTED: "delivered as often as allowed",
}
_log = logging.getLogger(__name__)


class DlqEntry(NamedTuple):
    """Undeliverable records of a share partition, and the topic that they go to."""

    topic: str
    key: ShareKey
    name: TopicPartition
    spans: tuple[RecordSpan, ...]


def dead_letter(
    writer: LogWriter,
    reader: BatchReader,
    entry: DlqEntry,
    before: ShareState | None,
    after: ShareState,
) -> None:
    """Copy records and archive them; durable when this returns. In a thread, one at a time.

    Args:
        before: The state of the share partition in control.db.
        after: The same, with the records archived.

    Raises:
        UnknownTopicError: the records' topic was deleted; nothing was done.
        MillstreamError: it failed; nothing was done.
    """
    if entry.topic not in writer.topics():
        with suppress(TopicExistsError):
            writer.create_topic(entry.topic)
    count = writer.partition_count(entry.topic)
    transactions = writer.transactions
    identity = transactions.register(DEAD_LETTER_PRODUCER)
    transactions.begin(identity)
    try:
        sequence = 0
        if (
            entry.topic != entry.name.topic
        ):  # else they would be delivered, and dead-lettered, again
            bytes_max = writer.partition(TopicPartition(entry.topic, 0)).config.max_message_bytes
            for rows in _copies(reader, entry, bytes_max):
                producer = ProducerStamp(*identity, sequence)
                batch = stamp(encode_records(rows), producer, transactional=True)
                writer.append(entry.topic, entry.name.partition % count, [batch])
                sequence += len(rows)
        transactions.end(
            identity,
            commit=True,
            also=lambda connection: put_share(connection, entry.key, before, after),
        )
    except BaseException as error:
        with suppress(MillstreamError):  # if this fails, the timeout aborts it
            transactions.end(identity, commit=False)
        if isinstance(error, sqlite3.IntegrityError):
            raise UnknownTopicError(f"topic {entry.name.topic!r} was deleted") from error
        raise
    _log.warning(
        "group %r dead-lettered %d records of %s; %d copies are in %s",
        entry.key.group,
        sum(one.end - one.first for one in entry.spans),
        entry.name,
        sequence,
        entry.topic,
    )


def _copies(reader: BatchReader, entry: DlqEntry, bytes_max: int) -> Iterator[list[SimpleRecord]]:
    """Yield the copies to write, in batches of bounded size."""
    rows: list[SimpleRecord] = []
    size = 0
    for span in entry.spans:
        for row in _records(reader, entry, span, bytes_max):
            if rows and size + row.size > _BATCH_BYTES:
                yield rows
                rows, size = [], 0
            rows.append(row)
            size += row.size
    if rows:
        yield rows


def _records(
    reader: BatchReader, entry: DlqEntry, span: RecordSpan, bytes_max: int
) -> Iterator[SimpleRecord]:
    start = max(span.first, reader.state(*entry.name).log_start)
    if start >= span.end:
        return
    columns = ("offset", "timestamp", "key", "value", "headers")
    for batch in reader.read(*entry.name, start, span.end, columns=columns, bytes_max=_READ_BYTES):
        times = np.asarray(batch["timestamp"].cast(pa.int64())).tolist()
        keys, values = batch["key"].to_pylist(), batch["value"].to_pylist()
        headers = batch["headers"].to_pylist()
        for index, offset in enumerate(batch["offset"].to_pylist()):
            own = tuple((one["key"], one["value"]) for one in headers[index] or ())
            added = _dlq_headers(entry, offset, span)
            row = SimpleRecord(times[index], keys[index], values[index], (*own, *added))
            yield row if row.size <= bytes_max else _without_value(row, added)


def _without_value(row: SimpleRecord, added: Headers) -> SimpleRecord:
    return SimpleRecord(
        row.timestamp_ms, None, None, (*added, omitted_value_header(row.value, _VALUE_OMITTED))
    )


def _dlq_headers(entry: DlqEntry, offset: int, span: RecordSpan) -> Headers:
    """Return the headers with the origin of a record, and the reason."""
    about = {
        "topic": entry.name.topic,
        "partition": entry.name.partition,
        "offset": offset,
        "group": entry.key.group,
        "delivery.count": span.delivery_count,
        "message": _REASONS[span.state],
    }
    return tuple((f"__dlq.errors.{name}", str(value).encode()) for name, value in about.items())
