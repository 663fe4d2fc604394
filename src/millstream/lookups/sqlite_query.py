"""Queries of a SQLite file. It is opened for each call, so a file that was put in its place is read."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl

from millstream.errors import UserCodeError
from millstream.kernels.enrichment.calls import LookupCallError

_PARAMETERS_MAX = 30_000  # SQLite takes 32,766 in one query


def ask(
    path: Path, query: str, keys: pl.DataFrame, timeout_s: float
) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
    """Return the names of a query's columns and its rows; the query reads ``keys``.

    Raises:
        LookupCallError: the file is away or locked, or the query takes too long.
        UserCodeError: SQLite does not accept the query.
    """
    shown = f"sqlite:///{path}"
    slices = keys.iter_slices(max(1, _PARAMETERS_MAX // keys.width))
    names: Sequence[str] = ()
    rows: list[Sequence[Any]] = []
    try:
        address = f"file:{quote(str(path))}?mode=ro"
        with closing(
            sqlite3.connect(address, timeout=timeout_s, uri=True, check_same_thread=False)
        ) as connection:
            interrupt = threading.Timer(timeout_s, connection.interrupt)
            interrupt.daemon = True
            interrupt.start()
            try:
                for part in slices:
                    names, found = _ask(connection, query, part)
                    rows += found
            finally:
                interrupt.cancel()
                interrupt.join()
    except sqlite3.Error as error:
        raise _translated(shown, error) from None
    return names, rows


def _ask(
    connection: sqlite3.Connection, query: str, keys: pl.DataFrame
) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
    columns = ", ".join(_quoted(name) for name in keys.columns)
    row = f"({', '.join('?' * keys.width)})"
    values = [_plain(value) for row_of in keys.iter_rows() for value in row_of]
    text = (
        f"WITH keys({columns}) AS (VALUES {', '.join([row] * keys.height)}) "  # noqa: S608 - places
        f"SELECT * FROM (\n{query.rstrip().rstrip(';')}\n)"
    )
    cursor = connection.execute(text, values)
    return [each[0] for each in cursor.description], cursor.fetchall()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, date) else value


def _translated(shown: str, error: sqlite3.Error) -> Exception:
    """Return our error: a query that is wrong stops the job, anything else may pass."""
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_INTERRUPT:
        return LookupCallError(f"{shown} did not answer in time")
    if code == sqlite3.SQLITE_ERROR or isinstance(error, sqlite3.ProgrammingError):
        return UserCodeError(f"sql_lookup's query is not accepted. SQLite says: {error}.")
    return LookupCallError(f"{shown} could not be asked: {error}")
