"""The test of a batch that failed, as `millstream capture-incident` writes it."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

from millstream.cli.run import find_app
from millstream.ops.incident_replay import replay_batch


def replay_incident(folder: Path, file: Path) -> None:
    """Run the batch in a folder by the app that a file declares; modules beside the file are found.

    Raises:
        Exception: the batch fails, as it failed when it was captured.
        ConfigError: the folder is no incident, the file declares no app of that name, or the program cannot take the
            state of the batch.
    """
    with mock.patch.object(sys, "path", [str(file.parent), *sys.path]):
        app = find_app(file, None)
        replay_batch(folder, app)
