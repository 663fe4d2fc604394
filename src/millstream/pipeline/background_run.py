"""A run of an app in a thread of this process: what :meth:`millstream.App.start` returns, and its status."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from millstream.errors import FencedError, MillstreamError
from millstream.notebook.cells import before_each_cell
from millstream.notebook.html import facts_html
from millstream.notebook.live_display import show_live
from millstream.pipeline.engine_choice import EngineName
from millstream.views.runs.control_files import stop_request_file
from millstream.views.runs.progress import Progress, Report
from millstream.views.store_location import StoreLocation, open_state_store

RunState = Literal["not started", "starting", "running", "stopping", "stopped", "failed"]
_BEGIN_S = 3.0  # how long start() waits for mistakes of the declaration, which show as a run begins
_POLL_S = 0.05
_EXIT_S = (
    10.0  # how long the end of the process waits for the batch in hand, which is repeated otherwise
)


@dataclass(frozen=True)
class BackgroundStatus:
    """How a run in the background stands.

    Attributes:
        state: ``"not started"`` (by this process), ``"starting"``, ``"running"``, ``"stopping"``, ``"stopped"``
            or ``"failed"``.
        engine: What runs it; None if this process has started none.
        batches: The batches of the run; ``read``, ``late`` and ``dead`` are its events.
        lag: The records that were left after its last batch.
        watermark: The time that the app has reached; None before any.
        position: What of the log is in the views: topic → partition → offset of the next record.
        views: The number of rows of each view.
        error: Why the run failed, as a sentence; None if it has not.
    """

    app: str
    state: RunState
    engine: EngineName | None = None
    batches: int = 0
    read: int = 0
    late: int = 0
    dead: int = 0
    lag: int = 0
    watermark: str | None = None
    position: dict[str, Any] = field(default_factory=dict)
    views: dict[str, int] = field(default_factory=dict)
    error: str | None = None

    def __repr__(self) -> str:
        facts = "; ".join(f"{name} {fact}" for name, fact in self._facts)
        return f"{self._title}: {facts}" + ("" if self.error is None else f"\n{self.error}")

    def _repr_html_(self) -> str:
        return facts_html(self._title, self._facts, self.error)

    @property
    def _title(self) -> str:
        return f"{self.app} {'was ' if self.state == 'not started' else ''}{self.state}"

    @property
    def _facts(self) -> list[tuple[str, object]]:
        counts = {"late": self.late, "dead": self.dead, "left": self.lag}
        read = f"{self.read:,} in {self.batches:,} batches"
        rows = [f"{name} {count:,}" for name, count in self.views.items()]
        ends = [f"{topic} {_offsets(known)}" for topic, known in self.position.items()]
        facts: list[tuple[str, object]] = [
            (
                "read",
                read + "".join(f", {count:,} {name}" for name, count in counts.items() if count),
            ),
            ("watermark", self.watermark or "none"),
            ("position", ", ".join(ends) or "none"),
            ("rows", ", ".join(rows) or "none"),
        ]
        return facts[1:] if self.engine is None else [("engine", self.engine), *facts]


def _offsets(known: Any) -> str:
    """Return the offsets of a topic's partitions as a text."""
    return " ".join(f"{partition}:{offset}" for partition, offset in dict(known).items())


