"""Serves the documentation that came with the package: the pages of a zip, over HTTP.

Nothing is written, and nothing is read but that file, so an address that other machines reach is allowed. It needs
no extra.
"""

from __future__ import annotations

import mimetypes
import socket
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from millstream.errors import EnvironmentProblem
from millstream.listen_address import bind, parse_listen_address

LISTEN_DEFAULT = "127.0.0.1:8401"
PACKED_SITE = Path(__file__).resolve().parents[1] / "site.zip"
_TIMEOUT_S = 10.0  # for a client to send its request, and to read the response
_BACKLOG = 16
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
    with zipfile.ZipFile(packed) as site, closing(bind(host, port, "site")) as listener:
        listener.listen(_BACKLOG)
        server = _SiteServer(listener, site)
        thread = threading.Thread(target=server.serve_forever, name="millstream docs", daemon=True)
        thread.start()
        shown = f"[{host}]" if ":" in host else host
        try:
            yield f"http://{shown}:{listener.getsockname()[1]}/"
        finally:
            server.shutdown()
            thread.join()


class _SiteServer(ThreadingHTTPServer):
    """Answers each request in a thread."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, site: zipfile.ZipFile) -> None:
        super().__init__(listener.getsockname()[:2], _SiteRequest, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.site = site
        self.names = frozenset(site.namelist())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show a defect, and nothing of a client that has gone away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _SiteRequest(BaseHTTPRequestHandler):
    server: _SiteServer
    timeout = _TIMEOUT_S
    server_version, sys_version = "millstream", ""

    def do_GET(self) -> None:
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
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-cache")  # another version may be at this address next
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Log no requests."""


def content_type(name: str) -> str:
    """Say what a browser should take a file for."""
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    if name.endswith(_SHOWN_AS_TEXT):
        kind = "text/plain"
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
