"""How a connection to a broker is encrypted and authenticated, from the options of an address.

TLS is Python's own. Of SASL: PLAIN, and SCRAM with SHA-256 or SHA-512; other mechanisms need the client library.

Source: RFC 4616 (PLAIN); RFC 5802 and 7677 (SCRAM); Kafka ``ScramSaslClient``, ``ScramFormatter``.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import ssl
from base64 import b64decode, b64encode
from collections.abc import Callable, Generator
from pathlib import Path

from millstream.choices import format_choices
from millstream.client.address import KafkaAddress
from millstream.errors import ConfigError

_SCRAM = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
MECHANISMS = ("PLAIN", *_SCRAM)
_ITERATIONS_MIN = 4096  # as Kafka's clients demand: fewer would give the password away
_ITERATIONS_MAX = 1 << 22  # some seconds of work
_PROTOCOLS = {
    "plaintext": (False, False),
    "ssl": (True, False),
    "sasl_plaintext": (False, True),
    "sasl_ssl": (True, True),
}

SaslExchange = Generator[bytes, bytes, None]
"""Yields what the client says, and is sent what the server answers; it returns when the server is known, too."""


def _protocol(address: KafkaAddress) -> tuple[bool, bool]:
    """Return whether connections are encrypted, and whether they authenticate with SASL.

    Raises:
        ConfigError: there is no such protocol.
    """
    name = dict(address.settings).get("security.protocol", "plaintext").lower()
    if name not in _PROTOCOLS:
        raise ConfigError(
            f"the option security.protocol of {address.shown} is {name!r}; choose "
            f"{format_choices(tuple(_PROTOCOLS))}"
        )
    return _PROTOCOLS[name]


def unsupported_mechanism(address: KafkaAddress) -> str | None:
    """Return the SASL mechanism of an address if our own connections lack it; None if they have all it needs."""
    _, with_sasl = _protocol(address)
    mechanism = _mechanism(address)
    return mechanism if with_sasl and mechanism not in MECHANISMS else None


def _mechanism(address: KafkaAddress) -> str:
    return dict(address.settings).get("sasl.mechanism", "GSSAPI").upper()  # librdkafka's default


def tls_context(address: KafkaAddress) -> ssl.SSLContext | None:
    """Return how connections are encrypted; None if they are not.

    Raises:
        ConfigError: a certificate or a key cannot be read.
    """
    encrypted, _ = _protocol(address)
    if not encrypted:
        return None
    given = dict(address.settings)
    try:
        authorities = given.get("ssl.ca.location")
        is_folder = authorities is not None and Path(authorities).is_dir()
        context = ssl.create_default_context(
            cafile=None if is_folder else authorities, capath=authorities if is_folder else None
        )
        certificate = given.get("ssl.certificate.location")
        if certificate is not None:
            key = given.get("ssl.key.location")
            context.load_cert_chain(certificate, key, given.get("ssl.key.password", ""))
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"a certificate or key of {address.shown} cannot be read here ({error}); correct the options "
            "ssl.ca.location, ssl.certificate.location, ssl.key.location and ssl.key.password"
        ) from error
    # Python 3.13 refuses authorities without extensions of RFC 5280 that the client library does not ask for.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    verifies = given.get("enable.ssl.certificate.verification", "true").lower() == "true"
    by_name = given.get("ssl.endpoint.identification.algorithm", "https").lower() == "https"
    context.check_hostname = verifies and by_name
    if not verifies:
        context.verify_mode = ssl.CERT_NONE
    return context


def sasl_exchange(address: KafkaAddress) -> tuple[str, SaslExchange] | None:
    """Return the SASL mechanism and what the client says in it; None where there is no authentication.

    Raises:
        ConfigError: the mechanism is not one of ``MECHANISMS``.
    """
    _, with_sasl = _protocol(address)
    if not with_sasl:
        return None
    mechanism = _mechanism(address)
    given = dict(address.settings)
    user, password = given.get("sasl.username", ""), given.get("sasl.password", "")
    if mechanism == "PLAIN":
        return mechanism, _plain(user, password)
    if mechanism in _SCRAM:
        return mechanism, scram(_SCRAM[mechanism], user, password)
    raise ConfigError(
        f"the SASL mechanism of {address.shown} is {mechanism}; choose {format_choices(MECHANISMS)}"
    )


def _plain(user: str, password: str) -> SaslExchange:
    yield f"\0{user}\0{password}".encode()


def scram(
    digest: str,
    user: str,
    password: str,
    *,
    nonce: Callable[[], str] = lambda: secrets.token_urlsafe(24),
) -> SaslExchange:
    """Return what the client says in SCRAM, without channel binding.

    Raises:
        ConfigError: the server does not know the password, or asks for too little or too much work.
    """
    own = nonce()
    name = user.replace("=", "=3D").replace(",", "=2C")
    first = f"n={name},r={own}"
    challenge = yield f"n,,{first}".encode()
    said = _fields(challenge)
    iterations = int(said["i"]) if said.get("i", "").isdecimal() else 0
    if not said.get("r", "").startswith(own) or "s" not in said:
        raise ConfigError("the broker's answer in SCRAM is not one to this client")
    if not _ITERATIONS_MIN <= iterations <= _ITERATIONS_MAX:
        raise ConfigError(
            f"the broker asks for {iterations:,} iterations in SCRAM; {_ITERATIONS_MIN:,} to {_ITERATIONS_MAX:,} "
            "are allowed: change the user's credentials there"
        )
    salted = hashlib.pbkdf2_hmac(digest, password.encode(), b64decode(said["s"]), iterations)
    client_key = hmac.digest(salted, b"Client Key", digest)
    bare = f"c=biws,r={said['r']}"  # biws: "n,,", no channel binding
    whole = f"{first},{challenge.decode()},{bare}".encode()
    stored_key = hashlib.new(digest, client_key).digest()
    signature = hmac.digest(stored_key, whole, digest)
    proof = bytes(one ^ other for one, other in zip(client_key, signature, strict=True))
    final = yield f"{bare},p={b64encode(proof).decode()}".encode()
    server_key = hmac.digest(salted, b"Server Key", digest)
    expected = b64encode(hmac.digest(server_key, whole, digest)).decode()
    if not hmac.compare_digest(_fields(final).get("v", ""), expected):
        raise ConfigError("the broker could not show in SCRAM that it knows the user's password")


def _fields(message: bytes) -> dict[str, str]:
    text = message.decode(errors="replace")
    return {name: value for name, _, value in (part.partition("=") for part in text.split(","))}
