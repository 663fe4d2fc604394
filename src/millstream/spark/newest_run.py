"""Keeps the state from a run that was replaced: a process that slept wakes up and goes on with its batch.

Outputs refuse such a run by their fences, but only when it commits. Before that its stages would have
written their state, in the place of what the newer run has there for the same batch. So each run leaves
its number beside the state, and stages ask for it.

What a crash after each step leaves behind:

1. The run has its number in the home: the older run is refused when it commits; the next start goes on.
2. The number stands beside the state: the older run is refused by stages, too.
"""

from __future__ import annotations

from pathlib import Path

from millstream.errors import FencedError

_NAME = "newest-run"


def announce(runs: Path, number: int) -> None:
    """Leave a run's number where its stages keep their runs of state."""
    runs.mkdir(parents=True, exist_ok=True)
    beside = runs / f"{_NAME}.new"
    beside.write_text(str(number))
    beside.replace(runs / _NAME)


def require_newest(runs: Path, number: int) -> None:
    """Make sure that no newer run has begun.

    Raises:
        FencedError: one has.
    """
    try:
        newest = int((runs / _NAME).read_text())
    except FileNotFoundError:
        return
    if newest > number:
        raise FencedError(
            f"Run {number} of the job was replaced by run {newest}, so its stages do nothing more. "
            "Close this run; the newer one goes on."
        )
