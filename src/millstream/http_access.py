"""Access control: requests with the token, and pages of the allowed origins.

===========================================  ======  =================================================
a request                                    status  why
===========================================  ======  =================================================
names a host that is not this server's       421     DNS rebinding: the name of a page resolves to this host
has an Origin that is not allowed            403     a page of another site, in a browser on this machine
has no token, or another one                 401     the client is not authenticated
===========================================  ======  =================================================

``/healthz`` and ``/readyz`` need no token: a probe has none, and they tell nothing but one word or a sentence
about the server.

The first is checked only if the server has no token: such a page could not send it.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Any

from starlette.responses import Response

from millstream.http import error_response

_OPEN = frozenset({"/healthz", "/readyz"})
_ALLOWED_HEADERS = (
    "authorization, content-type, idempotency-key, last-event-id, millstream-header, "
    "millstream-key, millstream-timestamp"
)


class Access:
    """Passes allowed requests on, and rejects the others."""

    def __init__(self, app: Any, token: str | None, origins: Iterable[str]) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        self._origins = frozenset(origins)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and origin not in self._origins:
            await error_response("OriginRefused", _refusal(origin), 403)(scope, receive, send)
            return
        if origin and scope["method"] == "OPTIONS":
            await _preflight(origin)(scope, receive, send)
            return
        if scope["path"] not in _OPEN and not self._has_token(headers.get(b"authorization", b"")):
            refused = error_response(
                "TokenRefused",
                "This server requires the header Authorization: Bearer TOKEN, with its token.",
                401,
            )
            refused.headers["WWW-Authenticate"] = "Bearer"
            await refused(scope, receive, send)
            return
        await self._app(scope, receive, _with_cors_headers(send, origin) if origin else send)

    def _has_token(self, authorization: bytes) -> bool:
        if self._token is None:
            return True
        scheme, _, token = authorization.partition(b" ")
        # In constant time, so that a guess does not learn how far it was right.
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)


def _preflight(origin: str) -> Response:
    headers = {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": _ALLOWED_HEADERS,
        "Access-Control-Max-Age": "600",
        "Vary": "Origin",
    }
    return Response(status_code=204, headers=headers)


def _with_cors_headers(send: Any, origin: str) -> Any:
    """Return ``send``, with the headers that let a page of ``origin`` read the response."""

    async def sent(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                *message["headers"],
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", b"retry-after"),
                (b"vary", b"Origin"),
            ]
        await send(message)

    return sent


def _refusal(origin: str) -> str:
    if origin == "null":  # to allow it would allow every page that hides its origin
        return "Pages without an origin may not send requests here. Serve them from a host."
    return (
        f"Pages of {origin} may not send requests here. To allow them, start the server with "
        f"--allow-origin {origin}."
    )
