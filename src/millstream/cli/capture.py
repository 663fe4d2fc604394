"""``millstream capture``: the tables of a database, and their changes, as topics."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Literal

import click

from millstream.capture.run import CaptureStatus
from millstream.capture.run import capture as capture_of
from millstream.cli.signals import wait_for_stop_signal

_SHOW_S = 1.0


@click.command()
@click.argument("url", metavar="URL")
@click.option(
    "--tables",
    multiple=True,
    default=("*",),
    show_default=True,
    metavar="PATTERN",
    help="Which tables: TABLE or DATABASE.TABLE, with * and ?; may be repeated.",
)
@click.option(
    "--to",
    default="./data",
    show_default=True,
    metavar="LOG",
    help="The folder of the log, or kafka://HOST:PORT.",
)
@click.option(
    "--name", metavar="NAME", help="What topics begin with; by default the database's name."
)
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Of topics of tables that do not exist yet.",
)
@click.option(
    "--cleanup",
    type=click.Choice(["delete", "compact"]),
    default="delete",
    show_default=True,
    help="Whether topics of tables keep all records, or the last one of each key.",
)
@click.option(
    "--until",
    type=click.Choice(["stopped", "caught-up"]),
    default="stopped",
    show_default=True,
    help="Whether to end when the database has nothing more.",
)
@click.option("--check", is_flag=True, help="Only say whether the database can be captured.")
def capture(
    url: str,
    *,
    tables: tuple[str, ...],
    to: str,
    name: str | None,
    partitions: int,
    cleanup: str,
    until: Literal["stopped", "caught-up"],
    check: bool,
) -> None:
    """Capture tables of the database at URL, and all their changes, into a log.

    First the rows of the tables, then every committed transaction, once and in order; it goes on from where it
    stopped. The password is better left to $MILLSTREAM_CAPTURE_PASSWORD than written into the URL, which others
    on the machine can see. Ctrl-C or SIGTERM ends it.

    \b
    Examples:
      millstream capture mariadb://reader@db.example/shop --check
      millstream capture mariadb://reader@db.example/shop --tables orders --tables 'customer*' --to ./data
      millstream capture mariadb://reader@db.example/shop --to kafka://localhost:9092 --name shop
    """
    capturing = capture_of(
        url, tables=tables, to=to, name=name, partitions=partitions, cleanup=cleanup
    )
    capturing.check()
    if check:
        click.echo("The database can be captured.")
        return
    with wait_for_stop_signal() as wait:

        def stop_at_signal() -> None:
            wait()
            capturing.stop()

        threading.Thread(target=stop_at_signal, daemon=True).start()
        status = capturing.run(until=until, on_status=_StatusLine(time.monotonic))
    click.echo(f"{'' if not sys.stderr.isatty() else chr(10)}{line_of(status)}")


class _StatusLine:
    """Shows the status: on a terminal one line that changes, else a line where the state changes."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._shown_s = -_SHOW_S
        self._state = ""

    def __call__(self, status: CaptureStatus) -> None:
        now = self._monotonic_s()
        if status.state == self._state and now - self._shown_s < _SHOW_S:
            return
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{line_of(status)}", err=True, nl=False)
        elif status.state != self._state:
            click.echo(line_of(status), err=True)
        self._shown_s, self._state = now, status.state


def line_of(status: CaptureStatus) -> str:
    """Say a status in a line."""
    parts = [
        status.state,
        f"{status.snapshot_rows:,} rows of snapshots",
        f"{status.changes:,} changes",
    ]
    if status.lag_s is not None:
        parts.append(f"the last one {status.lag_s:.1f} s old")
    if status.position:
        parts.append(f"at {status.position}")
    if status.problem:
        parts.append(status.problem)
    return ", ".join(parts)
