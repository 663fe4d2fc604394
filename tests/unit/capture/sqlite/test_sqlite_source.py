"""SQLite databases that other connections write, captured: what is stored is what their tables hold."""

import random
import shutil
import sqlite3
import struct
from contextlib import suppress

import pytest
from capture_replica import Replica
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.capture.sqlite.encoding import decoded, encoded
from millstream.capture.sqlite.source import SqliteSource
from millstream.capture.units import TableDefinition
from millstream.errors import ConfigError, ConflictError, CorruptionError, RetriableError


class Database:
    def __init__(self, folder, *statements, wal=True):
        self.path = folder / "shop.db"
        if wal:
            self.run("PRAGMA journal_mode = WAL")
        self.run(*statements)
        self.replica = Replica()

    def connect(self):
        return sqlite3.connect(self.path, isolation_level=None)

    def run(self, *statements):
        connection = self.connect()
        try:
            return [connection.execute(statement).fetchall() for statement in statements][-1:]
        finally:
            connection.close()

    def source(self, *tables, chunk_rows=3):
        return SqliteSource(
            self.path, tables or ("*",), chunk_rows=chunk_rows, heartbeat_s=0, poll_s=0, sleep=lambda _: None
        )  # fmt: skip

    def follow(self, *tables, limit=100_000):
        self.replica.follow(self.source(*tables), lambda: True, limit=limit)

    def rows(self, table):
        connection = self.connect()
        cursor = connection.execute(f'SELECT * FROM "{table}"')
        names = [column[0] for column in cursor.description]
        rows = [dict(zip(names, row, strict=True)) for row in cursor]
        connection.close()
        return sorted(rows, key=str)

    def assert_captured(self, *tables):
        for table in tables:
            assert sorted(self.replica.rows(table), key=str) == self.rows(table)


T = "CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT, n INT)"


@pytest.fixture
def database(tmp_path):
    return Database(tmp_path, T)


def test_a_snapshot_holds_each_row_and_ends_where_changes_go_on(database):
    database.run(*[f"INSERT INTO t VALUES ({n}, 'n{n}', 0)" for n in range(10)])
    database.follow()
    assert [change.op for change in database.replica.changes()] == ["r"] * 10
    database.assert_captured("t")
    database.run(
        "UPDATE t SET id = 20 WHERE id = 3",
        "DELETE FROM t WHERE id = 4",
        "INSERT INTO t (n) VALUES (1)",
    )
    database.follow()
    assert [change.op for change in database.replica.changes()[10:]] == ["u", "d", "c"]
    database.assert_captured("t")


def test_what_is_rolled_back_is_not_captured(database):
    database.follow()
    database.run(
        "BEGIN",
        "INSERT INTO t VALUES (1, 'a', 1)",
        "SAVEPOINT s",
        "DELETE FROM t",
        "ROLLBACK TO s",
        "COMMIT",
    )
    database.run("BEGIN", "INSERT INTO t VALUES (2, 'b', 1)", "ROLLBACK")
    database.run("INSERT INTO t VALUES (3, 'c', 1)")
    database.follow()
    assert [(change.op, change.after["id"]) for change in database.replica.changes()] == [
        ("c", 1),
        ("c", 3),
    ]


VALUES = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    st.binary(),
)


@settings(max_examples=some(200))
@given(st.lists(VALUES, min_size=1, max_size=5))
def test_rows_are_written_by_sql_and_read_back_as_they_are(values):
    connection = sqlite3.connect(":memory:")
    names = [f"c{number}" for number in range(len(values))]
    connection.execute(f"CREATE TABLE t ({', '.join(names)})")
    connection.execute(f"INSERT INTO t VALUES ({', '.join('?' * len(values))})", values)
    stored = connection.execute("SELECT * FROM t").fetchone()
    (text,) = connection.execute(f"SELECT {encoded(names, 't')} FROM t").fetchone()
    connection.close()
    read = decoded(text, "t")
    assert [type(value) for value in read] == [type(value) for value in stored]
    assert [exact(value) for value in read] == [exact(value) for value in stored]


def exact(value):
    """Return a value so that -0.0 is not 0.0; SQLite stores no -0.0 in what is written as text."""
    return struct.pack("<d", value + 0.0) if isinstance(value, float) else value


@pytest.mark.parametrize("text", ["", "x", "i", "i1.5", "rx", "tzz", "n1", "b0"])
def test_text_that_no_trigger_writes_is_refused(text):
    with pytest.raises(CorruptionError, match="no trigger of capture writes"):
        decoded(text, "t")


