"""Reading views from anywhere: another thread, another process, a notebook.

:func:`view` finds a view among the apps of a log folder, or in a database, and opens its store for
reading. What it returns sees whole batches only, and never holds up the job that writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import polars as pl

from millstream.choices import did_you_mean
from millstream.client.default_log import default_log
from millstream.errors import ConfigError, UnknownViewError
from millstream.views.address import STATE_STORE
from millstream.views.coverage import (
    CoverageSpan,
    PartialOutputWarning,
    partial_note,
    warn_if_partial,
)
from millstream.views.query import Query, ViewReader, check_view_id
from millstream.views.schema import ViewSchema
from millstream.views.state_store.sqlite_store import SqliteStateStore


def state_store_path(log: Path | str, app: str) -> Path:
    """Return the path of an app's view store in a log folder."""
    return Path(log) / "apps" / app / "views.db"


def apps_with_state(log: Path | str) -> list[str]:
    """Return the names of the apps of a log folder that have a view store, sorted."""
    return sorted(path.parent.name for path in (Path(log) / "apps").glob("*/views.db"))


def find_state_store(log: Path | str, app: str) -> Path:
    """Return where the view store of an app is.

    Raises:
        UnknownViewError: The log folder has no views of such an app.
    """
    known = apps_with_state(log)
    if app not in known:
        raise UnknownViewError(
            f"The log folder {str(log)!r} has no views of an app {app!r}; there are views of: "
            f"{', '.join(known) or 'none'}. Correct the app or the folder, or run the app first."
            f"{did_you_mean(app, known)}"
        )
    return state_store_path(log, app)


