"""Aggregate snapshots are a shortcut, never the truth; and the state at a version or a time."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from unit.sourcing.ledger import ACCOUNT, Balance, Paid, event_types, evolve, open_store

import millstream as ms
from millstream.cli.main import millstream
from millstream.sourcing import stream_index
from millstream.sourcing.command_queue import PendingCommand
from millstream.sourcing.store import EventStore
from millstream.sourcing.stored_event import Metadata


def doubled(state: Balance, event) -> Balance:
    return evolve(evolve(state, event), event)


def test_a_load_reads_the_snapshot_and_the_tail_only(log: ms.EventLog, monkeypatch) -> None:
    with open_store(log, partitions=1, snapshot_every=10) as store:
        for _ in range(57):
            store.handle("ada", [1])
    with open_store(log, partitions=1, snapshot_every=10) as store:
        lane = store.lane(0)
        lane.catch_up()
        read, spans = lane.log.read, []
        monkeypatch.setattr(
            lane.log,
            "read",
            lambda *given: spans.append(given[:2]) or read(*given),
        )
        assert store.load("ada").state == Balance(57, 57)
        assert spans == [(50, 57)]


def test_a_snapshot_of_code_that_has_changed_is_not_used(log: ms.EventLog) -> None:
    with open_store(log, snapshot_every=5) as store:
        for _ in range(12):
            store.handle("ada", [1])
    other = ms.Decider(Balance, ACCOUNT.decide, doubled, state=Balance)
    with EventStore(log, "ledger", other, event_types(), snapshot_every=5) as store:
        assert store.load("ada").state == Balance(24, 24)
        assert list(store.verify_snapshots()) == []


def test_snapshots_without_the_type_of_the_state_are_refused(log: ms.EventLog) -> None:
    decider = ms.Decider(Balance, ACCOUNT.decide, evolve)
    with (
        EventStore(log, "ledger", decider, event_types(), snapshot_every=5) as store,
        pytest.raises(ms.ConfigError, match="need the type of the state"),
    ):
        store.load("ada")


SHOP = """
import sys
sys.path.insert(0, {tests!r})
from unit.sourcing.ledger import open_store as opened
import millstream as ms
def open_store():
    return opened(ms.connect({folder!r}), snapshot_every=5)
