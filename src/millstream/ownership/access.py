"""Whether this process owns a log folder, or is a client of the owner.

A process that wants to write either owns the folder, and calls the ``LogWriter``; or it sends requests
to the owner, over a connection of its own (:class:`OwnerClient`). When the owner dies, each client sees
its connection end at once. The next one that sends a request tries to take the lock. It becomes the
owner, or it finds the process that took the lock first and sends its request again, as a retry (see
``requests``).

=========================  =============  ========================================================
the lock is                the socket is  then
=========================  =============  ========================================================
free                       any            this process becomes the owner
held                       open           this process becomes a client of the owner
held                       missing        retried for ``NO_SOCKET_TIMEOUT_S``: the owner serves no
                                          other process
held                       closed         retried for ``CLOSED_TIMEOUT_S``: the owner starts or ends
=========================  =============  ========================================================
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from millstream.errors import FencedError, FolderOwnedError, MillstreamError
from millstream.log.reader import LogReader
from millstream.log.retention import RetentionRisk
from millstream.log.writer import LogWriter
from millstream.ownership.connection import OwnerConnection, connect_to_owner
from millstream.ownership.frames import PeerGoneError
from millstream.ownership.server import OwnerServer
from millstream.record import TopicPartition

NO_SOCKET_TIMEOUT_S, CLOSED_TIMEOUT_S = 0.5, 10.0
RETRY_S = 0.01  # between two attempts: a flock and a connect, some 50 microseconds
HAND_OVER_S = 10.0  # for running work in the owner to end
RESERVED_S = 2.0  # in which only the process that requested the folder may take it
_accesses: weakref.WeakSet[FolderAccess] = weakref.WeakSet()


class FolderAccess:
    """One for all connections of a process to a folder. Thread-safe; unusable in a forked child."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._changed = threading.Condition()
        self._opening = threading.Lock()
        self._writer: LogWriter | None = None
        self._server: OwnerServer | None = None
        self._writer_users = 0
        self._handing_over = False
        self._reserved_until_s = 0.0
        self._closed_error: MillstreamError | None = None
        self._risk_callbacks: list[Callable[[RetentionRisk], None]] = []
        self._catalog = LogReader(folder)
        self._catalog_lock = threading.Lock()
        _accesses.add(self)

    # -- as the owner -------------------------------------------------------------------------

    @contextmanager
    def use_writer(self) -> Iterator[LogWriter | None]:
        """Yield the writer, which stays open in the block; None if this process is not the owner.

        Raises:
            FencedError: the last connection to the folder was closed.
        """
        with self._changed:
            while self._handing_over:
                self._changed.wait()
            if self._closed_error is not None:
                raise self._closed_error.with_traceback(None)
            writer = self._writer
            if writer is not None:
                self._writer_users += 1
        if writer is None:
            yield None
            return
        try:
            yield writer
        finally:
            with self._changed:
                self._writer_users -= 1
                if self._handing_over:
                    self._changed.notify_all()

    def own_or_connect(self) -> OwnerConnection | None:
        """Become the owner, and return None; or return a connection to the owner.

        Raises:
            FolderOwnedError: the owner serves no other process, or does not respond.
            MillstreamError: the folder cannot be opened; see ``LogWriter``.
        """
        since_s = time.monotonic()
        while True:
            owned = self._try_to_own()
            if owned is None:
                return None
            timeout_s = CLOSED_TIMEOUT_S
            try:
                connection = connect_to_owner(self.folder)
                if connection is not None:
                    return connection
                timeout_s = NO_SOCKET_TIMEOUT_S
            except PeerGoneError:
                pass
            if time.monotonic() - max(since_s, self._reserved_until_s) > timeout_s:
                raise owned
            time.sleep(RETRY_S)

    def _try_to_own(self) -> FolderOwnedError | None:
        """Become the owner, or return why this process cannot be the owner now."""
        with self._opening:
            if self._writer is not None:
                return None
            if time.monotonic() < self._reserved_until_s:
                return FolderOwnedError(f"the log folder {self.folder} was just handed over")
            server = OwnerServer(self.folder, self.hand_over)
            try:
                writer = LogWriter(self.folder, server=server)
            except FolderOwnedError as error:
                return error
            for callback in self._risk_callbacks:
                writer.maintenance.on_risk(callback)
            with self._changed:
                if self._closed_error is None:
                    self._writer, self._server = writer, server
                    server.open(writer)
                    return None
            writer.close()  # the last connection was closed meanwhile
            raise self._closed_error.with_traceback(None)

    def hand_over(self) -> None:
        """Release the folder for another process; this one is a client of it from then on.

        1. New calls wait, and running work in this process ends. 2. The server is closed, after it has
        responded to the requests of clients. 3. The log is closed, and the lock is free. A crash at
        any point leaves what a crash of the owner leaves.

        Raises:
            FolderOwnedError: running work in this process does not end.
        """
        with self._changed:
            writer, server = self._writer, self._server
            if writer is None or server is None or self._handing_over:
                return  # handed over already
            end_s = time.monotonic() + HAND_OVER_S
            while writer.transactions.open_in_process() and time.monotonic() < end_s:
                self._changed.wait(RETRY_S)  # its producer continues meanwhile
            self._handing_over = not writer.transactions.open_in_process()
            if not self._handing_over or not self._changed.wait_for(
                lambda: not self._writer_users, max(end_s - time.monotonic(), 0)
            ):
                self._resume()
                raise FolderOwnedError(
                    f"the log folder {self.folder} is owned by process {os.getpid()}, which is in "
                    "the middle of a transaction or of other work; try again"
                )
        try:
            server.close()
            writer.close()
        finally:
            with self._changed:
                self._writer = self._server = None
                self._reserved_until_s = time.monotonic() + RESERVED_S
                self._resume()

    def _resume(self) -> None:
        """Let waiting calls continue. Called locked."""
        self._handing_over = False
        self._changed.notify_all()

    def on_risk(self, callback: Callable[[RetentionRisk], None]) -> None:
        """Call ``callback`` while this process is the owner, now or later."""
        with self._opening:
            self._risk_callbacks.append(callback)
            if self._writer is not None:
                self._writer.maintenance.on_risk(callback)

    def close(self) -> None:
        """Close the folder. If this process owns it, clients get their responses, and take over.

        Raises:
            SyncFailedError: records that were acknowledged when they were written may be lost.
        """
        with self._changed:
            self._closed_error = self._closed_error or FencedError(
                f"the log {self.folder} was closed; connect again"
            )
            writer, self._writer = self._writer, None
            server, self._server = self._server, None
        with self._catalog_lock:
            self._catalog.close()
        if writer is not None:
            if server is not None:
                server.close()
            writer.close()

    # -- as the owner or as a client ----------------------------------------------------------

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

    def check_partition(self, name: TopicPartition) -> None:
        """Check that a partition exists.

        Raises:
            UnknownTopicError, ConfigError: it does not.
        """
        with self._catalog_lock:
            self._catalog.end_offset(*name)

    def disable_in_child(self) -> None:
        """Refuse everything in a forked child: the connections, and the folder, are the parent's."""
        self._changed, self._opening = threading.Condition(), threading.Lock()
        self._catalog_lock = threading.Lock()
        self._writer, self._server, self._handing_over = None, None, False
        self._closed_error = FencedError(
            f"the log {self.folder} was opened before a fork; connect again in the child"
        )


def _disable_in_child() -> None:
    for access in list(_accesses):
        access.disable_in_child()


os.register_at_fork(after_in_child=_disable_in_child)
