"""Serves views and the page in a thread of this process, until the block that asked for it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.errors import ConfigError
from millstream.listen_address import bind, is_loopback, parse_listen_address, web_library_missing
from millstream.views.server.catalog import ViewCatalog

LISTEN_DEFAULT = "127.0.0.1:8400"
_BACKLOG = 128


@dataclass(frozen=True)
class ViewServer:
    """A server that is up. ``url`` is where the page is."""

    url: str


@contextmanager
def serve(
    log: Path | str,
    *,
    listen: str = LISTEN_DEFAULT,
    insecure: bool = False,
    databases: Sequence[str] = (),
) -> Iterator[ViewServer]:
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
    host, port = parse_listen_address(listen, LISTEN_DEFAULT)
    local = is_loopback(host)
    if not local and not insecure:
        raise ConfigError(
            f"{listen} can be reached from other machines, and there is no authentication: whoever "
            "reaches it reads every view. Listen on 127.0.0.1, put a proxy that authenticates in "
            "front, or say --insecure (insecure=True)."
        )
    answering, application = _libraries()
    with ExitStack() as opened:
        catalogue = opened.enter_context(closing(ViewCatalog(Path(log), databases)))
        listener = opened.enter_context(closing(bind(host, port, "page")))
        listener.listen(_BACKLOG)
        names = answering.LOCAL_NAMES | {host} if local else None
        app, watch = application(catalogue, hosts=names)
        with answering.serve_in_thread(app, listener, what="page", ending=watch.close):
            yield ViewServer(answering.url_of(host, listener))


def _libraries() -> tuple[Any, Any]:
    try:
        import uvicorn  # noqa: F401, PLC0415 - an extra

        from millstream import http  # noqa: PLC0415 - needs an extra
        from millstream.views.server.routes import application  # noqa: PLC0415 - the same
    except ModuleNotFoundError as error:
        raise web_library_missing(error, "The page and the views over HTTP need") from error
    return http, application
