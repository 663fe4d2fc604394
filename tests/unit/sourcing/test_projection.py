"""Projections: exactly once in effect, rebuilt beside the live one, never mixed."""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import millstream as ms
from millstream.errors import RetriableError
from millstream.sourcing import projection as module
from millstream.sourcing.store import EventStore
from millstream.testing.postgres import PostgresServer, programs

COLUMNS = {"totals": "account TEXT PRIMARY KEY, total INTEGER"}


def add(event, tables) -> None:
    amount, account = event.data.amount, event.stream_id
    found = tables.execute(f"SELECT total FROM {{totals}} WHERE account = '{account}'").fetchone()
    if found is None:
        tables.execute(f"INSERT INTO {{totals}} VALUES ('{account}', {amount})")
    else:
        tables.execute(
            f"UPDATE {{totals}} SET total = total + {amount} WHERE account = '{account}'"
        )


def add_twice(event, tables) -> None:
    add(event, tables)
    add(event, tables)


TOTALS = ms.Projection("sums", COLUMNS, add)
DOUBLED = ms.Projection("sums", COLUMNS, add_twice)
ALL = "SELECT account, total FROM totals ORDER BY account"


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
    return request.getfixturevalue("server").url(f"p{abs(hash(tmp_path)) % 10**9}")


@pytest.fixture
def filled(store: EventStore) -> EventStore:
    for at in range(30):
        store.handle(f"a{at % 3}", [at, 1], command_id=f"c{at}")
    return store


def truth(store: EventStore) -> list[tuple[str, int]]:
    return [(name, store.load(name).state.total) for name in store.stream_ids()]


def test_tables_are_the_fold_of_the_events_and_are_continued(filled: EventStore, into: str) -> None:
    with filled.project(TOTALS, into) as view:
        assert view.catch_up() == 60
        assert view.query(ALL) == truth(filled)
        assert view.catch_up() == 0
    filled.handle("a1", [7])
    with filled.project(TOTALS, into) as view:
        assert view.catch_up() == 1
        assert view.query(ALL) == truth(filled)


def test_a_failure_at_any_event_leaves_tables_and_position_together(
    filled: EventStore, into: str, monkeypatch
) -> None:
    monkeypatch.setattr(module, "BATCH_EVENTS", 7)
    calls, dies_at = [], [0]

    def dying(event, tables) -> None:
        add(event, tables)
        calls.append(1)
        if len(calls) == dies_at[0]:
            raise SystemExit

    for at in range(1, 80, 9):
        calls.clear()
        dies_at[0] = at
        with filled.project(TOTALS, into) as view:
            view._projection = ms.Projection("sums", COLUMNS, dying)
            with contextlib.suppress(SystemExit):
                view.catch_up()
    with filled.project(TOTALS, into) as view:
        view.catch_up()
        assert view.query(ALL) == truth(filled)


