"""The sender thread of a producer: takes what is queued, makes batches of it, and appends them.

One thread, so that the records for one partition keep their order. Batches taken together are committed
together. Where the disk has no room, nothing of the failed batches was appended, so they are retried, in
their order, before anything that was sent later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

from millstream.client.folder.buffer import ProducerBuffer
from millstream.client.folder.producer_batch import ProducerBatch
from millstream.client.folder.writer import ProducerWriter
from millstream.errors import (
    ConfigError,
    ConflictError,
    DiskFullError,
    FencedError,
    MillstreamError,
    RetriableError,
)
from millstream.log.batch import EncodedBatch
from millstream.log.compression import CompressionName, compress
from millstream.log.group_commit import Durability, PendingAppend
from millstream.record import TopicPartition

_PAUSE_S_MIN, _PAUSE_S_HURRIED, _PAUSE_S_MAX = 0.01, 0.05, 1.0
_CLOSED = "the producer was closed before the record was sent; send it with another"
Stamp = Callable[[TopicPartition, EncodedBatch], EncodedBatch]


class BatchAttempt(NamedTuple):
    """A producer batch as it is sent; a rejected one is sent again."""

    batch: ProducerBatch
    encoded: EncodedBatch


@dataclass(frozen=True, slots=True)
class SendSettings:
    """How batches are appended.

    ``retry_timeout_s`` is how long a batch is retried while the disk is full; then its records fail.
    """

    durability: Durability
    compression: CompressionName
    retry_timeout_s: float


class Pause:
    """The pause before the next attempt: longer each time, until one succeeds."""

    def __init__(self) -> None:
        self._next_s = _PAUSE_S_MIN
        self._since_s: float | None = None

    def next_s(self, *, hurried: bool) -> float:
        """Return the next pause; a short one if a thread waits."""
        if self._since_s is None:
            self._since_s = time.monotonic()
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, _PAUSE_S_MAX)
        return min(pause_s, _PAUSE_S_HURRIED) if hurried else pause_s

    def failing_s(self) -> float:
        """Return for how long nothing has succeeded."""
        return 0.0 if self._since_s is None else time.monotonic() - self._since_s

    def reset(self) -> None:
        """Start over: something succeeded."""
        self._next_s, self._since_s = _PAUSE_S_MIN, None


class Sender:
    """Appends what is in ``buffer``, from a thread of its own, until the buffer closes.

    Args:
        stamp: Turns a batch into one of the producer's transaction; None leaves it as it is.
        on_taken: Called with the topics of which something was taken.
    """

    def __init__(
        self,
        writer: ProducerWriter,
        buffer: ProducerBuffer,
        settings: SendSettings,
        *,
        stamp: Stamp | None = None,
        on_taken: Callable[[set[str]], None],
    ) -> None:
        self._writer = writer
        self._buffer = buffer
        self._settings = settings
        self._stamp = stamp
        self._on_taken = on_taken
        self._unreported: dict[int, ProducerBatch] = {}  # by id(); taken, and without a result
        self._no_room: DiskFullError | None = None
        self._thread = threading.Thread(target=self._run, name="millstream-producer", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self) -> None:
        """Return when the thread has ended; the buffer must be closing."""
        self._thread.join()

    def settled(self) -> Callable[[], bool]:
        """Return a predicate, for the buffer's lock: whether everything sent so far has its result."""
        return lambda: not self._buffer.busy

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._send_due():
                pass
            # Where the flush of a close was interrupted, something is left.
            self._give_up(self._take(everything=True), FencedError(_CLOSED))
        except BaseException as error:  # noqa: BLE001 - raised again by the next call
            self._buffer.fail(error)
            for batch in list(self._unreported.values()):
                batch.failed(error)

    def _send_due(self) -> bool:
        """Send the due batches once; False when there will be no more."""
        if not self._buffer.wait_due():
            return False
        self._send(self._take())
        return True

    def _take(self, *, everything: bool = False) -> list[ProducerBatch]:
        batches = self._buffer.drain(everything=everything)
        self._unreported |= {id(batch): batch for batch in batches}
        self._on_taken({batch.name.topic for batch in batches})
        return batches

    def _send(self, batches: Sequence[ProducerBatch]) -> None:
        refused = self._append(self._encode(batches))
        pause = Pause()
        while refused and not self._keep_refused(refused):
            may_retry = not self._retry_timed_out(pause.failing_s())
            if may_retry:
                self._buffer.pause(pause.next_s(hurried=self._buffer.has_waiters))
            refused = self._still_refused(refused)
            if not may_retry:
                assert self._no_room is not None, "something was refused for want of room"
                self._give_up([attempt.batch for attempt in refused], self._no_room)
                return
            refused = self._append(refused)

    def _encode(self, batches: Sequence[ProducerBatch]) -> list[BatchAttempt]:
        """Return the batches as they are sent; those that cannot be encoded fail."""
        attempts = []
        for batch in batches:
            try:
                encoded = compress(batch.encode(), self._settings.compression)
            except MillstreamError as error:
                self._report([(batch, error)])
            else:
                ready = self._stamp(batch.name, encoded) if self._stamp else encoded
                attempts.append(BatchAttempt(batch, ready))
        return attempts

    def _append(self, attempts: Sequence[BatchAttempt]) -> list[BatchAttempt]:
        """Commit the batches together; return those for which the disk has no room.

        Raises:
            MillstreamError: the log accepts nothing any more.
        """
        results: list[tuple[ProducerBatch, int | MillstreamError]] = []
        appends = [PendingAppend(attempt.batch.name, attempt.encoded) for attempt in attempts]
        started_s = time.monotonic()
        self._writer.commit(appends, self._settings.durability)
        took_s = time.monotonic() - started_s
        self._buffer.record_commit([attempt.batch for attempt in attempts], took_s)
        refused = []
        for attempt, append in zip(attempts, appends, strict=True):
            if isinstance(append.error, DiskFullError):
                self._no_room = append.error
                refused.append(attempt)
            else:
                results.append((attempt.batch, append.error or append.offset))
        fatal = [error for _, error in results if _is_fatal(error)]
        if fatal:
            self._buffer.fail(
                fatal[0]
            )  # first, so that no thread sees the failed futures before it
        self._report(results)
        if fatal:
            raise fatal[0]
        return refused

    # -- no room on the disk ------------------------------------------------------------------

    def _keep_refused(self, _refused: list[BatchAttempt]) -> bool:
        """Store refused batches until there is room; False if that is not possible."""
        return False

    def _still_refused(self, refused: list[BatchAttempt]) -> list[BatchAttempt]:
        """Return those of the refused batches that no other thread has moved to disk meanwhile."""
        return refused

    def _retry_timed_out(self, lasted_s: float) -> bool:
        return lasted_s >= self._settings.retry_timeout_s or self._buffer.giving_up

    def _give_up(self, batches: Collection[ProducerBatch], error: MillstreamError) -> None:
        self._report([(batch, error) for batch in batches], dropped=True)

    # -- results ------------------------------------------------------------------------------

    def _report(
        self,
        results: Sequence[tuple[ProducerBatch, int | MillstreamError]],
        *,
        dropped: bool = False,
    ) -> None:
        """Release the room, then complete each batch with its offset or its error."""
        batches = [batch for batch, _ in results]
        self._buffer.release(batches)
        for batch, result in results:
            self._unreported.pop(id(batch), None)
            if isinstance(result, int):
                batch.appended(result)
            else:
                self._buffer.record_failure(result, dropped=batch.count if dropped else 0)
                batch.failed(result)
        self._buffer.mark_reported(batches)


def _is_fatal(result: int | MillstreamError) -> TypeGuard[MillstreamError]:
    return not isinstance(result, int | RetriableError | ConfigError | ConflictError)
