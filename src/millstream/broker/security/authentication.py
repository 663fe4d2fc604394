"""Authentication of clients: SASL with the mechanism PLAIN, checked against the file of users.

A connection of a broker that has users begins with these requests, in this order; no others are accepted
before:

1. ApiVersions, any number of times: the supported versions are no secret.
2. SaslHandshake: the client names the mechanism.
3. SaslAuthenticate: the client sends name and password.

A request out of order, and a failed attempt, gets the protocol's error, and the connection ends. An
authenticated client may do everything: there is no authorization.

Each attempt costs a hash that is slow on purpose, so attempts are checked one at a time, in a thread of
their own, and failed ones are limited (``AttemptLimiter``). Successful ones are remembered, as digests
under a key that exists only in this process, until the user's line changes: clients open many
connections. So are the last failed ones: a program with an old password retries for ever, and must not
lock others out.

Source: KIP-43, KIP-152; RFC 4616 (PLAIN); Kafka ``SaslServerAuthenticator``.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from millstream.broker.protocol.error_codes import ApiError, ErrorCode
from millstream.broker.protocol.messages import API_VERSIONS
from millstream.broker.protocol.messages_security import SASL_AUTHENTICATE, SASL_HANDSHAKE
from millstream.broker.protocol.schema import Api
from millstream.broker.security.users import NOBODY, UsersFile, Verifier
from millstream.errors import ConfigError
from millstream.threads import Threads

MECHANISM = "PLAIN"
OPENING_BYTES_MAX = 8 * 1024  # of a request before authentication
USER_FAILURES_MAX, USER_RETRY_S = 10, 6.0  # of one name from one address
HOST_FAILURES_MAX, HOST_RETRY_S = 100, 0.6  # of one address
# before the response to a failed attempt: it slows down a client that retries at once
_FAILURE_DELAY_S = 0.2
_KEYS_MAX = 10_000  # with counted failures
_WRONG_MAX = 16  # remembered wrong passwords of one user
WRONG_CREDENTIALS = "unknown user or wrong password"
_OPENING_APIS = (API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE)
_log = logging.getLogger(__name__)


class AttemptLimiter:
    """Limits failed attempts: ``failures_max`` at first, and one more every ``every_s`` seconds.

    For each key it keeps only the time at which its failures have expired.
    """

    def __init__(self, failures_max: int, every_s: float, clock: Callable[[], float]) -> None:
        self._every_s = every_s
        self._ahead_s = (failures_max - 1) * every_s
        self._clock = clock
        self._clean_at: dict[Hashable, float] = {}

    def wait_s(self, key: Hashable) -> float:
        """Return in how many seconds the next attempt is allowed; 0: now."""
        now = self._clock()
        return max(self._clean_at.get(key, now) - now - self._ahead_s, 0.0)

    def record_failure(self, key: Hashable) -> None:
        """Count a failure."""
        now = self._clock()
        self._clean_at[key] = max(self._clean_at.pop(key, now), now) + self._every_s
        if len(self._clean_at) > _KEYS_MAX:
            self._drop_expired(now)

    def _drop_expired(self, now: float) -> None:
        """Drop keys whose failures have expired, or else the one that failed longest ago."""
        left = {key: at for key, at in self._clean_at.items() if at > now}
        if len(left) > _KEYS_MAX:
            del left[next(iter(left))]
        self._clean_at = left


@dataclass(slots=True)
class _CachedDigests:
    """Checked passwords of a user, as digests, until its line in the file changes."""

    verifier: Verifier
    right: bytes | None = None
    wrong: deque[bytes] = field(default_factory=lambda: deque(maxlen=_WRONG_MAX))


class Authenticator:
    """Checks names and passwords against a file of users.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, users: UsersFile, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._users = users
        self._of_user = AttemptLimiter(USER_FAILURES_MAX, USER_RETRY_S, clock)
        self._of_host = AttemptLimiter(HOST_FAILURES_MAX, HOST_RETRY_S, clock)
        self._key = secrets.token_bytes(32)
        self._read_failure = ""  # the last logged reason why the users cannot be read
        # Of names with and without a user: neither takes longer.
        self._known: dict[str, _CachedDigests] = {}
        # One thread: all attempts together take at most one core and the memory of one hash, and a
        # failure counts before the next attempt is checked, however many there are at the same time.
        self._hashing = Threads(1, "millstream-broker-authentication")

    def close(self) -> None:
        """End the thread."""
        self._hashing.close()

    async def check(self, host: str, name: str, password: str) -> None:
        """Return if this is the password of the user.

        Raises:
            ApiError: it is not, or there were too many failed attempts; the error does not say
                whether the name or the password is wrong.
        """
        await asyncio.wrap_future(self._hashing.submit(self._check, host, name, password))

    def knows(self, name: str) -> bool:
        """Return whether there was a user of this name when the file was last read."""
        return name in self._users.last_read()

    # -- the thread ---------------------------------------------------------------------------

    def _check(self, host: str, name: str, password: str) -> None:
        digest = hmac.digest(self._key, password.encode(), "sha256")
        verifier = self._verifier(name)
        known = self._known.get(name)
        if known is None or known.verifier != verifier:
            known = self._known[name] = _CachedDigests(verifier)
            self._drop_unknown_names()
        if digest in known.wrong:
            raise ApiError(ErrorCode.SASL_AUTHENTICATION_FAILED, WRONG_CREDENTIALS)
        self._check_attempts(host, name)
        passed = known.right is not None and hmac.compare_digest(known.right, digest)
        passed = passed or verifier.matches(password)
        if passed and verifier is not NOBODY:
            known.right = digest
            return
        known.wrong.append(digest)
        self._of_user.record_failure((host, name))
        self._of_host.record_failure(host)
        raise ApiError(ErrorCode.SASL_AUTHENTICATION_FAILED, WRONG_CREDENTIALS)

    def _verifier(self, name: str) -> Verifier:
        try:
            found = self._users.read().get(name, NOBODY)
        except ConfigError as error:
            if self._read_failure != str(error):  # once, and not for each client
                self._read_failure = str(error)
                _log.error("no new connection can authenticate: %s", error)
            raise ApiError(
                ErrorCode.SASL_AUTHENTICATION_FAILED, "the broker cannot read its users"
            ) from error
        self._read_failure = ""
        return found

    def _drop_unknown_names(self) -> None:
        """Drop the digests of names without a user, once there are too many."""
        if len(self._known) > _KEYS_MAX:
            users = self._users.last_read()
            self._known = {name: one for name, one in self._known.items() if name in users}

    def _check_attempts(self, host: str, name: str) -> None:
        wait_s = max(self._of_user.wait_s((host, name)), self._of_host.wait_s(host))
        if wait_s:
            raise ApiError(
                ErrorCode.SASL_AUTHENTICATION_FAILED,
                f"too many failed attempts; try again in {math.ceil(wait_s)} s",
            )


