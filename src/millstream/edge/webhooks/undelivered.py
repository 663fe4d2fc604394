"""What was given up goes to a dead-letter topic, with its reason and place: as other dead records do.

The log is opened when there is something to append and let go of a moment later, so that a folder has
no owner for the sake of what hardly ever happens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from millstream.client import EventLog, connect
from millstream.client.event_log import LogProducer
from millstream.errors import MillstreamError, RecordTooLargeError
from millstream.record import Record, left_out

Headers: TypeAlias = Sequence[tuple[str, bytes | None]]

IDLE_S = 5.0


class Undelivered:
    """Appends what was given up. Thread-safe.

    Args:
        step: What gave it up.
        clock_s: Seconds, from any beginning; only tests give another clock.
    """

    def __init__(
        self,
        log: Path | str,
        topic: str,
        step: str,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = log
        self._topic = topic
        self._step = step
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._opened: tuple[EventLog, LogProducer] | None = None
        self._used_s = 0.0

    def append(self, record: Record, reason: str) -> None:
        """Append a record; durable when this returns.

        One that the topic has no room for with what is said of it goes without its value and headers, or
        without its key too, and says how large its value is: the others are not to wait for it for ever.

        Raises:
            FolderOwnedError: the folder's owner cannot be joined; try again later.
            MillstreamError: it was not appended.
        """
        told = [
            ("topic", record.topic.encode()),
            ("partition", b"%d" % record.partition),
            ("offset", b"%d" % record.offset),
            ("step", self._step.encode()),
            ("reason", reason.encode(errors="replace")),
        ]
        notice = [*told, left_out(record.value)]
        copies: list[tuple[bytes | None, bytes | None, Headers]] = [
            (record.key, record.value, [*told, *record.headers]),
            (record.key, None, notice),
            (None, None, notice),
        ]
        with self._lock:
            try:
                self._send_what_fits(copies, record.timestamp_ms)
            except MillstreamError:
                self._close()
                raise
            self._used_s = self._clock_s()

    def _send_what_fits(
        self, copies: Sequence[tuple[bytes | None, bytes | None, Headers]], time_ms: int
    ) -> None:
        """Append the first of some copies, which are ever smaller, that the topic has room for."""
        if self._opened is None:
            log = connect(self._address)
            self._opened = log, log.producer(block_timeout="10 seconds", linger_ms=0)
        producer = self._opened[1]
        for number, (key, value, headers) in enumerate(copies, start=1):
            try:
                producer.send(
                    self._topic, value, key=key, timestamp_ms=time_ms, headers=headers
                ).result()
            except RecordTooLargeError:
                if number == len(copies):
                    raise
            else:
                return

    def let_go(self) -> None:
        """Close the log if nothing was appended for a while."""
        with self._lock:
            if self._opened is not None and self._clock_s() > self._used_s + IDLE_S:
                self._close()

    def close(self) -> None:
        """Close the log."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            with suppress(MillstreamError):  # what was not appended has been told
                opened[0].close()
