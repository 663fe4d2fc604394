"""Addresses of view stores: ``sqlite`` for the app's own, a URL for PostgreSQL.

A URL may hold a user and a password, which errors and other texts leave out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from millstream.errors import ConfigError

STATE_STORE = "sqlite"
_SCHEMES = ("postgresql", "postgres")
_SHAPE = "postgresql://user:password@host:5432/database"


@dataclass(frozen=True)
class PostgresAddress:
    """The address of a PostgreSQL view store. ``shown`` has no credentials; ``url`` may have."""

    shown: str
    url: str = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False, default=())

    def redacted(self, text: str) -> str:
        """Return a text, such as a server's message, without user and password."""
        text = text.replace(self.url, self.shown)
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def postgres_address(url: str) -> PostgresAddress:
    """Parse a URL.

    Raises:
        ConfigError: it is not a URL of PostgreSQL, or cannot be parsed.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        known = f"{STATE_STORE!r} (the app's own store) or a URL such as {_SHAPE}"
        shown = f"begins with {scheme}://" if separator else f"is {url[:40]!r}"
        if "@" in scheme or "=" in scheme:  # it may have a password in it
            shown = "begins with no postgresql://"
        raise ConfigError(f"A view store's address {shown}. Allowed are {known}.")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        # Its own message could hold a part of the password.
        raise ConfigError(
            f"A view store's address cannot be read. Give it as {_SHAPE}, with characters such as "
            "@ : / [ # in user and password written as %40 %3A %2F %5B %23."
        ) from None
    place = f"{host}{'' if port is None else f':{port}'}{parts.path}"
    raw = [text for text in (parts.username, parts.password) if text]
    for pair in parts.query.split("&"):
        name, _, value = pair.partition("=")
        if name.lower() in ("user", "password", "sslpassword", "passfile") and value:
            raw.append(value)
    secrets = set(raw) | {unquote(text) for text in raw}
    return PostgresAddress(
        f"postgresql://{place}", url, tuple(sorted(secrets, key=len, reverse=True))
    )


def parse_store(store: str | None, *, what: str) -> str | None:
    """Return the address of a store as plans have it: None for the app's own.

    Raises:
        ConfigError: ``what`` was given something that is not an address.
    """
    if store is None or store == STATE_STORE:
        return None
    if not isinstance(store, str):
        raise ConfigError(
            f"{what} is of type {type(store).__name__}. Give {STATE_STORE!r} or a URL."
        )
    postgres_address(store)
    return store
