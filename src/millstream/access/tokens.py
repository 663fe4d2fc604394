"""Tokens: who has one, and what its role allows. They are in a file, as hashes from which no token can be read.

One line is one token::

    grafana:read:sha256:9f86d0…:scram:5a1c…:77e0…:0b4d…

its name, its role, the SHA-256 of the token; and salt, stored key and server key of SCRAM-SHA-256, by which a client of
PostgreSQL's protocol proves that it has the token. All are in hexadecimal. Empty lines and those that begin with ``#`` are
skipped. Tokens are 256 random bits, so a hash that is quick to compute protects them as well as a slow one.

A file may instead have one line with a token itself, of 16 characters or more: that token may do everything.

``read`` allows what only reads, and ``operate`` allows everything. The file is read again when it has changed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from millstream.access.locked_file import locked_file
from millstream.errors import ConfigError

Role: TypeAlias = Literal["read", "operate"]
ROLES: tuple[Role, ...] = ("read", "operate")

SCRAM_ITERATIONS = 4096  # the least that RFC 7677 allows: a token has 256 random bits
_PLAIN_LENGTH_MIN = 16
_PLAIN_NAME = "token"
_TOKEN_BYTES = 32
_SALT_BYTES = 16
_NAME = re.compile(r"[A-Za-z0-9._@+-]{1,128}")
_HEX32 = r"([0-9a-f]{64})"
_LINE = re.compile(
    rf"({_NAME.pattern}):(read|operate):sha256:{_HEX32}:scram:([0-9a-f]{{32}}):{_HEX32}:{_HEX32}"
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Principal:
    """Who sends a request: the name of a token, None where no token is needed; and its role."""

    name: str | None
    role: Role

    def may(self, role: Role) -> bool:
        """Return whether this one may do what needs a role."""
        return self.role == "operate" or role == "read"


@dataclass(frozen=True)
class ScramKeys:
    """What a proof of SCRAM-SHA-256 is checked with."""

    salt: bytes
    stored_key: bytes
    server_key: bytes

    @classmethod
    def of(cls, token: str, salt: bytes) -> ScramKeys:
        """Make them from a token or a password, which SASLprep leaves as it is."""
        salted = hashlib.pbkdf2_hmac("sha256", token.encode(), salt, SCRAM_ITERATIONS)
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        server_key = hmac.digest(salted, b"Server Key", "sha256")
        return cls(salt, hashlib.sha256(client_key).digest(), server_key)


@dataclass(frozen=True)
class Token:
    """A token as it is kept: whose it is, and hashes of it."""

    principal: Principal
    digest: bytes = field(repr=False)
    scram: ScramKeys = field(repr=False)


def digest_of(token: bytes) -> bytes:
    """Return the hash by which a token is known."""
    return hashlib.sha256(token).digest()


class Tokens:
    """Tokens that do not change. From any thread."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tuple(tokens)

    @classmethod
    def of(cls, token: str) -> Tokens:
        """Return one token, which may do everything."""
        return cls([_plain(token)])

    def current(self) -> tuple[Token, ...]:
        """Return the tokens that there are now."""
        return self._tokens

    def find(self, token: bytes) -> Token | None:
        """Return what is known of a token that was sent; None if it is unknown."""
        return self.find_digest(digest_of(token))

    def find_digest(self, digest: bytes) -> Token | None:
        """Return the token with a hash; None if there is none, or no more."""
        found = None
        for one in self.current():
            # All, in constant time: how long it takes tells nothing about any.
            if hmac.compare_digest(one.digest, digest):
                found = one
        return found

    def named(self, name: str) -> Token | None:
        """Return the token of a name."""
        return next((one for one in self.current() if one.principal.name == name), None)


