"""A process's standing with a log folder: its owner, a guest of the owner, or not decided yet.

Whoever wants something written finds this process to be the owner, and calls the ``LogWriter``; or it
asks the owner through a connection of its own (a :class:`Line`). When the owner dies, every guest sees
its connections end at once. The next one that asks tries for the lock, and becomes the owner, or
finds the one that was quicker; then it asks again, what it had asked already (see ``requests``).

=========================  =============  ========================================================
the lock is                the gate       done
=========================  =============  ========================================================
free                       whatever       this process becomes the owner
held                       open           this process becomes a guest
held                       not there      tried again for ``ABSENT_S``; the owner serves nobody then
held                       closed         tried again for ``CLOSED_S``: the owner comes, or goes
=========================  =============  ========================================================
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from millstream.errors import FencedError, FolderOwnedError, MillstreamError
from millstream.joining.frames import OwnerGone
from millstream.joining.gate import HAND_OVER, Gate
from millstream.joining.guest import Guest, dial
from millstream.joining.requests import Asked, answer
from millstream.log.reader import LogReader
from millstream.log.retention import RetentionRisk
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

ABSENT_S, CLOSED_S = 0.5, 10.0
PAUSE_S = 0.01  # between two tries: a flock and a connect, some 50 microseconds
HAND_OVER_S = 10.0  # for what is at work in the owner to end
RESERVED_S = 2.0  # for whom the folder was given up to take it
_accesses: weakref.WeakSet[FolderAccess] = weakref.WeakSet()


class FolderAccess:
    """One for all connections of a process to a folder. Thread-safe; unusable in a forked child."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._changed = threading.Condition()
        self._opening = threading.Lock()
        self._writer: LogWriter | None = None
        self._gate: Gate | None = None
        self._at_work = 0
        self._leaving = False
        self._reserved_until_s = 0.0
        self._refusal: MillstreamError | None = None
        self._risk_callbacks: list[Callable[[RetentionRisk], None]] = []
        self._catalog = LogReader(folder)
        self._catalog_lock = threading.Lock()
        _accesses.add(self)

    # -- being the owner ----------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[LogWriter | None]:
        """Give the writer, which stays open meanwhile; None if this process is not the owner.

        Raises:
            FencedError: the last connection to the folder was closed.
        """
        with self._changed:
            while self._leaving:
                self._changed.wait()
            if self._refusal is not None:
                raise self._refusal.with_traceback(None)
            writer = self._writer
            if writer is not None:
                self._at_work += 1
        if writer is None:
            yield None
            return
        try:
            yield writer
        finally:
            with self._changed:
                self._at_work -= 1
                if self._leaving:
                    self._changed.notify_all()

    def reach(self) -> Guest | None:
        """Become the owner, and return None; or return a connection to the owner.

        Raises:
            FolderOwnedError: the owner serves nobody, or does not answer.
            MillstreamError: the folder cannot be opened; see ``LogWriter``.
        """
        since_s = time.monotonic()
        while True:
            owned = self._try_to_own()
            if owned is None:
                return None
            patience_s = CLOSED_S
            try:
                guest = dial(self.folder)
                if guest is not None:
                    return guest
                patience_s = ABSENT_S
            except OwnerGone:
                pass
            if time.monotonic() - max(since_s, self._reserved_until_s) > patience_s:
                raise owned
            time.sleep(PAUSE_S)

    def _try_to_own(self) -> FolderOwnedError | None:
        """Become the owner, or return why that cannot be now."""
        with self._opening:
            if self._writer is not None:
                return None
            if time.monotonic() < self._reserved_until_s:
                return FolderOwnedError(f"the log folder {self.folder} was just given up")
            gate = Gate(self.folder, self.hand_over)
            try:
                writer = LogWriter(self.folder, gate=gate)
            except FolderOwnedError as error:
                return error
            for callback in self._risk_callbacks:
                writer.housekeeper.on_risk(callback)
            with self._changed:
                if self._refusal is None:
                    self._writer, self._gate = writer, gate
                    gate.open(writer)
                    return None
            writer.close()  # the last connection was closed meanwhile
            raise self._refusal.with_traceback(None)

    def hand_over(self) -> None:
        """Give the folder up for another process; this one is its guest from then on.

        1. Who comes waits, and what is at work in this process ends. 2. The gate is closed, and with
        it what guests have asked is answered. 3. The log is closed, and the lock is free. A crash at
        any point leaves what a crash of the owner leaves.

        Raises:
            FolderOwnedError: something at work here does not end.
        """
        with self._changed:
            writer, gate = self._writer, self._gate
            if writer is None or gate is None or self._leaving:
                return  # given up already
            end_s = time.monotonic() + HAND_OVER_S
            while writer.transactions.open_in_process() and time.monotonic() < end_s:
                self._changed.wait(PAUSE_S)  # its producer goes on meanwhile
            self._leaving = not writer.transactions.open_in_process()
            if not self._leaving or not self._changed.wait_for(
                lambda: not self._at_work, max(end_s - time.monotonic(), 0)
            ):
                self._stay()
                raise FolderOwnedError(
                    f"the log folder {self.folder} is owned by process {os.getpid()}, which is in "
                    "the middle of a transaction or of other work; try again"
                )
        try:
            gate.close()
            writer.close()
        finally:
            with self._changed:
                self._writer = self._gate = None
                self._reserved_until_s = time.monotonic() + RESERVED_S
                self._stay()

    def _stay(self) -> None:
        """Let in again who waits. Called locked."""
        self._leaving = False
        self._changed.notify_all()

    def on_risk(self, callback: Callable[[RetentionRisk], None]) -> None:
        """Call ``callback`` while this process is the owner, now or later."""
        with self._opening:
            self._risk_callbacks.append(callback)
            if self._writer is not None:
                self._writer.housekeeper.on_risk(callback)

    def close(self) -> None:
        """Be nobody any more. Guests take over; what they have asked is answered before.

        Raises:
            SyncFailedError: records that were acknowledged when they were written may be lost.
        """
        with self._changed:
            self._refusal = self._refusal or FencedError(
                f"the log {self.folder} was closed; connect again"
            )
            writer, self._writer = self._writer, None
            gate, self._gate = self._gate, None
        with self._catalog_lock:
            self._catalog.close()
        if writer is not None:
            if gate is not None:
                gate.close()
            writer.close()

    # -- what both know -----------------------------------------------------------------------

    def partition_count(self, topic: str) -> int:
        """Return how many partitions a topic has.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        writer = self._writer
        if writer is not None:
            return writer.partition_count(topic)
        with self._catalog_lock:
            return self._catalog.partition_count(topic)

    def check_place(self, name: TopicPartition) -> None:
        """Make sure that a partition is there.

        Raises:
            UnknownTopicError, ConfigError: it is not.
        """
        with self._catalog_lock:
            self._catalog.end_offset(*name)

    def disable_in_child(self) -> None:
        """Refuse everything in a forked child: the connections, and the folder, are the parent's."""
        self._changed, self._opening = threading.Condition(), threading.Lock()
        self._catalog_lock = threading.Lock()
        self._writer, self._gate, self._leaving = None, None, False
        self._refusal = FencedError(
            f"the log {self.folder} was opened before a fork; connect again in the child"
        )


