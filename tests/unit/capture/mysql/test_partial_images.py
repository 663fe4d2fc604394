"""Sessions that log rows without some columns (``binlog_row_image``): what the log has nowhere is read from the table."""

import random
import re

import pytest

from millstream.errors import ConfigError

COLUMNS = ("id", "x", "y", "v", "s")
MINIMAL = "SET SESSION binlog_row_image = MINIMAL"


def now():
    return True


def made(database, rows=20):
    database.run(
        "CREATE TABLE t (id INT PRIMARY KEY DEFAULT -99, x INT DEFAULT 5, y INT, v INT AS (x + y) VIRTUAL, "
        "s INT AS (x - y) STORED)",
        f"INSERT INTO t (id, x, y) SELECT seq, seq, seq FROM seq_1_to_{rows}",
    )


def truth(database):
    with database.connect() as session, session.cursor() as cursor:
        cursor.execute("SELECT id, x, y, v, s FROM t")
        return {
            int(row[0]): dict(
                zip(COLUMNS, (None if v is None else int(v) for v in row), strict=True)
            )
            for row in cursor.fetchall()
        }


def strictly_replayed(replica):
    """Return the rows by the envelope's rules: a column that is left out has the value of the row before."""
    rows = {}
    for change in replica.changes("t"):
        before = None
        if change.op == "t":
            rows.clear()
        if change.op in "ud":
            before = rows.pop((change.before or change.after)["id"], None)
        if change.after is not None:
            row = {**(before or {}), **change.after} if change.op == "u" else change.after
            assert row.keys() == set(COLUMNS), f"{change} has no row before it that is known"
            rows[row["id"]] = row
    return rows


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE t SET y = 99 WHERE id = 19",
        "UPDATE t SET id = -5 WHERE id = 19",
        "UPDATE t SET id = 100 WHERE id = 1",
        "INSERT INTO t (id, y) VALUES (-7, 1)",
        "INSERT INTO t (y) VALUES (1)",
        "DELETE FROM t WHERE id = 19",
        "UPDATE t SET y = id + 1",
    ],
)
def test_a_change_that_says_too_little_while_its_table_is_read_waits_for_the_row(
    database, replica, statement
):
    made(database)
    replica.follow(database.source(), now, limit=4)
    assert 0 < len(replica.rows("t")) < 20
    database.run(MINIMAL, statement)
    replica.follow(database.source(), now)
    assert strictly_replayed(replica) == truth(database)


@pytest.mark.parametrize(
    "statement", ["UPDATE t SET x = 7 WHERE id < 4", "INSERT INTO t (y) VALUES (1)"]
)
def test_a_virtual_column_or_key_that_is_not_logged_is_read(database, replica, statement):
    made(database)
    replica.follow(database.source(), now)
    database.run(MINIMAL, statement)
    replica.follow(database.source(), now)
    assert strictly_replayed(replica) == truth(database)


DEFAULTS = """id INT PRIMARY KEY, n INT DEFAULT -5, big BIGINT UNSIGNED DEFAULT 18446744073709551615, d DECIMAL(10, 3) DEFAULT 1.5,
    f DOUBLE DEFAULT 2.5, fl FLOAT DEFAULT 1.1, c CHAR(9) DEFAULT 'a ', v VARCHAR(20) CHARACTER SET latin1 DEFAULT 'it''s ü',
    esc VARCHAR(20) DEFAULT 'a\\\\b', named VARCHAR(20) DEFAULT 'NULL', t TEXT DEFAULT 'x', e ENUM('q', 'r') DEFAULT 'r',
    s SET('q', 'r') DEFAULT 'q,r', day DATE DEFAULT '2026-02-28', at DATETIME(3) DEFAULT '2026-02-28 01:02:03.5',
    stamp TIMESTAMP NULL DEFAULT '2026-02-28 01:02:03', y YEAR DEFAULT 2026, b BIT(3) DEFAULT b'101', l TIME DEFAULT '-01:00:00',
    raw VARBINARY(9) DEFAULT 'ab', u UUID DEFAULT '00000000-0000-0000-0000-000000000001', none TEXT, made INT DEFAULT (1 + 1),
    nn INT NOT NULL, now DATETIME DEFAULT CURRENT_TIMESTAMP, doc JSON DEFAULT '{"a": 1}'"""
UNKNOWN_DEFAULTS = {"fl", "esc", "stamp", "b", "l", "raw", "u", "nn"}


