"""SQL over views and topics: what it says equals a recomputation at the position that it states, and it changes nothing."""

import threading
import time
from contextlib import closing
from datetime import timedelta

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.sql_model import (
    DIFFERENCES,
    EVERY_KIND,
    clicks_up_to,
    draw_clicks,
    run_job,
    sql_app,
    totals_of,
    write_clicks,
    write_every_kind,
)

import millstream as ms
from millstream.client import connect
from millstream.errors import ConfigError, DeadlineError, SqlError, TopicRecreatedError
from millstream.sql_queries import app_tables
from millstream.sql_queries.app_tables import AppTables, SqlScope
from millstream.sql_queries.query import scope_of, to_result
from millstream.sql_queries.session import SqlLimits, SqlSession
from millstream.views.questions.deadline import Deadline

LIMITS = SqlLimits(seconds=300, memory_mb=256, threads=1)


def session_of(scope, limits=LIMITS):
    return SqlSession(AppTables(scope), limits)


@pytest.mark.parametrize("partitions", [1, 4, 7])
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32), share=st.floats(0, 1), rows=st.integers(8, 40))
def test_views_and_topics_are_as_of_one_position(tmp_path_factory, partitions, seed, share, rows):
    folder = tmp_path_factory.mktemp("log")
    records = draw_clicks(seed, 60, partitions)
    write_clicks(folder, records, partitions)
    app = sql_app(folder)
    ends = [int(len(records[partition]) * share) for partition in range(partitions)]
    run_job(app, folder, rows, {"clicks": ends})

    found = ms.sql(DIFFERENCES, app=app)
    assert found.rows.item() == 0

    reached = {int(p): end for p, end in found.position["clicks"].items()}
    assert reached == dict(enumerate(ends))
    assert (found.batch_id is None) == (not any(ends))
    clicks, bad = clicks_up_to(records, found.position)
    totals = ms.sql('SELECT "user", n, cost FROM totals', app=app)
    assert {user: (n, cost) for user, n, cost in totals.rows.iter_rows()} == totals_of(clicks)
    counted = ms.sql("SELECT count(*), count(_error) FROM topics.clicks", app=app)
    assert counted.rows.row(0) == (len(clicks) + bad, bad)


def test_a_statement_sees_one_commit_while_the_job_goes_on(tmp_path):
    records = draw_clicks(5, 60, 3)
    write_clicks(tmp_path, records, 3)
    app = sql_app(tmp_path)
    run_job(app, tmp_path, 2, {"clicks": [1, 1, 1]})
    seen, failed, done = set(), [], threading.Event()

    def ask():
        with closing(session_of(scope_of(app, None))) as session:
            while not done.is_set():
                found = to_result(session.run(DIFFERENCES))
                seen.add(found.batch_id)
                if found.rows.item():
                    failed.append(found)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    run_job(sql_app(tmp_path), tmp_path, 5)
    done.set()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(seen) > 1, "they asked while batches were committed"


def test_a_session_goes_on_with_what_is_committed_later(tmp_path):
    write_clicks(
        tmp_path, {0: [b'{"ad":1,"user":"ann","at":"2026-01-01T00:00:00Z","cost":2}'] * 5}, 1
    )
    app = sql_app(tmp_path)
    with closing(session_of(scope_of(app, None))) as session:
        before = to_result(session.run("SELECT count(*) FROM topics.clicks"))
        assert (before.rows.item(), before.batch_id) == (5, None)  # the app has not run
        with pytest.raises(SqlError, match="totals"):
            session.run("SELECT * FROM totals")
        for ends in (2, 5):
            run_job(sql_app(tmp_path), tmp_path, 10, {"clicks": [ends]})
            found = to_result(session.run("SELECT n FROM totals"))
            assert (found.rows.item(), found.position) == (ends, {"clicks": {"0": ends}})


