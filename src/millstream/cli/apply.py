"""``millstream apply``: captured tables, copied to another store and kept in step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import click

from millstream.capture.apply.metrics import apply_figures
from millstream.capture.apply.run import Apply, ApplyStatus
from millstream.capture.apply.run import apply as apply_of
from millstream.capture.last_status import LastStatus
from millstream.cli.captured_options import log_option, tables_option
from millstream.cli.metrics_option import metrics_option
from millstream.cli.status_line import SHOW_S, StatusLine, stopped_by_signal
from millstream.metrics.exposition import Exposition


@click.command()
@click.argument("name", metavar="NAME")
@click.argument("target", metavar="URL")
@tables_option(
    "Which tables: TABLE or SCHEMA.TABLE, with * and ?; may be repeated. The same ones in each run."
)
@log_option
@click.option(
    "--until",
    type=click.Choice(["stopped", "caught-up"]),
    default="stopped",
    show_default=True,
    help="Whether to end when the log has nothing more.",
)
@metrics_option
def apply(
    name: str,
    target: str,
    *,
    tables: tuple[str, ...],
    log: str,
    until: Literal["stopped", "caught-up"],
    metrics: str | None,
) -> None:
    """Apply the changes of the capture NAME to the database, lake, cache or index at URL.

    Whole transactions of the source, in their order, each once; it goes on from where it stopped. The password is
    better left to $MILLSTREAM_APPLY_PASSWORD than written into the URL, which others on the machine can see. Ctrl-C or
    SIGTERM ends it.

    \b
    Examples:
      millstream apply shop postgresql://writer@dw.example/copy --log ./data
      millstream apply shop sqlite:///copy.db --tables orders --tables 'customer*' --until caught-up
      millstream apply shop redis://cache.example:6379 --metrics 127.0.0.1:9464
    """
    _run(apply_of(name, target, tables=tables, log=log), until, metrics)


def _run(applying: Apply, until: Literal["stopped", "caught-up"], metrics: str | None) -> None:
    """Apply until the end or a signal, and show how far it is."""
    last: LastStatus[ApplyStatus] = LastStatus()
    exposition = Exposition({"apply": apply_figures(applying.name, last)}, [last.why_not_ready])
    line = StatusLine(ApplyLine(time.monotonic))

    def show(status: ApplyStatus) -> None:
        last.add(status)
        line(status)

    with stopped_by_signal(applying.stop, metrics, exposition):
        status = applying.run(until=until, on_status=show)
    line.end(line_of(status))


class ApplyLine:
    """Says a status in a line; while there is much to apply also how fast it is since the first, and what that leaves."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._first: tuple[float, int] | None = None

    def __call__(self, status: ApplyStatus) -> str:
        now = self._monotonic_s()
        if self._first is None:
            self._first = (now, status.changes)
        begun_s, changes = self._first
        seconds = now - begun_s
        if status.state != "applying" or seconds < SHOW_S or not 0 < status.done < 1:
            return line_of(status)
        rate = (status.changes - changes) / seconds
        left_s = seconds * (1 - status.done) / status.done
        return f"{line_of(status)}, {rate:,.0f} changes/s, about {left_s:,.0f} s left"


def line_of(status: ApplyStatus) -> str:
    """Say a status in a line."""
    parts = [
        status.state,
        f"{status.transactions:,} transactions",
        f"{status.changes:,} changes",
        f"{status.done:.0%} of the log",
    ]
    if status.lag_s is not None:
        parts.append(f"the last one {status.lag_s:.1f} s old")
    if status.problem:
        parts.append(status.problem)
    return ", ".join(parts)