def test_an_insertion_has_the_defaults_that_its_session_did_not_log(database, replica):
    known = [line for line in _divided(DEFAULTS) if line.split()[0] not in UNKNOWN_DEFAULTS]
    database.run(f"CREATE TABLE t ({', '.join(known)})", "CREATE TABLE whole LIKE t")
    replica.follow(database.source(), now)
    database.run("INSERT INTO whole (id) VALUES (1)", MINIMAL, "INSERT INTO t (id) VALUES (1)")
    replica.follow(database.source(), now)
    (change,) = replica.changes("t")
    (whole,) = replica.changes("whole")
    assert change.op == "c", "it was read again"
    assert {**change.after, "now": 0} == {**whole.after, "now": 0}
    assert list(change.after) == list(whole.after)


def test_a_default_that_is_not_known_is_read(database, replica):
    database.run(f"CREATE TABLE t ({DEFAULTS})", "CREATE TABLE whole LIKE t")
    replica.follow(database.source(), now)
    lenient = "SET SESSION sql_mode = ''"
    database.run(
        lenient, "INSERT INTO whole (id) VALUES (1)", MINIMAL, "INSERT INTO t (id) VALUES (1)"
    )
    replica.follow(database.source(), now)
    (change,) = replica.changes("t")
    (whole,) = replica.changes("whole")
    assert change.op == "r"
    assert {**change.after, "now": 0} == {**whole.after, "now": 0}


def _divided(columns):
    """Divide the columns of a table at the commas that are not within brackets or quotes."""
    return [part.strip() for part in re.split(r",\s+(?=[a-z]+ [A-Z])", columns)]


PLAIN = ("CREATE TABLE t (id INT PRIMARY KEY, x INT DEFAULT 5, y INT, b TEXT DEFAULT 'd')",)


def plainly_replayed(replica):
    """Return the rows by the envelope's rules, as tuples: a column that is left out has the value of the row before."""
    rows = {}
    for change in replica.changes("t"):
        before = rows.pop((change.before or change.after)["id"], {})
        if change.after is not None:
            row = {**before, **change.after} if change.op == "u" else change.after
            rows[row["id"]] = row
    return sorted(tuple(row[name] for name in ("id", "x", "y", "b")) for row in rows.values())


def test_a_default_holds_until_the_table_is_altered(database, replica):
    database.run(*PLAIN)
    replica.follow(database.source(), now)
    for key in range(4):
        insert = f"INSERT INTO t (id, y) VALUES ({key}, 1)"
        database.run(MINIMAL, insert, f"ALTER TABLE t ALTER COLUMN x SET DEFAULT {key}")
        if key == 1:
            replica.follow(database.source(), now)
    replica.follow(database.source(), now)
    assert plainly_replayed(replica) == sorted(database.run("SELECT * FROM t"))


@pytest.mark.parametrize("image", ["NOBLOB", "MINIMAL"])
@pytest.mark.parametrize(
    "statement",
    [
        "REPLACE INTO t (id, y) VALUES (3, 9)",
        "INSERT INTO t (id, y) VALUES (3, 9) ON DUPLICATE KEY UPDATE y = 7",
        "UPDATE t SET id = 4 WHERE id = 3",
    ],
)
def test_a_row_that_is_replaced_has_defaults_that_are_not_logged(
    database, replica, statement, image
):
    database.run(*PLAIN, "INSERT INTO t VALUES (3, 1, 1, 'x')")
    replica.follow(database.source(), now)
    database.run(f"SET SESSION binlog_row_image = {image}", statement)
    replica.follow(database.source(), now)
    assert plainly_replayed(replica) == sorted(database.run("SELECT * FROM t"))


REPLACED = [
    ("id INT PRIMARY KEY, y INT, b TEXT", "REPLACE INTO t (id, y) VALUES (3, 9)"),
    ("id INT PRIMARY KEY, y INT, b TEXT NOT NULL", "REPLACE INTO t (id, y) VALUES (3, 9)"),
    ("y INT, b INT DEFAULT 0, id INT, PRIMARY KEY (y, b)", "REPLACE INTO t (y) VALUES (3)"),
    ("id INT PRIMARY KEY DEFAULT 3, y INT, b INT DEFAULT 5", "REPLACE INTO t () VALUES ()"),
    ("id INT PRIMARY KEY DEFAULT 7, y INT UNIQUE, b INT", "REPLACE INTO t (y) VALUES (0)"),
    ("y INT PRIMARY KEY, id INT, b INT", "REPLACE INTO t (id) VALUES (9)"),
]


