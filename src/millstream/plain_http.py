"""A small HTTP server of the standard library, which needs no extra: for figures, and for the documentation.

It answers each request in a thread, and as many at a time as it is given; more connections are closed at once, so
clients that send nothing cannot fill memory with threads.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_POLL_S = 5.0  # between looks whether it is to end; the end wakes it
_TIMEOUT_S = 10.0  # for a client to send its request, and to read the response
_log = logging.getLogger(__name__)


class PlainServer(ThreadingHTTPServer):
    """Answers requests on a bound socket, each by a ``request``. ``what`` it is of, "metrics", is for errors."""

    daemon_threads = True

    def __init__(
        self,
        listener: socket.socket,
        request: type[PlainRequest],
        *,
        connections_max: int,
        what: str,
    ) -> None:
        listener.listen(connections_max)
        super().__init__(listener.getsockname()[:2], request, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.what = what
        self._free = threading.BoundedSemaphore(connections_max)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve in a thread until the block ends; yield the URL."""
        thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_S,), name=f"millstream {self.what}", daemon=True
        )
        thread.start()
        host, port = self.socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        try:
            yield f"http://{shown}:{port}/"
        finally:
            # It wakes the thread, which else waits for a client; not on all systems.
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            self.shutdown()
            thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a request in a thread, if one is free."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request, and free the thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the library's
        """Log a defect, and nothing of a client that has gone away."""
        if not isinstance(sys.exception(), OSError):
            _log.error("a request for %s failed", self.what, exc_info=True)


class PlainRequest(BaseHTTPRequestHandler):
    """Answers a request: ``do_GET`` calls ``send``."""

    timeout = _TIMEOUT_S
    server_version, sys_version = "millstream", ""

    def send(self, status: HTTPStatus, body: bytes, kind: str, *, cache: str = "no-store") -> None:
        """Send a response; without its body, where only the headers are asked for."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", cache)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Log no requests."""
