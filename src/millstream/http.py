"""What our HTTP servers share: responses, errors, server-sent events, and a server in a thread.

An error is ``{"error": {"kind": …, "message": …}}`` with a status that says what to do: 400 correct the
request, 404 correct the name, 410 start over, 429 slow down, 503 try again. Each server has its own table
of error classes and status codes, and gives it to :func:`exception_handlers`.

Needs starlette and uvicorn, the extra ``ui``: see :func:`millstream.listen_address.check_web_libraries`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from millstream.access.tls import Certificate
from millstream.errors import ConfigError, MillstreamError, OffsetOutOfRangeError

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
RETRY_AFTER_S = 1
NO_STORE = {"Cache-Control": "no-store"}
_ENDS_S = 3  # for running requests when the server ends
_POLL_S = 0.01
_LATER = (429, 503)
_HEAD_S = 15.0  # for a client to send the line and the headers of a request
_BODY_S = 30.0  # for its body
_SWEEP_TICKS = 10  # of a tenth of a second: how often slow clients are looked for
CONNECTIONS_MAX = 4096

StatusTable: TypeAlias = Sequence[tuple[type[MillstreamError], int]]
"""Error classes and their status codes; the first class that fits an error counts."""

ExceptionHandlers: TypeAlias = dict[Any, Callable[[Request, Exception], Awaitable[Response]]]


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON response with a value."""
    text = json.dumps(value, ensure_ascii=False) + "\n"
    # Half of a surrogate pair, as a request may name it, is no UTF-8; JSON has its escape for it.
    content = text.encode(errors="backslashreplace")
    return Response(
        content, status, media_type="application/json", headers={**NO_STORE, **(headers or {})}
    )


def error_response(kind: str, message: str, status: int, **more: Any) -> Response:
    """Return an error response; one that asks the client to retry says when."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in _LATER else None
    return json_response({"error": {"kind": kind, "message": message, **more}}, status, headers)


def status_of(error: MillstreamError, statuses: StatusTable) -> int:
    """Return the status code of an error. A table ends with the code of every ``MillstreamError``."""
    return next(code for kind, code in statuses if isinstance(error, kind))


def exception_handlers(
    statuses: StatusTable, addresses: str, log: logging.Logger
) -> ExceptionHandlers:
    """Return Starlette's exception handlers: every exception becomes an error response.

    Args:
        addresses: A sentence that lists the addresses of the server, for requests to another one.
        log: Takes the traceback of an exception that is a defect of the server.
    """

    async def error_of_ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, MillstreamError)
        more = {}
        if isinstance(error, OffsetOutOfRangeError):
            more = {"start": error.start, "end": error.end}
        return error_response(type(error).__name__, str(error), status_of(error, statuses), **more)

    async def unknown_address(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path}"
        message = f"There is nothing to {what} here. {addresses}"
        return error_response("UnknownAddress", message, error.status_code)

    async def defect(request: Request, error: Exception) -> Response:
        log.error("%s failed", request.url.path, exc_info=error)
        message = f"The server failed ({type(error).__name__}); its log says where."
        return error_response("Defect", message, 500)

    return {MillstreamError: error_of_ours, HTTPException: unknown_address, Exception: defect}


async def read_body(request: Request, bytes_max: int, advice: str) -> bytes:
    """Return the body of a request.

    Raises:
        ConfigError: it is too large, or takes too long; ``advice`` says what to do about the first.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > bytes_max:
                    raise ConfigError(f"The request has more than {bytes_max:,} bytes. {advice}")
    except TimeoutError:
        raise ConfigError(
            f"The body was not complete after {_BODY_S:g} s. Send it again."
        ) from None
    return bytes(body)


# -- server-sent events -------------------------------------------------------------------------

EVENT_STREAM_START = b"retry: 1000\n\n"  # how many milliseconds a client waits before it reconnects
HEARTBEAT = b": still here\n\n"  # a comment, by which either end notices that the other is gone


def server_sent_event(data: bytes, *, kind: str = "", event_id: str = "") -> bytes:
    """Return one server-sent event; the data must be on one line."""
    head = (f"event: {kind}\n" if kind else "") + (f"id: {event_id}\n" if event_id else "")
    return b"%sdata: %s\n\n" % (head.encode(), data)


