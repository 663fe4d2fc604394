"""The gate: where the owner of a folder lets other processes of the same user in.

A Unix-domain socket in the folder, ``GATE``, which only the user may open. The owner listens from the
moment at which it has the lock, so that whoever comes while it recovers the log waits for that and for
nothing else. Each connection has a thread, which answers one question after the other; appends of
several meet in the group commit.

======================================  ==========================================================
a guest                                 the owner
======================================  ==========================================================
comes                                   greets it, with its process id
asks                                    answers; an error is an answer
goes, or dies                           aborts the transaction that was begun there, if one is open
asks for the folder                     finishes what is at work, closes the log, goes (``access``)
======================================  ==========================================================

A path of a socket has 107 bytes at most. The folder of a longer one is opened, and the socket named
through ``/proc/self/fd``, where there is such a thing.
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
from typing import Self

from millstream.errors import FolderOwnedError, MillstreamError
from millstream.joining.frames import (
    PROTOCOL,
    OwnerGone,
    error_as_plain,
    receive_frame,
    send_frame,
)
from millstream.joining.requests import Asked, answer
from millstream.log.named_producers import ProducerIdentity
from millstream.log.owner import GATE_NAME
from millstream.log.writer import LogWriter

PATH_BYTES_MAX = 107
BACKLOG = 128
HAND_OVER = "hand_over"
_log = logging.getLogger(__name__)
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


@contextmanager
def gate_path(folder: Path) -> Iterator[str]:
    """Give a path of the folder's gate that is short enough for a socket.

    Raises:
        OSError: there is no such folder.
    """
    path = os.path.join(os.path.abspath(folder), GATE_NAME)  # noqa: PTH100, PTH118 - see below
    if len(os.fsencode(path)) <= PATH_BYTES_MAX:  # links are left as they are: they may be short
        yield path
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{handle}/{GATE_NAME}"
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


def hand_nothing_over() -> None:
    """Refuse to give the folder up.

    Raises:
        FolderOwnedError: always.
    """
    raise FolderOwnedError(
        f"the log folder is owned by process {os.getpid()}, which serves others and does not give it "
        "up; stop that process first"
    )


class Gate:
    """The owner's side. To be handed to the ``LogWriter``, and then opened for it.

    Args:
        hand_over: Called when a guest asks for the folder; returns when it is free. Raises
            FolderOwnedError if it will not be.
    """

    def __init__(self, folder: Path, hand_over: Callable[[], None] = hand_nothing_over) -> None:
        self._folder = folder
        self._hand_over = hand_over
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._visits: set[_Visit] = set()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._wake: socket.socket | None = None
        self.held: dict[int, tuple[_Visit, ProducerIdentity]] = {}

    def __enter__(self) -> Self:
        """Listen; who comes waits until the gate is opened."""
        listener = close_in_child(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            with gate_path(self._folder) as path:
                listener.bind(path)
                # Between these two nobody can come in, so nobody comes before the mode is right.
                (self._folder / GATE_NAME).chmod(0o600)
                listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            _log.warning(
                "no other process can join this one in %s, as there can be no socket: %s",
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
                (self._folder / GATE_NAME).unlink(missing_ok=True)
            listener.close()

    def open(self, writer: LogWriter) -> None:
        """Let in who waits, and who comes."""
        if self._listener is not None:
            self._wake, woken = (close_in_child(one) for one in socket.socketpair())
            self._thread = threading.Thread(
                target=self._run,
                args=(self._listener, woken, writer),
                name="millstream-gate",
                daemon=True,
            )
            self._thread.start()

    def close(self) -> None:
        """Answer what is being asked, and let everybody go. Harmless when called again."""
        with self._lock:
            self._closing = True
            visits = list(self._visits)
        if self._thread is not None and self._wake is not None:
            self._wake.close()
            self._thread.join()
        for visit in visits:
            visit.end()

    def _run(self, listener: socket.socket, woken: socket.socket, writer: LogWriter) -> None:
        with woken, selectors.DefaultSelector() as selector:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)  # its other end is closed at the end
            while not self._closing:
                selector.select()
                if self._closing:
                    return
                try:
                    connection, _ = listener.accept()
                except OSError:
                    continue
                try:
                    self._let_in(connection, writer)
                except Exception:  # noqa: BLE001 - such as no room for another thread
                    _log.exception("a guest could not be let in; it is to come again")
                    connection.close()

    def _let_in(self, connection: socket.socket, writer: LogWriter) -> None:
        connection.setblocking(True)
        visit = _Visit(self, close_in_child(connection), writer)
        with self._lock:
            if self._closing:
                connection.close()
                return
            self._visits.add(visit)
        try:
            visit.start()
        except BaseException:
            with self._lock:
                self._visits.discard(visit)
            raise

    # -- what visits need ---------------------------------------------------------------------

    def hand_over(self, visit: _Visit) -> None:
        """Free the folder for the guest of a visit.

        Raises:
            FolderOwnedError: it cannot be now.
        """
        with self._lock:
            self._visits.discard(visit)  # or it would be waited for
        self._hand_over()

    def note_open(self, visit: _Visit, identity: ProducerIdentity | None, *, ended: bool) -> None:
        """Note in which visit a transaction goes on."""
        if identity is None:
            return
        with self._lock:
            if ended:
                self.held.pop(identity.producer_id, None)
            else:
                self.held[identity.producer_id] = visit, identity

    def gone(self, visit: _Visit, writer: LogWriter) -> None:
        """Abort what was left open in a visit, unless its guest is to go on with the next owner."""
        with self._lock:
            self._visits.discard(visit)
            if self._closing:
                return
            left = [identity for of_visit, identity in self.held.values() if of_visit is visit]
            for identity in left:
                del self.held[identity.producer_id]
        for identity in left:
            try:
                writer.transactions.take_back(identity)
            except MillstreamError as error:
                _log.warning("a guest's transaction is aborted when its time is over: %s", error)


class _Visit:
    """One connection, and the thread that answers there."""

    def __init__(self, gate: Gate, connection: socket.socket, writer: LogWriter) -> None:
        self._gate = gate
        self._connection = connection
        self._writer = writer
        self._answering = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="millstream-guest", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def end(self) -> None:
        """End the visit once the question at work is answered."""
        with self._answering, suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            send_frame(self._connection, {"protocol": PROTOCOL, "owner": os.getpid()})
            while True:
                frame = receive_frame(self._connection)
                with self._answering:
                    send_frame(self._connection, self._answer(frame.header, frame.payload))
        except OwnerGone:
            pass  # it is the guest that has gone
        finally:
            self._gate.gone(self, self._writer)
            self._connection.close()

    def _answer(self, header: dict[str, object], payload: bytes) -> dict[str, object]:
        try:
            args = header["args"]
            asked = Asked(str(header["ask"]), args, payload, again=bool(header["again"]))  # type: ignore[arg-type]
            if asked.name == HAND_OVER:
                self._gate.hand_over(self)
                return {"result": None}
            given = asked.args.get("identity")
            identity = None if given is None else ProducerIdentity(*given)
            ends = asked.name == "end"
            if not ends:
                self._gate.note_open(self, identity, ended=False)
            result = answer(self._writer, asked)
            if ends:
                self._gate.note_open(self, identity, ended=True)
        except MillstreamError as error:
            return {"error": error_as_plain(error)}
        except Exception as error:  # noqa: BLE001 - not to be asked again and again, of one owner after the other
            _log.exception("a guest's question failed")
            return {"error": error_as_plain(MillstreamError(f"the owner failed: {error!r}"))}
        return {"result": result}