def test_rows_that_must_reflect_a_position_are_waited_for(tmp_path):
    write_clicks(
        tmp_path, {0: [b'{"ad":1,"user":"ann","at":"2026-01-01T00:00:00Z","cost":2}'] * 4}, 1
    )
    app = sql_app(tmp_path)
    run_job(app, tmp_path, 10, {"clicks": [1]})
    with pytest.raises(DeadlineError, match="'0': 1"):
        ms.sql("FROM totals", app=app, at_least={"clicks": {"0": 4}}, timeout="0.2 seconds")
    writer = threading.Timer(0.3, run_job, (sql_app(tmp_path), tmp_path))
    writer.start()
    found = ms.sql(
        "SELECT n FROM totals", app=app, at_least={"clicks": {"0": 4}}, timeout="5 minutes"
    )
    writer.join()
    assert found.rows.item() == 4


def test_a_topic_that_no_app_declares_has_its_values_as_text(tmp_path):
    with connect(tmp_path) as log:
        log.create_topic("Odd.name-1")
        log.create_topic("odd.NAME-1")
        with log.producer() as producer:
            producer.send("Odd.name-1", b'{"a": 7}', key="k", timestamp_ms=1_000)
            producer.send("Odd.name-1", b"\xff\x00", key=b"\xfe", timestamp_ms=2_000)
            producer.send("Odd.name-1", None, timestamp_ms=3_000)
    found = ms.sql('SELECT _offset, _key, _value FROM topics."Odd.name-1" ORDER BY 1', log=tmp_path)
    assert found.rows.rows() == [(0, "k", '{"a": 7}'), (1, "\\xfe", "\\xff00"), (2, None, None)]
    assert found.position["Odd.name-1"] == {"0": 3}
    assert ms.sql('SELECT count(*) FROM topics."odd.NAME-1#1"', log=tmp_path).rows.item() == 0
    json = ms.sql(
        "SELECT (_value->>'$.a')::INT AS a FROM \"Odd.name-1\" WHERE _offset = 0", log=tmp_path
    )
    assert json.rows.rows() == [(7,)]
    recent = ms.sql('SELECT count(*) FROM "Odd.name-1"', log=tmp_path, since="1 hour")
    assert recent.rows.item() == 0
    with pytest.raises(SqlError, match=r"3 records.*--since"):
        ms.sql('FROM "Odd.name-1"', log=tmp_path, records_max=2)


def test_of_several_apps_one_is_named(tmp_path):
    write_clicks(tmp_path, {0: [b"{}"]}, 1)
    for name in ("one", "two"):
        app = ms.App(name, log=tmp_path)
        app.topic("clicks", {"user": str}).stream().group_by("user").agg(n=ms.count()).view(
            "counts"
        )
        run_job(app, tmp_path)
    with pytest.raises(ConfigError, match=r"one, two.*app="):
        ms.sql("FROM counts", log=tmp_path)
    assert ms.sql("FROM counts", app="one", log=tmp_path).batch_id == 0
    with pytest.raises(ConfigError, match="Did you mean 'two'"):
        ms.sql("FROM counts", app="twoo", log=tmp_path)


def test_columns_of_one_name_are_told_apart_and_months_are_no_duration(tmp_path):
    found = ms.sql('SELECT 1 AS a, 2 AS a, 3 AS "a#1", INTERVAL 2 DAY AS span', log=tmp_path)
    assert found.rows.columns[0] == "a"
    assert len(set(found.rows.columns)) == 4
    assert found.rows["span"].to_list() == [timedelta(days=2)]
    with pytest.raises(SqlError, match="months"):
        ms.sql("SELECT INTERVAL 2 MONTH AS span", log=tmp_path)