def test_a_text_that_is_not_utf_8_is_refused(database):
    database.follow()
    database.run("INSERT INTO t (name) VALUES (CAST(x'ff' AS TEXT))")
    with pytest.raises(ConfigError, match="not UTF-8"):
        database.follow()


def test_a_value_of_another_type_than_its_column_says_so(tmp_path):
    database = Database(tmp_path, "CREATE TABLE t (id INTEGER PRIMARY KEY, b BLOB, x TEXT)")
    database.run("INSERT INTO t VALUES (1, x'00ff', x'61'), (2, 'text', 1e999)")
    database.follow()
    assert database.replica.rows("t") == [
        {"id": 1, "b": "AP8=", "x": {"blob": "YQ=="}},
        {"id": 2, "b": {"text": "text"}, "x": "Inf"},
    ]


@pytest.mark.parametrize("recursive", [0, 1])
@pytest.mark.parametrize(
    "statement",
    [
        "INSERT OR REPLACE INTO u VALUES ('c', 1, 'new')",  # takes the place of a
        "INSERT OR REPLACE INTO u VALUES ('B', 1, 'new')",  # of a and b, as the key is NOCASE
        "INSERT OR IGNORE INTO u VALUES ('c', 1, 'new')",
        "UPDATE OR REPLACE u SET n = 1 WHERE k = 'b'",
        "UPDATE OR IGNORE u SET n = 1 WHERE k = 'b'",
        "INSERT INTO u VALUES ('c', 1, 'x') ON CONFLICT (n) DO UPDATE SET v = 'upserted'",
        "REPLACE INTO u SELECT 'z', n, v FROM u",
        "DELETE FROM u",
    ],
)
def test_rows_that_others_take_the_place_of_are_deleted(tmp_path, statement, recursive):
    database = Database(
        tmp_path,
        "CREATE TABLE u (k TEXT COLLATE NOCASE PRIMARY KEY NOT NULL, n INT UNIQUE, v TEXT)",
        "INSERT INTO u VALUES ('a', 1, 'x'), ('b', 2, 'y')",
    )
    database.follow()
    database.run(f"PRAGMA recursive_triggers = {recursive}", statement)
    database.run(f"PRAGMA recursive_triggers = {recursive}", statement)
    database.follow()
    database.assert_captured("u")
    deleted = [change.before["k"] for change in database.replica.changes() if change.op == "d"]
    assert len(deleted) <= 4


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ("rowid TEXT", "'same'"),
        ("ROWID INT, oid INT", "7, 7"),
        ("_rowid_ INT", "NULL"),
    ],
)
def test_rows_are_told_apart_though_a_column_is_called_rowid(tmp_path, columns, row):
    database = Database(
        tmp_path,
        f"CREATE TABLE u (k TEXT PRIMARY KEY NOT NULL, n INT UNIQUE, {columns})",
        f"INSERT INTO u VALUES ('a', 1, {row}), ('b', 2, {row})",
    )
    database.follow()
    database.run("UPDATE OR REPLACE u SET n = 1 WHERE k = 'b'")
    database.follow()
    database.assert_captured("u")


@pytest.mark.parametrize("later", [False, True])
def test_triggers_of_the_application_that_write_again_hide_no_row(tmp_path, later):
    """The application may make its trigger while the capture is stopped."""
    trigger = (
        "CREATE TRIGGER stamp AFTER INSERT ON U BEGIN UPDATE u SET at = 5 WHERE id = NEW.id; END"
    )
    database = Database(
        tmp_path,
        "CREATE TABLE u (id INTEGER PRIMARY KEY, n INT UNIQUE, at INT)",
        "INSERT INTO u VALUES (20, 1, 0), (21, 2, 0)",
        *([] if later else [trigger]),
    )
    database.follow()
    database.run(*([trigger] if later else []), "INSERT OR REPLACE INTO u VALUES (2, 1, 0)")
    database.follow()
    database.assert_captured("u")
    database.run("INSERT OR REPLACE INTO u VALUES (3, 2, 0)")
    database.follow()
    database.assert_captured("u")
    assert [one.op for one in database.replica.changes()].count("t") == later


def test_a_trigger_that_writes_again_before_a_row_is_written_is_refused(tmp_path):
    database = Database(
        tmp_path,
        "CREATE TABLE u (id INTEGER PRIMARY KEY, n INT UNIQUE)",
        "CREATE TRIGGER again BEFORE INSERT ON u WHEN NEW.id < 10 BEGIN "
        "INSERT OR REPLACE INTO u VALUES (NEW.id + 10, NEW.n + 1); END",
    )
    with pytest.raises(ConfigError, match="the trigger again"):
        database.follow()


