"""What goes wrong from outside: a log from an older backup, names that are too long, an event nobody can read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from unit.sourcing.example import load_example
from unit.sourcing.ledger import open_store
from unit.sourcing.test_projection import ALL, COLUMNS, TOTALS, add, truth

import millstream as ms
from millstream.sourcing import projection as module
from millstream.sourcing.store import EventStore
from millstream.testing.postgres import PostgresServer, programs

cinema = load_example("cinema")
MINUTE_MS = 60_000


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    if programs() is None:
        pytest.skip("PostgreSQL is not installed here")
    with PostgresServer() as running:
        yield running


@pytest.fixture(params=["sqlite", "postgres"])
def into(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "views.db")
    return request.getfixturevalue("server").url(f"h{abs(hash(tmp_path)) % 10**9}")


@pytest.mark.parametrize("went_on", [False, True], ids=["shorter", "went on otherwise"])
def test_a_projection_of_a_log_that_was_restored_from_an_older_backup_is_refused_until_rebuilt(
    tmp_path: Path, into: str, went_on: bool, monkeypatch
) -> None:
    monkeypatch.setattr(module, "BEHIND_S", 0.05)
    folder = tmp_path / "log"
    with ms.connect(folder) as log, open_store(log) as store:
        store.handle("ada", [5])
    shutil.copytree(folder, tmp_path / "backup")
    with ms.connect(folder) as log, open_store(log) as store:
        for _ in range(3):
            store.handle("ada", [7])
        with store.project(TOTALS, into) as view:
            view.catch_up()
            assert view.query(ALL) == [("ada", 26)]
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    with ms.connect(folder) as log, open_store(log) as store:
        for _ in range(5 if went_on else 0):
            store.handle("ada", [1])
        with store.project(TOTALS, into) as view:
            with pytest.raises(ms.ConfigError, match="was restored from an older backup"):
                view.catch_up()
            assert view.query(ALL) == [("ada", 26)]  # as it was, and readable
        with store.project(TOTALS, into, rebuild=True) as view:
            assert view.query(ALL) == truth(store) == [("ada", 10 if went_on else 5)]
            store.handle("ada", [1])
            view.catch_up()
            assert view.query(ALL) == truth(store)


def test_waiting_for_ones_own_write_does_not_believe_a_position_of_another_log(
    tmp_path: Path, into: str, monkeypatch
) -> None:
    monkeypatch.setattr(module, "BEHIND_S", 0.05)
    folder = tmp_path / "log"
    with ms.connect(folder) as log, open_store(log, partitions=1) as store:
        store.handle("ada", [5])
    shutil.copytree(folder, tmp_path / "backup")
    with ms.connect(folder) as log, open_store(log, partitions=1) as store:
        store.handle("ada", [7, 7, 7])
        with store.project(TOTALS, into) as view:
            view.catch_up()
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    with ms.connect(folder) as log, open_store(log, partitions=1) as store:
        done = store.handle("bob", [1])
        with (
            store.project(TOTALS, into) as view,
            pytest.raises(ms.ConfigError, match="was restored from an older backup"),
        ):
            view.wait_for(done.position)


def test_a_rebuild_that_was_begun_on_a_log_that_is_gone_is_begun_again(
    tmp_path: Path, into: str, monkeypatch
) -> None:
    monkeypatch.setattr(module, "BEHIND_S", 0.05)
    folder = tmp_path / "log"
    with ms.connect(folder) as log, open_store(log) as store:
        store.handle("ada", [5])
    shutil.copytree(folder, tmp_path / "backup")
    with ms.connect(folder) as log, open_store(log) as store:
        store.project(TOTALS, into).close()
        store.handle("ada", [7])
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(module.ProjectionRun, "_show", lambda *_: 1 / 0)
            store.project(TOTALS, into, rebuild=True)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    with (
        ms.connect(folder) as log,
        open_store(log) as store,
        store.project(TOTALS, into, rebuild=True) as view,
    ):
        assert view.query(ALL) == [("ada", 5)]


def test_positions_of_a_subscription_beyond_a_restored_log_are_refused(
    log: ms.EventLog, store: EventStore
) -> None:
    done = store.handle("ada", [5])
    with pytest.raises(ms.OffsetOutOfRangeError):
        list(store.subscribe({done.position.partition: done.position.offset + 5}, follow=False))


def test_names_as_long_as_they_may_be_are_told_apart_in_every_database(
    store: EventStore, into: str
) -> None:
    long = "a" * 39
    tables = {f"{long}{end}": COLUMNS["totals"] for end in "xy"}
    projection = ms.Projection(f"{long}z", tables, both(*tables))
    store.handle("ada", [5])
    with store.project(projection, into) as view:
        view.catch_up()
    for expected in (5, 9):
        with store.project(projection, into, rebuild=True) as view:
            for name, factor in zip(tables, (1, 2), strict=True):
                assert view.query(f"SELECT total FROM {name}") == [(factor * expected,)]
            store.handle("ada", [4])
    with pytest.raises(ms.ConfigError, match="up to 40 small letters"):
        ms.Projection("a" * 41, COLUMNS, add)


def both(one: str, other: str):
    def apply(event, tables) -> None:
        for name, amount in ((one, event.data.amount), (other, 2 * event.data.amount)):
            tables.execute(
                f"INSERT INTO {{{name}}} AS t VALUES ('{event.stream_id}', {amount}) "
                "ON CONFLICT (account) DO UPDATE SET total = t.total + excluded.total"
            )

    return apply


def test_projections_whose_names_would_run_into_each_other_are_kept_apart(
    store: EventStore, into: str
) -> None:
    store.handle("ada", [5])
    for name, table in (("a__b", "c"), ("a", "b__c"), ("a_", "b"), ("a", "_b")):
        add_to = ms.Projection(name, {table: COLUMNS["totals"]}, adder(table))
        if name == "a" and table == "_b":
            with pytest.raises(ms.ConfigError, match="filled by other code"):
                store.project(add_to, into)
            continue
        with store.project(add_to, into) as view:
            view.catch_up()
            assert view.query(f"SELECT total FROM {table}") == [(5,)]


def adder(table: str):
    def apply(event, tables) -> None:
        tables.execute(f"INSERT INTO {{{table}}} VALUES ('{event.stream_id}', {event.data.amount})")

    return apply


def test_a_table_name_that_is_taken_is_refused(store: EventStore, into: str) -> None:
    store.project(TOTALS, into).close()
    other = ms.Projection("other", COLUMNS, add)
    with pytest.raises(ms.ConfigError, match="Another projection, or a table, has it"):
        store.project(other, into)
    with store.project(TOTALS, into) as view:
        store.handle("ada", [5])
        view.catch_up()
        assert view.query(ALL) == [("ada", 5)]


@dataclass(frozen=True)
class Measured:
    value: int


def test_one_event_that_an_upcaster_fails_on_holds_up_nothing_before_it(
    log: ms.EventLog, tmp_path: Path
) -> None:
    before = ms.EventTypes()
    before.register("measured")(Measured)
    decider = ms.Decider(int, lambda command, _: command, lambda state, event: state + event.value)
    with EventStore(log, "m", decider, before, partitions=1) as store:
        store.handle("good", [Measured(1)] * 3000)
        store.handle("bad", [Measured(0)])
        store.handle("good", [Measured(1)] * 3000)
    now = ms.EventTypes()
    now.register("measured", version=2)(Measured)
    now.upcaster("measured", from_version=1)(lambda old: {"value": 10 // old["value"]})
    sums = ms.Projection("sums", {"sums": "value INTEGER"}, note)
    with (
        EventStore(log, "m", decider, now, partitions=1) as store,
        store.project(sums, tmp_path / "v.db") as view,
    ):
        for _ in range(2):
            with pytest.raises(ms.MillstreamError, match="version 1 at offset 3000 of m/0"):
                view.catch_up()
        assert view.positions() == {0: 3000}
        assert view.query("SELECT count(*), sum(value) FROM sums") == [(3000, 30_000)]
        assert store.load("good").state == 60_000
        with pytest.raises(ms.MillstreamError, match="offset 3000 of m/0"):
            store.load("bad")
        assert store.handle("good", [Measured(5)]).version == 6001


def note(event, tables) -> None:
    tables.execute("INSERT INTO {sums} VALUES (?)", (event.data.value,))


def test_a_clock_that_jumps_makes_expiries_early_and_sells_nothing_twice(
    log: ms.EventLog, tmp_path: Path
) -> None:
    now_ms = [1_800_000_000_000]
    clock = lambda: now_ms[0]  # noqa: E731
    with (
        EventStore(log, "seats", cinema.CINEMA, cinema.events, clock_ms=clock) as seats,
        ms.ProcessManager(
            "expiry", seats, cinema.expire_holds, state=tmp_path / "e.db", clock_ms=clock
        ) as expiry,
    ):
        seats.handle("A7", cinema.Hold("ada"))
        now_ms[0] += 10**9  # eleven days ahead
        assert expiry.run_due() == 1
        now_ms[0] -= 2 * 10**9  # and back behind the hold
        with pytest.raises(ms.CommandRejectedError):
            seats.handle("A7", cinema.Confirm("ada"))
        seats.handle("A7", cinema.Hold("bob"))
        assert expiry.run_due() == 0
        seats.handle("A7", cinema.Confirm("bob"))
        times = [event.recorded_at for event in seats.history("A7")]
        assert times == sorted(times)
        kinds = [event.type for event in seats.history("A7")]
        assert kinds == ["seat-held", "hold-expired", "seat-held", "seat-sold"]
