"""Who a client is: SASL with the mechanism PLAIN, checked against the file of users.

A connection of a broker that has users begins with these, in this order; nothing else is read before:

1. ApiVersions, as often as the client likes: what the broker speaks is no secret.
2. SaslHandshake: the client names the mechanism.
3. SaslAuthenticate: the client sends name and password.

What is out of order, and a try that fails, is answered with the protocol's error and ends the
connection. Whoever has passed may do everything: there is no authorisation.

Each try costs a hash that is slow on purpose, so they are made one at a time, in a thread of their own,
and those that fail are counted (``Tries``). What has passed is remembered, as a digest under a key that lives
only in this process, until the user's line changes: clients open many connections. So are the last that
failed: a program with an old password comes again and again, and is no reason to keep out others.

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

from millstream.broker.codes import Code, Refused
from millstream.broker.messages import API_VERSIONS
from millstream.broker.messages_security import SASL_AUTHENTICATE, SASL_HANDSHAKE
from millstream.broker.node import Call, Node
from millstream.broker.schema import Api
from millstream.broker.users import NOBODY, UsersFile, Verifier
from millstream.broker.wire import Message
from millstream.errors import ConfigError
from millstream.threads import Threads

MECHANISM = "PLAIN"
OPENING_BYTES_MAX = 8 * 1024  # of a request before its sender is known
USER_FAILURES_MAX, USER_TRY_EVERY_S = 10, 6.0  # of one name from one address
HOST_FAILURES_MAX, HOST_TRY_EVERY_S = 100, 0.6  # of one address
_FAILED_S = 0.2  # before a failed try is answered: a client that tries again at once is slowed down
_KEYS_MAX = 10_000  # of failures that are counted
_WRONG_MAX = 16  # passwords of one user that are remembered to be wrong
WRONG = "unknown user or wrong password"
_OPENING_APIS = (API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE)
_log = logging.getLogger(__name__)


class Tries:
    """How often one may fail: ``failures_max`` times at first, and once more every ``every_s`` seconds.

    Of each key only the time is kept at which nothing of its failures will count any more.
    """

    def __init__(self, failures_max: int, every_s: float, clock: Callable[[], float]) -> None:
        self._every_s = every_s
        self._ahead_s = (failures_max - 1) * every_s
        self._clock = clock
        self._clean_at: dict[Hashable, float] = {}

    def wait_s(self, key: Hashable) -> float:
        """Return in how many seconds there may be another try; 0: now."""
        now = self._clock()
        return max(self._clean_at.get(key, now) - now - self._ahead_s, 0.0)

    def failed(self, key: Hashable) -> None:
        """Count a failure."""
        now = self._clock()
        self._clean_at[key] = max(self._clean_at.pop(key, now), now) + self._every_s
        if len(self._clean_at) > _KEYS_MAX:
            self._forget(now)

    def _forget(self, now: float) -> None:
        """Forget the keys of which nothing counts, or else the one that failed longest ago."""
        left = {key: at for key, at in self._clean_at.items() if at > now}
        if len(left) > _KEYS_MAX:
            del left[next(iter(left))]
        self._clean_at = left


@dataclass(slots=True)
class _Known:
    """What is known of a user's passwords, as digests, until its line in the file changes."""

    verifier: Verifier
    right: bytes | None = None
    wrong: deque[bytes] = field(default_factory=lambda: deque(maxlen=_WRONG_MAX))


class Authenticator:
    """Holds names and passwords against a file of users.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, users: UsersFile, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._users = users
        self._of_user = Tries(USER_FAILURES_MAX, USER_TRY_EVERY_S, clock)
        self._of_host = Tries(HOST_FAILURES_MAX, HOST_TRY_EVERY_S, clock)
        self._key = secrets.token_bytes(32)
        self._trouble = ""  # why the users cannot be read, as it was told
        # Of names, be there a user or not: neither takes longer.
        self._known: dict[str, _Known] = {}
        # One thread: all of them together take one core at most and the memory of one hash, and a
        # failure counts before the next try is looked at, however many come at the same time.
        self._hashing = Threads(1, "millstream-broker-authenticating")

    def close(self) -> None:
        """End the thread."""
        self._hashing.close()

    async def check(self, host: str, name: str, password: str) -> None:
        """Return if this is the password of the user.

        Raises:
            Refused: it is not, or there were too many tries; which of name and password is wrong
                is not told.
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
            known = self._known[name] = _Known(verifier)
            self._forget()
        if digest in known.wrong:
            raise Refused(Code.SASL_AUTHENTICATION_FAILED, WRONG)
        self._check_tries(host, name)
        passed = known.right is not None and hmac.compare_digest(known.right, digest)
        passed = passed or verifier.matches(password)
        if passed and verifier is not NOBODY:
            known.right = digest
            return
        known.wrong.append(digest)
        self._of_user.failed((host, name))
        self._of_host.failed(host)
        raise Refused(Code.SASL_AUTHENTICATION_FAILED, WRONG)

    def _verifier(self, name: str) -> Verifier:
        try:
            found = self._users.read().get(name, NOBODY)
        except ConfigError as error:
            if self._trouble != str(error):  # once, and not for each who comes
                self._trouble = str(error)
                _log.error("nobody new is let in: %s", error)
            raise Refused(
                Code.SASL_AUTHENTICATION_FAILED, "the broker cannot read its users"
            ) from error
        self._trouble = ""
        return found

    def _forget(self) -> None:
        """Keep what is known of names that are none of a user, too, but not of too many."""
        if len(self._known) > _KEYS_MAX:
            users = self._users.last_read()
            self._known = {name: one for name, one in self._known.items() if name in users}

    def _check_tries(self, host: str, name: str) -> None:
        wait_s = max(self._of_user.wait_s((host, name)), self._of_host.wait_s(host))
        if wait_s:
            raise Refused(
                Code.SASL_AUTHENTICATION_FAILED,
                f"too many tries failed; try again in {math.ceil(wait_s)} s",
            )


