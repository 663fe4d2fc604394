"""Which target a URL is of."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from millstream.access.secret_values import resolved_url
from millstream.capture.apply.applied_table import AppliedTable
from millstream.capture.apply.lake import BATCH_S, LakeTable, LakeTarget
from millstream.capture.apply.parquet import VERSIONS_KEPT, ParquetTable
from millstream.capture.apply.target import PASSWORD_VARIABLE, ApplyTarget
from millstream.capture.sources import with_password
from millstream.choices import did_you_mean
from millstream.errors import ConfigError, EnvironmentProblem
from millstream.redis_client import is_redis_address
from millstream.views.address import postgres_address

_Open = Callable[[], ApplyTarget]
_LAKE_OPTIONS = frozenset(("text", "every", "keep"))


def target_of(url: str, environment: Mapping[str, str] = os.environ) -> _Open:
    """Return what opens the target of a URL.

    Raises:
        ConfigError: there is none. The message never has a password.
        EnvironmentProblem: its driver is not installed.
    """
    url = resolved_url(url, "the target's address")
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
    return lambda: found.SqliteApplyTarget(path)


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
    return lambda: found.PostgresApplyTarget(address)


def _redis(url: str, password: str | None) -> _Open:
    if not is_redis_address(url):
        raise ConfigError(
            "the address of Redis is not one that can be read. Give redis://host:6379, or redis://host:6379/1 for its "
            "database 1, with characters such as @ : / % in user and password written as %40 %3A %2F %25."
        )
    found = _driven("redis", "Redis", "redis", "redis")
    return lambda: found.RedisTarget(url, password)


def _tantivy(url: str, _password: str | None) -> _Open:
    folder = folder_of(url)
    found = _driven("tantivy", "a full-text index", "tantivy", "tantivy")
    return lambda: found.TantivyTarget(folder)


def _lake(
    make_tables: Callable[[Path, Mapping[str, str]], Callable[[AppliedTable], LakeTable]],
) -> Callable[[str, str | None], _Open]:
    """Return what opens a lake of one of the formats."""

    def lake(url: str, _password: str | None) -> _Open:
        plain, _, query = url.partition("?")
        folder = folder_of(plain)
        given = dict(parse_qsl(query, keep_blank_values=True))
        for name in given.keys() - _LAKE_OPTIONS:
            raise ConfigError(
                f"the target's URL has the option {name!r}. Those that lakes have are {', '.join(sorted(_LAKE_OPTIONS))}."
                f"{did_you_mean(name, _LAKE_OPTIONS)}"
            )
        as_text = frozenset(filter(None, given.get("text", "").split(",")))
        batch_s = _positive(given, "every", BATCH_S)
        _positive(given, "keep", 1)
        tables = make_tables(folder, given)
        return lambda: LakeTarget(folder, tables, as_text, batch_s)

    return lake


def _positive(given: Mapping[str, str], name: str, default: float) -> float:
    text = given.get(name, "")
    if text and not (text.isdecimal() and int(text)):
        raise ConfigError(
            f"the target's option {name} is {text[:40]!r}. Give a whole number from 1."
        )
    return float(text) if text else default


def _parquet(folder: Path, given: Mapping[str, str]) -> Callable[[AppliedTable], LakeTable]:
    kept = int(_positive(given, "keep", VERSIONS_KEPT))
    return lambda table: ParquetTable(folder / _folder_name(table), kept)


def _delta(folder: Path, _given: Mapping[str, str]) -> Callable[[AppliedTable], LakeTable]:
    found = _driven("delta", "Delta", "deltalake", "delta")
    return lambda table: found.DeltaLakeTable(folder / _folder_name(table))


def _iceberg(folder: Path, _given: Mapping[str, str]) -> Callable[[AppliedTable], LakeTable]:
    found = _driven("iceberg", "Iceberg", "pyiceberg", "iceberg")
    lakes: list[Any] = []  # made when the target is first opened

    def table_of(table: AppliedTable) -> LakeTable:
        if not lakes:
            lakes.append(found.IcebergLake(folder))
        made: LakeTable = lakes[0].table(table)
        return made

    return table_of


def _folder_name(table: AppliedTable) -> str:
    """Return the name of a table's folder, with characters that paths and URLs do not like as their codes."""
    return quote(table.collection, safe=" ")


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


def target_path(url: str) -> Path | None:
    """Return the file or folder of a target's URL, whose maker has read it; None of a server's."""
    if urlsplit(url).scheme not in _OF_PATHS:
        return None
    return folder_of(url.partition("?")[0])


def _driven(module: str, what: str, driver: str, extra: str) -> Any:
    """Import a target, whose driver is an extra."""
    try:
        return import_module(f"millstream.capture.apply.{module}")
    except ImportError as error:
        raise EnvironmentProblem(
            f"to apply to {what} needs {driver}, which is not installed ({error}): "
            f'pip install "millstream[{extra}]".'
        ) from error


_OF_PATHS = frozenset(("sqlite", "parquet", "delta", "iceberg", "tantivy"))
_MAKERS: dict[str, Callable[[str, str | None], _Open]] = {
    "postgresql": _postgres,
    "postgres": _postgres,
    "sqlite": _sqlite,
    "parquet": _lake(_parquet),
    "delta": _lake(_delta),
    "iceberg": _lake(_iceberg),
    "redis": _redis,
    "rediss": _redis,
    "tantivy": _tantivy,
}
