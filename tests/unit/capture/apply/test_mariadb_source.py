"""Tables of MariaDB, with their types, in other databases and a lake."""

import random
import sqlite3
import threading
from contextlib import closing

import mariadb_database
import psycopg
import pytest

import millstream as ms
from millstream.capture.apply.captured_types import comparable
from millstream.capture.apply.run import ApplySession
from millstream.errors import ConfigError

CREATE = """CREATE TABLE t (
    id BIGINT UNSIGNED, part VARCHAR(20), small TINYINT UNSIGNED, d DECIMAL(10,2), f FLOAT, g DOUBLE, b VARBINARY(8),
    at DATETIME(6), seen TIMESTAMP(3) NULL, length TIME(6), day DATE, kind ENUM('a','b'), many SET('x','y'),
    doc JSON, u UUID, bits BIT(3), y YEAR, PRIMARY KEY (id, part))"""
INSERT = """INSERT INTO t VALUES (18446744073709551615, 'k''\\t\\\\', 255, -12.30, 1.1, 2.5e300, x'00ff',
    '2026-01-02 03:04:05.678901', '2026-01-02 03:04:05.600', '-838:59:59', '2026-02-28', 'b', 'x,y',
    '{"a": 1.50}', '00000000-0000-0000-0000-000000000001', b'101', 2026)"""
EXPECTED = {
    "id": 18446744073709551615,
    "part": "k'\t\\",
    "small": 255,
    "d": "-12.30",
    "f": 1.1,
    "g": 2.5e300,
    "b": "AP8=",
    "at": "2026-01-02T03:04:05.678901",
    "seen": "2026-01-02T03:04:05.6Z",
    "length": -3020399000000,
    "day": "2026-02-28",
    "kind": "b",
    "many": "x,y",
    "doc": '{"a": 1.50}',
    "u": "00000000-0000-0000-0000-000000000001",
    "bits": "101",
    "y": 2026,
}


@pytest.fixture(scope="module")
def server():
    with mariadb_database.start() as started:
        yield started


@pytest.fixture
def database(server):
    return mariadb_database.Database(server)


class Captured:
    """A capture that runs in a thread; use it in ``with``."""

    def __init__(self, url, folder):
        self.capture = ms.capture(url, to=folder, name="shop")
        self.thread = threading.Thread(target=self.capture.run)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.capture.stop()
        self.thread.join()


def capture(database, folder):
    ms.capture(database.url(), to=folder, name="shop").run(until="caught-up")


def test_a_column_that_is_dropped_before_its_rows_are_captured_keeps_its_type(tmp_path, database):
    log, copy = tmp_path / "log", tmp_path / "copy.db"
    database.run("CREATE TABLE t (id INT PRIMARY KEY, x INT)", "INSERT INTO t VALUES (1, 3)")
    capture(database, log)
    ms.apply("shop", f"sqlite:///{copy}", log=log).run(until="caught-up")
    database.run("INSERT INTO t VALUES (2, 7)", "ALTER TABLE t DROP x", "INSERT INTO t VALUES (3)")
    capture(database, log)
    ms.apply("shop", f"sqlite:///{copy}", log=log).run(until="caught-up")
    with closing(sqlite3.connect(copy)) as found:
        assert [row for (row,) in found.execute("SELECT id FROM t ORDER BY id")] == [1, 2, 3]


def test_a_column_that_is_altered_before_its_rows_are_captured_has_the_type_that_they_have(
    tmp_path, database, postgres_server
):
    log, target = tmp_path / "log", postgres_server.url(f"copy_{database.name}")
    database.run("CREATE TABLE t (id INT PRIMARY KEY, x INT)", "INSERT INTO t VALUES (1, 3)")
    capture(database, log)
    ms.apply("shop", target, log=log).run(until="caught-up")
    database.run(
        "INSERT INTO t VALUES (2, 7)",
        "ALTER TABLE t MODIFY x VARCHAR(9)",
        "INSERT INTO t VALUES (3, 'none')",
    )
    capture(database, log)
    ms.apply("shop", target, log=log).run(until="caught-up")
    with psycopg.connect(target) as session:
        found = session.execute(f"SELECT * FROM {database.name}.t ORDER BY id").fetchall()
    assert found == [(1, "3"), (2, "7"), (3, "none")]