class Login:
    """How far one connection has come in saying who it is.

    ``user`` is its name once it has; ``failure`` says why it has not, and the connection must end.
    """

    def __init__(self, authenticator: Authenticator, host: str) -> None:
        self.user: str | None = None
        self.failure: str | None = None
        self._authenticator = authenticator
        self._host = host
        self._shaken = False

    def admits(self, api: Api) -> bool:
        """Return whether a request of this kind is read now."""
        return self.user is not None or api in _OPENING_APIS

    def handshake(self, mechanism: str, version: int) -> Code:
        """Take a SaslHandshake, and return what it is answered with."""
        if version == 0:  # what would follow it is no request
            return self._fail(Code.UNSUPPORTED_VERSION, "SaslHandshake of version 0")
        if self._shaken:
            return self._fail(Code.ILLEGAL_SASL_STATE, "a second SaslHandshake")
        if mechanism != MECHANISM:
            return self._fail(
                Code.UNSUPPORTED_SASL_MECHANISM, f"a SASL mechanism other than {MECHANISM}"
            )
        self._shaken = True
        return Code.NONE

    async def authenticate(self, token: bytes) -> None:
        """Take a SaslAuthenticate.

        Raises:
            Refused: with what it is answered with.
        """
        if not self._shaken or self.user is not None:
            self._fail(Code.ILLEGAL_SASL_STATE, "SaslAuthenticate out of order")
            raise Refused(Code.ILLEGAL_SASL_STATE, "SaslHandshake comes first, and each once")
        try:
            name, password = _plain(token)
        except Refused:
            self._fail(Code.SASL_AUTHENTICATION_FAILED, "no name and password of SASL PLAIN")
            raise
        try:
            await self._authenticator.check(self._host, name, password)
        except Refused as error:
            # Somebody may have given a password for a name.
            known = f"user {name!r}" if self._authenticator.knows(name) else "an unknown user"
            self._fail(error.code, f"authentication of {known} failed: {error}")
            await asyncio.sleep(_FAILED_S)
            raise
        self.user = name

    def _fail(self, code: Code, why: str) -> Code:
        self.failure = why
        return code


def _plain(token: bytes) -> tuple[str, str]:
    """Return name and password: ``[authorization] NUL name NUL password``, in UTF-8.

    Raises:
        Refused: it is not of this form, or wants to act as somebody else.
    """
    try:
        other, name, password = token.decode().split("\0")
    except ValueError:  # a UnicodeDecodeError is one, too
        other, name, password = "", "", ""
    if not name or not password or other not in {"", name}:
        raise Refused(Code.SASL_AUTHENTICATION_FAILED, "no name and password of SASL PLAIN")
    return name, password


async def sasl_handshake(node: Node, call: Call) -> Message:  # noqa: ARG001 - a handler
    """Answer a SaslHandshake request."""
    if call.login is None:  # there are no users: as Kafka has it where it does not ask for any
        return {"error_code": Code.ILLEGAL_SASL_STATE}
    code = call.login.handshake(call.request["mechanism"], call.version)
    return {"error_code": code, "mechanisms": [MECHANISM]}


async def sasl_authenticate(node: Node, call: Call) -> Message:  # noqa: ARG001 - a handler
    """Answer a SaslAuthenticate request."""
    if call.login is None:
        return {
            "error_code": Code.ILLEGAL_SASL_STATE,
            "error_message": "this broker has no users and asks for no password",
        }
    try:
        await call.login.authenticate(call.request["auth_bytes"])
    except Refused as refused:
        return {"error_code": refused.code, "error_message": str(refused)}
    return {"error_code": Code.NONE}
