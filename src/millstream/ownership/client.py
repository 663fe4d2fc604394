"""Requests to the process that owns a folder, be it this one or another, and taking ownership over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from millstream.errors import FolderOwnedError, MillstreamError
from millstream.log.writer import LogWriter
from millstream.ownership.access import NO_SOCKET_TIMEOUT_S, RETRY_S, FolderAccess
from millstream.ownership.connection import OwnerConnection, connect_to_owner
from millstream.ownership.frames import PeerGoneError
from millstream.ownership.requests import OwnerRequest, handle_request
from millstream.ownership.server import HAND_OVER, OwnerServer


class OwnerClient:
    """Sends one caller's requests to the owner: over its own connection, or directly in the owner.

    When the connection ends, the owner aborts the transactions that were left open on it. Thread-safe:
    one request at a time.
    """

    def __init__(self, access: FolderAccess) -> None:
        self.access = access
        self._lock = threading.Lock()
        self._connection: OwnerConnection | None = None

    def call(self, request: OwnerRequest) -> Any:
        """Return the owner's response; if the owner changes meanwhile, retry with the next one.

        Raises:
            MillstreamError: the response is an error, or no owner can be reached.
        """
        while True:
            with self.access.use_writer() as writer:
                if writer is not None:
                    self.close()
                    return handle_request(writer, replace(request, in_process=True))
            with self._lock, suppress(PeerGoneError):
                if self._connection is None:
                    self._connection = self.access.own_or_connect()
                if self._connection is not None:
                    request, now = replace(request, retry=True), request
                    return self._send(self._connection, now)

    def _send(self, connection: OwnerConnection, request: OwnerRequest) -> Any:
        try:
            return connection.call(request)
        except MillstreamError:
            raise
        except BaseException:
            self._connection = None  # it is closed
            raise

    def find_owner(self) -> LogWriter | None:
        """Return the writer if this process is the owner, or becomes it; None if another one is.

        Raises:
            MillstreamError: as from :meth:`FolderAccess.own_or_connect`.
        """
        with self.access.use_writer() as writer:
            if writer is not None:
                return writer
        with self._lock:
            if self._connection is None:
                self._connection = self.access.own_or_connect()
            if self._connection is not None:
                return None
        return self.find_owner()

    @contextmanager
    def as_owner(self) -> Iterator[LogWriter]:
        """Yield the writer, for what only the owner can do; another owner is asked to hand over.

        Raises:
            FolderOwnedError: the owner does not hand over.
            MillstreamError: as from :meth:`FolderAccess.own_or_connect`.
        """
        while True:
            with self.access.use_writer() as writer:
                if writer is not None:
                    yield writer
                    return
            with self._lock, suppress(PeerGoneError):
                self._connection = self._connection or self.access.own_or_connect()
                if self._connection is not None:
                    self._send(self._connection, OwnerRequest(HAND_OVER, {}))
            self.close()

    @property
    def owner(self) -> int | None:
        """The process that got the last request; None if that was this one."""
        connection = self._connection
        return None if connection is None else connection.owner

    def close(self) -> None:
        """Close the connection, if there is one."""
        connection = self._connection
        if connection is not None:
            with self._lock:
                self._connection = None
            connection.close()


def take_ownership(folder: Path, server: OwnerServer, wait_s: float = 30.0) -> LogWriter:
    """Own a folder; another owner is asked to hand it over, and becomes a client of this one.

    Args:
        server: Serves other processes; the caller opens it.

    Raises:
        FolderOwnedError: the owner does not hand over.
        MillstreamError: the folder cannot be opened; see ``LogWriter``.
    """
    end_s = time.monotonic() + wait_s
    while True:
        try:
            return LogWriter(folder, server=server)
        except FolderOwnedError:
            if time.monotonic() >= end_s:
                raise
            with suppress(PeerGoneError):
                connection = connect_to_owner(folder, end_s - time.monotonic())
                if connection is None:
                    end_s = min(end_s, time.monotonic() + NO_SOCKET_TIMEOUT_S)
                else:
                    connection.call(OwnerRequest(HAND_OVER, {}))
                    connection.close()
        time.sleep(RETRY_S)
