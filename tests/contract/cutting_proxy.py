"""A proxy before a PostgreSQL server: it forwards bytes until it is to cut a connection during COMMIT, or to
refuse connections."""

from __future__ import annotations

import socket
import struct
import threading
from urllib.parse import urlsplit, urlunsplit

_RESET = struct.pack("ii", 1, 0)  # closing sends a reset
_COMMIT = b"COMMIT\0"


class CuttingProxy:
    """Clients connect to ``url``. ``cut`` is ``"before"`` or ``"after"``: the next COMMIT is lost on its way
    to the server, or its answer on the way back."""

    def __init__(self, url: str) -> None:
        self.target = urlsplit(url)
        self.cut: str | None = None
        self.refuses = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        account = self.target.netloc.rpartition("@")[0]
        place = f"{account}@127.0.0.1:{self._listener.getsockname()[1]}"
        return urlunsplit(self.target._replace(netloc=place))

    def close(self) -> None:
        self._listener.close()
        self.reset()

    def reset(self) -> None:
        """Reset all connections."""
        for each in list(self._open):
            _reset(each)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuses:
                _reset(client)
                continue
            server = socket.create_connection((self.target.hostname, self.target.port))
            self._open |= {client, server}
            lost = threading.Event()
            for task in (self._up, self._down):
                threading.Thread(target=task, args=(client, server, lost), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket, lost: threading.Event) -> None:
        while data := _receive(client):
            if self.cut is not None and data.endswith(_COMMIT):
                cut, self.cut = self.cut, None
                if cut == "before":
                    _reset(server)
                    _reset(client)
                    return
                lost.set()
            _send(server, data)
        _reset(server)

    def _down(self, client: socket.socket, server: socket.socket, lost: threading.Event) -> None:
        while data := _receive(server):
            if lost.is_set():  # the server has answered, so it has committed
                break
            _send(client, data)
        _reset(client)
        _reset(server)


def _receive(source: socket.socket) -> bytes:
    try:
        return source.recv(1 << 16)
    except OSError:
        return b""


def _send(target: socket.socket, data: bytes) -> None:
    try:
        target.sendall(data)
    except OSError:
        _reset(target)


def _reset(each: socket.socket) -> None:
    try:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        each.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    each.close()
