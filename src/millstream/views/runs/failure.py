"""The failure of an app's last run.

A run that ends with an error leaves the file ``failed.json`` in the app's folder. A run that was killed
leaves its ``running-<number>.json`` (``control_files.py``), without a lock on it. So a crash after each
step of a failing run is recognised:

====================================  ==========================================================
step                                  what a crash after it leaves
====================================  ==========================================================
1. the error is raised                the running file, without a lock: it was killed
2. ``failed.json`` is in its place    both files; the failure is newer, and is reported
3. the running file is removed        the failure
====================================  ==========================================================

The next run that ends without an error removes the failure. While a run is alive, none is reported.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from millstream.errors import (
    ConfigError,
    CorruptionError,
    FencedError,
    MillstreamError,
    RetriableError,
)
from millstream.views.runs.control_files import active_runs, newest_killed_run

_NAME = "failed.json"
_REASON_CHARS_MAX = 2000
_RESUME_ADVICE = "Then run the app again: it goes on where it was."


@dataclass(frozen=True)
class Failure:
    """The failure of a run. ``at`` is in seconds since 1970, UTC.

    ``kind`` is the name of the error, or "Killed": then ``at`` is when the run began, as the time of its end
    is not known. ``advice`` says what to do.
    """

    at: float
    kind: str
    reason: str
    advice: str


@contextmanager
def record_failure(folder: Path, clock: Callable[[], float] = time.time) -> Iterator[None]:
    """Record the error that ends the block; remove the record if the block ends without one.

    A run that was replaced by a newer one has not failed: the newer one goes on.
    """
    try:
        yield
    except FencedError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, MillstreamError) else f"{error!r}"
        _write(
            folder,
            Failure(
                clock(), type(error).__name__, reason[:_REASON_CHARS_MAX], _advice(error, folder)
            ),
        )
        raise
    (folder / _NAME).unlink(missing_ok=True)


def last_failure(folder: Path) -> Failure | None:
    """Return the failure of an app's last run; None if it has not failed, or a run is alive."""
    if active_runs(folder):
        return None
    failed, killed = _read(folder), newest_killed_run(folder)
    if killed is not None and (failed is None or killed.since > failed.at):
        return Failure(
            killed.since,
            "Killed",
            f"the process {killed.pid} is gone and could not say why: it was killed, or the machine "
            "stopped",
            f"Check whether memory ran out, and read {folder / 'spark.log'}. {_RESUME_ADVICE}",
        )
    return failed


def _write(folder: Path, failure: Failure) -> None:
    fresh = folder / f"{_NAME}.{os.getpid()}"
    try:
        fresh.write_text(json.dumps(asdict(failure)))
        fresh.replace(folder / _NAME)
    except OSError:
        pass  # a full disk, most likely; the error itself is what its caller must see


def _read(folder: Path) -> Failure | None:
    try:
        return Failure(**json.loads((folder / _NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _advice(error: Exception, folder: Path) -> str:
    if isinstance(error, RetriableError):
        return "The cause is temporary: run the app again, it goes on where it was."
    if isinstance(error, CorruptionError):
        return "Keep the bytes, and look at them: `millstream log verify`."
    if isinstance(error, ConfigError):
        return f"Correct the declaration or the setting. {_RESUME_ADVICE}"
    return f"Correct what the error names; {folder / 'spark.log'} has the whole report. {_RESUME_ADVICE}"
