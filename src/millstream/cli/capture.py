"""``millstream capture``: the tables of a database, and their changes, as topics."""

from __future__ import annotations

import sys
import time
from typing import Literal

import click

from millstream.capture.last_status import LastStatus
from millstream.capture.metrics import capture_figures
from millstream.capture.run import Capture, CaptureStatus
from millstream.capture.run import capture as capture_of
from millstream.cli.byte_sizes import parse_bytes
from millstream.cli.capture_display import CaptureDisplay, line_of
from millstream.cli.captured_options import tables_option
from millstream.cli.metrics_option import metrics_option
from millstream.cli.status_line import stopped_by_signal
from millstream.errors import ConfigError
from millstream.metrics.exposition import Exposition


@click.command()
@click.argument("url", metavar="URL")
@tables_option("Which tables: TABLE or DATABASE.TABLE, with * and ?; may be repeated.")
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
@click.option(
    "--wal-max",
    metavar="SIZE",
    help="How much WAL a PostgreSQL server may keep for the capture, such as 10GiB. Alarm above a quarter of it.",
)
@click.option(
    "--wal-policy",
    type=click.Choice(["keep", "release"]),
    default="keep",
    show_default=True,
    help="Beyond it: keep the WAL, so that no change is lost; or release it, so that the server's disk does not fill, and "
    "end the capture.",
)
@click.option(
    "--outbox",
    metavar="TABLE",
    help="A table of events, whose rows go to topics outbox.event.<aggregatetype>, as of Debezium's outbox event router.",
)
@click.option(
    "--outbox-messages",
    is_flag=True,
    help="Events are also messages of pg_logical_emit_message with the prefix outbox:<aggregatetype>:<aggregateid>.",
)
@click.option(
    "--resnapshot",
    multiple=True,
    metavar="TABLE",
    help="Only ask the capture of this name to read a table again, now or when it next runs; may be repeated.",
)
@click.option(
    "--where",
    metavar="SQL",
    help="With --resnapshot: only rows for which this expression of the database is true.",
)
@click.option("--check", is_flag=True, help="Only say whether the database can be captured.")
@click.option(
    "--remove",
    is_flag=True,
    help="Only take out of the database what captures of this name have installed: slots and publication, triggers.",
)
@metrics_option
def capture(
    url: str,
    *,
    tables: tuple[str, ...],
    to: str,
    name: str | None,
    partitions: int,
    cleanup: str,
    until: Literal["stopped", "caught-up"],
    wal_max: str | None,
    wal_policy: Literal["keep", "release"],
    outbox: str | None,
    outbox_messages: bool,
    resnapshot: tuple[str, ...],
    where: str | None,
    check: bool,
    remove: bool,
    metrics: str | None,
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
      millstream capture postgresql://reader@db.example/shop --wal-max 10GiB --wal-policy release
      millstream capture postgresql://reader@db.example/shop --remove
      millstream capture mongodb://reader@db.example/shop --tables orders --metrics 127.0.0.1:9464
    """
    capturing = capture_of(
        url,
        tables=tables,
        to=to,
        name=name,
        partitions=partitions,
        cleanup=cleanup,
        wal_bytes_max=None if wal_max is None else parse_bytes(wal_max, what="--wal-max"),
        wal_policy=wal_policy,
        outbox=outbox,
        outbox_messages=outbox_messages,
    )
    if where is not None and not resnapshot:
        raise ConfigError(
            "--where is given without --resnapshot. Say which table is to be read again."
        )
    if resnapshot:
        capturing.reread(*resnapshot, where=where)
        click.echo(
            "Asked for. The capture follows within seconds if it runs, else when it next does."
        )
        return
    if remove:
        for what in capturing.remove():
            click.echo(f"Removed {what}.")
        click.echo("Nothing of this capture is left in the database.")
        return
    capturing.check()
    if check:
        click.echo("The database can be captured.")
        return
    _run(capturing, until, metrics)


def _run(capturing: Capture, until: Literal["stopped", "caught-up"], metrics: str | None) -> None:
    """Capture until the end or a signal, and show how far it is."""
    last: LastStatus[CaptureStatus] = LastStatus()
    figures = capture_figures(capturing.name, last, lambda: capturing.source_lag)
    exposition = Exposition({"capture": figures}, [last.why_not_ready])
    with (
        stopped_by_signal(capturing.stop, metrics, exposition),
        CaptureDisplay(time.monotonic, sys.stderr) as display,
    ):

        def show(status: CaptureStatus) -> None:
            last.add(status)
            display(status)

        status = capturing.run(until=until, on_status=show, on_alarm=display.alarm)
    click.echo(line_of(status))
