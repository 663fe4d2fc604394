"""``/metrics``, ``/healthz`` and ``/readyz`` of a process that serves no HTTP otherwise.

It needs no extra. Figures have names of apps, topics and groups, and no contents of records; so an address that
other machines reach is allowed, as Prometheus is usually on one. On an address of this machine alone, a request
must name it: else a web page could read the figures through a name that resolves to this machine.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from millstream.listen_address import bind, is_loopback, parse_listen_address
from millstream.metrics.exposition import CONTENT_TYPE, Exposition

METRICS_DEFAULT = "127.0.0.1:9464"  # the port that OpenTelemetry has for Prometheus
CONNECTIONS_MAX = 16
_POLL_S = 5.0  # between looks whether it is to end; the end wakes it
_TIMEOUT_S = 10.0  # for a client to send its request, and to read the response
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_log = logging.getLogger(__name__)
_TEXT = "text/plain; charset=utf-8"


@contextmanager
def serve_metrics(listen: str, exposition: Exposition) -> Iterator[str]:
    """Serve figures and health in a thread until the block ends; yield the URL.

    Args:
        listen: ``HOST:PORT``; port 0 takes one that is free.

    Raises:
        ConfigError: the address is invalid, or in use.
    """
    host, port = parse_listen_address(listen, METRICS_DEFAULT)
    with closing(bind(host, port, "server of metrics")) as listener:
        listener.listen(CONNECTIONS_MAX)
        names = _LOCAL_NAMES | {host, f"[{host}]"} if is_loopback(host) else None
        server = _MetricsServer(listener, exposition, names)
        thread = threading.Thread(
            target=server.serve_forever, args=(_POLL_S,), name="millstream metrics", daemon=True
        )
        thread.start()
        shown = f"[{host}]" if ":" in host else host
        try:
            yield f"http://{shown}:{listener.getsockname()[1]}/metrics"
        finally:
            with suppress(
                OSError
            ):  # it wakes the thread, which else waits for a client; not on all systems
                listener.shutdown(socket.SHUT_RDWR)
            server.shutdown()
            thread.join()


class _MetricsServer(ThreadingHTTPServer):
    """Answers requests, each in a thread, a few at a time; more are closed at once."""

    daemon_threads = True

    def __init__(
        self, listener: socket.socket, exposition: Exposition, names: frozenset[str] | None
    ) -> None:
        super().__init__(listener.getsockname()[:2], _MetricsRequest, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.exposition = exposition
        self.names = names
        self._free = threading.BoundedSemaphore(CONNECTIONS_MAX)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the library's
        """Log a defect, and nothing of a client that has gone away."""
        if not isinstance(sys.exception(), OSError):
            _log.error("a request for metrics failed", exc_info=True)


class _MetricsRequest(BaseHTTPRequestHandler):
    server: _MetricsServer
    timeout = _TIMEOUT_S
    server_version, sys_version = "millstream", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._names_this_host():
            self._send(
                HTTPStatus.MISDIRECTED_REQUEST, "This server is known by other host names.\n"
            )
        elif path == "/metrics":
            self._send(HTTPStatus.OK, self.server.exposition.text(), CONTENT_TYPE)
        elif path == "/healthz":
            self._send(HTTPStatus.OK, "alive\n")
        elif path == "/readyz":
            answer = self.server.exposition.readiness()
            self._send(HTTPStatus(answer.status), answer.text)
        else:
            self._send(HTTPStatus.NOT_FOUND, "There are /metrics, /healthz and /readyz.\n")

    def _names_this_host(self) -> bool:
        given = self.headers.get("Host", "")
        name = given.rpartition(":")[0] if given.rpartition("]")[2] else given
        return self.server.names is None or (name or given) in self.server.names

    def _send(self, status: HTTPStatus, content: bytes | str, content_type: str = _TEXT) -> None:
        body = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Log no requests."""
