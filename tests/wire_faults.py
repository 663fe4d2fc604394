"""A wire between a client and a server that fails: it forwards bytes, and breaks connections in a way of its own."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

RESET = struct.pack("ii", 1, 0)  # closing sends a reset
FAULTS = ("reset", "half-closed", "silent", "cut short", "a byte of the frame flipped")


class FaultyWire:
    """A port of its own in front of ``port``; ``break_after`` makes the next long answer of the server fail."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._left: int | None = None
        self._fault = ""
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.faults = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def break_after(self, count: int, fault: str) -> None:
        """Let the server send so many bytes more, then fail once."""
        with self._lock:
            self._left, self._fault = count, fault

    def close(self) -> None:
        self._listener.close()
        for one in self._open:
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._open += [client, server]
                for pump in (self._up, self._down):
                    threading.Thread(target=pump, args=(client, server), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _down(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                fault, data = self._next(data)
                client.sendall(data)
                if fault:
                    self._fail(fault, client, server)
                    return
            client.shutdown(socket.SHUT_WR)

    def _next(self, data: bytes) -> tuple[str, bytes]:
        with self._lock:
            if self._left is None:
                return "", data
            if self._left >= len(data):
                self._left -= len(data)
                return "", data
            kept, self._left = self._left, None
            self.faults += 1
            return self._fault, data[:kept]

    def _fail(self, fault: str, client: socket.socket, server: socket.socket) -> None:
        if fault == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.close()
        elif fault == "half-closed":
            client.shutdown(socket.SHUT_WR)
        elif fault == "cut short":
            client.close()
        elif fault == "a byte of the frame flipped":
            client.sendall(b"\xff" * 16)  # no kind of message, and a length that is negative
        if fault != "silent":
            server.close()
        else:  # nothing more comes: the server sees that nobody answers, and gives up
            with contextlib.suppress(OSError):
                while server.recv(65536):
                    pass
            client.close()
