"""Undeliverable records go to a dead-letter topic, with reason and offset, as other dead letters do.

The log is opened when there is something to append, and closed when it was idle for a while. So a webhook
does not own the folder for a rare case.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from millstream.client import EventLog, connect
from millstream.client.producer import Producer
from millstream.errors import MillstreamError, RecordTooLargeError
from millstream.record import Record, omitted_value_header

DeadLetterHeaders: TypeAlias = Sequence[tuple[str, bytes | None]]

IDLE_S = 5.0


class DeadLetterWriter:
    """Appends undeliverable records. Thread-safe.

    Args:
        step: The header ``step``: which webhook could not deliver the record.
        clock_s: Seconds, from any start; only tests give another clock.
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
        self._opened: tuple[EventLog, Producer] | None = None
        self._last_used_s = 0.0

    def append(self, record: Record, reason: str) -> None:
        """Append a record; durable when this returns.

        A record that is too large for the topic with the headers about it is appended without its value
        and headers, or without its key too, and with the size of its value. So it does not block others.

        Raises:
            FolderOwnedError: the folder's owner cannot be reached; try again later.
            MillstreamError: it was not appended.
        """
        origin = [
            ("topic", record.topic.encode()),
            ("partition", b"%d" % record.partition),
            ("offset", b"%d" % record.offset),
            ("step", self._step.encode()),
            ("reason", reason.encode(errors="replace")),
        ]
        notice = [*origin, omitted_value_header(record.value)]
        copies: list[tuple[bytes | None, bytes | None, DeadLetterHeaders]] = [
            (record.key, record.value, [*origin, *record.headers]),
            (record.key, None, notice),
            (None, None, notice),
        ]
        with self._lock:
            try:
                self._send_first_that_fits(copies, record.timestamp_ms)
            except MillstreamError:
                self._close()
                raise
            self._last_used_s = self._clock_s()

    def _send_first_that_fits(
        self, copies: Sequence[tuple[bytes | None, bytes | None, DeadLetterHeaders]], time_ms: int
    ) -> None:
        """Append the first copy that fits the topic; each copy is smaller than the one before."""
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

    def close_if_idle(self) -> None:
        """Close the log if nothing was appended for a while."""
        with self._lock:
            if self._opened is not None and self._clock_s() > self._last_used_s + IDLE_S:
                self._close()

    def close(self) -> None:
        """Close the log."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            with suppress(MillstreamError):  # a failed append was reported already
                opened[0].close()
