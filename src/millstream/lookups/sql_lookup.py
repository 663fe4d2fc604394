"""A lookup in a database: many keys by one query, which reads them from a table ``keys``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from millstream.access.secret_values import resolved_url
from millstream.errors import ConfigError, UserCodeError
from millstream.kernels.decode.decode_error import DecodeError
from millstream.kernels.enrichment.answers import ColumnSchema
from millstream.kernels.enrichment.calls import LookupCallError
from millstream.kernels.operator import NOT_DEFINING
from millstream.lookups import postgres_query, sqlite_query
from millstream.lookups.values import column, field_of, member
from millstream.views.address import postgres_address

Database = str | Path | Callable[[], str]
Answered = tuple[Sequence[str], Sequence[Sequence[Any]]]
"""What a query gave: the names of its columns, and its rows."""

_SQLITE = "sqlite:///"
_POSTGRES = ("postgresql://", "postgres://")
_KEYS_TABLE = re.compile(r"\bkeys\b", re.IGNORECASE)
_EXAMPLE = "SELECT keys.user, u.country FROM keys JOIN users u ON u.id = keys.user"


@dataclass(frozen=True)
class SqlLookup:
    """What :func:`sql_lookup` declares. The database is named without user and password."""

    shown: str
    query: str
    database: Database = field(repr=False, metadata=NOT_DEFINING)

    @property
    def keys_per_call_max(self) -> int | None:
        """How many keys one call can ask: any number."""
        return None

    def bound(self, key: ColumnSchema, answer: ColumnSchema, timeout_s: float) -> BoundSqlLookup:
        """Return the function that looks up keys of these columns.

        Raises:
            ConfigError: a column has a type that a database cannot take.
        """
        for name, dtype in key:
            if type(dtype).__name__ not in postgres_query.TYPES:
                raise ConfigError(
                    f"sql_lookup cannot write the key {name!r}, a {dtype}, into a query. Cast it to pl.Int64 "
                    "or pl.String before the step."
                )
        for name, dtype in (*key, *answer):
            field_of(name, dtype, "sql_lookup")
        return BoundSqlLookup(self, key, answer, timeout_s)


@dataclass(frozen=True)
class BoundSqlLookup:
    """An :class:`SqlLookup` with the columns that it reads and makes: a function of a frame of keys."""

    lookup: SqlLookup
    key: ColumnSchema
    answer: ColumnSchema
    timeout_s: float = field(metadata=NOT_DEFINING)

    def __call__(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Ask for keys; return the rows of the query.

        Raises:
            LookupCallError: the database did not answer, or not in time.
            UserCodeError: the database does not accept the query, or it makes other columns.
        """
        names, rows = self._ask(keys)
        declared = [name for name, _ in (*self.key, *self.answer)]
        if sorted(names) != sorted(declared):
            raise UserCodeError(
                f"sql_lookup's query gives the columns {', '.join(names) or '(none)'}. It must give those of "
                f"the key and those declared: {', '.join(declared)}. Name them with AS."
            )
        try:
            return pl.DataFrame(
                [
                    self._column(name, dtype, [row[names.index(name)] for row in rows])
                    for name, dtype in (*self.key, *self.answer)
                ]
            )
        except DecodeError as error:
            raise LookupCallError(
                f"{self.lookup.shown} gave an answer that does not fit: {error.reason()}",
                retriable=False,
            ) from None

    def _ask(self, keys: pl.DataFrame) -> Answered:
        address = self._address()
        if address.startswith(_POSTGRES):
            return postgres_query.ask(
                postgres_address(address), self.lookup.query, keys, self.timeout_s
            )
        return sqlite_query.ask(_sqlite_path(address), self.lookup.query, keys, self.timeout_s)

    def _address(self) -> str:
        database = self.lookup.database
        if not callable(database):
            return str(database)
        try:
            return str(database())
        except Exception as error:  # noqa: BLE001 - its text may have the password
            raise LookupCallError(
                f"sql_lookup's function of an address failed: {type(error).__name__}"
            ) from None

    def _column(self, name: str, dtype: pl.DataType, values: list[Any]) -> pl.Series:
        read = field_of(name, dtype, "sql_lookup")
        if dtype == pl.Boolean:  # SQLite has numbers for them
            values = [bool(each) if each in (0, 1) else each for each in values]
        return column(name, dtype, [member(read, {name: each}) for each in values])


def _sqlite_path(address: str) -> Path:
    path = Path(address.removeprefix(_SQLITE))
    if "://" in address.removeprefix(_SQLITE) or not path.is_absolute():
        raise ConfigError(
            "sql_lookup's database is no address of PostgreSQL, and no whole path of a file. Give "
            "postgresql://user:password@host/database, sqlite:////folder/file.db, or a Path."
        )
    return path


def sql_lookup(database: Database, query: str) -> SqlLookup:
    """Declare a lookup in a database, PostgreSQL or SQLite, for :meth:`Stream.enrich`.

    ::

        countries = ms.sql_lookup(
            "postgresql://reader:${env:CUSTOMERS_PASSWORD}@host/database",
            "SELECT keys.user, c.country FROM keys JOIN customers c ON c.id = keys.user",
        )
        clicks.enrich(countries, on="user", schema={"country": pl.String})

    Args:
        database: ``postgresql://…`` (needs the extra ``postgres``), ``sqlite:///…`` with the file's whole path,
            or a ``Path`` of the file. Or a function that gives one of these where the job runs, called for
            each call: for passwords that must not travel with the program. A reference in a URL, such as ``${env:NAME}``,
            is read where the job runs, too, and where it is declared.
        query: One SELECT. It reads the keys of a call from a table ``keys`` with the columns ``on`` of
            ``enrich``, and gives one row for each key that is known, with these columns as they are in
            ``keys``, and those of the schema. Keys are parameters, never parts of the text. Of the columns, names
            are compared with upper and lower case: in PostgreSQL write ``"userId"``.

    A call is one query, for up to ``batch_rows`` keys, in a read-only transaction that ends after ``timeout``. A
    connection to PostgreSQL is kept in each process for the next call, and made again when it broke. Values are read
    as those of a topic with the same types (docs/types.md): times without a zone are UTC. A call has failed, and
    is repeated, if the server is away, busy, or too slow. It has failed for good if a value does not fit.

    Guarantees: user and password are in no definition, error, dead letter or state. They may change without
        changing the step.

    Raises:
        ConfigError: the address is none, or the query does not read ``keys``.
        UserCodeError: when it runs: the database does not accept the query, two rows have one key, or columns
            are missing. This stops the job.
    """
    if not isinstance(query, str) or not _KEYS_TABLE.search(query):
        raise ConfigError(
            f"sql_lookup's query does not read the keys from the table keys. Write one such as {_EXAMPLE}."
        )
    if isinstance(database, str) and not database.startswith(_POSTGRES):
        database = resolved_url(database, "sql_lookup's database")
    if callable(database):
        shown = "the database"
    elif isinstance(database, str) and database.startswith(_POSTGRES):
        shown = postgres_address(database).shown
    elif isinstance(database, (str, Path)):
        path = database.absolute() if isinstance(database, Path) else _sqlite_path(database)
        database = path
        shown = f"{_SQLITE}{path}"
    else:
        raise ConfigError(
            f"sql_lookup's database is of type {type(database).__name__}. Give an address, a Path, or a "
            "function that gives one."
        )
    return SqlLookup(shown, query, database)
