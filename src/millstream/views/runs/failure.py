"""How the last run of an app failed: what is shown of an app that does not run, and ought to.

A run that ends by an error leaves the file ``failed.json`` in the app's folder. One that was killed
could leave none; what it does leave is the file that said that it runs (``control_files.py``), without the
lock on it. So a crash after each step of a failing end is told apart:

====================================  ==========================================================
step                                  what a crash there leaves
====================================  ==========================================================
1. the error is raised                the running file, without a lock: it was killed
2. ``failed.json`` is in its place    both files; the failure is the newer, and is told
3. the running file is removed        the failure
====================================  ==========================================================

The next run that ends without an error removes the failure; while a run is alive none is told.
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
    """How a run ended that ought not to have. ``at`` is in seconds since 1970, UTC.

    ``kind`` is the name of the error, or "Killed": then ``at`` is when the run began, as nothing
    says when it ended. ``advice`` says what to do.
    """

    at: float
    kind: str
    reason: str
    advice: str


@contextmanager
def record_failure(folder: Path, clock: Callable[[], float] = time.time) -> Iterator[None]:
    """Keep the error by which the block ends, for who looks at the app; forget it when none does.

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
    """Tell how the last run of an app failed; None if it has not, or a run is alive."""
    if active_runs(folder):
        return None
    failed, killed = _read(folder), newest_killed_run(folder)
    if killed is not None and (failed is None or killed.since > failed.at):
        return Failure(
            killed.since,
            "Killed",
            f"the process {killed.pid} is gone and could not say why: it was killed, or the machine "
            "stopped",
            f"Look whether memory ran out, and into {folder / 'spark.log'}. {_RESUME_ADVICE}",
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
        return "It passes: run the app again, it goes on where it was."
    if isinstance(error, CorruptionError):
        return "Keep the bytes, and look at them: `millstream log verify`."
    if isinstance(error, ConfigError):
        return f"Correct the declaration or the setting. {_RESUME_ADVICE}"
    return f"Correct what the error names; {folder / 'spark.log'} has the whole of it. {_RESUME_ADVICE}"
