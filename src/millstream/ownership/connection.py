"""A connection to the process that owns the folder now: one request at a time."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from millstream.errors import FolderOwnedError
from millstream.log.files import DISK
from millstream.log.owner import owner_of
from millstream.ownership.frames import (
    PeerGoneError,
    check_protocol,
    error_from_plain,
    receive_frame,
    send_frame,
)
from millstream.ownership.requests import OwnerRequest
from millstream.ownership.server import close_in_child, socket_path

# an owner that recovers a large log sends its greeting late; a stopped one never sends it
GREETING_TIMEOUT_S = 30.0


class OwnerConnection:
    """A connection to the owner; :func:`connect_to_owner` makes it."""

    def __init__(self, connection: socket.socket, owner: int) -> None:
        self._connection = connection
        self.owner = owner

    def call(self, request: OwnerRequest) -> Any:
        """Return the owner's response, however long it takes: a stopped owner still owns.

        Raises:
            MillstreamError: the response is an error.
            PeerGoneError: no response came; the request may have been handled nevertheless.
        """
        header = {"request": request.name, "retry": request.retry, "args": request.args}
        try:
            send_frame(self._connection, header, request.payload)
            response = receive_frame(self._connection).header
        except BaseException:
            self.close()  # in the middle of a request, the connection can carry no other
            raise
        if "error" in response:
            raise error_from_plain(response["error"])
        return response["result"]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def connect_to_owner(
    folder: Path, greeting_s: float = GREETING_TIMEOUT_S
) -> OwnerConnection | None:
    """Return a connection to the owner of a folder; None if it has no socket.

    Raises:
        PeerGoneError: there is a socket, and no process listens at it any more.
        FolderOwnedError: the owner sends no greeting; it may have been stopped.
        ConfigError: the owner runs another version.
    """
    connection = close_in_child(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    connection.settimeout(greeting_s)
    try:
        try:
            with socket_path(folder) as path:
                connection.connect(path)
        except FileNotFoundError:
            connection.close()
            return None
        except OSError as error:
            raise PeerGoneError(str(error)) from error
        try:
            greeting = receive_frame(connection).header
        except TimeoutError:
            raise FolderOwnedError(
                f"the log folder {folder} is owned by process {owner_of(folder, DISK)}, which has not "
                f"responded for {greeting_s:.0f} s; if it was stopped, let it continue, or end it: the "
                "next call takes over"
            ) from None
        connection.settimeout(None)
        check_protocol(greeting.get("protocol"))
    except BaseException:
        with suppress(OSError):
            connection.close()
        raise
    return OwnerConnection(connection, int(greeting["owner"]))
