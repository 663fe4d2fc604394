"""The transactions of a captured database, whole and in the order of the source, read from their topics.

The topic of transactions has them in order: the END of each says how many changes of each table it has. They are in
the topics of the tables, in the same order in each partition, with their number in the transaction. So a
transaction is read by taking, from each partition, the changes at its front that have its id.

Which of them are there: capture writes all of a transaction before it commits, and a log shows the partitions that
were committed one after the other. So a partition that ends without a change of the transaction has none, unless a
record that is not committed yet is one.

=====================================  ==================================================================
fewer changes than the END counts      means
=====================================  ==================================================================
of a topic that is compacted           later changes of these keys follow, and replace them
of another one                         records are missing: CorruptionError
=====================================  ==================================================================
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

from millstream.capture.apply.change_record import AppliedChange, TableRecord, parse_record
from millstream.capture.apply.partition_cursor import PartitionCursor
from millstream.capture.apply.table_versions import TableVersions
from millstream.capture.envelope import CaptureTopics
from millstream.capture.table_patterns import TablePatterns
from millstream.client.open import open_reader
from millstream.errors import (
    ConflictError,
    CorruptionError,
    RetriableError,
    UnknownTopicError,
)

Positions: TypeAlias = dict[str, list[int]]
_VISIBLE_S = 60.0  # how long a commit may take to be seen in all partitions
_TableCursor: TypeAlias = PartitionCursor[TableRecord]


@dataclass(frozen=True)
class SourceTransaction:
    """A transaction of the source. Read ``changes`` to their end before the next one is asked for."""

    id: str
    timestamp_ms: int
    changes: Iterator[AppliedChange]
    end_offset: int
    """The offset of its END: a number that rises from one transaction to the next."""
    before: str
    """The position of the transaction before it, of whichever tables; empty if none was read."""

    @property
    def position(self) -> str:
        """Its place in the source."""
        return self.id.partition(":")[2]


@dataclass
class ChangeStream:
    """Reads what a capture has written, from a position on; for one thread. Close it.

    Args:
        log: The log's address.
        name: The name of the capture.
        wanted: Which tables.
        positions: The next offset of each partition, by topic; empty: from the beginning.
        topic_ids: Of the topics in ``positions``.

    Raises:
        UnknownTopicError: there is no capture of this name.
        ConflictError: the beginning of a topic is gone, or a topic was made anew.
        CorruptionError: records are missing, or are not those of a capture.
    """

    log: Path | str
    name: str
    wanted: TablePatterns
    positions: Positions = field(default_factory=dict)
    topic_ids: dict[str, str] = field(default_factory=dict)
    monotonic_s: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._topics = CaptureTopics(self.name)
        self._reader = open_reader(self.log).pinned(self.topic_ids)
        self._uncommitted = open_reader(self.log, "read_uncommitted")
        self._check_capture()
        self._ends = self._cursor(self._topics.transaction, 0, _json_of)
        self._definitions = self._cursor(self._topics.schema, 0, _json_of)
        self._definitions.offset = self._start(self._topics.schema, 0)
        self.versions = TableVersions(self._topics.schema, self._read_definitions)
        self._cursors: dict[str, list[_TableCursor]] = {}
        self._compacted: dict[str, bool] = {}
        for topic in self.positions:
            if topic not in (self._topics.transaction, self._topics.schema):
                self._open(topic)
        self._defined_below = 0
        self.passed = ""
        self._read_definitions()

    def close(self) -> None:
        """Close the readers."""
        self._reader.close()
        self._uncommitted.close()

    def _check_capture(self) -> None:
        if self._topics.transaction not in self._reader.topics():
            raise UnknownTopicError(
                f"there is no capture {self.name!r} in {str(self.log)!r}: no topic {self._topics.transaction!r}. Give "
                "the name of a capture, and the log that it writes to."
            )

    def _start(self, topic: str, partition: int) -> int:
        """Return where a topic begins that was never read.

        Raises:
            ConflictError: its beginning is gone.
        """
        start, _ = self._reader.bounds(topic, partition)
        if start:
            raise ConflictError(
                f"the beginning of partition {partition} of {topic!r} is gone: it begins at offset {start}. Rows from "
                "before cannot be applied. Keep the topic for ever, or compacted, and capture under another name, from "
                "a new snapshot."
            )
        return 0

    def _cursor(self, topic: str, partition: int, parse: Callable[..., Any]) -> Any:
        self.topic_ids.setdefault(topic, self._reader.topic_id(topic))
        known = self.positions.get(topic, [])
        start = known[partition] if partition < len(known) else self._start(topic, partition)
        return PartitionCursor(self._reader, self._uncommitted, topic, partition, start, parse)

    def _open(self, topic: str) -> list[_TableCursor]:
        found = self._cursors.get(topic)
        if found is None:

            def parse(offset: int, key: bytes | None, value: bytes | None) -> TableRecord:
                return parse_record(topic, offset, key, value)

            count = len(self._reader.offsets(topic))
            found = [self._cursor(topic, partition, parse) for partition in range(count)]
            self._cursors[topic] = found
            self._compacted[topic] = "compact" in self._reader.settings(topic)["cleanup.policy"]
        return found

    # ── positions ───────────────────────────────────────────────────────────────────────────

    def position(self) -> Positions:
        """Return the next offset of each partition, by topic: after the last transaction that was read."""
        found = {topic: [one.position for one in all_] for topic, all_ in self._cursors.items()}
        found[self._topics.transaction] = [self._ends.position]
        return found

    def behind(self) -> tuple[int, int]:
        """Return how many offsets of the topic of transactions were read, and how many there are."""
        return self._ends.position, self._reader.end_offset(self._topics.transaction, 0)

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be more, for so long at most."""
        self._reader.wait(self._topics.transaction, [self._ends.offset], timeout_s)

    # ── transactions ────────────────────────────────────────────────────────────────────────

    def next(self) -> SourceTransaction | None:
        """Return the next transaction with changes of tables that are wanted; None where there is none now.

        Those that have none are passed over.
        """
        while (found := self._ends.head()) is not None:
            offset, record = found
            self._ends.take()
            if record is None or record["status"] != "END":
                continue
            position = record["id"].partition(":")[2]
            self._define(offset, position)
            counts = {
                one["data_collection"]: one["event_count"]
                for one in record["data_collections"]
                if self._is_wanted(one["data_collection"])
            }
            if counts:
                changes = self._changes(record["id"], counts)
                before, self.passed = self.passed, position
                return SourceTransaction(record["id"], record["ts_ms"], changes, offset, before)
            self.passed = position
            self.versions.end()
        return None

    def _is_wanted(self, collection: str) -> bool:
        table = self.versions.first(collection)
        return self.wanted(table.database, table.table)

    def _changes(self, transaction: str, counts: dict[str, int]) -> Iterator[AppliedChange]:
        seen: Counter[str] = Counter()
        parts = []
        for collection, count in counts.items():
            table = self.versions.first(collection)
            cursors = self._open(self._topics.of_table(table.database, table.table))
            limit = count if len(cursors) == 1 else None
            parts += [self._of_partition(one, transaction, limit) for one in cursors]
        ordered = parts[0] if len(parts) == 1 else merge(*parts, key=itemgetter(0))
        last = -1
        for order, change in ordered:
            if change.op == "t" and order == last:
                continue  # it is in each partition
            last = order
            if change.op:
                seen[change.collection] += 1
            yield change
        for collection, count in counts.items():
            table = self.versions.first(collection)
            topic = self._topics.of_table(table.database, table.table)
            if seen[collection] > count or (
                seen[collection] < count and not self._compacted[topic]
            ):
                raise CorruptionError(
                    f"the transaction {transaction} has {count} changes of {collection}, and {topic!r} has "
                    f"{seen[collection]} of them where they should be. Run `millstream log verify`; to go on, capture "
                    "under another name, from a new snapshot."
                )
        self.versions.end()

    def _of_partition(
        self, cursor: _TableCursor, transaction: str, limit: int | None
    ) -> Iterator[tuple[int, AppliedChange]]:
        """Yield the changes at the front of a partition that are of a transaction, with their numbers in it.

        A tombstone without the deletion before it, which compaction leaves, is a deletion, too (its ``op`` is empty,
        as no END counts it). It may come before its place: later records of its key come later.
        """
        order, count = 0, 0
        topic_compacted = self._compacted[cursor.topic]
        while limit is None or count < limit:
            record = self._head(cursor, transaction)
            if record is None:
                return
            if record.change is None:
                cursor.take()
                if topic_compacted and record.key is not None:
                    yield order, AppliedChange(self._collection(cursor.topic), "", record.key, None)
                continue
            if record.transaction != transaction:
                return
            cursor.take()
            order, count = record.order, count + 1
            yield order, record.change

    def _collection(self, topic: str) -> str:
        return ".".join(self._topics.tables[topic])

    def _head(self, cursor: _TableCursor, transaction: str) -> TableRecord | None:
        """Return the next record of a partition; None if it has none of the transaction any more."""
        given_up_s = self.monotonic_s() + _VISIBLE_S
        while (record := cursor.head()) is None:
            waiting = cursor.next_uncommitted(lambda one: one.transaction is not None)
            if waiting is None or waiting.transaction != transaction:
                return cursor.head()  # it may have been committed before it was looked
            if self.monotonic_s() > given_up_s:
                raise RetriableError(
                    f"the transaction {transaction} is committed, and its records in {cursor.topic!r} are not. It is "
                    "tried again."
                )
            cursor.wait()
        return record

    # ── definitions ─────────────────────────────────────────────────────────────────────────

    def _define(self, end_offset: int, position: str) -> None:
        """Let the definitions that were written with a transaction hold for it."""
        if end_offset >= self._defined_below:
            below = self._reader.end_offset(self._topics.transaction, 0)
            self._read_definitions()
            if self._definitions.next_uncommitted(lambda _: True) is None:
                self._defined_below = below
            else:
                self._wait_definitions(position)
            self._read_definitions()  # those that were committed before it was looked
        self.versions.begin(position)

    def _read_definitions(self) -> None:
        cursor = self._definitions
        while cursor.head() is not None:
            offset, value = cursor.take()
            self.versions.add(offset, value)

    def _wait_definitions(self, position: str) -> None:
        """Wait until the definitions of a transaction, which is committed, are seen to be."""
        given_up_s = self.monotonic_s() + _VISIBLE_S
        while self._definitions.next_uncommitted(_has(position)) is not None:
            if self.monotonic_s() > given_up_s:
                raise RetriableError(
                    f"the transaction at {position} is committed, and its definitions in {self._topics.schema!r} are "
                    "not. It is tried again."
                )
            self._definitions.wait()


def _json_of(offset: int, _key: bytes | None, value: bytes | None) -> tuple[int, Any]:
    try:
        return offset, None if value is None else json.loads(value)
    except ValueError as error:
        raise CorruptionError(
            f"the record at offset {offset} of a topic of transactions or definitions is no JSON: {error}. Apply topics "
            "that `millstream capture` has written, and no other program."
        ) from error


def _has(position: str) -> Callable[[tuple[int, Any]], bool]:
    def found(record: tuple[int, Any]) -> bool:
        value = record[1]
        return isinstance(value, dict) and value.get("source", {}).get("position") == position

    return found
