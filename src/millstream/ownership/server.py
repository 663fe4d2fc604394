"""The server of a folder's owner: it accepts connections from other processes of the same user.

It listens at a Unix-domain socket in the folder, ``owner.sock``, which only the user may open. The owner
listens from the moment at which it has the lock, so that a process that connects while the owner
recovers the log waits for that and for nothing else. Each connection is a session with a thread of its
own, which handles one request after the other; appends of several sessions share a group commit.

======================================  ==========================================================
a client                                the owner
======================================  ==========================================================
connects                                sends a greeting with its process id
sends a request                         sends a response, which may be an error
disconnects, or dies                    aborts the transaction that is open in the session
requests the folder                     finishes running work, closes the log, disconnects
                                        (``access``)
======================================  ==========================================================

The path of a socket has 107 bytes at most. For a longer one the folder is opened, and the socket is
addressed through ``/proc/self/fd``, where the system has that.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from millstream.errors import FolderOwnedError, MillstreamError
from millstream.log.owner import SOCKET_NAME
from millstream.log.producer_identity import ProducerIdentity
from millstream.log.writer import LogWriter
from millstream.ownership.frames import (
    PROTOCOL,
    PeerGoneError,
    error_as_plain,
    receive_frame,
    send_frame,
)
from millstream.ownership.requests import OwnerRequest, handle_request

PATH_BYTES_MAX = 107
BACKLOG = 128
HAND_OVER = "hand_over"
_log = logging.getLogger(__name__)
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


@contextmanager
def socket_path(folder: Path) -> Iterator[str]:
    """Yield a path of the folder's socket that is short enough for the system.

    Raises:
        OSError: there is no such folder.
    """
    path = os.path.join(os.path.abspath(folder), SOCKET_NAME)  # noqa: PTH100, PTH118 - see below
    if len(os.fsencode(path)) <= PATH_BYTES_MAX:  # links are not resolved: they may be short
        yield path
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET_NAME}"
    finally:
        os.close(handle)


def close_in_child(one: socket.socket) -> socket.socket:
    """Return a socket that a forked child does not keep: the other side would wait for its end."""
    _sockets.add(one)
    return one


def _close_in_child() -> None:
    for one in list(_sockets):
        one.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_close_in_child)


def refuse_hand_over() -> None:
    """Refuse to hand the folder over.

    Raises:
        FolderOwnedError: always.
    """
    raise FolderOwnedError(
        f"the log folder is owned by process {os.getpid()}, which serves other processes and does not "
        "release it; stop that process first"
    )


class OwnerServer:
    """Serves the clients of the owner. The ``LogWriter`` starts it; :meth:`open` lets it serve.

    Args:
        hand_over: Called when a client requests the folder; returns when the lock is free. Raises
            FolderOwnedError if the folder cannot be released.
    """

    def __init__(self, folder: Path, hand_over: Callable[[], None] = refuse_hand_over) -> None:
        self._folder = folder
        self._hand_over = hand_over
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._sessions: set[_Session] = set()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._wake: socket.socket | None = None
        self._open_transactions: dict[int, tuple[_Session, ProducerIdentity]] = {}

    def __enter__(self) -> Self:
        """Listen; connections wait until :meth:`open`."""
        listener = close_in_child(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            with socket_path(self._folder) as path:
                listener.bind(path)
                # Nobody can connect before listen(), so nobody connects before the mode is right.
                (self._folder / SOCKET_NAME).chmod(0o600)
                listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            _log.warning(
                "other processes cannot connect to the owner of %s, as its socket could not be made: %s",
                self._folder,
                error,
            )
        else:
            self._listener = listener
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the socket. The lock is still held: it cannot be another owner's."""
        self.close()
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                (self._folder / SOCKET_NAME).unlink(missing_ok=True)
            listener.close()

    def open(self, writer: LogWriter) -> None:
        """Serve the connections that wait, and new ones."""
        if self._listener is not None:
            self._wake, woken = (close_in_child(one) for one in socket.socketpair())
            self._thread = threading.Thread(
                target=self._run,
                args=(self._listener, woken, writer),
                name="millstream-owner-server",
                daemon=True,
            )
            self._thread.start()

    def close(self) -> None:
        """Finish running requests, and end all sessions. Harmless when called again."""
        with self._lock:
            self._closing = True
            sessions = list(self._sessions)
        if self._thread is not None and self._wake is not None:
            self._wake.close()
            self._thread.join()
        for session in sessions:
            session.end()

    def _run(self, listener: socket.socket, woken: socket.socket, writer: LogWriter) -> None:
        with woken, selectors.DefaultSelector() as selector:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)  # close() closes the other end
            while not self._closing:
                selector.select()
                if self._closing:
                    return
                try:
                    connection, _ = listener.accept()
                except OSError:
                    continue
                try:
                    self._accept(connection, writer)
                except Exception:  # noqa: BLE001 - for example no memory for another thread
                    _log.exception("a connection could not be accepted; the client will retry")
                    connection.close()

    def _accept(self, connection: socket.socket, writer: LogWriter) -> None:
        connection.setblocking(True)
        session = _Session(self, close_in_child(connection), writer)
        with self._lock:
            if self._closing:
                connection.close()
                return
            self._sessions.add(session)
        try:
            session.start()
        except BaseException:
            with self._lock:
                self._sessions.discard(session)
            raise

    # -- called by sessions -------------------------------------------------------------------

    def hand_over(self, session: _Session) -> None:
        """Release the folder for the client of a session.

        Raises:
            FolderOwnedError: it cannot be released now.
        """
        with self._lock:
            self._sessions.discard(session)  # else closing would wait for this session
        self._hand_over()

    def track_transaction(
        self, session: _Session, identity: ProducerIdentity | None, *, ended: bool
    ) -> None:
        """Note in which session a transaction is open."""
        if identity is None:
            return
        with self._lock:
            if ended:
                self._open_transactions.pop(identity.producer_id, None)
            else:
                self._open_transactions[identity.producer_id] = session, identity

    def session_ended(self, session: _Session, writer: LogWriter) -> None:
        """Abort the transactions open in a session, unless the client continues with the next owner."""
        with self._lock:
            self._sessions.discard(session)
            if self._closing:
                return
            orphaned = [
                identity
                for of_session, identity in self._open_transactions.values()
                if of_session is session
            ]
            for identity in orphaned:
                del self._open_transactions[identity.producer_id]
        for identity in orphaned:
            try:
                writer.transactions.abort_orphaned(identity)
            except MillstreamError as error:
                _log.warning(
                    "the transaction of a client that disconnected is aborted at its timeout: %s",
                    error,
                )


