"""The beginning of a connection: encryption, the password, which database; and requests to cancel a statement of another one."""

from __future__ import annotations

import hmac
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from millstream.access.tls import Certificate
from millstream.access.tokens import Tokens
from millstream.errors import ConfigError, SqlError
from millstream.sql_queries.server.messages import (
    CANCEL_REQUEST,
    GSS_REQUEST,
    PROTOCOL,
    SSL_REQUEST,
    STARTUP_BYTES_MAX,
    ConnectionEndedError,
    MessageBody,
    Wire,
    error_fields,
    startup_parameters,
    zero_ended,
)
from millstream.sql_queries.server.scram import MECHANISM, ScramExchange, ScramVerifier

_NEGOTIATIONS_MAX = 3


@dataclass(frozen=True)
class LoginRules:
    """What a client must have: ``database`` is the only one there is; without a verifier and tokens no password is asked for."""

    database: str
    verifier: ScramVerifier | None
    certificate: Certificate | None
    tokens: Tokens | None = field(default=None, repr=False)
    _secret: bytes = field(default_factory=partial(secrets.token_bytes, 32), repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def verifier_of(self, user: str) -> ScramVerifier | None:
        """Return what the proof of a user is checked with; None if none is asked for.

        Of an unknown one it is made up, always the same: a client cannot tell it from one that is known.
        """
        if self.tokens is None:
            return self.verifier
        found = self.tokens.named(user)
        if found is not None:
            keys = found.scram
            return ScramVerifier(keys.salt, keys.stored_key, keys.server_key)
        made_up = [
            hmac.digest(self._secret, b"%d %s" % (number, user.encode()), "sha256")
            for number in range(3)
        ]
        return ScramVerifier(made_up[0][:16], made_up[1], made_up[2])

    def encrypt(self, connection: socket.socket) -> ssl.SSLSocket:
        """Return a connection encrypted, with the certificate that is in the files now."""
        assert self.certificate is not None, "there is one"
        with self._lock:  # of the context, which other connections take theirs from
            self.certificate.refresh()
            encrypted = self.certificate.context.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        try:
            encrypted.do_handshake()
        except BaseException:
            encrypted.close()
            raise
        return encrypted


def check_scram_keys(tokens: Tokens) -> None:
    """Make sure that clients can prove that they have the tokens.

    Raises:
        ConfigError: one has no name.
    """
    if any(not one.scram.salt for one in tokens.current()):
        raise ConfigError(
            "Clients of SQL log in with the name of a token, and the file has a token itself. Make one with a name: millstream "
            "token add NAME --token-file FILE; or give a password (--password-file)."
        )


def log_in(
    connection: socket.socket,
    rules: LoginRules,
    cancel: Callable[[int, int], None],
    seconds: float,
) -> tuple[Wire, dict[str, str]] | None:
    """Return the connection, encrypted if the client wants it, and what the client said; None of a request to cancel.

    ``seconds`` are for all of it together, so that a client that sends byte by byte holds nobody's place for longer.

    Raises:
        ConnectionEndedError: the client is gone or speaks another protocol, or was refused and told so.
    """
    wire = Wire(connection, time.monotonic() + seconds)
    code, body = _startup(wire, rules)
    if code == CANCEL_REQUEST:
        reader = MessageBody(body)
        if len(body) == 8:
            cancel(reader.int32(), reader.int32())
        return None
    try:
        parameters = _checked_startup(wire, code, body, rules)
        verifier = rules.verifier_of(parameters.get("user", ""))
        if verifier is not None:
            _authenticate(wire, verifier)
        _check_database(parameters.get("database", rules.database), rules.database)
    except SqlError as error:
        wire.write(b"E", error_fields(str(error), error.sqlstate, "FATAL"))
        wire.flush()
        raise ConnectionEndedError("it was refused") from error
    wire.write(b"R", struct.pack("!i", 0))
    wire.ends = None
    return wire, parameters


def _startup(wire: Wire, rules: LoginRules) -> tuple[int, bytes]:
    """Answer what the client asks about encryption, and return its first message after that."""
    for _ in range(_NEGOTIATIONS_MAX):
        code, body = wire.read_startup()
        if code == SSL_REQUEST and rules.certificate is not None and not _is_encrypted(wire):
            wire.connection.sendall(b"S")
            wire.limit_time()
            wire.connection = rules.encrypt(wire.connection)
        elif code in (SSL_REQUEST, GSS_REQUEST):
            wire.connection.sendall(b"N")
        else:
            return code, body
    raise ConnectionEndedError("it asks about encryption again and again")


def _is_encrypted(wire: Wire) -> bool:
    return isinstance(wire.connection, ssl.SSLSocket)


def _checked_startup(wire: Wire, code: int, body: bytes, rules: LoginRules) -> dict[str, str]:
    if code >> 16 != PROTOCOL >> 16:
        raise SqlError(
            f"The client speaks version {code >> 16}.{code & 0xFFFF} of the protocol; this server speaks 3.0.",
            sqlstate="0A000",
        )
    parameters = startup_parameters(body)
    options = [name for name in parameters if name.startswith("_pq_.")]
    if code != PROTOCOL or options:
        named = b"".join(map(zero_ended, options))
        wire.write(b"v", struct.pack("!ii", PROTOCOL, len(options)) + named)
    if rules.certificate is not None and not _is_encrypted(wire):
        raise SqlError(
            "This server takes encrypted connections only. Connect with sslmode=require or better.",
            sqlstate="28000",
        )
    return parameters


def _authenticate(wire: Wire, verifier: ScramVerifier) -> None:
    exchange = ScramExchange(verifier)
    wire.write(b"R", struct.pack("!i", 10) + zero_ended(MECHANISM) + b"\0")
    wire.flush()
    body = _password_message(wire)
    mechanism = body.text()
    if mechanism != MECHANISM:
        raise SqlError(
            f"The client authenticates by {mechanism[:40]!r}. Use one that knows {MECHANISM}.",
            sqlstate="28000",
        )
    first = exchange.first(body.take(body.int32()))
    wire.write(b"R", struct.pack("!i", 11) + first)
    wire.flush()
    final = exchange.final(_password_message(wire).body)
    wire.write(b"R", struct.pack("!i", 12) + final)


def _password_message(wire: Wire) -> MessageBody:
    kind, body = wire.read(STARTUP_BYTES_MAX)
    if kind != "p":
        raise SqlError("The client does not answer with a password.", sqlstate="08P01")
    return body


def _check_database(given: str, database: str) -> None:
    if given != database:
        raise SqlError(
            f"There is no database {given!r}; there is {database!r}, the app's name. Connect to that.",
            sqlstate="3D000",
        )
