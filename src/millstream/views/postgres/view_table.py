"""The SQL of one view's table in PostgreSQL: types, names made safe, and every statement on it.

A view is one table of its own name, with the view's column names wherever PostgreSQL can tell them
apart, and usual types: ``timestamptz``, ``date``, ``numeric``. The key is a unique index under which nulls
are equal. As an entry of an index has a size limit, it holds the prefix of text and bytes, and for longer
values a hash of the whole. A batch is first copied to a temporary table, in which times are numbers
(microseconds and days since 1970), so that nothing is rounded.

=============  =====================================  ==========================
kind           column                                 in the temporary table
=============  =====================================  ==========================
int            bigint                                 bigint
float          double precision                       double precision
str, json      text, ordered by bytes (COLLATE "C")   text
bool           boolean                                boolean
datetime       timestamptz                            bigint
date           date                                   integer
duration       bigint (microseconds)                  bigint
decimal(p,s)   numeric(p,s)                           numeric(p,s)
bytes          bytea                                  bytea
=============  =====================================  ==========================
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import polars as pl

from millstream.errors import ConfigError
from millstream.views.schema import ViewSchema, dtype_of
from millstream.views.state_store.view_table import quote_identifier

_ONE = "_one"  # the key column of a view without a key: always 0, hence one row at most
_NAME_BYTES_MAX = 63
_DAY_US = 86_400_000_000
_UNITS_US = {"day": _DAY_US, "hour": 3_600_000_000, "minute": 60_000_000, "microseconds": 1}
_ZERO = "timestamptz '1970-01-01 00:00:00+00'"
_KEY_COLUMNS_MAX = 32  # of an index, which PostgreSQL was built with
_ENTRY_BYTES_MAX = 2400  # PostgreSQL takes 2704 bytes; the rest is for numbers, times and headers
_HASH_BYTES = 40
_CHARACTER_BYTES_MAX = 4
_LONG = {"str", "json", "bytes"}  # kinds whose values may be longer than an entry of an index
_SYSTEM = {"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"}  # every table has these columns

_TYPES = {
    "int": "bigint",
    "float": "double precision",
    "str": 'text COLLATE "C"',
    "json": 'text COLLATE "C"',
    "bool": "boolean",
    "datetime": "timestamptz",
    "date": "date",
    "duration": "bigint",
    "bytes": "bytea",
}


def check_view_name(name: str) -> None:
    """Make sure that a view can be a table of PostgreSQL.

    Raises:
        ConfigError: its name is too long.
    """
    if len(name.encode()) > _NAME_BYTES_MAX:
        raise ConfigError(
            f"The view {name!r} has a name of {len(name)} characters; PostgreSQL takes "
            f"{_NAME_BYTES_MAX}. Give it a shorter one."
        )


def check_key_columns(view: str, kinds: Sequence[str]) -> None:
    """Make sure that columns of these kinds can be the key of a table of PostgreSQL.

    Raises:
        ConfigError: they are more than an index takes.
    """
    entries = len(kinds) + sum(kind in _LONG for kind in kinds)
    if entries > _KEY_COLUMNS_MAX:
        raise ConfigError(
            f"The key of the view {view!r} has {len(kinds)} columns, which are {entries} entries of "
            f"an index (text and bytes are two each); PostgreSQL takes {_KEY_COLUMNS_MAX}. Use fewer."
        )


def column_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the column names to use in PostgreSQL for the columns of a view.

    Names that it cannot keep (empty, too long, with a zero byte, or those of system columns) are changed,
    with the number of the column at the end where that is needed to tell them apart.
    """
    taken: set[str] = set()
    out = []
    for number, name in enumerate(names):
        plain = _truncate(name.replace("\0", "") or "column", _NAME_BYTES_MAX)
        chosen = plain
        while chosen in taken or chosen in _SYSTEM:
            end = f"#{number}"
            chosen = _truncate(plain, _NAME_BYTES_MAX - len(end)) + end
            plain = _truncate(plain, _NAME_BYTES_MAX - 5) + "_"
        taken.add(chosen)
        out.append(chosen)
    return tuple(out)


