"""Sinks to MariaDB and MySQL: the contract, and what a table of theirs takes, on real servers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace

import mariadb_database
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sink_tables import modelled, reasons, send

import millstream as ms
from millstream.connectors.sinks.connector import RecordsToWrite, SinkOpening, SinkRecord
from millstream.errors import ConfigError, RetriableError
from millstream.testing.connectors import SinkContract

_KILLED = """
import sys, threading, os, signal
import millstream as ms
from dataclasses import replace
made = ms.to_mariadb(sys.argv[1], table="killed", key="id")
print("begun", flush=True)
ms.sink(replace(made, records_max=50), topic="t", log=sys.argv[2], name="out").run(until="caught-up")
"""
_servers = {}


@pytest.fixture(scope="module", autouse=True)
def servers():
    yield
    while _servers:
        _servers.popitem()[1].close()


def _database(kind="mariadb"):
    if kind not in _servers:
        _servers[kind] = mariadb_database.start(kind)
    return mariadb_database.Database(_servers[kind])


@pytest.fixture
def database():
    return _database()


@dataclass
class Outside:
    database: mariadb_database.Database
    keyed: bool

    def connector(self):
        made = ms.to_mariadb(self.database.url(), table="out", key="k" if self.keyed else None)
        return replace(made, records_max=7)

    def rows(self):
        order = "" if self.keyed else " ORDER BY number"
        found = self.database.run(f"SELECT n, text FROM `out`{order}")
        return [{"n": n, "text": text} for n, text in found]

    def bad_row(self):
        return {"n": "bad", "text": ""}

    @contextmanager
    def down(self):
        self.database.server.kill()
        yield
        self.database.server.start()


class TestMariaDbKeyed(SinkContract):
    kind, keyed = "mariadb", True
    rounds = 5

    @contextmanager
    def outside(self, folder):
        database = _database(self.kind)
        key = "k VARCHAR(20) COLLATE utf8mb4_bin" if self.keyed else "number INT AUTO_INCREMENT"
        database.run(
            f"CREATE TABLE `out` ({key} PRIMARY KEY, n VARCHAR(20) NOT NULL CHECK (n <> 'bad'), text TEXT)"
        )
        if self.kind == "mysql":  # before 8.0.16 it reads a CHECK, and has none
            database.run(
                "CREATE TRIGGER bad BEFORE INSERT ON `out` FOR EACH ROW "
                "IF NEW.n = 'bad' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no such row'; END IF"
            )
        yield Outside(database, self.keyed)


class TestMariaDbAdded(TestMariaDbKeyed):
    keyed = False


@pytest.mark.thorough
class TestMySqlKeyed(TestMariaDbKeyed):
    kind = "mysql"


def _sink(database, log, table, **options):
    made = ms.to_mariadb(database.url(), table=table, **options)
    return ms.sink(made, topic="t", log=log, name="out")


def _run(database, log, table, **options):
    return _sink(database, log, table, **options).run(until="caught-up")


TYPES = {
    "bi": ("BIGINT UNSIGNED", "18446744073709551615", "18446744073709551615"),
    "sm": ("SMALLINT", '"-32768"', "-32768"),
    "bo": ("BOOLEAN", "true", "1"),
    "de": ("DECIMAL(20,2)", "123456789012345678.99", "123456789012345678.99"),
    "db": ("DOUBLE", "0.1", "0.1"),
    "fl": ("FLOAT", "1.5", "1.5"),
    "bt": ("BIT(10)", "682", "1010101010"),
    "da": ("DATE", '"2026-02-28"', "2026-02-28"),
    "t3": ("TIME(3)", '"13:05:01.5"', "13:05:01.500"),
    "dt": ("DATETIME(3)", '"2026-01-02T03:04:05.678+02:00"', "2026-01-02 01:04:05.678"),
    "ts": ("TIMESTAMP(6) NULL", '"2026-10-25T00:30:00.000001Z"', "2026-10-25 00:30:00.000001"),
    "vc": ("VARCHAR(40)", '"a\'\\\\ \\n\\u0000😀 "', "a'\\ \n\0😀 "),
    "ob": ("TEXT", '{"a":[1.50,null]}', '{"a":[1.50,null]}'),
    "vb": ("VARBINARY(4)", '"AP8="', "00FF"),
    "en": ("ENUM('a','it''s')", '"it\'s"', "it's"),
    "st": ("SET('x','y')", '"x,y"', "x,y"),
    "js": ("JSON", '"text"', '"text"'),
    "ye": ("YEAR", "2026", "2026"),
}
REFUSED = {
    "bi": "1.5",
    "sm": "32768",
    "de": "0.125",
    "dt": '"2026-01-02T03:04:05.6789Z"',
    "ts": '"2039-01-01T00:00:00"',
    "vc": '"' + "x" * 41 + '"',
    "en": '"1"',
    "vb": '"AAAAAAA="',
    "da": '"0000-00-00"',
}


@pytest.mark.parametrize("kind", mariadb_database.KINDS_OF_A_LONG_TEST)
def test_a_column_of_every_type_has_the_value_of_the_record(tmp_path, kind):
    database = _database(kind)
    listed = ", ".join(f"{name} {type_}" for name, (type_, _, _) in TYPES.items())
    database.run(f"CREATE TABLE every (id INT PRIMARY KEY, {listed})")
    row = ", ".join(f'"{name}": {value}' for name, (_, value, _) in TYPES.items())
    send(tmp_path, (b"0", f"{{{row}}}".encode()))
    send(tmp_path, *((b"1", f'{{"{name}": {value}}}'.encode()) for name, value in REFUSED.items()))
    status = _run(database, tmp_path, "every", key="id")
    assert (status.records, status.dead) == (1, len(REFUSED)), reasons(tmp_path)
    shown = {"bt": "BIN(bt)", "vb": "HEX(vb)"}
    asked = ", ".join(f"CAST({shown.get(name, name)} AS CHAR)" for name in TYPES)
    found = database.run("SET time_zone = '+00:00'", f"SELECT {asked} FROM every")
    assert dict(zip(TYPES, found[-1], strict=True)) == {name: text for name, (_, _, text) in TYPES.items()}  # fmt: skip


def test_a_row_replaces_the_sinks_columns_and_leaves_others(tmp_path, database):
    database.run(
        "CREATE TABLE u (id INT PRIMARY KEY, a INT DEFAULT 7, b TEXT, mine TEXT)",
        "INSERT INTO u VALUES (1, 1, 'old', 'kept'), (3, 1, 'gone', '')",
    )
    send(tmp_path, (b"1", {"id": 1, "a": 2}), (b"2", {"b": "x"}), (b"3", None), (b"4", None))
    assert _run(database, tmp_path, "u", key="id", columns="id,a,b").dead == 0
    assert database.run("SELECT * FROM u ORDER BY id") == ((1, 2, None, "kept"), (2, 7, "x", None))


def test_rows_that_break_a_rule_are_dead_letters_with_the_servers_reason(tmp_path, database):
    database.run(
        "CREATE TABLE p (id INT PRIMARY KEY)",
        "CREATE TABLE u (id INT PRIMARY KEY, mail VARCHAR(20) UNIQUE, p INT, FOREIGN KEY (p) REFERENCES p (id))",
        "INSERT INTO u VALUES (9, 'nine', NULL)",
    )
    send(
        tmp_path,
        (b"1", {"id": 1, "mail": "one"}),
        (b"2", {"id": 2, "mail": "nine"}),
        (b"3", {"id": 3, "p": 5}),
        (b"4", {"id": 5}),
        (None, {"id": 6}),
        (b"1", {"id": 1, "mail": "uno"}),
        (b"7", {"id": 7, "more": 1}),
    )
    assert _run(database, tmp_path, "u", key="id").dead == 5
    found = reasons(tmp_path)
    assert sorted(found) == [1, 2, 3, 4, 6]
    for offset, words in {1: "Duplicate", 2: "foreign key", 3: "key is 4", 4: "no key", 6: "'more'"}.items():  # fmt: skip
        assert words in found[offset]
    assert database.run("SELECT id, mail FROM u ORDER BY id") == ((1, "uno"), (9, "nine"))


def test_keys_that_a_collation_takes_for_one_are_never_mixed_up(tmp_path, database):
    database.run(
        "CREATE TABLE u (id VARCHAR(9) COLLATE utf8mb4_general_ci PRIMARY KEY, n INT)",
        "INSERT INTO u VALUES ('A', 0)",
    )
    send(tmp_path, (b"a", {"n": 1}), (b"b", {"n": 2}), (b"B", None), (b"A", {"n": 3}))
    assert _run(database, tmp_path, "u", key="id").dead == 1
    assert database.run("SELECT id, n FROM u ORDER BY id") == (("A", 3), ("b", 2))


def test_a_key_of_several_columns_is_an_object(tmp_path, database):
    database.run("CREATE TABLE u (a INT, b DATETIME(3), n INT, PRIMARY KEY (b, a))")
    keys = [json.dumps({"b": "2026-01-01T00:00:00.5Z", "a": a}).encode() for a in (1, 2, 1)]
    send(tmp_path, (keys[0], {"n": 1}), (keys[1], {"a": 2, "n": 2}), (keys[2], {"n": 3}), (b"7", {"n": 4}))  # fmt: skip
    assert _run(database, tmp_path, "u", key="a, b").dead == 1
    send(tmp_path, (keys[1], None))
    _run(database, tmp_path, "u", key="a, b")
    assert database.run("SELECT a, n FROM u") == ((1, 3),)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.none() | st.tuples(st.integers(0, 3), st.booleans())),
        max_size=40,
    )
)
def test_a_batch_does_what_its_records_would_do_one_after_the_other(changes):
    """Where a row that is refused has no part in what others are refused for."""
    database = _database()
    database.run(
        "CREATE TABLE IF NOT EXISTS `model` (id INT PRIMARY KEY, n INT CHECK (n < 3), x BOOLEAN NOT NULL)",
        "DELETE FROM `model`",
    )
    made = ms.to_mariadb(database.url(), table="model", key="id")
    writer = made.open(SinkOpening("out", "t", str(time.monotonic_ns()), "x"))
    rows = [None if row is None else {"n": row[0], "x": row[1]} for _, row in changes]
    records = [
        SinkRecord(0, offset, 0, b"%d" % key, b"", row)
        for offset, ((key, _), row) in enumerate(zip(changes, rows, strict=True))
    ]
    refused = writer.write(RecordsToWrite("id", 0, records, {0: len(records)}))
    writer.close()
    wanted, wanted_refused = modelled(changes, lambda _, __, row: row[0] == 3)
    found = {id_: (n, bool(x)) for id_, n, x in database.run("SELECT id, n, x FROM `model`")}
    assert found == wanted
    # A row that another one of its batch replaces is not tried, where all can be written.
    assert {one.offset for one in refused} <= set(wanted_refused)


def test_a_table_that_does_not_fit_is_one_error_at_the_start(tmp_path, database):
    database.run(
        "CREATE TABLE orders (id INT PRIMARY KEY, cents INT NOT NULL)",
        "CREATE TABLE old (id INT PRIMARY KEY) ENGINE = MyISAM",
        "CREATE VIEW seen AS SELECT * FROM orders",
        "CREATE TABLE rough (id DOUBLE PRIMARY KEY)",
    )
    send(tmp_path, (b"1", {"id": 1, "euros": 2}), (b"1", None))
    for table, options, words in [
        ("order", {}, "there is no .* Did you mean 'orders'"),
        ("old", {}, "of the engine MyISAM"),
        ("seen", {}, "a VIEW"),
        ("orders", {"key": "cents"}, "primary key of .* is id"),
        ("orders", {"columns": "id"}, "NOT NULL and have no default: cents"),
        ("orders", {"columns": "id,cent"}, "no column 'cent'.* Did you mean 'cents'"),
        ("rough", {"key": "id"}, "of the type double"),
        ("orders", {"key": "id"}, "no row of the first batch .* the field 'euros'"),
        ("orders", {"key": "id", "extra": "skip"}, "no row of the first batch .* it lacks cents"),
    ]:
        with pytest.raises(ConfigError, match=words):
            _run(database, tmp_path, table, **options)
        with ms.connect(tmp_path) as log:
            log.delete_topic("out.positions")
    with pytest.raises(ConfigError, match="refuses: Access denied") as raised:
        ms.to_mariadb(database.url(password="wrong: hush"), table="orders").open(
            SinkOpening("out", "t", "l", "x")
        )
    assert "hush" not in str(raised.value)


def test_who_may_not_create_tables_is_told_the_statement(tmp_path, database):
    database.run(
        "CREATE TABLE t (id INT PRIMARY KEY)",
        "CREATE USER IF NOT EXISTS narrow@'%' IDENTIFIED BY 'narrow'",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {database.name}.t TO narrow@'%'",
    )
    made = ms.to_mariadb(database.url("narrow", "narrow"), table="t", key="id")
    opening = SinkOpening("out", "t", "l", "x")
    with pytest.raises(ConfigError, match="CREATE TABLE IF NOT EXISTS _millstream_sinks") as raised:
        made.open(opening)
    database.run(str(raised.value).partition("made: ")[2])
    database.run(
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {database.name}._millstream_sinks TO narrow@'%'"
    )
    made.open(opening).close()


def test_a_row_that_is_larger_than_a_packet_is_a_dead_letter(tmp_path, database):
    database.run("CREATE TABLE big (id INT PRIMARY KEY, text LONGTEXT)")
    limit = database.run("SELECT @@max_allowed_packet")[0][0]
    database.run("SET GLOBAL max_allowed_packet = 1048576", database=None)
    try:
        send(tmp_path, (b"1", {"text": "'" * 600_000}), (b"2", {"text": "x" * 600_000}))
        assert _run(database, tmp_path, "big", key="id").dead == 1
    finally:
        database.run(f"SET GLOBAL max_allowed_packet = {limit}", database=None)
    assert "max_allowed_packet" in reasons(tmp_path)[0]
    assert database.run("SELECT id, LENGTH(text) FROM big") == ((2, 600_000),)


def test_a_table_that_is_locked_is_waited_for(tmp_path, database):
    database.run("CREATE TABLE u (id INT PRIMARY KEY, n INT)", "INSERT INTO u VALUES (1, 1)")
    made = ms.to_mariadb(database.url(), table="u", key="id")
    writer = made.open(SinkOpening("out", "t", "l", "x"))
    writer.session.rows("SET SESSION innodb_lock_wait_timeout = 1")
    batch = RecordsToWrite("id", 0, [SinkRecord(0, 0, 0, b"1", b"", {"n": 2})], {0: 1})
    with database.connect(autocommit=False) as other, other.cursor() as cursor:
        cursor.execute("UPDATE u SET n = 5 WHERE id = 1")
        with pytest.raises(RetriableError, match="Lock wait timeout"):
            writer.write(batch)
    assert writer.write(batch) == []
    writer.close()
    assert database.run("SELECT n FROM u") == ((2,),)


def test_a_sink_that_is_killed_writes_each_row_once(tmp_path, database):
    """Each row adds 1 to a counter, by a trigger: a row that is written twice would be counted twice."""
    database.run(
        "CREATE TABLE killed (id INT PRIMARY KEY, n INT)",
        "CREATE TABLE counted (n INT)",
        "INSERT INTO counted VALUES (0)",
        "CREATE TRIGGER i AFTER INSERT ON killed FOR EACH ROW UPDATE counted SET n = n + 1",
        "CREATE TRIGGER u AFTER UPDATE ON killed FOR EACH ROW UPDATE counted SET n = n + 1",
    )
    send(tmp_path, *((b"%d" % (n % 400), {"n": n}) for n in range(3000)))
    for wait_s in (0.0, 0.05, 0.15, 0.3):
        process = subprocess.Popen(
            [sys.executable, "-c", _KILLED, database.url(), str(tmp_path)], stdout=subprocess.PIPE
        )
        process.stdout.readline()
        time.sleep(wait_s)
        process.kill()
        process.wait()
        process.stdout.close()
    made = replace(ms.to_mariadb(database.url(), table="killed", key="id"), records_max=50)
    status = ms.sink(made, topic="t", log=tmp_path, name="out").run(until="caught-up")
    assert (status.records, status.dead) == (3000, 0)
    assert database.run("SELECT n FROM counted") == ((3000,),)
    assert database.run("SELECT COUNT(*), MIN(n) FROM killed") == ((400, 2600),)
