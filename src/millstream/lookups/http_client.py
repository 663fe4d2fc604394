"""One HTTP request and its response, within a time and a size; the standard library's client, with its connections kept.

Neither an address with its values, nor a header, nor a body is in any error: all may have secrets in them.
"""

from __future__ import annotations

import select
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import SHUT_RDWR
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from millstream.kernels.enrichment.calls import LookupCallError
from millstream.lookups.idle import IDLE

_REDIRECTS_MAX = 5
_RETRIABLE = frozenset({408, 425, 429})
_MOVED = frozenset({301, 302, 303, 307, 308})
_MOVED_WITH_BODY = frozenset({307, 308})  # the others make a GET of a POST
_CHUNK = 64 << 10


class Origin(NamedTuple):
    """A server: redirects do not leave it."""

    scheme: str
    host: str
    port: int

    @property
    def shown(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(frozen=True)
class HttpRequest:
    """A request. ``target`` is path and query; ``shown`` names it in errors, without values."""

    method: str
    origin: Origin
    target: str
    headers: Mapping[str, str]
    body: bytes | None
    shown: str


@dataclass(frozen=True)
class HttpAnswer:
    """A response with its body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def exchange(request: HttpRequest, timeout_s: float, bytes_max: int) -> HttpAnswer:
    """Send a request, and follow redirects of its server; return the response.

    Raises:
        LookupCallError: there is none, or not in time; it is too large; it leads to another server.
    """
    due_s = time.monotonic() + timeout_s
    target = request.target
    for _ in range(_REDIRECTS_MAX + 1):
        answer = _within(request, target, due_s, bytes_max)
        if answer.status not in _MOVED:
            return answer
        if request.body is not None and answer.status not in _MOVED_WITH_BODY:
            raise _failed(request, f"responded {answer.status}, a redirect that loses the body")
        target = _next_target(request, target, answer)
    raise _failed(request, f"redirects more than {_REDIRECTS_MAX} times")


def _next_target(request: HttpRequest, target: str, answer: HttpAnswer) -> str:
    """Return where a redirect leads to, on the same server."""
    here = f"{request.origin.shown}{target}"
    try:
        url = urlsplit(urljoin(here, answer.headers.get("location", "")))
        there = Origin(url.scheme, url.hostname or "", url.port or DEFAULT_PORTS.get(url.scheme, 0))
    except ValueError:
        raise _failed(request, f"responded {answer.status} without an address") from None
    if there != request.origin:
        raise _failed(
            request,
            f"redirects to another server, {there.shown!a}, which does not get the headers. "
            "Give its address, if it is the right one",
        )
    moved = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
    if not moved.isascii() or any(c <= " " or c == "\x7f" for c in moved):
        raise _failed(request, f"responded {answer.status} with an address that is no URL")
    return moved


DEFAULT_PORTS = {"http": 80, "https": 443}


def _within(request: HttpRequest, target: str, due_s: float, bytes_max: int) -> HttpAnswer:
    """Exchange once; a kept connection that was closed meanwhile is no failure."""
    kept = IDLE.take(request.origin, HTTPConnection)
    try:
        if kept is not None and _is_quiet(kept):
            with suppress(_StaleConnectionError):
                return _exchange(request, target, kept, due_s, bytes_max, kept=True)
        return _exchange(request, target, _open(request.origin), due_s, bytes_max, kept=False)
    except TimeoutError:
        raise _failed(request, "did not answer in time", retriable=True) from None
    except HTTPException as error:  # its text may be the peer's
        raise _failed(request, f"broke off: {type(error).__name__}", retriable=True) from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _failed(request, f"cannot be reached: {reason}", retriable=True) from None


def _is_quiet(connection: HTTPConnection) -> bool:
    """Return whether a kept connection can be used; else it is closed.

    It has ended if there is something to read, or a second response is there, which would be taken for that
    of the next request.
    """
    sock = connection.sock
    if sock is not None:
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        if not poll.poll(0) and not (isinstance(sock, ssl.SSLSocket) and sock.pending()):
            return True
    connection.close()
    return False


class _StaleConnectionError(Exception):
    """A kept connection was closed before a byte of the response came."""


def _exchange(
    request: HttpRequest,
    target: str,
    connection: HTTPConnection,
    due_s: float,
    bytes_max: int,
    *,
    kept: bool,
) -> HttpAnswer:
    cut = _Cut(connection, due_s)
    try:
        try:
            connection.request(request.method, target, request.body, dict(request.headers))
            response = connection.getresponse()
        except ConnectionError:  # RemoteDisconnected is one
            if kept and not cut.done:
                raise _StaleConnectionError from None
            raise
        body = _body(request, response, due_s, bytes_max)
        headers = {name.lower(): value for name, value in response.headers.items()}
        answer = HttpAnswer(response.status, headers, body)
        # After a response of 1xx another one follows: the next request would get it.
        reusable = response.isclosed() and not response.will_close and response.status >= 200
    except BaseException as error:
        connection.close()
        if cut.end() and isinstance(error, Exception):
            raise TimeoutError from None
        raise
    if cut.end():  # a body without a length ends where it was cut
        connection.close()
        raise TimeoutError
    if reusable:
        IDLE.give(request.origin, connection)
    else:
        connection.close()
    return answer


def _body(request: HttpRequest, response: HTTPResponse, due_s: float, bytes_max: int) -> bytes:
    """Return the body of an answer; of anything else it says nothing, and is only read past."""
    if 200 <= response.status < 300:
        return _read(request, response, due_s, bytes_max)
    response.read(_CHUNK)
    return b""


def _read(request: HttpRequest, response: HTTPResponse, due_s: float, bytes_max: int) -> bytes:
    """Read the body up to its limit."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise _failed(request, "sent a compressed body, which was not asked for")
    too_large = _failed(request, f"sent a body of more than {bytes_max:,} bytes")
    if (response.length or 0) > bytes_max:
        raise too_large
    body = bytearray()
    while chunk := response.read(min(_CHUNK, bytes_max + 1 - len(body))):
        body += chunk
        if len(body) > bytes_max:
            raise too_large
        if time.monotonic() > due_s:
            raise TimeoutError
    response.close()
    if response.length:  # the peer said how much, and sent less
        raise _failed(request, "sent less of the body than it said", retriable=True)
    return bytes(body)


class _Cut:
    """Ends a connection that is not done in time: a peer that sends a byte now and then could hold it for ever."""

    def __init__(self, connection: HTTPConnection, due_s: float) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.done = False
        self._ended = False
        left_s = max(due_s - time.monotonic(), 0.001)
        connection.timeout = left_s
        if connection.sock is not None:
            connection.sock.settimeout(left_s)
        self._timer = threading.Timer(left_s, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def _cut(self) -> None:
        with self._lock:
            sock = None if self._ended else self._connection.sock
            self.done = not self._ended
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(SHUT_RDWR)

    def end(self) -> bool:
        """Return whether it was cut; from now on it is not."""
        self._timer.cancel()
        with self._lock:
            self._ended = True
        return self.done


def _open(origin: Origin) -> HTTPConnection:
    if origin.scheme == "https":
        return HTTPSConnection(origin.host, origin.port, context=_tls())
    return HTTPConnection(origin.host, origin.port)


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _failed(request: HttpRequest, reason: str, *, retriable: bool = False) -> LookupCallError:
    return LookupCallError(f"{request.method} {request.shown} {reason}", retriable=retriable)


def status_error(request: HttpRequest, answer: HttpAnswer) -> LookupCallError:
    """Return the error of a response that is no answer.

    408, 425, 429 and 5xx may be repeated, not before ``Retry-After``; any other is final.
    """
    retriable = answer.status in _RETRIABLE or answer.status >= 500
    asked_s = retry_after_s(answer.headers.get("retry-after"), time.time()) if retriable else 0.0
    return LookupCallError(
        f"{request.method} {request.shown} responded {answer.status}",
        retriable=retriable,
        retry_after_s=asked_s,
    )


def retry_after_s(text: str | None, now_s: float) -> float:
    """Return how long ``Retry-After`` asks to wait, in seconds or until a date; 0: it does not."""
    stripped = (text or "").strip()
    if stripped.isascii() and stripped.isdigit() and len(stripped) < 10:
        return float(stripped)
    try:
        return max(parsedate_to_datetime(stripped).timestamp() - now_s, 0.0)
    except (ValueError, TypeError, OverflowError):
        return 0.0
