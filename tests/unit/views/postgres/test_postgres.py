"""Views in PostgreSQL: what is particular to a server. What every store promises: tests/contract."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack

import polars as pl
import pytest

import millstream as ms
from millstream.cli.main import run as command
from millstream.errors import (
    ConfigError,
    EnvironmentProblem,
    FencedError,
    RetriableError,
    UnknownViewError,
)
from millstream.kernels.frames import DIFF
from millstream.kernels.plan import SinkPlan, ViewSinkSpec
from millstream.testing.postgres import PostgresServer
from millstream.views.schema import Fence
from millstream.views.sink import RunStart, SinkBatch

psycopg = pytest.importorskip("psycopg")

from millstream.views.postgres.reader import PostgresViewReader  # noqa: E402 - needs the driver
from millstream.views.postgres.view_table import check_key_columns  # noqa: E402
from millstream.views.sinks.postgres import PostgresSink, forget_app  # noqa: E402

COLUMNS = {"word": pl.String(), "n": pl.Int64()}
RUN = RunStart("app", "main", 1, "one")


def sink(url, name="counts", columns=COLUMNS, key=("word",)):
    return SinkPlan(name, 8, key, tuple(columns.items()), ViewSinkSpec(url))


def counts(**rows):
    return pl.DataFrame({"word": list(rows), "n": list(rows.values())}, schema=COLUMNS)


@pytest.fixture
def opened():
    with ExitStack() as stack:
        yield stack


def target(opened, url, *sinks, start=RUN):
    made = PostgresSink(url, sinks or [sink(url)])
    opened.callback(made.close)
    made.begin_run(start)
    return made


def commit(made, batch_id, start=RUN, **rows):
    fence = Fence(start.app, start.job, start.run, batch_id)
    return made.commit(fence, SinkBatch(rows, {"t": {"0": batch_id}}))


@pytest.fixture
def sql(database, opened):
    session = opened.enter_context(psycopg.connect(database, autocommit=True))
    return session.execute


def test_a_view_is_a_table_that_any_tool_can_read(database, opened, sql):
    columns = {"at": pl.Datetime("us", "UTC"), "ok": pl.Boolean(), "d": pl.Decimal(10, 2)}
    made = target(opened, database, sink(database, "plain", columns, ("at",)))
    rows = pl.DataFrame({"at": [0], "ok": [True], "d": ["1.5"]}).cast(columns)
    commit(made, 0, plain=rows)
    types = sql(
        "SELECT column_name, data_type FROM information_schema.columns "
        "WHERE table_name = 'plain' ORDER BY ordinal_position"
    ).fetchall()
    assert types == [("at", "timestamp with time zone"), ("ok", "boolean"), ("d", "numeric")]
    assert sql("SELECT at::text, ok, d::text FROM plain").fetchall() == [
        ("1970-01-01 00:00:00+00", True, "1.50")
    ]


def test_ms_view_reads_a_database_by_its_url(database, opened):
    commit(target(opened, database), 0, counts=counts(a=1))
    with ms.view("counts", store=database) as view:
        assert view.app == "app"
        assert view.scan().rows() == [("a", 1)]
        assert view.schema.key == ("word",)
        assert view.position == {"t": {"0": 0}}
        assert database not in repr(view)
    with pytest.raises(UnknownViewError, match=r"'nope'.*there are: counts"):
        ms.view("nope", store=database)
    with pytest.raises(UnknownViewError, match="is the app 'app'"):
        ms.view("counts", store=database, app="other")


def test_a_database_without_views_is_told_so(database):
    with pytest.raises(ConfigError, match="no views in postgresql://127"):
        PostgresViewReader(database)


def test_user_and_password_appear_in_no_error(postgres_server, database, opened):
    good = postgres_server.url("views")
    wrong = good.replace("/views", "/nowhere")
    other_password = good.replace("secret", "mistaken")
    nobody = good.replace("tester:", "hunter:")
    away = good.replace(str(postgres_server.port), "1")
    for url in (wrong, other_password, nobody, away):
        for connect in (PostgresViewReader, lambda url: PostgresSink(url, [sink(url)])):
            with pytest.raises((ConfigError, RetriableError)) as caught:
                connect(url)
            said = str(caught.value) + repr(caught.value.__cause__)
            for secret in ("tester", "hunter", "secret", "mistaken", "p@ss", "p%40ss"):
                assert secret not in said, said
            assert "127.0.0.1" in said
    columns = {"word": pl.String(), "at": pl.Datetime("us", "UTC")}
    made = target(opened, database, sink(database, "times", columns))
    before_postgres = pl.DataFrame({"word": ["x"], "at": [-(2**62)]}).cast(columns)
    with pytest.raises(ConfigError) as caught:
        commit(made, 0, times=before_postgres)
    assert "tester" not in str(caught.value)
    assert caught.value.__cause__ is None


RANDOM = "".join(
    chr(33 + (i * i * 7919 + i * 104729) % 90) for i in range(30_000)
)  # hard to compress


def test_long_keys_are_told_apart_found_changed_and_deleted(database, opened):
    columns = {"word": pl.String(), "raw": pl.Binary(), "n": pl.Int64()}
    made = target(opened, database, sink(database, "long", columns, ("word", "raw")))
    beginning = "\\é" + RANDOM
    words = [
        "",
        None,
        "é",
        beginning,
        beginning + "1",
        beginning + "2",
        beginning + "\\",
        "😀" * 9_000,
    ]
    rows = pl.DataFrame(
        [(word, raw, 0) for word in words for raw in (None, b"", b"\\" * 9_000, b"\\" * 9_001)],
        schema=columns,
        orient="row",
    ).with_columns(n=pl.int_range(pl.len()))
    commit(made, 0, long=rows)
    commit(
        made, 1, long=rows.with_columns(pl.col("n") + 100).sample(fraction=1, shuffle=True, seed=3)
    )
    gone = rows.filter(pl.col("n") % 3 == 0).with_columns(
        pl.col("n") + 100, pl.lit(-1, pl.Int8).alias(DIFF)
    )
    commit(made, 2, long=gone)
    left = rows.with_columns(pl.col("n") + 100).filter((pl.col("n") - 100) % 3 != 0)
    with ms.view("long", store=database) as view:
        found = view.scan()
        assert found.sort("n").equals(left.sort("n"), null_equal=True)
        in_order = left.sort("word", "raw", nulls_last=True)
        assert found["n"].to_list() == in_order["n"].to_list()
        for word, raw, number in left.rows():
            assert view.get(word=word, raw=raw)["n"] == number


def test_a_database_of_another_format_is_refused(database, opened, sql):
    target(opened, database)
    for stored, advice in ((1, "give the views another schema"), (9, "Upgrade millstream")):
        sql("UPDATE _millstream_store SET format = %s", [stored])
        with pytest.raises(ConfigError, match=f"have format {stored}.*{advice}"):
            target(opened, database)


def test_a_key_of_more_entries_than_an_index_takes_is_refused():
    check_key_columns("v", ["str"] * 16)
    check_key_columns("v", ["int"] * 32)
    for kinds in (["str"] * 17, ["int"] * 33, ["bytes", *["int"] * 31]):
        with pytest.raises(ConfigError, match=r"The key of the view 'v'.*takes 32\. Use fewer"):
            check_key_columns("v", kinds)


def test_a_server_that_is_away_is_a_passing_fault(database, opened, sql):
    made = target(opened, database)
    store = opened.enter_context(PostgresViewReader(database))
    sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    with pytest.raises(RetriableError, match="postgresql://127"):
        commit(made, 0, counts=counts(a=1))
    with pytest.raises(RetriableError):
        store.views()
    assert [view.name for view in store.views()] == ["counts"]  # a reader connects again
    again = target(opened, database, start=RunStart("app", "main", 2, "one"))
    assert again.commit(Fence("app", "main", 2, 0), SinkBatch({"counts": counts(a=1)}))


def test_two_runs_at_once_are_one_after_the_other(database, opened):
    """A batch at work when a newer run begins is whole, and the newer run knows of it."""
    old = target(opened, database)
    outcomes = []

    def commit_all():
        try:
            for batch_id in range(1000):
                commit(old, batch_id, counts=counts(a=batch_id))
                outcomes.append(batch_id)
        except FencedError as error:
            outcomes.append(error)

    worker = threading.Thread(target=commit_all)
    worker.start()
    while len(outcomes) < 3:
        worker.join(0.01)
    new = PostgresSink(database, [sink(database)])
    opened.callback(new.close)
    last = new.begin_run(RunStart("app", "main", 2, "one"))
    worker.join()
    assert isinstance(outcomes[-1], FencedError)
    assert outcomes[-2] == last
    with PostgresViewReader(database) as store:
        assert store.scan("counts").rows() == [("a", last)]


def test_a_view_belongs_to_one_app_and_a_foreign_table_is_left_alone(database, opened, sql):
    target(opened, database)
    other = RunStart("other", "main", 1, "two")
    with pytest.raises(ConfigError, match="belongs to the app 'app'"):
        target(opened, database, start=other)
    sql("CREATE TABLE orders (id int)")
    with pytest.raises(ConfigError, match="'orders' that is no view of Millstream"):
        target(opened, database, sink(database, "orders"), start=other)
    target(opened, database, sink(database, "theirs"), start=other)
    with PostgresViewReader(database) as store:
        assert store.apps() == {"counts": "app", "theirs": "other"}


def test_a_refused_declaration_leaves_nothing(database, opened):
    target(opened, database)
    wrong = sink(database, "counts", {"word": pl.String(), "n": pl.Float64()})
    with pytest.raises(ConfigError, match="column 'n' is int, not float"):
        target(
            opened,
            database,
            sink(database, "fresh"),
            wrong,
            start=RunStart("app", "main", 2, "one"),
        )
    with PostgresViewReader(database) as store:
        assert list(store.apps()) == ["counts"]
    assert commit(target(opened, database), 0, counts=counts(a=1))


def test_the_schema_is_that_of_the_search_path(database, opened, sql):
    sql("CREATE SCHEMA apart")
    apart = database + "?options=-csearch_path%3Dapart"
    commit(target(opened, apart), 0, counts=counts(a=1))
    assert sql("SELECT n FROM apart.counts").fetchall() == [(1,)]
    with pytest.raises(ConfigError, match="search_path"):
        PostgresViewReader(database)
    with PostgresViewReader(apart) as store:
        assert store.count("counts") == 1


def test_a_database_that_is_not_in_utf8_is_refused(database, sql, postgres_server):
    sql("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    url = database.rpartition("/")[0] + "/latin"
    with pytest.raises(ConfigError, match="keeps text as LATIN1"):
        PostgresViewReader(url)


def test_an_app_is_forgotten_with_all_that_it_left(database, opened, sql):
    made = target(opened, database)
    commit(made, 0, counts=counts(a=1))
    theirs = RunStart("other", "main", 1, "two")
    target(opened, database, sink(database, "theirs"), start=theirs)
    with pytest.raises(ConfigError, match="nothing of an app 'nobody'"):
        forget_app(database, "nobody")
    made.close()
    assert forget_app(database, "app") == ["counts"]
    assert sql("SELECT to_regclass('counts')").fetchone() == (None,)
    assert sql("SELECT count(*) FROM _millstream_changes").fetchone() == (0,)
    fresh = target(opened, database, start=RunStart("app", "main", 1, "another"))
    assert fresh.commit(Fence("app", "main", 1, 0), SinkBatch({"counts": counts(b=2)}))


def test_keys_with_and_without_nulls_are_deleted_alike(database, opened):
    columns = {"a": pl.String(), "b": pl.Date(), "n": pl.Int64()}
    made = target(opened, database, sink(database, "v", columns, ("a", "b")))
    days = [None, 0, 1]
    rows = pl.DataFrame(
        [(a, b, 1) for a in (None, "x", "y") for b in days], schema=columns, orient="row"
    )
    commit(made, 0, v=rows)
    half = rows[::2].with_columns(pl.lit(-1, pl.Int8).alias(DIFF))
    commit(made, 1, v=half)
    with PostgresViewReader(database) as store:
        kept = rows[1::2].sort("a", "b", nulls_last=True)
        assert store.scan("v").equals(kept)
        assert store.changes("v", since=9).height == 5


def test_the_command_reads_and_forgets_a_database(database, opened, capsys, monkeypatch):
    commit(target(opened, database), 0, counts=counts(a=1, b=2))
    opened.close()
    monkeypatch.setenv("MILLSTREAM_VIEWS", database)
    assert command(["view", "list", "--json"]) == 0
    assert '"view": "counts", "rows": 2' in capsys.readouterr().out
    assert command(["view", "show", "counts", "--where", "word=b", "--json"]) == 0
    assert capsys.readouterr().out == '{"word": "b", "n": 2}\n'
    assert command(["view", "changes", "counts", "--since", "1", "--json"]) == 0
    assert '"_seq": 2' in capsys.readouterr().out
    assert command(["view", "forget", "app", "--yes"]) == 0
    said = capsys.readouterr().out
    assert "Removed from postgresql://127.0.0.1" in said
    assert "tester" not in said
    monkeypatch.delenv("MILLSTREAM_VIEWS")
    assert command(["view", "forget", "app", "--yes"]) == 2
    assert "needs a database" in capsys.readouterr().err


def test_a_test_server_goes_with_its_folder(postgres_server):
    with PostgresServer() as server:
        folder, process = server.folder, server._process
        with psycopg.connect(server.url("x")) as session:
            assert session.execute("SELECT 1").fetchone() == (1,)
    assert not folder.exists()
    assert process.poll() is not None


def test_a_missing_driver_is_told_with_what_to_install(database, monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for connect in (PostgresViewReader, lambda url: PostgresSink(url, [sink(url)])):
        with pytest.raises(EnvironmentProblem, match=r"millstream\[postgres\]"):
            connect(database)


def test_views_of_an_earlier_format_are_refused_plainly(database, opened, sql):
    target(opened, database)
    sql("UPDATE _millstream_store SET format = 2")
    for open_it in (PostgresViewReader, lambda url: PostgresSink(url, [sink(url)])):
        with pytest.raises(ConfigError, match=r"have format 2, of an earlier version"):
            open_it(database)