def json_event(value: Any, *, kind: str) -> bytes:
    """Return one server-sent event with a value as JSON."""
    return server_sent_event(json.dumps(value, ensure_ascii=False).encode(), kind=kind)


def event_stream_response(stream: AsyncIterator[bytes]) -> Response:
    """Return a response with a stream of server-sent events."""
    # X-Accel-Buffering: a proxy must not buffer events.
    headers = {**NO_STORE, "X-Accel-Buffering": "no"}
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


# -- the server -----------------------------------------------------------------------------------


class AllowedHosts:
    """Rejects requests whose ``Host`` is not a name of the server.

    So a page of another site whose name resolves to this machine (DNS rebinding) cannot read anything.
    """

    def __init__(self, app: Any, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            name = given.rpartition(":")[0] if given.rpartition("]")[2] else given
            if (name or given) not in self._hosts:
                message = (
                    f"This server accepts the host names {', '.join(sorted(self._hosts))}, not {given!r}. "
                    "Use one of these, or start it with --insecure."
                )
                await error_response("UnknownHost", message, 421)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def url_of(host: str, listener: socket.socket, certificate: Certificate | None = None) -> str:
    """Return the URL of a server, as a browser takes it."""
    shown = f"[{host}]" if ":" in host else host or "127.0.0.1"
    scheme = "http" if certificate is None else "https"
    return f"{scheme}://{shown}:{listener.getsockname()[1]}/"


class _BoundedProtocol(H11Protocol):
    """A connection that is closed when it does not send a request in time, or when there are too many.

    The library bounds the bytes of headers (64 KiB), and how long a connection is idle between requests; not how long a
    client takes for the headers of a request, of which it may send a byte now and then.
    """

    _waiting_since: float | None = None
    _last_cycle: Any = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            transport.abort()

    def end_if_slow(self, now_s: float) -> None:
        """Close the connection if it has sent no whole headers for too long."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._waiting_since = None
        elif self._waiting_since is None or self.cycle is not self._last_cycle:
            self._waiting_since = now_s
        elif now_s - self._waiting_since > _HEAD_S:
            self.transport.abort()
        self._last_cycle = self.cycle


class _BoundedServer(uvicorn.Server):
    """Looks for slow clients, and for a renewed certificate, every second."""

    def __init__(self, config: uvicorn.Config, certificate: Certificate | None) -> None:
        super().__init__(config)
        self._certificate = certificate
        if certificate is not None:
            config.load()
            config.ssl = certificate.context

    async def on_tick(self, counter: int) -> bool:
        if counter % _SWEEP_TICKS == 0:
            now_s = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, _BoundedProtocol):
                    connection.end_if_slow(now_s)
            if self._certificate is not None:
                self._certificate.refresh()
        return await super().on_tick(counter)


@contextmanager
def serve_in_thread(
    app: Any,
    listener: socket.socket,
    *,
    what: str,
    ending: Callable[[], None],
    certificate: Certificate | None = None,
) -> Iterator[None]:
    """Serve an application in a thread, until the block ends.

    Args:
        what: The name of the server in errors: "page".
        ending: Called before the server ends, to end open streams.
        certificate: What connections are encrypted with; None: they are not.

    Raises:
        MillstreamError: it did not start.
    """
    server = _BoundedServer(
        uvicorn.Config(
            app,
            http=_BoundedProtocol,
            log_config=None,
            log_level="critical",  # our own log reports failures
            access_log=False,
            ws="none",
            lifespan="on",
            server_header=False,
            timeout_graceful_shutdown=_ENDS_S,
        ),
        certificate,
    )
    failed: list[BaseException] = []

    def run() -> None:
        try:
            server.run(sockets=[listener])
        except BaseException as error:  # noqa: BLE001 - raised in the thread that started it
            failed.append(error)

    thread = threading.Thread(target=run, name=f"millstream {what}", daemon=True)
    thread.start()
    pause = threading.Event()
    while not server.started and thread.is_alive():
        pause.wait(_POLL_S)
    try:
        if not server.started:
            raise MillstreamError(f"The server of the {what} did not start.") from next(
                iter(failed), None
            )
        yield
    finally:
        ending()
        server.should_exit = True
        thread.join()