def _truncate(name: str, bytes_max: int) -> str:
    return name.encode()[:bytes_max].decode(errors="ignore")


def _numeric(kind: str) -> str:
    dtype = dtype_of(kind)
    assert isinstance(dtype, pl.Decimal)
    return f"numeric({dtype.precision},{dtype.scale})"


def column_type(kind: str) -> str:
    """Return the type of a view's column of this kind."""
    return _numeric(kind) if kind.startswith("decimal") else _TYPES[kind]


def staged_type(kind: str) -> str:
    """Return the type of a value of this kind in the temporary table."""
    given = {"datetime": "bigint", "date": "integer"}
    return given.get(kind) or column_type(kind).partition(" COLLATE")[0]


def from_staged(kind: str, value: str) -> str:
    """Return the expression that turns a staged value into that of the column."""
    if kind == "datetime":
        # Two exact steps: an interval is multiplied in floating point. The session is in UTC.
        return (
            f"({_ZERO} + ({value} / {_DAY_US}) * interval '1 day' "
            f"+ mod({value}, {_DAY_US}) * interval '1 microsecond')"
        )
    if kind == "date":
        return f"(date '1970-01-01' + {value})"
    return value


def to_staged(kind: str, column: str) -> str:
    """Return the expression that turns a column's value into its staged form."""
    if kind == "datetime":
        # The difference of two times is in days and a rest of less than a day; `extract` is exact.
        since = f"({column} - {_ZERO})"
        parts = [f"extract({unit} FROM {since}) * {us}" for unit, us in _UNITS_US.items()]
        return f"({' + '.join(parts)})::bigint"
    if kind == "date":
        return f"({column} - date '1970-01-01')"
    return f"{column}::text" if kind.startswith("decimal") else column


def _of_attempt(attempt: int, rows: range, table: str = "") -> str:
    """Return the condition of a range of rows that an attempt has copied."""
    return f"{table}attempt = {attempt} AND {table}i >= {rows.start} AND {table}i < {rows.stop}"