HOSTILE = [
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM read_parquet('{folder}/x.parquet')",
    "SELECT * FROM sqlite_scan('{folder}/apps/shop/views.db', 'totals')",
    "SELECT * FROM query('COPY (SELECT 1) TO ''{folder}/out.csv''')",
    "COPY (SELECT 1) TO '{folder}/out.csv'",
    "COPY totals FROM '/etc/passwd'",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{folder}/out.csv'",
    "EXPLAIN (ANALYZE) COPY (SELECT 1) TO '{folder}/out.csv'",
    "EXPORT DATABASE '{folder}/out'",
    "IMPORT DATABASE '{folder}/out'",
    "ATTACH '{folder}/out.db'",
    "ATTACH '{folder}/apps/shop/views.db' AS s (TYPE sqlite)",
    "INSTALL httpfs",
    "LOAD httpfs",
    "PRAGMA database_list",
    "PRAGMA enable_external_access",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "SET threads = 100",
    "RESET memory_limit",
    "CREATE TABLE t (a INT)",
    "CREATE OR REPLACE VIEW views.totals AS SELECT 1",
    "CREATE MACRO f() AS 1",
    "INSERT INTO totals VALUES (1)",
    "UPDATE totals SET n = 1",
    "DELETE FROM totals",
    "DROP VIEW views.totals",
    "ALTER TABLE totals ADD COLUMN x INT",
    "CALL pragma_version()",
    "CHECKPOINT",
    "VACUUM",
    "BEGIN",
    "USE memory",
    "PREPARE p AS SELECT 1",
    "CREATE SECRET (TYPE s3)",
    "SELECT 1; DROP VIEW views.totals",
    "WITH x AS (INSERT INTO totals VALUES (1) RETURNING 1) SELECT * FROM x",
]


def test_nothing_but_questions_is_answered_and_nothing_outside_is_reached(tmp_path):
    write_clicks(
        tmp_path, {0: [b'{"ad":1,"user":"ann","at":"2026-01-01T00:00:00Z","cost":2}'] * 3}, 1
    )
    app = sql_app(tmp_path)
    run_job(app, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    secret = "not for statements"  # a frame that Python's variables must not lead to
    hidden = pl.DataFrame({"a": [secret]})
    with closing(session_of(scope_of(app, None))) as session:
        for statement in [*HOSTILE, "SELECT * FROM hidden"]:
            with pytest.raises(SqlError) as refused:
                session.run(statement.replace("{folder}", str(tmp_path)))
            assert str(refused.value).endswith("."), statement
            assert secret not in str(refused.value)
            # ... and the session goes on, with the tables as they were.
            assert to_result(session.run("SELECT n FROM totals")).rows.item() == 3
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in after} - {path.name for path in before} <= {
        "views.db-wal",
        "views.db-shm",
    }
    assert hidden.height == 1


def test_a_table_that_is_not_named_is_never_read_as_empty(tmp_path):
    write_clicks(tmp_path, {0: [b"{}"] * 3}, 1)
    with closing(session_of(SqlScope(None, None, tmp_path))) as session:
        assert (
            to_result(session.run("SELECT count(*) FROM query('FROM topics.clicks')")).rows.item()
            == 3
        )
        with pytest.raises(SqlError, match="has to be named"):
            session.run("SELECT count(*) FROM query('FROM topics.cli' || 'cks')")


def test_statements_have_limits_of_time_memory_and_result(tmp_path):
    endless = (
        "SELECT count(*) FROM range(10_000_000) a, range(10_000_000) b WHERE a.range * b.range = -1"
    )
    scope = SqlScope(None, None, tmp_path)
    with (
        closing(session_of(scope, SqlLimits(seconds=1, threads=1))) as session,
        pytest.raises(DeadlineError, match="1 s"),
    ):
        session.run(endless)
    with closing(session_of(scope, SqlLimits(seconds=300, memory_mb=64, threads=1))) as session:
        with pytest.raises(SqlError) as full:
            session.run("SELECT list(range) FROM range(100_000_000)")
        assert full.value.sqlstate == "53200"
        assert to_result(session.run("SELECT 1")).rows.item() == 1
    with (
        closing(session_of(scope, SqlLimits(seconds=300, result_bytes=1 << 20))) as session,
        pytest.raises(SqlError, match="larger than 1 MB"),
    ):
        session.run("SELECT * FROM range(10_000_000)")


