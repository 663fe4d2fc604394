"""Frames on the owner's socket: a header as JSON, and a payload of raw bytes.

::

    byte 0  bytes of the header   uint32, big-endian
         4  bytes of the payload  uint32
         8  header                JSON, UTF-8: a request or a response
            payload               the tails of record batches, one after the other

A request is ``{"request": name, "retry": bool, "args": {...}}``. A response is ``{"result": ...}``, or
``{"error": ...}`` with an exception of ``errors`` by its name. One request is in flight at a time.
Both ends run as the same user and, mostly, in one version; the greeting tells versions apart.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from millstream import errors
from millstream.errors import ConfigError, MillstreamError

PROTOCOL = 2
HEADER_BYTES_MAX = 64 << 20  # a topic may have many partitions, an error a long text
PAYLOAD_BYTES_MAX = 256 << 20  # several batches, of which one may be a record of 64 MiB
_LENGTHS = struct.Struct(">II")


class PeerGoneError(Exception):
    """The connection ended: the other side has died, or has released the folder."""


class OwnerMessage(NamedTuple):
    """One request or response."""

    header: dict[str, Any]
    payload: bytes


def send_frame(connection: socket.socket, header: Mapping[str, Any], payload: bytes = b"") -> None:
    """Send one request or response.

    Raises:
        PeerGoneError: the connection has ended.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    try:
        connection.sendall(_LENGTHS.pack(len(text), len(payload)) + text)
        if payload:
            connection.sendall(payload)
    except OSError as error:
        raise PeerGoneError(str(error)) from error


def receive_frame(connection: socket.socket) -> OwnerMessage:
    """Wait for the next request or response, and return it.

    Raises:
        PeerGoneError: none will come, as the connection has ended or carries another protocol.
        TimeoutError: the connection has a timeout, and it has passed.
    """
    header_bytes, payload_bytes = _LENGTHS.unpack(_receive(connection, _LENGTHS.size))
    if header_bytes > HEADER_BYTES_MAX or payload_bytes > PAYLOAD_BYTES_MAX:
        raise PeerGoneError(f"a frame of {header_bytes} and {payload_bytes} bytes is none of ours")
    try:
        header = json.loads(_receive(connection, header_bytes))
    except ValueError as error:
        raise PeerGoneError(f"a header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise PeerGoneError("a header is not an object")
    return OwnerMessage(header, bytes(_receive(connection, payload_bytes)))


def _receive(connection: socket.socket, size: int) -> bytes | bytearray:
    try:
        first = connection.recv(size) if size else b""
        if len(first) == size:
            return first
        whole = bytearray(size)
        whole[: len(first)] = first
        taken = len(first)
        while taken < size and first:
            more = connection.recv_into(memoryview(whole)[taken:])
            if not more:
                break
            taken += more
    except TimeoutError:
        raise
    except OSError as error:
        raise PeerGoneError(str(error)) from error
    if taken < size:
        raise PeerGoneError("the connection ended")
    return whole


def error_as_plain(error: MillstreamError) -> dict[str, Any]:
    """Return an error as values that JSON has."""
    attributes = {
        name: value
        for name, value in vars(error).items()
        if value is None or isinstance(value, str | int | bool)
    }
    return {"kind": type(error).__name__, "message": str(error), "attributes": attributes}


def error_from_plain(plain: Mapping[str, Any]) -> MillstreamError:
    """Return the error given to :func:`error_as_plain`: the same class, message and attributes."""
    kind = getattr(errors, str(plain["kind"]), MillstreamError)
    if not (isinstance(kind, type) and issubclass(kind, MillstreamError)):
        kind = MillstreamError
    error: MillstreamError = kind.__new__(kind)
    Exception.__init__(error, str(plain["message"]))
    error.__dict__.update(plain["attributes"])
    return error


def check_protocol(theirs: object) -> None:
    """Refuse another version of this protocol.

    Raises:
        ConfigError: the other side speaks another version.
    """
    if theirs != PROTOCOL:
        raise ConfigError(
            f"the owner of the folder and this process use versions {theirs} and {PROTOCOL} of "
            "the protocol between them; run the same version of Millstream in both"
        )
