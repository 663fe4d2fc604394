"""How far a capture is, as its command shows it: a bar while rows are read, then one line that changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Self, TextIO

import click

from millstream.capture.run import CaptureStatus
from millstream.cli.byte_sizes import describe_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SHOW_S = 1.0


def line_of(status: CaptureStatus) -> str:
    """Say a status in a line: what it does, rows and changes, lag in bytes and seconds, and the position."""
    parts = [
        status.state,
        f"{status.snapshot_rows:,} rows of snapshots",
        f"{status.changes:,} changes",
    ]
    if status.bytes_behind is not None:
        parts.append(f"{describe_bytes(status.bytes_behind)} behind")
    if status.lag_s is not None:
        parts.append(f"the last one {status.lag_s:.1f} s old")
    if status.bytes_kept is not None:
        parts.append(f"{describe_bytes(status.bytes_kept)} kept by the server")
    if status.position:
        parts.append(f"at {status.position}")
    if status.problem:
        parts.append(status.problem)
    return ", ".join(parts)


class CaptureDisplay:
    """Shows statuses; use it in ``with``. Not on a terminal it is a line where the state changes."""

    def __init__(self, monotonic_s: Callable[[], float], stream: TextIO) -> None:
        self._stream, self._terminal = stream, stream.isatty()
        self._monotonic_s = monotonic_s
        self._shown_s = -_SHOW_S
        self._state = ""
        self._bar: RowBar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_bar()
        if self._terminal and self._state:
            click.echo(file=self._stream)

    def __call__(self, status: CaptureStatus) -> None:
        now = self._monotonic_s()
        if status.state == self._state and now - self._shown_s < _SHOW_S:
            return
        if not self._terminal:
            if status.state != self._state:
                click.echo(line_of(status), file=self._stream)
        elif status.state == "snapshot":
            self._bar = self._bar or RowBar(status.snapshot_rows, self._stream)
            self._bar.show(status)
        else:
            self._end_bar()
            click.echo(f"\r\x1b[K{line_of(status)}", file=self._stream, nl=False)
        self._shown_s, self._state = now, status.state

    def alarm(self, text: str) -> None:
        """Show an alarm, on a line of its own."""
        click.echo(f"{chr(10) if self._terminal else ''}ALARM: {text}", file=self._stream)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.end()
            self._bar = None


class RowBar:
    """A bar of a snapshot: rows, the rate, and how long the others will take, about.

    ``rows_before`` had been read when it began. How many there are is what the database estimates; where it does not,
    there are no bar and no end.
    """

    def __init__(self, rows_before: int, stream: TextIO) -> None:
        self._before = rows_before
        self._total = 0
        self._progress, self._task = _row_progress(stream)

    def show(self, status: CaptureStatus) -> None:
        """Show the rows that are stored by now."""
        done = status.snapshot_rows - self._before
        self._total = max(self._total, status.rows_expected or 0)
        total = max(self._total, done) if self._total else None
        self._progress.update(self._task, completed=done, total=total)

    def end(self) -> None:
        """Take the bar away."""
        self._progress.stop()


def _row_progress(stream: TextIO) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class _Rows(ProgressColumn):
        def render(self, task: Task) -> Text:
            of = "" if task.total is None else f" of about {task.total:,.0f}"
            rate = "" if not task.speed else f", {task.speed:,.0f} a second"
            return Text(f"{task.completed:,.0f}{of} rows{rate}")

    columns = (TextColumn("{task.description}"), BarColumn(), _Rows(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(file=stream), transient=True)
    progress.start()
    return progress, progress.add_task("reading tables", total=None)
