"""Reading views from anywhere: another thread, another process, a notebook.

:func:`view` finds a view among the apps of a log folder, or in a database, and opens its store for
reading. What it returns sees whole batches only, and never holds up the job that writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import polars as pl

from millstream.choices import did_you_mean
from millstream.client.default_log import default_log
from millstream.errors import ConfigError, UnknownViewError
from millstream.views.address import postgres_address, split_store_url
from millstream.views.coverage import (
    CoverageSpan,
    PartialOutputWarning,
    partial_note,
    warn_if_partial,
)
from millstream.views.query import Query, ViewReader, check_view_id
from millstream.views.schema import ViewSchema
from millstream.views.store_location import (
    STATE_STORE_FILE,
    StoreLocation,
    find_state_store_at,
    is_database,
    open_state_store,
    state_stores_of,
)
from millstream.views.store_note import STORE_NOTE_FILE, store_location
from millstream.views.view_display import ViewPlot, plot_of, show_table


def state_store_path(log: Path | str, app: str) -> Path:
    """Return the path of an app's view store in a log folder."""
    return Path(log) / "apps" / app / STATE_STORE_FILE


def apps_with_state(log: Path | str) -> list[str]:
    """Return the names of the apps of a log folder that have a view store, sorted.

    It may be in a database, which the folder names.
    """
    apps = Path(log) / "apps"
    names = (STATE_STORE_FILE, STORE_NOTE_FILE)
    return sorted({path.parent.name for name in names for path in apps.glob(f"*/{name}")})


def state_store_location(log: Path | str, app: str) -> StoreLocation:
    """Return where the view store of an app of a log folder is: there, or in a database."""
    return store_location(Path(log) / "apps" / app)


def find_state_store(log: Path | str, app: str, store: str | None = None) -> StoreLocation:
    """Return where the view store of an app is; ``store`` names a database that has it.

    Raises:
        UnknownViewError: The log folder, or the database, has no views of such an app.
    """
    if is_database(store):
        return find_state_store_at(store, app)
    known = apps_with_state(log)
    if app not in known:
        raise UnknownViewError(
            f"The log folder {str(log)!r} has no views of an app {app!r}; there are views of: "
            f"{', '.join(known) or 'none'}. Correct the app or the folder, or run the app first."
            f"{did_you_mean(app, known)}"
        )
    return state_store_location(log, app)


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
    def source(self) -> ViewReader:
        """The store that the view is read from."""
        return self._store

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

    def plot(
        self, x: str | None = None, y: str | None = None, *, by: str | None = None
    ) -> ViewPlot:
        """Plot the view over time, in a notebook: ``pip install "millstream[notebook]"``. It is updated as the view changes.

        Args:
            x: The column of times; by default the first of the key.
            y: The column of numbers; by default the first that is not in the key.
            by: A line for each value of this column; by default what is left of the key, if that is one column.

        At most the newest 5,000 rows are shown. ``plot().chart()`` is Altair's chart, to be changed or saved.

        Raises:
            ConfigError: there is no such column.
        """
        return plot_of(self._store, self.name, x, y, by)

    def _ipython_display_(self) -> None:
        show_table(self._store, self.name)

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
            own store, or the URL of a PostgreSQL database. Also the URL of a database that is the
            app's own store: ``App(store=…)``.

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
    if is_database(store):
        return _open_database_view(name, store, app)
    log = default_log() if log is None else log
    if app is not None:
        find_state_store(log, app)
    found: list[View] = []
    others: list[str] = []
    databases: set[str] = set()
    for candidate in apps_with_state(log) if app is None else [app]:
        state_store = open_state_store(state_store_location(log, candidate), readonly=True)
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
    elsewhere = f" Views are also kept in {', '.join(sorted(databases))}: give it, with its user, as store= (--store)."
    raise UnknownViewError(
        f"There is no view {name!r} in the log folder {str(log)!r}; there are: "
        f"{', '.join(others) or 'none yet'}. Correct the name or the folder, or run the pipeline "
        f"that fills the view.{elsewhere if databases else ''}"
        f"{did_you_mean(name, others)}"
    )


@dataclass(frozen=True)
class DatabaseViews:
    """Views of a database, opened for reading: those of an app's own store, or of several apps beside theirs.

    ``app`` is None of the latter; ``owners`` are the apps by view.
    """

    store: ViewReader
    app: str | None
    owners: Mapping[str, str]


def open_database(url: str, app: str | None = None) -> list[DatabaseViews]:
    """Open all views of a database, or those that may be of one app. The caller closes the stores.

    Raises:
        ConfigError: it cannot be reached with this address, or has none.
        RetriableError: its server is away.
    """
    from millstream.views.postgres.reader import (  # noqa: PLC0415 - an extra
        PostgresViewReader,
        holds_views,
    )

    database, schema, _ = split_store_url(url)
    found: list[DatabaseViews] = []
    with ExitStack() as opened:
        for address in state_stores_of(url, app):
            store = opened.enter_context(open_state_store(address, readonly=True))
            owners = {one.name: address.app for one in store.views()}
            found.append(DatabaseViews(store, address.app, owners))
        if schema is None and (not found or holds_views(database)):
            reader = opened.enter_context(PostgresViewReader(database.url))
            found.append(DatabaseViews(reader, None, reader.apps()))
        if not found:
            raise UnknownViewError(
                f"{database.shown} has no state of {f'an app {app!r}' if app else 'any app'} in the schema "
                f"{schema!r}. Correct the address, or run the app first."
            )
        opened.pop_all()
    return found


def _open_database_view(name: str, url: str, app: str | None) -> View:
    with ExitStack() as opened:
        stores = open_database(url, app)
        for each in stores:
            opened.callback(each.store.close)
        holding = [each for each in stores if name in each.owners]
        found = [each for each in holding if app in (None, each.owners[name])]
        if len(found) == 1:
            opened.pop_all()
            for each in stores:
                if each is not found[0]:
                    each.store.close()
            return View(found[0].store, name, found[0].owners[name])
        if not holding and len(stores) == 1:
            stores[0].store.schema(name)  # says what there is
    shown = postgres_address(url).shown
    if found:
        raise ConfigError(
            f"Several apps have a view {name!r} in {shown}: {', '.join(e.owners[name] for e in found)}. "
            "Say which with app=, and which schema with ?schema=NAME."
        )
    if holding:
        raise UnknownViewError(
            f"The view {name!r} in {shown} is the app {holding[0].owners[name]!r}'s, not {app!r}'s. Correct "
            "the app or the name."
        )
    others = [f"{owner}/{view}" for each in stores for view, owner in each.owners.items()]
    raise UnknownViewError(
        f"There is no view {name!r} in {shown}; there are: {', '.join(others) or 'none yet'}. Correct the "
        f"name, or run the pipeline that fills the view.{did_you_mean(name, others)}"
    )
