"""The progress of a run: one table that is redrawn in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TextIO

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from millstream.views.runs.progress import Progress, format_share

_LINE_EVERY_S = 1.0
_DRAWN_PER_SECOND = 4
_SMOOTHING = 0.2  # the weight of the newest batch in the rate


@dataclass
class _Totals:
    """What the batches shown so far add up to."""

    batches: int = 0
    read: int = 0
    late: int = 0
    dead: int = 0
    rate: float = 0.0

    def add(self, progress: Progress) -> None:
        seconds = max(progress.duration_ms / 1000, 1e-3)
        newest = progress.read / seconds
        first = self.batches == 0
        self.rate = newest if first else self.rate + _SMOOTHING * (newest - self.rate)
        self.batches += 1
        self.read += progress.read
        self.late += progress.late
        self.dead += progress.dead


@dataclass
class ProgressTable:
    """Shows the progress of a run on ``stream``; use it in a ``with`` statement.

    In a terminal a table, redrawn in place; otherwise a line at most once a second.
    """

    stream: TextIO
    clock: Callable[[], float] = time.monotonic
    _totals: _Totals = field(default_factory=_Totals, init=False)
    _live: Live | None = field(default=None, init=False)
    _last: float | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        console = Console(file=self.stream)
        if console.is_terminal:
            self._live = Live(
                console=console, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, message: str) -> None:
        """Show what is being done before there is a batch to show: ``starting Spark``."""
        text = f"{message} …"
        if self._live is not None:
            self._live.update(Text(text, style="dim"), refresh=True)
        else:
            print(text, file=self.stream, flush=True)

    def note(self, message: str) -> None:
        """Print a line that remains visible after the run, above the table that is redrawn."""
        if self._live is not None:
            self._live.console.print(Text(message, style="yellow"))
        else:
            print(message, file=self.stream, flush=True)

    def show(self, progress: Progress) -> None:
        """Show a batch that was committed."""
        self._totals.add(progress)
        now = self.clock()
        every_s = 1 / _DRAWN_PER_SECOND if self._live is not None else _LINE_EVERY_S
        if self._last is not None and now - self._last < every_s:
            return
        self._last = now
        if self._live is not None:
            self._live.update(self._table(progress), refresh=True)
        else:
            print(self._line(progress), file=self.stream, flush=True)

    def _table(self, progress: Progress) -> Table:
        table = Table(box=box.SIMPLE, show_header=False, pad_edge=False, title=Text(progress.app))
        table.add_column(style="dim")
        table.add_column(justify="right")
        table.add_column(style="dim")
        table.add_column(justify="right")
        totals = self._totals
        table.add_row("batch", f"{progress.batch_id:,}", "took", f"{progress.duration_ms:,.0f} ms")
        table.add_row("read", f"{totals.read:,}", "a second", f"{totals.rate:,.0f}")
        table.add_row("unread", f"{sum(progress.lag.values()):,}", "behind", _behind(progress))
        table.add_row("watermark", _watermark(progress), "state", _bytes(progress.state_bytes))
        table.add_row("late", _alarming(totals.late), "dead", _alarming(totals.dead))
        for step, rate in progress.false_positive_rates.items():
            table.add_row(step, "", "false positives", format_share(rate))
        return table

    def _line(self, progress: Progress) -> str:
        return (
            f"batch {progress.batch_id}: read {progress.read:,} in {progress.duration_ms:,.0f} ms, "
            f"unread {sum(progress.lag.values()):,}, behind {_behind(progress)}, watermark "
            f"{_watermark(progress)}, late {progress.late:,}, dead {progress.dead:,}, "
            f"state {_bytes(progress.state_bytes)}"
            + "".join(
                f", {step} false positives {format_share(rate)}"
                for step, rate in progress.false_positive_rates.items()
            )
        )


def _watermark(progress: Progress) -> str:
    if progress.watermark is None:
        return "-"
    return progress.watermark.isoformat(sep=" ", timespec="seconds")


def _behind(progress: Progress) -> str:
    if progress.behind_s is None:
        return "-"
    if progress.behind_s < 120:
        return f"{progress.behind_s:,.1f} s"
    if progress.behind_s < 7200:
        return f"{progress.behind_s / 60:,.0f} min"
    return f"{progress.behind_s / 3600:,.0f} h"


def _alarming(count: int) -> Text:
    return Text(f"{count:,}", style="yellow" if count else "")


def _bytes(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


def shown_on(*, show: bool | TextIO | None, by_default: bool) -> TextIO | None:
    """Return where progress is shown: nowhere, on standard error, or on a stream of the caller's."""
    if show is None:
        show = by_default and sys.stderr.isatty()
    if isinstance(show, bool):
        return sys.stderr if show else None
    return show


def both(
    first: Callable[[Progress], None], second: Callable[[Progress], None] | None
) -> Callable[[Progress], None]:
    """Return what calls one, and then the other if there is one."""

    def call(progress: Progress) -> None:
        first(progress)
        if second is not None:
            second(progress)

    return call
