"""``millstream source``: something outside, read into a topic."""

from __future__ import annotations

from typing import Literal

import click

from millstream.capture.last_status import LastStatus
from millstream.cli.connector_options import options_of
from millstream.cli.metrics_option import metrics_option
from millstream.cli.status_line import StatusLine, stopped_by_signal
from millstream.connectors.metrics import source_figures
from millstream.connectors.source import Source, SourceStatus
from millstream.connectors.source import source as source_of
from millstream.connectors.urls import connector_of
from millstream.metrics.exposition import Exposition


@click.command()
@click.argument("url", metavar="URL")
@click.option("--topic", required=True, metavar="TOPIC", help="Where records go.")
@click.option(
    "--to",
    default="./data",
    show_default=True,
    metavar="LOG",
    help="The folder of the log, or kafka://HOST:PORT.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="Under which it is kept how far the source was read; by default the topic's name.",
)
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Of the topic, if it does not exist yet.",
)
@click.option(
    "--until",
    type=click.Choice(["stopped", "caught-up"]),
    default="stopped",
    show_default=True,
    help="Whether to end when there is nothing more to read.",
)
@click.option(
    "-o",
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Of what is read, as in the URL's query; docs/connectors.md has those of each. May be repeated.",
)
@click.option(
    "--moved", is_flag=True, help="The same data has another address than in the last run."
)
@metrics_option
def source(
    url: str,
    *,
    topic: str,
    to: str,
    name: str | None,
    partitions: int,
    until: Literal["stopped", "caught-up"],
    options: tuple[str, ...],
    moved: bool,
    metrics: str | None,
) -> None:
    """Read the files, objects, streams, messages or rows at URL into a topic.

    It goes on from where the last run stopped. What cannot be read goes to the topic NAME.dead. Secrets are better left to
    $MILLSTREAM_SOURCE_PASSWORD and $MILLSTREAM_SOURCE_AUTHORIZATION (a header, of HTTP) than written into the URL, which
    others on the machine can see. Ctrl-C or SIGTERM ends it.

    \b
    Examples:
      millstream source 'folder:///incoming?pattern=*.csv&columns=id:int&key=id' --topic orders
      millstream source 's3://bucket/events?format=json-lines' --topic events --to kafka://localhost:9092
      millstream source 'redis://cache.example:6379/0?streams=clicks' --topic clicks --metrics 127.0.0.1:9464
      millstream source https://api.example/orders -o rows=data -o key=id --topic orders
    """
    connector = connector_of(url, options_of(options))
    made = source_of(connector, topic=topic, to=to, name=name, partitions=partitions, moved=moved)
    _run(made, until, metrics)


def _run(made: Source, until: Literal["stopped", "caught-up"], metrics: str | None) -> None:
    """Read until the end or a signal, and show how far it is."""
    last: LastStatus[SourceStatus] = LastStatus()
    exposition = Exposition({"source": source_figures(made.name, last)}, [last.why_not_ready])
    line = StatusLine(line_of)

    def show(status: SourceStatus) -> None:
        last.add(status)
        line.alarm(status.alarm)
        line(status)

    with stopped_by_signal(made.stop, metrics, exposition):
        status = made.run(until=until, on_status=show)
    line.end(line_of(status))


def line_of(status: SourceStatus) -> str:
    """Say a status in a line."""
    parts = [status.state, f"{status.records:,} records", f"{status.dead:,} dead letters"]
    if status.lag_s is not None:
        parts.append(f"the last one {status.lag_s:.1f} s old")
    if status.problem:
        parts.append(status.problem)
    return ", ".join(parts)
