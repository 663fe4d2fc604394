"""Runs the live part of the demo: events go on arriving, a bot is caught, and the pipeline is killed.

This process writes the events, serves the page, and watches what is committed. The pipeline is a process
of its own (`live_pipeline.py`): `kill -9` ends it in the middle of its work, the events go on arriving, and the
next process goes on where it was. At the end all results are compared with one batch computation over the
raw log, and the story is told in figures.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rich.console import Console

from millstream.client import connect
from millstream.demo import ads_expected
from millstream.demo.ads_run import (
    EXIT_DIFFERENT,
    EXIT_STOPPED,
    compare_results,
    serve_page,
    wait_for_interrupt,
)
from millstream.demo.feed import FeedThread
from millstream.demo.live_events import SPEED, LiveInput
from millstream.demo.live_story import LiveStory
from millstream.demo.live_watch import LiveWatch
from millstream.errors import JobFailedError
from millstream.pipeline.engine_choice import EngineName

FOLDER = "live"  # in the demo's folder: a log of its own
RUN_LOG = "live-pipeline.txt"  # beside it: what the pipeline's processes say
TERMINAL_S, UNATTENDED_S = 1800.0, 60.0
KILL_FIRST_S, KILL_EVERY_S = 32.0, 120.0
_TICK_S = 0.05
_STOPS_S = 60.0
_TAIL_LINES = 12


@dataclass(frozen=True)
class LiveOptions:
    """What the command line says. ``seconds`` is how long events arrive, unless Ctrl-C comes first."""

    folder: Path
    page: str
    engine: EngineName
    seconds: float
    seed: int = 1
    stay: bool = False


def run_live(options: LiveOptions, console: Console) -> int:
    """Run the live part to its end; return the exit code: 0 if all is equal to the other computation.

    Raises:
        JobFailedError: the pipeline ended by itself; the message has what it said last.
    """
    log = options.folder / FOLDER
    if log.exists():  # of an earlier run; the demo's folder is the demo's own
        shutil.rmtree(log)
    log.mkdir(parents=True)
    given = LiveInput(options.seed, round(options.seconds * SPEED / 60))
    with serve_page(log, options.page, console) as url:
        console.print("Now live, a minute of event time in a second. Ctrl-C ends and compares it.")
        try:
            story = _LiveRun(options, given, log, console).run()
        except KeyboardInterrupt:
            console.print("Stopped before the results were compared.")
            return EXIT_STOPPED
        console.print(str(story), highlight=False, soft_wrap=True)
        if options.stay and url and not story.interrupted:
            wait_for_interrupt(url, console)
    return 0 if story.comparison.equal else EXIT_DIFFERENT


class _LiveRun:
    """One run: the feed, the pipeline's process, and the loop that watches and kills."""

    def __init__(self, options: LiveOptions, given: LiveInput, log: Path, console: Console) -> None:
        self._options, self._given, self._log = options, given, log
        self._console = console
        self._watch = LiveWatch(log, given)
        self._began_s = time.monotonic()
        self._kill_at_s = min(KILL_FIRST_S, options.seconds / 2)
        self._interrupted = False

    def run(self) -> LiveStory:
        """Run to the end; the first Ctrl-C ends the feed only.

        Raises:
            KeyboardInterrupt: there was a second one.
        """
        travel = self._given.disorder()
        said = self._options.folder / RUN_LOG
        feeding = FeedThread(
            self._log, travel, SPEED, on_append=self._watch.note_append, closes=True
        )
        pipeline = PipelineProcess(self._log, self._options.engine, said)
        with ExitStack() as stack:
            stack.enter_context(feeding)
            stack.enter_context(pipeline)
            stack.callback(self._watch.close)
            show = stack.enter_context(self._status_line("Starting …"))
            try:
                self._start(feeding, pipeline)
                while not feeding.is_done:
                    self._look(pipeline)
                    show(self._watch.line())
                    self._kill_when_due(pipeline)
            except KeyboardInterrupt:
                feeding.check()  # the interrupt may have been its own
                self._interrupted = True
                self._tell("the events end here; what has arrived is still processed")
            seconds = time.monotonic() - self._began_s
            feeding.end()
            feeding.check()
            while not self._watch.is_caught_up:
                self._look(pipeline)
            pipeline.stop()
            show("Comparing …")
            return self._story(seconds)

    def _start(self, feeding: FeedThread, pipeline: PipelineProcess) -> None:
        """Wait for the first commit; only then let the events pass."""
        while not self._watch.has_committed:
            self._look(pipeline)
        self._began_s = time.monotonic()
        self._watch.begin()
        feeding.start()

    def _look(self, pipeline: PipelineProcess) -> None:
        """Let a moment pass, and take in what has been committed; tell what is worth it."""
        time.sleep(_TICK_S)
        pipeline.check()
        for told in self._watch.look():
            self._tell(told)

    def _kill_when_due(self, pipeline: PipelineProcess) -> None:
        """Kill the pipeline at its time, once what the last kill interrupted has been made up for."""
        now = time.monotonic()
        if now - self._began_s < self._kill_at_s or self._watch.is_recovering:
            return
        self._kill_at_s += KILL_EVERY_S
        self._tell(f"kill -9 of the pipeline, process {pipeline.kill()}; another one is started")
        self._watch.note_kill()

    def _tell(self, what: str) -> None:
        passed = int(time.monotonic() - self._began_s)
        said = f"  {passed // 60}:{passed % 60:02}  {what}"
        self._console.print(said, highlight=False, soft_wrap=True)

    @contextmanager
    def _status_line(self, first: str) -> Iterator[Callable[[str], object]]:
        """Yield what shows a line below the others; where there is no terminal, nothing is shown."""
        if not self._console.is_terminal:
            yield lambda _line: None
            return
        with self._console.status(first) as shown:
            yield shown.update

    def _story(self, seconds: float) -> LiveStory:
        with connect(self._log) as log:
            wanted = ads_expected.expected_results(
                log, self._given.clients, self._given.stop_rule, live=True
            )
            comparison = compare_results(log, wanted, self._console, state=self._log)
        return self._watch.story(seconds, comparison, interrupted=self._interrupted)


@dataclass
class PipelineProcess:
    """The process that runs the pipeline; use it in a ``with`` statement. ``said`` is the file of its output."""

    log: Path
    engine: EngineName
    said: Path
    _running: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        self.said.unlink(missing_ok=True)
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.stop(timeout_s=1.0)
        if self._running is not None and self._running.poll() is None:
            self._running.kill()
            self._running.wait()

    def _start(self) -> None:
        words = [sys.executable, "-m", "millstream.demo.live_pipeline", str(self.log), self.engine]
        with self.said.open("ab") as output:
            self._running = subprocess.Popen(  # noqa: S603 - our own module and values
                words,
                stdin=subprocess.PIPE,  # its end, by whatever cause, tells the pipeline to stop
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process alone
            )

    def kill(self) -> int:
        """Kill the process as nothing can prevent, and start another; return the id of the killed one."""
        killed = self._process
        killed.kill()
        killed.wait()
        self._start()
        return killed.pid

    def stop(self, timeout_s: float = _STOPS_S) -> None:
        """Let it end after its batch.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout_s)

    def check(self) -> None:
        """Make sure that it is alive.

        Raises:
            JobFailedError: it has ended by itself.
        """
        code = self._process.poll()
        if code is None:
            return
        lines = self.said.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        raise JobFailedError(
            f"The pipeline of the live part ended with the exit code {code}. All that it said is in {self.said}; "
            "the end of it:\n" + "\n".join(lines)
        )

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self._running is not None
        return self._running
