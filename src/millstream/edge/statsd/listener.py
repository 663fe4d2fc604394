"""Receives StatsD datagrams and appends a record for each metric.

UDP has no response, so nothing is guaranteed to a sender. But losses are counted wherever they can be
observed: by the kernel (its buffer was full), by the senders' sequence numbers, and here (the producer's
buffer was full, or the log did not accept the record).
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

from millstream.client.producer import Producer
from millstream.edge.statsd.kernel_drops import kernel_drops
from millstream.edge.statsd.parser import SEQUENCE, Metric, parse_datagram
from millstream.edge.statsd.sequences import SequenceTracker
from millstream.errors import CorruptionError, FencedError, MillstreamError

_log = logging.getLogger(__name__)
BUFFER_BYTES = 4 << 20  # requested from the kernel, which may give less
_DATAGRAM_MAX = 65_536
_CLOSE_TIMEOUT_S = 15.0  # how long a record may be in flight at the end
_CHECK_EVERY = 64  # datagrams
_DRAIN_S = 1.0  # how long the kernel's buffer is drained at the end, if more keeps arriving
_CHECK_S = 0.2  # how often the thread checks whether to end


@dataclass(slots=True)
class StatsdCounters:
    """Counters of datagrams and the lines in them."""

    datagrams: int = 0
    datagram_bytes: int = 0
    metrics: int = 0
    appended: int = 0
    not_appended: int = 0
    malformed: int = 0


class StatsdListener:
    """Receives datagrams in a thread of its own, from :meth:`start` to :meth:`close`.

    Args:
        listener: A bound UDP socket; it is closed with this.
        topic: The topic of metrics, with their name as key.
        malformed_topic: The topic of malformed lines, with the reason in a header; None: none.
        on_failure: Called with an error after which nothing can be appended any more.
    """

    def __init__(
        self,
        listener: socket.socket,
        producer: Producer,
        topic: str,
        malformed_topic: str | None,
        on_failure: Callable[[MillstreamError], None],
    ) -> None:
        self._socket = listener
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._socket.settimeout(_CHECK_S)
        self._inode = os.fstat(listener.fileno()).st_ino
        self._producer = producer
        self._topic = topic
        self._malformed_topic = malformed_topic
        self._on_failure = on_failure
        self._counts = StatsdCounters()
        self._sequences = SequenceTracker()
        self._sent: deque[Future[Any]] = deque()
        self._ending = threading.Event()
        self._drops: int | None = 0
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="millstream statsd", daemon=True)

    def start(self) -> None:
        """Start to receive datagrams."""
        self._thread.start()

    def close(self) -> None:
        """Drain the kernel's buffer, wait until it is in the log, and stop."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        for future in self._sent:
            with suppress(TimeoutError):  # then it is counted neither as appended nor as lost
                self._count_result(future.exception(_CLOSE_TIMEOUT_S))
        self._sent.clear()
        self._drops = self._kernel_drops()
        self._socket.close()

    def counts(self) -> dict[str, Any]:
        """Return what was received and lost so far.

        ``kernel_dropped`` is None where the kernel does not report it.
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
            self._receive()
        except MillstreamError as error:  # the producer has ended
            self._on_failure(error)
        except Exception as error:  # noqa: BLE001 - any error must be reported
            failure = MillstreamError(f"Datagrams are no longer received: {error!r}.")
            failure.__cause__ = error
            self._on_failure(failure)

    def _receive(self) -> None:
        ends_s = math.inf
        while time.monotonic() < ends_s:
            if self._ending.is_set():
                ends_s = min(ends_s, time.monotonic() + _DRAIN_S)
            try:
                datagram, sender = self._socket.recvfrom(_DATAGRAM_MAX)
            except TimeoutError:
                self._count_sent()
                if self._ending.is_set():
                    return
                continue
            except OSError as error:  # caused by one datagram; the socket still works
                _log.warning("a datagram could not be received: %s", error)
                continue
            if not self._counts.datagrams % _CHECK_EVERY:
                self._count_sent()
            self._handle(datagram, sender[0])

    def _handle(self, datagram: bytes, address: str) -> None:
        counts = self._counts
        counts.datagrams += 1
        counts.datagram_bytes += len(datagram)
        metrics, malformed = parse_datagram(datagram)
        for metric in metrics:
            if metric.name == SEQUENCE and metric.type == "gauge":
                self._track_sequence(metric, address)
                continue
            counts.metrics += 1
            self._send(self._topic, metric.to_json(), metric.name, metric.timestamp_ms, ())
        for line, reason in malformed:
            self._refuse(line, reason, address)

    def _refuse(self, line: bytes, reason: str, address: str) -> None:
        self._counts.malformed += 1
        if self._malformed_topic is not None:
            headers = (("reason", reason.encode()), ("sender", address.encode()))
            self._send(self._malformed_topic, line, None, None, headers)

    def _track_sequence(self, metric: Metric, address: str) -> None:
        if isinstance(metric.value, int) and metric.value >= 0 and not metric.relative:
            self._sequences.observe(metric.tags.get("sender") or address, metric.value)
        else:
            self._refuse(
                metric.to_json(), "a datagram's number must be an integer, not negative", address
            )

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

    def _count_sent(self) -> None:
        """Count the results of records that are done; a callback for each would cost more."""
        while self._sent and self._sent[0].done():
            self._count_result(self._sent.popleft().exception())

    def _count_result(self, error: BaseException | None) -> None:
        if error is None:
            self._counts.appended += 1
            self._failing = False
            return
        self._failed(error)
        if isinstance(error, CorruptionError | FencedError):
            self._on_failure(error)

    def _failed(self, error: BaseException) -> None:
        """Count a record that was not appended; log the first of several in a row."""
        self._counts.not_appended += 1
        first, self._failing = not self._failing, True
        if first:
            _log.warning("metrics are not appended: %s", error)
