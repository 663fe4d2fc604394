"""``millstream topic``: make, list, describe and delete the topics of a log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from millstream.client import connect

log_option = click.option(
    "--log",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("data"),
    envvar="MILLSTREAM_LOG",
    show_default="./data",
    show_envvar=True,
    help="Folder of the log.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.group()
def topic() -> None:
    """Create, list, describe and delete topics.

    \b
    Examples:
      millstream topic create clicks --partitions 4
      millstream topic list
      millstream topic describe clicks --json
    """


@topic.command()
@click.argument("name")
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many ordered parts the topic has; it cannot be changed later.",
)
@log_option
def create(name: str, partitions: int, folder: Path) -> None:
    """Create the topic NAME, and the log folder if there is none.

    \b
    Example:
      millstream topic create clicks --partitions 4
    """
    with connect(folder) as log:
        log.create_topic(name, partitions=partitions)
    noun = "partition" if partitions == 1 else "partitions"
    click.echo(f"created topic {name} with {partitions} {noun} in {folder}")


@topic.command("list")
@log_option
@json_option
def list_topics(folder: Path, *, as_json: bool) -> None:
    """List the topics, with how many records each holds.

    \b
    Example:
      millstream topic list --log ./data
    """
    with connect(folder) as log:
        rows = [
            {
                "topic": name,
                "partitions": info.partitions,
                "records": sum(end - start for start, end in log.offsets(name)),
            }
            for name, info in log.topics().items()
        ]
    if as_json or rows:
        _show(["topic", "partitions", "records"], rows, as_json=as_json)
    else:
        click.echo(f"no topics in {folder}; make one with: millstream topic create NAME")


@topic.command()
@click.argument("name")
@log_option
@json_option
def describe(name: str, folder: Path, *, as_json: bool) -> None:
    """Show the partitions of the topic NAME and the offsets that each holds.

    Offsets from `start` up to, but without, `end` can be read.

    \b
    Example:
      millstream topic describe clicks
    """
    with connect(folder) as log:
        offsets = log.offsets(name)
    rows = [
        {"partition": number, "start": start, "end": end, "records": end - start}
        for number, (start, end) in enumerate(offsets)
    ]
    _show(["partition", "start", "end", "records"], rows, as_json=as_json)


@topic.command()
@click.argument("name")
@log_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def delete(name: str, folder: Path, *, yes: bool) -> None:
    """Delete the topic NAME and all its records, for good.

    \b
    Example:
      millstream topic delete clicks --yes
    """
    with connect(folder) as log:
        records = sum(end - start for start, end in log.offsets(name))
        if not yes:
            click.confirm(f"delete topic {name} and its {records} records for good?", abort=True)
        log.delete_topic(name)
    click.echo(f"deleted topic {name} and its {records} records")


def _show(columns: list[str], rows: Sequence[Mapping[str, object]], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name == "topic" else "right")
    for row in rows:
        table.add_row(*(str(row[name]) for name in columns))
    Console().print(table)
