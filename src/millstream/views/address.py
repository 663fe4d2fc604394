"""Addresses of view stores: ``sqlite`` for the app's own, a URL for PostgreSQL.

A URL may hold a user and a password, which errors and other texts leave out.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from millstream.access.secret_values import has_reference, resolved_url
from millstream.errors import ConfigError

STATE_STORE = "sqlite"
_WHAT = "A view store's address"
_SCHEMES = ("postgresql", "postgres")
_PLACE_OPTIONS = ("host", "hostaddr", "port", "dbname", "service")
_SHAPE = "postgresql://user:password@host:5432/database"

_REFUSED = re.compile(
    r"password authentication failed|no password supplied|no pg_hba\.conf entry|is not permitted to log in"
    r"|permission denied for database|(?:role|database) \"[^\"]*\" does not exist"
)
_SEVERAL = "Multiple connection attempts"  # psycopg's, of an address of several hosts


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


def is_refused_login(said: str) -> bool:
    """Say whether a driver's message is that the server refuses the user, or has no such database: not to be tried again.

    It comes without a code. Of several hosts one may be away, and of a server that speaks another language than English it is
    not told from others: then it is tried again.
    """
    return _REFUSED.search(said) is not None and _SEVERAL not in said


def postgres_address(url: str) -> PostgresAddress:
    """Parse a URL.

    Raises:
        ConfigError: it is not a URL of PostgreSQL, or cannot be parsed.
    """
    named = has_reference(url)
    url = resolved_url(url, _WHAT)
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        known = f"{STATE_STORE!r} (the app's own store) or a URL such as {_SHAPE}"
        shown = f"begins with {scheme}://" if separator else f"is {url[:40]!r}"
        if named or "@" in scheme or "=" in scheme:  # it may have a password in it
            shown = "begins with no postgresql://"
        raise ConfigError(f"A view store's address {shown}. Allowed are {known}.")
    try:
        parts = urlsplit(url)
        hosts = parts.netloc.rpartition("@")[2]
        if "," in hosts:  # several servers, of which the driver takes the one that fits
            host, port = hosts, None
        else:
            host, port = parts.hostname or "", parts.port
            host = f"[{host}]" if ":" in host else host  # of IPv6
    except ValueError:
        # Its own message could hold a part of the password.
        raise ConfigError(
            f"A view store's address cannot be read. Give it as {_SHAPE}, with characters such as "
            "@ : / [ # in user and password written as %40 %3A %2F %5B %23."
        ) from None
    place = f"{host}{'' if port is None else f':{port}'}{parts.path}"
    # Options that say where the database is belong to its address, too.
    where = [pair for pair in parts.query.split("&") if pair.partition("=")[0] in _PLACE_OPTIONS]
    place += f"?{'&'.join(where)}" if where else ""
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
    return resolved_url(store, what)


STATE_SCHEMA_PREFIX = "millstream_"
WAIT_S_DEFAULT = 120.0
_WAIT_S_MAX = 86_400
_IDENTIFIER_BYTES_MAX = 63


@dataclass(frozen=True)
class StateStoreAddress:
    """The address of an app's state store in PostgreSQL: a schema of a database.

    As text it has no credentials. ``wait_s``: how long a run tries again when the server is away.
    """

    app: str
    database: PostgresAddress
    schema: str
    wait_s: float = WAIT_S_DEFAULT

    def __str__(self) -> str:
        return f"{self.database.shown}, schema {self.schema}"

    @property
    def option(self) -> str:
        """The address as a command takes it, without credentials."""
        shown = self.database.shown
        if self.schema == default_schema(self.app):
            return shown
        return f"{shown}{'&' if '?' in shown else '?'}schema={quote(self.schema)}"

    @property
    def reset_command(self) -> str:
        """The command that removes the app's state."""
        return f"`millstream reset {self.app} --store {shlex.quote(self.option)}`"

    def reset_command_with(self, folder: Path) -> str:
        """Return the command that also removes the app's folder, such as its checkpoint."""
        log = shlex.quote(str(folder.parent.parent))
        return f"`millstream reset {self.app} --log {log} --store {shlex.quote(self.option)}`"


def default_schema(app: str) -> str:
    """Return the name of the schema in which an app has its state store, if none is named."""
    name = STATE_SCHEMA_PREFIX + app
    if len(name) <= _IDENTIFIER_BYTES_MAX:
        return name
    digest = sha256(app.encode()).hexdigest()[:8]  # of two long names that begin alike
    return f"{name[: _IDENTIFIER_BYTES_MAX - 9]}_{digest}"


def split_store_url(url: str) -> tuple[PostgresAddress, str | None, float]:
    """Parse the URL of a state store; return the database, the schema that it names, and ``wait_s``.

    Raises:
        ConfigError: it is no URL of PostgreSQL, or an option of ours cannot be read.
    """
    postgres_address(url)  # refuses what is none, without showing it
    url = resolved_url(url, _WHAT)
    place, _, query = url.partition("?")
    schema: str | None = None
    wait_s, others = WAIT_S_DEFAULT, []
    for pair in filter(None, query.split("&")):
        name, _, value = pair.partition("=")
        if name == "schema":
            schema = _checked_schema(unquote(value))
        elif name == "wait":
            wait_s = _checked_wait(unquote(value))
        else:
            others.append(pair)
    return postgres_address(place + ("?" + "&".join(others) if others else "")), schema, wait_s


def _checked_schema(name: str) -> str:
    taken = name.startswith("pg_") or name in ("public", "information_schema")
    if not name or "\0" in name or taken or len(name.encode()) > _IDENTIFIER_BYTES_MAX:
        raise ConfigError(
            f"The store's option schema is {name[:80]!r}. Give the name of a schema that this app has for "
            f"itself, of up to {_IDENTIFIER_BYTES_MAX} bytes: not public, and none that begins with pg_."
        )
    return name


def _checked_wait(text: str) -> float:
    if not text.isdecimal() or int(text) > _WAIT_S_MAX:
        raise ConfigError(
            f"The store's option wait is {text[:80]!r}. Give whole seconds, 0 to {_WAIT_S_MAX}: how "
            "long a run tries again when the server is away."
        )
    return float(text)
