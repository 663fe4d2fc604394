"""Runs the ads demo from end to end: feed, pipeline, display, and the comparison at the end.

The feed is a process of its own, which ends when this one does. What was interrupted goes on: the
feed from the ends of the log, the pipeline from its checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import polars as pl
from rich.console import Console
from rich.table import Table

from millstream.client import connect
from millstream.demo import oracle
from millstream.demo.ads_events import TOPIC, arrivals
from millstream.demo.ads_pipeline import APP, RATES_BY_HOUR, TOTALS_BY_DAY, build
from millstream.demo.display import Display
from millstream.demo.feed import create_topic, lengths, remaining
from millstream.demo.folder import DemoRun, complete, prepare
from millstream.errors import JobFailedError
from millstream.log.reader import LogReader
from millstream.views.progress import Progress
from millstream.views.reading import store_path
from millstream.views.store import ViewStore

EXIT_DIFFERENT = 1
EXIT_STOPPED = 130
_FEED_ENDS_S = 10.0


def run_ads(log: Path | str, *, seed: int, speed: float, fresh: bool, console: Console) -> int:
    """Run the demo to its end; return the exit code: 0 if the views equal the other computation.

    Raises:
        ConfigError: The folder is somebody else's, or holds a run with another seed.
        FolderOwnedError: Another process, perhaps another demo, is at work in the folder.
        JobFailedError: The feed or the job failed; the message says why.
    """
    folder = Path(log)
    run = DemoRun("ads", seed)
    goes_on = prepare(folder, run, fresh=fresh)
    records = arrivals(seed)
    with connect(folder) as opened:
        ends = create_topic(opened)
    waiting = remaining(records, ends).height
    if goes_on:
        console.print(
            f"Going on: {records.height - waiting:,} of {records.height:,} records are in the log."
        )
    ended = _Pipeline(folder, lengths(records), console, waits=waiting > 0).run(seed, speed)
    if not ended:
        console.print("Stopped. Start it again and it goes on from here.")
        return EXIT_STOPPED
    equal = compare(folder, seed, console)
    complete(folder, run)
    if equal:
        console.print(f"Look around: millstream view show {RATES_BY_HOUR} --log {folder}")
    return 0 if equal else EXIT_DIFFERENT


class _Pipeline:
    """One run of the app beside its feed, shown on a console."""

    def __init__(
        self, folder: Path, lengths_at_end: list[int], console: Console, *, waits: bool
    ) -> None:
        self._folder = folder
        self._lengths = lengths_at_end
        self._console = console
        self._waits = waits  # for records that the feed has still to write
        self._reader = LogReader(folder)
        self._late = 0

    def run(self, seed: int, speed: float) -> bool:
        """Run until all records are read; return False if Ctrl-C came first.

        Raises:
            JobFailedError: The feed failed.
        """
        app = build(self._folder)
        with Display(self._console) as display, _feeding(self._folder, seed, speed) as feed:
            report = app.run(
                until=self._all_read if self._waits else "caught-up",
                on_progress=lambda progress: self._take(display, feed, progress),
            )
            feed.check()
        return report.reason != "stopped"

    def _ends(self) -> list[int]:
        return [end for _, end in self._reader.offsets(TOPIC)]

    def _all_read(self, progress: Progress) -> bool:
        return self._ends() == self._lengths and not any(progress.lag.values())

    def _take(self, display: Display, feed: _Feed, progress: Progress) -> None:
        feed.go_on()
        with ViewStore(store_path(self._folder, APP), readonly=True) as store:
            by_hour = store.scan(RATES_BY_HOUR)
            late = sum(int(line["late"]) for line in store.ledger(APP))
        display.show(
            progress,
            by_hour,
            records=sum(self._lengths),
            arrived=sum(self._ends()),
            late=late,
        )


class _Feed:
    """The feed's process; it is told what to do on its standard input. See :mod:`feed`."""

    def __init__(self, folder: Path, seed: int, speed: float) -> None:
        command = [sys.executable, "-m", "millstream.demo.feed", "--log", str(folder)]
        self._process = subprocess.Popen(  # noqa: S603 - our own module and checked values
            [*command, "--seed", str(seed), "--speed", str(speed)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process; the feed follows it
        )
        self._said = b""
        self._ended = False
        self._going_on = False
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        assert self._process.stderr is not None
        self._said = self._process.stderr.read()
        if self._process.wait() and not self._ended:
            # The job would wait for records that do not come: end it as Ctrl-C does.
            os.kill(os.getpid(), signal.SIGINT)

    def go_on(self) -> None:
        """Tell the feed that somebody reads what it writes."""
        if not self._going_on:
            self._going_on = True
            with suppress(BrokenPipeError):  # it has ended already
                os.write(self._stdin, b"g")

    @property
    def _stdin(self) -> int:
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def check(self) -> None:
        """Raise if the feed failed.

        Raises:
            JobFailedError: It did; the message has its last words.
        """
        if self._process.poll():
            self._watcher.join()
            words = self._said.decode(errors="replace").strip().splitlines()
            raise JobFailedError(
                f"The feed of the demo ended with code {self._process.returncode}: "
                f"{words[-1] if words else 'it said nothing'}. Start the demo again to go on."
            )

    def end(self) -> None:
        """Tell the feed to end, and wait until it has."""
        self._ended = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_FEED_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._watcher.join()
        assert self._process.stderr is not None
        self._process.stderr.close()


@contextmanager
def _feeding(folder: Path, seed: int, speed: float) -> Iterator[_Feed]:
    feed = _Feed(folder, seed, speed)
    try:
        yield feed
    except KeyboardInterrupt:
        feed.check()  # the interrupt may have been its own
        raise
    finally:
        feed.end()


def compare(folder: Path, seed: int, console: Console) -> bool:
    """Compare each view with the independent computation; print the result, True if equal."""
    expected = {
        RATES_BY_HOUR: oracle.rates_by_hour(seed),
        TOTALS_BY_DAY: oracle.totals_by_day(seed),
    }
    equal = True
    with ViewStore(store_path(folder, APP), readonly=True) as store:
        for view, table in expected.items():
            differing = oracle.difference(store.scan(view), table)
            if differing.is_empty():
                console.print(f"{view}: equal: {table.height} rows", highlight=False)
                continue
            equal = False
            console.print(f"{view}: {differing.height} of {table.height} rows differ:")
            console.print(_as_table(differing))
    return equal


def _as_table(rows: pl.DataFrame, rows_max: int = 20) -> Table:
    table = Table(*rows.columns)
    for row in rows.head(rows_max).iter_rows():
        table.add_row(*(str(value) for value in row))
    return table
