"""Which source a URL is of, for a comparison."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from urllib.parse import urlsplit

from millstream.access.secret_values import resolved_url
from millstream.capture.apply.compared_source import TakeSnapshot
from millstream.capture.apply.targets import folder_of
from millstream.capture.mysql.address import MARIADB_SCHEMES, mariadb_address
from millstream.capture.sources import PASSWORD_VARIABLE, POSTGRES_SCHEMES, source_of
from millstream.capture.table_patterns import TablePatterns
from millstream.errors import ConfigError


def compared_source_of(
    url: str, wanted: TablePatterns, environment: Mapping[str, str] = os.environ
) -> TakeSnapshot:
    """Return what takes a snapshot of the database of a URL.

    Raises:
        ConfigError: there is none, or its driver is not installed. The message never has a password.
    """
    url = resolved_url(url, "the source's address")
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        scheme = ""
    if scheme == "sqlite":
        path = folder_of(url)
        sqlite = import_module("millstream.capture.apply.compared_sqlite")
        return lambda _: sqlite.ComparedSqlite(path, wanted)
    if scheme in POSTGRES_SCHEMES:
        # The same checks, and the same errors, as for a capture of it.
        found = source_of(url, ("*",), "reconcile", environment)
        postgres_address = found.source.address  # type: ignore[attr-defined]
        postgres = import_module("millstream.capture.apply.compared_postgres")
        return lambda _: postgres.ComparedPostgres(postgres_address, wanted)
    if scheme in MARIADB_SCHEMES:
        source_of(url, ("*",), "reconcile", environment)
        given = mariadb_address(url)
        password = given.password or environment.get(PASSWORD_VARIABLE) or ""
        address = replace(given, password=password)
        mysql = import_module("millstream.capture.apply.compared_mysql")
        if scheme == "mysql":
            return lambda tables: mysql.ComparedMySql(address, tables)
        return lambda _: mysql.ComparedMariaDb(address)
    shown = f"{scheme}://…" if scheme else "one without a scheme"
    raise ConfigError(
        f"the source has a URL whose tables cannot be compared: {shown}. Give postgresql://user@host:5432/database, "
        f"mariadb://user@host:3306/database, mysql://user@host:3306/database or sqlite:///path/to/file; a password may be in {PASSWORD_VARIABLE}."
    )
