"""Queries of PostgreSQL, each in a read-only transaction; connections are kept for the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from millstream.errors import EnvironmentProblem, UserCodeError
from millstream.kernels.enrichment.calls import LookupCallError
from millstream.lookups.idle import IDLE
from millstream.views.address import PostgresAddress

if TYPE_CHECKING:
    import psycopg

    Session = psycopg.Connection[tuple[Any, ...]]

TYPES = {
    "String": "text",
    "Boolean": "boolean",
    "Date": "date",
    **dict.fromkeys(["Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32"], "bigint"),
}
"""The types that keys may have, and theirs in PostgreSQL. Each has one way to be written there."""

_QUERY_WRONG = "42"  # SQLSTATE: syntax error or access rule violation ...
_NO_RIGHT = "42501"  # ... of which this one is no mistake of the query
_VALUE_WRONG = "22"
_AWAY = ("08", "57P")  # the connection broke, or the server ended it


def ask(
    address: PostgresAddress, query: str, keys: pl.DataFrame, timeout_s: float
) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
    """Return the names of a query's columns and its rows; the query reads ``keys``.

    Raises:
        LookupCallError: the server is away or busy, refuses the user, or is too slow.
        UserCodeError: the server does not accept the query.
        EnvironmentProblem: the driver is not installed.
    """
    psycopg = _driver()
    askable = _without_zero_characters(keys)
    kept = IDLE.take(address.url, psycopg.Connection)
    try:
        if kept is not None:
            try:
                return _asked(address, kept, query, askable, timeout_s)
            except psycopg.OperationalError as error:
                if not (error.sqlstate or _AWAY[0]).startswith(_AWAY):
                    raise
        return _asked(address, _open(address, timeout_s), query, askable, timeout_s)
    except psycopg.Error as error:
        raise _translated(address, error) from None


def _driver() -> Any:
    try:
        import psycopg  # noqa: PLC0415 - an extra: only those who use PostgreSQL have it
    except ImportError as error:
        raise EnvironmentProblem(
            "sql_lookup asks PostgreSQL, and its driver is not installed. Install it with "
            'pip install "millstream[postgres]".'
        ) from error
    return psycopg


def _without_zero_characters(keys: pl.DataFrame) -> pl.DataFrame:
    """Leave out the keys that no text of PostgreSQL is equal to."""
    texts = [column for column in keys.get_columns() if column.dtype == pl.String]
    for text in texts:
        zero = text.str.contains("\0", literal=True)
        keys = (
            keys
            if not zero.any()
            else keys.filter(~keys[text.name].str.contains("\0", literal=True))
        )
    return keys


def _open(address: PostgresAddress, timeout_s: float) -> Session:
    limit_ms = max(1, round(timeout_s * 1000))
    session: Session = _driver().connect(
        address.url,
        prepare_threshold=None,  # a connection pooler may not keep prepared statements
        application_name="millstream",
        connect_timeout=max(2, round(timeout_s)),
        tcp_user_timeout=limit_ms,
        keepalives_idle=max(1, round(timeout_s)),
    )
    return session


def _asked(
    address: PostgresAddress,
    session: Session,
    query: str,
    keys: pl.DataFrame,
    timeout_s: float,
) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
    """Ask by a connection, and keep it unless it broke."""
    try:
        # LOCAL: a connection pooler gives the session to others after the transaction.
        limit_ms = max(1, round(timeout_s * 1000))
        session.execute(
            f"SET TRANSACTION READ ONLY; SET LOCAL statement_timeout = {limit_ms}; "
            "SET LOCAL TIME ZONE 'UTC'"
        )
        cursor = session.execute(
            _text(query, keys), [keys[name].to_list() for name in keys.columns]
        )
        found = [each.name for each in cursor.description or ()], cursor.fetchall()
        session.rollback()
    except BaseException:
        session.close()
        raise
    IDLE.give(address.url, session)
    return found


def _text(query: str, keys: pl.DataFrame) -> bytes:
    """Put a query around the user's: keys are parameters, and a % of the user's is a %."""
    types = ", ".join(f"%s::{TYPES[type(dtype).__name__]}[]" for dtype in keys.dtypes)
    names = ", ".join(
        '"' + name.replace('"', '""').replace("%", "%%") + '"' for name in keys.columns
    )
    own = query.rstrip().rstrip(";").replace("%", "%%")
    return (
        f"WITH keys({names}) AS (SELECT * FROM unnest({types})) "  # noqa: S608 - no value is in it
        f"SELECT * FROM (\n{own}\n) AS answers"
    ).encode()


def _translated(address: PostgresAddress, error: psycopg.Error) -> Exception:
    """Return our error, without user and password; a query that is wrong stops the job."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    detail = address.redacted(lines[0]).rstrip(".")
    state = error.sqlstate or ""
    if state.startswith(_QUERY_WRONG) and state != _NO_RIGHT:
        return UserCodeError(f"sql_lookup's query is not accepted. PostgreSQL says: {detail}.")
    return LookupCallError(
        f"{address.shown} could not be asked: {detail}",
        retriable=not state.startswith(_VALUE_WRONG),
    )
