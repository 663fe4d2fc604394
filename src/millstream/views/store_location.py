"""Where an app has its state store: a SQLite file, or a schema of a PostgreSQL database; opening it.

The one module that tells them apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeGuard

from millstream.choices import did_you_mean
from millstream.errors import ConfigError, UnknownViewError
from millstream.views.address import (
    STATE_STORE,
    StateStoreAddress,
    default_schema,
    parse_store,
    split_store_url,
)
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.store import StateStore

STATE_STORE_FILE = "views.db"
_log = logging.getLogger(__name__)

StoreLocation = Path | StateStoreAddress
"""The file of a SQLite store, or the address of one in PostgreSQL."""


def parse_state_store(store: str | None, app: str, *, what: str) -> StateStoreAddress | None:
    """Return the address of an app's state store; None if it is to be a file in the app's folder.

    Raises:
        ConfigError: ``what`` was given something that is not an address; the message has no credentials.
    """
    if parse_store(store, what=what) is None:
        return None
    assert store is not None, "it is an address"
    database, schema, wait_s = split_store_url(store)
    from millstream.views.postgres.connection import check_url  # noqa: PLC0415 - an extra

    check_url(database, what=what)
    return StateStoreAddress(app, database, schema or default_schema(app), wait_s)


def open_state_store(
    location: StoreLocation,
    *,
    readonly: bool = False,
    on_wait: Callable[[str], None] = _log.warning,
) -> StateStore:
    """Open a state store; create it, unless ``readonly``.

    Raises:
        ConfigError: there is none and it is ``readonly``, or it cannot be used.
        RetriableError: the server of a database is away.
    """
    if isinstance(location, Path):
        return SqliteStateStore(location, readonly=readonly)
    from millstream.views.postgres.state_store import PostgresStateStore  # noqa: PLC0415 - an extra

    return PostgresStateStore(location, readonly=readonly, on_wait=on_wait)


def prepare_state_store(location: StoreLocation, on_wait: Callable[[str], None]) -> None:
    """Make sure, before anything else is begun, that a store in a database can be used; wait for it.

    Raises:
        ConfigError: it cannot; the message says what is missing, and what grants it.
        RetriableError: its server is away, and still was after the address's ``wait_s``.
    """
    if not isinstance(location, Path):
        open_state_store(location, on_wait=on_wait).close()


def state_store_exists(location: StoreLocation) -> bool:
    """Return whether an app has a state store there.

    Raises:
        ConfigError: a database cannot be reached with this address.
        RetriableError: its server is away.
    """
    if isinstance(location, Path):
        return location.exists()
    return bool(state_stores_of(location.database.url, location.app, location.schema))


def state_stores_of(
    url: str, app: str | None = None, schema: str | None = None
) -> list[StateStoreAddress]:
    """Return the state stores of a database, by app; of one app, or in one schema, if it is named.

    Raises:
        ConfigError: the database cannot be reached with this address.
        RetriableError: its server is away.
    """
    from millstream.views.postgres.state_store import find_state_stores  # noqa: PLC0415 - an extra

    database, named, wait_s = split_store_url(url)
    found = find_state_stores(database, schema or named, wait_s)
    return [one for one in found if app in (None, one.app)]


def find_state_store_at(url: str, app: str) -> StateStoreAddress:
    """Return the address of an app's state store in a database.

    Raises:
        UnknownViewError: the database has none of such an app.
        ConfigError: it has several, in several schemas, or cannot be reached.
        RetriableError: its server is away.
    """
    everything = state_stores_of(url)
    found = [one for one in everything if one.app == app]
    if len(found) == 1:
        return found[0]
    shown = split_store_url(url)[0].shown
    if found:
        schemas = ", ".join(one.schema for one in found)
        raise ConfigError(
            f"{shown} has state of the app {app!r} in the schemas {schemas}. Say which: ?schema=NAME."
        )
    known = [one.app for one in everything]
    raise UnknownViewError(
        f"{shown} has no state of an app {app!r}; there is state of: {', '.join(known) or 'none'}. Correct "
        f"the app or the address, or run the app first.{did_you_mean(app, known)}"
    )


def place_of(location: StoreLocation) -> Path | StateStoreAddress:
    """Return what `millstream reset` is told: the app's folder, or the address."""
    return location.parent if isinstance(location, Path) else location


def is_database(store: str | None) -> TypeGuard[str]:
    """Return whether an option names a database, and not the app's folder."""
    return store is not None and store != STATE_STORE
