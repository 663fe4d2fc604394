"""The folder that a demo works in: its own, so that starting anew can empty it safely.

A small file says that the demo made the folder, with which input, and whether its run is complete.
A folder that holds anything and lacks this file belongs to somebody else and is never touched.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from millstream.errors import ConfigError

MARKER = "millstream-demo.json"
_HALF_WRITTEN = f"{MARKER}.new"


@dataclass(frozen=True)
class DemoRun:
    """What the mark says: which demo, with which input, and whether it came to its end."""

    demo: str
    input: dict[str, Any]
    completed: bool = False

    @property
    def options(self) -> str:
        """How the command line asks for the input."""
        words = [f"--{n}" if v is True else f"--{n} {v}" for n, v in self.input.items() if v]
        return " ".join(words)


def prepare(
    folder: Path,
    run: DemoRun,
    *,
    fresh: bool = False,
    clear: Callable[[bool], None] = lambda _ours: None,
) -> bool:
    """Make the folder ready for a run; return True if it goes on with one that was interrupted.

    A completed run, or ``fresh``, starts over in an emptied folder.

    Args:
        clear: Called before a run starts over, for what of it lies elsewhere: to empty it if it is
            ours, made by a run with the same ``log``, and else to make sure that it is empty.

    Raises:
        ConfigError: The folder holds other things, or an unfinished run with another input.
    """
    known = _read(folder)
    if known is None:
        others = {path.name for path in folder.iterdir()} if folder.exists() else set()
        if others - {_HALF_WRITTEN}:
            raise ConfigError(
                f"{folder} is not empty and was not made by the demo. Give another folder with "
                "--log, which the demo may fill and empty."
            )
        clear(False)
        _write(folder, run)
        return False
    if fresh or known.completed:
        # What a crash after each step leaves behind:
        # 1. The mark says "completed": the next start empties the folder.
        # 2. Some or all of the log and the apps are gone: the same, thanks to 1.
        # 3. The mark is that of the new run: the next start goes on with it, from nothing.
        mark_completed(folder, known)
        clear(known.input.get("log") == run.input.get("log"))
        _empty(folder)
        _write(folder, run)
        return False
    if known != run:
        raise ConfigError(
            f"{folder} holds an unfinished run of the demo {known.demo!r} with other input. Go on "
            f"with {known.options}, or start over with --fresh."
        )
    return True


def mark_completed(folder: Path, run: DemoRun) -> None:
    """Note that the run came to its end, so that the next one starts over."""
    _write(folder, replace(run, completed=True))


def _read(folder: Path) -> DemoRun | None:
    try:
        return DemoRun(**json.loads((folder / MARKER).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{folder / MARKER} cannot be read as the demo's mark. Remove the folder, or give "
            "another one with --log."
        ) from error


def _write(folder: Path, run: DemoRun) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Written beside and moved into place: a crash leaves the old mark or the new one, not a half.
    beside = folder / _HALF_WRITTEN
    beside.write_text(json.dumps(asdict(run)), encoding="utf-8")
    beside.replace(folder / MARKER)


def _empty(folder: Path) -> None:
    """Remove everything but the mark."""
    for path in folder.iterdir():
        if path.name == MARKER:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