def test_a_wide_table_is_captured(tmp_path):
    columns = ", ".join(f"c{number} INT" for number in range(1200))
    database = Database(tmp_path, f"CREATE TABLE u (id INTEGER PRIMARY KEY, {columns})")
    database.follow()
    database.run("INSERT INTO u (id, c0, c1199) VALUES (1, 2, 3)")
    database.follow()
    database.assert_captured("u")


def test_tables_that_are_altered_made_and_dropped_are_followed(tmp_path):
    database = Database(tmp_path, T, "CREATE TABLE gone (id INTEGER PRIMARY KEY)")
    database.run("INSERT INTO t VALUES (1, 'a', 1)", "INSERT INTO gone VALUES (1)")
    database.follow()
    database.run(
        "INSERT INTO t VALUES (2, 'b', 2)",
        "ALTER TABLE t ADD COLUMN extra INT DEFAULT 7",
        "INSERT INTO t VALUES (3, 'c', 3, 8)",
        "CREATE TABLE made (id INTEGER PRIMARY KEY)",
        "INSERT INTO made VALUES (5)",
        "DROP TABLE gone",
    )
    database.follow()
    database.assert_captured("t", "made")
    assert database.replica.rows("gone") == []
    database.run("ALTER TABLE t RENAME COLUMN name TO title", "ALTER TABLE made RENAME TO other")
    database.run("INSERT INTO t VALUES (4, 'd', 3, 8)", "INSERT INTO other VALUES (6)")
    database.follow()
    database.assert_captured("t", "other")
    assert database.replica.rows("made") == []
    dropped = [
        content.table
        for _, _, contents in database.replica.units
        for content in contents
        if isinstance(content, TableDefinition) and content.dropped
    ]
    assert dropped == ["gone", "made"]


def test_a_table_made_anew_under_its_name_is_read_again(database):
    database.run("INSERT INTO t VALUES (1, 'a', 1), (2, 'b', 2)")
    database.follow()
    database.run("DROP TABLE t", T, "INSERT INTO t VALUES (9, 'z', 9)")
    database.follow()
    database.assert_captured("t")


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (["CREATE TABLE x (a INT)"], "no primary key"),
        (["CREATE TABLE x (a TEXT PRIMARY KEY) WITHOUT ROWID"], "WITHOUT ROWID"),
        (["CREATE TABLE x (a TEXT PRIMARY KEY)", "INSERT INTO x VALUES (NULL)"], "NULL in the primary key"),
        (["CREATE TABLE x (a INTEGER PRIMARY KEY, b)", "CREATE UNIQUE INDEX i ON x (lower(b))"], "on an expression"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_captured_are_refused_before_anything_is_written(
    tmp_path, statements, words
):
    database = Database(tmp_path, *statements)
    before = database.run("SELECT * FROM sqlite_schema")
    for attempt in (database.source().check, database.follow):
        with pytest.raises(ConfigError, match=words):
            attempt()
    assert database.run("SELECT * FROM sqlite_schema") == before


def test_a_key_that_becomes_null_stops_the_capture(tmp_path):
    database = Database(tmp_path, "CREATE TABLE x (a TEXT PRIMARY KEY)")
    database.follow()
    database.run("INSERT INTO x VALUES (NULL)")
    with pytest.raises(ConfigError, match="NULL in the primary key"):
        database.follow()


def test_a_database_that_is_restored_from_a_backup_is_refused(database, tmp_path):
    database.follow()
    shutil.copy(database.path, tmp_path / "backup")
    database.run("PRAGMA wal_checkpoint(TRUNCATE)", "INSERT INTO t VALUES (1, 'a', 1)")
    database.follow()
    shutil.copy(tmp_path / "backup", database.path)
    for leftover in ("-wal", "-shm"):
        (tmp_path / f"shop.db{leftover}").unlink(missing_ok=True)
    with pytest.raises(ConflictError, match="restored from a backup"):
        database.follow()
    database.run(
        "INSERT INTO t VALUES (1, 'b', 1), (2, 'c', 1)"
    )  # as many changes as before, and more
    with pytest.raises(ConflictError, match="restored from a backup"):
        database.follow()


def test_another_database_at_the_path_is_refused(database, tmp_path):
    database.follow()
    database.path.unlink()
    database.run(T)
    with pytest.raises(ConflictError, match="another file"):
        database.follow()


def test_a_file_that_is_replaced_while_it_is_captured_is_seen(database, tmp_path):
    units = database.source().units(None)
    database.replica.store(next(units))
    shutil.copy(database.path, tmp_path / "copy")
    (tmp_path / "copy").replace(database.path)
    with pytest.raises(ConflictError, match="another file has taken the place"):
        for unit in units:
            database.replica.store(unit)


def test_a_second_capture_ends_the_first(database):
    database.follow()
    stored = database.replica.progress
    other = Replica()
    other.follow(database.source(), lambda: True)
    with pytest.raises(ConflictError, match="another capture"):
        next(database.source().units(stored))


def test_a_database_that_is_locked_is_tried_again(database, monkeypatch):
    monkeypatch.setattr("millstream.capture.sqlite.source._BUSY_S", 0.01)
    writer = database.connect()
    writer.execute("BEGIN EXCLUSIVE")
    with pytest.raises(RetriableError, match="locked by a writer"):
        database.follow()
    writer.execute("ROLLBACK")
    writer.close()
    database.follow()


@pytest.mark.parametrize("content", [None, b"no database at all" * 100])
def test_a_path_that_leads_to_no_database_is_refused(tmp_path, content):
    path = tmp_path / "none.db"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"none\.db"):
        SqliteSource(path, ["*"]).check()
    assert path.exists() == (content is not None)


