"""Messages of PostgreSQL's protocol: reading those of a client, writing those of a server.

A message is a byte for its kind, four bytes for its length (which count themselves), and its body; the first of a client has no kind.
Every length is checked before a byte of the body is waited for.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from millstream.errors import SqlError

STARTUP_BYTES_MAX = 10_000
MESSAGE_BYTES_MAX = 16 << 20
PROTOCOL = 196608  # 3.0
SSL_REQUEST = 80877103
GSS_REQUEST = 80877104
CANCEL_REQUEST = 80877102
_SEND_BYTES = 64 << 10


class ConnectionEndedError(Exception):
    """The client is gone, or speaks another protocol; there is nobody to tell. Used within the server."""


@dataclass
class Wire:
    """The two directions of a connection. What is written is sent by :meth:`flush`, or when it has grown.

    ``ends``: when the client must have said what is read, by ``time.monotonic()``, however slowly it speaks; None: at any time.
    """

    connection: socket.socket
    ends: float | None = None
    _out: bytearray = field(default_factory=bytearray)

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            self.limit_time()
            part = self.connection.recv(min(count, 1 << 20))
            if not part:
                raise ConnectionEndedError("it was closed")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def limit_time(self) -> None:
        """Have the next read or handshake end with the time that the client has.

        Raises:
            ConnectionEndedError: it is over.
        """
        if self.ends is None:
            return
        left_s = self.ends - time.monotonic()
        if left_s <= 0:
            raise ConnectionEndedError("it took too long")
        self.connection.settimeout(left_s)

    def read_startup(self) -> tuple[int, bytes]:
        """Return the code of the first message, and what follows it."""
        length, code = struct.unpack("!ii", self._exactly(8))
        if not 8 <= length <= STARTUP_BYTES_MAX:
            raise ConnectionEndedError(f"its first message has {length} bytes")
        return code, self._exactly(length - 8)

    def read(self, bytes_max: int = MESSAGE_BYTES_MAX) -> tuple[str, MessageBody]:
        """Return the kind of the next message, and its body."""
        head = self._exactly(5)
        (length,) = struct.unpack("!i", head[1:])
        if not 4 <= length <= bytes_max:
            raise ConnectionEndedError(f"a message has {length} bytes")
        return head[:1].decode("latin-1"), MessageBody(self._exactly(length - 4))

    def write(self, kind: bytes, body: bytes = b"") -> None:
        """Put a message into what is sent next."""
        self._out += kind + struct.pack("!i", len(body) + 4) + body
        if len(self._out) >= _SEND_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send what was written."""
        if self._out:
            self.connection.sendall(self._out)
            self._out.clear()


@dataclass
class MessageBody:
    """Reads the body of a message.

    Raises:
        SqlError: 08P01, where it ends too early.
    """

    body: bytes
    at: int = 0

    def take(self, count: int) -> bytes:
        """Return so many bytes."""
        if count < 0 or self.at + count > len(self.body):
            raise SqlError("A message ends in the middle of a value.", sqlstate="08P01")
        self.at += count
        return self.body[self.at - count : self.at]

    def int16(self) -> int:
        return int(struct.unpack("!h", self.take(2))[0])

    def int32(self) -> int:
        return int(struct.unpack("!i", self.take(4))[0])

    def oid(self) -> int:
        return int(struct.unpack("!I", self.take(4))[0])

    def text(self) -> str:
        """Return a text that a zero byte ends."""
        end = self.body.find(b"\0", self.at)
        if end < 0:
            raise SqlError("A message has a text that does not end.", sqlstate="08P01")
        value = self.take(end - self.at)
        self.at += 1
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise SqlError(
                f"A text is not UTF-8 ({error.reason} at byte {error.start}). Send UTF-8.",
                sqlstate="22021",
            ) from error

    def count(self, bytes_each: int) -> int:
        """Return how many values follow, of so many bytes at least."""
        count = struct.unpack("!H", self.take(2))[0]
        if count * bytes_each > len(self.body) - self.at:
            raise SqlError(f"A message says {count} values, and has fewer.", sqlstate="08P01")
        return int(count)


def zero_ended(text: str) -> bytes:
    """Return a text as messages have it; a zero byte in it would end it."""
    return text.replace("\0", "").encode(errors="replace") + b"\0"


def error_fields(message: str, sqlstate: str, severity: str = "ERROR") -> bytes:
    """Return the body of an error, or of a notice."""
    parts = (b"S" + zero_ended(severity), b"V" + zero_ended(severity))
    return b"".join((*parts, b"C" + zero_ended(sqlstate), b"M" + zero_ended(message), b"\0"))


def parameter_status(name: str, value: str) -> bytes:
    """Return the body of a message that says how the server is set."""
    return zero_ended(name) + zero_ended(value)


def startup_parameters(body: bytes) -> dict[str, str]:
    """Return what the first message says, by name."""
    reader, found = MessageBody(body), {}
    while name := reader.text():
        found[name] = reader.text()
    return found


def data_row(values: Sequence[bytes | None]) -> bytes:
    """Return the body of a row."""
    parts = [struct.pack("!H", len(values))]
    for value in values:
        if value is None:
            parts.append(b"\xff\xff\xff\xff")
        else:
            parts += (struct.pack("!i", len(value)), value)
    return b"".join(parts)
