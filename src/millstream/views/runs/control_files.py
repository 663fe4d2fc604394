"""Small files in an app's folder that say who runs it, and ask it to stop.

A run holds a lock on a file of its own, ``running-<number>.json``, as long as its process lives, so a run
that was killed does not look alive. The file ``stop-request`` asks a run to stop: it finishes the running
batch, ends, and removes the file. The file ``reset-begun`` says that the app is being reset
(``ops/reset.py``), so that no run starts on what is left.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from millstream.errors import ConfigError, ConflictError
from millstream.log.files import DISK

_PREFIX = "running-"
_DEPLOYMENT = "deployment"


@dataclass(frozen=True)
class ActiveRun:
    """A run that is alive. ``since`` is in seconds since 1970, UTC."""

    run: int
    pid: int
    since: float


@contextmanager
def hold_run_lock(folder: Path, run: int) -> Iterator[None]:
    """Mark this process as the app's run until the block ends; remove the files of killed runs."""
    for older in folder.glob(f"{_PREFIX}*.json"):
        if _number(older) < run and not _is_held(older):
            older.unlink(missing_ok=True)
    path = folder / f"{_PREFIX}{run}.json"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump(asdict(ActiveRun(run, os.getpid(), time.time())), file)
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def hold_deployment(folder: Path) -> Iterator[None]:
    """Be the only deployment or comparison of an app until the block ends: all compute in one folder.

    Raises:
        ConflictError: there is another.
    """
    if not folder.exists():  # the app has never run, and nothing is computed
        yield
        return
    with (folder / _DEPLOYMENT).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConflictError(
                f"Another deployment or comparison of the app in {folder} is at work. Wait for it, or stop it, and do "
                "this again: it goes on with what was computed."
            ) from None
        yield


def is_deploying(folder: Path) -> bool:
    """Return whether a deployment or a comparison of an app is at work. Changes nothing."""
    path = folder / _DEPLOYMENT
    return path.exists() and _is_held(path)


def active_runs(folder: Path) -> list[ActiveRun]:
    """Return the runs of an app that are alive, oldest first; more than one while one takes over.

    Changes nothing.
    """
    found = []
    for path in folder.glob(f"{_PREFIX}*.json"):
        with suppress(FileNotFoundError, ValueError, TypeError):
            if _is_held(path):  # otherwise its process was killed
                found.append(ActiveRun(**json.loads(path.read_text())))
    return sorted(found, key=lambda running: running.run)


def newest_killed_run(folder: Path) -> ActiveRun | None:
    """Return the newest run whose process is gone and whose file is still there."""
    found = []
    for path in folder.glob(f"{_PREFIX}*.json"):
        with suppress(FileNotFoundError, ValueError, TypeError):
            if not _is_held(path):
                found.append(ActiveRun(**json.loads(path.read_text())))
    return max(found, key=lambda running: running.run, default=None)


def _number(path: Path) -> int:
    number = path.stem.removeprefix(_PREFIX)
    return int(number) if number.isdecimal() else 0


def _is_held(path: Path) -> bool:
    """Return whether a living process holds the lock on a file."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def stop_request_file(folder: Path) -> Path:
    """Return the file that asks the app's run to stop."""
    return folder / "stop-request"


def stop_acknowledged_file(folder: Path) -> Path:
    """Return the file by which the planner says that it begins no further batch."""
    return folder / "stop-acknowledged"


def reset_marker(folder: Path) -> Path:
    """Return the file that says that the app is being reset."""
    return folder / "reset-begun"


def write_reset_marker(folder: Path) -> None:
    """Mark durably that a reset has begun. The caller looks for runs afterwards."""
    reset_marker(folder).touch()
    DISK.sync_folder(folder)


def check_no_reset(folder: Path) -> None:
    """Make sure that the app is not being reset.

    Raises:
        ConfigError: it is, or a reset was interrupted.
    """
    if reset_marker(folder).exists():
        raise ConfigError(
            f"A reset of the app in {folder} was begun and has not ended, so part of its state is gone. "
            f"End it: {reset_command(folder)}."
        )


class ResetTarget(Protocol):
    """Where the state of an app is, if not in a folder. As text, it has no credentials."""

    @property
    def reset_command(self) -> str: ...


def reset_command(place: Path | ResetTarget) -> str:
    """Return the command that removes an app's state, so that the app is built again from the log."""
    if not isinstance(place, Path):
        return place.reset_command
    return f"`millstream reset {place.name} --log {shlex.quote(str(place.parent.parent))}`"
