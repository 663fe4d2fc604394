"""Finding an app by its name in the folder of a log, for the commands that look at apps."""

from __future__ import annotations

from pathlib import Path

from millstream.choices import did_you_mean
from millstream.errors import ConfigError


def app_folder(log: Path, app: str) -> Path:
    """Give the folder of an app.

    Raises:
        ConfigError: the log has no such app; the message lists those there are.
    """
    apps = log / "apps"
    home = apps / app
    if not home.is_dir():
        known = sorted(path.name for path in apps.glob("*") if path.is_dir())
        raise ConfigError(
            f"The log {str(log)!r} has no app {app!r} (apps: {', '.join(known) or 'none'}). "
            "Correct the name or --log, or run the app first."
            f"{did_you_mean(app, known)}"
        )
    return home