@pytest.mark.parametrize("image", ["NOBLOB", "MINIMAL"])
@pytest.mark.parametrize(("columns", "statement"), REPLACED)
def test_what_a_replace_does_not_name_is_in_no_log(database, replica, columns, statement, image):
    key = re.search(r"PRIMARY KEY \((.*?)\)|(\w+) INT PRIMARY KEY", columns)
    key = (key[1] or key[2]).split(", ")
    old = {"id": 3, "y": 3 if len(key) > 1 else 0, "b": 0}
    database.run(
        f"CREATE TABLE t ({columns})",
        f"INSERT INTO t (id, y, b) VALUES ({', '.join(map(str, old.values()))})",
    )
    replica.follow(database.source(), now)
    database.run("SET sql_mode = ''", f"SET SESSION binlog_row_image = {image}", statement)
    replica.follow(database.source(), now)
    rows = {}
    for change in replica.changes():
        before = {}
        if change.op in "ud":
            before = rows.pop(tuple((change.before or change.after)[name] for name in key))
        if change.after is not None:
            row = {**before, **change.after} if change.op == "u" else change.after
            rows[tuple(row[name] for name in key)] = row
    found = database.run("SELECT id, y, b FROM t")
    assert [(row["id"], row["y"], row["b"]) for row in rows.values()] == list(found)


def test_defaults_of_letters_that_the_server_does_not_show_are_read(database, replica):
    columns = "x VARCHAR(9) DEFAULT '\U0001f600', y ENUM('a', '\U0001f600') DEFAULT '\U0001f600'"
    database.run(f"CREATE TABLE t (id INT PRIMARY KEY, {columns})")
    replica.follow(database.source(), now)
    database.run(MINIMAL, "INSERT INTO t (id) VALUES (1)")
    replica.follow(database.source(), now)
    assert replica.rows("t") == [{"id": 1, "x": "\U0001f600", "y": "\U0001f600"}]


def test_an_insertion_that_an_alter_may_have_followed_is_read(database, replica):
    database.run(*PLAIN)
    replica.follow(database.source(), now)
    database.run(
        MINIMAL,
        "INSERT INTO t (id, y) VALUES (1, 1)",
        "ALTER TABLE t ALTER COLUMN x SET DEFAULT 6",
        "INSERT INTO t (id, y) VALUES (2, 2)",
        "INSERT INTO t (id, y) VALUES (3, 3)",
    )
    replica.follow(database.source(), now)
    operations = [(change.op, change.after["id"]) for change in replica.changes()]
    # Only the last one ends where the defaults were read: no ALTER was between.
    assert operations == [("c", 3), ("r", 1), ("r", 2), ("r", 3)]
    assert plainly_replayed(replica) == sorted(database.run("SELECT * FROM t"))


@pytest.mark.parametrize("seed", range(3))
def test_a_snapshot_that_is_killed_again_and_again_is_the_table(database, replica, seed):
    dice = random.Random(seed)
    made(database)
    for _ in range(8):
        replica.follow(database.source(), now, limit=dice.randrange(1, 7))
        image = dice.choice(["MINIMAL", "NOBLOB", "FULL"])
        database.run(f"SET SESSION binlog_row_image = {image}", "BEGIN", *some(dice), "COMMIT")
    replica.follow(database.source(), now)
    assert strictly_replayed(replica) == truth(database)


def some(dice):
    for _ in range(dice.randrange(1, 5)):
        old, new = dice.randrange(-5, 25), dice.randrange(-5, 25)
        yield dice.choice(
            [
                f"UPDATE t SET x = {new} WHERE id = {old}",
                f"UPDATE t SET y = y + 1 WHERE id > {old}",
                f"UPDATE IGNORE t SET id = {new} WHERE id = {old}",
                f"UPDATE IGNORE t SET id = {new}, y = 3 WHERE id = {old}",
                f"INSERT IGNORE INTO t (id, x, y) VALUES ({new}, 1, 2)",
                f"INSERT IGNORE INTO t (id, y) VALUES ({new}, 2)",
                f"REPLACE INTO t (id, y) VALUES ({new}, 6)",
                f"REPLACE INTO t (id, x, y) VALUES ({new}, 3, 4)",
                f"DELETE FROM t WHERE id = {old}",
            ]
        )


def test_a_table_that_is_begun_again_and_again_is_refused_until_its_sessions_say_more(
    database, replica
):
    made(database)
    replica.follow(database.source(), now, limit=2)
    with pytest.raises(ConfigError, match="leave binlog_row_image as FULL"):
        for unit in database.source().units(replica.progress):
            replica.store(unit)
            database.run(MINIMAL, "UPDATE t SET y = y + 1 WHERE id = 20")
    replica.follow(database.source(), now)
    assert strictly_replayed(replica) == truth(database)
