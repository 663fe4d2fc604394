"""One thread that appends for all connections: batches that arrive while it works are the next group.

The event loop hands batches over and continues; the thread validates them, commits all waiting ones
together (see ``log.group_commit``), and hands the results back. So the loop never waits for the disk, one
sync serves every producer that waits for one, and the batches of a connection stay in order.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millstream.broker.protocol.error_codes import ApiError, ErrorCode, code_of
from millstream.broker.records.batch_validation import BatchLimits, validate_batch
from millstream.broker.settings import BrokerSettings
from millstream.errors import MillstreamError, SyncFailedError
from millstream.log.group_commit import Durability, PendingAppend
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ProducedBatch:
    """A batch from a client; ``offset``, or ``code`` and ``message``, is set when it is done.

    It is not a ``PendingAppend``: ``data`` is bytes that may be no batch, and an error is a code of the
    protocol. If the batch is valid, it has a ``PendingAppend`` beside it, in its request.
    """

    name: TopicPartition
    data: bytes | None
    offset: int = -1
    log_start: int = -1
    code: ErrorCode = ErrorCode.NONE
    message: str | None = None

    def fail(self, error: Exception) -> None:
        """Set the error of the batch."""
        self.code, self.message = code_of(error), str(error)


@dataclass(slots=True)
class _ProduceRequest:
    """The batches of one request."""

    batches: Sequence[ProducedBatch]
    durability: Durability
    done: asyncio.Future[None]
    pending: list[tuple[ProducedBatch, PendingAppend]] = field(default_factory=list)


class Appender:
    """Appends the batches of all connections, in a thread of its own.

    Args:
        on_failure: Called in the event loop when the disk has failed: the log accepts no more appends.
    """

    def __init__(
        self,
        writer: LogWriter,
        loop: asyncio.AbstractEventLoop,
        settings: BrokerSettings,
        *,
        on_failure: Callable[[MillstreamError], None],
    ) -> None:
        self._writer = writer
        self._loop = loop
        self._limits = BatchLimits(0, settings.batch_plain_bytes_max, settings.batch_records_max)
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting: list[_ProduceRequest] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="millstream-broker-appender")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Append the waiting batches, and end."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def append(
        self, batches: Sequence[ProducedBatch], durability: Durability
    ) -> asyncio.Future[None]:
        """Return a future that is done when every batch has its result. Called in the event loop."""
        request = _ProduceRequest(batches, durability, self._loop.create_future())
        with self._changed:
            self._waiting.append(request)
            self._changed.notify()
        return request.done

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._stopping:
                    self._changed.wait()
                if not self._waiting:
                    return
                group, self._waiting = self._waiting, []
            try:
                self._commit(group)
            except Exception as error:  # noqa: BLE001 - whatever it is, the producers must get an error
                _log.exception("batches could not be appended")
                for request in group:
                    for produced in request.batches:
                        produced.fail(error)
            self._loop.call_soon_threadsafe(_complete, group)

    def _commit(self, group: Sequence[_ProduceRequest]) -> None:
        for request in group:
            for produced in request.batches:
                self._validate(produced, request)
        appends = [append for request in group for _, append in request.pending]
        # One request that waits for the disk makes the others of its group as durable as itself.
        synced = any(request.durability == "synced" for request in group if request.pending)
        self._writer.commit(appends, "synced" if synced else "written")
        for request in group:
            for produced, append in request.pending:
                self._set_result(produced, append)

    def _validate(self, produced: ProducedBatch, request: _ProduceRequest) -> None:
        try:
            partition = self._writer.partition(produced.name)
            limits = self._limits._replace(message_bytes=partition.config.max_message_bytes)
            batch = validate_batch(produced.data, limits)
            request.pending.append((produced, PendingAppend(produced.name, batch, partition)))
        except (ApiError, MillstreamError) as error:
            produced.fail(error)
            if not isinstance(error, ApiError) and produced.code == ErrorCode.INVALID_REQUEST:
                produced.code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this batch alone
            # A defect of the broker that one batch triggers must not fail the others.
            _log.exception("a batch for %s could not be validated", produced.name)
            produced.fail(error)
        finally:
            produced.data = None

    def _set_result(self, produced: ProducedBatch, append: PendingAppend) -> None:
        if append.error is None:
            assert append.partition is not None, "it was given"
            produced.offset, produced.log_start = append.offset, append.partition.log_start
            return
        produced.fail(append.error)
        if isinstance(append.error, SyncFailedError):
            self._loop.call_soon_threadsafe(self._on_failure, append.error)
        elif produced.code == ErrorCode.INVALID_REQUEST:  # a rule of the topic, such as keys
            produced.code = ErrorCode.INVALID_RECORD


def _complete(group: Sequence[_ProduceRequest]) -> None:
    for request in group:
        if not request.done.done():
            request.done.set_result(None)
