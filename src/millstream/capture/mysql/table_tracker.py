"""Which tables are captured, how far the snapshot of each is, and what the log alone does not say of its columns.

State of a table, as it is stored:

==================================  ===============================================================
``{"after": null}``                 to be read, from its beginning
``{"after": ["6b", …]}``            read up to this key
with ``"where"``                    the same of the rows for which this is true, which were asked for
``{"read": true}``                  read; its changes keep it up to date
==================================  ===============================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from millstream.capture.mysql.row_images import RowImage
from millstream.capture.mysql.session import MariaDbSession
from millstream.capture.mysql.table_map import BinlogColumn, TableMap, is_logged_as
from millstream.capture.mysql.table_schema import TableSchema, fixed_binary_renderer, read_schema
from millstream.capture.signals import condition
from millstream.capture.units import TableDefinition
from millstream.errors import ConfigError

_ADDRESS_WIDTHS = (4, 16)  # bytes of INET4, and of UUID and INET6, which the log has as BINARY

Renderers = dict[str, Callable[[str], str]]


class TableTracker:
    """The captured tables, by database and name.

    Args:
        tables: Their states as they were stored.
    """

    def __init__(self, session: MariaDbSession, tables: dict[str, Any]) -> None:
        self._session = session
        self._states: dict[tuple[str, str], dict[str, Any]] = {}
        for name, state in tables.items():
            database, _, table = name.partition("/")
            self._states[database, table] = dict(state)
        self._fingerprints: dict[tuple[str, str], bytes] = {}
        self._renderers: dict[tuple[str, str], Renderers] = {}
        self._virtual: dict[tuple[str, str], frozenset[str]] = {}

    def stored(self) -> dict[str, Any]:
        """Return the states as they are stored."""
        return {f"{name[0]}/{name[1]}": deepcopy(state) for name, state in self._states.items()}

    def names(self) -> list[tuple[str, str]]:
        return list(self._states)

    def add(self, names: list[tuple[str, str]]) -> None:
        """Have tables that are not known yet read."""
        for name in names:
            self._states.setdefault(name, {"after": None})

    def state(self, database: str, table: str) -> dict[str, Any]:
        """Return a table's state: the same object until the table has another beginning."""
        return self._states.get((database, table), {})

    def pending(self) -> tuple[str, str] | None:
        """Return a table that is to be read; None if all are."""
        return next((name for name, state in self._states.items() if "read" not in state), None)

    def restart(
        self, database: str, table: str, *, only_if_reading: bool = False, where: str = ""
    ) -> None:
        """Have a table read from its beginning, again; with ``where`` the rows for which that is true."""
        if only_if_reading and "read" in self.state(database, table):
            return
        before = self.state(database, table)
        if where:
            where = condition("after" in before, before.get("where", ""), where)
        self._forget(database, table)
        self._states[database, table] = {"after": None, **({"where": where} if where else {})}

    def begin_again(self, database: str, table: str) -> None:
        """Have all of a table read from its beginning, which the log describes as before."""
        self._states[database, table] = {"after": None}

    def is_told(self, table: TableMap, row: RowImage) -> bool:
        """Say whether a row after a change, and what the topic has of it, tell what it is.

        Not where columns are left out of a row that may not be in the topic yet, as its table is being read; nor where
        one of them is a virtual column, whose value follows from others that changed, or one of the key.
        """
        if len(row) == len(table.columns):
            return True
        state = self.state(table.database, table.table)
        if "read" not in state and "where" not in state:
            return False
        return row.keys() >= {*table.key, *self._virtual_columns(table)}

    def _virtual_columns(self, table: TableMap) -> frozenset[str]:
        name = (table.database, table.table)
        if name not in self._virtual:
            rows = self._session.rows(
                "SELECT COLUMN_NAME FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s "
                "AND EXTRA LIKE '%%VIRTUAL%%'",
                name,
            )
            self._virtual[name] = frozenset(row[0] for row in rows)
        return self._virtual[name]

    def created(self, database: str, table: str) -> None:
        """Note a table that is created here, empty: the log has all its rows."""
        self._forget(database, table)
        if "after" not in self.state(database, table):
            self._states[database, table] = {"read": True}

    def drop(self, database: str, table: str) -> None:
        """Forget a table."""
        self._forget(database, table)
        self._states.pop((database, table), None)

    def _forget(self, database: str, table: str) -> None:
        self._fingerprints.pop((database, table), None)
        self._renderers.pop((database, table), None)
        self._virtual.pop((database, table), None)

    def chunk_read(self, database: str, table: str, last_key: list[str] | None) -> None:
        """Note how far a table is read: to a key, or to its end."""
        state = self._states[database, table]
        asked = {"where": state["where"]} if "where" in state else {}
        state.clear()
        state.update({"read": True} if last_key is None else {"after": last_key, **asked})

    def definition(self, database: str, table: str, statement: str) -> TableDefinition | None:
        """Return a table as the server has it now; None if it is gone again."""
        schema = read_schema(self._session, database, table)
        if not schema.columns:
            return None
        return TableDefinition(database, table, definition_columns(schema), schema.key, statement)

    def described(self, table: TableMap) -> Iterator[TableDefinition]:
        """Note how the log describes a table; yield its definition if it is another one than before.

        Raises:
            ConfigError: the user may not read the table, it has no primary key, or what a column is cannot be known any more.
        """
        name = (table.database, table.table)
        if self._fingerprints.get(name) == table.fingerprint:
            return
        if (
            name not in self._states
        ):  # the log has all tables, information_schema those that may be read
            raise ConfigError(
                f"the binary log has changes of {table.database}.{table.table}, which the user may not read, so that "
                f"its rows are not known. GRANT SELECT ON `{table.database}`.`{table.table}`, or name the tables to "
                "be captured without it."
            )
        if not table.key:
            raise ConfigError(
                f"{table.database}.{table.table} has no primary key in the binary log. ALTER TABLE "
                f"`{table.database}`.`{table.table}` ADD PRIMARY KEY (…), and capture into a new prefix."
            )
        schema = read_schema(self._session, *name)
        self._renderers[name] = _address_renderers(table, schema)
        self._fingerprints[name] = table.fingerprint
        self._virtual.pop(name, None)
        columns = tuple(
            {
                "name": column.name,
                "nullable": column.nullable,
                "type": _type_of(schema, column),
            }
            for column in table.columns
        )
        yield TableDefinition(*name, columns, table.key)

    def renderers(self, table: TableMap) -> Renderers:
        """Return what makes text of the base64 of columns that the log has as bytes, and are none."""
        return self._renderers[table.database, table.table]

    def completer(self, table: TableMap) -> Callable[[RowImage], RowImage]:
        """Return what makes text of a row's columns that the log has as bytes, and are none."""
        renderers = self.renderers(table)
        if not renderers:
            return lambda image: image

        def complete(image: RowImage) -> RowImage:
            changed = {
                name: render(image[name])
                for name, render in renderers.items()
                if image.get(name) is not None
            }
            return image | changed

        return complete


