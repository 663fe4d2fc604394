"""The apps of a log folder and their view stores, each opened for reading at its first use.

If an app's folder is deleted and created again while a server runs, its store is opened again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from millstream.choices import did_you_mean
from millstream.errors import ConfigError, MillstreamError, UnknownViewError
from millstream.log.reader import LogReader
from millstream.views.position import check_partitions, check_topics
from millstream.views.postgres.reader import PostgresViewReader
from millstream.views.query import ViewReader
from millstream.views.reader import (
    DatabaseViews,
    apps_with_state,
    open_database,
    state_store_location,
)
from millstream.views.schema import ViewSchema
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import StoreLocation, open_state_store


@dataclass(frozen=True)
class ViewRef:
    """A view, its app, and the store that keeps it. ``store_name``: see :meth:`ViewCatalog.store`."""

    app: str
    schema: ViewSchema
    store_name: str
    store: ViewReader


class ViewCatalog:
    """The views of a log folder, and of databases that are given by URL. Thread-safe."""

    def __init__(self, log: Path, databases: Sequence[str] = ()) -> None:
        """Open the databases.

        Raises:
            ConfigError: a database cannot be reached with its address, or holds no views.
            RetriableError: its server is not available.
        """
        self.log = log
        self._lock = threading.Lock()
        self._state_stores: dict[str, tuple[int, StateStore]] = {}
        # Views beside the apps' own stores; and apps whose own store is a database.
        self._databases: list[DatabaseViews] = []
        self._apps_in_databases: dict[str, StateStore] = {}
        for url in databases:
            for opened in open_database(url):
                if isinstance(opened.store, StateStore):
                    self._apps_in_databases[opened.app or ""] = opened.store
                else:
                    self._databases.append(opened)

    def close(self) -> None:
        """Close every store."""
        with self._lock:
            stores, self._state_stores = self._state_stores, {}
        for _, store in stores.values():
            store.close()
        for database in self._databases:
            database.store.close()
        for state_store in self._apps_in_databases.values():
            state_store.close()

    def apps(self) -> list[str]:
        """Return the names of the apps that have a view store, sorted."""
        return sorted({*apps_with_state(self.log), *self._apps_in_databases})

    def folder(self, app: str) -> Path:
        """Return the folder of an app."""
        return self.log / "apps" / app

    def state_store(self, app: str) -> StateStore:
        """Return the view store of an app.

        Raises:
            UnknownViewError: there is no such app.
        """
        if app in self._apps_in_databases:
            return self._apps_in_databases[app]
        # A name such as ".." must not lead out of the folder.
        location = state_store_location(self.log, app) if app in self.apps() else None
        inode = _inode(location)
        if location is None or inode is None:
            raise UnknownViewError(
                f"The log folder {str(self.log)!r} has no views of an app {app!r}; there are views "
                f"of: {', '.join(self.apps()) or 'none'}. Correct the app, or run it first."
                f"{did_you_mean(app, self.apps())}"
            )
        with self._lock:
            known = self._state_stores.get(app)
            if known is not None and known[0] == inode:
                return known[1]
            store = open_state_store(location, readonly=True)
            self._state_stores[app] = (inode, store)
        if known is not None:
            known[1].close()
        return store

    def store(self, store_name: str) -> ViewReader:
        """Return the store of a name: ``app:NAME``, or ``database:NUMBER`` in the order given."""
        kind, _, name = store_name.partition(":")
        return self.state_store(name) if kind == "app" else self._databases[int(name)].store

    def views(self) -> list[ViewRef]:
        """Return all views there are, by app and name."""
        found = []
        for app in self.apps():
            store = self.state_store(app)
            found += [ViewRef(app, schema, f"app:{app}", store) for schema in store.views()]
        for number, database in enumerate(self._databases):
            reader = database.store
            assert isinstance(reader, PostgresViewReader), "the others are apps"
            owners = reader.apps()
            found += [
                ViewRef(owners[schema.name], schema, f"database:{number}", reader)
                for schema in reader.views()
            ]
        return sorted(found, key=lambda view: (view.app, view.schema.name))

    def find(self, view: str, app: str | None = None) -> ViewRef:
        """Return the view of this name.

        Raises:
            UnknownViewError: there is none; the message lists those there are.
            ConfigError: several apps have one: give ``app``.
        """
        views = self.views()
        found = [v for v in views if v.schema.name == view and app in (None, v.app)]
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigError(
                f"Several apps have a view {view!r}: {', '.join(v.app for v in found)}. Say which "
                "with app=NAME."
            )
        names = ", ".join(f"{v.app}/{v.schema.name}" for v in views) or "none yet"
        raise UnknownViewError(
            f"There is no view {view!r}{f' of an app {app!r}' if app else ''}; there are: {names}. "
            "Correct the name, or run the pipeline that fills the view."
            f"{did_you_mean(view, (v.schema.name for v in views))}"
        )

    def check_position(self, view: ViewRef, wanted: Mapping[str, Mapping[str, int]]) -> None:
        """Make sure that a view can reach a position, as far as that can be seen from here.

        Raises:
            ConfigError: its app does not read a topic of the position, or the topic has no such partition.
        """
        try:
            store = self.state_store(view.app)
        except UnknownViewError:  # the view is in a database, and its app runs elsewhere
            return
        read = store.topics_read(view.app)
        if read is None:
            return
        check_topics(wanted, view.app, read)
        in_folder = store.log_brokers(view.app) is None
        count_of = self._partitions_of if in_folder else _unknown_count
        check_partitions(wanted, store.position(view.app), count_of)

    def _partitions_of(self, topic: str) -> int | None:
        try:
            with closing(LogReader(self.log)) as reader:
                return len(reader.offsets(topic))
        except (MillstreamError, OSError):
            return None


def _unknown_count(_topic: str) -> int | None:
    return None


def _inode(location: StoreLocation | None) -> int | None:
    """Return what tells a file from another one under its name; None if there is none."""
    if not isinstance(location, Path):
        return None if location is None else 0
    try:
        return location.stat().st_ino
    except FileNotFoundError:
        return None
