"""The tables of a capture: how far each has been read, and how its rows are laid out in the stream.

===========  ==============================================  ===============================================
state        its changes in the stream                       what is read of it
===========  ==============================================  ===============================================
``new``      are left out: the snapshot will have them       all
``reading``  are given, but for some of rows that were not   ``owed`` keys, and what is behind ``after``;
             read yet: see ``unread_rows.py``                all where that is None
``done``     are given                                       nothing
===========  ==============================================  ===============================================

A column that is added, renamed or of another type makes a table ``reading`` again: the server does not send rows
that ALTER TABLE changed. A table that is renamed, or gets another key, is emptied and ``new``; so is an altered one
without a key. ``known``: the topic has all rows of a table that is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from millstream.capture.json_columns import Cells, objects_of
from millstream.capture.postgres.catalog import PgTable
from millstream.capture.postgres.cells import encode_columns, message_cells
from millstream.capture.postgres.messages import (
    RUN_TAG,
    UNCHANGED,
    WAL_HEADER_BYTES,
    PgChange,
    PgColumn,
    PgRelation,
    PgTruncate,
    PgTuple,
    decode_message,
)
from millstream.capture.postgres.unread_rows import (
    KeyedChange,
    KeyTexts,
    ReadingTable,
    key_texts,
)
from millstream.capture.postgres.values import PgTypes, ValueOf
from millstream.capture.signals import condition
from millstream.capture.units import RowBlock, TableChange, TableDefinition, UnitContent

BLOCK_ROWS_MIN = 48  # measured: fewer rows are decoded quicker one by one
Entry = dict[str, Any]
_NUMERIC = (1700, 1231)  # and arrays of it
_INTEGERS = frozenset((20, 21, 23))

# What the messages of a block may be: their kind, and that of their tuple; else old and new values are compared.
_BLOCKS: dict[bytes, Literal["c", "u", "d"]] = {b"IN": "c", b"UN": "u", b"DK": "d", b"DO": "d"}


@dataclass(frozen=True, slots=True)
class TableLayout:
    """How rows of a table are laid out. ``identity`` has the columns of its replica identity."""

    schema: str
    table: str
    key: tuple[str, ...]
    columns: tuple[tuple[str, ValueOf], ...]
    identity: frozenset[str]

    def row(self, values: PgTuple) -> dict[str, Any]:
        """Return a row, without what the server did not send."""
        return {
            name: None if value is None else read(value)
            for (name, read), value in zip(self.columns, values, strict=True)
            if value is not UNCHANGED
        }

    def block(
        self,
        cells: Sequence[Cells],
        count: int,
        op: Literal["c", "u", "d", "r"],
        *,
        identity_only: bool = False,
    ) -> RowBlock:
        """Return so many rows, of which these are the columns.

        Raises:
            ValueError: they are not.
        """
        columns = list(zip(cells, self.columns, strict=True))
        if identity_only:
            columns = [one for one in columns if one[1][0] in self.identity]
        encoded = encode_columns(columns)
        names = frozenset(encoded)
        keys = objects_of(encoded, self.key, count) if self.key else None
        rows = objects_of(encoded, tuple(encoded), count)
        return RowBlock(self.schema, self.table, op, names, rows, keys)


@dataclass
class PgTableTracker:
    """Turns messages into changes and definitions. ``entries`` are JSON, by the tables' oids, and never modified."""

    entries: dict[str, Entry]
    look: Callable[[], tuple[list[PgTable], PgTypes, dict[int, int]]]
    behind: Callable[[PgTable, Sequence[str], Sequence[KeyTexts]], dict[KeyTexts, bool] | None]
    tables: dict[int, PgTable] = field(default_factory=dict)
    types: PgTypes = field(default_factory=PgTypes)
    _published: dict[int, int] = field(default_factory=dict)
    _layouts: dict[int, TableLayout] = field(default_factory=dict)

    def refresh(self) -> Iterator[UnitContent]:
        """Look at the catalogue: tables that are there for the first time are new, those that are gone are dropped.

        A table that has another name now, or was not published for a while, is read anew: the stream may have
        nothing that says so.
        """
        found, self.types, self._published = self.look()
        self.tables = {one.oid: one for one in found}
        for oid, entry in list(self.entries.items()):
            now = self.tables.get(int(oid))
            if now is not None and not self._is_other(now, entry):
                continue
            self.entries = {key: one for key, one in self.entries.items() if key != oid}
            self._layouts.pop(int(oid), None)  # the stream may still have changes from before
            renamed = now is None or (now.schema, now.table) != (entry["schema"], entry["table"])
            yield from _emptied(entry, dropped=renamed)
        for one in found:
            if str(one.oid) not in self.entries:
                self._set(one.oid, {"schema": one.schema, "table": one.table, "state": "new"})

    def _is_other(self, table: PgTable, entry: Entry) -> bool:
        named = (table.schema, table.table) == (entry["schema"], entry["table"])
        published = self._published.get(table.oid)
        return not named or entry.get("published", published) != published

    def pending(self) -> list[PgTable]:
        """Return the tables of which there is something to read."""
        return [
            self.tables[int(oid)]
            for oid, entry in self.entries.items()
            if entry["state"] != "done" and int(oid) in self.tables
        ]

    def _set(self, oid: int, entry: Entry) -> None:
        self.entries = {**self.entries, str(oid): entry}

    # ── snapshots ───────────────────────────────────────────────────────────────────────────

    def after(self, table: PgTable, columns: tuple[PgColumn, ...]) -> list[str] | None:
        """Return the key that reading goes on behind; None where it begins."""
        entry = self.entries[str(table.oid)]
        same = entry.get("columns") == _described(columns) and entry.get("key") == list(table.key)
        found: list[str] | None = entry.get("after") if same else None
        return found

    def owed(self, table: PgTable, columns: tuple[PgColumn, ...]) -> list[list[str]]:
        """Return the keys of rows that are to be read before the others; those are read already."""
        if self.after(table, columns) is None:
            return []
        found: list[list[str]] = self.entries[str(table.oid)].get("owed", [])
        return found

    def begin(self, table: PgTable, columns: tuple[PgColumn, ...]) -> Iterator[UnitContent]:
        """Yield what goes before the first rows of a table: its definition if it is not known."""
        entry = self.entries[str(table.oid)]
        described = _described(columns)
        if not table.key:
            yield TableChange(table.schema, table.table, "t", ())
        elif entry["state"] != "new" and entry.get("key") != list(table.key):
            yield from _emptied(entry, dropped=False)
            self._set(table.oid, {name: one for name, one in entry.items() if name != "known"})
        if entry["state"] == "new" or entry.get("columns") != described:
            yield self._definition(table.schema, table.table, table.key, columns)

    def again(self, schema: str, table: str, where: str) -> Iterator[UnitContent]:
        """Have a table read again: all of it, after it was emptied, or the rows for which ``where`` is true."""
        for oid, entry in list(self.entries.items()):
            if (entry["schema"], entry["table"]) != (schema, table) or entry["state"] == "new":
                continue
            if where:
                asked = condition(entry["state"] == "reading", entry.get("where", ""), where)
                self._set(int(oid), {**_from_beginning(entry), "where": asked})
            else:
                yield from _emptied(entry, dropped=False)
                self._set(int(oid), {"schema": schema, "table": table, "state": "new"})

    def where(self, table: PgTable) -> str:
        """Return the condition of the rows that are read of a table; empty for all."""
        return str(self.entries[str(table.oid)].get("where", ""))

    def read(
        self,
        table: PgTable,
        columns: tuple[PgColumn, ...],
        after: list[str] | None,
        where: str = "",
    ) -> None:
        """Note that a table has been read up to a key, and what was owed; to its end where that is None."""
        known = self.entries[str(table.oid)].get("known", False)
        entry: Entry = {
            "schema": table.schema,
            "table": table.table,
            "state": "done" if after is None else "reading",
            "after": after,
            "columns": _described(columns),
            "key": list(table.key),
            "published": self._published.get(table.oid),
        }
        if where and after is not None:
            entry["where"] = where
        if known and after is not None:
            entry["known"] = True
        self._set(table.oid, entry)

    def layout(self, table: PgTable, columns: tuple[PgColumn, ...]) -> TableLayout:
        """Return how rows of a snapshot are laid out."""
        readers = tuple((one.name, self.types.reader(one.type_oid)) for one in columns)
        return TableLayout(table.schema, table.table, table.key, readers, frozenset(table.key))

    # ── the stream ──────────────────────────────────────────────────────────────────────────

    def relation(self, message: PgRelation) -> Iterator[UnitContent]:
        """Take a table's layout, from here on in the stream, and yield what it alters."""
        self._layouts.pop(message.oid, None)
        unknown = any(one.type_oid not in self.types.names for one in message.columns)
        if message.oid not in self.tables or unknown or self._differs(message):
            yield from self.refresh()
        table, entry = self.tables.get(message.oid), self.entries.get(str(message.oid))
        if table is None or entry is None:
            return
        key = _key_of(message, table)
        readers = tuple((one.name, self.types.reader(one.type_oid)) for one in message.columns)
        identity = frozenset(one.name for one in message.columns if one.in_identity)
        self._layouts[message.oid] = TableLayout(
            message.schema, message.table, key, readers, identity
        )
        if entry["state"] != "new" and self._differs(message, key):
            yield from self._altered(message, entry, key)

    def _differs(self, message: PgRelation, key: tuple[str, ...] | None = None) -> bool:
        entry = self.entries.get(str(message.oid))
        return entry is None or (
            (entry["schema"], entry["table"]) != (message.schema, message.table)
            or entry.get("columns") != _described(message.columns)
            or (key is not None and entry.get("key") != list(key))
        )

    def _altered(
        self, message: PgRelation, entry: Entry, key: tuple[str, ...]
    ) -> Iterator[UnitContent]:
        name = {"schema": message.schema, "table": message.table}
        renamed = (entry["schema"], entry["table"]) != (message.schema, message.table)
        if renamed or entry["key"] != list(key):
            yield from _emptied(entry, dropped=renamed)
            self._set(message.oid, {**name, "state": "new"})
            return
        columns = _described(message.columns)
        grown = any(one not in entry["columns"] for one in columns)
        if grown and not key:
            self._set(message.oid, {**name, "state": "new"})
            return
        yield self._definition(message.schema, message.table, key, message.columns)
        again = grown or entry["state"] == "reading"
        # A condition may name a column that is gone: all rows are read instead.
        self._set(message.oid, {**(_from_beginning(entry) if again else entry), "columns": columns})

    def changes(self, messages: Sequence[bytes]) -> Iterator[UnitContent]:
        """Yield what messages of changes say: with their headers, of one kind, table and number of columns."""
        block = self._block(messages) if len(messages) >= BLOCK_ROWS_MIN else None
        if block is not None:
            yield block
            return
        decoded = [decode_message(data[WAL_HEADER_BYTES:]) for data in messages]
        changes = [one for one in decoded if isinstance(one, PgChange)]
        layout, entry = self._captured(changes[0].oid)
        if layout is None or entry is None:
            return
        if entry["state"] == "reading":
            yield from self._while_reading(layout, entry, changes)
            return
        for message in changes:
            yield _change(layout, message)

    def _captured(self, oid: int) -> tuple[TableLayout | None, Entry | None]:
        """Return the layout and the entry of a table whose changes are given."""
        layout, entry = self._layouts.get(oid), self.entries.get(str(oid))
        return (None, None) if entry is None or entry["state"] == "new" else (layout, entry)

    def _while_reading(
        self, layout: TableLayout, entry: Entry, messages: Sequence[PgChange]
    ) -> Iterator[TableChange]:
        oid = messages[0].oid
        reading = ReadingTable(list(map(tuple, entry.get("owed", ()))), entry.get("known", False))
        changes = [_keyed(layout, message) for message in messages]
        yield from reading.given(changes, lambda keys: self._unread(oid, keys))
        if reading.lost:
            self._set(oid, _from_beginning(entry))
        elif reading.owed:
            self._set(oid, {**entry, "owed": list(map(list, reading.owed))})

    def _unread(self, oid: int, keys: Sequence[KeyTexts]) -> dict[KeyTexts, bool] | None:
        """Say of keys whether they are behind what was read; None where that cannot be told."""
        entry, table = self.entries[str(oid)], self.tables.get(oid)
        after, key = entry.get("after"), entry.get("key")
        if after is None:
            return dict.fromkeys(keys, True)
        if table is None or list(table.key) != key:
            return None
        types = {name: type_oid for name, type_oid, _ in entry["columns"]}
        if len(after) == 1 and types.get(key[0]) in _INTEGERS:
            return {one: int(one[0]) > int(after[0]) for one in keys}
        return self.behind(table, after, keys)

    def _block(self, messages: Sequence[bytes]) -> RowBlock | None:
        tag = messages[0][RUN_TAG]
        oid, op = int.from_bytes(tag[1:5], "big"), _BLOCKS.get(tag[:1] + tag[5:6])
        layout, _ = self._captured(oid)
        if op is None or layout is None:
            return None
        cells = message_cells(messages)
        if cells is None:
            return None
        try:
            return layout.block(cells, len(messages), op, identity_only=tag[5:6] == b"K")
        except (ValueError, KeyError, pa.ArrowException):
            return None  # one by one it is seen which

    def truncations(self, message: PgTruncate) -> Iterator[TableChange]:
        """Yield the truncations of tables that are captured, and not new."""
        for oid in message.oids:
            layout, _ = self._captured(oid)
            if layout is not None:
                yield TableChange(layout.schema, layout.table, "t", ())

    def _definition(
        self, schema: str, table: str, key: tuple[str, ...], columns: tuple[PgColumn, ...]
    ) -> TableDefinition:
        described = tuple(
            {
                "name": one.name,
                "type": self.types.names.get(one.type_oid, str(one.type_oid)),
                **_digits(one),
            }
            for one in columns
        )
        return TableDefinition(schema, table, described, key, placed=True)


