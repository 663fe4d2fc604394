"""Browsers that have logged in at a page: a cookie stands for the token, which a browser sends with no page's request.

The cookie has 256 random bits and is no token. Scripts cannot read it (``HttpOnly``), pages of other sites cannot have it sent
(``SameSite=Strict``), and over TLS it is sent over TLS alone (``Secure``). The server remembers, in memory, which token it was
given for: a session ends with the token, with the server, after twelve hours, or by a log-out.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from millstream.access.tokens import Principal, Tokens, digest_of

SESSION_S = 12 * 3600
SESSIONS_MAX = 10_000  # of which the oldest ends
_ID_BYTES = 32


@dataclass(frozen=True)
class _Login:
    token_digest: bytes
    ends_s: float


class LoginSessions:
    """Who has logged in. From any thread."""

    def __init__(self, tokens: Tokens, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens = tokens
        self._clock = clock
        self._logins: OrderedDict[bytes, _Login] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, token: str) -> tuple[str, Principal] | None:
        """Log in with a token: return the id of a session, and who it is; None if the token is unknown."""
        found = self._tokens.find(token.encode("utf-8", "replace"))
        if found is None:
            return None
        session = secrets.token_urlsafe(_ID_BYTES)
        with self._lock:
            self._logins[digest_of(session.encode())] = _Login(
                found.digest, self._clock() + SESSION_S
            )
            while len(self._logins) > SESSIONS_MAX:
                self._logins.popitem(last=False)
        return session, found.principal

    def principal(self, session: str | None) -> Principal | None:
        """Return who has logged in, with the role of the token now; None if the session is unknown or has ended."""
        if session is None:
            return None
        key = digest_of(session.encode("utf-8", "replace"))
        with self._lock:
            login = self._logins.get(key)
        if login is None:
            return None
        found = self._tokens.find_digest(login.token_digest)
        if found is None or self._clock() >= login.ends_s:
            self.end(session)
            return None
        return found.principal

    def end(self, session: str | None) -> None:
        """End a session."""
        if session is not None:
            with self._lock:
                self._logins.pop(digest_of(session.encode("utf-8", "replace")), None)


def session_of(request: Request) -> str | None:
    """Return the session that a request's cookie names."""
    return request.cookies.get(_cookie_name(request))


def set_session(request: Request, response: Response, session: str | None) -> None:
    """Have a browser keep the cookie of a session; None: forget it."""
    response.set_cookie(
        _cookie_name(request),
        session or "",
        max_age=SESSION_S if session else 0,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


def _cookie_name(request: Request) -> str:
    # Cookies know no ports: of two servers on a machine each has its own.
    return f"millstream-{(request.scope.get('server') or ('', 0))[1]}"
