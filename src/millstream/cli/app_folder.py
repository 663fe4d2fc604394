"""Finding an app by its name in the folder of a log, for the commands that look at apps."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from millstream.choices import did_you_mean
from millstream.errors import ConfigError
from millstream.views.runs.failure import last_failure
from millstream.views.store_location import StoreLocation, find_state_store_at, is_database
from millstream.views.store_note import store_location


def app_folder(log: Path, app: str) -> Path:
    """Return the folder of an app; say on standard error if its last run failed.

    Raises:
        ConfigError: the log has no such app; the message lists its apps.
    """
    apps = log / "apps"
    folder = apps / app
    if not folder.is_dir():
        known = sorted(path.name for path in apps.glob("*") if path.is_dir())
        raise ConfigError(
            f"The log {str(log)!r} has no app {app!r} (apps: {', '.join(known) or 'none'}). "
            "Correct the name or --log, or run the app first."
            f"{did_you_mean(app, known)}"
        )
    print_failure(app, folder)
    return folder


def app_store(log: Path, app: str, store: str | None) -> StoreLocation:
    """Return where the state store of an app is; ``store`` names a database that has it.

    Raises:
        ConfigError: there is no such app.
    """
    if is_database(store):
        return find_state_store_at(store, app)
    return store_location(app_folder(log, app))


def print_failure(app: str, folder: Path) -> None:
    """Say on standard error how the last run of an app failed, if it did."""
    failure = last_failure(folder)
    if failure is not None:
        at = datetime.fromtimestamp(failure.at, UTC)
        click.secho(
            f"{app} does not run: {failure.kind}, {at:%Y-%m-%d %H:%M:%S} UTC: "
            f"{failure.reason.rstrip('.')}. {failure.advice}",
            fg="red",
            err=True,
        )
