"""The sender thread of a producer: takes what is queued, makes batches of it, and appends them.

One thread, so that the records for one partition keep their order. What is taken together is
committed together. Where the disk has no room, nothing of the failed batches was appended, so they
are tried again, in their order, before anything that came after them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

from millstream.client.buffer import Buffer
from millstream.client.parts import Part
from millstream.client.writing import Append, Writer
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
from millstream.log.group_commit import Durability
from millstream.record import TopicPartition

_PAUSE_S_MIN, _PAUSE_S_HURRIED, _PAUSE_S_MAX = 0.01, 0.05, 1.0
_CLOSED = "the producer was closed before the record was sent; send it with another"
Stamp = Callable[[TopicPartition, EncodedBatch], EncodedBatch]


class Attempt(NamedTuple):
    """A part with its batch, which may be appended more than once if it was refused."""

    part: Part
    batch: EncodedBatch


@dataclass(frozen=True, slots=True)
class SendSettings:
    """How batches are appended.

    ``patience_s`` is for how long a batch is tried again for which the disk has no room; then its
    records fail.
    """

    durability: Durability
    compression: CompressionName
    patience_s: float


class Pause:
    """How long to wait before the next try: longer each time, until one succeeds."""

    def __init__(self) -> None:
        self._next_s = _PAUSE_S_MIN
        self._since_s: float | None = None

    def next_s(self, *, hurried: bool) -> float:
        """Return the next pause; a short one if somebody waits."""
        if self._since_s is None:
            self._since_s = time.monotonic()
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, _PAUSE_S_MAX)
        return min(pause_s, _PAUSE_S_HURRIED) if hurried else pause_s

    def lasted_s(self) -> float:
        """Return for how long nothing has succeeded."""
        return 0.0 if self._since_s is None else time.monotonic() - self._since_s

    def over(self) -> None:
        """Begin again: something succeeded."""
        self._next_s, self._since_s = _PAUSE_S_MIN, None


class Sender:
    """Appends what is in ``buffer``, from a thread of its own, until the buffer closes.

    Args:
        stamp: Turns a batch into one of the producer's transaction; None leaves it as it is.
        on_taken: Called with the topics of which something was taken.
    """

    def __init__(
        self,
        writer: Writer,
        buffer: Buffer,
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
        self._untold: dict[int, Part] = {}  # by id(); taken, and not told their outcome
        self._no_room: DiskFullError | None = None
        self._thread = threading.Thread(target=self._run, name="millstream-producer", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self) -> None:
        """Return when the thread has ended; the buffer must be closing."""
        self._thread.join()

    def settled(self) -> Callable[[], bool]:
        """Return what says, under the buffer's lock, whether all sent so far has its outcome."""
        return lambda: not self._buffer.busy

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            # Where the flush of a close was interrupted, something is left.
            self._give_up(self._take(everything=True), FencedError(_CLOSED))
        except BaseException as error:  # noqa: BLE001 - raised again by the next call
            self._buffer.die(error)
            for part in list(self._untold.values()):
                part.failed(error)

    def _turn(self) -> bool:
        """Send once what is due; False when there will be nothing more."""
        if not self._buffer.wait_due():
            return False
        self._send(self._take())
        return True

    def _take(self, *, everything: bool = False) -> list[Part]:
        parts = self._buffer.take(everything=everything)
        self._untold |= {id(part): part for part in parts}
        self._on_taken({part.name.topic for part in parts})
        return parts

    def _send(self, parts: Sequence[Part]) -> None:
        refused = self._append(self._encode(parts))
        pause = Pause()
        while refused and not self._set_aside(refused):
            patient = not self._out_of_patience(pause.lasted_s())
            if patient:
                self._buffer.pause(pause.next_s(hurried=self._buffer.hurried))
            refused = self._taken_up(refused)
            if not patient:
                assert self._no_room is not None, "something was refused for want of room"
                self._give_up([attempt.part for attempt in refused], self._no_room)
                return
            refused = self._append(refused)

    def _encode(self, parts: Sequence[Part]) -> list[Attempt]:
        """Return the parts with their batches; those that cannot be encoded are told so."""
        attempts = []
        for part in parts:
            try:
                batch = compress(part.encode(), self._settings.compression)
            except MillstreamError as error:
                self._tell([(part, error)])
            else:
                ready = self._stamp(part.name, batch) if self._stamp else batch
                attempts.append(Attempt(part, ready))
        return attempts

    def _append(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Commit the batches together; return those for which the disk has no room.

        Raises:
            MillstreamError: the log takes nothing any more.
        """
        outcomes: list[tuple[Part, int | MillstreamError]] = []
        pending: list[tuple[Attempt, Append]] = []
        for attempt in attempts:
            try:
                append = self._writer.pending(*attempt.part.name, attempt.batch)
            except MillstreamError as error:
                outcomes.append((attempt.part, error))
            else:
                pending.append((attempt, append))
        started_s = time.monotonic()
        self._writer.commit([append for _, append in pending], self._settings.durability)
        took_s = time.monotonic() - started_s
        self._buffer.note_commit([attempt.part for attempt, _ in pending], took_s)
        refused = []
        for attempt, append in pending:
            if isinstance(append.error, DiskFullError):
                self._no_room = append.error
                refused.append(attempt)
            else:
                outcomes.append((attempt.part, append.error or append.offset))
        fatal = [error for _, error in outcomes if _is_fatal(error)]
        if fatal:
            self._buffer.die(fatal[0])  # first, so that nobody sees the failures without it
        self._tell(outcomes)
        if fatal:
            raise fatal[0]
        return refused

    # -- no room on the disk ------------------------------------------------------------------

    def _set_aside(self, _refused: list[Attempt]) -> bool:
        """Put refused batches where they are safe until there is room; False: nowhere."""
        return False

    def _taken_up(self, refused: list[Attempt]) -> list[Attempt]:
        """Return those of the refused batches that nobody has set aside meanwhile."""
        return refused

    def _out_of_patience(self, lasted_s: float) -> bool:
        return lasted_s >= self._settings.patience_s or self._buffer.giving_up

    def _give_up(self, parts: Collection[Part], error: MillstreamError) -> None:
        self._tell([(part, error) for part in parts], dropped=True)

    # -- outcomes -----------------------------------------------------------------------------

    def _tell(
        self, outcomes: Sequence[tuple[Part, int | MillstreamError]], *, dropped: bool = False
    ) -> None:
        """Make room, then tell each part its offset, or why it has none."""
        parts = [part for part, _ in outcomes]
        self._buffer.gone(parts)
        for part, outcome in outcomes:
            self._untold.pop(id(part), None)
            if isinstance(outcome, int):
                part.appended(outcome)
            else:
                self._buffer.note_failure(outcome, dropped=part.count if dropped else 0)
                part.failed(outcome)
        self._buffer.told(parts)


def _is_fatal(outcome: int | MillstreamError) -> TypeGuard[MillstreamError]:
    return not isinstance(outcome, int | RetriableError | ConfigError | ConflictError)
