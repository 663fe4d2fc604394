"""Puts an edge together, in threads of this process, until the block that asked for it ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream.client import EventLog, connect
from millstream.client.embedded import FolderLog
from millstream.client.reading import open_reader
from millstream.edge.admission import Admission
from millstream.edge.counts import Counts
from millstream.edge.datagrams import Listener
from millstream.edge.incoming import Limits
from millstream.errors import ConfigError, MillstreamError
from millstream.listening import address_of, bound, is_loopback, web_library_missing

HTTP = "127.0.0.1:8080"
STATSD = "127.0.0.1:8125"
IN_FLIGHT_BYTES = 256 << 20
REQUESTS_MAX = 1000
SUBSCRIBERS_MAX = 1000
HEARTBEAT_S = 15.0
_BACKLOG = 1024
_STATSD_BYTES = 64 << 20


@dataclass(frozen=True)
class Settings:
    """How an edge behaves.

    Args:
        limits: Of one request.
        in_flight_bytes: What all requests together may take of memory, about.
        requests_max: How many may append at a time.
        subscribers_max: How many streams may be open.
        heartbeat_s: After how much silence a stream gives a sign of life.
        statsd_topic: Where metrics go.
        malformed_topic: Where lines go that are no metric; nowhere if None.
        read_only: Nothing is appended over HTTP, and the folder not owned.
        token: What requests have to bear; None: nothing.
        origins: Of which pages in browsers may send.
        insecure: Allow addresses that other machines reach, without a token, and for datagrams.
    """

    limits: Limits = field(default_factory=Limits)
    in_flight_bytes: int = IN_FLIGHT_BYTES
    requests_max: int = REQUESTS_MAX
    subscribers_max: int = SUBSCRIBERS_MAX
    heartbeat_s: float = HEARTBEAT_S
    statsd_topic: str | None = None
    malformed_topic: str | None = None
    read_only: bool = False
    token: str | None = field(default=None, repr=False)
    origins: Sequence[str] = ()
    insecure: bool = False


@dataclass(frozen=True)
class Serving:
    """An edge that is up. ``url`` and ``statsd`` are where it is, if it is there."""

    url: str | None
    statsd: str | None
    statsd_counts: Callable[[], dict[str, Any] | None]
    failed: Callable[[], MillstreamError | None]


class _Failure:
    """The first error after which nothing can be appended any more."""

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self.error: MillstreamError | None = None

    def note(self, error: MillstreamError) -> None:
        with self._lock:
            first, self.error = self.error is None, self.error or error
        if first:
            self._on_failure()


@contextmanager
def serve(
    log: Path | str,
    *,
    http: str | None = HTTP,
    statsd: str | None = None,
    settings: Settings | None = None,
    on_failure: Callable[[], None] = lambda: None,
) -> Iterator[Serving]:
    """Serve the edge of a log until the block ends.

    What was let in is appended and answered before it ends.

    Args:
        log: A folder, which this process owns meanwhile, or ``kafka://``.
        http: ``HOST:PORT`` for HTTP; port 0 takes one that is free; None: none.
        statsd: ``HOST:PORT`` for datagrams; None: none.
        on_failure: Called, from any thread, when nothing can be appended any more: end the block.

    Raises:
        EnvironmentProblem: The extra ``ui`` is not installed.
        ConfigError: An address is none, is taken, or could be reached by others; a topic is missing.
        FolderOwnedError: The folder's owner cannot be joined.
        BrokerAwayError: No broker answers.
    """
    chosen = settings or Settings()
    check(http, statsd, chosen)
    failure = _Failure(on_failure)
    with ExitStack() as opened:
        listener = None if http is None else opened.enter_context(closing(_tcp(http)))
        udp = None if statsd is None else opened.enter_context(closing(_udp(statsd)))
        connection = opened.enter_context(connect(log))
        _check_topics(connection, chosen)
        counted: Callable[[], dict[str, Any] | None] = lambda: None  # noqa: E731 - until there is one
        if udp is not None:
            counted = _listening(opened, connection, udp, chosen, failure)
        url = None
        if listener is not None and http is not None:
            url = _answering(
                opened,
                log=log,
                connection=connection,
                listener=listener,
                http=http,
                settings=chosen,
                failure=failure,
                statsd_counts=counted,
            )
        yield Serving(
            url=url,
            statsd=None if udp is None else "{}:{}".format(*udp.getsockname()[:2]),
            statsd_counts=counted,
            failed=lambda: failure.error,
        )


def _tcp(address: str) -> socket.socket:
    listener = bound(*address_of(address, HTTP), "edge")
    listener.listen(_BACKLOG)
    return listener


def _udp(address: str) -> socket.socket:
    return bound(*address_of(address, STATSD), "edge", socket.SOCK_DGRAM)


def _listening(
    opened: ExitStack,
    connection: EventLog,
    udp: socket.socket,
    settings: Settings,
    failure: _Failure,
) -> Callable[[], dict[str, Any] | None]:
    """Take datagrams until what is opened closes; return what counts them."""
    assert settings.statsd_topic is not None, "checked before anything was opened"
    producer = connection.producer(
        overload="drop_newest", buffer_bytes=_STATSD_BYTES, block_timeout="10 seconds"
    )
    listener = Listener(
        udp, producer, settings.statsd_topic, settings.malformed_topic, failure.note
    )
    listener.start()
    opened.callback(listener.close)
    return listener.counts


def _answering(
    opened: ExitStack,
    *,
    log: Path | str,
    connection: EventLog,
    listener: socket.socket,
    http: str,
    settings: Settings,
    failure: _Failure,
    statsd_counts: Callable[[], dict[str, Any] | None],
) -> str:
    """Answer HTTP until what is opened closes; return where."""
    answering, edges, appending, access = _libraries()
    appender = None
    if not settings.read_only:
        # What was let in has room; also one request that is alone, and larger than the limit.
        room = max(settings.in_flight_bytes, 4 * settings.limits.body_bytes_max)
        appender = appending.Appender(connection, buffer_bytes=room)
        opened.callback(appender.close)
    edge = edges.Edge(
        appender=appender,
        open_reader=lambda: open_reader(log),
        admission=Admission(settings.in_flight_bytes, settings.requests_max),
        limits=settings.limits,
        counts=Counts(),
        statsd_counts=statsd_counts,
        quick=isinstance(connection, FolderLog),
        heartbeat_s=settings.heartbeat_s,
        subscribers_max=settings.subscribers_max,
        on_failure=failure.note,
    )
    host, _ = address_of(http, HTTP)
    app = access.Access(edge.application(), settings.token, settings.origins)
    if is_loopback(host) and settings.token is None:
        app = answering.KnownHosts(app, answering.LOCAL_NAMES | {host})
    opened.enter_context(answering.served(app, listener, what="edge", ending=edge.close))
    url: str = answering.url_of(host, listener)
    return url


def check(http: str | None, statsd: str | None, settings: Settings) -> None:
    """Refuse what others could reach without having been let in, and what cannot work.

    Raises:
        ConfigError: it is so.
    """
    if http is None and statsd is None:
        raise ConfigError("nothing is to be served; give an address for HTTP, for StatsD, or both")
    if http is not None:
        host, _ = address_of(http, HTTP)
        if not is_loopback(host) and settings.token is None and not settings.insecure:
            raise ConfigError(
                f"{http} can be reached from other machines, and whoever reaches it appends to every topic "
                "and reads it. Listen on 127.0.0.1, give a token (--token-file), or say --insecure."
            )
    if statsd is not None:
        host, _ = address_of(statsd, STATSD)
        if not is_loopback(host) and not settings.insecure:
            raise ConfigError(
                f"{statsd} can be reached from other machines, and datagrams bear no token: whoever reaches "
                "it appends metrics. Listen on 127.0.0.1, or say --insecure."
            )
        if settings.statsd_topic is None:
            raise ConfigError("datagrams need a topic; give one with --statsd-topic")
        if settings.read_only:
            raise ConfigError("--read-only appends nothing; leave it out, or --statsd")


def _check_topics(connection: EventLog, settings: Settings) -> None:
    for name in (settings.statsd_topic, settings.malformed_topic):
        if name is not None:
            connection.offsets(name)  # a misspelt name is an error now, not with the first datagram


def _libraries() -> tuple[Any, Any, Any, Any]:
    try:
        import uvicorn  # noqa: F401, PLC0415 - an extra

        from millstream import answering  # noqa: PLC0415 - needs an extra
        from millstream.edge import access, appending, routes  # noqa: PLC0415 - the same
    except ModuleNotFoundError as error:
        raise web_library_missing(error, "The edge over HTTP needs") from error
    return answering, routes, appending, access
