"""Who may come: bearers of the token, and pages of the origins that were named.

===========================================  ======  =================================================
a request                                    answer  why
===========================================  ======  =================================================
names this server otherwise than its own     421     a page whose name was made to lead here
bears an Origin that was not allowed         403     a page of somebody else's, in a browser that is here
has no token, or another one                 401     anybody
===========================================  ======  =================================================

The first is asked only where there is no token: a page that was led here has none.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Any

from starlette.responses import Response

from millstream.answering import error_answer

_ALLOWED_HEADERS = (
    "authorization, content-type, idempotency-key, last-event-id, millstream-header, "
    "millstream-key, millstream-timestamp"
)


class Access:
    """Lets requests through that may come, and answers the others."""

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
            await error_answer("OriginRefused", _refusal(origin), 403)(scope, receive, send)
            return
        if origin and scope["method"] == "OPTIONS":
            await _preflight(origin)(scope, receive, send)
            return
        if not self._bears_token(headers.get(b"authorization", b"")):
            refused = error_answer(
                "TokenRefused",
                "This server wants the header Authorization: Bearer TOKEN, with its token.",
                401,
            )
            refused.headers["WWW-Authenticate"] = "Bearer"
            await refused(scope, receive, send)
            return
        await self._app(scope, receive, _telling(send, origin) if origin else send)

    def _bears_token(self, said: bytes) -> bool:
        if self._token is None:
            return True
        scheme, _, token = said.partition(b" ")
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


def _telling(send: Any, origin: str) -> Any:
    """Return ``send``, with the headers that let a page of ``origin`` read the answer."""

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
    if origin == "null":  # to allow it would let in every page that hides where it is from
        return (
            "Pages that do not say where they are from may not send here. Serve them from a host."
        )
    return f"Pages of {origin} may not send here. Start the server with --allow-origin {origin} if they are to."