class TokenFile(Tokens):
    """The tokens of a file. Any number of processes may read and change it.

    Args:
        path: The file. Of one that is not there yet only ``add`` is to be called.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__(())
        self.path = Path(path)
        self._version: object = None
        self._lock = threading.Lock()

    @classmethod
    def opened(cls, path: Path | str) -> TokenFile:
        """Return the tokens of a file that a server begins with; a warning is logged if others can read it.

        Raises:
            ConfigError: the file cannot be read, is invalid, or has no token.
        """
        found = cls(path)
        found.read()
        if not found._tokens:
            raise ConfigError(
                f"The file {path} has no token, so nobody could send a request. Make one, with: "
                f"millstream token add NAME --token-file {path}"
            )
        warn_if_exposed(found.path, "tokens")
        return found

    def current(self) -> tuple[Token, ...]:
        """Return the tokens that are in the file now; those before, while it cannot be read."""
        try:
            return self.read()
        except ConfigError as error:
            _log.warning("the tokens were not read again: %s", error)
            return self._tokens

    def read(self) -> tuple[Token, ...]:
        """Return the tokens; the file is read again only when it has changed.

        Raises:
            ConfigError: it is missing, cannot be read, or has an invalid line.
        """
        try:
            found = self.path.stat()
            version = (found.st_ino, found.st_size, found.st_mtime_ns)
            with self._lock:
                if self._version != version:
                    self._version = version  # what is invalid is said once
                    self._tokens = self._parsed(self.path.read_text("ascii"))
                return self._tokens
        except FileNotFoundError:
            raise ConfigError(
                f"There is no file of tokens {self.path}. Make it, with: millstream token add NAME --token-file {self.path}"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not ASCII"
            raise ConfigError(
                f"The file of tokens {self.path} cannot be read ({reason}). Correct it."
            ) from None

    def add(self, name: str, role: Role) -> str:
        """Add a token; a missing file is created, for its owner alone. Return the token, which is kept nowhere.

        Raises:
            ConfigError: the name is invalid or taken, or the file has a token itself, or cannot be written.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot be the name of a token: 1 to 128 letters, digits and . _ @ + - make a name."
            )
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        with self._changing() as tokens:
            if any(one.principal.name == name for one in tokens):
                raise ConfigError(
                    f"{self.path} has a token {name!r}. Remove it first, or choose another name."
                )
            scram = ScramKeys.of(token, secrets.token_bytes(_SALT_BYTES))
            tokens.append(Token(Principal(name, role), digest_of(token.encode()), scram))
        return token

    def remove(self, name: str) -> None:
        """Remove a token. Its next request is refused.

        Raises:
            ConfigError: there is none of that name.
        """
        with self._changing() as tokens:
            kept = [one for one in tokens if one.principal.name != name]
            if len(kept) == len(tokens):
                there = ", ".join(str(one.principal.name) for one in tokens) or "none"
                raise ConfigError(f"{self.path} has no token {name!r}; there are: {there}.")
            tokens[:] = kept

    def _parsed(self, text: str) -> tuple[Token, ...]:
        lines = [
            (number, line.strip())
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip() and not line.startswith("#")
        ]
        if len(lines) == 1 and not _LINE.fullmatch(lines[0][1]) and ":sha256:" not in lines[0][1]:
            return (self._plain_token(lines[0][1]),)
        tokens: dict[str | None, Token] = {}
        for number, line in lines:
            found = _LINE.fullmatch(line)
            if found is None or found[1] in tokens:
                # The message does not show the line: it may be a token.
                raise ConfigError(
                    f"Line {number} of the file of tokens {self.path} is not a token's, or has a name for the second time. Take "
                    f"it out, and add the token with: millstream token add NAME --token-file {self.path}"
                )
            tokens[found[1]] = _token(found)
        return tuple(tokens.values())

    def _plain_token(self, token: str) -> Token:
        _check_plain(token, self.path)
        return _plain(token)

    @contextmanager
    def _changing(self) -> Iterator[list[Token]]:
        """Yield the tokens for changes, and write them; one process at a time."""
        with locked_file(self.path) as replace:
            tokens = list(self.read()) if self.path.exists() else []
            if any(one.principal.name == _PLAIN_NAME and not one.scram.salt for one in tokens):
                raise ConfigError(
                    f"{self.path} has a token itself, and not tokens with names. Choose another file."
                )
            yield tokens
            replace("".join(map(_line, tokens)))


def tokens_of(token: str | None, token_file: Path | str | None) -> Tokens | None:
    """Return the tokens that a server accepts: one, those of a file, or None, if neither is given.

    Raises:
        ConfigError: both are given, or the file cannot be used.
    """
    if token is not None and token_file is not None:
        raise ConfigError("A token and a file of tokens are given. Give one of them.")
    if token is not None:
        return Tokens.of(token)
    return None if token_file is None else TokenFile.opened(token_file)


def read_token(path: Path) -> str:
    """Return the token that a file holds, for a client to send it.

    Raises:
        ConfigError: there is no such file, or its content is not a token.
    """
    try:
        token = path.read_text("ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The token cannot be read from {path} ({type(error).__name__}). Give a file with one line of ASCII, such as "
            "`openssl rand -hex 32` makes."
        ) from None
    if ":sha256:" in token:
        raise ConfigError(
            f"{path} has the hashes of a server's tokens. Give a file with the token itself, as `millstream token add` has "
            "printed it."
        )
    _check_plain(token, path)
    return token


def warn_if_exposed(path: Path, what: str, warn: Callable[[str], None] = _log.warning) -> None:
    """Warn if every user of the machine can read a file that has secrets."""
    with suppress(OSError):
        if path.stat().st_mode & stat.S_IROTH:
            warn(
                f"Every user of this machine can read {path}, which has {what}. Take the right away: chmod 600 {path}"
            )


def _check_plain(token: str, path: Path) -> None:
    if len(token) < _PLAIN_LENGTH_MIN or not token.isprintable() or " " in token:
        raise ConfigError(
            f"The token in {path} has {len(token)} characters; give one line of {_PLAIN_LENGTH_MIN} or more without spaces, "
            "such as `openssl rand -hex 32` makes."
        )


def _plain(token: str) -> Token:
    # Its keys of SCRAM are made where a client of SQL needs them: they take milliseconds.
    return Token(
        Principal(_PLAIN_NAME, "operate"), digest_of(token.encode()), ScramKeys(b"", b"", b"")
    )


def _token(found: re.Match[str]) -> Token:
    role: Role = "operate" if found[2] == "operate" else "read"
    keys = ScramKeys(*map(bytes.fromhex, found.group(4, 5, 6)))
    return Token(Principal(found[1], role), bytes.fromhex(found[3]), keys)


def _line(one: Token) -> str:
    keys = one.scram
    scram = f"scram:{keys.salt.hex()}:{keys.stored_key.hex()}:{keys.server_key.hex()}"
    return f"{one.principal.name}:{one.principal.role}:sha256:{one.digest.hex()}:{scram}\n"
