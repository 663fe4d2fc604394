"""A program that deploys an edit again and again, and is killed one step later each time.

    python killed_deployment.py BASE TARGET PARTITIONS [MODULE]

MODULE has the text of the app, ``SOURCE``, and the ``EDIT``.
Each time a copy of the folder BASE is made, ``TARGET/<number>``, and a process forked that deploys the edit there. It
kills itself (SIGKILL) in front of step ``number`` of the switch: of the transactions of state stores, and of the calls
that make, name, remove or sync files. The program ends when a process has reached its end, and prints its number.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from edited_app import EditedApp

from millstream.ops.deploy import Deployment, deploy
from millstream.views.state_store.sqlite_store import SqliteStateStore

STEPS = ("fsync", "fdatasync", "link", "rename", "replace", "unlink", "rmdir", "mkdir")


class Steps:
    """Counts steps once it is armed, and ends the process in front of one of them."""

    def __init__(self, last: int) -> None:
        self.left = last
        self.armed = False

    def before(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            self.take()
            return real(*args, **options)

        return step

    def take(self) -> None:
        if self.armed:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def deploy_and_die(folder: Path, partitions: int, number: int, module: Any) -> None:
    """Deploy the edit of a module in a folder, and end in front of step ``number`` of the switch."""
    app = EditedApp(folder, partitions, source=module.SOURCE).write(*module.EDIT)
    steps, switch = Steps(number), Deployment.switch
    for name in STEPS:
        setattr(os, name, steps.before(getattr(os, name)))
    SqliteStateStore._write = steps.before(SqliteStateStore._write)  # type: ignore[method-assign]

    def armed(self: Deployment) -> int:
        steps.armed = True
        run = switch(self)
        steps.take()  # behind the last one
        return run

    Deployment.switch = armed  # type: ignore[method-assign]
    deploy(app)


def main(base: Path, target: Path, partitions: int, name: str = "edited_app") -> None:
    module = importlib.import_module(name)
    for number in count(1):
        folder = target / str(number)
        shutil.copytree(base, folder)
        child = os.fork()
        if child == 0:
            deploy_and_die(folder, partitions, number, module)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            print(number)
            return
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            raise SystemExit(f"the process for step {number} ended by itself, with {status}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
