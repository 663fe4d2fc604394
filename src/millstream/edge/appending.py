"""Events into the log, and what became of each: acknowledged when durable, never before.

A request with an idempotency key is one transaction, committed together with a fence that bears the key:
so it is appended once, however often it is sent and whatever crashes in between. After a crash, in order:

1. Before the transaction is committed: nothing of it is seen, the fence is not there; a retry appends.
2. Committed, and not answered: the fence is there; a retry is told that it was appended before.

Fences are filed by day, and forgotten when they are two days old.
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
from millstream.client.event_log import LogProducer
from millstream.edge.incoming import Asked, Event
from millstream.errors import (
    ConfigError,
    FencedError,
    FencePassedError,
    MillstreamError,
    RetriableError,
)
from millstream.log.topics import unknown_topic
from millstream.record import Place

_log = logging.getLogger(__name__)
_FENCES = "edge/"
_TRANSACTIONS = "millstream-edge"
_PATIENCE = "10 seconds"
_ONCE_BYTES = 64 << 20


@dataclass(slots=True)
class Outcome:
    """What became of the events of a request."""

    appended: int = 0
    place: Place | None = None  # of the last event
    ends: dict[int, int] = field(default_factory=dict)  # the offset after the last, by partition
    failed_lines: list[int] = field(default_factory=list)
    failure: MillstreamError | None = None
    duplicate: bool = False

    def note(self, place: Place) -> None:
        """Note where an event lies."""
        self.appended += 1
        self.place = place
        self.ends[place.partition] = max(place.offset + 1, self.ends.get(place.partition, 0))

    def fail(self, line: int, error: MillstreamError) -> None:
        """Note that an event was not acknowledged."""
        self.failed_lines.append(line)
        self.failure = self.failure or error


class Appender:
    """Sends what requests bring. Thread-safe.

    Args:
        buffer_bytes: How much may be on its way to the log.
        now: The time; only tests give another clock.

    Raises:
        FolderOwnedError: the folder's owner cannot be joined.
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
        # Admission bounds what is on its way; should there be no room nevertheless, nobody waits for it.
        self._producer = log.producer(
            overload="drop_newest", buffer_bytes=buffer_bytes, block_timeout=_PATIENCE
        )
        self._once: LogProducer | None = None
        self._once_lock = threading.Lock()
        self._forgotten = ""

    def send(
        self, topic: str, events: Sequence[Event], asked: Asked
    ) -> tuple[list[Future[Place]], MillstreamError | None]:
        """Send events in their order; return the futures of those taken, and why the next was not."""
        futures: list[Future[Place]] = []
        for event in events:
            try:
                futures.append(self._send(self._producer, topic, event, asked))
            except MillstreamError as error:
                return futures, error
        return futures, None

    def _send(self, producer: LogProducer, topic: str, event: Event, asked: Asked) -> Future[Place]:
        return producer.send(
            topic,
            event.value,
            key=event.key,
            timestamp_ms=event.timestamp_ms,
            partition=asked.partition,
            headers=asked.headers,
        )

    # -- with an idempotency key --------------------------------------------------------------

    def append_once(self, topic: str, key: str, events: Sequence[Event], asked: Asked) -> Outcome:
        """Append events together, unless a request with this key has done so in the last day.

        Raises:
            MillstreamError: nothing was appended; over ``kafka://``, where nobody answered, perhaps all
                of it. The same request can be sent again.
        """
        with self._once_lock:
            today, yesterday = self._days()
            name = f"{self._topic_id(topic)}/{key}"
            if self._log.fence(f"{_FENCES}{yesterday}/{name}") is not None:
                return Outcome(duplicate=True)
            futures: list[Future[Place]] = []
            try:
                producer = self._transactional()
                with producer.transaction() as transaction:
                    for event in events:
                        futures.append(self._send(producer, topic, event, asked))  # noqa: PERF401
                    transaction.fence(f"{_FENCES}{today}/{name}", 0)
            except FencePassedError:
                return Outcome(duplicate=True)
            except ConfigError:
                raise  # of the request; the producer is as good as before
            except FencedError as error:
                self._begin_anew()
                raise RetriableError(
                    "another edge of this log has appended with an idempotency key meanwhile, so nothing "
                    "of this request was appended; send it again"
                ) from error
            except MillstreamError:
                self._begin_anew()
                raise
            outcome = Outcome()
            for future in futures:
                outcome.note(future.result())
            return outcome

    def _topic_id(self, topic: str) -> str:
        topics = self._log.topics()
        info = topics.get(topic)
        if info is None:
            raise unknown_topic(topic, topics)
        return info.topic_id

    def _days(self) -> tuple[str, str]:
        now = self._now()
        today, yesterday = (when.date().isoformat() for when in (now, now - timedelta(days=1)))
        if today != self._forgotten:
            self._forgotten = today
            self._forget(keep={today, yesterday})
        return today, yesterday

    def _forget(self, keep: set[str]) -> None:
        """Forget the fences of days that are over; where that fails, another day will do."""
        with suppress(MillstreamError):
            days = {writer.split("/")[1] for writer in self._log.fences(_FENCES)}
            for day in sorted(days - keep):
                count = self._log.forget_fences(f"{_FENCES}{day}/")
                _log.info("%d idempotency keys of %s are forgotten", count, day)

    def _transactional(self) -> LogProducer:
        if self._once is None:
            # Over kafka:// a fence belongs to one transactional id: so all edges of a log have the same,
            # and one that takes over fences the other, whose request is then sent again.
            self._once = self._log.producer(
                transactional_id=_TRANSACTIONS,
                buffer_bytes=_ONCE_BYTES,
                block_timeout=_PATIENCE,
            )
        return self._once

    def _begin_anew(self) -> None:
        """Let go of a producer that has failed: the next request makes another one."""
        producer, self._once = self._once, None
        if producer is not None:
            with suppress(MillstreamError):  # it was told to whose request it was
                producer.close()

    def close(self) -> None:
        """Send what is on its way, and stop."""
        with self._once_lock:
            self._begin_anew()
        with suppress(RetriableError):  # whose event it was has been told
            self._producer.close()
