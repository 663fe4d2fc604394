"""The demo under attack: the pipeline and its workers are killed again and again while the page runs.

The pipeline is a process of its own here, the demo as one would start it by hand, which goes on where
the one before it was killed. The first kill may come while it starts; before each other one it has
committed something, so that there is something to lose.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from millstream.demo.ads_run import NO_PAGE, AdsOptions, serve_page, wait_for_interrupt
from millstream.demo.folder import MARKER

DRIVER_KILLS = 3
WORKER_KILLS = 4
AFTER_S = (0.0, 6.0)
STARTS_S = 300.0
_WORKER = b"-m\0millstream.spark.runtime.worker_daemon"  # the JVM's options hold the name, too
_PLANNER = "planner"  # what a parent of workers calls a process that it forks and that is no worker


def run_chaos(options: AdsOptions, console: Console) -> int:
    """Run the demo, killing it; return the exit code of the last run, which compares.

    Raises:
        ConfigError: The input is too large.
    """
    options.input.check()
    dice = random.Random(options.input.seed)  # noqa: S311 - what it decides is no secret
    with serve_page(options.folder, options.page, console) as url:
        code = ChaosRun(options, console, dice).run()
        if options.stay and url and code == 0:
            wait_for_interrupt(url, console)
    return code


@dataclass
class ChaosRun:
    """A series of runs, of which all but the last are killed."""

    options: AdsOptions
    console: Console
    dice: random.Random
    kills: dict[str, int] = field(default_factory=lambda: {"driver": 0, "worker": 0})
    _running: subprocess.Popen[bytes] | None = None
    _relays: list[threading.Thread] = field(default_factory=list)
    _committed: threading.Event = field(default_factory=threading.Event)

    def run(self) -> int:
        """Start the demo, kill what the dice say, start it again; let the last run come to its end."""
        victims = ["driver"] * DRIVER_KILLS + ["worker"] * WORKER_KILLS
        self.dice.shuffle(victims)
        try:
            running = self._start(fresh=self.options.fresh)
            for number, victim in enumerate(victims):
                if number:
                    self._committed.wait(STARTS_S)
                with suppress(subprocess.TimeoutExpired):
                    return self._ended(running.wait(self.dice.uniform(*AFTER_S)))
                running = self._kill(victim, running)
            return self._ended(running.wait())
        except KeyboardInterrupt:
            return self._interrupted()

    def _start(self, *, fresh: bool = False) -> subprocess.Popen[bytes]:
        given = self.options.input
        words = [sys.executable, "-m", "millstream", "demo", "ads", "--chaos", "--no-kills"]
        words += ["--log", str(self.options.log), "--folder", str(self.options.folder)]
        words += ["--page", NO_PAGE, "--no-stay", "--no-live"]
        words += ["--engine", self.options.engine] if self.options.engine else []
        words += ["--master", self.options.master] if self.options.master else []
        words += ["--input", given.source, "--seed", str(given.seed), "--rate", str(given.rate)]
        words += ["--minutes", str(given.minutes), "--speed", str(self.options.speed)]
        self._running = subprocess.Popen(  # noqa: S603 - our own command and checked values
            [*words, *(["--fresh"] if fresh else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process, which passes it on
        )
        self._committed = threading.Event()
        given_to = (self._running, self._committed)
        relay = threading.Thread(target=self._relay_output, args=given_to, daemon=True)
        relay.start()
        self._relays.append(relay)
        return self._running

    def _relay_output(self, process: subprocess.Popen[bytes], committed: threading.Event) -> None:
        assert process.stdout is not None
        with process.stdout as said:
            for line in said:
                if line.startswith(b"read "):
                    committed.set()
                text = line.decode(errors="replace").rstrip("\n")
                self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        committed.set()  # it has ended: nothing is to be waited for

    def _kill(self, victim: str, running: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Kill the driver, or one of its workers if there are any; return what runs then."""
        if victim == "worker":
            workers = workers_of(running.pid)
            if workers:
                chosen = self.dice.choice(workers)
                self._print_kill(f"kill -9 of the worker {chosen}", "worker")
                with suppress(ProcessLookupError):
                    os.kill(chosen, signal.SIGKILL)
            return running
        self._print_kill(f"kill -9 of the driver {running.pid}; it starts again", "driver")
        running.kill()
        running.wait()
        # Killed before the first run has written its mark, the folder is still to be created.
        made = (self.options.folder / MARKER).exists()
        return self._start(fresh=self.options.fresh and not made)

    def _print_kill(self, what: str, victim: str) -> None:
        self.kills[victim] += 1
        self.console.print(f"[bold red]{what}[/bold red]", highlight=False)

    def _ended(self, code: int) -> int:
        for relay in self._relays:
            relay.join()
        self.console.print(
            f"Killed: the driver {self.kills['driver']} times, workers {self.kills['worker']} times."
        )
        return code

    def _interrupted(self) -> int:
        assert self._running is not None
        self._running.send_signal(signal.SIGINT)
        return self._ended(self._running.wait())


def workers_of(pid: int, proc: Path = Path("/proc")) -> Sequence[int]:
    """Return the Python workers below a process, in order; none where there is no ``/proc``."""
    children: dict[int, list[int]] = {}
    names: dict[int, bytes] = {}
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            names[int(folder.name)] = (folder / "cmdline").read_bytes()
            # The name of the process, in parentheses, may hold anything.
            about, _, figures = (folder / "stat").read_text().rpartition(")")
            if about.partition("(")[2] == _PLANNER:
                names[int(folder.name)] = b""
            parent = int(figures.split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found: list[int] = []
    below = list(children.get(pid, ()))
    while below:
        one = below.pop()
        below += children.get(one, ())
        if _WORKER in names.get(one, b""):
            found.append(one)
    return sorted(found)
