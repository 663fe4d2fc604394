"""Changes of a table that is being read, where they say less than the whole row.

The server does not send a large value that an update leaves as it was. Where the topic has the row from before, that says
enough. While a table is read in chunks, from one key to the next, the topic may not have it: rows behind the last
chunk were never read, or were rewritten by ALTER TABLE since. Changes with all columns are given whatever was read.
Of the others:

====================  =======================  ==========================================================
the row was           its key is then          what is given
====================  =======================  ==========================================================
read                  any                      the change
not read              behind what was read     nothing, or a deletion where it moved: it will be read
not read              within what was read     the same, and its key is *owed*: read before the next chunk
owed                  as of one not read       as of one not read
====================  =======================  ==========================================================

Of a table whose rows the topic has from before, and that is read again, the changes are given as well: the large
value of a row that is not read yet may be the one from before the alteration, until it is read.

The order of keys is the server's, by collations and types: it is asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import psycopg
from psycopg.sql import SQL, Identifier, Literal

from millstream.capture.postgres.catalog import PgTable
from millstream.capture.postgres.stream import Session
from millstream.capture.units import TableChange

OWED_MAX = 1000  # more of them, and the table is read from its beginning: they are stored with each progress
KeyTexts: TypeAlias = tuple[str, ...]
Unread: TypeAlias = Callable[[Sequence[KeyTexts]], dict[KeyTexts, bool] | None]
"""Says of keys whether they are behind what was read; None where the server cannot tell."""


@dataclass(frozen=True, slots=True)
class KeyedChange:
    """A change, and the texts of its row's key before and after it."""

    change: TableChange
    old: KeyTexts
    new: KeyTexts
    is_whole: bool
    """It says all columns, or is no update."""


@dataclass
class ReadingTable:
    """What the topic has of a table that is being read.

    Args:
        owed: Keys within what was read whose rows the topic does not have as they are.
        known: The topic has a row for each of the table, if perhaps an older one.
    """

    owed: list[KeyTexts]
    known: bool
    lost: bool = False
    """The table is to be read from its beginning: too much is owed, or keys cannot be compared any more."""

    def given(self, changes: Sequence[KeyedChange], unread: Unread) -> Iterator[TableChange]:
        """Yield what is to be given of changes, in their order, and note what is owed."""
        partial = [one for one in changes if not one.is_whole]
        keys = list(dict.fromkeys(key for one in partial for key in (one.old, one.new)))
        behind = unread(keys) if keys else {}
        if behind is None:
            self._lose()
            behind = dict.fromkeys(keys, True)
        for one in changes:
            if one.is_whole or not (behind[one.old] or one.old in self.owed):
                yield one.change
                continue
            if self.known:
                yield one.change
            elif one.old != one.new:
                yield replace(one.change, op="d", after=None)
            if not (self.lost or behind[one.new] or one.new in self.owed):
                self.owed.append(one.new)
                if len(self.owed) > OWED_MAX:
                    self._lose()
                    behind = dict.fromkeys(keys, True)

    def _lose(self) -> None:
        self.owed, self.lost = [], True


def keys_behind(
    session: Session, table: PgTable, after: Sequence[str], keys: Sequence[KeyTexts]
) -> dict[KeyTexts, bool] | None:
    """Say of each key whether it is behind another, in the table's order; None if the server cannot tell."""
    names = SQL(", ").join(map(Identifier, table.key))
    rows = json.dumps([dict(zip(table.key, key, strict=True)) for key in keys])
    place = SQL(", ").join(map(Literal, after))
    # The record has the types and collations of the table's columns.
    query = SQL("SELECT ({}) > ({}) FROM jsonb_populate_recordset(NULL::{}, {})").format(
        names, place, Identifier(table.schema, table.table), Literal(rows)
    )
    try:
        found = session.execute(query).fetchall()
    except (psycopg.ProgrammingError, psycopg.DataError, psycopg.IntegrityError):
        return None  # the last: of columns beside the key, which are null here, one is of a domain that refuses null
    if any(is_behind is None for (is_behind,) in found):
        return None
    return dict(zip(keys, (is_behind for (is_behind,) in found), strict=True))


def key_texts(names: Sequence[str], key: Sequence[str], *rows: Sequence[Any] | None) -> KeyTexts:
    """Return the texts of the key's columns, each from the first row that has it."""
    places = [names.index(one) for one in key]
    given = [row for row in rows if row is not None]
    return tuple(
        next((row[place] for row in given if isinstance(row[place], str)), "") for place in places
    )
