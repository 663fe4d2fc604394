"""Who may ask this server to change something: its own pages, in a browser on this machine.

A browser says from which page a request comes (``Origin``). Another site's page, or a form, cannot say that it is ours,
and cannot send JSON unasked. So a request needs our own origin, and JSON.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from millstream.errors import ConfigError
from millstream.http import error_response

_BODY_BYTES_MAX = 1 << 20


def read_only_response() -> Response:
    """Return what a server responds that was not given what it would change something with."""
    message = "This server only reads: it was not started by `millstream ui` on this machine alone."
    return error_response("ReadOnly", message, 403)


def refusal(request: Request) -> Response | None:
    """Return why a request may not change anything; None if it may."""
    own = f"{request.url.scheme}://{request.headers.get('host', '')}"
    if request.headers.get("origin") != own:
        message = f"This may only be asked by a page of this server ({own}), which its browser confirms (Origin)."
        return error_response("OtherOrigin", message, 403)
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return error_response("NotJson", "Send JSON (Content-Type: application/json).", 415)
    return None


async def read_body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        ConfigError: it is too large.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _BODY_BYTES_MAX:
            raise ConfigError(
                f"The request has more than {_BODY_BYTES_MAX:,} bytes. Name fewer records."
            )
    return body