def test_several_that_run_at_once_apply_each_event_once(filled: EventStore, into: str) -> None:
    runs = [filled.project(TOTALS, into) for _ in range(3)]
    threads = [threading.Thread(target=run.catch_up) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs[0].query(ALL) == truth(filled)
    for run in runs:
        run.close()


def test_other_code_is_refused_and_rebuilt_beside_what_stays_readable(
    filled: EventStore, into: str
) -> None:
    with filled.project(TOTALS, into) as view:
        view.catch_up()
        with pytest.raises(ms.ConfigError, match="was filled by other code"):
            filled.project(DOUBLED, into)
        assert view.query(ALL) == truth(filled)
        with filled.project(DOUBLED, into, rebuild=True) as rebuilt:
            doubled = [(name, 2 * total) for name, total in truth(filled)]
            assert rebuilt.query(ALL) == doubled
            filled.handle("a0", [1])
            with pytest.raises(ms.FencedError, match="was rebuilt by other code"):
                view.catch_up()
            rebuilt.catch_up()
            assert view.query(ALL) == [(name, 2 * total) for name, total in truth(filled)]


def test_a_rebuild_that_failed_leaves_the_live_one_and_is_continued(
    filled: EventStore, into: str, monkeypatch
) -> None:
    with filled.project(TOTALS, into) as view:
        view.catch_up()
    show = module.ProjectionRun._show
    monkeypatch.setattr(module.ProjectionRun, "_show", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        filled.project(DOUBLED, into, rebuild=True)
    monkeypatch.setattr(module.ProjectionRun, "_show", show)
    with filled.project(TOTALS, into) as view:
        assert view.query(ALL) == truth(filled)
    applied = []
    some = module.ProjectionRun._apply_some
    monkeypatch.setattr(
        module.ProjectionRun, "_apply_some", lambda *a: applied.append(some(*a)) or applied[-1]
    )
    with filled.project(DOUBLED, into, rebuild=True) as rebuilt:
        assert sum(applied) == 0
        assert rebuilt.query(ALL) == [(name, 2 * total) for name, total in truth(filled)]


def test_waiting_for_ones_own_write(filled: EventStore, into: str) -> None:
    with filled.project(TOTALS, into) as view:
        done = filled.handle("a0", [100])
        view.wait_for(done.position)  # nothing follows: applied here
        assert view.query(ALL) == truth(filled)
        with pytest.raises(RetriableError, match="within 0 seconds"):
            view.wait_for(done.position._replace(offset=10**9), "0 seconds")
        view.follow()
        view.wait_for(filled.handle("a0", [100]).position)
        assert view.query(ALL) == truth(filled)


def test_a_follower_that_fails_says_so_to_who_waits(store: EventStore, tmp_path: Path) -> None:
    failing = ms.Projection("failing", COLUMNS, lambda event, tables: 1 / 0)
    with store.project(failing, tmp_path / "v.db") as view:
        view.follow()
        done = store.handle("a", [1])
        with pytest.raises(ms.MillstreamError, match=r"has stopped: ZeroDivisionError"):
            view.wait_for(done.position)


def test_names_that_are_not_possible_are_refused(store: EventStore, tmp_path: Path) -> None:
    for name in ("", "Sums", 'x"; DROP', "a" * 60):
        with pytest.raises(ms.ConfigError, match="is not possible"):
            ms.Projection(name, COLUMNS, add)
    with pytest.raises(ms.ConfigError, match="has no tables"):
        ms.Projection("sums", {}, add)
    (tmp_path / "no.db").write_bytes(b"no database" * 100)
    with pytest.raises(ms.ConfigError, match="cannot be opened"):
        store.project(TOTALS, tmp_path / "no.db")


def test_a_subscription_goes_on_where_it_was(filled: EventStore) -> None:
    first, positions = [], {}
    for event in filled.subscribe(follow=False):
        first.append(event)
        positions[event.position.partition] = event.position.offset
        if len(first) == 25:
            break
    rest = list(filled.subscribe(positions, follow=False))
    found = {(event.stream_id, event.version) for event in (*first, *rest)}
    assert len(found) == len(first) + len(rest) == 60


def test_other_programs_read_the_tables(filled: EventStore, tmp_path: Path) -> None:
    with filled.project(TOTALS, tmp_path / "v.db") as view:
        view.catch_up()
        reader = sqlite3.connect(tmp_path / "v.db")
        assert reader.execute(ALL).fetchall() == truth(filled)
        reader.close()


def test_a_live_subscription_yields_what_is_appended_after_it_began(filled: EventStore) -> None:
    seen: queue.Queue[tuple[str, int]] = queue.Queue()
    positions = {number: end for number, (_, end) in enumerate(filled.log.offsets(filled.topic))}
    subscription = filled.subscribe(positions)

    def follow() -> None:
        for event in subscription:
            seen.put((event.stream_id, event.version))
            if event.stream_id == "last":
                return

    thread = threading.Thread(target=follow)
    thread.start()
    for at in range(5):
        filled.handle(f"new{at}", [1, 2])
        assert [seen.get(timeout=30) for _ in range(2)] == [(f"new{at}", 1), (f"new{at}", 2)]
    filled.handle("last", [1])
    thread.join(30)
    assert not thread.is_alive()


def test_independent_views_of_one_stream_are_at_positions_of_their_own(
    filled: EventStore, into: str, tmp_path: Path
) -> None:
    other = ms.Projection("other", {"others": COLUMNS["totals"]}, add_to_others)
    with (
        filled.project(TOTALS, into) as one,
        filled.project(other, into) as two,
        filled.project(TOTALS, tmp_path / "elsewhere.db") as three,
    ):
        one.catch_up()
        assert (two.positions(), three.positions()) == ({}, {})
        filled.handle("a0", [1])
        two.catch_up()
        with filled.project(other, into, rebuild=True):
            pass
        now = truth(filled)
        assert two.query("SELECT account, total FROM others ORDER BY 1") == now
        assert one.query(ALL) != now
        three.catch_up()
        one.catch_up()
        assert one.query(ALL) == three.query(ALL) == now


def add_to_others(event, tables) -> None:
    tables.execute(
        f"INSERT INTO {{others}} AS t VALUES ('{event.stream_id}', {event.data.amount}) "
        "ON CONFLICT (account) DO UPDATE SET total = t.total + excluded.total"
    )


def test_readers_see_no_gap_while_a_projection_is_rebuilt(
    filled: EventStore, tmp_path: Path
) -> None:
    views, rebuilt, found = tmp_path / "v.db", threading.Event(), []

    def read() -> None:
        reader = sqlite3.connect(views, timeout=60)
        while not rebuilt.is_set():
            found.append(reader.execute(ALL).fetchall())
        found.append(reader.execute(ALL).fetchall())
        reader.close()

    with filled.project(TOTALS, views) as view:
        view.catch_up()
    reading = threading.Thread(target=read)
    reading.start()
    for projection in (DOUBLED, TOTALS, DOUBLED):
        filled.project(projection, views, rebuild=True).close()
    rebuilt.set()
    reading.join(60)
    single = truth(filled)
    doubled = [(name, 2 * total) for name, total in single]
    assert found[-1] == doubled
    assert all(one in (single, doubled) for one in found)
