"""Views whose rows tasks have copied beforehand: the same as rows that the driver writes, whatever is left over."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack

import polars as pl
import pytest

from millstream.errors import FencedError, RetriableError, StagedRowsLostError
from millstream.kernels.frames import DIFF
from millstream.kernels.plan import JobPlan, SinkPlan, ViewSinkSpec
from millstream.kernels.state.keyhash import Buckets
from millstream.views.commit.committer import BatchResult
from millstream.views.commit.open_committer import open_committer
from millstream.views.postgres import staging
from millstream.views.postgres.connection import PostgresConnection
from millstream.views.sinks.postgres import forget_app
from millstream.views.staging import StagedRows
from millstream.views.store_location import open_state_store, parse_state_store

psycopg = pytest.importorskip("psycopg", reason="the driver of PostgreSQL is not installed here")

COLUMNS = {"k": pl.String(), "j": pl.Int64(), "v": pl.Float64(), "t": pl.Datetime("us", "UTC")}
TABLE = pl.Schema({**COLUMNS, DIFF: pl.Int8()})
TASKS = 3


class Place:
    """Views in a database, beside the app's store or in it, and the job that writes them."""

    def __init__(self, url, folder, *, inside):
        self.url, self.folder = url, folder
        self.state_store = folder / "views.db"
        if inside:
            self.state_store = parse_state_store(url, "app", what="The store")
        self.sink = SinkPlan(
            "out", 8, ("k", "j"), tuple(COLUMNS.items()), ViewSinkSpec(None if inside else url)
        )
        self.opened = ExitStack()
        self.inside = inside
        self.reader = None

    def job(self, kept=None):
        plan = JobPlan("app", (), (), (), (self.sink,), Buckets(1))
        committer = self.opened.enter_context(
            open_committer(plan, self.state_store, self.folder / "log")
        )
        if kept is not None:
            for store in (committer.state_store, *committer.sinks):
                store._changes_kept = kept
        return committer, committer.begin_run("main", "one")

    def read(self):
        if self.reader is None and self.inside:
            self.reader = self.opened.enter_context(
                open_state_store(self.state_store, readonly=True)
            )
        elif self.reader is None:
            from millstream.views.postgres.reader import PostgresViewReader

            self.reader = self.opened.enter_context(PostgresViewReader(self.url))
        return self.reader

    def rows(self):
        return {(k, j): (v, t) for k, j, v, t in self.read().scan("out").rows()}

    def tables(self):
        with psycopg.connect(self.url) as connection:
            found = connection.execute(
                "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname LIKE '%staged%'"
            )
            return sorted(name for (name,) in found)


@pytest.fixture(params=[False, True], ids=["beside the store", "in the store"])
def place(request, database, tmp_path):
    made = Place(database, tmp_path, inside=request.param)
    yield made
    made.opened.close()


def stage(committer, batch_id, sink, rows):
    """Stage rows as tasks do: all of a key in one of them, in their order."""
    stager = committer.stager(batch_id, sink)
    assert stager.is_reachable()
    parts = [
        rows.filter(
            pl.Series([hash(key) % TASKS == number for key in rows.select(stager.key).rows()])
        )
        for number in range(TASKS)
    ]
    return StagedRows(rows.height, tuple(stager.stage(part) for part in parts if part.height))


def commit_staged(committer, batch_id, sink, rows):
    staged = stage(committer, batch_id, sink, rows)
    return committer.commit(batch_id, BatchResult(staged={sink.name: staged}), {})


def table(*rows):
    return pl.DataFrame(list(rows), schema=TABLE, orient="row")


def row(k, j=1, v=0.0, diff=1):
    return (k, j, v, None, diff)


def random_batch(generator, held):
    """Make rows that replace, add and retract, some several times; and what is to be there after them."""
    rows = []
    for _ in range(generator.randrange(40)):
        key = generator.choice(["a", "b", "", None, "ä\t\\N"]), generator.choice([1, 2, None])
        value = generator.choice([0.5, float("inf"), None, 1e300]), None
        rows.append((*key, *value, generator.choice([1, 1, -1])))
    left = Counter()
    order = {}
    for at, (*given, diff) in enumerate(rows):
        left[tuple(given)] += diff
        order[tuple(given)] = at
    after = dict(held)
    touched = {given[:2] for given, n in left.items() if n < 0}
    kept = {}
    for given, n in sorted(left.items(), key=lambda item: order[item[0]]):
        if n > 0:
            kept[given[:2]] = given[2:]
    for key in touched - kept.keys():
        after.pop(key, None)
    return table(*rows), after | kept


@pytest.mark.parametrize("kept", [1_000_000, 7, 1])
def test_staged_rows_do_what_rows_do_and_the_change_log_says_so(place, kept, monkeypatch):
    monkeypatch.setattr(staging, "_SLICE_ROWS", 3)
    generator = random.Random(kept)
    committer, batch_id = place.job(kept)
    held, logged, end = {}, {}, 0
    for number in range(batch_id, batch_id + 12):
        rows, held = random_batch(generator, held)
        if not rows.height:
            continue
        assert commit_staged(committer, number, place.sink, rows)
        assert place.rows() == held
        assert place.tables() == []
        last = place.read().newest_changes().get("out", 0)
        changes = place.read().changes("out", since=max(end, last - kept))
        assert changes["_seq"].to_list() == list(range(max(end, last - kept) + 1, last + 1))
        assert len(set(changes.select("k", "j").rows())) == changes.height
        for operation, *key, v, t in changes.select("_op", "k", "j", "v", "t").rows():
            logged[tuple(key)] = (v, t) if operation == "upsert" else None
        end = last
    assert end > 12
    if kept > end:
        assert {key: value for key, value in logged.items() if value is not None} == held


