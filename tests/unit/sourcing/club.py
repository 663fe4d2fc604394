"""A club whose members may ask to be forgotten: the aggregate of the tests of forgetting."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

import millstream as ms
from millstream.sourcing.store import EventStore

SECRETS = ("Ada Lovelace of Marylebone", "ada-lovelace@analytical.example")


@dataclass(frozen=True)
class Joined:
    member: str
    name: str
    email: str
    fee: int


def event_types(**changes) -> ms.EventTypes:
    types = ms.EventTypes()
    personal = {"name": "forgotten", "email": ""}
    types.register("joined", **{"subject": "member", "personal": personal, **changes})(Joined)
    return types


def evolve(state: dict[str, str], event: Joined) -> dict[str, str]:
    return {**state, event.member: f"{event.name} <{event.email}> {event.fee}"}


CLUB = ms.Decider(dict, lambda command, state: [command], evolve, state=dict[str, str])
ADA = Joined("m1", *SECRETS, 7)
BOB = Joined("m2", "Bob", "bob@example", 8)


def open_club(log: ms.EventLog, tmp_path: Path, **options) -> EventStore:
    keys = tmp_path / "apart" / "keys.db"
    given = {"keys": keys, "snapshot_every": 1, "partitions": 2, **options}
    return EventStore(log, "club", CLUB, event_types(), **given)


def files_with(folder: Path, text: str) -> list[str]:
    """The files that have a text; in an archive, which is compressed, among its values."""
    return [path.name for path in folder.rglob("*") if path.is_file() and text in content(path)]


def content(path: Path) -> str:
    if path.suffix == ".parquet":
        return str(pq.read_table(path).to_pylist())
    return path.read_bytes().decode("latin-1")
