"""Which source a URL is of."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from millstream.capture.group_reader import CaptureSource
from millstream.capture.mysql.address import MARIADB_SCHEMES, mariadb_address
from millstream.capture.sqlite.source import SqliteSource
from millstream.errors import ConfigError

PASSWORD_VARIABLE = "MILLSTREAM_CAPTURE_PASSWORD"  # noqa: S105 - its name
SQLITE_SCHEME = "sqlite"
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,99}")
_REPLICA_IDS = 1 << 31  # the upper half is for us: people number their replicas from 1


@dataclass(frozen=True)
class FoundSource:
    """A source, the capture's name, and the kind of source."""

    source: CaptureSource
    name: str
    connector: str


def source_of(
    url: str, tables: Sequence[str], name: str | None, environment: Mapping[str, str] = os.environ
) -> FoundSource:
    """Return the source of a URL.

    Raises:
        ConfigError: there is none, or its driver is not installed. The message never has a password.
    """
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        scheme = ""
    if scheme == SQLITE_SCHEME:
        return _sqlite_source(url, tables, name)
    if scheme not in MARIADB_SCHEMES:
        shown = f"{scheme}://…" if scheme else "one without a scheme"
        raise ConfigError(
            f"the database to capture has a URL that is not known: {shown}. Give "
            "mariadb://user@host:3306/database or sqlite:///path/of/shop.db."
        )
    address = mariadb_address(url)
    if not address.password and PASSWORD_VARIABLE in environment:
        address = replace(address, password=environment[PASSWORD_VARIABLE])
    name = _checked_name(address.database if name is None else name)
    try:
        from millstream.capture.mysql.source import MariaDbSource  # noqa: PLC0415 - its driver is an extra
    except ImportError as error:
        raise ConfigError(
            f"capture from MariaDB needs PyMySQL, which is not installed ({error}): "
            'pip install "millstream[mysql]".'
        ) from error
    replica_id = _REPLICA_IDS + zlib.crc32(name.encode()) % (_REPLICA_IDS - 1)
    return FoundSource(MariaDbSource(address, tables, replica_id=replica_id), name, "mariadb")


def _sqlite_source(url: str, tables: Sequence[str], name: str | None) -> FoundSource:
    path = sqlite_path(url)
    name = _checked_name(path.stem if name is None else name)
    return FoundSource(SqliteSource(path, tables), name, "sqlite")


def sqlite_path(url: str) -> Path:
    """Return the path in a URL as SQLAlchemy writes it: ``sqlite:///relative`` or ``sqlite:////absolute``.

    Raises:
        ConfigError: there is none.
    """
    parts = urlsplit(url)
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or not path or parts.query or parts.fragment:
        raise ConfigError(
            f"the URL of a SQLite database is {url!r}. Give sqlite:///shop.db for a path from here, or "
            "sqlite:////var/lib/shop.db for one from the root, with ? # % written as %3F %23 %25."
        )
    return Path(path)


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"the capture's name is {name!r}. Give up to 100 letters, digits and . _ -, the first a letter or digit: "
            "topics begin with it."
        )
    return name
