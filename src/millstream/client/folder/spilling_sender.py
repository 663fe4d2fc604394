"""The sender of a producer that spills: records wait on disk while the log does not accept them.

The order is always: what the sender holds, then the spill, then the queue. While the spill has records, none
of the queue is sent: the sender drains the spill first, and records that find no room in the queue meanwhile
follow into the spill. Records enter the spill

- when the queue is full, by the thread that found it so (``overload.spill``);
- when the disk of the log is full: first the refused batches, then the queued ones.

Batches refused after later records had entered the spill cannot go behind them: the sender keeps them, and
retries. It drops these, and those for which the spill has no room either, only when a thread has waited in
``flush`` or ``close`` for as long as the producer may block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from millstream.client.folder.buffer import ProducerBuffer
from millstream.client.folder.producer_batch import ProducerBatch
from millstream.client.folder.sender import BatchAttempt, Pause, Sender, SendSettings
from millstream.client.folder.spill import SpillQueue
from millstream.client.folder.spill_drain import DrainResult, drain
from millstream.client.folder.spill_format import Entry
from millstream.client.folder.writer import ProducerWriter
from millstream.errors import DiskFullError, FencedError, MillstreamError

_log = logging.getLogger(__name__)


class SpillingSender(Sender):
    """See the module. ``spill`` is closed when the thread ends."""

    def __init__(
        self,
        writer: ProducerWriter,
        buffer: ProducerBuffer,
        settings: SendSettings,
        *,
        spill: SpillQueue,
        on_taken: Callable[[set[str]], None],
    ) -> None:
        super().__init__(writer, buffer, settings, on_taken=on_taken)
        self._spill = spill
        # refused; the thread that moves records to the spill takes them
        self._held: list[BatchAttempt] = []
        # by the number of their first record in the spill
        self._waiting: dict[int, ProducerBatch] = {}
        self._refusals = 0
        self._draining = False  # drained batches are not reported yet
        self._pause = Pause()

    def settled(self) -> Callable[[], bool]:
        """Return a function that returns whether everything sent so far is in the log, or safe in the spill.

        The spill counts once the log has refused to drain it, in an attempt that began after this call: the
        second one from now on.
        """
        enough = self._refusals + 2
        return lambda: (
            not (self._buffer.busy or self._draining)
            and (not self._spill.count or self._refusals >= enough)
        )

    def move_to_disk(self, size: int) -> None:
        """Put what is queued into the spill, unless there is room for ``size`` bytes by now.

        Raises:
            DiskFullError: nothing was moved.
        """
        with self._spill.lock:
            with self._buffer.changed:
                if self._buffer.fits(size):
                    return
            self._move_queued()

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            super()._run()
        finally:
            self._spill.close()
            for batch in self._waiting.values():
                batch.failed(
                    FencedError(
                        f"the producer was closed while the record was in {self._spill.folder}; it "
                        "is kept there, and the next producer of this name appends it: do not send "
                        "it again"
                    )
                )

    def _send_due(self) -> bool:
        if self._buffer.failure is not None:
            return False
        if self._spill.count:
            return self._drain()
        if not self._buffer.wait_due(unless=lambda: bool(self._spill.count)):
            return False
        with self._spill.lock:  # no thread moves the queue between the check and the take
            batches = [] if self._spill.count else self._take()
        self._send(batches)
        return True

    def _drain(self) -> bool:
        self._draining = True
        drained = drain(self._spill, self._writer)
        self._report_drained(drained)
        with self._buffer.changed:
            self._draining = False
            self._refusals += drained.no_room is not None
            self._buffer.changed.notify_all()
        if drained.no_room is None:
            self._pause.reset()
            return True
        return self._wait_for_room()

    def _wait_for_room(self) -> bool:
        """Move queued records to the spill, and wait; False when the buffer closes."""
        try:
            with self._spill.lock:
                self._move_queued()
        except DiskFullError as error:
            if self._retry_timed_out(0):
                self._give_up(self._take(everything=True), error)
        if self._buffer.closing:
            return False
        self._buffer.pause(self._pause.next_s(hurried=self._buffer.has_waiters))
        return True

    def _report_drained(self, drained: DrainResult) -> None:
        for entry, offset in drained.appended:
            batch = self._waiting.pop(entry.number, None)
            if batch is not None:
                batch.appended(offset)
        for entry, error in drained.refused:
            self._refused(entry, error)

    def _refused(self, entry: Entry, error: MillstreamError) -> None:
        _log.warning("%d spilled records were refused by the log: %s", entry.batch.count, error)
        self._buffer.record_failure(error, dropped=entry.batch.count)
        batch = self._waiting.pop(entry.number, None)
        if batch is not None:
            batch.failed(error)

    # -- into the spill -----------------------------------------------------------------------

    def _keep_refused(self, refused: list[BatchAttempt]) -> bool:
        with self._spill.lock:
            if not self._spill.count:
                with suppress(DiskFullError):
                    self._write_spill(refused)
                    return True
                self._held = refused
        return False

    def _still_refused(self, refused: list[BatchAttempt]) -> list[BatchAttempt]:
        with self._spill.lock:
            self._held = []
            return [attempt for attempt in refused if id(attempt.batch) in self._unreported]

    def _retry_timed_out(self, _lasted_s: float) -> bool:
        return self._buffer.flush_waited_s() >= self._settings.retry_timeout_s

    def _move_queued(self) -> None:
        """Put what is queued into the spill. Called with the spill's lock."""
        batches = self._take(everything=True)
        try:
            attempts = [*self._held, *self._encode(batches)]
            if attempts:
                self._write_spill(attempts)
                self._held = []
        except DiskFullError:
            self._buffer.requeue([batch for batch in batches if id(batch) in self._unreported])
            raise
        except BaseException as error:
            self._buffer.fail(error)
            for batch in batches:
                batch.failed(error)
            raise

    def _write_spill(self, attempts: Sequence[BatchAttempt]) -> None:
        numbers = self._spill.append([(one.batch.name, one.encoded) for one in attempts])
        for number, attempt in zip(numbers, attempts, strict=True):
            self._unreported.pop(id(attempt.batch), None)
            attempt.batch.release_records()
            self._waiting[number] = attempt.batch
        batches = [attempt.batch for attempt in attempts]
        self._buffer.release(batches)
        self._buffer.mark_reported(batches)  # not yet, but they are safe
