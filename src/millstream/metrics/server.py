"""``/metrics``, ``/healthz`` and ``/readyz`` of a process that serves no HTTP otherwise.

It needs no extra. Figures have names of apps, topics and groups, and no contents of records; so an address that
other machines reach is allowed, as Prometheus is usually on one. On an address of this machine alone, a request
must name it: else a web page could read the figures through a name that resolves to this machine.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus

from millstream.listen_address import bind, is_loopback, parse_listen_address
from millstream.metrics.exposition import CONTENT_TYPE, Exposition
from millstream.plain_http import PlainRequest, PlainServer

METRICS_DEFAULT = "127.0.0.1:9464"  # the port that OpenTelemetry has for Prometheus
CONNECTIONS_MAX = 16
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
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
        names = _LOCAL_NAMES | {host, f"[{host}]"} if is_loopback(host) else None
        with _MetricsServer(listener, exposition, names).serving() as url:
            yield f"{url}metrics"


class _MetricsServer(PlainServer):
    def __init__(
        self, listener: socket.socket, exposition: Exposition, names: frozenset[str] | None
    ) -> None:
        super().__init__(listener, _MetricsRequest, connections_max=CONNECTIONS_MAX, what="metrics")
        self.exposition = exposition
        self.names = names


class _MetricsRequest(PlainRequest):
    server: _MetricsServer

    def do_GET(self) -> None:  # noqa: N802 - the library's name
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

    def _send(self, status: HTTPStatus, content: bytes | str, kind: str = _TEXT) -> None:
        self.send(status, content.encode() if isinstance(content, str) else content, kind)
