"""The folders of an app's other versions: ``next/``, which is being computed, and ``previous/``, which ran before.

``previous/`` is made by a deployment (`ops/previous_version.py`) under the name ``previous.new/``, together with the file
``kept-until.json``, which also says which run replaces it. It gets its name once that run has switched, which the state
store says: it stores the run's number in the transaction of the switch, and no other run changes it. So what was kept before
is there until then, and an interrupted deployment or rollback can be repeated:

==================================================  ================================================================
a crash after                                       leaves
==================================================  ================================================================
1. a part of ``previous.new/`` is there             no ``kept-until.json`` in it: it is removed
2. all of it is there                               the last switch was of another run: it is removed
3. the transaction of the switch is durable         the last switch was of that run: it becomes ``previous/``
4. ``previous/`` is renamed to ``….dropped/``       the same
5. ``previous.new/`` is renamed to ``previous/``    all is done
==================================================  ================================================================

Both folders are removed by a rename first, so they are there as a whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

from millstream.log.files import DISK, replace_file

NEXT_FOLDER = "next"
PREVIOUS_FOLDER = "previous"
PREVIOUS_NEW_FOLDER = "previous.new"
_NOTE = "kept-until.json"


def write_kept_until(
    folder: Path, until: datetime, run: int, *, filled_at: str | None = None
) -> None:
    """Complete the ``previous.new/`` of an app's folder: until when it is kept, and which run replaces it.

    ``filled_at`` is when that run fills what is new, if nobody asked for a deployment.
    """
    text = json.dumps({"until": until.isoformat(), "run": run, "filled_at": filled_at})
    # Every run reads it: after a loss of power, an empty one would stop them all.
    replace_file(DISK, folder / PREVIOUS_NEW_FOLDER / _NOTE, text.encode())


def settle_previous(folder: Path, switched_by: int | None) -> None:
    """Let ``previous.new/`` become ``previous/`` if the run that has switched last replaces it; else remove it."""
    made = folder / PREVIOUS_NEW_FOLDER
    try:
        run = json.loads((made / _NOTE).read_text()).get("run")
    except FileNotFoundError:
        run = None
    if run is None or run != switched_by:
        shutil.rmtree(made, ignore_errors=True)
        return
    remove_version(folder, PREVIOUS_FOLDER)
    made.rename(folder / PREVIOUS_FOLDER)
    DISK.sync_folder(folder)


def kept_until(folder: Path) -> datetime | None:
    """Return until when an app's folder has a version to go back to; None if it has none."""
    values = _note(folder)
    return None if values is None else datetime.fromisoformat(values["until"])


def kept_from_before_fill(folder: Path) -> str | None:
    """Return when a run filled what was new in place of the version that is kept; None if a deployment took its place."""
    values = _note(folder)
    return None if values is None else values.get("filled_at")


def _note(folder: Path) -> dict[str, Any] | None:
    try:
        values: dict[str, Any] = json.loads((folder / PREVIOUS_FOLDER / _NOTE).read_text())
    except FileNotFoundError:
        return None
    return values


def remove_version(folder: Path, name: str) -> None:
    """Remove one of these folders of an app, if it is there."""
    dropped = folder / f"{name}.dropped"
    shutil.rmtree(dropped, ignore_errors=True)
    if (folder / name).exists():
        (folder / name).rename(dropped)
        DISK.sync_folder(folder)
        shutil.rmtree(dropped)


def drop_expired(folder: Path, now: datetime) -> None:
    """Remove the version that an app's folder keeps, if its time has run out."""
    until = kept_until(folder)
    if until is not None and until <= now:
        remove_version(folder, PREVIOUS_FOLDER)
