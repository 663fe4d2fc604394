"""Which rows of an address that is asked again and again were taken before.

=============  ==============================================================================================
``RowCursor``  rows come in the order of a field, such as the time of their last change: those up to the largest
               that was read were taken. Of those that are equal to it, the ids are kept: more of them may come
``RowSet``     the address gives all that there is, each time: taken are those that were not in the last answer
=============  ==============================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Protocol

from millstream.connectors.connector import Position
from millstream.connectors.json_page import PageRow
from millstream.errors import ConfigError, ConflictError

ROWS_MAX = 10_000  # that are remembered: their ids are in each position
_ID_BYTES = 8
_Key = tuple[str, Any]


class TakenRows(Protocol):
    """Which rows were taken."""

    def begin(self) -> None:
        """Begin a round: the address is asked anew, for all its pages."""

    def take(self, row: PageRow) -> bool:
        """Return whether a row is new, and note it.

        Raises:
            ValueError: it is no row of the kind that was asked for; that it is not new, is False.
        """

    def end(self) -> None:
        """End a round: all its pages were taken."""

    def position(self) -> Position:
        """Return what is to be stored."""


def _require_same(said: Position, cursor: str | None, id: str | None) -> None:  # noqa: A002
    """Refuse a position by which rows would be missed, or taken again: its rows were told apart otherwise.

    Raises:
        ConflictError: it is one.
    """
    if not said or (not said.get("rows") and said.get("cursor") is None):
        return  # no row was taken
    if "by" not in said and ("cursor" in said) == (cursor is not None):
        return  # a version that did not note it has stored this
    was = tuple(said.get("by", ("a field", None) if "cursor" in said else (None, None)))
    if was != (cursor, id):
        raise ConflictError(
            f"the source has taken rows with {_said(*was)}, and now it is to take them with {_said(cursor, id)}: rows could be missed, "
            "or be there twice. Give what it had, or give the source another name: it begins anew."
        )


def _said(cursor: str | None, id: str | None) -> str:  # noqa: A002
    return (
        f"{f'cursor={cursor!r}' if cursor else 'no cursor='} and {f'id={id!r}' if id else 'no id='}"
    )


def id_of(row: PageRow, name: str | None) -> str:
    """Return what a row is known by: a field of it, or all its text."""
    text = row.text
    if name is not None and isinstance(row.event, dict) and row.event.get(name) is not None:
        text = f"{name} {row.event[name]!r}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_ID_BYTES).hexdigest()


@dataclass
class RowSet:
    """Takes what was not in the last answer."""

    id: str | None
    last: frozenset[str]
    now: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, id: str | None, position: Position) -> RowSet:  # noqa: A002 - what users call it
        """Return the rows of a position.

        Raises:
            ConflictError: they were told apart otherwise.
        """
        _require_same(position, None, id)
        return cls(id, frozenset((position or {}).get("rows", ())))

    def begin(self) -> None:
        """See :class:`TakenRows`."""
        self.now = set()

    def take(self, row: PageRow) -> bool:
        """See :class:`TakenRows`."""
        known = id_of(row, self.id)
        is_new = known not in self.last and known not in self.now
        self.now.add(known)
        if len(self.now) > ROWS_MAX:
            raise ConfigError(
                f"the address gives more than {ROWS_MAX:,} rows, and which were taken is remembered of so many. Give cursor=, a "
                "field by which the rows are in order."
            )
        return is_new

    def end(self) -> None:
        """See :class:`TakenRows`."""
        self.last = frozenset(self.now)

    def position(self) -> Position:
        """See :class:`TakenRows`. Only after a round: what is on pages that were not read yet is not forgotten."""
        return {"by": [None, self.id], "rows": sorted(self.last)}


@dataclass
class RowCursor:
    """Takes rows behind a value of a field, in its order."""

    name: str
    id: str | None
    value: Any = None
    ids: set[str] = field(default_factory=set)  # of the rows with this value that were taken
    bad: set[str] = field(default_factory=set)  # rows without the field, of the last round
    _first: _Key | None = None
    _bad_now: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, name: str, id: str | None, position: Position) -> RowCursor:  # noqa: A002
        """Return the cursor of a position.

        Raises:
            ConflictError: it is of another field.
        """
        _require_same(position, name, id)
        said = position or {}
        return cls(name, id, said.get("cursor"), set(said.get("ids", ())), set(said.get("bad", ())))

    def begin(self) -> None:
        """See :class:`TakenRows`."""
        self._first = None if self.value is None else _ordered(self.value)
        self._bad_now = set()

    def take(self, row: PageRow) -> bool:
        """See :class:`TakenRows`."""
        known = id_of(row, self.id)
        given = row.event.get(self.name) if isinstance(row.event, dict) else None
        try:
            key, last = self._places(given)
        except ValueError:
            if self._is_new_bad(row):
                raise
            return False
        if key > last or self.value is None:
            self.value, self.ids = given, {known}
            return True
        if key < last:
            if self._first is None or key > self._first:
                raise ConfigError(
                    f"the rows are not in the order of {self.name!r}: after {self.value!r:.80} came {given!r:.80}, which could be "
                    "missed. Ask for them in that order, in the address, such as with &sort=."
                )
            return False
        is_new = known not in self.ids
        self.ids.add(known)
        self._require_few(self.ids, f"have one and the same value ({given!r:.80}) in the")
        return is_new

    def _places(self, given: Any) -> tuple[_Key, _Key]:
        """Return where a row is, and where the last one was.

        Raises:
            ValueError: the two cannot be compared.
        """
        key = _ordered(given)
        last = key if self.value is None else _ordered(self.value)
        if key[0] != last[0]:
            raise ValueError(
                f"its cursor {self.name!r} is {given!r:.80}, and that of rows before was {self.value!r:.80}"
            )
        return key, last

    def _is_new_bad(self, row: PageRow) -> bool:
        known = id_of(row, None)
        is_new = known not in self.bad and known not in self._bad_now
        self._bad_now.add(known)
        self._require_few(self._bad_now, "have no")
        return is_new

    def end(self) -> None:
        """See :class:`TakenRows`."""
        self.bad, self._bad_now = self._bad_now, set()

    def position(self) -> Position:
        """See :class:`TakenRows`. What was bad in the last round is kept until this one is over."""
        found: dict[str, Any] = {
            "by": [self.name, self.id],
            "cursor": self.value,
            "ids": sorted(self.ids),
        }
        bad = self.bad | self._bad_now
        return {**found, "bad": sorted(bad)} if bad else found

    def _require_few(self, ids: set[str], what: str) -> None:
        if len(ids) > ROWS_MAX:
            raise ConfigError(
                f"more than {ROWS_MAX:,} rows {what} cursor {self.name!r}. Give cursor= a field that tells them apart."
            )


def _ordered(value: Any) -> _Key:
    """Return a value in a form that can be compared: a number, a time or a text, and which of these.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, str) and value:
        if value.isascii() and value.isdigit():
            return "number", int(value)
        if any("\ud800" <= sign <= "\udfff" for sign in value):
            raise ValueError("its cursor has half of a surrogate pair, which cannot be asked for")
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            return "text", value
        return "time", time.replace(tzinfo=UTC) if time.tzinfo is None else time
    if isinstance(value, int) and not isinstance(value, bool):
        return "number", value
    if isinstance(value, float) and math.isfinite(value):
        return "number", value
    raise ValueError(f"its cursor is {value!r:.80}: give a field of numbers, times or text")