class BackgroundRun:
    """A run of an app in the background. Returned by :meth:`millstream.App.start`.

    In a notebook it shows its status, and goes on doing so while it runs.
    """

    def __init__(
        self,
        app: str,
        folder: Path,
        store: StoreLocation,
        engine: EngineName,
        run: Callable[[Callable[[Progress], None], Callable[[], None]], Report],
    ) -> None:
        self.app, self._folder, self._store, self._engine = app, folder.absolute(), store, engine
        self._run = run
        self._began, self._stopping, self._told = threading.Event(), False, False
        self._report: Report | None = None
        self._error: BaseException | None = None
        self._last: Progress | None = None
        self._batches = self._read = self._late = self._dead = 0
        self._thread = threading.Thread(target=self._work, name=f"millstream {app}", daemon=True)

    def __repr__(self) -> str:
        return repr(self.status)

    def _ipython_display_(self) -> None:
        def render() -> dict[str, Any]:
            status = self.status
            return {"text/plain": repr(status), "text/html": status._repr_html_()}

        show_live(render, lambda: (self._state, self._batches))

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    @property
    def report(self) -> Report | None:
        """What the run did, as of :meth:`millstream.App.run`; None while it runs, and when it failed."""
        return self._report

    @property
    def status(self) -> BackgroundStatus:
        """How it stands. It raises nothing: a failure is its ``error``."""
        last = self._last
        position, views = stored_state(self.app, self._store)
        return BackgroundStatus(
            self.app,
            self._state,
            self._engine,
            self._batches,
            self._read,
            self._late,
            self._dead,
            0 if last is None else sum(last.lag.values()),
            None if last is None or last.watermark is None else last.watermark.isoformat(),
            position,
            views,
            None if self._error is None else describe_failure(self._error),
        )

    def stop(self) -> BackgroundStatus:
        """Let the batch in hand be finished, end the run, and return how it stands then.

        Raises:
            MillstreamError: what the run failed with, if nobody has been told yet. A second call does not raise it.
        """
        self._stopping = self._stopping or self.is_alive
        while self.is_alive:
            with suppress(FileNotFoundError):  # a run that is starting makes the folder
                # again and again: a run that is starting clears it once
                stop_request_file(self._folder).touch()
            self._thread.join(_POLL_S)
        if self._stopping:
            stop_request_file(self._folder).unlink(missing_ok=True)
        self.raise_failure()
        return self.status

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the run has ended; False if it has not within so many seconds.

        Raises:
            MillstreamError: what the run failed with, as :meth:`stop`.
        """
        self._thread.join(timeout_s)
        if self.is_alive:
            return False
        self.raise_failure()
        return True

    def begin(self) -> None:
        """Start it. A mistake that shows as it begins is raised here."""
        _alive.add(self)
        before_each_cell(_tell_failures)
        self._thread.start()
        ends = time.monotonic() + _BEGIN_S
        while self.is_alive and not self._began.wait(_POLL_S) and time.monotonic() < ends:
            pass
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what the run failed with, once."""
        if self._error is not None and not self._told and not self.is_alive:
            self._told = True
            raise self._error.with_traceback(None)

    def tell_failure(self) -> None:
        """Say on standard error that the run has failed, once."""
        if self._error is not None and not self._told and not self.is_alive:
            self._told = True
            print(f"{self.app} failed. {describe_failure(self._error)}", file=sys.stderr)

    @property
    def _state(self) -> RunState:
        if self.is_alive:
            running: RunState = "running" if self._began.is_set() else "starting"
            return "stopping" if self._stopping else running
        return "stopped" if self._error is None else "failed"

    def _work(self) -> None:
        try:
            self._report = self._run(self._note, self._began.set)
        except (
            FencedError
        ) as error:  # a newer run goes on: that is no failure, and stays in the status
            self._error, self._told = error, self._stopping
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks
            self._error = error

    def _note(self, progress: Progress) -> None:
        self._read += progress.read
        self._late += progress.late
        self._dead += progress.dead
        self._last = progress
        self._batches += 1


def describe_failure(error: BaseException) -> str:
    """Return a failure as one text: an error of ours says all, of others the kind is needed."""
    kind = "" if isinstance(error, MillstreamError) else f"{type(error).__name__}: "
    return f"{kind}{error}"


def stored_state(app: str, location: StoreLocation) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the position of an app and the rows of its views, as its state store has them; empty before a run."""
    if isinstance(location, Path) and not location.exists():
        return {}, {}
    try:
        with closing(open_state_store(location, readonly=True)) as store:
            views = {one.name: store.count(one.name) for one in store.views()}
            return dict(store.position(app)), views
    except MillstreamError:  # a database that is away, or has nothing yet
        return {}, {}


_alive: weakref.WeakSet[BackgroundRun] = weakref.WeakSet()


def _tell_failures() -> None:
    for run in [*_alive]:
        run.tell_failure()


def run_of(folder: Path) -> BackgroundRun | None:
    """Return the run of this process that goes on in an app's folder, of whichever App object; None if there is none."""
    place = folder.absolute()
    return next((run for run in [*_alive] if run.is_alive and run._folder == place), None)  # noqa: SLF001


@atexit.register
def _stop_all() -> None:
    """End the runs with the process, each after its batch, or without waiting for a long one."""
    ends = time.monotonic() + _EXIT_S
    for run in [*_alive]:
        while run.is_alive and time.monotonic() < ends:
            with suppress(OSError):
                stop_request_file(run._folder).touch()  # noqa: SLF001
            run._thread.join(_POLL_S)  # noqa: SLF001
