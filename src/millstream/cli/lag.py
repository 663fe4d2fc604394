"""``millstream lag``: how far groups are behind, and which of them are about to lose records."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

import click
from rich.text import Text

from millstream.choices import did_you_mean
from millstream.cli.tables import TableColumn, TableRow, address_option, json_option, print_rows
from millstream.client import EventLog, connect
from millstream.client.address import shown
from millstream.client.groups import Lag
from millstream.errors import ConfigError


@click.command()
@click.argument("group", required=False)
@click.option(
    "--check", is_flag=True, help="Exit with 1 if records are at risk or lost; for scripts."
)
@address_option
@json_option
@click.pass_context
def lag(
    context: click.Context, group: str | None, address: Path | str, *, check: bool, as_json: bool
) -> None:
    """Show how far groups are behind, and whether they are about to lose records.

    Of the records that a group has still to read (`behind`), those `at risk` are removed next, by
    the topic's retention; those `lost` were removed before the group had read them. All three count
    offsets. Without GROUP, all groups are shown.

    \b
    Examples:
      millstream lag
      millstream lag billing --json
      millstream lag --check || notify "read faster"
    """
    with connect(address) as log:
        found = log.lag(known_group(log, group) if group is not None else None)
    if found or as_json:
        print_rows([lag_row(one) for one in found], _COLUMNS, as_json=as_json)
    else:
        click.echo(f"no group has committed an offset in {shown(address)}")
    if not as_json:
        print_advice(found)
    if check and any(one.state != "ok" for one in found):
        context.exit(1)


def known_group(log: EventLog, name: str) -> str:
    """Return the name of a group that has committed something.

    Raises:
        ConfigError: it has not.
    """
    known = log.groups()
    if name not in known:
        there = ", ".join(known[:10]) or "none yet"
        raise ConfigError(
            f"no group {name!r} has committed an offset (groups: {there}); correct the name."
            f"{did_you_mean(name, known)}"
        )
    return name


def lag_row(one: Lag) -> dict[str, object]:
    """Return how far a group is behind in one partition, as a row."""
    return {**dataclasses.asdict(one), "state": one.state}


def print_advice(found: Sequence[Lag]) -> None:
    """Print one sentence on what to do, if records are at risk or lost."""
    endangered = [one for one in found if one.state != "ok"]
    if endangered:
        click.echo(f"\n{_what_to_do(endangered)}")


def _what_to_do(endangered: Sequence[Lag]) -> str:
    worst = next((one for one in endangered if one.lost), endangered[0])
    longer = f"keep records for longer (millstream topic alter {worst.topic} --set …)"
    if not worst.lost:
        return f"Records are about to be removed unread: read faster, or {longer}."
    partitions = " ".join(
        f"--partition {one.partition}"
        for one in endangered
        if one.lost and (one.group, one.topic) == (worst.group, worst.topic)
    )
    return (
        "Records were removed unread: continue without them (millstream group reset "
        f"{shlex.quote(worst.group)} --topic {worst.topic} --to earliest {partitions}), and then read faster, "
        f"or {longer}."
    )


def state_text(row: TableRow) -> Text:
    """Return the state of a row with its counts."""
    if row["state"] == "ok":
        return Text("ok", "green")
    parts = []
    if row["lost"]:
        parts.append(Text(f"lost {row['lost']}", "bold red"))
    if row["at_risk"]:
        parts.append(Text(f"at risk {row['at_risk']}", "yellow"))
    return Text("\n").join(parts) if parts else Text(str(row["state"]))


_COLUMNS = [
    TableColumn("group", left=True),
    TableColumn("topic", left=True),
    TableColumn("partition"),
    TableColumn("committed", "committed_offset"),
    TableColumn("end", "end_offset"),
    TableColumn("behind"),
    TableColumn("state", state_text, left=True),
]
