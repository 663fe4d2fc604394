"""The files of the page, which are part of the package: no build, no network."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.responses import Response

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    # Only scripts of this server may run, and no other page may embed this one.
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Assets:
    """The page's files, read once."""

    def __init__(self) -> None:
        folder = files("millstream.views.server") / "page"
        self._files = {
            file.name: file.read_bytes()
            for file in folder.iterdir()
            if file.name.rpartition(".")[2] in _TYPES
        }

    def response(self, name: str, known: str | None) -> Response:
        """Return a file; an empty response if its tag is ``known``, as the browser has it already.

        Raises:
            HTTPException: there is no such file.
        """
        if name not in self._files:
            raise HTTPException(404)
        content = self._files[name]
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        headers = {**_HEADERS, "ETag": tag}
        if known == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_TYPES[name.rpartition(".")[2]])
