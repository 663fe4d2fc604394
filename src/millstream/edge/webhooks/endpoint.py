"""One request to the endpoint, and its response, within a timeout.

The connection is kept for the next request. A kept connection that turns out to be closed is not a failure:
the request is sent again on a new one, and the receiver recognises it by its key.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from socket import SHUT_RDWR
from urllib.parse import SplitResult, urlsplit

from millstream.errors import ConfigError

_RESPONSE_BYTES_MAX = 64 << 10  # its beginning is in the reason of a dead letter
_REASON_CHARS_MAX = 200


@dataclass(frozen=True, slots=True)
class EndpointResponse:
    """A response. ``status`` is None where there was none, and ``reason`` says why."""

    status: int | None
    reason: str
    retry_after: str | None = None


def parse_url(text: str) -> SplitResult:
    """Parse the address of an endpoint.

    Raises:
        ConfigError: it is invalid.
    """
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError as error:
        raise ConfigError(f"The address of the endpoint is not a URL ({error}): {text!r}") from None
    if url.scheme not in ("http", "https") or not url.hostname or port == 0:
        raise ConfigError(
            f"The address of the endpoint is {text!r}; give one such as https://example.com/hook"
        )
    if url.username is not None or url.password is not None:
        raise ConfigError(
            "The address of the endpoint has a name or password in it, which everybody on this machine "
            "could see; give them as a header, with --header-file"
        )
    return url


class EndpointConnection:
    """Requests of one thread to one endpoint; :meth:`cut_if_overdue` is for another.

    Args:
        timeout_s: How long one attempt may take, from the connection to the end of the response.
    """

    def __init__(self, url: SplitResult, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._connection: HTTPConnection | None = None
        self._lock = threading.Lock()
        self._due_s: float | None = None
        self._cut = False
        path = url.path or "/"
        self._target = f"{path}?{url.query}" if url.query else path

    def post(self, body: bytes, headers: Mapping[str, str]) -> EndpointResponse:
        """Send a request; return the response. Never raises for failures of the endpoint."""
        kept = self._connection is not None
        with self._lock:
            self._due_s, self._cut = time.monotonic() + self._timeout_s, False
        try:
            try:
                return self._exchange(body, headers)
            except (ConnectionError, HTTPException) as error:
                if not kept or self._cut or isinstance(error, ConnectionRefusedError):
                    raise
                self.close()
            return self._exchange(body, headers)
        except TimeoutError:
            return self._failed(f"no response within {self._timeout_s:g} s")
        except (OSError, HTTPException) as error:
            if self._cut:
                return self._failed(f"no response within {self._timeout_s:g} s")
            return self._failed(f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._due_s = None

    def _exchange(self, body: bytes, headers: Mapping[str, str]) -> EndpointResponse:
        connection = self._connect()
        connection.request("POST", self._target, body, dict(headers))
        response = connection.getresponse()
        text = response.read(_RESPONSE_BYTES_MAX)
        if not response.isclosed() or response.will_close:
            self.close()  # the rest of it is not read, or the other side is done
        shown = text[:_REASON_CHARS_MAX].decode(errors="replace").strip()
        reason = f"{response.status} {response.reason}" + (f": {shown}" if shown else "")
        return EndpointResponse(response.status, reason, response.headers.get("Retry-After"))

    def _connect(self) -> HTTPConnection:
        if self._connection is None:
            host, port = self._url.hostname, self._url.port
            assert host is not None, "checked when the address was read"
            if self._url.scheme == "https":
                self._connection = HTTPSConnection(
                    host, port, timeout=self._timeout_s, context=ssl.create_default_context()
                )
            else:
                self._connection = HTTPConnection(host, port, timeout=self._timeout_s)
        return self._connection

    def _failed(self, reason: str) -> EndpointResponse:
        self.close()
        return EndpointResponse(None, reason)

    def cut_if_overdue(self) -> None:
        """End an attempt that takes too long: one that gets a byte now and then would last forever."""
        with self._lock:
            if self._due_s is None or time.monotonic() < self._due_s:
                return
            self._cut = True
            sock = None if self._connection is None else self._connection.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