class View:
    """A view opened for reading.

    Guarantees: thread-safe; each call sees the state of one commit, the newest at that moment.
    Close it, or use it in a ``with`` statement, to release its file handles.
    """

    def __init__(self, store: ViewReader, name: str, app: str) -> None:
        self._store = store
        self._view_id: str | None = None  # as of the last call of changes()
        self.name = name
        self.app = app

    def __repr__(self) -> str:
        return f"View({self.name!r}, app={self.app!r})"

    @property
    def schema(self) -> ViewSchema:
        """The view's columns, their kinds, and its key."""
        return self._store.schema(self.name)

    @property
    def position(self) -> dict[str, Any]:
        """What of the log the view reflects, where it was written; {} before its first batch."""
        return self._store.position(self.name)

    @property
    def coverage(self) -> tuple[CoverageSpan, ...]:
        """The spans that the view covers: one without ends, if it was always written, by one declaration."""
        return self._store.coverage(self.name)

    @property
    def partial_note(self) -> str | None:
        """A text that says what the view lacks because it was not always written; None if nothing."""
        return partial_note(self.coverage)

    def get(self, **key: Any) -> dict[str, Any] | None:
        """Return the row of a key, or None.

        Raises:
            ConfigError: The arguments are not exactly the view's key columns.
        """
        return self._store.get(self.name, **key)

    def scan(
        self,
        *,
        where: Mapping[str, Any] | None = None,
        between: Mapping[str, tuple[Any, Any]] | None = None,
        order: str | Sequence[str] = (),
        limit: int | None = None,
    ) -> pl.DataFrame:
        """Return the view's rows, typed, all of one commit; by default all, in key order.

        Args:
            where: Only rows where these columns equal these values (None finds nulls).
            between: Only rows where these columns are in ``(from, to)``, half-open; None leaves a
                side open.
            order: Columns to order by, ``-`` before a name for the largest first; what they leave
                open, the key decides.
            limit: At most so many rows.

        Raises:
            ConfigError: Something names no column, or a value that the column cannot hold.

        Example::

            view.scan(between={"window_start": (noon, None)}, order="-window_start", limit=100)
        """
        by = (order,) if isinstance(order, str) else order
        query = Query(where or {}, between or {}, by, limit)
        return self._store.select(self.name, query).rows

    def changes(self, *, since: int = 0, limit: int | None = None) -> pl.DataFrame:
        """Return the changes after change number ``since``: ``_seq, _batch_id, _op``, columns.

        At most ``limit`` of them, the oldest.

        Raises:
            OffsetOutOfRangeError: Those changes are gone, or the view was created again after the last
                call; scan() and go on from the newest.
        """
        found = self._store.changes(self.name, since=since, limit=limit)
        view_id = check_view_id(self._store, self.name, since, self._view_id if since else None)
        self._view_id = view_id or self._view_id
        return found

    def wait_for(
        self,
        *,
        batch_id: int | None = None,
        position: Mapping[str, Any] | None = None,
        timeout_s: float = 10.0,
    ) -> bool:
        """Wait until the view reflects a batch or a position; False if it does not in time."""
        return self._store.wait_for(
            self.name, batch_id=batch_id, position=position, timeout_s=timeout_s
        )

    def close(self) -> None:
        """Release the file handles. Closing twice is allowed."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def view(
    name: str, log: Path | str | None = None, app: str | None = None, *, store: str | None = None
) -> View:
    """Open a view for reading, of a log folder or of a database.

    Args:
        log: The log folder, as the pipeline's ``log=``: by default MILLSTREAM_LOG, or ``./data``.
        app: Whose view; needed only if several apps of the folder have one of that name.
        store: Where the view is kept, as in ``stream.view(…, store=…)``: by default in the app's
            own store, or the URL of a PostgreSQL database.

    Warns:
        PartialOutputWarning: The view was not always written, so rows are missing; the text says since
            when it is complete. So does ``View.partial_note``.

    Raises:
        UnknownViewError: There is no such view; the message lists what there is.
        ConfigError: Several apps have one: name the app. Or the database cannot be reached.
        RetriableError: The database is away.
    """
    opened = open_view(name, log, app, store=store)
    try:
        warn_if_partial(f"The view {name!r} of the app {opened.app!r}", opened.coverage)
    except PartialOutputWarning:  # where warnings are errors
        opened.close()
        raise
    return opened


def open_view(
    name: str, log: Path | str | None, app: str | None = None, *, store: str | None = None
) -> View:
    """Open a view as :func:`view` does, without the warning: the caller reports what it lacks."""
    if store is not None and store != STATE_STORE:
        return _open_database_view(name, store, app)
    log = default_log() if log is None else log
    if app is not None:
        find_state_store(log, app)
    found: list[View] = []
    others: list[str] = []
    databases: set[str] = set()
    for candidate in apps_with_state(log) if app is None else [app]:
        state_store = SqliteStateStore(state_store_path(log, candidate), readonly=True)
        names = [schema.name for schema in state_store.views()]
        databases.update(state_store.databases())
        if name in names:
            found.append(View(state_store, name, candidate))
        else:
            others += [f"{candidate}/{other}" for other in names]
            state_store.close()
    if len(found) == 1:
        return found[0]
    for each in found:
        each.close()
    if found:
        raise ConfigError(
            f"Several apps have a view {name!r}: {', '.join(each.app for each in found)}. "
            "Say which with app=."
        )
    elsewhere = f" Views are also kept in {', '.join(sorted(databases))}: give it with store=."
    raise UnknownViewError(
        f"There is no view {name!r} in the log folder {str(log)!r}; there are: "
        f"{', '.join(others) or 'none yet'}. Correct the name or the folder, or run the pipeline "
        f"that fills the view.{elsewhere if databases else ''}"
        f"{did_you_mean(name, others)}"
    )


def _open_database_view(name: str, url: str, app: str | None) -> View:
    from millstream.views.postgres.reader import PostgresViewReader  # noqa: PLC0415 - an extra

    with ExitStack() as opened:
        store = opened.enter_context(PostgresViewReader(url))
        store.schema(name)  # says what there is, if it is none of them
        owner = store.apps()[name]
        if app in (None, owner):
            opened.pop_all()
            return View(store, name, owner)
    raise UnknownViewError(
        f"The view {name!r} in {store.address.shown} is the app {owner!r}'s, not {app!r}'s. Correct "
        "the app or the name."
    )
