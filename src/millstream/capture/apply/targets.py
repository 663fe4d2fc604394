"""Which target a URL is of."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from millstream.capture.apply.target import ApplyTarget
from millstream.capture.sources import with_password
from millstream.errors import ConfigError, EnvironmentProblem
from millstream.views.address import postgres_address

PASSWORD_VARIABLE = "MILLSTREAM_APPLY_PASSWORD"  # noqa: S105 - its name
_Open = Callable[[], ApplyTarget]


def target_of(url: str, environment: Mapping[str, str] = os.environ) -> _Open:
    """Return what opens the target of a URL.

    Raises:
        ConfigError: there is none. The message never has a password.
        EnvironmentProblem: its driver is not installed.
    """
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        scheme = ""
    make = _MAKERS.get(scheme)
    if make is None:
        shown = f"{scheme}://…" if scheme else "one without a scheme"
        raise ConfigError(
            f"the target has a URL that is not known: {shown}. Give one that begins with "
            f"{', '.join(f'{known}://' for known in _MAKERS)}; docs/apply.md describes them."
        )
    return make(url, environment.get(PASSWORD_VARIABLE))


def _sqlite(url: str, _password: str | None) -> _Open:
    path = folder_of(url)
    found = _driven("sqlite", "SQLite", "sqlite3", "all")
    return lambda: found.SqliteTarget(path)


def _postgres(url: str, password: str | None) -> _Open:
    unread = ConfigError(
        "the address of a PostgreSQL database is not one that can be read. Give "
        "postgresql://user@host:5432/database, with characters such as @ : / % in user and password written as "
        "%40 %3A %2F %25, and options that PostgreSQL knows."
    )
    parts = urlsplit(url)
    if not parts.hostname or not parts.path.removeprefix("/"):
        raise unread
    try:
        address = postgres_address(url)
    except ConfigError:
        raise unread from None
    if not parts.password and password is not None:
        address = with_password(address, password)
    found = _driven("postgres", "PostgreSQL", "psycopg", "postgres")
    is_address = import_module("millstream.capture.postgres.source").is_address
    if not is_address(address.url):
        raise unread
    return lambda: found.PostgresTarget(address)


def folder_of(url: str) -> Path:
    """Return the path of a URL such as ``sqlite:///relative/path`` or ``sqlite:////absolute/path``.

    Raises:
        ConfigError: it has none, or something else.
    """
    parts = urlsplit(url)
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or not path or "\0" in path or parts.query or parts.fragment:
        shown = repr(url) if not parts.netloc else f"{parts.scheme}://…{parts.path}"
        raise ConfigError(
            f"{shown} has no path. Give {parts.scheme}:///relative/path or {parts.scheme}:////absolute/path, with ? # % "
            "written as %3F %23 %25."
        )
    return Path(path)


def _driven(module: str, what: str, driver: str, extra: str) -> Any:
    """Import a target, whose driver is an extra."""
    try:
        return import_module(f"millstream.capture.apply.{module}")
    except ImportError as error:
        raise EnvironmentProblem(
            f"to apply to {what} needs {driver}, which is not installed ({error}): "
            f'pip install "millstream[{extra}]".'
        ) from error


_MAKERS: dict[str, Callable[[str, str | None], _Open]] = {
    "postgresql": _postgres,
    "postgres": _postgres,
    "sqlite": _sqlite,
}
