"""Which source a URL is of."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from millstream.access.secret_values import resolved_url
from millstream.capture.group_reader import CaptureSource
from millstream.capture.mongodb.address import MONGODB_SCHEMES, mongodb_address
from millstream.capture.mysql.address import MARIADB_SCHEMES, mariadb_address
from millstream.errors import ConfigError
from millstream.views.address import PostgresAddress, postgres_address

PASSWORD_VARIABLE = "MILLSTREAM_CAPTURE_PASSWORD"  # noqa: S105 - its name
POSTGRES_SCHEMES = ("postgresql", "postgres")
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,99}")
_TAKEN_ENDS = (".transaction", ".progress", "-signal", ".outbox.dead")
_REPLICA_IDS = 1 << 31  # the upper half is for us: people number their replicas from 1


@dataclass(frozen=True)
class FoundSource:
    """A source, the capture's name, the kind of source, and the schema or database that a table alone is of."""

    source: CaptureSource
    name: str
    connector: str
    database: str


def source_of(
    url: str,
    tables: Sequence[str],
    name: str | None,
    environment: Mapping[str, str] = os.environ,
    *,
    options: Mapping[str, Any] | None = None,
) -> FoundSource:
    """Return the source of a URL. ``options`` are those that a source of PostgreSQL takes alone.

    Raises:
        ConfigError: there is none, or its driver is not installed. The message never has a password.
    """
    url = resolved_url(url, "the address of the database to capture")
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        scheme = ""
    make = _MAKERS.get(scheme)
    if make is None:
        shown = f"{scheme}://…" if scheme else "one without a scheme"
        raise ConfigError(
            f"the database to capture has a URL that is not known: {shown}. Give "
            "postgresql://user@host:5432/database, mariadb://user@host:3306/database, mysql://user@host:3306/database, "
            "mongodb://user@host:27017/database or sqlite:///path/to/file."
        )
    password = environment.get(PASSWORD_VARIABLE)
    if not options:
        return make(url, tables, name, password)
    wal_bytes_max = options.get("wal_bytes_max", 1)
    if scheme not in POSTGRES_SCHEMES or wal_bytes_max < 1:
        raise ConfigError(
            f"wal_bytes_max is {wal_bytes_max}, or outbox_messages are asked for, of a database {scheme}://…. Give a "
            "number of bytes, 1 or more; only PostgreSQL keeps its log for a capture, and has messages in it."
        )
    return _postgres(url, tables, name, password, options)


def _mariadb(
    url: str, tables: Sequence[str], name: str | None, password: str | None
) -> FoundSource:
    address = mariadb_address(url)
    if not address.password and password is not None:
        address = replace(address, password=password)
    name = _checked_name(address.database if name is None else name)
    title = "MySQL" if address.scheme == "mysql" else "MariaDB"
    found = _driven("millstream.capture.mysql.source", title, "PyMySQL", "mysql")
    replica_id = _REPLICA_IDS + zlib.crc32(name.encode()) % (_REPLICA_IDS - 1)
    source = found.MariaDbSource(address, tables, replica_id=replica_id)
    return FoundSource(source, name, address.scheme, address.database)


def _mongodb(
    url: str, tables: Sequence[str], name: str | None, password: str | None
) -> FoundSource:
    address = mongodb_address(url)
    if not address.password and password is not None and address.user:
        address = replace(address, password=password)
    name = _checked_name(address.database if name is None else name)
    found = _driven("millstream.capture.mongodb.source", "MongoDB", "pymongo", "mongodb")
    source = found.MongoDbSource(address, tables)
    return FoundSource(source, name, "mongodb", address.database)


def _postgres(
    url: str,
    tables: Sequence[str],
    name: str | None,
    password: str | None,
    options: Mapping[str, Any] | None = None,
) -> FoundSource:
    unread = ConfigError(
        "the address of a PostgreSQL database is not one that can be read. Give "
        "postgresql://user@host:5432/database, with characters such as @ : / % in user and password written as "
        "%40 %3A %2F %25, and options that PostgreSQL knows."
    )
    parts = urlsplit(url)
    database = unquote(parts.path.removeprefix("/"))
    if not parts.hostname or not database or "/" in database:
        raise unread
    name = _checked_name(database if name is None else name)
    try:
        address = postgres_address(url)
    except ConfigError:
        raise unread from None
    if not parts.password and password is not None:
        address = with_password(address, password)
    found = _driven("millstream.capture.postgres.source", "PostgreSQL", "psycopg", "postgres")
    if not found.is_address(address.url):
        raise unread
    source = found.PostgresSource(address, tables, name=name, **(options or {}))
    return FoundSource(source, name, "postgresql", "public")


def with_password(address: PostgresAddress, password: str) -> PostgresAddress:
    """Return an address with a password, which no text of it shows."""
    head, separator, rest = address.url.partition("?")
    url = f"{head}?{rest}{'&' if separator else ''}password={quote(password, safe='')}"
    return replace(address, url=url, secrets=(password, quote(password, safe=""), *address.secrets))


def _sqlite(
    url: str, tables: Sequence[str], name: str | None, _password: str | None
) -> FoundSource:
    parts = urlsplit(url)
    path_given = unquote(parts.path.removeprefix("/"))
    if parts.netloc or not path_given or "\0" in path_given or parts.query or parts.fragment:
        shown = (
            repr(url) if not parts.netloc else f"sqlite://…{parts.path}"
        )  # it may have a password
        raise ConfigError(
            f"{shown} is no SQLite database. Give sqlite:///relative/path or sqlite:////absolute/path, with ? # % "
            "written as %3F %23 %25."
        )
    path = Path(path_given)
    name = _checked_name(path.stem if name is None else name)
    found = _driven("millstream.capture.sqlite.source", "SQLite", "sqlite3", "all")
    return FoundSource(found.SqliteSource(path, tables), name, "sqlite", "main")


def _driven(module: str, what: str, driver: str, extra: str) -> Any:
    """Import a source, whose driver is an extra."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"capture from {what} needs {driver}, which is not installed ({error}): "
            f'pip install "millstream[{extra}]".'
        ) from error


_Maker = Callable[[str, Sequence[str], str | None, str | None], FoundSource]
_MAKERS: dict[str, _Maker] = {
    **dict.fromkeys(MARIADB_SCHEMES, _mariadb),
    **dict.fromkeys(MONGODB_SCHEMES, _mongodb),
    **dict.fromkeys(POSTGRES_SCHEMES, _postgres),
    "sqlite": _sqlite,
}


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"the capture's name is {name!r}. Give up to 100 letters, digits and . _ -, the first a letter or digit: "
            "topics begin with it."
        )
    taken = next((one for one in _TAKEN_ENDS if name.endswith(one)), None)
    if taken is not None or name.partition(".")[0] == "outbox":
        other = "events of an outbox" if taken is None else "another capture"
        raise ConfigError(
            f"the capture's name is {name!r}: topics with such names are those of {other}. Give another name that does not "
            f"begin with outbox, nor end with {', '.join(_TAKEN_ENDS)} (--name)."
        )
    return name
