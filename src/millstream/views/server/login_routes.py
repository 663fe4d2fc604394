"""Logging in at the page, where the server has tokens: a browser sends no token with the pages and streams that it asks for.

======================  ==================================================================
``GET /login``          a form for the token
``POST /login``         ``{"token": …}`` → a cookie, see :mod:`millstream.http_sessions`
``POST /logout``        ends the session
``GET /who``            the name of the token, and its role; the name is null where none is needed
======================  ==================================================================
"""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import Response

from millstream.errors import ConfigError
from millstream.http import error_response, json_response
from millstream.http_access import AccessRoute, access_of
from millstream.http_sessions import LoginSessions, session_of, set_session
from millstream.views.server.assets import Assets
from millstream.views.server.page_requests import json_body, refusal

LOGIN_PATHS = ("/login", "/assets/")
"""What a browser needs to log in: no token is needed for it."""


class LoginRoutes:
    """Handles log-ins; without ``sessions`` there is nothing to log in to."""

    def __init__(self, sessions: LoginSessions | None, assets: Assets) -> None:
        self._sessions = sessions
        self._assets = assets

    def routes(self) -> list[AccessRoute]:
        """Return the routes, by which nothing of an app changes."""
        return [
            AccessRoute("/login", self.page, role=None),
            AccessRoute("/login", self.log_in, role=None, methods=["POST"]),
            AccessRoute("/logout", self.log_out, role="read", methods=["POST"]),
            AccessRoute("/who", self.who, role="read"),
        ]

    async def page(self, request: Request) -> Response:
        return self._assets.response("login.html", request.headers.get("if-none-match"))

    async def log_in(self, request: Request) -> Response:
        if self._sessions is None:
            return error_response("NoTokens", "This server needs no token. Open its page.", 400)
        # A browser says Origin with every POST, and Access has refused others than ours.
        refused = refusal(request)
        if refused is not None:
            return refused
        begun = self._sessions.begin(_token(await json_body(request)))
        if begun is None:
            message = "The token is unknown. Ask whoever runs the server for one."
            return error_response("TokenRefused", message, 401)
        session, principal = begun
        response = json_response({"name": principal.name, "role": principal.role})
        set_session(request, response, session)
        return response

    async def log_out(self, request: Request) -> Response:
        response = json_response({})
        if self._sessions is not None:
            self._sessions.end(session_of(request))
            set_session(request, response, None)
        return response

    async def who(self, request: Request) -> Response:
        principal = access_of(request).principal
        return json_response({"name": principal.name, "role": principal.role})


def _token(body: bytes) -> str:
    try:
        token = json.loads(body)["token"]
    except (ValueError, TypeError, KeyError):
        token = None
    if not isinstance(token, str):
        raise ConfigError('The request is not of the form {"token": "…"}. Correct it.')
    return token.strip()
