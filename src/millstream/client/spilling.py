"""The sender of a producer that spills: records wait on disk while the log does not take them.

The order is always: what the sender holds, then the spill, then the queue. While anything is in
the spill, nothing of the queue is sent: the sender drains the spill first, and what finds no room
in the queue meanwhile follows into the spill. Records enter the spill

- when the queue is full, by the thread that found it so (``overload.spill``);
- when the disk of the log has no room: first what was refused, then whatever gathers.

What was refused while later records had entered the spill already cannot go behind them: the sender
keeps it, and tries again. It gives that up, and what the spill has no room for either, only when
somebody has waited in ``flush`` or ``close`` for as long as the producer may block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from millstream.client.buffer import Buffer
from millstream.client.draining import Drained, drain
from millstream.client.parts import Part
from millstream.client.sending import Attempt, Pause, Sender, SendSettings
from millstream.client.spill import Spill
from millstream.client.spill_format import Entry
from millstream.client.writing import Writer
from millstream.errors import DiskFullError, FencedError, MillstreamError

_log = logging.getLogger(__name__)


class SpillingSender(Sender):
    """See the module. ``spill`` is closed when the thread ends."""

    def __init__(
        self,
        writer: Writer,
        buffer: Buffer,
        settings: SendSettings,
        *,
        spill: Spill,
        on_taken: Callable[[set[str]], None],
    ) -> None:
        super().__init__(writer, buffer, settings, on_taken=on_taken)
        self._spill = spill
        self._held: list[Attempt] = []  # refused; whoever moves something to the spill takes them
        self._waiting: dict[int, Part] = {}  # by the number of their first record in the spill
        self._refusals = 0
        self._draining = False  # what was drained was not told yet
        self._pause = Pause()

    def settled(self) -> Callable[[], bool]:
        """Return what says whether all sent so far is in the log, or safe in the spill.

        The spill counts where the log has refused to take from it: by a try that began after now,
        which is the second one from now on.
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
            for part in self._waiting.values():
                part.failed(
                    FencedError(
                        f"the producer was closed while the record was in {self._spill.folder}; it "
                        "is kept there, and the next producer of this name appends it: do not send "
                        "it again"
                    )
                )

    def _turn(self) -> bool:
        if self._buffer.failure is not None:
            return False
        if self._spill.count:
            return self._drain()
        if not self._buffer.wait_due(unless=lambda: bool(self._spill.count)):
            return False
        with self._spill.lock:  # nobody moves the queue between the look and the taking
            parts = [] if self._spill.count else self._take()
        self._send(parts)
        return True

    def _drain(self) -> bool:
        self._draining = True
        drained = drain(self._spill, self._writer)
        self._tell_drained(drained)
        with self._buffer.changed:
            self._draining = False
            self._refusals += drained.no_room is not None
            self._buffer.changed.notify_all()
        if drained.no_room is None:
            self._pause.over()
            return True
        return self._wait_for_room()

    def _wait_for_room(self) -> bool:
        """Bring what has gathered to safety, and wait; False when the buffer closes."""
        try:
            with self._spill.lock:
                self._move_queued()
        except DiskFullError as error:
            if self._out_of_patience(0):
                self._give_up(self._take(everything=True), error)
        if self._buffer.closing:
            return False
        self._buffer.pause(self._pause.next_s(hurried=self._buffer.hurried))
        return True

    def _tell_drained(self, drained: Drained) -> None:
        for entry, offset in drained.appended:
            part = self._waiting.pop(entry.number, None)
            if part is not None:
                part.appended(offset)
        for entry, error in drained.refused:
            self._refused(entry, error)

    def _refused(self, entry: Entry, error: MillstreamError) -> None:
        _log.warning("%d spilled records were refused by the log: %s", entry.batch.count, error)
        self._buffer.note_failure(error, dropped=entry.batch.count)
        part = self._waiting.pop(entry.number, None)
        if part is not None:
            part.failed(error)

    # -- into the spill -----------------------------------------------------------------------

    def _set_aside(self, refused: list[Attempt]) -> bool:
        with self._spill.lock:
            if not self._spill.count:
                with suppress(DiskFullError):
                    self._put(refused)
                    return True
                self._held = refused
        return False

    def _taken_up(self, refused: list[Attempt]) -> list[Attempt]:
        with self._spill.lock:
            self._held = []
            return [attempt for attempt in refused if id(attempt.part) in self._untold]

    def _out_of_patience(self, _lasted_s: float) -> bool:
        return self._buffer.flushing_s() >= self._settings.patience_s

    def _move_queued(self) -> None:
        """Put what is queued into the spill. Called with the spill's lock."""
        parts = self._take(everything=True)
        try:
            attempts = [*self._held, *self._encode(parts)]
            if attempts:
                self._put(attempts)
                self._held = []
        except DiskFullError:
            self._buffer.put_back([part for part in parts if id(part) in self._untold])
            raise
        except BaseException as error:
            self._buffer.die(error)
            for part in parts:
                part.failed(error)
            raise

    def _put(self, attempts: Sequence[Attempt]) -> None:
        numbers = self._spill.append([(one.part.name, one.batch) for one in attempts])
        for number, attempt in zip(numbers, attempts, strict=True):
            self._untold.pop(id(attempt.part), None)
            attempt.part.forget_records()
            self._waiting[number] = attempt.part
        parts = [attempt.part for attempt in attempts]
        self._buffer.gone(parts)
        self._buffer.told(parts)  # not yet, but they are safe
