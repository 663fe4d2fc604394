"""Reading a topic behind brokers record by record: a consumer on a client's stream.

Positions and commits are as for a folder (see ``client.consumer``). Partitions are not divided among members:
a consumer reads the given ones, and commits for its group without joining it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millstream.client.consumer import CLOSED_CHECK_S, Consumer
from millstream.client.kafka.fetcher import (
    FOLLOW_WAIT_MS,
    RANGE_WAIT_MS,
    Fetcher,
    IdleTimeout,
    is_end,
)
from millstream.client.kafka.reader import KafkaReader
from millstream.errors import ConfigError, OffsetOutOfRangeError
from millstream.record import Record

if TYPE_CHECKING:
    from confluent_kafka import Message

_GROWS_EVERY_S = 0.5


class KafkaConsumer(Consumer):
    """An iterator of records; see ``EventLog.consumer``."""

    def __init__(self, reader: KafkaReader, topic: str, **options: Any) -> None:
        super().__init__(reader, topic, **options)
        self._cluster = reader.cluster
        self._idle = IdleTimeout(self._cluster)
        wait_ms = FOLLOW_WAIT_MS if self._stop is None else RANGE_WAIT_MS
        self._stream = Fetcher(self._cluster, reader.isolation, wait_ms=wait_ms)
        self._waiting: list[Message] = []
        self._left: set[int] = set()  # partitions not read to their end yet, if reading stops there
        self._looks_s = time.monotonic()
        self._begin()

    def seek(self, positions: Mapping[int, int]) -> None:
        super().seek(positions)
        self._begin()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._stream.close()

    def _begin(self) -> None:
        """Assign the positions of the next records."""
        stop = self._stop
        wanted = {n: at for n, at in self._next.items() if stop is None or at < stop[n]}
        self._left = set(wanted)
        self._waiting = []
        self._stream.assign(self._topic, wanted)
        self._idle.reset()

    def _fetch(self) -> bool:
        """Take the records that have arrived; a consumer that stops at the end waits for the rest."""
        if self._grows and time.monotonic() >= self._looks_s:
            self._looks_s = time.monotonic() + _GROWS_EVERY_S
            self._check_for_partitions()
        messages, self._waiting = self._waiting, []
        while not messages and self._left and not self._closed:
            messages = self._poll(0 if self._stop is None else CLOSED_CHECK_S)
            if self._stop is None:
                break
            if not messages:
                self._idle.check()
        if not messages:
            return False
        self._idle.reset()
        # Clients fetch by the topic's name: the current topic id says which topic the records are from.
        self._reader.topic_id(self._topic)
        self._fetched = self._records(messages)
        return True

    def _wait(self) -> None:
        self._waiting = self._poll(CLOSED_CHECK_S)

    def _poll(self, timeout_s: float) -> list[Message]:
        try:
            return self._stream.poll(timeout_s)
        except (OffsetOutOfRangeError, ConfigError):
            self._reader.topic_id(self._topic)  # a recreated topic is reported as such
            raise

    def _records(self, messages: Sequence[Message]) -> Iterator[Record]:
        for message in messages:
            number, offset = message.partition(), message.offset()
            if number not in self._left:
                continue
            stop = None if self._stop is None else self._stop[number]
            if is_end(message):
                # Offsets without a record: markers of transactions, or what compaction removed.
                self._skip_to(number, offset if stop is None else min(offset, stop))
            elif stop is None or offset < stop:
                self._next[number] = offset + 1
                yield _record(message)
            else:
                self._skip_to(number, stop)
            if stop is not None and self._next[number] >= stop:
                self._left.discard(number)
                self._stream.drop(number)

    def _skip_to(self, number: int, offset: int) -> None:
        """Move past offsets below ``offset``, which have no more records."""
        if offset > self._positions[number]:
            self._next[number] = self._positions[number] = self._done[number] = offset

    def _check_for_partitions(self) -> None:
        """Begin to read partitions that were added to the topic, from their start."""
        if self._cluster.topic(self._topic).partitions > len(self._next):
            self._add_partitions(self._reader.offsets(self._topic))
            self._begin()


def _record(message: Message) -> Record:
    headers = message.headers()
    return Record(
        message.topic(),
        message.partition(),
        message.offset(),
        message.timestamp()[1],
        message.key(),
        message.value(),
        tuple(headers) if headers else (),
    )