class _Session:
    """One connection of a client, and the thread that handles its requests."""

    def __init__(self, server: OwnerServer, connection: socket.socket, writer: LogWriter) -> None:
        self._server = server
        self._connection = connection
        self._writer = writer
        self._handling = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name="millstream-owner-session", daemon=True
        )

    def start(self) -> None:
        """Begin to handle requests."""
        self._thread.start()

    def end(self) -> None:
        """End the session once the running request has its response."""
        with self._handling, suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            send_frame(self._connection, {"protocol": PROTOCOL, "owner": os.getpid()})
            while True:
                frame = receive_frame(self._connection)
                with self._handling:
                    send_frame(self._connection, self._handle(frame.header, frame.payload))
        except PeerGoneError:
            pass  # the client has disconnected
        finally:
            self._server.session_ended(self, self._writer)
            self._connection.close()

    def _handle(self, header: dict[str, Any], payload: bytes) -> dict[str, object]:
        try:
            args = header["args"]
            request = OwnerRequest(
                str(header["request"]), args, payload, retry=bool(header["retry"])
            )
            if request.name == HAND_OVER:
                self._server.hand_over(self)
                return {"result": None}
            plain = request.args.get("identity")
            identity = None if plain is None else ProducerIdentity(*plain)
            ends = request.name == "end"
            if not ends:
                self._server.track_transaction(self, identity, ended=False)
            result = handle_request(self._writer, request)
            if ends:
                self._server.track_transaction(self, identity, ended=True)
        except MillstreamError as error:
            return {"error": error_as_plain(error)}
        except Exception as error:  # noqa: BLE001 - a client would retry it with one owner after the other
            _log.exception("a client's request failed")
            return {"error": error_as_plain(MillstreamError(f"the owner failed: {error!r}"))}
        return {"result": result}