class PostgresViewTable:
    """The statements for the table of one view; texts only. ``stage`` names its temporary tables."""

    def __init__(self, schema: ViewSchema, stage: int | str = 0) -> None:
        self.schema = schema
        physical = column_names(schema.names)
        self._by_name = {
            n: quote_identifier(p) for n, p in zip(schema.names, physical, strict=True)
        }
        self._columns = list(self._by_name.values())
        self._keys = [self._by_name[name] for name in schema.key] or [quote_identifier(_ONE)]
        self._long = {name for name in schema.key if schema.kinds[name] in _LONG}
        room = _ENTRY_BYTES_MAX // max(1, len(self._long)) - _HASH_BYTES
        self._prefix_length = room // _CHARACTER_BYTES_MAX
        self.name = quote_identifier(schema.name)
        self.stage = f"pg_temp._stage_{stage}"
        self.delete_stage = f"pg_temp._gone_{stage}"

    @cached_property
    def create(self) -> str:
        """Create the table."""
        columns = [
            f"{column} {column_type(kind)}"
            for column, (_, kind) in zip(self._columns, self.schema.columns, strict=True)
        ]
        if not self.schema.key:
            columns.append(f"{quote_identifier(_ONE)} smallint NOT NULL DEFAULT 0")
        return f"CREATE TABLE {self.name} ({', '.join(columns)})"

    @cached_property
    def create_index(self) -> str:
        """Create the unique index of the key."""
        return f"CREATE UNIQUE INDEX ON {self.name} ({self._index_entries}) NULLS NOT DISTINCT"

    @property
    def _index_entries(self) -> str:
        """The entries of the index for each key column, as the index and `ON CONFLICT` take them."""
        entries: list[str] = []
        for name in self.schema.key:
            column = self._by_name[name]
            begin = self._prefix(name, column)
            entries.append(column if begin == column else f"({begin})")
            if name in self._long:
                entries.append(f"({self._suffix_hash(name, column)})")
        return ", ".join(entries or self._keys)

    def _prefix(self, name: str, value: str) -> str:
        """Return the index entry for a value of a key column; entries are ordered as the values."""
        if name not in self._long:
            return value
        return f"substr({value}, 1, {self._prefix_length})"

    def _suffix_hash(self, name: str, column: str) -> str:
        """Return the hash that tells a long value from others with its prefix; null for a short one."""
        content = column
        if self.schema.kinds[name] != "bytes":  # its bytes: other conversions are not immutable
            content = f"decode(replace({column}, '\\', '\\\\'), 'escape')"
        return f"CASE WHEN length({column}) > {self._prefix_length} THEN sha256({content}) END"

    def _compare(self, name: str, column: str, comparison: str, value: str) -> str:
        """Return the condition that a column compares to a value, in a form that can use the index."""
        whole = f"{column} {comparison} {value}"
        if name not in self._long:
            return whole
        loosely = "<=" if comparison == "<" else comparison
        return f"{self._prefix(name, column)} {loosely} {self._prefix(name, value)} AND {whole}"

    def _create_temporary(self, table: str, names: Sequence[str]) -> str:
        kinds = self.schema.kinds
        columns = [f"c{n} {staged_type(kinds[name])}" for n, name in enumerate(names)]
        name = table.removeprefix("pg_temp.")
        return (
            f"CREATE TEMP TABLE IF NOT EXISTS {name} (i integer, {', '.join(columns)}) "
            "ON COMMIT DELETE ROWS"
        )

    @cached_property
    def create_stage(self) -> str:
        """Create the temporary table for whole rows, numbered in ``i``; it lives for the session."""
        return self._create_temporary(self.stage, self.schema.names)

    @cached_property
    def create_delete_stage(self) -> str:
        """Create the temporary table for keys to be deleted."""
        return self._create_temporary(self.delete_stage, self.schema.key)

    def create_staged(self, table: str, names: Sequence[str]) -> str:
        """Create a table for rows, or keys, that tasks copy: each with its attempt's number, and its own in ``i``."""
        kinds = self.schema.kinds
        columns = [f"c{n} {staged_type(kinds[name])}" for n, name in enumerate(names)]
        return (
            f"CREATE UNLOGGED TABLE IF NOT EXISTS {table} "
            f"(attempt bigint, i integer, {', '.join(columns)})"
        )

    @cached_property
    def upsert(self) -> str:
        """Move the staged rows into the table; return the keys of those that are new or differ."""
        returned = ", ".join(self._staged_values(self.schema.key)) or "0"
        return f"{self._move(f'{self.stage} ORDER BY i')} RETURNING {returned}"

    def merge(self, table: str, attempt: int, rows: range, *, returning: bool) -> str:
        """Move rows that an attempt has copied into the view; return those that are new or differ, if asked to."""
        move = self._move(f"{table} WHERE {_of_attempt(attempt, rows)}")
        if not returning:
            return move
        return f"{move} RETURNING {', '.join(self._staged_values(self.schema.names))}"

    def _staged_values(self, names: Sequence[str]) -> list[str]:
        """Return the expressions of a row's values in their staged form."""
        kinds = self.schema.kinds
        return [to_staged(kinds[name], f"t.{self._by_name[name]}") for name in names]

    def _move(self, source: str) -> str:
        """Move staged rows into the table, but those that are there as they are."""
        staged = [from_staged(kind, f"c{n}") for n, (_, kind) in enumerate(self.schema.columns)]
        values = [column for column in self._columns if column not in self._keys]
        action = "NOTHING"
        if values:
            assigned = ", ".join(f"{c} = excluded.{c}" for c in values)
            now = ", ".join(f"t.{c}" for c in values)
            then = ", ".join(f"excluded.{c}" for c in values)
            action = f"UPDATE SET {assigned} WHERE ROW({now}) IS DISTINCT FROM ROW({then})"
        return (
            f"INSERT INTO {self.name} AS t ({', '.join(self._columns)}) "  # noqa: S608
            f"SELECT {', '.join(staged)} FROM {source} "
            f"ON CONFLICT ({self._index_entries}) DO {action}"
        )

    def delete(self, nulls: Sequence[bool]) -> str:
        """Delete the rows of the staged keys with this pattern of nulls; return their numbers.

        ``nulls`` says which key columns are null. A statement for each pattern can use the index; one
        statement for values that are null or equal cannot.
        """
        return f"{self._delete(self.delete_stage, nulls)} RETURNING s.i"

    def delete_staged(self, table: str, attempt: int, rows: range, nulls: Sequence[bool]) -> str:
        """Delete the rows of keys that an attempt has copied, likewise; return those keys."""
        keys = ", ".join(f"s.c{n}" for n in range(len(self.schema.key)))
        found = f"{self._delete(table, nulls)} AND {_of_attempt(attempt, rows, 's.')}"
        return f"{found} RETURNING {keys}"

    def _delete(self, source: str, nulls: Sequence[bool]) -> str:
        kinds = self.schema.kinds
        same = []
        for n, (name, null) in enumerate(zip(self.schema.key, nulls, strict=True)):
            column = f"t.{self._by_name[name]}"
            if null:
                same.append(f"{self._prefix(name, column)} IS NULL AND s.c{n} IS NULL")
            else:
                same.append(self._compare(name, column, "=", from_staged(kinds[name], f"s.c{n}")))
        return (
            f"DELETE FROM {self.name} AS t USING {source} AS s "  # noqa: S608
            f"WHERE {' AND '.join(same)}"
        )

    def select(
        self,
        where: Sequence[str] = (),
        nulls: Sequence[str] = (),
        bounds: Sequence[tuple[str, str]] = (),
        order: Sequence[tuple[str, bool]] = (),
        *,
        limited: bool,
    ) -> str:
        """Read rows where columns equal parameters, are null, keep within bounds; in an order.

        The parameters are ``p0``, ``p1`` and so on, in the order of ``where`` and ``bounds``, and
        ``limit``.

        Args:
            bounds: Columns, and how they compare to a parameter: ``>=`` or ``<``.
            order: Columns, each with whether its largest values come first; then comes the key.

        """
        kinds = self.schema.kinds
        # psycopg takes a single % for the beginning of a parameter.
        columns = {name: column.replace("%", "%%") for name, column in self._by_name.items()}
        given = [to_staged(kinds[name], column) for name, column in columns.items()]
        conditions = [f"{self._prefix(name, columns[name])} IS NULL" for name in nulls]
        for n, (name, comparison) in enumerate([*((name, "=") for name in where), *bounds]):
            value = from_staged(kinds[name], f"%(p{n})s::{staged_type(kinds[name])}")
            conditions.append(self._compare(name, columns[name], comparison, value))
        text = f"SELECT {', '.join(given)} FROM {self.name} AS t"  # noqa: S608
        if conditions:
            text += f" WHERE {' AND '.join(conditions)}"
        # PostgreSQL's default order: null is larger than any value. Columns are named with the table, as a
        # plain name would be the selected column: the text of a decimal, which has another order.
        terms = [f"t.{columns[n]} {'DESC' if descending else 'ASC'}" for n, descending in order]
        for name in self.schema.key:  # the prefix, which the index has in order, and then the whole
            column = f"t.{columns[name]}"
            terms += dict.fromkeys([self._prefix(name, column), column])
        return (
            text
            + f" ORDER BY {', '.join(terms or self._keys)}"
            + (" LIMIT %(limit)s" if limited else "")
        )
