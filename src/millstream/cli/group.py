"""``millstream group``: see and change how far groups have read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from millstream.cli.lag import known_group, lag_row, print_advice, state_text
from millstream.cli.share_group import (
    describe_share_group,
    list_share_groups,
    refuse_share_group,
    share_group_summary,
)
from millstream.cli.tables import (
    TableColumn,
    TableRow,
    address_option,
    confirm,
    format_time,
    json_option,
    pluralize,
    print_json,
    print_result,
    print_rows,
    print_table,
    yes_option,
)
from millstream.cli.topic_positions import check_partitions, offsets_at, parse_position
from millstream.client import connect
from millstream.client.address import shown
from millstream.client.groups import Lag
from millstream.client.open import open_reader
from millstream.record import TopicPartition


@click.group()
def group() -> None:
    """List, describe, reset and delete groups: how far each has read.

    A group is a name under which readers commit the next offset that they will read. It exists
    once something was committed for it.

    \b
    Examples:
      millstream group list
      millstream group describe billing
      millstream group reset billing --topic clicks --to earliest
    """


@group.command("list")
@address_option
@json_option
def list_groups(address: Path | str, *, as_json: bool) -> None:
    """List the groups, with how many records each has still to read.

    \b
    Example:
      millstream group list --log ./data
    """
    with connect(address) as log:
        found = log.lag()
        rows = [
            _summary(name, [one for one in found if one.group == name]) for name in log.groups()
        ]
        rows += [share_group_summary(one) for one in list_share_groups(address)]
    if as_json or rows:
        print_rows(rows, _LIST_COLUMNS, as_json=as_json)
    else:
        click.echo(
            f"no groups in {shown(address)}; one appears with: millstream consume TOPIC --group NAME"
        )


@group.command()
@click.argument("name")
@address_option
@json_option
def describe(name: str, address: Path | str, *, as_json: bool) -> None:
    """Show what the group NAME has committed, and what each partition holds.

    The partition holds the offsets from `start` up to, but without, `end`; `committed` is the next
    one that the group will read. See `millstream lag --help` for the other columns.

    Of a share group of a folder, its members are shown, and of each partition: the first record that is
    not done (`start`), how many are `behind`, of these how many were delivered (`in flight`), how often
    at most (`deliveries`), and how many are `undeliverable`.

    \b
    Example:
      millstream group describe billing
    """
    for group in list_share_groups(address, name):
        describe_share_group(group, as_json=as_json)
        return
    with connect(address) as log:
        found = log.lag(known_group(log, name))
        committed = log.committed_offsets(name)
    rows = []
    for one in found:
        place = committed.get(TopicPartition(one.topic, one.partition))
        if place is not None:  # the topic was not deleted in between
            said = {"committed_ms": place.committed_ms, "metadata": place.metadata}
            rows.append({**lag_row(one), **said})
    print_rows(rows, _DESCRIBE_COLUMNS, as_json=as_json)
    if not as_json:
        print_advice(found)


@group.command()
@click.argument("name")
@click.option("--topic", required=True, help="In which topic.")
@click.option(
    "--to",
    required=True,
    metavar="earliest|latest|OFFSET|TIME",
    help="The next record to read; a TIME is ISO 8601, in UTC if it names no zone, and means the "
    "first record at it or later.",
)
@click.option(
    "--partition",
    "partitions",
    type=click.IntRange(min=0),
    multiple=True,
    help="In this partition only; may be repeated.",
)
@yes_option
@address_option
@json_option
def reset(
    name: str,
    topic: str,
    to: str,
    partitions: tuple[int, ...],
    address: Path | str,
    *,
    yes: bool,
    as_json: bool,
) -> None:
    """Change where the group NAME continues in a topic.

    Stop the group's readers first: one that keeps running overwrites these with its own offsets. A
    group that has committed nothing yet may be given a start.

    \b
    Examples:
      millstream group reset billing --topic clicks --to earliest
      millstream group reset billing --topic clicks --to 2026-11-21T10:00 --yes
      millstream group reset billing --topic clicks --to 1200 --partition 0
    """
    refuse_share_group(address, name)
    position = parse_position("--to", to, ("earliest", "latest"))
    reader = open_reader(address)
    numbers = check_partitions(reader, topic, partitions)
    after = offsets_at(reader, topic, numbers, position, option="--to")
    with connect(address) as log:
        committed = log.committed_offsets(name)
        rows = []
        for number, offset in after.items():
            found = committed.get(TopicPartition(topic, number))
            before = None if found is None else found.offset
            rows.append({"topic": topic, "partition": number, "before": before, "after": offset})
        if not as_json:
            print_table(rows, _RESET_COLUMNS)
        if not yes:
            confirm(f"let group {name} continue there?")
        log.commit_offsets(
            name, {TopicPartition(topic, number): offset for number, offset in after.items()}
        )
    if as_json:
        print_json(rows)
    else:
        click.echo(f"group {name} continues there")


@group.command()
@click.argument("name")
@yes_option
@address_option
@json_option
def delete(name: str, address: Path | str, *, yes: bool, as_json: bool) -> None:
    """Delete the committed offsets of the group NAME. No record is removed.

    A reader of that name starts over, where its --from or start says.

    \b
    Example:
      millstream group delete billing --yes
    """
    refuse_share_group(address, name)
    with connect(address) as log:
        places = len(log.committed_offsets(known_group(log, name)))
        if not yes:
            confirm(f"forget the {pluralize(places, 'committed offset')} of group {name}?")
        forgotten = log.delete_group_offsets(name)
    print_result(
        f"deleted group {name} and its {pluralize(forgotten, 'committed offset')}",
        {"group": name, "committed_offsets": forgotten},
        as_json=as_json,
    )


def _summary(name: str, found: Sequence[Lag]) -> dict[str, object]:
    return {
        "group": name,
        "topics": sorted({one.topic for one in found}),
        "partitions": len(found),
        "behind": sum(one.behind for one in found),
        "at_risk": sum(one.at_risk for one in found),
        "lost": sum(one.lost for one in found),
        "state": _worst(found),
    }


def _worst(found: Sequence[Lag]) -> str:
    states = {one.state for one in found}
    return next((state for state in ("lost", "at risk") if state in states), "ok")


def _topics(row: TableRow) -> str:
    return ", ".join(row["topics"])


_LIST_COLUMNS = [
    TableColumn("group", left=True),
    TableColumn("topics", _topics, left=True),
    TableColumn("partitions"),
    TableColumn("behind"),
    TableColumn("state", state_text, left=True),
]
_DESCRIBE_COLUMNS = [
    TableColumn("partition", lambda row: f"{row['topic']}/{row['partition']}", left=True),
    TableColumn("committed", "committed_offset"),
    TableColumn("start", "log_start"),
    TableColumn("end", "end_offset"),
    TableColumn("behind"),
    TableColumn("at risk", "at_risk"),
    TableColumn("lost"),
    TableColumn("committed at", lambda row: format_time(row["committed_ms"]), left=True),
]
_RESET_COLUMNS = [
    TableColumn("partition", lambda row: f"{row['topic']}/{row['partition']}", left=True),
    TableColumn("before"),
    TableColumn("after"),
]