class SaslSession:
    """The authentication of one connection.

    ``user`` is set when it has succeeded; ``failure`` is set when it has failed: the connection must end.
    """

    def __init__(self, authenticator: Authenticator, host: str) -> None:
        self.user: str | None = None
        self.failure: str | None = None
        self._authenticator = authenticator
        self._host = host
        self._handshake_done = False

    def admits(self, api: Api) -> bool:
        """Return whether a request of this kind is accepted now."""
        return self.user is not None or api in _OPENING_APIS

    def handshake(self, mechanism: str, version: int) -> ErrorCode:
        """Handle a SaslHandshake; return the error code of the response."""
        if version == 0:  # the bytes after it would be no request
            return self._fail(ErrorCode.UNSUPPORTED_VERSION, "SaslHandshake of version 0")
        if self._handshake_done:
            return self._fail(ErrorCode.ILLEGAL_SASL_STATE, "a second SaslHandshake")
        if mechanism != MECHANISM:
            return self._fail(
                ErrorCode.UNSUPPORTED_SASL_MECHANISM, f"a SASL mechanism other than {MECHANISM}"
            )
        self._handshake_done = True
        return ErrorCode.NONE

    async def authenticate(self, token: bytes) -> None:
        """Handle a SaslAuthenticate.

        Raises:
            ApiError: authentication failed.
        """
        if not self._handshake_done or self.user is not None:
            self._fail(ErrorCode.ILLEGAL_SASL_STATE, "SaslAuthenticate out of order")
            raise ApiError(ErrorCode.ILLEGAL_SASL_STATE, "send SaslHandshake first, and each once")
        try:
            name, password = _decode_plain(token)
        except ApiError:
            self._fail(ErrorCode.SASL_AUTHENTICATION_FAILED, "no name and password of SASL PLAIN")
            raise
        try:
            await self._authenticator.check(self._host, name, password)
        except ApiError as error:
            # The log must not show an unknown name: it may be a password.
            known = f"user {name!r}" if self._authenticator.knows(name) else "an unknown user"
            self._fail(error.code, f"authentication of {known} failed: {error}")
            await asyncio.sleep(_FAILURE_DELAY_S)
            raise
        self.user = name

    def _fail(self, code: ErrorCode, why: str) -> ErrorCode:
        self.failure = why
        return code


def _decode_plain(token: bytes) -> tuple[str, str]:
    """Return name and password: ``[authorization] NUL name NUL password``, in UTF-8.

    Raises:
        ApiError: it has another form, or another authorization identity.
    """
    try:
        other, name, password = token.decode().split("\0")
    except ValueError:  # a UnicodeDecodeError is one, too
        other, name, password = "", "", ""
    if not name or not password or other not in {"", name}:
        raise ApiError(ErrorCode.SASL_AUTHENTICATION_FAILED, "no name and password of SASL PLAIN")
    return name, password
