"""Commands of many threads come together here, and are appended together: one sync for all that wait.

One thread at a time leads. It gives the commands that are queued to the lanes of their partitions, and works in
rounds: each lane decides, and says what it would append; all of that is appended in one step; each lane is told its
offset, or that its partition has grown. A lane whose commands are done gets those that came meanwhile in the next
round, while a lane that was second decides again: none waits for another.

A thread leads until its own command is done. Then one of those that wait leads, and takes over what has begun. A
leader gives the others a moment to come back with their next command, if they came together the last time: a sync
takes longer than that.

In a folder one queue has all lanes of a store, as what is appended together there is synced at once. Behind brokers an
append is a transaction of its partition, and each lane has a queue of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from millstream.errors import ConfigError, MillstreamError
from millstream.sourcing.partition_log import Append, AppendAll
from millstream.sourcing.stored_event import Metadata, RawEvent

OnConflict = Literal["retry", "raise"]
GATHER_S = 0.001  # for the threads of the last round to come back; a sync takes about as long
LOOK_AGAIN_S = 0.002  # when an end has moved, and what moved it cannot be read yet
_deciding = threading.local()  # of every queue: two that waited for each other would wait for ever


Steps = Generator[Append | None, int, None]


class CommandLane(Protocol):
    """What a queue needs of a lane."""

    def handle(self, commands: list[PendingCommand]) -> Steps:
        """Give each of these commands its result; yield what is to be appended, or None to look again later."""


@dataclass(slots=True, eq=False)
class PendingCommand:
    """A command on its way. ``events`` or ``error`` is set when it is ``done``.

    ``checks_repeats`` says that its id was given, and may have been handled before; then it has a ``nonce``, see
    ``stored_event``. Its thread has ``abandoned`` it when it was interrupted.
    """

    stream_id: str
    command: Any
    metadata: Metadata
    expected_version: int | None = None
    on_conflict: OnConflict = "retry"
    checks_repeats: bool = True
    nonce: str = ""
    first_seen: int | None = None
    events: list[RawEvent] = field(default_factory=list)
    data: list[Any] = field(default_factory=list)
    version: int = 0
    end: int = 0
    repeated: bool = False
    error: BaseException | None = None
    done: bool = False
    abandoned: bool = False
    _waiting: Any = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._waiting.acquire()

    def wait(self) -> None:
        """Return when it is done, or its thread is to lead, or for nothing."""
        self._waiting.acquire()

    def wake(self) -> None:
        """Have :meth:`wait` return; calling it again does nothing."""
        with suppress(RuntimeError):
            self._waiting.release()


class CommandQueue:
    """Commands that are appended together. Thread-safe.

    An interrupt may come between any two steps, in any thread. So whoever leads hands over whatever happens, and each
    step of that can be done again. Locks are plain ones: of a Condition an interrupt may leave the lock locked.

    Args:
        append: How.
    """

    def __init__(self, append: AppendAll) -> None:
        self._append = append
        self._lock = threading.Lock()  # guards the queue, and who leads
        self._queue: list[tuple[CommandLane, PendingCommand]] = []
        self._leader: PendingCommand | None = None
        self._together = 1  # commands of the last round
        self._gathers = False  # the leader waits for as many, until it can have this:
        self._enough = threading.Lock()
        self._enough.acquire()
        # What follows is the leader's.
        self._running: dict[CommandLane, tuple[Steps, Append | None]] = {}
        self._unfinished: list[PendingCommand] = []  # those of the running lanes

    def handle(self, lane: CommandLane, pending: PendingCommand) -> None:
        """Return when the command has its result, or its error."""
        check_not_deciding()
        try:
            if self._join(lane, pending) or self._wait(pending):
                while not pending.done:
                    self._round()
        except BaseException:
            pending.abandoned = True
            raise
        finally:
            if pending.abandoned or self._leader is pending:
                try:
                    self._leave(pending)
                except BaseException:
                    self._leave(pending)  # it was interrupted itself, and others wait for it
                    raise

    def _join(self, lane: CommandLane, pending: PendingCommand) -> bool:
        """Queue a command; return whether its thread leads."""
        with self._lock:
            self._queue.append((lane, pending))
            if self._leader is None:
                self._leader = pending
            if self._gathers and len(self._queue) >= self._together:
                self._gathers = False
                self._enough.release()
            return self._leader is pending

    def _wait(self, pending: PendingCommand) -> bool:
        """Wait until a command is done, or its thread is to lead; return whether it leads."""
        while True:
            pending.wait()
            with self._lock:
                if pending.done or self._leader is pending:
                    return not pending.done

    def _leave(self, pending: PendingCommand) -> None:
        """Have another thread lead, if this one does; if it was interrupted, what has begun goes on without it."""
        with self._lock:
            self._queue = [one for one in self._queue if one[1] is not pending]
            if self._leader is not pending:
                return
            self._wake_done()
            waiting = [*self._unfinished, *(one for _, one in self._queue)]
            following = next((one for one in waiting if not one.abandoned), None)
            if following is not None:
                following.wake()  # it looks who leads once it has the lock
            elif self._running:  # whoever waited for them was interrupted
                self._abort(KeyboardInterrupt())
                self._unfinished = []
            self._leader = following

    # -- rounds, by the leader ----------------------------------------------------------------

    def _round(self) -> None:
        """Have every lane decide, append what they decided, and tell them."""
        _deciding.now = True
        try:
            taken = self._take()
            for lane in [lane for lane, (_, request) in self._running.items() if request is None]:
                self._advance(lane, self._running[lane][0], None)
            for lane, commands in taken.items():
                steps = lane.handle(commands)
                self._running[lane] = (
                    steps,
                    None,
                )  # before it holds its lane: it is to be ended if this is not
                self._advance(lane, steps, None)
            self._append_all()
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            _deciding.now = False
            self._wake_done()

    def _take(self) -> dict[CommandLane, list[PendingCommand]]:
        """Take what is queued for lanes that are free."""
        self._gather()
        taken: dict[CommandLane, list[PendingCommand]] = {}
        with self._lock:
            left = [one for one in self._queue if one[0] in self._running]
            begun = [one for one in self._queue if one[0] not in self._running]
            for lane, one in begun:
                taken.setdefault(lane, []).append(one)
            unfinished = [*self._unfinished, *(one for _, one in begun)]
            # Nothing between these two: a command is in one of them.
            self._unfinished = unfinished
            self._queue = left
            self._together = len(unfinished)
        return taken

    def _gather(self) -> None:
        """Give those of the last round a moment to come back."""
        if self._together > 1 and not self._running:
            with self._lock:
                self._enough.acquire(
                    blocking=False
                )  # it may be free: whoever released it came too late
                self._gathers = len(self._queue) < self._together
            if self._gathers:
                self._enough.acquire(timeout=GATHER_S)
                self._gathers = False

    def _append_all(self) -> None:
        """Append what the lanes yielded, and give each its result."""
        asked = [
            (lane, steps, request)
            for lane, (steps, request) in self._running.items()
            if request is not None
        ]
        if asked:
            results = self._append([request for _, _, request in asked])
            for (lane, steps, _), result in zip(asked, results, strict=True):
                self._advance(lane, steps, result)
        elif self._running:
            time.sleep(LOOK_AGAIN_S)

    def _advance(
        self, lane: CommandLane, steps: Steps, result: int | MillstreamError | None
    ) -> None:
        """Run a lane to its next append, or to its end."""
        try:
            if isinstance(result, MillstreamError):
                request = steps.throw(result)
            else:
                request = next(steps) if result is None else steps.send(result)
        except StopIteration:
            self._running.pop(lane, None)
        else:
            self._running[lane] = steps, request

    def _abort(self, error: BaseException) -> None:
        """End what has begun: the leader was interrupted, and what it was at may have happened or not."""
        running, self._running = self._running, {}
        for steps, _ in running.values():
            with suppress(BaseException):
                steps.throw(error)
        fail([one for one in self._unfinished if not one.done], interrupted(error))

    def _wake_done(self) -> None:
        for one in self._unfinished:
            if one.done:
                one.wake()
        self._unfinished = [one for one in self._unfinished if not one.done]


@contextmanager
def deciding() -> Iterator[None]:
    """Yield while this thread runs what a user has written, and may hold what a store needs.

    Raises:
        ConfigError: it does so already.
    """
    check_not_deciding()
    try:
        _deciding.now = True
        yield
    finally:
        _deciding.now = False


def check_not_deciding() -> None:
    """Check that this thread is not in a decider: it would wait for itself.

    Raises:
        ConfigError: it is.
    """
    if getattr(_deciding, "now", False):
        raise ConfigError(
            "a store was used from within decide or evolve; load what they need before, and give it with the "
            "command; return events, and send further commands after handle() has returned"
        )


def fail(commands: Sequence[PendingCommand], error: MillstreamError) -> None:
    """Give these commands an error."""
    for one in commands:
        one.error, one.done = error, True


def interrupted(error: BaseException) -> MillstreamError:
    """Return the error of commands whose handling was interrupted."""
    found = MillstreamError(
        f"handling was interrupted ({error!r}), and the command may have been handled; send it again with "
        "the same command id"
    )
    found.__cause__ = error
    return found