def _disable_in_child() -> None:
    for access in list(_accesses):
        access.disable_in_child()


os.register_at_fork(after_in_child=_disable_in_child)


class Line:
    """One caller's way to the owner: a connection of its own, or none where this process owns.

    What its transactions leave open is aborted when it goes. Thread-safe: one question at a time.
    """

    def __init__(self, access: FolderAccess) -> None:
        self.access = access
        self._lock = threading.Lock()
        self._guest: Guest | None = None

    def ask(self, asked: Asked) -> Any:
        """Return the answer of whoever owns the folder, as often as that changes meanwhile.

        Raises:
            MillstreamError: the answer is an error, or nobody can be asked.
        """
        while True:
            with self.access.writing() as writer:
                if writer is not None:
                    self.hang_up()
                    return answer(writer, replace(asked, in_process=True))
            with self._lock, suppress(OwnerGone):
                if self._guest is None:
                    self._guest = self.access.reach()
                if self._guest is not None:
                    asked, now = replace(asked, again=True), asked
                    return self._asked(self._guest, now)

    def _asked(self, guest: Guest, asked: Asked) -> Any:
        try:
            return guest.ask(asked)
        except MillstreamError:
            raise
        except BaseException:
            self._guest = None  # it is closed
            raise

    def reach(self) -> LogWriter | None:
        """Find out who owns the folder, becoming the owner if nobody does; None if another does.

        Raises:
            MillstreamError: as from :meth:`FolderAccess.reach`.
        """
        with self.access.writing() as writer:
            if writer is not None:
                return writer
        with self._lock:
            if self._guest is None:
                self._guest = self.access.reach()
            if self._guest is not None:
                return None
        return self.reach()

    @contextmanager
    def owning(self) -> Iterator[LogWriter]:
        """Give the writer, for what only the owner can do; an owner elsewhere is asked to give it up.

        Raises:
            FolderOwnedError: it does not.
            MillstreamError: as from :meth:`FolderAccess.reach`.
        """
        while True:
            with self.access.writing() as writer:
                if writer is not None:
                    yield writer
                    return
            with self._lock, suppress(OwnerGone):
                self._guest = self._guest or self.access.reach()
                if self._guest is not None:
                    self._asked(self._guest, Asked(HAND_OVER, {}))
            self.hang_up()

    @property
    def owner(self) -> int | None:
        """The process that was asked last; None if that was this one."""
        guest = self._guest
        return None if guest is None else guest.owner

    def hang_up(self) -> None:
        """Close the connection, if there is one."""
        guest = self._guest
        if guest is not None:
            with self._lock:
                self._guest = None
            guest.close()


def claim(folder: Path, gate: Gate, wait_s: float = 30.0) -> LogWriter:
    """Own a folder, asking an owner that has it to give it up; it becomes a guest.

    Args:
        gate: Through which others reach this process; to be opened by the caller.

    Raises:
        FolderOwnedError: the owner does not give it up.
        MillstreamError: the folder cannot be opened; see ``LogWriter``.
    """
    end_s = time.monotonic() + wait_s
    while True:
        try:
            return LogWriter(folder, gate=gate)
        except FolderOwnedError:
            if time.monotonic() >= end_s:
                raise
            with suppress(OwnerGone):
                guest = dial(folder, end_s - time.monotonic())
                if guest is None:
                    end_s = min(end_s, time.monotonic() + ABSENT_S)
                else:
                    guest.ask(Asked(HAND_OVER, {}))
                    guest.close()
        time.sleep(PAUSE_S)
