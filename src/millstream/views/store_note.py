"""The file ``state-store`` in an app's folder: it says that the app's state store is in a database.

Commands on the driver's machine find the store by it, with credentials from PGPASSWORD or ~/.pgpass. And a
run whose app names another store than its state is in does not begin from nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

from millstream.errors import ConfigError
from millstream.log.files import DISK, replace_file
from millstream.views.address import StateStoreAddress, default_schema, split_store_url
from millstream.views.runs.control_files import reset_command
from millstream.views.store_location import (
    STATE_STORE_FILE,
    StoreLocation,
    open_state_store,
)

STORE_NOTE_FILE = "state-store"


def note_store(folder: Path, location: StoreLocation) -> None:
    """Write where the app has its state store, once a run has begun there."""
    if isinstance(location, Path) or (folder / STORE_NOTE_FILE).exists():
        return
    text = json.dumps({"app": location.app, "url": location.option}) + "\n"
    replace_file(DISK, folder / STORE_NOTE_FILE, text.encode())


def noted_store(folder: Path) -> StateStoreAddress | None:
    """Return the address of the state store of the app in a folder; None if it is a file there."""
    try:
        text = (folder / STORE_NOTE_FILE).read_text()
    except FileNotFoundError:
        return None
    try:
        noted = json.loads(text)
        app = noted["app"]
        database, schema, wait_s = split_store_url(noted["url"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / STORE_NOTE_FILE} cannot be read: {error}. Remove it, and name the store: --store URL."
        ) from error
    return StateStoreAddress(app, database, schema or default_schema(app), wait_s)


def store_location(folder: Path) -> StoreLocation:
    """Return where the app in a folder has its state store."""
    return noted_store(folder) or folder / STATE_STORE_FILE


def check_same_store(app: str, folder: Path, location: StoreLocation) -> None:
    """Make sure that an app has no state in another store than the one that it names.

    Raises:
        ConfigError: it has.
    """
    before = noted_store(folder)
    file = folder / STATE_STORE_FILE
    if isinstance(location, Path):
        if before is not None:
            raise ConfigError(
                f"The state of the app {app!r} is in {before}, and the app names no store. Give it "
                f"store={before.option!r} (with a user), or start over: {reset_command(before)}."
            )
        return
    if before is not None and _noted(before) != _noted(location):
        raise ConfigError(
            f"The state of the app {app!r} is in {before}, and the app names {location}. If the database was "
            f"moved there with all that it holds, remove {folder / STORE_NOTE_FILE}. Otherwise name the one before, or "
            f"start over: {reset_command(before)}."
        )
    if before is None and file.exists():
        with open_state_store(file) as store:
            held = store.last_batch_id(app)
        if held is not None:
            raise ConfigError(
                f"The state of the app {app!r} is in {file}, with batches up to {held}, and the app names "
                f"{location}. Leave out store=, or start over there: {reset_command(folder)}."
            )


def _noted(address: StateStoreAddress) -> tuple[str, str, str]:
    return (address.app, address.database.shown, address.schema)
