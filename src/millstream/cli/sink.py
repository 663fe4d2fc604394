"""``millstream sink``: the records of a topic, written to something outside."""

from __future__ import annotations

from typing import Literal

import click

from millstream.capture.last_status import LastStatus
from millstream.cli.connector_options import options_of
from millstream.cli.metrics_option import metrics_option
from millstream.cli.status_line import StatusLine, stopped_by_signal
from millstream.client.default_log import LOG_VARIABLE
from millstream.client.start_position import LogStart
from millstream.connectors.sinks.metrics import sink_figures
from millstream.connectors.sinks.sink import SinkRun, SinkStatus
from millstream.connectors.sinks.sink import sink as sink_to
from millstream.connectors.sinks.urls import sink_connector_of
from millstream.metrics.exposition import Exposition


@click.command()
@click.argument("url", metavar="URL")
@click.option("--topic", required=True, metavar="TOPIC", help="Whose records are written.")
@click.option(
    "--log",
    envvar=LOG_VARIABLE,
    default="./data",
    show_default=True,
    metavar="LOG",
    help="The folder of the log, or kafka://HOST:PORT.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="Under which it is kept how far the topic was written; by default TOPIC and the kind of URL.",
)
@click.option(
    "-o",
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Of what is written to; docs/connectors.md has those of each. May be repeated.",
)
@click.option(
    "--start",
    "starts",
    metavar="earliest|latest|TIME|TOPIC/PARTITION/OFFSET",
    multiple=True,
    help="Where a new sink begins: with the first record of the topic (the default), the next one, the first of a time or "
    "later, by its timestamp; or an offset of each partition that is named.",
)
@click.option(
    "--until",
    type=click.Choice(["stopped", "caught-up"]),
    default="stopped",
    show_default=True,
    help="Whether to end when there is nothing more to write.",
)
@metrics_option
def sink(
    url: str,
    *,
    topic: str,
    log: str,
    name: str | None,
    options: tuple[str, ...],
    starts: tuple[str, ...],
    until: Literal["stopped", "caught-up"],
    metrics: str | None,
) -> None:
    """Write the records of a topic to URL.

    It goes on from where the last run stopped. A record that can never be written goes to the topic NAME.dead. Secrets are
    better left to $MILLSTREAM_SINK_PASSWORD and $MILLSTREAM_SINK_AUTHORIZATION (a header, of HTTP) than written into the
    URL, which others on the machine can see. Ctrl-C or SIGTERM ends it.

    \b
    Examples:
      millstream sink https://example.com/orders --topic orders
      millstream sink redis://cache.example:6379/0 --topic users -o hashes=user: --metrics 127.0.0.1:9464
      millstream sink 'mariadb://shop:${env:DB_PASSWORD}@db.example/shop' --topic orders -o table=orders -o key=id
    """
    connector = sink_connector_of(url, options_of(options))
    start = LogStart.parse(starts, "--start")
    if start is not None:
        start.check_topics([topic], "--start")
    _run(
        sink_to(connector, topic=topic, log=log, name=name, start=start or "earliest"),
        until,
        metrics,
    )


def _run(made: SinkRun, until: Literal["stopped", "caught-up"], metrics: str | None) -> None:
    """Write until the end or a signal, and show how far it is."""
    last: LastStatus[SinkStatus] = LastStatus()
    exposition = Exposition({"sink": sink_figures(made.name, last)}, [last.why_not_ready])
    line = StatusLine(line_of)

    def show(status: SinkStatus) -> None:
        last.add(status)
        line.alarm(status.alarm)
        line(status)

    with stopped_by_signal(made.stop, metrics, exposition):
        status = made.run(until=until, on_status=show)
    line.end(line_of(status))


def line_of(status: SinkStatus) -> str:
    """Say a status in a line."""
    parts = [
        status.state,
        f"{status.records:,} records",
        f"{status.dead:,} dead letters",
        f"{status.behind:,} to come",
    ]
    if status.problem:
        parts.append(status.problem)
    return ", ".join(parts)
