"""A guest's connection: one question at a time to whoever owns the folder now."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from millstream.errors import FolderOwnedError
from millstream.joining.frames import (
    OwnerGone,
    check_protocol,
    error_from_plain,
    receive_frame,
    send_frame,
)
from millstream.joining.gate import close_in_child, gate_path
from millstream.joining.requests import Asked
from millstream.log.files import DISK
from millstream.log.owner import owner_of

GREETING_S = 30.0  # an owner that recovers a large log greets late; one that is stopped never does


class Guest:
    """A connection to the owner; :func:`dial` makes it."""

    def __init__(self, connection: socket.socket, owner: int) -> None:
        self._connection = connection
        self.owner = owner

    def ask(self, asked: Asked) -> Any:
        """Return the owner's answer, however long it takes: a stopped owner still owns.

        Raises:
            MillstreamError: it is an error.
            OwnerGone: there is none; the question may have been answered nevertheless.
        """
        header = {"ask": asked.name, "again": asked.again, "args": asked.args}
        try:
            send_frame(self._connection, header, asked.payload)
            answered = receive_frame(self._connection).header
        except BaseException:
            self.close()  # in the middle of a question, nothing else can be asked here
            raise
        if "error" in answered:
            raise error_from_plain(answered["error"])
        return answered["result"]

    def close(self) -> None:
        """Go."""
        self._connection.close()


def dial(folder: Path, greeting_s: float = GREETING_S) -> Guest | None:
    """Return a connection to the owner of a folder; None if nobody lets others in there.

    Raises:
        OwnerGone: somebody did, and does no longer.
        FolderOwnedError: the owner does not greet; it may have been stopped.
        ConfigError: it is of another version.
    """
    connection = close_in_child(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    connection.settimeout(greeting_s)
    try:
        try:
            with gate_path(folder) as path:
                connection.connect(path)
        except FileNotFoundError:
            connection.close()
            return None
        except OSError as error:
            raise OwnerGone(str(error)) from error
        try:
            greeting = receive_frame(connection).header
        except TimeoutError:
            raise FolderOwnedError(
                f"the log folder {folder} is owned by process {owner_of(folder, DISK)}, which has not "
                f"answered for {greeting_s:.0f} s; if it was stopped, let it go on, or end it: the "
                "next call takes over"
            ) from None
        connection.settimeout(None)
        check_protocol(greeting.get("protocol"))
    except BaseException:
        with suppress(OSError):
            connection.close()
        raise
    return Guest(connection, int(greeting["owner"]))
