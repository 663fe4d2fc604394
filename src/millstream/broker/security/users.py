"""The users of a broker: a file of names and hashes, from which no password can be read.

One line is one user::

    alice:scrypt:32768:8:1:0f3c...:9b1e...

the name, the hash function and its parameters (scrypt; cost, block size, parallelism), the salt and the
hash, both in hexadecimal. Empty lines and those that begin with ``#`` are skipped. The file is written
whole and renamed into place, so that a broker that reads it sees the old users or the new ones.

Source: RFC 7914 (scrypt).
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from millstream.access.locked_file import locked_file
from millstream.errors import ConfigError

USER_NAME = re.compile(r"[A-Za-z0-9._@+-]{1,128}")
PASSWORD_BYTES_MAX = 1024
_COST, _BLOCK, _PARALLEL = 1 << 15, 8, 1  # 32 MiB and about a tenth of a second for each attempt
_MEMORY_MAX = 256 * 1024 * 1024  # that a line may require
_SALT_BYTES, _KEY_BYTES = 16, 32
_LINE = re.compile(
    rf"({USER_NAME.pattern}):scrypt:(\d+):(\d+):(\d+):([0-9a-f]{{16,}}):([0-9a-f]{{32,}})"
)


@dataclass(frozen=True, slots=True, repr=False)
class Verifier:
    """The salted hash that a password is checked against."""

    cost: int
    block: int
    parallel: int
    salt: bytes
    key: bytes

    @classmethod
    def of(cls, password: str, *, random: Callable[[int], bytes] = secrets.token_bytes) -> Verifier:
        """Return the verifier of a password, with a salt of its own."""
        salt = random(_SALT_BYTES)
        blank = cls(_COST, _BLOCK, _PARALLEL, salt, bytes(_KEY_BYTES))
        return cls(_COST, _BLOCK, _PARALLEL, salt, blank.hash(password))

    def hash(self, password: str) -> bytes:
        """Return the hash of a password under this salt and cost."""
        return hashlib.scrypt(
            password.encode(),
            salt=self.salt,
            n=self.cost,
            r=self.block,
            p=self.parallel,
            maxmem=2 * _MEMORY_MAX,
            dklen=len(self.key),
        )

    def matches(self, password: str) -> bool:
        """Return whether this is the password; the time is the same if not."""
        return hmac.compare_digest(self.hash(password), self.key)


# An unknown name is checked against this, so that it takes as long as a wrong password.
NOBODY = Verifier(_COST, _BLOCK, _PARALLEL, bytes(_SALT_BYTES), bytes(_KEY_BYTES))


class UsersFile:
    """The users of one broker. Any number of processes may read and change the file.

    Args:
        random: Where salts come from.
    """

    def __init__(
        self, path: Path | str, *, random: Callable[[int], bytes] = secrets.token_bytes
    ) -> None:
        self.path = Path(path)
        self._random = random
        self._seen: tuple[object, Mapping[str, Verifier]] | None = None

    def read(self) -> Mapping[str, Verifier]:
        """Return the users; the file is read again only when it has changed.

        Raises:
            ConfigError: the file is missing, cannot be read, or has an invalid line.
        """
        try:
            found = self.path.stat()
            version = (found.st_ino, found.st_size, found.st_mtime_ns)
            if self._seen is None or self._seen[0] != version:
                self._seen = (version, self._parsed(self.path.read_text()))
        except FileNotFoundError:
            raise ConfigError(
                f"There is no file of users {self.path}. Make it, with: "
                f"millstream user add NAME --users {self.path}"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The file of users {self.path} cannot be read ({error}).") from error
        return self._seen[1]

    def last_read(self) -> Mapping[str, Verifier]:
        """Return the users as they were when they were last read."""
        return {} if self._seen is None else self._seen[1]

    def put(self, name: str, password: str, *, replace: bool = False) -> None:
        """Add a user; a missing file is created.

        Raises:
            ConfigError: the name or the password is invalid; the name exists, and ``replace`` is
                False.
        """
        if not USER_NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot be the name of a user: 1 to 128 letters, digits and . _ @ + - "
                "make a name."
            )
        check_password(password)
        with self._changing() as users:
            if name in users and not replace:
                raise ConfigError(
                    f"{self.path} has a user {name!r}. Say --replace (replace=True) to give it "
                    "another password."
                )
            users[name] = Verifier.of(password, random=self._random)

    def remove(self, name: str) -> None:
        """Remove a user. Its open connections continue until they end.

        Raises:
            ConfigError: there is no such user.
        """
        known = self.read()
        with self._changing() as users:
            if users.pop(name, None) is None:
                there = ", ".join(known) or "none"
                raise ConfigError(f"{self.path} has no user {name!r}; there are: {there}.")

    def _parsed(self, text: str) -> dict[str, Verifier]:
        users: dict[str, Verifier] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            found = _LINE.fullmatch(line.strip())
            verifier = found and _verifier(found)
            if found is None or verifier is None or found[1] in users:
                # The message does not show the line: it may contain a password.
                raise ConfigError(
                    f"Line {number} of the file of users {self.path} is not a user, or one for the "
                    "second time. Take it out, and add the user with: "
                    f"millstream user add NAME --users {self.path}"
                )
            users[found[1]] = verifier
        return users

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Verifier]]:
        """Yield the users for changes, and write them; one process at a time."""
        with locked_file(self.path) as replace:
            users = dict(self.read()) if self.path.exists() else {}
            yield users
            replace("".join(map(_line, users.items())))


def check_password(password: str) -> None:
    """Check a new password.

    Raises:
        ConfigError: it is empty, too long, or has characters that cannot be sent.
    """
    size = len(password.encode(errors="replace"))
    if not 0 < size <= PASSWORD_BYTES_MAX or "\0" in password:
        raise ConfigError(
            f"A password has 1 to {PASSWORD_BYTES_MAX} bytes, none of them zero; this one has {size}."
        )


def _verifier(found: re.Match[str]) -> Verifier | None:
    """Return the verifier in a line; None if its scrypt parameters are invalid or too large."""
    cost, block, parallel = int(found[2]), int(found[3]), int(found[4])
    within = 0 < 128 * cost * block * parallel <= _MEMORY_MAX
    if cost < 2 or cost & (cost - 1) or not within or len(found[5]) % 2 or len(found[6]) % 2:
        return None
    return Verifier(cost, block, parallel, bytes.fromhex(found[5]), bytes.fromhex(found[6]))


def _line(user: tuple[str, Verifier]) -> str:
    name, one = user
    return f"{name}:scrypt:{one.cost}:{one.block}:{one.parallel}:{one.salt.hex()}:{one.key.hex()}\n"