def test_an_attempt_that_nobody_names_does_not_count_and_a_repeated_batch_changes_nothing(place):
    committer, batch_id = place.job()
    stage(committer, batch_id, place.sink, table(row("failed")))
    assert commit_staged(committer, batch_id, place.sink, table(row("good")))
    assert place.rows() == {("good", 1): (0.0, None)}
    again = stage(committer, batch_id, place.sink, table(row("late")))
    assert not committer.commit(batch_id, BatchResult(staged={"out": again}), {})
    assert place.rows() == {("good", 1): (0.0, None)}
    place.job()
    assert place.tables() == []


def test_a_run_that_was_replaced_commits_nothing_and_removes_nothing_of_its_successor(place):
    old, batch_id = place.job()
    staged = stage(old, batch_id, place.sink, table(row("old")))
    new, batch_id = place.job()
    assert place.tables() == []
    stage(old, batch_id, place.sink, table(row("woken")))
    fresh = stage(new, batch_id, place.sink, table(row("new")))
    with pytest.raises(FencedError):
        old.commit(batch_id, BatchResult(staged={"out": staged}), {})
    with psycopg.connect(place.url):
        connection = PostgresConnection(
            new.stager(batch_id, place.sink).address,
            readonly=False,
            settings=new.stager(batch_id, place.sink).settings,
        )
        staging.remove_tables(connection, "app", old.run)
        connection.close()
    assert len(place.tables()) == 2
    assert new.commit(batch_id, BatchResult(staged={"out": fresh}), {})
    assert place.rows() == {("new", 1): (0.0, None)}
    assert place.tables() == []


def test_staged_rows_that_a_server_has_lost_are_missed(place):
    committer, batch_id = place.job()
    for lost in ("TRUNCATE", "DROP TABLE"):
        staged = stage(committer, batch_id, place.sink, table(row("a"), row("b")))
        with psycopg.connect(place.url) as connection:
            schema = connection.execute(
                "SELECT relnamespace::regnamespace::text FROM pg_class WHERE relname = %s",
                (staged.parts[0].tables.rows,),
            ).fetchone()[0]
            connection.execute(f"{lost} {schema}.{staged.parts[0].tables.rows}")
        with pytest.raises(StagedRowsLostError, match="2 of the rows that tasks had staged"):
            committer.commit(batch_id, BatchResult(staged={"out": staged}), {})
    assert place.rows() == {}
    assert commit_staged(committer, batch_id, place.sink, table(row("a")))


def test_a_server_that_crashes_loses_what_was_staged_and_nothing_else(place, postgres_server):
    committer, batch_id = place.job()
    assert commit_staged(committer, batch_id, place.sink, table(row("before")))
    staged = stage(committer, batch_id + 1, place.sink, table(row("a"), row("b")))
    postgres_server.kill()
    postgres_server.start()
    if not place.inside:  # a store of the app's own waits for its server
        with pytest.raises(RetriableError):
            committer.commit(batch_id + 1, BatchResult(staged={"out": staged}), {})
    with pytest.raises(StagedRowsLostError, match="2 of the rows that tasks had staged"):
        committer.commit(batch_id + 1, BatchResult(staged={"out": staged}), {})
    given = {"out": table(row("a"), row("b"))}
    assert committer.commit(batch_id + 1, BatchResult(rows=given), {})
    place.opened.close()
    place.reader = None
    assert {key for key, _ in place.rows()} == {"before", "a", "b"}


def test_a_copy_that_hangs_holds_no_commit_up_and_its_table_goes_with_the_next_run(place):
    committer, batch_id = place.job()
    staged = stage(committer, batch_id, place.sink, table(row("a")))
    stager = committer.stager(batch_id, place.sink)
    hanging = PostgresConnection(stager.address, readonly=False, settings=stager.settings)
    with hanging.transaction() as session:
        session.execute(f"INSERT INTO {stager.tables.rows} (attempt, i) VALUES (1, 0)")
        assert committer.commit(batch_id, BatchResult(staged={"out": staged}), {})
        assert place.tables() == [stager.tables.rows]
    hanging.close()
    assert place.rows() == {("a", 1): (0.0, None)}
    place.job()
    assert place.tables() == []


def test_what_was_staged_is_removed_with_the_app(place):
    committer, batch_id = place.job()
    stage(committer, batch_id, place.sink, table(row("a")))
    assert len(place.tables()) == 2
    if place.inside:
        committer.state_store.drop()
    else:
        forget_app(place.url, "app")
    assert place.tables() == []


def test_a_process_that_cannot_write_there_says_so(place):
    committer, batch_id = place.job()
    stager = committer.stager(batch_id, place.sink)
    other = staging.StagedTables("_staged_none_u", "_staged_none_d")
    assert not staging.PostgresStager(
        stager.address, stager.settings, stager.sink, other
    ).is_reachable()
