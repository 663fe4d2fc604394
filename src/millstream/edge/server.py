"""Starts an edge in threads of this process, and stops it when the block ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream.access.tls import Certificate
from millstream.access.tokens import Tokens
from millstream.client import EventLog, connect
from millstream.client.open import open_reader
from millstream.edge.http.admission import Admission
from millstream.edge.http.counters import HttpCounters
from millstream.edge.http.request_body import RequestLimits
from millstream.edge.statsd.listener import StatsdListener
from millstream.errors import ConfigError, MillstreamError
from millstream.listen_address import (
    bind,
    check_web_libraries,
    is_loopback,
    parse_listen_address,
)

HTTP_DEFAULT = "127.0.0.1:8080"
STATSD_DEFAULT = "127.0.0.1:8125"
IN_FLIGHT_BYTES = 256 << 20
REQUESTS_MAX = 1000
SUBSCRIBERS_MAX = 1000
HEARTBEAT_S = 15.0
_BACKLOG = 1024
_STATSD_BYTES = 64 << 20


@dataclass(frozen=True)
class EdgeSettings:
    """Settings of an edge.

    Args:
        limits: Limits of one request.
        in_flight_bytes: Approximate limit of the memory of all requests together.
        requests_max: How many requests may append at a time.
        subscribers_max: How many streams may be open.
        heartbeat_s: After how many seconds without a record a stream sends a heartbeat.
        statsd_topic: The topic of metrics.
        malformed_topic: The topic of malformed lines; None: they are only counted.
        read_only: Nothing is appended over HTTP, and the folder is not owned.
        token: The token that requests must carry, and which may do everything; None: none.
        tokens: Tokens with roles, of which requests must carry one; not with ``token``.
        certificate: What HTTP is encrypted with; None: it is not.
        origins: Origins of browser pages that may send requests.
        insecure: Allow addresses that other machines reach, without a token, and for datagrams.
    """

    limits: RequestLimits = field(default_factory=RequestLimits)
    in_flight_bytes: int = IN_FLIGHT_BYTES
    requests_max: int = REQUESTS_MAX
    subscribers_max: int = SUBSCRIBERS_MAX
    heartbeat_s: float = HEARTBEAT_S
    statsd_topic: str | None = None
    malformed_topic: str | None = None
    read_only: bool = False
    token: str | None = field(default=None, repr=False)
    tokens: Tokens | None = field(default=None, repr=False)
    certificate: Certificate | None = None
    origins: Sequence[str] = ()
    insecure: bool = False

    @property
    def accepted(self) -> Tokens | None:
        """The tokens that are accepted; None: no request needs one."""
        return Tokens.of(self.token) if self.token is not None else self.tokens


@dataclass(frozen=True)
class EdgeServer:
    """A running edge. ``url`` and ``statsd`` are its addresses; None: it does not serve that."""

    url: str | None
    statsd: str | None
    statsd_counts: Callable[[], dict[str, Any] | None]
    failed: Callable[[], MillstreamError | None]


class _FatalError:
    """The first error after which nothing can be appended any more."""

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self.error: MillstreamError | None = None

    def record(self, error: MillstreamError) -> None:
        with self._lock:
            first, self.error = self.error is None, self.error or error
        if first:
            self._on_failure()

    def why_not_ready(self) -> str | None:
        """Return why nothing can be appended; None if it can."""
        return None if self.error is None else str(self.error)


@contextmanager
def serve(
    log: Path | str,
    *,
    http: str | None = HTTP_DEFAULT,
    statsd: str | None = None,
    settings: EdgeSettings | None = None,
    on_failure: Callable[[], None] = lambda: None,
) -> Iterator[EdgeServer]:
    """Serve the edge of a log until the block ends.

    Admitted requests are appended and get their response before it ends.

    Args:
        log: A folder, or ``kafka://``.
        http: ``HOST:PORT`` for HTTP; port 0 takes a free port; None: none.
        statsd: ``HOST:PORT`` for datagrams; None: none.
        on_failure: Called, from any thread, when nothing can be appended any more: end the block.

    Raises:
        EnvironmentProblem: The extra ``ui`` is not installed.
        ConfigError: An address is invalid, in use, or reachable by other machines; a topic is missing.
        FolderOwnedError: The folder's owner accepts no connections.
        BrokerUnavailableError: No broker responds.
    """
    chosen = settings or EdgeSettings()
    check_settings(http, statsd, chosen)
    failure = _FatalError(on_failure)
    with ExitStack() as opened:
        listener = None if http is None else opened.enter_context(closing(_tcp(http)))
        udp = None if statsd is None else opened.enter_context(closing(_udp(statsd)))
        connection = opened.enter_context(connect(log))
        _check_topics(connection, chosen)
        counted: Callable[[], dict[str, Any] | None] = lambda: None  # noqa: E731 - until there is one
        if udp is not None:
            counted = _serve_statsd(opened, connection, udp, chosen, failure)
        url = None
        if listener is not None and http is not None:
            url = _serve_http(
                opened,
                log=log,
                connection=connection,
                listener=listener,
                http=http,
                settings=chosen,
                failure=failure,
                statsd_counts=counted,
            )
        yield EdgeServer(
            url=url,
            statsd=None if udp is None else "{}:{}".format(*udp.getsockname()[:2]),
            statsd_counts=counted,
            failed=lambda: failure.error,
        )


def _tcp(address: str) -> socket.socket:
    listener = bind(*parse_listen_address(address, HTTP_DEFAULT), "edge")
    listener.listen(_BACKLOG)
    return listener


def _udp(address: str) -> socket.socket:
    return bind(*parse_listen_address(address, STATSD_DEFAULT), "edge", socket.SOCK_DGRAM)


def _serve_statsd(
    opened: ExitStack,
    connection: EventLog,
    udp: socket.socket,
    settings: EdgeSettings,
    failure: _FatalError,
) -> Callable[[], dict[str, Any] | None]:
    """Receive datagrams until ``opened`` closes; return a function that returns the counters."""
    assert settings.statsd_topic is not None, "checked before anything was opened"
    producer = connection.producer(
        overload="drop_newest", buffer_bytes=_STATSD_BYTES, block_timeout="10 seconds"
    )
    listener = StatsdListener(
        udp, producer, settings.statsd_topic, settings.malformed_topic, failure.record
    )
    listener.start()
    opened.callback(listener.close)
    return listener.counts


def _serve_http(
    opened: ExitStack,
    *,
    log: Path | str,
    connection: EventLog,
    listener: socket.socket,
    http: str,
    settings: EdgeSettings,
    failure: _FatalError,
    statsd_counts: Callable[[], dict[str, Any] | None],
) -> str:
    """Serve HTTP until ``opened`` closes; return the address."""
    check_web_libraries("The edge over HTTP needs")
    from millstream import http as web  # noqa: PLC0415 - needs an extra
    from millstream.edge.http.appender import EventAppender  # noqa: PLC0415 - the same
    from millstream.edge.http.routes import EdgeRoutes  # noqa: PLC0415 - the same
    from millstream.http_access import Access  # noqa: PLC0415 - the same

    appender = None
    if not settings.read_only:
        # Every admitted request fits; also a single request that is larger than the limit.
        room = max(settings.in_flight_bytes, 4 * settings.limits.body_bytes_max)
        appender = EventAppender(connection, buffer_bytes=room)
        opened.callback(appender.close)
    edge = EdgeRoutes(
        appender=appender,
        open_reader=lambda: open_reader(log),
        admission=Admission(settings.in_flight_bytes, settings.requests_max),
        limits=settings.limits,
        counts=HttpCounters(),
        statsd_counts=statsd_counts,
        quick=connection.is_folder,
        heartbeat_s=settings.heartbeat_s,
        subscribers_max=settings.subscribers_max,
        why_not_ready=failure.why_not_ready,
        on_failure=failure.record,
    )
    host, _ = parse_listen_address(http, HTTP_DEFAULT)
    tokens = settings.accepted
    app: Any = Access(edge.application(), tokens, settings.origins)
    if is_loopback(host) and tokens is None:
        app = web.AllowedHosts(app, web.LOCAL_NAMES | {host})
    opened.enter_context(
        web.serve_in_thread(
            app, listener, what="edge", ending=edge.close, certificate=settings.certificate
        )
    )
    return web.url_of(host, listener, settings.certificate)


def check_settings(http: str | None, statsd: str | None, settings: EdgeSettings) -> None:
    """Refuse addresses that others could reach without a token, and settings that contradict.

    Raises:
        ConfigError: the settings are refused.
    """
    if http is None and statsd is None:
        raise ConfigError(
            "There is nothing to serve. Give an address for HTTP, for StatsD, or both."
        )
    if http is not None:
        host, _ = parse_listen_address(http, HTTP_DEFAULT)
        if not is_loopback(host) and settings.accepted is None and not settings.insecure:
            raise ConfigError(
                f"Other machines can reach {http}, and could append to every topic and read it. "
                "Listen on 127.0.0.1, give a token (--token-file), or use --insecure."
            )
    if statsd is not None:
        host, _ = parse_listen_address(statsd, STATSD_DEFAULT)
        if not is_loopback(host) and not settings.insecure:
            raise ConfigError(
                f"Other machines can reach {statsd}, and datagrams carry no token, so they could append "
                "metrics. Listen on 127.0.0.1, or use --insecure."
            )
        if settings.statsd_topic is None:
            raise ConfigError("Datagrams need a topic. Give one with --statsd-topic.")
        if settings.read_only:
            raise ConfigError(
                "--read-only appends nothing, so it excludes --statsd. Leave out one of them."
            )


def _check_topics(connection: EventLog, settings: EdgeSettings) -> None:
    for name in (settings.statsd_topic, settings.malformed_topic):
        if name is not None:
            connection.offsets(name)  # a misspelt name is an error now, not with the first datagram
