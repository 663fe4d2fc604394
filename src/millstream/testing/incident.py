"""The test of a batch that failed, as `millstream capture-incident` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import polars as pl

from millstream.cli.run import find_app
from millstream.ops.incident_replay import read_note, replay_batch


def replay_incident(folder: Path, file: Path) -> dict[str, pl.DataFrame]:
    """Run the batch in a folder by the app that a file declares; modules beside the file are found.

    These are imported anew, whatever has been imported under their names before, such as by the test of another incident.
    Return the rows that the batch sets in each view, by its name. The views are empty before.

    Raises:
        Exception: the batch fails, as it failed when it was captured. Of a batch that was committed: the user's code fails
            on a row of it, which became a dead letter.
        ConfigError: the folder is no incident, the file declares no app of that name, or the program cannot take the
            state of the batch.
    """
    name = read_note(folder)["app"]
    with mock.patch.object(sys, "path", [str(file.parent), *sys.path]), _fresh_modules(folder):
        return replay_batch(folder, find_app(file, name))


@contextmanager
def _fresh_modules(folder: Path) -> Iterator[None]:
    """Let the modules that were captured be imported anew in the block; afterwards those of before are there."""
    code = folder / "code"
    own = {path.relative_to(code).parts[0].removesuffix(".py") for path in code.rglob("*.py")}

    def take() -> dict[str, ModuleType]:
        found = [name for name in sys.modules if name.partition(".")[0] in own]
        return {name: sys.modules.pop(name) for name in found}

    before = take()
    try:
        yield
    finally:
        take()
        sys.modules.update(before)