def test_a_statement_that_another_thread_interrupts_ends(tmp_path):
    with closing(session_of(SqlScope(None, None, tmp_path))) as session:
        timer = threading.Timer(0.5, session.interrupt)
        timer.start()
        with pytest.raises(SqlError) as cancelled:
            session.run(
                "SELECT count(*) FROM range(10_000_000) a, range(10_000_000) b WHERE a.range * b.range = -1"
            )
        timer.join()
        assert cancelled.value.sqlstate == "57014"
    session.interrupt()  # too late, as when a server ends while a client leaves


@pytest.mark.parametrize(
    ("statement", "sqlstate", "said"),
    [
        ("SELECT * FROM total", "42P01", 'topics."clicks"'),
        ("SELECT x FROM clicks", "42703", "x"),
        ("SELEC 1", "42601", "SELEC"),
        ("SELECT nothing(1)", "42883", "nothing"),
        ("SELECT 'x'::INT", "22P02", "x"),
        ("SELECT 'open", "42601", "end"),
        ("SELECT $1", "22023", "1"),
    ],
)
def test_what_is_wrong_is_said_with_postgresqls_code(tmp_path, statement, sqlstate, said):
    write_clicks(tmp_path, {0: [b"{}"]}, 1)
    with pytest.raises(SqlError) as wrong:
        ms.sql(statement, log=tmp_path)
    assert wrong.value.sqlstate == sqlstate
    assert said in str(wrong.value)


def test_every_kind_of_a_view_keeps_its_values(tmp_path):
    write_every_kind(tmp_path)
    found = ms.sql("SELECT * FROM kinds ORDER BY id", log=tmp_path)
    expected = EVERY_KIND.with_columns(nested=pl.Series(["[1,null]", None, "[]"]))
    assert found.rows.equals(expected, null_equal=True)
    assert found.rows.schema == expected.schema
    path_of = ms.sql("SELECT nested->>'$[0]' FROM kinds WHERE id = 1", log=tmp_path)
    assert path_of.rows.item() == "1"


CLICK_OF_ANN = b'{"ad":1,"user":"ann","at":"2026-01-01T00:00:00Z","cost":2}'


def test_rows_that_another_statement_has_read_meanwhile_are_not_taken_for_those_of_this_one(
    tmp_path,
):
    write_clicks(tmp_path, {0: [CLICK_OF_ANN] * 5}, 1)
    app = sql_app(tmp_path)
    run_job(app, tmp_path, 10, {"clicks": [2]})
    with closing(AppTables(scope_of(app, None))) as tables:
        tables.read({"totals"}, Deadline.of(300))
        store = tables._opened()
        read = store.snapshot

        def overtaken(*given):
            found = read(*given)
            store.snapshot = read
            run_job(sql_app(tmp_path), tmp_path, 10)
            assert tables.read({"totals"}, Deadline.of(300)).position == {"clicks": {"0": 5}}
            return found

        store.snapshot = overtaken
        found = tables.read({"totals"}, Deadline.of(300))
    (rows,) = found.rows.values()
    assert (found.position, rows["n"].to_pylist()) == ({"clicks": {"0": 2}}, [2])


def test_a_view_that_a_batch_leaves_as_it_was_is_as_of_that_batch_all_the_same(tmp_path):
    write_clicks(tmp_path, {0: [CLICK_OF_ANN, b"{"]}, 1)
    app = sql_app(tmp_path)
    with closing(session_of(scope_of(app, None))) as session:
        seen = []

        def ask(*_batch):
            found = to_result(session.run("SELECT n FROM totals"))
            seen.append((found.rows.item(), found.position, found.notes))

        run_job(app, tmp_path, 1, on_batch=ask)
    assert seen[-2:] == [(1, {"clicks": {"0": end}}, ()) for end in (1, 2)]


