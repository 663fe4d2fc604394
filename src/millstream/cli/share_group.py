"""What `millstream group` shows of share groups."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from millstream.cli.tables import Column, Row, counted, show_json, show_table
from millstream.client.share_groups import ShareGroupSeen, share_groups
from millstream.errors import ConfigError


def shared(address: Path | str, only: str | None = None) -> list[ShareGroupSeen]:
    """Return the share groups of a folder, or the one of a name; none of a broker's address."""
    return share_groups(address, only) if isinstance(address, Path) else []


def refuse_shared(address: Path | str, name: str) -> None:
    """Refuse to move a share group behind its broker's back.

    Raises:
        ConfigError: the group is a share group.
    """
    if shared(address, name):
        raise ConfigError(
            f"{name!r} is a share group, which only its broker moves: use kafka-share-groups.sh, or "
            "another client of the broker"
        )


def shared_summary(group: ShareGroupSeen) -> dict[str, object]:
    """Return a share group as a row of the list of groups."""
    return {
        "group": group.name,
        "topics": sorted({one.topic for one in group.partitions}),
        "partitions": len(group.partitions),
        "behind": sum(one.behind for one in group.partitions),
        "at_risk": 0,
        "lost": 0,
        "state": f"share group, {counted(len(group.members), 'member')}",
    }


def describe_shared(group: ShareGroupSeen, *, as_json: bool) -> None:
    """Show the members of a share group, and how far it has come."""
    members = [one._asdict() for one in group.members]
    partitions = [dataclasses.asdict(one) for one in group.partitions]
    if as_json:
        said = {"group": group.name, "state": group.state}
        show_json({**said, "members": members, "partitions": partitions})
        return
    click.echo(f"share group {group.name}: {group.state}\n")
    if members:
        show_table(members, _MEMBERS)
        click.echo()
    show_table(partitions, _PARTITIONS)


def _assigned(row: Row) -> str:
    return ", ".join(
        f"{topic}/{number}" for topic, numbers in row["assignment"].items() for number in numbers
    )


_MEMBERS = [
    Column("member", "member_id", left=True),
    Column("client", "client_id", left=True),
    Column("host", "client_host", left=True),
    Column("fetches", _assigned, left=True),
]
_PARTITIONS = [
    Column("partition", lambda row: f"{row['topic']}/{row['partition']}", left=True),
    Column("start", "start_offset"),
    Column("end", "end_offset"),
    Column("behind"),
    Column("in flight", "in_flight"),
    Column("deliveries", "deliveries_max"),
    Column("doomed"),
]
