"""Answers over HTTP, as all servers of ours give them, and a server in a thread of this process.

An error is ``{"error": {"kind": …, "message": …}}`` with a status that says what to do: 400 correct the
request, 404 mend the name, 410 begin anew, 429 slow down, 503 try again.

Needs starlette and uvicorn, the extra ``ui``: see :func:`millstream.listening.web_library_missing`.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.responses import Response, StreamingResponse

from millstream.errors import MillstreamError

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
RETRY_AFTER_S = 1
NO_STORE = {"Cache-Control": "no-store"}
_ENDS_S = 3  # how long an answer at work may take once the server is to end
_POLL_S = 0.01
_LATER = (429, 503)


def json_answer(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a value as an answer in JSON."""
    text = json.dumps(value, ensure_ascii=False) + "\n"
    return Response(
        text, status, media_type="application/json", headers={**NO_STORE, **(headers or {})}
    )


def error_answer(kind: str, message: str, status: int, **more: Any) -> Response:
    """Return an error as an answer; one that says to come later says when."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in _LATER else None
    return json_answer({"error": {"kind": kind, "message": message, **more}}, status, headers)


def event_answer(stream: AsyncIterator[bytes]) -> Response:
    """Return a stream of server-sent events as an answer."""
    # X-Accel-Buffering: what stands between us and the reader is not to collect events.
    headers = {**NO_STORE, "X-Accel-Buffering": "no"}
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


class KnownHosts:
    """Refuses requests that call the server by another name than its own.

    So a page of somebody's, whose name was made to lead to this machine, reaches nothing.
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
                    f"This server answers to {', '.join(sorted(self._hosts))}, not to {given!r}. "
                    "Call it by one of these names, or start it with --insecure."
                )
                await error_answer("UnknownHost", message, 421)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def url_of(host: str, listener: socket.socket) -> str:
    """Return the address at which a browser finds a server."""
    shown = f"[{host}]" if ":" in host else host or "127.0.0.1"
    return f"http://{shown}:{listener.getsockname()[1]}/"


@contextmanager
def served(
    app: Any, listener: socket.socket, *, what: str, ending: Callable[[], None]
) -> Iterator[None]:
    """Serve an application in a thread, until the block ends.

    Args:
        what: What is served: "page".
        ending: Called before the server ends, to let those go who wait.

    Raises:
        MillstreamError: it did not start.
    """
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="critical",  # what fails, our own log tells
            access_log=False,
            ws="none",
            lifespan="on",
            server_header=False,
            timeout_graceful_shutdown=_ENDS_S,
        )
    )
    failed: list[BaseException] = []

    def run() -> None:
        try:
            server.run(sockets=[listener])
        except BaseException as error:  # noqa: BLE001 - it goes to who started the thread
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
