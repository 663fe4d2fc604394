"""``millstream dev``: run an app while it is written; every save takes effect at once."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from millstream.cli.plan import print_plan
from millstream.cli.program_error import ProgramError
from millstream.cli.run import split_file
from millstream.cli.tables import app_log_option, app_name_option
from millstream.cli.watched_program import WatchedProgram
from millstream.engine.interrupts import Interrupts, count_interrupts
from millstream.errors import ConfigError, EnvironmentProblem, FencedError, MillstreamError
from millstream.views.runs.control_files import stop_request_file
from millstream.views.server.server import LISTEN_DEFAULT

if TYPE_CHECKING:
    from millstream.cli.new_rows import NewRows
    from millstream.pipeline.app import App
    from millstream.views.runs.progress import Progress, Report

_POLL_S = 0.1  # how long after a save the program is loaded, and how often new rows are shown
_EXIT_INTERRUPTED = 130


@click.command()
@click.argument("file", metavar="FILE[:APP]")
@app_name_option
@app_log_option
@click.option(
    "--listen",
    default=LISTEN_DEFAULT,
    show_default=True,
    metavar="HOST:PORT",
    help="Where to serve the page. Port 0 takes a free one.",
)
@click.option("--no-page", is_flag=True, help="Serve no page.")
def dev(
    file: str, name: str | None, *, address: Path | str | None, listen: str, no_page: bool
) -> None:
    """Run the app in FILE while you write it: without Spark, and anew after every save.

    New rows of its views are shown here, and on a page. A mistake in the file is shown, and what ran goes on. So it does
    after a change that its state does not fit: the plan is shown, with what to do. State, views and position are those of
    `millstream run`. Ctrl-C ends it after the current batch; a second one does not wait.

    \b
    Examples:
      millstream dev app.py
      millstream dev app.py --log /tmp/try --listen 127.0.0.1:0
    """
    began = time.monotonic()
    path, name = split_file(file, name)
    click.echo(f"loading {path} …")
    program = WatchedProgram(path, name, address)
    with count_interrupts() as interrupts, ExitStack() as opened:
        page = None if no_page else _Page(listen, opened)
        _DevSession(program, page, interrupts, began).run()


@dataclass
class _DevRun:
    """A run of an app in a thread, and the rows that it has made."""

    app: App
    rows: NewRows
    report: Report | None = None
    error: BaseException | None = None
    batches: int = 0
    asked_to_stop: bool = False  # by this process
    _shown: int = 0
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._work, name="millstream dev", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def show_rows(self) -> None:
        """Show the rows of the batches since the last call."""
        batches = self.batches
        if batches != self._shown:
            self._shown = batches
            self.rows.show()

    def stop(self, interrupts: Interrupts) -> None:
        """Let the batch in hand be finished; at the second interrupt end this process, as a kill would."""
        self.asked_to_stop = True
        while self._thread.is_alive():
            with suppress(FileNotFoundError):  # a run that is starting makes the folder
                # again and again: a run that is starting clears it once
                stop_request_file(self.app.folder).touch()
            self._thread.join(_POLL_S / 2)
            if interrupts.count > 1:
                click.echo("ended within a batch, which the next run repeats")
                sys.stdout.flush()
                os._exit(_EXIT_INTERRUPTED)
        stop_request_file(self.app.folder).unlink(missing_ok=True)

    def _work(self) -> None:
        try:
            self.report = self.app.run(
                engine="local", show=False, on_progress=self._note, on_alarm=click.echo
            )
        except BaseException as error:  # noqa: BLE001 - shown by the thread that watches
            self.error = error

    def _note(self, progress: Progress) -> None:
        self.batches += 1
        read = f"{progress.read:,} read"
        counts = {"late": progress.late, "dead": progress.dead}
        others = "".join(f", {count:,} {what}" for what, count in counts.items() if count)
        click.echo(f"batch {progress.batch_id}: {read}{others}, {progress.duration_ms:,.0f} ms")


@dataclass
class _Page:
    """The page of the state folder of an app, if it can be served."""

    listen: str
    opened: ExitStack
    _folder: Path | None = None

    def serve(self, folder: Path) -> None:
        """Serve the page of a folder from now on, and say where; say so if it cannot be served."""
        if folder == self._folder:
            return
        from millstream.views.server.server import serve

        self._folder = folder
        self.opened.close()  # of another folder
        try:
            try:
                server = self.opened.enter_context(serve(folder, listen=self.listen))
            except EnvironmentProblem:
                raise
            except ConfigError:
                if self.listen != LISTEN_DEFAULT:
                    raise
                server = self.opened.enter_context(serve(folder, listen="127.0.0.1:0"))  # in use
        except MillstreamError as problem:
            click.echo(f"there is no page: {problem}")
        else:
            click.echo(f"the page is at {server.url}")


@dataclass
class _DevSession:
    """What is done until Ctrl-C: the program is watched, and its newest version that may run runs."""

    program: WatchedProgram
    page: _Page | None
    interrupts: Interrupts
    began: float
    _running: _DevRun | None = None
    _loaded: bool = False  # the program was, or its mistake was shown

    def run(self) -> None:
        """Watch until Ctrl-C."""
        while self.interrupts.count == 0:
            if self.program.is_changed:
                self._reload()
            self._look_at_run()
            time.sleep(_POLL_S)
        if self._running is not None:
            self._running.stop(self.interrupts)
            self._look_at_run()
        click.echo("stopped")

    def _reload(self) -> None:
        """Load the program, and run it in the place of the one before, if it may take it."""
        again, self._loaded = self._loaded, True
        began = time.monotonic() if again else self.began
        try:
            app = self.program.load()
        except ProgramError as error:
            click.echo(f"{click.style('not loaded', fg='red')}:\n{error}")
            self._say_what_runs()
            return
        if not self._may_run(app):
            self._say_what_runs()
            return
        if self._running is not None:
            self._running.stop(self.interrupts)
            self._look_at_run()
        self._start(
            app, f"{time.monotonic() - began:.1f} s after the {'save' if again else 'start'}"
        )

    def _may_run(self, app: App) -> bool:
        """Return whether the state that there is fits the app; say what to do if it does not."""
        from millstream.ops.plan import plan_change

        try:
            plan = plan_change(app)
        except MillstreamError as error:
            click.echo(f"{click.style('refused', fg='red')}: {error}")
            return False
        if plan.verdict == "keeps":
            return True
        click.echo(f"the state of {app.name} does not fit what was saved:")
        print_plan(plan)
        click.echo(
            f"To put the change in place: millstream deploy {self.program.file}. To start over: millstream reset "
            f"{app.name}, with this stopped."
        )
        return False

    def _start(self, app: App, took: str) -> None:
        from millstream.cli.new_rows import NewRows

        rows = NewRows(app.state_store)
        rows.begin()
        self._running = _DevRun(app, rows)
        topics = ", ".join(app.topics) or "no topic"
        click.echo(f"{app.name} runs, {took}; it reads {topics}")
        if self.page is not None:
            self.page.serve(app.folder.parent.parent)

    def _look_at_run(self) -> None:
        """Show what a run has made, and why it ended."""
        running = self._running
        if running is None:
            return
        alive = running.is_alive
        running.show_rows()
        if alive:
            return
        self._running = None
        error = running.error
        if isinstance(error, FencedError):
            click.echo(f"{error}\nSave {self.program.file} to run it here again.")
        elif error is not None:
            kind = "" if isinstance(error, MillstreamError) else f"{type(error).__name__}: "
            click.echo(f"{click.style('stopped', fg='red')}: {kind}{error}")
            self._say_what_runs()
        elif not running.asked_to_stop:
            click.echo(f"{running.app.name} was stopped by another program, as by millstream stop")
            self._say_what_runs()

    def _say_what_runs(self) -> None:
        if self._running is None:
            click.echo(f"nothing runs; waiting for the next save of {self.program.file}")
        else:
            click.echo("what ran before goes on; waiting for the next save")