"""


def test_verify_finds_a_snapshot_that_is_not_what_the_events_say(
    log: ms.EventLog, tmp_path: Path
) -> None:
    shop = tmp_path / "shop.py"
    tests = str(Path(__file__).resolve().parents[2])
    shop.write_text(SHOP.format(tests=tests, folder=str(tmp_path / "log")))
    with open_store(log, snapshot_every=5) as store:
        for _ in range(7):
            store.handle("ada", [1])
        file = tmp_path / "log/sourcing" / store.topic_id / f"{store.partition_of('ada')}.db"
    done = CliRunner().invoke(millstream, ["sourcing", "verify", str(shop)])
    assert (done.exit_code, done.output) == (0, "1 snapshots compared, 0 differ\n")
    with sqlite3.connect(file) as db:
        db.execute("UPDATE snapshots SET state = ?", (b'{"total":9,"payments":5}',))
    db.close()
    done = CliRunner().invoke(millstream, ["sourcing", "verify", f"{shop}:open_store"])
    assert done.exit_code == 1
    wrong = "at version 5 the snapshot is not what a full fold is: .total is a int, and is read as a int of another value"
    assert f"ada: {wrong}" in done.output
    assert "9" not in done.output  # a value may be personal
    for wrong in ("no.py", f"{shop}:sys"):
        refused = CliRunner().invoke(millstream, ["sourcing", "verify", wrong])
        assert isinstance(refused.exception, ms.ConfigError)


def test_the_state_at_a_version_and_at_a_time(log: ms.EventLog) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    now = [start]
    with open_store(
        log, snapshot_every=2, clock_ms=lambda: round(now[0].timestamp() * 1000)
    ) as store:
        for day in range(5):
            now[0] = start + timedelta(days=day)
            store.handle("ada", [10])
        for version in range(6):
            found = store.state_at("ada", version)
            assert (found.version, found.state.total) == (version, 10 * version)
        assert store.state_at("ada", start - timedelta(seconds=1)).version == 0
        assert store.state_at("ada", start + timedelta(days=2)).state.total == 30
        assert store.state_at("ada", start + timedelta(days=2, hours=23)).state.total == 30
        assert store.state_at("ada", start + timedelta(days=99)).state.total == 50
        with pytest.raises(ms.ConfigError, match="no time zone"):
            store.state_at("ada", datetime(2026, 1, 1))  # noqa: DTZ001 - which is refused
        with pytest.raises(ms.ConfigError, match="version -1"):
            store.state_at("ada", -1)


def seats(kind: object) -> ms.Decider:
    def decide(seat: int, taken: dict[int, bool]) -> list[Paid]:
        if seat in taken:
            raise ms.CommandRejectedError("it is taken")
        return [Paid(seat)]

    return ms.Decider(
        initial=dict, decide=decide, evolve=lambda s, e: {**s, e.amount: True}, state=kind
    )


@pytest.mark.parametrize(("kind", "kept"), [(dict, False), (dict[int, bool], True)])
def test_a_state_that_would_be_read_as_another_one_is_not_kept(
    log: ms.EventLog, kind: object, kept: bool
) -> None:
    with EventStore(log, "hall", seats(kind), event_types(), snapshot_every=2) as store:
        store.handle("hall", 1)
        store.handle("hall", 2)
    with EventStore(log, "hall", seats(kind), event_types(), snapshot_every=2) as store:
        assert len(list(store.verify_snapshots())) == kept
        assert store.load("hall").state == {1: True, 2: True}
        with pytest.raises(ms.CommandRejectedError):
            store.handle("hall", 2)


def test_a_snapshot_under_another_type_of_the_state_is_not_used(log: ms.EventLog) -> None:
    for kind in (dict[int, bool], dict[str, bool]):
        with EventStore(log, "hall", seats(kind), event_types(), snapshot_every=2) as store:
            if not store.load("hall").version:
                store.handle("hall", 1)
                store.handle("hall", 2)
            assert store.load("hall").state == {1: True, 2: True}


@dataclass
class Hall:
    """An entity: it is the same one if its id is the same."""

    name: str = "hall"
    taken: dict = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hall) and self.name == other.name

    __hash__ = None  # type: ignore[assignment]


def test_a_state_that_is_equal_by_its_id_alone_is_compared_by_its_fields(log: ms.EventLog) -> None:
    def decide(seat: int, hall: Hall) -> list[Paid]:
        if seat in hall.taken:
            raise ms.CommandRejectedError("it is taken")
        return [Paid(seat)]

    decider = ms.Decider(
        initial=Hall,
        decide=decide,
        evolve=lambda s, e: Hall(s.name, {**s.taken, e.amount: True}),
        state=Hall,
    )
    for _ in range(2):
        with EventStore(log, "hall", decider, event_types(), snapshot_every=2) as store:
            if not store.load("hall").version:
                store.handle("hall", 1)
                store.handle("hall", 2)
            with pytest.raises(ms.CommandRejectedError):
                store.handle("hall", 2)


def test_a_state_that_cannot_be_kept_hinders_no_other(
    log: ms.EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evolve_some(state: Any, event: Paid) -> Any:
        return {**state, (event.amount if event.note else str(event.amount)): True}

    decider = ms.Decider(initial=dict, decide=lambda c, s: [c], evolve=evolve_some, state=dict)
    monkeypatch.setattr(stream_index, "FLUSH_RUNS", 2)
    with EventStore(log, "hall", decider, event_types(), partitions=1, snapshot_every=1) as store:
        lane = store.lane(0)
        lane.catch_up()
        commands = [
            PendingCommand(name, Paid(1, note), Metadata(name))
            for name, note in (("bad", "n"), ("good", ""))
        ]
        steps = lane.handle(list(commands))
        (offset,) = store._queues[0]._append([next(steps)])
        with pytest.raises(StopIteration):
            steps.send(offset)
        assert [one.error for one in commands] == [None, None]
        assert lane.folding.has_snapshot("good")
        assert not lane.folding.has_snapshot("bad")
        assert not lane.index._unflushed
