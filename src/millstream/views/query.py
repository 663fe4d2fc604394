"""Reading any view store: queries, their results, and the reader that both kinds of store implement."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Self

import polars as pl

from millstream.errors import ConfigError, OffsetOutOfRangeError
from millstream.views.coverage import CoverageSpan
from millstream.views.position import wait_until
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
    before the first), ``position`` what of the log the rows reflect, where ``coverage`` leaves nothing out.
    ``view_id``: see :func:`view_id_of`.
    """

    schema: ViewSchema
    rows: pl.DataFrame
    newest_change: int
    batch_id: int | None
    position: Mapping[str, Any]
    coverage: tuple[CoverageSpan, ...] = ()
    view_id: str = ""


def view_id_of(checkpoint_id: str | None) -> str:
    """Return the id of the views of a checkpoint; empty before an app's first run.

    A view that is created again under its name numbers its changes from 1 again. It has another id, as
    an app that starts over has another checkpoint.
    """
    return "" if checkpoint_id is None else sha256(checkpoint_id.encode()).hexdigest()[:12]


def check_view_id(store: ViewReader, view: str, since: int, view_id: str | None) -> str:
    """Make sure that a change number belongs to the view as it is now, if its id is known.

    Returns the view's id. Call it after the changes were read: an id never comes back.

    Raises:
        OffsetOutOfRangeError: the view was created again since; its changes are numbered from 1 again.
    """
    found = store.view_id(view)
    if view_id and view_id != found:
        newest = store.newest_changes().get(view, 0)
        raise OffsetOutOfRangeError(
            f"The changes of the view {view!r} since {since} cannot be read: the view was created again, and "
            f"its changes are numbered from 1 again. Read the whole view with scan() and go on from there; "
            f"its newest change is {newest}.",
            start=1,
            end=newest + 1,
        )
    return found


class ViewReader(ABC):
    """A view store as readers see it: SQLite or PostgreSQL.

    Guarantees: thread-safe; each call sees the state of one commit, the newest.
    """

    _poll_s: float
    """How long :meth:`wait_for` pauses between two looks."""

    @abstractmethod
    def views(self) -> list[ViewSchema]:
        """Return the schemas of all views of this store, by name."""

    @abstractmethod
    def schema(self, view: str) -> ViewSchema:
        """Return the schema of one view.

        Raises:
            UnknownViewError: There is no such view; the message lists those there are.
        """

    @abstractmethod
    def count(self, view: str) -> int:
        """Return how many rows a view has.

        Raises:
            UnknownViewError: There is no such view.
        """

    @abstractmethod
    def version(self) -> tuple[int, ...]:
        """Return numbers that differ after every commit, run and amendment. Cheap to call."""

    @abstractmethod
    def newest_changes(self) -> dict[str, int]:
        """Return the number of each view's newest change; 0 before its first."""

    @abstractmethod
    def view_id(self, view: str) -> str:
        """Return the id of a view: see :func:`view_id_of`; "" before a first run."""

    @abstractmethod
    def select(self, view: str, query: Query) -> QueryResult:
        """Return the rows that a query selects, typed, and what they reflect.

        Raises:
            UnknownViewError: There is no such view.
            ConfigError: The query names no column, or a value that the column cannot hold.
        """

    @abstractmethod
    def changes(self, view: str, *, since: int = 0, limit: int | None = None) -> pl.DataFrame:
        """Return every change after the change number ``since``, oldest first; at most ``limit``.

        Columns: ``_seq`` (rising by one), ``_batch_id``, ``_op`` ("upsert" or "delete"), then the
        view's own; a delete has its key columns only, the others are null.

        Raises:
            UnknownViewError: There is no such view.
            OffsetOutOfRangeError: Changes after ``since`` are gone, or ``since`` was never reached:
                read the whole view with scan() and go on from the newest change.
        """

    @abstractmethod
    def coverage(self, view: str) -> tuple[CoverageSpan, ...]:
        """Return the spans that a view covers, in order; () of a view that is no output of an app."""

    @abstractmethod
    def close(self) -> None:
        """Close every connection. Closing twice is allowed."""

    @abstractmethod
    def _last_committed(self, view_or_app: str) -> tuple[int | None, dict[str, Any]]:
        """Return the last batch that a view, or the newest job of an app, reflects, and its position."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def position(self, view_or_app: str) -> dict[str, Any]:
        """Return what of the log a view (or the newest job of an app) reflects; {} before that.

        The position of a view that its app has left out stays where it was then.
        """
        return self._last_committed(view_or_app)[1]

    def wait_for(
        self,
        view_or_app: str,
        *,
        batch_id: int | None = None,
        position: Mapping[str, Any] | None = None,
        timeout_s: float = 10.0,
    ) -> bool:
        """Wait until a view reflects a batch, or a position of the log; False after the timeout.

        A position is reached when each of its numbers is; numbers it does not name do not matter.
        """
        return wait_until(
            lambda: self._last_committed(view_or_app),
            batch_id,
            position,
            pause_s=self._poll_s,
            timeout_s=timeout_s,
        )

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