@pytest.mark.parametrize("kind", ["postgres", "sqlite", "parquet"])
def test_rows_of_every_type_come_to_other_stores_and_follow(tmp_path, database, kind, request):
    target = f"{kind}:///{tmp_path}/copy"
    if kind == "postgres":
        target = request.getfixturevalue("postgres_server").url(f"copy_{database.name}")
    database.run(CREATE, INSERT)
    capture(database, tmp_path / "log")
    run = ms.apply("shop", target, log=tmp_path / "log")
    run.run(until="caught-up")
    database.run(
        "INSERT INTO t (id, part) VALUES (1, 'a'), (2, 'b')",
        "UPDATE t SET id = 3 WHERE id = 1",
        "DELETE FROM t WHERE id = 2",
        "ALTER TABLE t ADD COLUMN more INT DEFAULT 7",
        "UPDATE t SET small = 1 WHERE id = 3",
    )
    capture(database, tmp_path / "log")
    run.run(until="caught-up")
    with ApplySession(run) as session:
        (table,) = session.stream.versions.current()
        rows = {
            row["id"]: {name: comparable(table.types[name], value) for name, value in row.items()}
            for row in session.target.scan(table)
        }
    full = {**EXPECTED, "more": 7}
    assert rows[full["id"]] == full
    assert {n: v for n, v in rows[3].items() if v is not None} == {
        "id": 3,
        "part": "a",
        "small": 1,
        "more": 7,
    }
    assert set(rows) == {full["id"], 3}


def test_a_date_of_zeros_is_refused_by_postgres_and_goes_on_as_text(
    tmp_path, database, postgres_server
):
    import psycopg

    database.run(
        "CREATE TABLE z (id INT PRIMARY KEY, day DATE)",
        "SET SESSION sql_mode = ''",
        "INSERT INTO z VALUES (1, '0000-00-00')",
    )
    capture(database, tmp_path / "log")
    url = postgres_server.url(f"zero_{database.name}")
    run = ms.apply("shop", url, log=tmp_path / "log")
    with pytest.raises(ConfigError, match=r"z has a value that does not fit its column.*TYPE text"):
        run.run(until="caught-up")
    with psycopg.connect(url) as session:  # nothing of it remains; the table may be made by hand
        name = database.name
        session.execute(f"CREATE SCHEMA {name}")
        session.execute(f"CREATE TABLE {name}.z (id integer PRIMARY KEY, day text)")
    run.run(until="caught-up")
    with psycopg.connect(url) as session:
        assert session.execute(f"SELECT * FROM {name}.z").fetchall() == [(1, "0000-00-00")]


def test_a_copy_in_sqlite_has_the_values_that_programs_expect(tmp_path, database):
    database.run(CREATE, INSERT)
    capture(database, tmp_path / "log")
    ms.apply("shop", f"sqlite:///{tmp_path}/copy.db", log=tmp_path / "log").run(until="caught-up")
    session = sqlite3.connect(tmp_path / "copy.db")
    found = session.execute("SELECT id, d, f, b, at FROM t").fetchone()
    session.close()
    expected = ("18446744073709551615", "-12.30", 1.1, b"\x00\xff", "2026-01-02T03:04:05.678901")
    assert found == expected


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_copy_is_compared_with_the_server_at_one_place_and_repaired(tmp_path, database, seed):
    """While a session writes; the rows that are wrong are those that the test knows to be, and no others."""
    dice, stop = random.Random(seed), threading.Event()
    database.run(CREATE, INSERT, "CREATE TABLE u (id INT PRIMARY KEY, n INT)")
    keys = [(n, part) for n in range(40) for part in ("a", "B", "é")]
    database.run(
        *(
            f"INSERT INTO t (id, part, d, g) VALUES ({n}, '{part}', {n}.5, {n}e-3)"
            for n, part in keys
        )
    )
    target, log = f"sqlite:///{tmp_path}/copy.db", tmp_path / "log"
    capture(database, log)
    ms.apply("shop", target, log=log).run(until="caught-up")

    def write():
        for number in range(100_000):
            if stop.wait(0.01):
                return
            database.run(
                f"INSERT INTO u VALUES ({number}, 0)",
                f"UPDATE u SET n = n + 1 WHERE id > {number - 5}",
                f"DELETE FROM u WHERE id < {number - 20}",
            )

    writer = threading.Thread(target=write)
    gone, changed, hidden = dice.sample(keys, 3)
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        copy.execute("DELETE FROM t WHERE id = ? AND part = ?", (str(gone[0]), gone[1]))
        copy.execute("UPDATE t SET g = -1 WHERE id = ? AND part = ?", (str(changed[0]), changed[1]))
        copy.execute("INSERT INTO t (id, part) VALUES ('77', 'nobody')")
        copy.commit()
    # What a session does not log, no log has.
    database.run(
        "SET SESSION sql_log_bin = 0",
        f"UPDATE t SET d = 99 WHERE id = {hidden[0]} AND part = '{hidden[1]}'",
    )
    with Captured(database.url(), log):
        writer.start()
        try:
            found = ms.reconcile("shop", database.url(), target, log=log).run(repair=True)
            assert ms.reconcile("shop", database.url(), target, log=log).run().faults == 0
        finally:
            stop.set()
            writer.join()
    t, u = found.tables
    assert (t.rows, u.faults) == (121, 0)
    assert [(row["id"], row["part"]) for row in t.missing] == [gone]
    assert sorted((row["id"], row["part"]) for row in t.differing) == sorted([changed, hidden])
    assert [(row["id"], row["part"]) for row in t.surplus] == [(77, "nobody")]