def test_changes_that_are_stored_are_deleted_and_the_last_one_stays(database):
    source = database.source()
    units = source.units(None)
    for number in range(5):
        database.run(f"INSERT INTO t (n) VALUES ({number})")
    while (unit := next(units)).kind != "progress":
        database.replica.store(unit)
    source.acknowledge(database.replica.progress)
    while next(units).kind != "progress":
        pass
    units.close()
    left = database.run("SELECT seq FROM _millstream_changes")[0]
    assert left == [(database.replica.progress["seq"],)]


def test_capture_can_be_taken_out_of_a_database(database):
    before = database.run("SELECT name FROM sqlite_schema ORDER BY 1")
    database.follow()
    database.source().remove()
    after = database.run(
        "SELECT name FROM sqlite_schema WHERE name <> 'sqlite_sequence' ORDER BY 1"
    )
    assert after == before


OPERATIONS = (
    "INSERT INTO t (name, n) VALUES ('{a}', {b})",
    "INSERT OR REPLACE INTO t (id, name, n) VALUES ({a}, 'r', {b})",
    "UPDATE t SET n = {b} WHERE id % 5 = {a} % 5",
    "UPDATE OR REPLACE t SET id = {b} WHERE id = {a}",
    "DELETE FROM t WHERE id = {a}",
    "INSERT OR REPLACE INTO u VALUES ('{a}', {b}, 'v')",
    "UPDATE OR REPLACE u SET n = {b} WHERE k = '{a}'",
    "UPDATE OR IGNORE u SET k = '{b}', n = {a} WHERE n = {b}",
    "INSERT OR IGNORE INTO u VALUES ('{a}', {b}, 'i')",
    "DELETE FROM u WHERE n = {b}",
)
ALTERATIONS = (
    "ALTER TABLE t ADD COLUMN c{a}{b} INT DEFAULT {b}",
    "DROP TABLE IF EXISTS w",
    "CREATE TABLE IF NOT EXISTS w (id INTEGER PRIMARY KEY)",
    "VACUUM",
)


@pytest.mark.parametrize("wal", [True, False])
@pytest.mark.parametrize("seed", range(some(20)))
def test_a_capture_that_stops_anywhere_ends_with_what_the_tables_hold(tmp_path, seed, wal):
    rng = random.Random(seed)
    database = Database(
        tmp_path, T, "CREATE TABLE u (k TEXT PRIMARY KEY NOT NULL, n INT UNIQUE, v TEXT)", wal=wal
    )
    for _ in range(12):
        for _ in range(rng.randrange(6)):
            statements = [
                rng.choice(OPERATIONS).format(a=rng.randrange(12), b=rng.randrange(12))
                for _ in range(rng.randrange(1, 5))
            ]
            with suppress(sqlite3.IntegrityError):
                database.run("BEGIN", *statements, rng.choice(["COMMIT", "COMMIT", "ROLLBACK"]))
        if rng.random() < 0.2:
            try:
                database.run(
                    rng.choice(ALTERATIONS).format(a=rng.randrange(12), b=rng.randrange(12))
                )
            except sqlite3.OperationalError as error:
                assert "duplicate column" in str(error)
        database.follow(limit=rng.randrange(1, 5))
    database.follow()
    database.assert_captured("t", "u")
    positions = [int(at) for kind, at, _ in database.replica.units if kind == "transaction"]
    assert positions == sorted(set(positions))
