"""SCRAM-SHA-256, by which a client proves that it has the password, and the server that it knew it (RFC 5802, RFC 7677).

The password is not sent, and is not kept: only what proofs are checked with. Without channel binding, which clients do not need
unless they ask for it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import stringprep
import unicodedata
from dataclasses import dataclass

from millstream.errors import SqlError

MECHANISM = "SCRAM-SHA-256"
_ITERATIONS = 4096
_FIRST = re.compile(
    r"(?P<header>(?:n|y),(?:a=[^,]*)?,)(?P<bare>n=[^,]*,r=(?P<nonce>[!-+\--~]+).*)", re.DOTALL
)
_FINAL = re.compile(r"(?P<without>c=(?P<header>[^,]*),r=(?P<nonce>[^,]*)),p=(?P<proof>[^,]*)")


@dataclass(frozen=True)
class ScramVerifier:
    """What proofs are checked with."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int = _ITERATIONS

    @classmethod
    def of(cls, password: str) -> ScramVerifier:
        """Make one from a password."""
        salt = secrets.token_bytes(16)
        salted = hashlib.pbkdf2_hmac("sha256", prepared(password).encode(), salt, _ITERATIONS)
        client_key = _hmac(salted, b"Client Key")
        return cls(salt, hashlib.sha256(client_key).digest(), _hmac(salted, b"Server Key"))


class ScramExchange:
    """One attempt of a client: two messages of it, and two answers.

    Raises:
        SqlError: 28P01 where the proof is wrong, 08P01 where a message is no message of SCRAM.
    """

    def __init__(self, verifier: ScramVerifier) -> None:
        self._verifier = verifier
        self._header = self._bare = self._first = self._nonce = ""

    def first(self, message: bytes) -> bytes:
        """Answer the first message of a client."""
        found = _FIRST.fullmatch(_decoded(message))
        if found is None:
            raise _no_scram("The first message of the authentication is none of SCRAM-SHA-256")
        self._header, self._bare = found["header"], found["bare"]
        self._nonce = found["nonce"] + secrets.token_urlsafe(18)
        salt = base64.b64encode(self._verifier.salt).decode()
        self._first = f"r={self._nonce},s={salt},i={self._verifier.iterations}"
        return self._first.encode()

    def final(self, message: bytes) -> bytes:
        """Check the proof of a client, and return the server's."""
        found = _FINAL.fullmatch(_decoded(message))
        if found is None or found["nonce"] != self._nonce:
            raise _no_scram("The last message of the authentication does not follow the first")
        signed = f"{self._bare},{self._first},{found['without']}".encode()
        proof = _base64(found["proof"])
        signature = _hmac(self._verifier.stored_key, signed)
        if len(proof) != len(signature) or _base64(found["header"]) != self._header.encode():
            raise _refused()
        client_key = bytes(one ^ other for one, other in zip(proof, signature, strict=True))
        if not hmac.compare_digest(hashlib.sha256(client_key).digest(), self._verifier.stored_key):
            raise _refused()
        return b"v=" + base64.b64encode(_hmac(self._verifier.server_key, signed))


def prepared(password: str) -> str:
    """Return a password as SASLprep has it; as it is, where that refuses it, which is what PostgreSQL does."""
    mapped = "".join(
        " " if stringprep.in_table_c12(c) else c for c in password if not stringprep.in_table_b1(c)
    )
    normal = unicodedata.normalize("NFKC", mapped)
    prohibited = (
        stringprep.in_table_c12,
        stringprep.in_table_c21_c22,
        stringprep.in_table_c3,
        stringprep.in_table_c4,
        stringprep.in_table_c5,
        stringprep.in_table_c6,
        stringprep.in_table_c7,
        stringprep.in_table_c8,
        stringprep.in_table_c9,
    )
    refused = any(test(c) for c in normal for test in prohibited)
    return password if refused or not normal else normal


def _decoded(message: bytes) -> str:
    return message.decode(errors="replace")


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _no_scram(f"A message of the authentication is no base64 ({error})") from error


def _hmac(key: bytes, message: bytes) -> bytes:
    return hmac.new(key, message, hashlib.sha256).digest()


def _no_scram(said: str) -> SqlError:
    return SqlError(f"{said}. Use a client that knows {MECHANISM}.", sqlstate="08P01")


def _refused() -> SqlError:
    return SqlError("The password is not that of this server.", sqlstate="28P01")
