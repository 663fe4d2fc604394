"""Lookups in databases: keys are parameters, answers are read by type, and failures are told apart."""

import pickle
import sqlite3
from contextlib import closing
from datetime import UTC, date, datetime
from pathlib import Path

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, UserCodeError
from millstream.kernels.definition import canonical_text, describe
from millstream.kernels.enrichment.calls import LookupCallError
from millstream.testing.postgres import PostgresServer, programs

KEY = (("user", pl.String()),)
COUNTRY = (("country", pl.String()),)
QUERY = 'SELECT keys."user", p.country FROM keys JOIN people p ON p.id = keys."user"'
needs_postgres = pytest.mark.skipif(programs() is None, reason="PostgreSQL is not installed")


@pytest.fixture(scope="module")
def postgres():
    with PostgresServer() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=needs_postgres)])
def database(request, tmp_path):
    """The address of a database, and a function that changes it."""
    if request.param == "sqlite":
        path = tmp_path / "people 100%?#.db"

        def change(*statements):
            with closing(sqlite3.connect(path)) as connection:
                for statement in statements:
                    connection.execute(statement)
                connection.commit()

        address = f"sqlite:///{path}"
    else:
        import psycopg

        address = request.getfixturevalue("postgres").url("lookups")

        def change(*statements):
            with psycopg.connect(address) as connection:
                for statement in statements:
                    connection.execute(statement)

    change(
        "DROP TABLE IF EXISTS people",
        "CREATE TABLE people (id text, country text)",
        "INSERT INTO people VALUES ('u1', 'CH'), ('u2', NULL), ('o''x; DROP TABLE people--', 'DE')",
    )
    return address, change


def ask(lookup, users, key=KEY, answer=COUNTRY, timeout_s=5.0):
    keys = users if isinstance(users, pl.DataFrame) else pl.DataFrame({"user": list(users)})
    return lookup.bound(key, answer, timeout_s)(keys)


def test_many_keys_are_asked_by_one_query_and_are_no_part_of_it(database):
    users = ["u1", "u2", "u3", "o'x; DROP TABLE people--", '"', "%s", "a\0b", ""]
    found = ask(ms.sql_lookup(database[0], QUERY + ";\n"), users)
    expected = [("u1", "CH"), ("u2", None), ("o'x; DROP TABLE people--", "DE")]
    assert sorted(found.rows()) == sorted(expected)
    assert ask(ms.sql_lookup(database[0], QUERY), ["a\0b"]).rows() == []


def test_a_query_may_have_its_own_with_percent_signs_and_comments(database):
    query = f"WITH p AS (SELECT * FROM people WHERE country LIKE 'C%') {QUERY.replace('people p', 'p')} -- %s"
    assert ask(ms.sql_lookup(database[0], query), ["u1", "u2"]).rows() == [("u1", "CH")]


def test_keys_and_answers_of_all_types(database):
    keys = pl.DataFrame(
        {
            "n": [7, -(2**63)],
            "b": [True, False],
            "d": [date(2026, 1, 2), date(1969, 1, 1)],
            'a"%b': ["x", "y"],
        },
        schema={"n": pl.Int64, "b": pl.Boolean, "d": pl.Date, 'a"%b': pl.String},
    )
    time = "'2026-01-02 03:04:05.678+00:00'"
    cast = "" if database[0].startswith("sqlite") else "::timestamptz"
    query = f"SELECT keys.*, 1.5 AS f, 3 AS i, {time}{cast} AS t FROM keys"
    answer = (("f", pl.Float32()), ("i", pl.Int8()), ("t", pl.Datetime("ms", "UTC")))
    found = ask(ms.sql_lookup(database[0], query), keys, tuple(keys.schema.items()), answer)
    assert found.select(keys.columns).sort("n", descending=True).equals(keys)
    assert found["f"].to_list() == [1.5, 1.5]
    assert found["t"][0] == datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC)
    assert found.schema["i"] == pl.Int8


def test_more_keys_than_a_query_takes_parameters(database):
    users = [f"u{n}" for n in range(70_000)]
    assert ask(ms.sql_lookup(database[0], QUERY), users).height == 2


@pytest.mark.parametrize(
    "query",
    [
        QUERY.replace("people", "nobody"),
        QUERY.replace("p.country", "p.town AS country"),
        "DELETE FROM people WHERE id IN (SELECT id FROM keys)",
        QUERY + "; DROP TABLE people",
        'SELECT keys."user" FROM keys',
        'SELECT keys."user", 1 AS country, 2 AS other FROM keys',
    ],
)
def test_a_query_that_is_wrong_stops_the_job_and_changes_nothing(database, query):
    with pytest.raises(UserCodeError, match=r"not accepted|gives the columns"):
        ask(ms.sql_lookup(database[0], query), ["u1"])
    assert ask(ms.sql_lookup(database[0], QUERY), ["u1"]).height == 1


def test_a_value_that_does_not_fit_has_failed_for_good(database):
    with pytest.raises(LookupCallError, match="does not fit") as failed:
        ask(ms.sql_lookup(database[0], QUERY), ["u1"], answer=(("country", pl.Int64()),))
    assert not failed.value.retriable


def test_two_rows_of_one_key_stop_the_job(database):
    address, change = database
    change("INSERT INTO people VALUES ('u1', 'FR')")
    app = ms.App("a", log="unused")
    stream = app.topic("rows", {"user": str, "n": int}, partitions=1).stream()
    stream.enrich(ms.sql_lookup(address, QUERY), on="user", schema={"country": pl.String}).view(
        "out", key="n"
    )
    with pytest.raises(UserCodeError, match="several answers for user='u1'"):
        testing.run(app, {"rows": [{"user": "u1", "n": 1}]})
    change("DELETE FROM people WHERE country = 'FR'")
    found = testing.run(app, {"rows": [{"user": f"u{n}", "n": n} for n in range(3)]})["out"]
    assert found.sort("n")["country"].to_list() == [None, "CH", None]


