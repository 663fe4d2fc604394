"""What a request that changes something must be, beside what its route needs (:mod:`millstream.http_access`): JSON.

A browser says from which page a request comes (``Origin``). Another site's page, or a form, cannot say that it is ours,
and cannot send JSON unasked.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from millstream.access.audit_log import Actor
from millstream.http import error_response, read_body
from millstream.http_access import access_of

_BODY_BYTES_MAX = 1 << 20


def read_only_response() -> Response:
    """Return what a server responds that was not given what it would change something with."""
    message = "This server only reads: it was not started by `millstream ui` on this machine alone, or with tokens."
    return error_response("ReadOnly", message, 403)


def refusal(request: Request) -> Response | None:
    """Return why a request may not change anything; None if it may."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return error_response("NotJson", "Send JSON (Content-Type: application/json).", 415)
    return None


def actor_of(request: Request) -> Actor:
    """Return who sends a request, for the audit log."""
    client = None if request.client is None else request.client.host
    return Actor.of_request(access_of(request).principal, client)


async def json_body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        ConfigError: it is too large, or does not arrive.
    """
    return await read_body(request, _BODY_BYTES_MAX, "Name fewer records.")
