"""The SQL of one view's table: names made safe, and every statement that the store runs on it.

A view is one SQLite table of its own name, clustered by its key (WITHOUT ROWID), with the view's
column names wherever SQLite can tell them apart, so that any SQLite tool can read it. A batch is
first written to a temporary table beside it; comparing the two finds what the batch changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from millstream.views.schema import ViewSchema

STAGE = 'temp."_stage"'
DECIMAL_ORDER = "millstream_decimal"
"""The order of decimals, which are kept as text; each connection defines it."""

_ONE = "_one"  # the key column of a view without a key: always 0, hence one row at most


def quote_identifier(name: str) -> str:
    """Return a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def column_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the column names to use in SQLite for the columns of a view.

    To SQLite names that differ only in case are the same, and it cannot keep an empty name or one with a
    zero byte. Such names are changed, with the number of the column at the end where that is needed.
    """
    taken: set[str] = set()
    out = []
    for number, name in enumerate(names):
        plain = name.replace("\0", "") or "column"
        chosen = plain
        while chosen.lower() in taken:
            chosen = f"{plain}#{number}"
            plain += "_"
        taken.add(chosen.lower())
        out.append(chosen)
    return tuple(out)


class ViewTable:
    """The statements for the table of one view; texts only, the store runs them."""

    def __init__(self, schema: ViewSchema) -> None:
        self.schema = schema
        physical = column_names(schema.names)
        self._by_name = dict(zip(schema.names, physical, strict=True))
        self._columns = [quote_identifier(name) for name in physical]
        self._keys = [quote_identifier(self._by_name[name]) for name in schema.key] or [
            quote_identifier(_ONE)
        ]
        self.name = quote_identifier(schema.name)

    @cached_property
    def create(self) -> str:
        """Create the table. A key column is never NULL (see `sqlite_values.py`)."""
        columns = [c + (" NOT NULL" if c in self._keys else "") for c in self._columns]
        if not self.schema.key:
            columns.append(f"{quote_identifier(_ONE)} NOT NULL DEFAULT 0")
        keys = ", ".join(self._keys)
        return (
            f"CREATE TABLE {self.name} ({', '.join(columns)}, PRIMARY KEY ({keys})) WITHOUT ROWID"
        )

    def create_stage(self, columns: int) -> str:
        """Create the temporary table for rows of so many columns, numbered from 1 in ``i``."""
        names = "".join(f", c{n}" for n in range(columns))
        return f"CREATE TEMP TABLE {STAGE.removeprefix('temp.')} (i INTEGER PRIMARY KEY{names})"

    def fill_stage(self, columns: int) -> str:
        """Insert one row into the temporary table."""
        return f"INSERT INTO {STAGE} VALUES (NULL{', ?' * columns})"  # noqa: S608

    def _same_key(self, positions: list[int]) -> str:
        if not self.schema.key:
            return f"t.{self._keys[0]} = 0"
        pairs = zip(self._keys, positions, strict=True)
        return " AND ".join(f"t.{key} = s.c{n}" for key, n in pairs)

    @cached_property
    def select_changed(self) -> str:
        """The numbers of the staged rows that are new or differ from the row that is there."""
        names = self.schema.names
        at = [names.index(name) for name in self.schema.key]
        differs = [f"t.{self._keys[0]} IS NULL"] + [
            f"s.c{n} IS NOT t.{column}"
            for n, column in enumerate(self._columns)
            if column not in self._keys
        ]
        return (
            f"SELECT s.i FROM {STAGE} AS s LEFT JOIN {self.name} AS t "  # noqa: S608
            f"ON {self._same_key(at)} WHERE {' OR '.join(differs)} ORDER BY s.i"
        )

    @cached_property
    def upsert(self) -> str:
        """Move the staged rows into the table; rows that are there already stay untouched."""
        staged = ", ".join(f"c{n}" for n in range(len(self._columns)))
        return self._upsert(f"SELECT {staged} FROM {STAGE} WHERE true ORDER BY i")  # noqa: S608

    @cached_property
    def upsert_given(self) -> str:
        """Put one row into the table; if it is there already, it stays untouched."""
        return self._upsert(f"VALUES ({', '.join('?' * len(self._columns))})")

    def _upsert(self, rows: str) -> str:
        values = [column for column in self._columns if column not in self._keys]
        action = "NOTHING"
        if values:
            assigned = ", ".join(f"{c} = excluded.{c}" for c in values)
            differs = " OR ".join(f"{self.name}.{c} IS NOT excluded.{c}" for c in values)
            action = f"UPDATE SET {assigned} WHERE {differs}"
        return (
            f"INSERT INTO {self.name} ({', '.join(self._columns)}) {rows} "
            f"ON CONFLICT ({', '.join(self._keys)}) DO {action}"
        )

    @cached_property
    def select_present(self) -> str:
        """The numbers of the staged keys that the table has."""
        at = list(range(len(self.schema.key)))
        return (
            f"SELECT s.i FROM {STAGE} AS s JOIN {self.name} AS t "  # noqa: S608
            f"ON {self._same_key(at)} ORDER BY s.i"
        )

    @cached_property
    def delete(self) -> str:
        """Delete the row of one key."""
        where = " AND ".join(f"{key} = ?" for key in self._keys) if self.schema.key else "true"
        return f"DELETE FROM {self.name} WHERE {where}"  # noqa: S608

    def select(
        self,
        where: tuple[str, ...] = (),
        bounds: Sequence[tuple[str, str]] = (),
        order: Sequence[tuple[str, bool]] = (),
        *,
        limited: bool = False,
    ) -> str:
        """Read rows where columns equal values and keep within bounds; in key order, or another.

        Args:
            where: Columns that equal a value.
            bounds: Columns, and how they compare to a value: ``>=`` or ``<``.
            order: Columns, each with whether its largest values come first; then comes the key.

        """
        text = f"SELECT {', '.join(self._columns)} FROM {self.name}"  # noqa: S608
        # IS, not =: null finds nulls.
        conditions = [f"{quote_identifier(self._by_name[name])} IS ?" for name in where]
        for name, comparison in bounds:
            conditions.append(f"{self._sortable(name)} {comparison} ?")
            if name in self.schema.key:  # the value that represents null is in no range
                conditions.append(
                    f"{quote_identifier(self._by_name[name])} IS NOT {self._null(name)}"
                )
        if conditions:
            text += " WHERE " + " AND ".join(conditions)
        terms = [self._order(name, descending=descending) for name, descending in order]
        named = {name for name, _ in order}
        terms += [
            self._order(name, descending=False) for name in self.schema.key if name not in named
        ]
        if terms:
            text += f" ORDER BY {', '.join(terms)}"
        return text + " LIMIT ?" if limited else text

    def _order(self, name: str, *, descending: bool) -> str:
        direction, nulls = ("DESC", "FIRST") if descending else ("ASC", "LAST")
        term = f"{self._sortable(name)} {direction}"
        if name not in self.schema.key:
            return f"{term} NULLS {nulls}"
        if self.schema.kinds[name] == "bytes":  # the value that represents null sorts first there
            return f"({quote_identifier(self._by_name[name])} IS {self._null(name)}) {direction}, {term}"
        return term

    def _sortable(self, name: str) -> str:
        column = quote_identifier(self._by_name[name])
        decimal = self.schema.kinds[name].startswith("decimal")
        return f"{column} COLLATE {DECIMAL_ORDER}" if decimal else column

    def _null(self, name: str) -> str:
        return "0" if self.schema.kinds[name] == "bytes" else "X''"