def test_a_topic_made_anew_while_it_is_read_is_told(tmp_path, monkeypatch):
    with connect(tmp_path) as log:
        log.create_topic("t")
        with log.producer() as producer:
            producer.send("t", b"old")

    def made_anew(topic, ranges, records_max):
        with connect(tmp_path) as log:
            log.delete_topic("t")
            log.create_topic("t")
            with log.producer() as producer:
                producer.send("t", b"new")

    monkeypatch.setattr(app_tables, "check_size", made_anew)
    with pytest.raises(TopicRecreatedError):
        ms.sql("SELECT _value FROM t", log=tmp_path)


def test_what_explain_explains_may_have_every_operator(tmp_path):
    with closing(session_of(SqlScope(None, None, tmp_path))) as session:
        for options in ("", "ANALYZE ", "(FORMAT json) ", "/* why */ "):
            text = (
                f"""EXPLAIN {options}SELECT '{{"a":1}}'::JSON->>'$.a' >= '0' || 'x' WHERE 1 <> 2"""
            )
            assert session.run(text).names == ("plan",)
        for text in ("EXPLAIN ANALYZE CREATE TABLE t AS SELECT 1", "EXPLAIN DROP VIEW v"):
            with pytest.raises(SqlError, match="no question"):
                session.run(text)


@pytest.mark.parametrize("how", ["time", "cancel"])
def test_a_statement_that_is_to_end_before_the_engine_has_it_does_not_begin(tmp_path, how):
    endless = "SELECT count(*) FROM range(1000000000000) AS a"
    limits = SqlLimits(seconds=0.2 if how == "time" else 300, memory_mb=256, threads=1)
    tables = AppTables(SqlScope(None, None, tmp_path))
    with closing(tables), closing(SqlSession(tables, limits)) as session:
        read = tables.read

        def slow(*given):
            time.sleep(1) if how == "time" else session.interrupt()
            return read(*given)

        tables.read = slow
        with pytest.raises(DeadlineError if how == "time" else SqlError, match=r"within|cancelled"):
            session.run(endless)
        tables.read = read
        assert session.run("SELECT 1").rows.num_rows == 1


def test_a_position_is_checked_as_everywhere(tmp_path):
    write_clicks(tmp_path, {0: [CLICK_OF_ANN] * 3}, 1)
    app = sql_app(tmp_path)
    run_job(app, tmp_path, 10, {"clicks": [2]})

    def ask(at_least):
        return ms.sql("SELECT n FROM totals", app=app, at_least=at_least, timeout="5 minutes")

    assert ask({"clicks": {0: 2}}).rows.item() == 2
    assert ask({"clicks": {}}).rows.item() == 2
    for wrong in ({"clicks": {"0": "2"}}, {"clicks": {"0": True}}, {"clicks": 2}, [2]):
        with pytest.raises(ConfigError, match="The position at_least is"):
            ask(wrong)
    with pytest.raises(
        ConfigError, match=r"'clics', which .* does not read.*Did you mean 'clicks'"
    ):
        ask({"clics": {"0": 1}})
    with pytest.raises(ConfigError, match="partition '1' of the topic 'clicks', which has 1: 0"):
        ask({"clicks": {"1": 1}})


def test_tables_that_come_and_go_are_those_that_are_shown(tmp_path):
    with connect(tmp_path) as log:
        log.create_topic("a")
        log.create_topic("b")
    shown = []

    def on_tables(_engine, tables):
        shown.append([table.name for table in tables])

    tables = AppTables(SqlScope(None, None, tmp_path))
    with closing(tables), closing(SqlSession(tables, LIMITS, (), on_tables)) as session:
        for _ in range(2):
            assert session.run("SELECT count(*) FROM a, b").rows.num_rows == 1
        with pytest.raises(SqlError, match="has to be named"):
            session.run("SELECT * FROM query('FROM ' || chr(97))")  # as it has no rows any more
        with connect(tmp_path) as log:
            log.delete_topic("a")
            log.create_topic("c")
        assert session.run("SELECT count(*) FROM c").rows.num_rows == 1
        with pytest.raises(SqlError, match=r'There are: topics."b", topics."c"'):
            session.run("SELECT * FROM a")
    assert shown == [["a", "b"], ["b", "c"]]
