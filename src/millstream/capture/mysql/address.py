"""Addresses of servers, ``mariadb://user:password@host:3306/database`` or ``mysql://…``: parsed, and shown without secrets."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from millstream.errors import ConfigError

MARIADB_SCHEMES = ("mariadb", "mysql")
_SHAPE = "mariadb://user:password@host:3306/database, or mysql://…"


@dataclass(frozen=True, slots=True)
class MariaDbAddress:
    """Where a server is, and who asks it. ``shown`` has neither user nor password."""

    host: str
    port: int
    user: str = field(repr=False)
    password: str = field(repr=False)
    database: str
    scheme: str = "mariadb"

    @property
    def shown(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}/{self.database}"

    def redacted(self, text: str) -> str:
        """Return a text, such as a server's message, without the password."""
        return text.replace(self.password, "***") if self.password else text


def mariadb_address(url: str) -> MariaDbAddress:
    """Parse a URL.

    Raises:
        ConfigError: it is not a URL of MariaDB or MySQL, or has no user, host or database. The message never has
            the password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 3306
    except ValueError:
        parts, port = urlsplit(""), 0
    known = parts.scheme in MARIADB_SCHEMES
    database = unquote(parts.path.removeprefix("/"))
    if not (known and parts.hostname and parts.username and database) or "/" in database:
        raise ConfigError(
            f"the address of a server of MariaDB or MySQL is not one that can be read. Give it as {_SHAPE}, with "
            "characters such as @ : / [ # in user and password written as %40 %3A %2F %5B %23."
        )
    if parts.query or parts.fragment:
        raise ConfigError(
            f"the address of a server of MariaDB or MySQL has options. Give it as {_SHAPE}."
        )
    assert parts.hostname is not None
    assert parts.username is not None
    return MariaDbAddress(
        parts.hostname,
        port,
        unquote(parts.username),
        unquote(parts.password or ""),
        database,
        parts.scheme,
    )
