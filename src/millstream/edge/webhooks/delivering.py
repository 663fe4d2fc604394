"""Delivers the records of a topic: in lanes, each with its own connection, in order for each key.

Records with the same key and partition go through the same lane, one after the other; those without a
key go by their partition. So a record that is tried again holds up its lane, and nobody else, until it is
taken or given up. What lies between the first record that is not finished and the last that was read has a
bound: a record that is tried for long stops the reading.

What a crash leaves, and what the next start does:

1. A record was read and not delivered: it is not committed, and delivered.
2. Delivered, the answer not yet here: not committed, and delivered again, with the same key.
3. Answered, not yet committed: the same.
4. Given up and appended to the dead-letter topic, not yet committed: delivered again, and given up
   again; so it may be there twice.
5. Committed: it is not delivered again. What is committed lies before everything that is not finished.
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
from millstream.client.consumer import Start
from millstream.client.json_record import record_as_json
from millstream.edge.webhooks.endpoint import Answer, Link, parse_url
from millstream.edge.webhooks.progress import Progress
from millstream.edge.webhooks.retrying import Backoff, Verdict, retry_after_s, verdict_of
from millstream.edge.webhooks.signing import signature
from millstream.edge.webhooks.undelivered import Undelivered
from millstream.errors import ConfigError, MillstreamError, RetriableError
from millstream.record import Record, TopicPartition

COMMIT_EVERY_S = 0.5
_JSON = "application/json"
_TICK_S = 0.1
_OPEN_MAX = 10_000  # records read and not committable: what a crash has delivered again
_IN_HAND_BYTES = 32 << 20  # of records read and not finished
_BURY_AGAIN_MOST_S = 30.0
_LAST_S = 15.0  # how long an attempt at work may take at the end

Content = Literal["record", "value"]


@dataclass(frozen=True)
class Webhook:
    """What is delivered to whom.

    Args:
        dead_topic: Where records go that are given up.
        lanes: How many records may be on their way at a time.
        content: "record": the record as JSON, with its place; "value": its value as it is.
        content_type: Of a value.
        headers: Of every request, such as Authorization.
        secrets: What requests are signed with; none: they are not.
    """

    topic: str
    url: str
    group: str
    dead_topic: str
    start: Literal["earliest", "latest"] = "earliest"
    lanes: int = 8
    timeout_s: float = 10.0
    backoff: Backoff = field(default_factory=Backoff)
    content: Content = "record"
    content_type: str = _JSON
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: Sequence[bytes] = field(default=(), repr=False)


@dataclass(slots=True)
class Totals:
    """What was done since the start."""

    delivered: int = 0
    given_up: int = 0
    failed_attempts: int = 0


def check_topics(log: EventLog, webhook: Webhook) -> None:
    """Make sure that the topics are there.

    Raises:
        UnknownTopicError: it is not there, or the one of dead letters.
        ConfigError: they are the same.
    """
    if webhook.dead_topic == webhook.topic:
        raise ConfigError(
            f"the dead-letter topic is {webhook.topic!r}, which is what is delivered; give another one"
        )
    log.offsets(webhook.dead_topic)
    log.offsets(webhook.topic)


class Delivery:
    """Delivers from :meth:`run` until :meth:`stop`.

    Args:
        tell: Called with a sentence when the endpoint begins to fail, or takes records again.
        totals: What is counted on; of those who deliver one after the other.
        chance: Gives a number in [0, 1); only tests give another one.
        now_s: Seconds since 1970; only tests give another clock.

    Raises:
        ConfigError: the address is none; the topics are not there.
        OffsetOutOfRangeError: records that the group had not read are gone.
    """

    def __init__(
        self,
        log: Path | str,
        webhook: Webhook,
        *,
        tell: Callable[[str], None],
        totals: Totals | None = None,
        chance: Callable[[], float] = random.random,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._webhook = webhook
        self._tell = tell
        self._chance = chance
        self._now_s = now_s
        url = parse_url(webhook.url)
        self._log: EventLog = connect(log)
        try:
            check_topics(self._log, webhook)
            start: Start = webhook.start
            self._consumer = self._log.consumer(
                webhook.topic, group=webhook.group, start=start, commit="manual"
            )
            self._topic_id = self._consumer.topic_id
            self._changed = threading.Condition()  # guards the progress, and what is in hand
            self._progress = Progress(self._consumer.positions)
            self._committed: dict[int, int] = {}
            self._commits = True
            # Where a group begins is committed before anything is delivered: who starts at "latest" and
            # crashes would begin later the next time, and leave out what lies between.
            self._commit()
        except BaseException:
            self._log.close()
            raise
        self.totals = Totals() if totals is None else totals
        self._undelivered = Undelivered(log, webhook.dead_topic, f"webhook {webhook.group}")
        self._in_hand_bytes = 0
        self._rests_until_s = 0.0
        self._failing = False
        self._failure: BaseException | None = None
        self._ending = threading.Event()
        self._last_s = 0.0  # when nothing more is waited for at the end
        self._furthest: dict[int, int] = {}  # the last offset that was tried, by partition
        self._links = [Link(url, webhook.timeout_s) for _ in range(webhook.lanes)]
        self._queues: list[queue.SimpleQueue[Record | None]] = [
            queue.SimpleQueue() for _ in self._links
        ]

    # -- running ------------------------------------------------------------------------------

    def run(self) -> None:
        """Deliver until :meth:`stop` is called; what is committed then was delivered or given up.

        Raises:
            MillstreamError: the log cannot be read, or written to.
        """
        threads = [
            threading.Thread(target=self._lane, args=pair, daemon=True, name="millstream webhook")
            for pair in zip(self._links, self._queues, strict=True)
        ]
        keeper = threading.Thread(target=self._keep, daemon=True, name="millstream webhook keeper")
        for thread in (*threads, keeper):
            thread.start()
        try:
            for record in self._consumer:
                if not self._take(record):
                    break
        finally:
            self._end()
            for each in self._queues:
                each.put(None)
            for thread in (*threads, keeper):
                thread.join(max(self._last_s - time.monotonic(), 0))
            self._close()
        if self._failure is not None:
            raise self._failure

    def stop(self, *, commit: bool = True) -> None:
        """Read no more, finish what is at work, and end: none of it comes again. From any thread.

        That is what is tried, and what lies before it in its partition. It may take 15 seconds; what
        takes longer or is to be tried again is left to whoever comes next, with what lies behind it.
        Without ``commit`` what was finished since the last time is not committed: another may
        deliver for the group already, and has committed more.
        """
        self._commits = commit and self._commits
        self._end()
        self._consumer.close()

    def _end(self) -> None:
        with self._changed:
            if not self._ending.is_set():
                self._last_s = time.monotonic() + _LAST_S
                self._ending.set()
            self._changed.notify_all()

    def _close(self) -> None:
        try:
            self._commit()
        finally:
            self._undelivered.close()
            self._log.close()

    def _take(self, record: Record) -> bool:
        """Give a record to its lane, once there is room for it; return False at the end."""
        size = len(record.value or b"")

        def fits() -> bool:
            held = self._in_hand_bytes
            room = not held or held + size <= _IN_HAND_BYTES
            return (room and self._progress.open < _OPEN_MAX) or self._ending.is_set()

        with self._changed:
            self._changed.wait_for(fits)
            if self._ending.is_set():
                return False
            self._in_hand_bytes += size
            self._progress.begin(record.partition, record.offset)
        lane = zlib.crc32(record.key or b"", record.partition) % len(self._queues)
        self._queues[lane].put(record)
        return True

    def _lane(self, link: Link, records: queue.SimpleQueue[Record | None]) -> None:
        try:
            while (record := records.get()) is not None:
                if not self._may_begin(record):
                    continue
                if not self._deliver(link, record):
                    break  # the end came first; those behind it are not to pass it
                with self._changed:
                    self._progress.finish(record.partition, record.offset)
                    self._in_hand_bytes -= len(record.value or b"")
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - it goes to who runs this
            self._fail(error)
        finally:
            link.close()

    def _may_begin(self, record: Record) -> bool:
        """Say whether a record may be tried: at the end only what lies before one that was.

        What is committed lies before the first that is not finished. So whatever lanes have passed is
        delivered, too, or what lies behind it would come again.
        """
        with self._changed:
            furthest = self._furthest.get(record.partition, -1)
            if self._ending.is_set():
                in_time = self._commits and time.monotonic() < self._last_s
                return in_time and record.offset < furthest
            self._furthest[record.partition] = max(furthest, record.offset)
            return True

    def _keep(self) -> None:
        """Commit now and then, and end attempts that take too long."""
        due_s = 0.0
        try:
            while not self._ending.wait(_TICK_S):
                for link in self._links:
                    link.cut_if_overdue()
                self._undelivered.let_go()
                if time.monotonic() >= due_s:
                    due_s = time.monotonic() + COMMIT_EVERY_S
                    with suppress(RetriableError):  # what is not committed now is a moment later
                        self._commit()
        except BaseException as error:  # noqa: BLE001 - it goes to who runs this
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.stop()

    def _commit(self) -> None:
        if not self._commits:
            return
        with self._changed:
            found = self._progress.committable()
        moved = {number: at for number, at in found.items() if self._committed.get(number) != at}
        if moved:
            name = self._webhook.topic
            offsets = {TopicPartition(name, number): at for number, at in moved.items()}
            topic_ids = {name: self._topic_id}
            self._log.commit_offsets(self._webhook.group, offsets, topic_ids=topic_ids)
            self._committed |= moved

    # -- one record ---------------------------------------------------------------------------

    def _deliver(self, link: Link, record: Record) -> bool:
        """Try until a record is taken or given up; return False if the end came before."""
        body = record_as_json(record) if self._webhook.content == "record" else record.value or b""
        backoff = self._webhook.backoff
        attempt = 0
        while self._rested():
            attempt += 1
            answer = link.post(body, self._headers(record, body, attempt))
            verdict = verdict_of(answer.status)
            if verdict is Verdict.TAKEN:
                self._note(answer)
                self.totals.delivered += 1
                return True
            self.totals.failed_attempts += 1
            if verdict is Verdict.NEVER or attempt >= backoff.attempts_max:
                return self._bury(record, answer, attempt)
            self._note(answer)
            asked_s = retry_after_s(answer.retry_after, self._now_s())
            wait_s = backoff.wait_s(attempt, asked_s, self._chance)
            if asked_s is not None:
                self._rest(wait_s)
            if self._ending.wait(wait_s):
                return False
        return False

    def _rest(self, wait_s: float) -> None:
        """Let all lanes wait: it is the endpoint that asked for it."""
        with self._changed:
            self._rests_until_s = max(self._rests_until_s, time.monotonic() + wait_s)

    def _rested(self) -> bool:
        """Wait as long as the endpoint asked for; return False if the end came before."""
        while (left_s := self._rests_until_s - time.monotonic()) > 0:
            if self._ending.wait(left_s):
                return False
        return True

    def _bury(self, record: Record, answer: Answer, attempts: int) -> bool:
        """Append a record to the dead-letter topic, however long that takes; False at the end."""
        times = "attempt" if attempts == 1 else "attempts"
        reason = f"given up after {attempts} {times}: {answer.reason}"
        wait_s = 1.0
        while True:
            try:
                self._undelivered.append(record, reason)
            except MillstreamError as error:
                if isinstance(error, ConfigError):
                    raise  # the topic is gone: nothing is lost, as nothing is committed
                self._tell(
                    f"{_place(record)} is to be given up, and cannot be appended to "
                    f"{self._webhook.dead_topic!r} yet: {error}"
                )
                if self._ending.wait(wait_s):
                    return False
                wait_s = min(2 * wait_s, _BURY_AGAIN_MOST_S)
            else:
                self._tell(f"{_place(record)} was {reason}")
                self.totals.given_up += 1
                return True

    def _note(self, answer: Answer) -> None:
        """Say so when the endpoint begins to fail, and when it takes records again."""
        failing = verdict_of(answer.status) is Verdict.AGAIN
        with self._changed:
            changed, self._failing = failing != self._failing, failing
        if changed:
            where = urlsplit(self._webhook.url).netloc
            what = f"fails ({answer.reason}); trying again" if failing else "takes records again"
            self._tell(f"{where} {what}")

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


def _place(record: Record) -> str:
    return f"{record.topic}/{record.partition} offset {record.offset}"
