"""Delivers the records of a topic with several workers, each with its own connection, in order per key.

Records with the same key and partition go to the same worker, one after the other; records without a key
are assigned by their partition. So a record that is retried delays only its own worker, until it is
delivered or dead-lettered. The number of records between the first unfinished record and the last one read
is bounded: a record that is retried for long stops the reading.

After a crash, the next start does the following:

1. A record was read and not delivered: it is not committed, and is delivered.
2. Delivered, the response not yet received: not committed, and delivered again, with the same key.
3. Response received, not yet committed: the same.
4. Appended to the dead-letter topic, not yet committed: delivered again, and dead-lettered again; so it
   may be there twice.
5. Committed: it is not delivered again. A committed offset is never beyond an unfinished record.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import quote, urlsplit

from millstream.client import EventLog, connect
from millstream.client.json_record import record_as_json
from millstream.client.start_position import StartPosition
from millstream.edge.webhooks.dead_letter_writer import DeadLetterWriter
from millstream.edge.webhooks.endpoint import EndpointConnection, EndpointResponse, parse_url
from millstream.edge.webhooks.offset_tracker import OffsetTracker
from millstream.edge.webhooks.retry_policy import (
    RetryDecision,
    RetryPolicy,
    retry_after_s,
    retry_decision,
)
from millstream.edge.webhooks.signature import signature
from millstream.errors import ConfigError, MillstreamError, RetriableError
from millstream.record import Record, TopicPartition

COMMIT_EVERY_S = 0.5
_JSON = "application/json"
_TICK_S = 0.1
_UNFINISHED_MAX = (
    10_000  # records read and not committable: so many are delivered again after a crash
)
_IN_FLIGHT_BYTES_MAX = 32 << 20  # of records read and not finished
_DEAD_LETTER_RETRY_MAX_S = 30.0
_STOP_TIMEOUT_S = 15.0  # how long an attempt in flight may take at the end

Content = Literal["record", "value"]


@dataclass(frozen=True)
class Webhook:
    """Settings of a webhook.

    Args:
        dead_letter_topic: The topic of undeliverable records.
        workers: How many records may be in flight at a time.
        content: "record": the record as JSON, with its offset; "value": its value as it is.
        content_type: The Content-Type of a value.
        headers: Headers of every request, such as Authorization.
        secrets: Secrets that requests are signed with; empty: requests are not signed.
    """

    topic: str
    url: str
    group: str
    dead_letter_topic: str
    start: Literal["earliest", "latest"] = "earliest"
    workers: int = 8
    timeout_s: float = 10.0
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    content: Content = "record"
    content_type: str = _JSON
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: Sequence[bytes] = field(default=(), repr=False)


@dataclass(slots=True)
class DeliveryTotals:
    """Totals since the start."""

    delivered: int = 0
    undeliverable: int = 0
    failed_attempts: int = 0


def check_topics(log: EventLog, webhook: Webhook) -> None:
    """Make sure that the topics exist.

    Raises:
        UnknownTopicError: the topic or the dead-letter topic does not exist.
        ConfigError: they are the same topic.
    """
    if webhook.dead_letter_topic == webhook.topic:
        raise ConfigError(
            f"the dead-letter topic is {webhook.topic!r}, which is the delivered topic; give another one"
        )
    log.offsets(webhook.dead_letter_topic)
    log.offsets(webhook.topic)


class Delivery:
    """Delivers from :meth:`run` until :meth:`stop`.

    Args:
        report: Called with a sentence when the endpoint starts to fail, or accepts records again.
        totals: Totals to continue; shared by the successive terms of a process.
        random_unit: Returns a number in [0, 1); only tests give another one.
        now_s: Seconds since 1970; only tests give another clock.

    Raises:
        ConfigError: the address is invalid; a topic does not exist.
        OffsetOutOfRangeError: records that the group had not read are gone.
    """

    def __init__(
        self,
        log: Path | str,
        webhook: Webhook,
        *,
        report: Callable[[str], None],
        totals: DeliveryTotals | None = None,
        random_unit: Callable[[], float] = random.random,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._webhook = webhook
        self._report = report
        self._random_unit = random_unit
        self._now_s = now_s
        url = parse_url(webhook.url)
        self._log: EventLog = connect(log)
        try:
            check_topics(self._log, webhook)
            start: StartPosition = webhook.start
            self._consumer = self._log.consumer(
                webhook.topic, group=webhook.group, start=start, commit="manual"
            )
            self._topic_id = self._consumer.topic_id
            self._changed = threading.Condition()  # guards the offsets, and what is in flight
            self._offsets = OffsetTracker(self._consumer.positions)
            self._committed: dict[int, int] = {}
            self._commits = True
            # The start of a group is committed before anything is delivered. Otherwise a webhook that
            # starts at "latest" and crashes would start later the next time, and skip records.
            self._commit()
        except BaseException:
            self._log.close()
            raise
        self.totals = DeliveryTotals() if totals is None else totals
        self._dead_letters = DeadLetterWriter(
            log, webhook.dead_letter_topic, f"webhook {webhook.group}"
        )
        self._in_flight_bytes = 0
        self._paused_until_s = 0.0
        self._failing = False
        self._failure: BaseException | None = None
        self._ending = threading.Event()
        self._deadline_s = 0.0  # after which the end waits for nothing more
        self._furthest: dict[int, int] = {}  # the last offset that was attempted, by partition
        self._connections = [
            EndpointConnection(url, webhook.timeout_s) for _ in range(webhook.workers)
        ]
        self._queues: list[queue.SimpleQueue[Record | None]] = [
            queue.SimpleQueue() for _ in self._connections
        ]

    # -- running ------------------------------------------------------------------------------

    def run(self) -> None:
        """Deliver until :meth:`stop` is called; all committed records were delivered or dead-lettered.

        Raises:
            MillstreamError: the log cannot be read, or written to.
        """
        threads = [
            threading.Thread(target=self._work, args=pair, daemon=True, name="millstream webhook")
            for pair in zip(self._connections, self._queues, strict=True)
        ]
        maintenance = threading.Thread(
            target=self._run_maintenance, daemon=True, name="millstream webhook maintenance"
        )
        for thread in (*threads, maintenance):
            thread.start()
        try:
            for record in self._consumer:
                if not self._dispatch(record):
                    break
        finally:
            self._end()
            for each in self._queues:
                each.put(None)
            for thread in (*threads, maintenance):
                thread.join(max(self._deadline_s - time.monotonic(), 0))
            self._close()
        if self._failure is not None:
            raise self._failure

    def stop(self, *, commit: bool = True) -> None:
        """Stop reading, finish the attempts in flight, and end. From any thread.

        Records before an attempt in flight, in its partition, are finished too, so none of these is
        delivered again. This may take 15 seconds. What takes longer or waits for a retry is left to the
        next leader, with the records after it. Without ``commit`` nothing more is committed: another
        process may deliver for the group already, and may have committed more.
        """
        self._commits = commit and self._commits
        self._end()
        self._consumer.close()

    def _end(self) -> None:
        with self._changed:
            if not self._ending.is_set():
                self._deadline_s = time.monotonic() + _STOP_TIMEOUT_S
                self._ending.set()
            self._changed.notify_all()

    def _close(self) -> None:
        try:
            self._commit()
        finally:
            self._dead_letters.close()
            self._log.close()

    def _dispatch(self, record: Record) -> bool:
        """Pass a record to its worker, once it fits the limits; return False at the end."""
        size = len(record.value or b"")

        def fits() -> bool:
            held = self._in_flight_bytes
            room = not held or held + size <= _IN_FLIGHT_BYTES_MAX
            return (room and self._offsets.unfinished < _UNFINISHED_MAX) or self._ending.is_set()

        with self._changed:
            self._changed.wait_for(fits)
            if self._ending.is_set():
                return False
            self._in_flight_bytes += size
            self._offsets.begin(record.partition, record.offset)
        worker = zlib.crc32(record.key or b"", record.partition) % len(self._queues)
        self._queues[worker].put(record)
        return True

    def _work(
        self, connection: EndpointConnection, records: queue.SimpleQueue[Record | None]
    ) -> None:
        try:
            while (record := records.get()) is not None:
                if not self._may_attempt(record):
                    continue
                if not self._deliver(connection, record):
                    break  # stopped before it was finished; records after it must not overtake it
                with self._changed:
                    self._offsets.finish(record.partition, record.offset)
                    self._in_flight_bytes -= len(record.value or b"")
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - run() raises it
            self._fail(error)
        finally:
            connection.close()

    def _may_attempt(self, record: Record) -> bool:
        """Return whether a record may be attempted: at the end, only one before an attempted record.

        Only offsets before the first unfinished record can be committed. So records that other workers
        have overtaken are delivered too, or the records after them would be delivered again.
        """
        with self._changed:
            furthest = self._furthest.get(record.partition, -1)
            if self._ending.is_set():
                in_time = self._commits and time.monotonic() < self._deadline_s
                return in_time and record.offset < furthest
            self._furthest[record.partition] = max(furthest, record.offset)
            return True

    def _run_maintenance(self) -> None:
        """Commit periodically, and end attempts that take too long."""
        due_s = 0.0
        try:
            while not self._ending.wait(_TICK_S):
                for connection in self._connections:
                    connection.cut_if_overdue()
                self._dead_letters.close_if_idle()
                if time.monotonic() >= due_s:
                    due_s = time.monotonic() + COMMIT_EVERY_S
                    with suppress(RetriableError):  # the next round commits it
                        self._commit()
        except BaseException as error:  # noqa: BLE001 - run() raises it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.stop()

    def _commit(self) -> None:
        if not self._commits:
            return
        with self._changed:
            found = self._offsets.committable()
        moved = {number: at for number, at in found.items() if self._committed.get(number) != at}
        if moved:
            name = self._webhook.topic
            offsets = {TopicPartition(name, number): at for number, at in moved.items()}
            topic_ids = {name: self._topic_id}
            self._log.commit_offsets(self._webhook.group, offsets, topic_ids=topic_ids)
            self._committed |= moved

    # -- one record ---------------------------------------------------------------------------

    def _deliver(self, connection: EndpointConnection, record: Record) -> bool:
        """Deliver or dead-letter a record, with retries; return False if stopped before."""
        body = record_as_json(record) if self._webhook.content == "record" else record.value or b""
        backoff = self._webhook.retry_policy
        attempt = 0
        while self._wait_while_paused():
            attempt += 1
            response = connection.post(body, self._headers(record, body, attempt))
            decision = retry_decision(response.status)
            if decision is RetryDecision.ACCEPTED:
                self._report_health(response)
                self.totals.delivered += 1
                return True
            self.totals.failed_attempts += 1
            if decision is RetryDecision.GIVE_UP or attempt >= backoff.attempts_max:
                return self._dead_letter(record, response, attempt)
            self._report_health(response)
            asked_s = retry_after_s(response.retry_after, self._now_s())
            wait_s = backoff.wait_s(attempt, asked_s, self._random_unit)
            if asked_s is not None:
                self._pause(wait_s)
            if self._ending.wait(wait_s):
                return False
        return False

    def _pause(self, wait_s: float) -> None:
        """Pause all workers: the endpoint asked for it."""
        with self._changed:
            self._paused_until_s = max(self._paused_until_s, time.monotonic() + wait_s)

    def _wait_while_paused(self) -> bool:
        """Wait as long as the endpoint asked for; return False if stopped before."""
        while (left_s := self._paused_until_s - time.monotonic()) > 0:
            if self._ending.wait(left_s):
                return False
        return True

    def _dead_letter(self, record: Record, response: EndpointResponse, attempts: int) -> bool:
        """Append a record to the dead-letter topic, however long that takes; False at the end."""
        times = "attempt" if attempts == 1 else "attempts"
        reason = f"undeliverable after {attempts} {times}: {response.reason}"
        wait_s = 1.0
        while True:
            try:
                self._dead_letters.append(record, reason)
            except MillstreamError as error:
                if isinstance(error, ConfigError):
                    raise  # the topic is gone: nothing is lost, as nothing is committed
                self._report(
                    f"{_record_label(record)} is undeliverable, and cannot be appended to "
                    f"{self._webhook.dead_letter_topic!r} yet: {error}"
                )
                if self._ending.wait(wait_s):
                    return False
                wait_s = min(2 * wait_s, _DEAD_LETTER_RETRY_MAX_S)
            else:
                self._report(f"{_record_label(record)} is {reason}")
                self.totals.undeliverable += 1
                return True

    def _report_health(self, response: EndpointResponse) -> None:
        """Report when the endpoint starts to fail, and when it accepts records again."""
        failing = retry_decision(response.status) is RetryDecision.RETRY
        with self._changed:
            changed, self._failing = failing != self._failing, failing
        if changed:
            where = urlsplit(self._webhook.url).netloc
            what = f"fails ({response.reason}); retrying" if failing else "accepts records again"
            self._report(f"{where} {what}")

    def _headers(self, record: Record, body: bytes, attempt: int) -> dict[str, str]:
        webhook = self._webhook
        name = f"msg_{self._topic_id}_{record.partition}_{record.offset}"
        now_s = int(self._now_s())
        headers = {
            **webhook.headers,
            "Content-Type": _JSON if webhook.content == "record" else webhook.content_type,
            "User-Agent": "millstream",
            "Idempotency-Key": name,
            "webhook-id": name,
            "webhook-timestamp": str(now_s),
            "Millstream-Attempt": str(attempt),
            "Millstream-Topic": record.topic,
            "Millstream-Partition": str(record.partition),
            "Millstream-Offset": str(record.offset),
        }
        if record.key is not None:
            headers["Millstream-Key"] = quote(record.key, safe="")
        if record.value is None:
            headers["Millstream-Tombstone"] = "true"
        if webhook.secrets:
            headers["webhook-signature"] = signature(webhook.secrets, name, now_s, body)
        return headers


def _record_label(record: Record) -> str:
    return f"{record.topic}/{record.partition} offset {record.offset}"