def test_a_query_that_takes_too_long_is_ended(database):
    slow = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000000000) "
    query = f'{slow} SELECT keys."user", (SELECT CAST(max(i) AS text) FROM n) AS country FROM keys'
    with pytest.raises(LookupCallError, match=r"in time|timeout") as failed:
        ask(ms.sql_lookup(database[0], query), ["u1"], timeout_s=0.2)
    assert failed.value.retriable


@needs_postgres
def test_a_connection_is_kept_and_made_again_when_it_broke(postgres):
    import psycopg

    lookup = ms.sql_lookup(postgres.url("again"), 'SELECT "user", pg_backend_pid() AS n FROM keys')
    pids = [ask(lookup, ["u1"], answer=(("n", pl.Int64()),))["n"][0] for _ in range(2)]
    with psycopg.connect(postgres.url("again")) as other:
        other.execute("SELECT pg_terminate_backend(%s)", [pids[1]])
    pids.append(ask(lookup, ["u1"], answer=(("n", pl.Int64()),))["n"][0])
    assert pids[0] == pids[1] != pids[2]


@needs_postgres
def test_the_password_is_in_no_text_and_no_definition(postgres):
    url = postgres.url("secret")
    lookup = ms.sql_lookup(url, QUERY)
    bound = lookup.bound(KEY, COUNTRY, 1.0)
    changed = ms.sql_lookup(url.replace("tester:", "other:"), QUERY).bound(KEY, COUNTRY, 2.0)
    with pytest.raises(LookupCallError) as failed:
        changed(pl.DataFrame({"user": ["u1"]}))
    texts = [repr(lookup), repr(bound), canonical_text(describe(bound)), str(failed.value)]
    assert not any(word in text for text in texts for word in ("p%40ss", "p@ss", "other"))
    assert describe(changed) == describe(bound)
    elsewhere = ms.sql_lookup(postgres.url("elsewhere"), QUERY).bound(KEY, COUNTRY, 1.0)
    assert describe(elsewhere) != describe(bound)


def test_a_file_that_was_put_in_its_place_is_read(tmp_path):
    def make(name, country):
        with closing(sqlite3.connect(tmp_path / name)) as connection:
            connection.execute("CREATE TABLE people (id text, country text)")
            connection.execute("INSERT INTO people VALUES ('u1', ?)", [country])
            connection.commit()

    lookup = ms.sql_lookup(lambda: f"sqlite:///{tmp_path / 'now'}", QUERY)
    with pytest.raises(LookupCallError, match="unable to open") as failed:
        ask(lookup, ["u1"])
    assert failed.value.retriable
    for country in ("CH", "DE"):
        make("new", country)
        (tmp_path / "new").rename(tmp_path / "now")
        assert ask(lookup, ["u1"])["country"].to_list() == [country]
    bound = ms.sql_lookup(tmp_path / "now", QUERY).bound(KEY, COUNTRY, 1.0)
    keys = pl.DataFrame({"user": ["u1"]})
    assert pickle.loads(pickle.dumps(bound))(keys).rows() == [("u1", "DE")]


def test_a_link_is_followed_when_it_is_asked_and_the_step_stays_the_same(tmp_path):
    for name in ("monday", "tuesday"):
        with closing(sqlite3.connect(tmp_path / name)) as connection:
            connection.execute("CREATE TABLE people (id text, country text)")
            connection.execute("INSERT INTO people VALUES ('u1', ?)", [name])
            connection.commit()
    link = tmp_path / "now"
    link.symlink_to("monday")
    lookup = ms.sql_lookup(link, QUERY)
    assert ask(lookup, ["u1"])["country"].to_list() == ["monday"]
    link.unlink()
    link.symlink_to("tuesday")
    assert ask(lookup, ["u1"])["country"].to_list() == ["tuesday"]
    assert describe(ms.sql_lookup(link, QUERY)) == describe(lookup)


def test_a_function_of_an_address_that_fails_says_no_password():
    def broken():
        raise RuntimeError("secret")

    for database in (
        broken,
        lambda: "host=h password=secret",
        lambda: "postgresql://me:secret@[/x",
    ):
        with pytest.raises((LookupCallError, ConfigError)) as failed:
            ask(ms.sql_lookup(database, QUERY), ["u1"])
        assert "secret" not in str(failed.value)


@pytest.mark.parametrize(
    ("database", "query", "error"),
    [
        ("host=h password=secret", QUERY, "no address"),
        ("mysql://me:secret@host/db", QUERY, "no address"),
        ("sqlite:///relative.db", QUERY, "whole path"),
        (7, QUERY, "of type int"),
        (Path("x"), "SELECT 1", "from the table keys"),
        (Path("x"), None, "from the table keys"),
    ],
)
def test_what_cannot_be_asked_is_refused_where_it_is_declared(database, query, error):
    with pytest.raises(ConfigError, match=error) as refused:
        ms.sql_lookup(database, query)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("dtype", [pl.Float64(), pl.Datetime("us"), pl.UInt64(), pl.Binary()])
def test_keys_that_a_database_cannot_take_are_refused(dtype):
    with pytest.raises(ConfigError, match="Cast it to"):
        ms.sql_lookup(Path("x"), QUERY).bound((("user", dtype),), COUNTRY, 1.0)
