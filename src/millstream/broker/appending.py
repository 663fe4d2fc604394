"""One thread that appends for all connections: what came while it was at work is the next group.

The event loop hands over batches and goes on; the thread looks at them, commits all that are there
together (see ``log.group_commit``), and hands the outcomes back. So the loop never waits for the
disk, a sync serves every producer that waits for one, and the batches of a connection stay in order.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millstream.broker.arriving import Limits, arriving
from millstream.broker.codes import Code, Refused, code_of
from millstream.broker.settings import Settings
from millstream.errors import MillstreamError, SyncFailedError
from millstream.log.group_commit import Durability, PendingAppend
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Arrival:
    """A batch on its way into a partition; ``offset``, or ``code`` and ``message``, is its outcome."""

    name: TopicPartition
    data: bytes | None
    offset: int = -1
    log_start: int = -1
    code: Code = Code.NONE
    message: str | None = None

    def refuse(self, error: Exception) -> None:
        """Note why it was not taken."""
        self.code, self.message = code_of(error), str(error)


@dataclass(slots=True)
class _Delivery:
    """What one request brought."""

    arrivals: Sequence[Arrival]
    durability: Durability
    answer: asyncio.Future[None]
    pending: list[tuple[Arrival, PendingAppend]] = field(default_factory=list)


class Appender:
    """Appends what connections bring, in a thread of its own.

    Args:
        on_failure: Called in the event loop when the disk has failed: nothing more is taken.
    """

    def __init__(
        self,
        writer: LogWriter,
        loop: asyncio.AbstractEventLoop,
        settings: Settings,
        *,
        on_failure: Callable[[MillstreamError], None],
    ) -> None:
        self._writer = writer
        self._loop = loop
        self._limits = Limits(0, settings.batch_plain_bytes_max, settings.batch_records_max)
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting: list[_Delivery] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="millstream-broker-appender")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Append what is there, and end."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def append(self, arrivals: Sequence[Arrival], durability: Durability) -> asyncio.Future[None]:
        """Return what is done when every arrival has its outcome. Called in the event loop."""
        delivery = _Delivery(arrivals, durability, self._loop.create_future())
        with self._changed:
            self._waiting.append(delivery)
            self._changed.notify()
        return delivery.answer

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
            except Exception as error:  # noqa: BLE001 - whatever it is, the producers must be told
                for delivery in group:
                    for arrival in delivery.arrivals:
                        arrival.refuse(error)
            self._loop.call_soon_threadsafe(_answer, group)

    def _commit(self, group: Sequence[_Delivery]) -> None:
        for delivery in group:
            for arrival in delivery.arrivals:
                self._look_at(arrival, delivery)
        appends = [append for delivery in group for _, append in delivery.pending]
        # One that waits for the disk makes the others of its group as safe as itself.
        synced = any(delivery.durability == "synced" for delivery in group if delivery.pending)
        self._writer.commit(appends, "synced" if synced else "written")
        for delivery in group:
            for arrival, append in delivery.pending:
                self._note(arrival, append)

    def _look_at(self, arrival: Arrival, delivery: _Delivery) -> None:
        try:
            partition = self._writer.partition(arrival.name)
            limits = self._limits._replace(message_bytes=partition.config.max_message_bytes)
            batch = arriving(arrival.data, limits)
            delivery.pending.append((arrival, PendingAppend(partition, batch)))
        except (Refused, MillstreamError) as error:
            arrival.refuse(error)
            if not isinstance(error, Refused) and arrival.code == Code.INVALID_REQUEST:
                arrival.code = Code.UNKNOWN_TOPIC_OR_PARTITION
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this batch alone
            # A defect of ours that one batch brought to light is not the others' failure.
            _log.exception("a batch for %s/%s could not be looked at", *arrival.name)
            arrival.refuse(error)
        finally:
            arrival.data = None

    def _note(self, arrival: Arrival, append: PendingAppend) -> None:
        if append.error is None:
            arrival.offset, arrival.log_start = append.offset, append.partition.log_start
            return
        arrival.refuse(append.error)
        if isinstance(append.error, SyncFailedError):
            self._loop.call_soon_threadsafe(self._on_failure, append.error)
        elif arrival.code == Code.INVALID_REQUEST:  # a rule of the topic, such as keys
            arrival.code = Code.INVALID_RECORD


def _answer(group: Sequence[_Delivery]) -> None:
    for delivery in group:
        if not delivery.answer.done():
            delivery.answer.set_result(None)
