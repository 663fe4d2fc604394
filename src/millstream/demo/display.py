"""What the demo shows while it runs: a picture that is redrawn, or plain lines where none can be.

Built from the Progress of each batch and the rows of the view as committed with it, never from the
pipeline's insides: it is what any other program could show.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Self

import polars as pl
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from millstream.pipeline.engine_choice import EngineName
from millstream.views.runs.progress import Progress

CLIENTS_SHOWN = 10
_BAR_WIDTH = 30
_RATE_OVER_S = 5.0
_LINE_EVERY_S = 1.0


@dataclass
class DisplayFigures:
    """The figures of one moment; ``records`` is how many there are once all have arrived."""

    records: int
    arrived: int
    lag: dict[str, int]
    late: int
    duplicate: int
    dead: int
    per_s: float
    watermark: datetime | None

    @property
    def read(self) -> int:
        return self.arrived - sum(self.lag.values())


@dataclass
class ReadRate:
    """How fast records were read over the last seconds."""

    clock: Callable[[], float] = time.monotonic
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, rows: int) -> float:
        """Take in a batch; return records per second."""
        now = self.clock()
        self._seen.append((now, rows))
        while len(self._seen) > 2 and now - self._seen[0][0] > _RATE_OVER_S:
            self._seen.popleft()
        # The first batch only says when the others began.
        seconds = now - self._seen[0][0]
        return sum(rows for _, rows in list(self._seen)[1:]) / seconds if seconds else 0.0


class Display:
    """Shows batches on a console; use it in a ``with`` statement.

    In a terminal the picture is redrawn in place; elsewhere a line is printed about once a second,
    so that a log file stays readable.

    Args:
        url: Where the page is, if there is one.
        engine: What runs the pipeline.

    """

    def __init__(
        self,
        console: Console,
        *,
        url: str = "",
        engine: EngineName = "spark",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._starting = "Starting Spark" if engine == "spark" else "Starting"
        self._console = console
        self._url = url
        self._clock = clock
        self._rates = ReadRate(clock)
        self._printed = -_LINE_EVERY_S
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            waiting = Text(f"{self._starting} …", style="dim")
            self._live = Live(waiting, console=self._console, refresh_per_second=8)
            self._live.start()
        else:
            self._console.print(f"{self._starting}.")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(
        self,
        progress: Progress,
        spend_by_day: pl.DataFrame,
        *,
        records: int,
        arrived: int,
        left_out: dict[str, int],
    ) -> None:
        """Show one committed batch.

        Args:
            records: How many records there will be in all.
            arrived: How many the log has now.
            left_out: How many events were late, duplicate and dead so far.
        """
        counts = DisplayFigures(
            records=records,
            arrived=arrived,
            lag=dict(progress.lag),
            per_s=self._rates.add(progress.read),
            watermark=progress.watermark,
            **left_out,
        )
        if self._live is not None:
            self._live.update(figures_table(counts, spend_by_day, self._url))
            return
        now = self._clock()
        if now - self._printed >= _LINE_EVERY_S or counts.read == counts.records:
            self._printed = now
            self._console.print(figures_line(counts), highlight=False, soft_wrap=True)


def figures_line(counts: DisplayFigures) -> str:
    """Return the figures in one line."""
    lag = "/".join(str(lag) for lag in counts.lag.values())
    return (
        f"read {counts.read:,} of {counts.records:,} ({counts.per_s:,.0f}/s)  lag {lag}  "
        f"watermark {_time(counts.watermark)}  duplicates {counts.duplicate:,}  "
        f"late {counts.late:,}  dead {counts.dead:,}"
    )


def figures_table(
    counts: DisplayFigures, spend_by_day: pl.DataFrame, url: str = ""
) -> RenderableType:
    """Return the figures and the clients' budgets as a picture."""
    figures = Table.grid(padding=(0, 3))
    figures.add_row(
        _figure("events read", f"{counts.read:,}"),
        _figure("per second", f"{counts.per_s:,.0f}"),
        _figure("watermark", _time(counts.watermark)),
        _figure("duplicates", f"{counts.duplicate:,}"),
        _figure("late", f"{counts.late:,}"),
        _figure("dead", f"{counts.dead:,}"),
    )
    lag = Text.assemble(("lag  ", "dim"))
    for partition, waiting in counts.lag.items():
        lag.append(f"{partition} ", style="dim")
        lag.append(f"{waiting:,}   ", style="bold" if waiting else "")
    bar = ProgressBar(total=max(counts.records, 1), completed=counts.read, width=60)
    page = [Text.assemble(("\nthe page: ", "dim"), (url, "underline"))] if url else []
    return Group(bar, Text(), figures, lag, Text(), budget_table(spend_by_day), *page)


def budget_table(spend_by_day: pl.DataFrame) -> Table:
    """Return the clients whose newest day is nearest to its budget, with what they have spent."""
    newest = pl.col("budget_day") == pl.col("budget_day").max().over("client")
    used = pl.col("spent").cast(pl.Float64) / pl.col("budget").cast(pl.Float64)
    today = spend_by_day.filter(newest).with_columns(used=used)
    table = Table(
        "client",
        "day",
        "spent, €",
        "budget, €",
        "",
        title="spent today, in each client's time zone",
        title_justify="left",
        title_style="dim",
        box=box.SIMPLE_HEAD,
    )
    for client, day, spent, budget, share in (
        today.sort(["used", "client"], descending=[True, False]).head(CLIENTS_SHOWN).iter_rows()
    ):
        bar = ProgressBar(total=1.0, completed=min(max(share, 0.0), 1.0), width=_BAR_WIDTH)
        table.add_row(client, f"{day:%a %d %b}", f"{spent:,.2f}", f"{budget:,.2f}", bar)
    return table


def _figure(name: str, value: str) -> Text:
    return Text.assemble((f"{value}\n", "bold"), (name, "dim"))


def _time(moment: datetime | None) -> str:
    return "not yet known" if moment is None else moment.strftime("%a %d %b %H:%M")