def _address_renderers(table: TableMap, schema: TableSchema) -> Renderers:
    known = {column.name: column.data_type for column in schema.columns}
    found: Renderers = {}
    for column in table.columns:
        if column.format.fixed_width not in _ADDRESS_WIDTHS:
            continue
        if column.name not in known:
            raise ConfigError(
                f"the binary log has {table.database}.{table.table}.{column.name}, which is BINARY, UUID or an "
                "address: which one cannot be known, as the server no longer has the column. Capture into a "
                "new prefix, from a new snapshot."
            )
        render = fixed_binary_renderer(known[column.name])
        if render is not None:
            found[column.name] = render
    return found


def _type_of(schema: TableSchema, logged: BinlogColumn) -> str | None:
    """Return the type of a column: what the log says of it, if it was altered since; None if it was dropped."""
    found = next((one.column_type for one in schema.columns if one.name == logged.name), None)
    if found is None or is_logged_as(found, logged.logged_type):
        return found
    return logged.logged_type


def definition_columns(schema: TableSchema) -> tuple[dict[str, Any], ...]:
    """Return a table's columns as a definition has them."""
    return tuple(
        {
            "name": column.name,
            "type": column.column_type,
            "nullable": column.nullable,
            "default": column.default,
        }
        for column in schema.columns
    )
