"""Listens for StatsD's datagrams and appends a record for each metric.

UDP has no answer, so nothing can be promised to a sender; but what was lost is counted, wherever it can be
seen: by the kernel (its buffer was full), by numbers that senders give, and here (no room on the way to the
log, or the log did not take it). Whoever reads a number of these knows what it misses.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from millstream.client.event_log import LogProducer
from millstream.edge.kernel_drops import kernel_drops
from millstream.edge.sequences import Sequences
from millstream.edge.statsd import SEQUENCE, Metric, parse_datagram
from millstream.errors import CorruptionError, FencedError, MillstreamError

_log = logging.getLogger(__name__)
BUFFER_BYTES = 4 << 20  # asked of the kernel, which may give less
_DATAGRAM_MAX = 65_536
_LAST_S = 15.0  # how long a record may be on its way at the end
_LOOK_EVERY = 64  # datagrams
_DRAIN_S = 1.0  # how long what the kernel has is taken at the end, should more come all the time
_LOOK_S = 0.2  # how often the thread looks whether it is to end


@dataclass(slots=True)
class StatsdCounts:
    """Of datagrams and the lines in them."""

    datagrams: int = 0
    datagram_bytes: int = 0
    metrics: int = 0
    appended: int = 0
    not_appended: int = 0
    malformed: int = 0


class Listener:
    """Takes datagrams in a thread of its own, from :meth:`start` to :meth:`close`.

    Args:
        listener: A bound UDP socket; it is closed with this.
        topic: Where metrics go, with their name as key.
        malformed_topic: Where lines go that are none, with the reason in a header; nowhere if None.
        on_failure: Called with what means that nothing will be appended any more.
    """

    def __init__(
        self,
        listener: socket.socket,
        producer: LogProducer,
        topic: str,
        malformed_topic: str | None,
        on_failure: Callable[[MillstreamError], None],
    ) -> None:
        self._socket = listener
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._socket.settimeout(_LOOK_S)
        self._inode = os.fstat(listener.fileno()).st_ino
        self._producer = producer
        self._topic = topic
        self._malformed_topic = malformed_topic
        self._on_failure = on_failure
        self._counts = StatsdCounts()
        self._sequences = Sequences()
        self._sent: deque[Future[Any]] = deque()
        self._ending = threading.Event()
        self._drops: int | None = 0
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="millstream statsd", daemon=True)

    def start(self) -> None:
        """Begin to take datagrams."""
        self._thread.start()

    def close(self) -> None:
        """Take what the kernel has, wait until it is in the log, and stop."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        for future in self._sent:
            with suppress(TimeoutError):  # then it is counted neither as appended nor as lost
                self._note(future.exception(_LAST_S))
        self._sent.clear()
        self._drops = self._kernel_drops()
        self._socket.close()

    def counts(self) -> dict[str, Any]:
        """Return what was taken and lost so far.

        ``kernel_dropped`` is None where the kernel does not tell.
        """
        return {
            **asdict(self._counts),
            "kernel_dropped": self._kernel_drops(),
            "lost_in_sequence": self._sequences.lost,
            "repeated_in_sequence": self._sequences.repeated,
            "senders_restarted": self._sequences.restarts,
            "senders_numbering": self._sequences.senders,
        }

    def _kernel_drops(self) -> int | None:
        return self._drops if self._socket.fileno() < 0 else kernel_drops(self._inode)

    def _run(self) -> None:
        try:
            self._take_all()
        except MillstreamError as error:  # the producer has ended
            self._on_failure(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, who runs this must be told
            failure = MillstreamError(f"Datagrams are not taken any more: {error!r}.")
            failure.__cause__ = error
            self._on_failure(failure)

    def _take_all(self) -> None:
        ends_s = math.inf
        while time.monotonic() < ends_s:
            if self._ending.is_set():
                ends_s = min(ends_s, time.monotonic() + _DRAIN_S)
            try:
                datagram, sender = self._socket.recvfrom(_DATAGRAM_MAX)
            except TimeoutError:
                self._look_at_sent()
                if self._ending.is_set():
                    return
                continue
            except OSError as error:  # of a datagram that somebody else sent; the socket goes on
                _log.warning("a datagram could not be taken: %s", error)
                continue
            if not self._counts.datagrams % _LOOK_EVERY:
                self._look_at_sent()
            self._take(datagram, sender[0])

    def _take(self, datagram: bytes, address: str) -> None:
        counts = self._counts
        counts.datagrams += 1
        counts.datagram_bytes += len(datagram)
        metrics, malformed = parse_datagram(datagram)
        for metric in metrics:
            if metric.name == SEQUENCE and metric.type == "gauge":
                self._number(metric, address)
                continue
            counts.metrics += 1
            self._send(self._topic, metric.json(), metric.name, metric.timestamp_ms, ())
        for line, reason in malformed:
            self._refuse(line, reason, address)

    def _refuse(self, line: bytes, reason: str, address: str) -> None:
        self._counts.malformed += 1
        if self._malformed_topic is not None:
            headers = (("reason", reason.encode()), ("sender", address.encode()))
            self._send(self._malformed_topic, line, None, None, headers)

    def _number(self, metric: Metric, address: str) -> None:
        if isinstance(metric.value, int) and metric.value >= 0 and not metric.relative:
            self._sequences.came(metric.tags.get("sender") or address, metric.value)
        else:
            self._refuse(metric.json(), "a datagram's number is whole and not negative", address)

    def _send(
        self,
        topic: str,
        value: bytes,
        key: str | None,
        timestamp_ms: int | None,
        headers: tuple[tuple[str, bytes], ...],
    ) -> None:
        try:
            future = self._producer.send(
                topic, value, key=key, timestamp_ms=timestamp_ms, headers=headers
            )
        except (CorruptionError, FencedError):
            raise
        except MillstreamError as error:
            self._failed(error)
            return
        self._sent.append(future)

    def _look_at_sent(self) -> None:
        """Count what has become of records, as far as it is known; a callback for each costs more."""
        while self._sent and self._sent[0].done():
            self._note(self._sent.popleft().exception())

    def _note(self, error: BaseException | None) -> None:
        if error is None:
            self._counts.appended += 1
            self._failing = False
            return
        self._failed(error)
        if isinstance(error, CorruptionError | FencedError):
            self._on_failure(error)

    def _failed(self, error: BaseException) -> None:
        """Count a record that was not appended; say so where it is the first in a row."""
        self._counts.not_appended += 1
        first, self._failing = not self._failing, True
        if first:
            _log.warning("metrics are not appended: %s", error)
