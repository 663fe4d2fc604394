"""What every view store can be asked, and what is the same in each: queries, and the row of a key."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol, Self

import polars as pl

from millstream.errors import ConfigError, OffsetOutOfRangeError
from millstream.views.coverage import CoverageSpan
from millstream.views.schema import ViewSchema


@dataclass(frozen=True)
class Query:
    """Which rows of a view, in which order, and how many at most.

    ``where``: these columns equal these values; None finds nulls. ``between``: column →
    ``(from, to)``, half-open; None leaves a side open (both: any row will do), and nulls are in no
    range. ``order`` names columns, with ``-`` before the name for the largest first; what it leaves
    open, the key decides. Null is larger than any value, and NaN than any other number.
    """

    where: Mapping[str, Any] = field(default_factory=dict)
    between: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    order: Sequence[str] = ()
    limit: int | None = None

    def checked_order(self, schema: ViewSchema) -> list[tuple[str, bool]]:
        """Return the columns to order by, each with whether its largest values come first.

        Raises:
            ConfigError: there is no such column, or its values have no order.
        """
        order = []
        for text in self.order:
            descending = text not in schema.names and text.startswith("-")
            name = text[1:] if descending else text
            _require_order(schema, name)
            order.append((name, descending))
        return order

    def checked_bounds(self, schema: ViewSchema) -> list[tuple[str, str, Any]]:
        """Return each bound that is given as column, comparison (``>=`` or ``<``), and value.

        Raises:
            ConfigError: there is no such column, or its values have no order.
        """
        bounds = []
        for name, (start, end) in self.between.items():
            _require_order(schema, name)
            bounds += [
                (name, comparison, value)
                for comparison, value in ((">=", start), ("<", end))
                if value is not None
            ]
        return bounds


def _require_order(schema: ViewSchema, name: str) -> None:
    if name not in schema.names:
        raise ConfigError(
            f"The view {schema.name!r} has no column {name!r}; it has {', '.join(schema.names)}. "
            "Choose one of them."
        )
    if schema.kinds[name] == "json":
        raise ConfigError(
            f"The column {name!r} of the view {schema.name!r} holds lists or structs, which have no "
            "order. Choose another column."
        )


@dataclass(frozen=True)
class QueryResult:
    """Rows of a view and what they reflect, all of one commit.

    ``newest_change`` is the number of the view's newest change, ``batch_id`` the batch committed last (None
    before the first), ``position`` what of the log the rows reflect, where ``coverage`` leaves nothing out. ``view_id``
    is what tells the view from one that is made anew under its name.
    """

    schema: ViewSchema
    rows: pl.DataFrame
    newest_change: int
    batch_id: int | None
    position: Mapping[str, Any]
    coverage: tuple[CoverageSpan, ...] = ()
    view_id: str = ""


def view_id_of(checkpoint_id: str | None) -> str:
    """Return what tells a view from one that is made anew: changes of each are numbered from 1.

    An app that begins anew has another checkpoint. Empty before its first run.
    """
    return "" if checkpoint_id is None else sha256(checkpoint_id.encode()).hexdigest()[:12]


def check_view_id(store: ViewReader, view: str, since: int, made: str | None) -> str:
    """Make sure that a change number is one of the view as it is now, where that can be told.

    Returns what the view is. Call it after its changes were read: it never becomes again what it was.

    Raises:
        OffsetOutOfRangeError: the view was made anew since; its changes are numbered from 1 again.
    """
    found = store.view_id(view)
    if made and made != found:
        newest = store.newest_changes().get(view, 0)
        raise OffsetOutOfRangeError(
            f"The changes of the view {view!r} since {since} cannot be read: it was made anew, and they are "
            f"numbered from 1 again. Read the whole view with scan() and go on from there; its newest "
            f"change is {newest}.",
            start=1,
            end=newest + 1,
        )
    return found


class ViewReader(Protocol):
    """A view store as readers see it: each call answers from one commit, the newest.

    What each method gives, and raises, is told at :class:`millstream.views.state_store.store.StateStore`.
    """

    def views(self) -> list[ViewSchema]: ...
    def schema(self, view: str) -> ViewSchema: ...
    def count(self, view: str) -> int: ...
    def version(self) -> tuple[int, ...]: ...
    def newest_changes(self) -> dict[str, int]: ...
    def view_id(self, view: str) -> str: ...
    def select(self, view: str, query: Query) -> QueryResult: ...
    def scan(
        self, view: str, *, where: Mapping[str, Any] | None = None, limit: int | None = None
    ) -> pl.DataFrame: ...
    def get(self, view: str, /, **key: Any) -> dict[str, Any] | None: ...
    def changes(self, view: str, *, since: int = 0, limit: int | None = None) -> pl.DataFrame: ...
    def position(self, view_or_app: str) -> dict[str, Any]: ...
    def coverage(self, view: str) -> tuple[CoverageSpan, ...]: ...
    def wait_for(
        self,
        view_or_app: str,
        *,
        batch_id: int | None = None,
        position: Mapping[str, Any] | None = None,
        timeout_s: float = 10.0,
    ) -> bool: ...
    def close(self) -> None: ...


class QueryReader(ABC):
    """What a store gives by its queries alone, and closes at the end of a ``with`` statement."""

    @abstractmethod
    def schema(self, view: str) -> ViewSchema: ...

    @abstractmethod
    def select(self, view: str, query: Query) -> QueryResult: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def scan(
        self, view: str, *, where: Mapping[str, Any] | None = None, limit: int | None = None
    ) -> pl.DataFrame:
        """Return the view's rows in key order, typed; all of one commit.

        Args:
            where: Only rows where these columns equal these values (None finds nulls).
            limit: At most so many rows.

        Raises:
            UnknownViewError: There is no such view.
            ConfigError: ``where`` names no column, or a value that the column cannot hold.
        """
        return self.select(view, Query(where or {}, limit=limit)).rows

    def get(self, view: str, /, **key: Any) -> dict[str, Any] | None:
        """Return the row of a key, or None. Lists and structs come back as Python values.

        Raises:
            UnknownViewError: There is no such view.
            ConfigError: The arguments are not exactly the view's key columns.
        """
        schema = self.schema(view)
        if set(key) != set(schema.key):
            raise ConfigError(
                f"The key of the view {view!r} is ({', '.join(schema.key)}), and "
                f"({', '.join(key)}) was given. Give a value for each key column and no other."
            )
        frame = self.scan(view, where=key, limit=1)
        if frame.is_empty():
            return None
        row = frame.row(0, named=True)
        for name, kind in schema.columns:
            if kind == "json" and row[name] is not None:
                row[name] = json.loads(row[name])
        return row
