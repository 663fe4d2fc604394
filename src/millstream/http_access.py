"""Who may send which request to our HTTP servers.

===========================================  ======  =================================================
a request                                    status  why
===========================================  ======  =================================================
names a host that is not this server's       421     DNS rebinding: the name of a page resolves to this host
has an Origin that is not allowed            403     a page of another site, in a browser on this machine
has a token of the server's in its URL       400     addresses are kept in logs and histories
has no token, or an unknown one              401     the client is not authenticated
needs another role than its token has        403     ``read`` does not change anything
changes something, and says no Origin        403     only where a browser vouches for the client, and no token does
===========================================  ======  =================================================

Each route says the role that it needs (:class:`AccessRoute`). Routes without one are open: a probe has no token, and
``/healthz`` and ``/readyz`` tell nothing but one word or a sentence about the server.

The first is checked only if the server has no token: such a page could not send it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from millstream.access.tokens import Principal, Role, Tokens
from millstream.http import error_response
from millstream.http_sessions import LoginSessions, session_of

_SCOPE_KEY = "millstream.access"
_LOGIN = "/login"
_ALLOWED_HEADERS = (
    "authorization, content-type, idempotency-key, last-event-id, millstream-header, "
    "millstream-key, millstream-timestamp"
)
_REFUSALS_LOGGED_S = 10.0
_log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class RequestAccess:
    """Who sends a request; ``by_header``: the client has given a token, which no page of another site can have."""

    principal: Principal
    by_header: bool


def access_of(request: Request) -> RequestAccess:
    """Return who sends a request that has passed :class:`Access`."""
    found = request.scope[_SCOPE_KEY]
    assert isinstance(found, RequestAccess), "Access is in front of every route"
    return found


class AccessRoute(Route):
    """A route with the role that it needs; None: it is open. ``changes``: it changes something, or begins a process."""

    def __init__(
        self,
        path: str,
        handler: Handler,
        *,
        role: Role | None,
        methods: Sequence[str] = ("GET",),
        changes: bool = False,
    ) -> None:
        self.role = role
        self.changes = changes

        async def guarded(request: Request) -> Response:
            refused = None if role is None else _refusal_of(request, role, changes=changes)
            return await handler(request) if refused is None else refused

        super().__init__(path, guarded, methods=list(methods))


def _refusal_of(request: Request, role: Role, *, changes: bool) -> Response | None:
    access = access_of(request)
    if not access.principal.may(role):
        message = (
            f"The token {access.principal.name} has the role {access.principal.role}, and {request.method} "
            f"{request.url.path} needs {role}. Use a token that has it."
        )
        return error_response("RoleRefused", message, 403)
    if changes and not access.by_header and "origin" not in request.headers:
        message = (
            "This may only be asked by a page of this server, which its browser confirms (Origin), or with a token "
            "(Authorization: Bearer …)."
        )
        return error_response("OtherOrigin", message, 403)
    return None


class Access:
    """Passes allowed requests on, and rejects the others.

    Args:
        tokens: The tokens of the server; None: no request needs one.
        origins: Origins of browser pages that may send requests.
        open_paths: Paths that need no token. One that ends with ``/`` stands for all below it.
        sessions: Those who have logged in at the server's page; None: it has none.
        own_origin: Whether pages of this server itself may send requests.
    """

    def __init__(
        self,
        app: Any,
        tokens: Tokens | None,
        origins: Iterable[str],
        *,
        open_paths: Collection[str] = ("/healthz", "/readyz"),
        sessions: LoginSessions | None = None,
        own_origin: bool = False,
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._origins = frozenset(origins)
        self._open = frozenset(open_paths)
        self._open_folders = tuple(path for path in open_paths if path.endswith("/"))
        self._sessions = sessions
        self._own_origin = own_origin
        self._refused = _RefusalLog()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        refused = self._refusal(request)
        if refused is not None:
            await refused(scope, receive, send)
            return
        origin = request.headers.get("origin", "")
        if origin and scope["method"] == "OPTIONS":
            await _preflight(origin)(scope, receive, send)
            return
        access = self._authenticated(request)
        if access is None:
            await self._unauthenticated(request)(scope, receive, send)
            return
        scope[_SCOPE_KEY] = access
        foreign = origin and origin in self._origins
        await self._app(scope, receive, _with_cors_headers(send, origin) if foreign else send)

    def _refusal(self, request: Request) -> Response | None:
        origin = request.headers.get("origin", "")
        own = f"{request.url.scheme}://{request.headers.get('host', '')}"
        if origin and origin not in self._origins and not (self._own_origin and origin == own):
            return error_response("OriginRefused", _origin_refusal(origin), 403)
        if self._tokens is not None and b"oken=" in request.scope["query_string"]:
            for _, value in parse_qsl(request.scope["query_string"].decode("latin-1")):
                if self._tokens.find(value.encode("latin-1", "replace")) is not None:
                    self._refused.log(request, "has a token in its URL")
                    message = (
                        "The URL has a token in it, and addresses are kept in logs and histories. Send it in the header "
                        "Authorization: Bearer TOKEN, and replace this one: others may have read it."
                    )
                    return error_response("TokenInUrl", message, 400)
        return None

    def _authenticated(self, request: Request) -> RequestAccess | None:
        """Return who sends a request; None if it is not allowed to anybody who does not say so."""
        if self._tokens is None:
            return RequestAccess(Principal(None, "operate"), by_header=False)
        given = request.headers.get("authorization")
        if given is not None:
            scheme, _, token = given.partition(" ")
            found = self._tokens.find(token.strip().encode("latin-1", "replace"))
            if found is not None and scheme.lower() == "bearer":
                return RequestAccess(found.principal, by_header=True)
        elif self._sessions is not None:
            principal = self._sessions.principal(session_of(request))
            if principal is not None:
                return RequestAccess(principal, by_header=False)
        path = request.scope["path"]
        if path in self._open or path.startswith(self._open_folders):
            return RequestAccess(Principal(None, "read"), by_header=False)
        return None

    def _unauthenticated(self, request: Request) -> Response:
        browses = "text/html" in request.headers.get("accept", "")
        if self._sessions is not None and browses and request.method == "GET":
            return RedirectResponse(_LOGIN, 303, {"Cache-Control": "no-store"})
        self._refused.log(request, "has no token, or an unknown one")
        refused = error_response(
            "TokenRefused",
            "This server requires the header Authorization: Bearer TOKEN, with a token of its.",
            401,
        )
        refused.headers["WWW-Authenticate"] = "Bearer"
        return refused


class _RefusalLog:
    """Logs refused requests; in ten seconds one, with the number of others, so that they cannot fill a disk."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._others = 0

    def log(self, request: Request, why: str) -> None:
        now = time.monotonic()
        if now - self._since < _REFUSALS_LOGGED_S:
            self._others += 1
            return
        client = "an unknown address" if request.client is None else request.client.host
        # The path is quoted: a client chooses it, and may have put the end of a line in it.
        _log.warning(
            "a request of %s was refused: %s %.200r %s (and %d others before it)",
            client,
            request.method,
            request.scope["path"],
            why,
            self._others,
        )
        self._since, self._others = now, 0


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


def _origin_refusal(origin: str) -> str:
    if origin == "null":  # to allow it would allow every page that hides its origin
        return "Pages without an origin may not send requests here. Serve them from a host."
    return (
        f"Pages of {origin} may not send requests here. To allow them, start the server with "
        f"--allow-origin {origin}."
    )
