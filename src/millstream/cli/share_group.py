"""What `millstream group` shows of share groups."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from millstream.cli.tables import TableColumn, TableRow, pluralize, print_json, print_table
from millstream.client.address import log_folder
from millstream.client.folder.share_groups import ShareGroupDescription, share_groups
from millstream.errors import ConfigError


def list_share_groups(address: Path | str, only: str | None = None) -> list[ShareGroupDescription]:
    """Return the share groups of a folder, or the one of a name; none of a broker's address."""
    folder = log_folder(address)
    return [] if folder is None else share_groups(folder, only)


def refuse_share_group(address: Path | str, name: str) -> None:
    """Refuse to move a share group behind its broker's back.

    Raises:
        ConfigError: the group is a share group.
    """
    if list_share_groups(address, name):
        raise ConfigError(
            f"{name!r} is a share group, which only its broker moves: use kafka-share-groups.sh, or "
            "another client of the broker"
        )


def share_group_summary(group: ShareGroupDescription) -> dict[str, object]:
    """Return a share group as a row of the list of groups."""
    return {
        "group": group.name,
        "topics": sorted({one.topic for one in group.partitions}),
        "partitions": len(group.partitions),
        "behind": sum(one.behind for one in group.partitions),
        "at_risk": 0,
        "lost": 0,
        "state": f"share group, {pluralize(len(group.members), 'member')}",
    }


def describe_share_group(group: ShareGroupDescription, *, as_json: bool) -> None:
    """Show the members of a share group, and how far it has come."""
    members = [one._asdict() for one in group.members]
    partitions = [dataclasses.asdict(one) for one in group.partitions]
    if as_json:
        said = {"group": group.name, "state": group.state}
        print_json({**said, "members": members, "partitions": partitions})
        return
    click.echo(f"share group {group.name}: {group.state}\n")
    if members:
        print_table(members, _MEMBERS)
        click.echo()
    print_table(partitions, _PARTITIONS)


def _assigned(row: TableRow) -> str:
    return ", ".join(
        f"{topic}/{number}" for topic, numbers in row["assignment"].items() for number in numbers
    )


_MEMBERS = [
    TableColumn("member", "member_id", left=True),
    TableColumn("client", "client_id", left=True),
    TableColumn("host", "client_host", left=True),
    TableColumn("fetches", _assigned, left=True),
]
_PARTITIONS = [
    TableColumn("partition", lambda row: f"{row['topic']}/{row['partition']}", left=True),
    TableColumn("start", "start_offset"),
    TableColumn("end", "end_offset"),
    TableColumn("behind"),
    TableColumn("in flight", "in_flight"),
    TableColumn("deliveries", "delivery_count_max"),
    TableColumn("undeliverable"),
]
