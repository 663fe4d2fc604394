"""Appends events to the log. Each is acknowledged when it is durable, never before.

A request with an idempotency key is one transaction, committed together with a fence named after the key.
So it is appended once, however often it is sent and whatever crashes in between. After a crash, in order:

1. Before the transaction is committed: nothing of it is visible, the fence is not there; a retry appends.
2. Committed, without a response: the fence is there; a retry learns that it was appended before.

Fences are named by day, and deleted when they are two days old.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from millstream.client import EventLog
from millstream.client.producer import Producer
from millstream.edge.http.request_body import AppendParams, Event
from millstream.errors import (
    ConfigError,
    FencedError,
    FencePassedError,
    MillstreamError,
    RetriableError,
)
from millstream.log.topics import unknown_topic
from millstream.record import RecordMetadata

_log = logging.getLogger(__name__)
_FENCES = "edge/"
_TRANSACTIONS = "millstream-edge"
_BLOCK_TIMEOUT = "10 seconds"
_ONCE_BYTES = 64 << 20


@dataclass(slots=True)
class AppendResult:
    """Which events of a request were appended, and where."""

    appended: int = 0
    last_record: RecordMetadata | None = None  # of the last event
    # the offset after the last, by partition
    next_offsets: dict[int, int] = field(default_factory=dict)
    failed_lines: list[int] = field(default_factory=list)
    failure: MillstreamError | None = None
    duplicate: bool = False

    def add(self, record: RecordMetadata) -> None:
        """Add an acknowledged event."""
        self.appended += 1
        self.last_record = record
        self.next_offsets[record.partition] = max(
            record.offset + 1, self.next_offsets.get(record.partition, 0)
        )

    def fail(self, line: int, error: MillstreamError) -> None:
        """Add an event that was not acknowledged."""
        self.failed_lines.append(line)
        self.failure = self.failure or error


class EventAppender:
    """Sends the events of requests. Thread-safe.

    Args:
        buffer_bytes: How much may be in flight to the log.
        now: The time; only tests give another clock.

    Raises:
        FolderOwnedError: the folder's owner cannot be reached.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        buffer_bytes: int,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._log = log
        self._now = now
        # Admission limits what is in flight; if the buffer is full nevertheless, no request waits for it.
        self._producer = log.producer(
            overload="drop_newest", buffer_bytes=buffer_bytes, block_timeout=_BLOCK_TIMEOUT
        )
        self._transactional_producer: Producer | None = None
        self._once_lock = threading.Lock()
        self._fences_deleted_on = ""

    def send(
        self, topic: str, events: Sequence[Event], params: AppendParams
    ) -> tuple[list[Future[RecordMetadata]], MillstreamError | None]:
        """Send events in order; return the futures of those accepted, and the error of the next one."""
        futures: list[Future[RecordMetadata]] = []
        for event in events:
            try:
                futures.append(self._send(self._producer, topic, event, params))
            except MillstreamError as error:
                return futures, error
        return futures, None

    def _send(
        self, producer: Producer, topic: str, event: Event, params: AppendParams
    ) -> Future[RecordMetadata]:
        return producer.send(
            topic,
            event.value,
            key=event.key,
            timestamp_ms=event.timestamp_ms,
            partition=params.partition,
            headers=params.headers,
        )

    # -- with an idempotency key --------------------------------------------------------------

    def append_once(
        self, topic: str, key: str, events: Sequence[Event], params: AppendParams
    ) -> AppendResult:
        """Append events together, unless a request with this key has done so in the last day.

        Raises:
            MillstreamError: nothing was appended; over ``kafka://``, where no broker responded, perhaps
                all of it. The same request can be sent again.
        """
        with self._once_lock:
            today, yesterday = self._days()
            name = f"{self._topic_id(topic)}/{key}"
            if self._log.fence(f"{_FENCES}{yesterday}/{name}") is not None:
                return AppendResult(duplicate=True)
            futures: list[Future[RecordMetadata]] = []
            try:
                producer = self._get_transactional_producer()
                with producer.transaction() as transaction:
                    for event in events:
                        futures.append(self._send(producer, topic, event, params))  # noqa: PERF401
                    transaction.fence(f"{_FENCES}{today}/{name}", 0)
            except FencePassedError:
                return AppendResult(duplicate=True)
            except ConfigError:
                raise  # an error of the request; the producer can be used further
            except FencedError as error:
                self._discard_transactional_producer()
                raise RetriableError(
                    "another edge of this log has appended with an idempotency key in the meantime, so "
                    "nothing of this request was appended; send it again"
                ) from error
            except MillstreamError:
                self._discard_transactional_producer()
                raise
            result = AppendResult()
            for future in futures:
                result.add(future.result())
            return result

    def _topic_id(self, topic: str) -> str:
        topics = self._log.topics()
        info = topics.get(topic)
        if info is None:
            raise unknown_topic(topic, topics)
        return info.topic_id

    def _days(self) -> tuple[str, str]:
        now = self._now()
        today, yesterday = (when.date().isoformat() for when in (now, now - timedelta(days=1)))
        if today != self._fences_deleted_on:
            self._fences_deleted_on = today
            self._remove_old_fences(keep={today, yesterday})
        return today, yesterday

    def _remove_old_fences(self, keep: set[str]) -> None:
        """Delete the fences of past days; if that fails, the next day retries."""
        with suppress(MillstreamError):
            days = {writer.split("/")[1] for writer in self._log.fences(_FENCES)}
            for day in sorted(days - keep):
                count = self._log.delete_fences(f"{_FENCES}{day}/")
                _log.info("deleted %d idempotency keys of %s", count, day)

    def _get_transactional_producer(self) -> Producer:
        if self._transactional_producer is None:
            # Over kafka:// a fence belongs to one transactional id: so all edges of a log have the same,
            # and one that takes over fences the other, whose request is then sent again.
            self._transactional_producer = self._log.producer(
                transactional_id=_TRANSACTIONS,
                buffer_bytes=_ONCE_BYTES,
                block_timeout=_BLOCK_TIMEOUT,
            )
        return self._transactional_producer

    def _discard_transactional_producer(self) -> None:
        """Close a producer that has failed; the next request creates another one."""
        producer, self._transactional_producer = self._transactional_producer, None
        if producer is not None:
            with suppress(MillstreamError):  # the request has had its error
                producer.close()

    def close(self) -> None:
        """Send what is in flight, and stop."""
        with self._once_lock:
            self._discard_transactional_producer()
        with suppress(RetriableError):  # the requests have had their errors
            self._producer.close()