def _change(layout: TableLayout, message: PgChange) -> TableChange:
    after = None if message.new is None else layout.row(message.new)
    before = None if message.old is None else layout.row(message.old)
    if before is not None and message.old_kind == "K":
        before = {name: value for name, value in before.items() if name in layout.identity}
    if after is not None and before is not None:
        after = {**{k: v for k, v in before.items() if k not in after}, **after}
    return TableChange(layout.schema, layout.table, message.op, layout.key, before, after)


def _keyed(layout: TableLayout, message: PgChange) -> KeyedChange:
    change = _change(layout, message)
    names = [name for name, _ in layout.columns]
    is_whole = change.after is None or len(change.after) == len(names)
    old, new = (
        key_texts(names, layout.key, *rows)
        for rows in ((message.old, message.new), (message.new, message.old))
    )
    return KeyedChange(change, old, new, is_whole)


def _from_beginning(entry: Entry) -> Entry:
    """Return the entry of a table that is to be read from its beginning, all of it. The topic keeps what it has."""
    kept = {name: one for name, one in entry.items() if name not in ("where", "owed")}
    known = {"known": True} if entry["state"] == "done" else {}
    return {**kept, **known, "state": "reading", "after": None}


def _digits(column: PgColumn) -> dict[str, int]:
    """Return how many digits a numeric column has, and how many of them are decimal places, where it is declared.

    Source: PostgreSQL's ``numeric.c``, ``make_numeric_typmod``: 16 bits and, signed, 11 bits, and 4 more than both.
    """
    if column.type_oid not in _NUMERIC or column.type_modifier < 0:
        return {}
    modifier = column.type_modifier - 4
    scale = modifier & 0x7FF
    return {"length": modifier >> 16 & 0xFFFF, "scale": scale - (scale >> 10 << 11)}


def _described(columns: tuple[PgColumn, ...]) -> list[list[Any]]:
    return [[one.name, one.type_oid, one.type_modifier] for one in columns]


def _key_of(message: PgRelation, table: PgTable) -> tuple[str, ...]:
    """Return the columns of the key, in its order: under FULL those of the primary key, else the identity's."""
    names = {one.name for one in message.columns}
    if message.identity == "f":
        return table.key if names.issuperset(table.key) else ()
    flagged = [one.name for one in message.columns if one.in_identity]
    return table.key if set(table.key) == set(flagged) else tuple(flagged)


def _emptied(entry: Entry, *, dropped: bool) -> Iterator[UnitContent]:
    if entry["state"] == "new":
        return
    yield TableChange(entry["schema"], entry["table"], "t", ())
    if dropped:
        yield TableDefinition(entry["schema"], entry["table"], (), (), dropped=True)
