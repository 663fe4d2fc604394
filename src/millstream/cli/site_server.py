"""Serves the documentation that came with the package: the pages of a zip, over HTTP.

Nothing is written, and nothing is read but that file, so an address that other machines reach is allowed. It needs
no extra.
"""

from __future__ import annotations

import mimetypes
import socket
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote, urlsplit

from millstream.errors import EnvironmentProblem
from millstream.listen_address import bind, parse_listen_address
from millstream.plain_http import PlainRequest, PlainServer

LISTEN_DEFAULT = "127.0.0.1:8401"
PACKED_SITE = Path(__file__).resolve().parents[1] / "site.zip"
CONNECTIONS_MAX = 64  # a browser opens six for each page that it loads
_SHOWN_AS_TEXT = (".md", ".py", ".toml", ".yaml")  # which browsers would save, or not know


@contextmanager
def serve_site(packed: Path = PACKED_SITE, *, listen: str = LISTEN_DEFAULT) -> Iterator[str]:
    """Serve the pages in a thread until the block ends; yield the address of the first.

    Args:
        listen: ``HOST:PORT``; port 0 takes one that is free.

    Raises:
        EnvironmentProblem: this installation has no documentation.
        ConfigError: the address is invalid, or in use.
    """
    host, port = parse_listen_address(listen, LISTEN_DEFAULT)
    if not packed.is_file():
        raise EnvironmentProblem(
            f"This installation has no documentation: there is no {packed}. Released packages have it. In a "
            "checkout, build it with make docs."
        )
    with (
        zipfile.ZipFile(packed) as site,
        closing(bind(host, port, "site")) as listener,
        _SiteServer(listener, site).serving() as url,
    ):
        yield url


class _SiteServer(PlainServer):
    def __init__(self, listener: socket.socket, site: zipfile.ZipFile) -> None:
        super().__init__(listener, _SiteRequest, connections_max=CONNECTIONS_MAX, what="docs")
        self.site = site
        self.names = frozenset(site.namelist())


class _SiteRequest(PlainRequest):
    server: _SiteServer

    def do_GET(self) -> None:  # noqa: N802 - the library's name
        name = unquote(urlsplit(self.path).path).removeprefix("/")
        if name == "" or name.endswith("/"):
            name += "index.html"
        if name in self.server.names:
            self._send(HTTPStatus.OK, self.server.site.read(name), content_type(name))
        else:
            text = "There is no such page. The first one is at /.\n"
            self._send(HTTPStatus.NOT_FOUND, text.encode(), "text/plain; charset=utf-8")

    do_HEAD = do_GET  # noqa: N815 - the library's name

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send(status, body, kind, cache="no-cache")  # another version may be here next


def content_type(name: str) -> str:
    """Say what a browser should take a file for."""
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    if name.endswith(_SHOWN_AS_TEXT):
        kind = "text/plain"
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
