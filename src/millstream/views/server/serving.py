"""Serves views and the page in a thread of this process, until the block that asked for it ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.errors import ConfigError, EnvironmentProblem, MillstreamError
from millstream.listening import address_of, bound, is_loopback
from millstream.views.server.catalogue import Catalogue

if TYPE_CHECKING:
    from millstream.views.server.watch import Watch

LISTEN = "127.0.0.1:8400"
_BACKLOG = 128
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_ENDS_S = 3.0  # how long an answer at work may take once the server is to end
_POLL_S = 0.01


@dataclass(frozen=True)
class Serving:
    """A server that is up. ``url`` is where the page is."""

    url: str


@contextmanager
def serve(
    log: Path | str,
    *,
    listen: str = LISTEN,
    insecure: bool = False,
    databases: Sequence[str] = (),
) -> Iterator[Serving]:
    """Serve the views of a log folder and the page until the block ends.

    Apps and views that come into being meanwhile are there at once; the folder may even be empty.

    Args:
        listen: ``HOST:PORT``; port 0 takes one that is free.
        insecure: Allow an address that other machines can reach.
        databases: URLs of databases whose views are to be served, too.

    Raises:
        EnvironmentProblem: The extra ``ui`` is not installed.
        ConfigError: The address is none, is taken, or could be reached by others.
        RetriableError: A database is away.
    Guarantees: reads only; holds up no job. In a thread of its own.
    """
    host, port = address_of(listen, LISTEN)
    local = is_loopback(host)
    if not local and not insecure:
        raise ConfigError(
            f"{listen} can be reached from other machines, and there is no authentication: whoever "
            "reaches it reads every view. Listen on 127.0.0.1, put a proxy that authenticates in "
            "front, or say --insecure (insecure=True)."
        )
    uvicorn, application = _libraries()
    with ExitStack() as opened:
        catalogue = opened.enter_context(closing(Catalogue(Path(log), databases)))
        listener = opened.enter_context(closing(bound(host, port, "page")))
        listener.listen(_BACKLOG)
        names = _LOCAL_NAMES | {host} if local else None
        app, watch = application(catalogue, hosts=names)
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="critical",  # what fails, our own log tells
            access_log=False,
            ws="none",
            lifespan="on",
            server_header=False,
            timeout_graceful_shutdown=int(_ENDS_S),
        )
        with _running(uvicorn.Server(config), listener, watch):
            shown = f"[{host}]" if ":" in host else host or "127.0.0.1"
            yield Serving(f"http://{shown}:{listener.getsockname()[1]}/")


def _libraries() -> tuple[Any, Any]:
    try:
        import uvicorn  # noqa: PLC0415 - an extra

        from millstream.views.server.routes import application  # noqa: PLC0415 - needs starlette
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("uvicorn", "starlette", "anyio"):
            raise
        raise EnvironmentProblem(
            f"The page and the views over HTTP need {error.name}, which is not installed. Install it "
            'with pip install "millstream[ui]".'
        ) from error
    return uvicorn, application


@contextmanager
def _running(server: Any, listener: socket.socket, watch: Watch) -> Iterator[None]:
    """Run a server in a thread; end it with the block, subscribers included."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            server.run(sockets=[listener])
        except BaseException as error:  # noqa: BLE001 - it goes to who started the thread
            failed.append(error)

    thread = threading.Thread(target=run, name="millstream page", daemon=True)
    thread.start()
    pause = threading.Event()
    while not server.started and thread.is_alive():
        pause.wait(_POLL_S)
    try:
        if not server.started:
            raise MillstreamError("The server of the page did not start.") from next(
                iter(failed), None
            )
        yield
    finally:
        watch.close()
        server.should_exit = True
        thread.join()
