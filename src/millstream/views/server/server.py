"""Serves views and the page in a thread of this process, until the block ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.access.tls import certificate_of
from millstream.access.tokens import tokens_of
from millstream.client.log_metrics import read_log_metrics
from millstream.errors import ConfigError
from millstream.listen_address import (
    bind,
    check_web_libraries,
    is_loopback,
    parse_listen_address,
)
from millstream.metrics.exposition import Exposition
from millstream.views.server.app_metrics import AppMetrics
from millstream.views.server.catalog import ViewCatalog

if TYPE_CHECKING:
    from millstream.views.server.dead_letter_requests import ReplayDeadLetters
from millstream.views.server.version_commands import VersionCommands

LISTEN_DEFAULT = "127.0.0.1:8400"
_BACKLOG = 128


@dataclass(frozen=True)
class ViewServer:
    """A running server. ``url`` is the address of the page."""

    url: str


@contextmanager
def serve(
    log: Path | str,
    *,
    listen: str = LISTEN_DEFAULT,
    insecure: bool = False,
    databases: Sequence[str] = (),
    replay: ReplayDeadLetters | None = None,
    commands: VersionCommands | None = None,
    token_file: Path | str | None = None,
    origins: Sequence[str] = (),
    tls_cert: Path | str | None = None,
    tls_key: Path | str | None = None,
) -> Iterator[ViewServer]:
    """Serve the views of a log folder and the page until the block ends.

    New apps and views are served at once; the folder may even be empty.

    Args:
        listen: ``HOST:PORT``; port 0 takes one that is free.
        insecure: Allow an address that other machines can reach, without tokens.
        databases: URLs of databases whose views are to be served, too.
        replay: Sends dead letters again, for the page; at an address that other machines can reach only with tokens.
        commands: Runs commands on edited programs, for the page; the same.
        token_file: A file of tokens, of which requests must carry one, or be of a browser that has logged in with one: see
            ``millstream token``. What changes something needs the role ``operate``.
        origins: Origins of browser pages that may send requests, beside this server's own.
        tls_cert: The certificate, as PEM: clients must connect with TLS. A renewed one is used without a restart.
        tls_key: Its private key, if that is not in the same file.

    Raises:
        EnvironmentProblem: The extra ``ui`` is not installed.
        ConfigError: The address is invalid, is in use, or could be reached by other machines.
        RetriableError: A database is not available.
    Guarantees: only reads, but for ``replay`` and ``commands``; blocks no job. In a thread of its own.
    """
    host, port = parse_listen_address(listen, LISTEN_DEFAULT)
    local = is_loopback(host)
    tokens = tokens_of(None, token_file)
    certificate = certificate_of(
        None if tls_cert is None else Path(tls_cert), None if tls_key is None else Path(tls_key)
    )
    if not local and tokens is None and not insecure:
        raise ConfigError(
            f"{listen} can be reached from other machines, and there is no authentication: whoever reaches it reads every view. Listen "
            "on 127.0.0.1, give tokens (--token-file), put a proxy that authenticates in front, or use --insecure "
            "(insecure=True)."
        )
    check_web_libraries("The page and the views over HTTP need")
    from millstream import http  # noqa: PLC0415 - needs an extra
    from millstream.views.server.routes import application  # noqa: PLC0415 - the same

    with ExitStack() as opened:
        catalog = opened.enter_context(closing(ViewCatalog(Path(log), databases)))
        listener = opened.enter_context(closing(bind(host, port, "page")))
        listener.listen(_BACKLOG)
        names = http.LOCAL_NAMES | {host} if local and tokens is None else None
        may_change = local or tokens is not None
        figures = AppMetrics(catalog, Path(log))
        opened.callback(figures.close)
        exposition = Exposition(
            {"apps": figures.read, "log": partial(read_log_metrics, Path(log))},
            [figures.why_not_ready],
        )
        app, watcher = application(
            catalog,
            exposition,
            hosts=names,
            replay=replay if may_change else None,
            commands=commands if may_change else None,
            tokens=tokens,
            origins=origins,
        )
        with http.serve_in_thread(
            app, listener, what="page", ending=watcher.close, certificate=certificate
        ):
            yield ViewServer(http.url_of(host, listener, certificate))
