"""A real MariaDB and a real MySQL, captured: what is stored is what their tables hold."""

import pytest
from mariadb_database import both
from mariadb_types import ALL_VALUES, EVERY_TYPE

from millstream.capture.envelope import to_json
from millstream.capture.mysql import snapshot_rows
from millstream.capture.units import TableDefinition
from millstream.errors import ConfigError


def now():
    return True


@both
def test_a_snapshot_holds_each_row_and_ends_where_changes_go_on(database, replica):
    database.run("CREATE TABLE t (id INT PRIMARY KEY, name VARCHAR(20))")
    database.run("INSERT INTO t VALUES " + ", ".join(f"({n}, 'n{n}')" for n in range(1, 11)))
    replica.follow(database.source(), now)
    assert replica.rows("t") == [{"id": n, "name": f"n{n}"} for n in range(1, 11)]
    assert {change.op for change in replica.changes()} == {"r"}
    database.run("UPDATE t SET name = 'new' WHERE id = 3", "DELETE FROM t WHERE id = 4")
    replica.follow(database.source(), now)
    assert [change.op for change in replica.changes()[10:]] == ["u", "d"]
    names = {row["id"]: row["name"] for row in replica.rows("t")}
    assert names == {n: f"n{n}" for n in range(1, 11) if n != 4} | {3: "new"}


def insert_all(database, table):
    rows = enumerate(ALL_VALUES[database.kind])
    return [f"INSERT INTO {table} VALUES ({place}, {row})" for place, row in rows]


@both
@pytest.mark.parametrize("rows_min", [1, 100])
def test_each_type_reads_the_same_in_a_snapshot_and_in_the_log(
    database, replica, rows_min, monkeypatch
):
    monkeypatch.setattr(snapshot_rows, "_BLOCK_ROWS_MIN", rows_min)
    database.run(EVERY_TYPE[database.kind].format("a"), EVERY_TYPE[database.kind].format("b"))
    database.run("SET sql_mode = ''", *insert_all(database, "a"))
    replica.follow(database.source(chunk_rows=2), now)
    database.run("SET sql_mode = ''", *insert_all(database, "b"))
    replica.follow(database.source(), now)
    assert {change.op for change in replica.changes("b")} == {"c"}
    assert len(replica.rows("a")) == len(ALL_VALUES[database.kind])
    for read, logged in zip(replica.rows("a"), replica.rows("b"), strict=True):
        assert to_json(read) == to_json(logged)


@both
def test_the_log_and_the_server_agree_on_what_each_type_is(database, replica):
    database.run(EVERY_TYPE[database.kind].format("a"))
    replica.follow(database.source(), now)
    database.run("SET sql_mode = ''", *insert_all(database, "a"))
    replica.follow(database.source(), now)
    first, last = (
        [(one["name"], one["type"]) for one in content.columns]
        for _, _, contents in replica.units
        for content in contents
        if isinstance(content, TableDefinition)
    )
    assert first == last


@both
def test_chunks_go_on_after_keys_of_every_type(database, replica):
    keys = {
        "s": ("VARCHAR(9) COLLATE utf8mb4_general_ci", ["'a'", "'B'", "'c'", "'Ö '", "'\\'x\\\\'"]),
        "l": ("VARCHAR(9) CHARACTER SET latin1", ["'a'", "'é'", "'€'", "''"]),
        "b": ("VARBINARY(9)", ["x'00'", "x'0001'", "x'ff'", "''"]),
        "n": ("BIGINT", ["-5", "0", "9223372036854775807", "-9223372036854775808"]),
        "un": ("BIGINT UNSIGNED", ["18446744073709551615", "0", "7"]),
        "d": ("DECIMAL(30,10)", ["-1.5", "0", "12345678901234567890.0123456789", "1.4999999999"]),
        "e": ("ENUM('z','a','m')", ["'z'", "'a'", "'m'"]),
        "da": ("DATE", ["'2026-01-01'", "'1969-12-31'", "'9999-12-31'"]),
        "ts": ("TIMESTAMP(3)", ["'2026-01-01 00:00:00.001'", "'2026-01-01 00:00:00.002'"]),
        "ti": ("TIME(2)", ["'-10:00:00.25'", "'00:00:00'", "'838:59:59'"]),
        "u": ("UUID", ["'123e4567-e89b-12d3-a456-426614174000'", "'023e4567-e89b-42d3-b456-426614174000'"]),
        "bi": ("BIT(10)", ["1", "1023", "512"]),
    }  # fmt: skip
    if database.kind == "mysql":
        del keys["u"]
        values = ["'a'", "'a '", "'B'", "'Ö '", "'日本'", "'🎉'"]
        keys["z"] = ("VARCHAR(9) COLLATE utf8mb4_0900_as_cs", values)
        keys["zi"] = ("CHAR(9) COLLATE utf8mb4_0900_ai_ci", ["'a'", "'B'", "'ö'", "'日本'"])
    for table, (kind, values) in keys.items():
        database.run(f"CREATE TABLE k_{table} (k {kind}, n INT, PRIMARY KEY (k, n))")
        database.run(
            f"INSERT INTO k_{table} VALUES "
            + ", ".join(f"({v}, {n})" for v in values for n in (1, 2))
        )
    replica.follow(database.source(chunk_rows=1), now)
    for table, (_, values) in keys.items():
        assert len(replica.rows(f"k_{table}")) == 2 * len(values), table
        assert len(replica.changes(f"k_{table}")) == 2 * len(values), table


@both
def test_ddl_is_followed_and_tables_whose_rows_it_changes_are_read_again(database, replica):
    database.run(
        "CREATE TABLE t (id INT PRIMARY KEY, x INT)", "INSERT INTO t VALUES (1, 10), (2, 20)"
    )
    replica.follow(database.source(), now)
    database.run(
        "ALTER TABLE t ADD COLUMN y INT NOT NULL DEFAULT 7",
        "INSERT INTO t VALUES (3, 30, 31)",
        "CREATE TABLE made (id INT)",
        "INSERT INTO made VALUES (5)",
        "ALTER TABLE made ADD PRIMARY KEY (id)",
        "CREATE TABLE fresh (id INT PRIMARY KEY)",
        "INSERT INTO fresh VALUES (1), (2)",
        "TRUNCATE TABLE fresh",
        "INSERT INTO fresh VALUES (9)",
        "CREATE TABLE gone (id INT PRIMARY KEY)",
        "INSERT INTO gone VALUES (1)",
        "DROP TABLE gone",
        "RENAME TABLE t TO moved",
    )
    replica.follow(database.source("t", "moved", "fresh", "gone"), now)
    assert replica.rows("moved") == [
        {"id": 1, "x": 10, "y": 7},
        {"id": 2, "x": 20, "y": 7},
        {"id": 3, "x": 30, "y": 31},
    ]
    assert replica.rows("fresh") == [{"id": 9}]
    assert replica.rows("t") == replica.rows("gone") == []
    defined = [
        content
        for _, _, contents in replica.units
        for content in contents
        if isinstance(content, TableDefinition) and content.dropped
    ]
    assert [content.table for content in defined] == ["gone", "t"]


@both
def test_partial_images_leave_columns_out_and_keep_the_others(database, replica):
    database.run("CREATE TABLE t (id INT PRIMARY KEY, x INT DEFAULT 5, y INT)")
    replica.follow(database.source(), now)
    database.run(
        "SET SESSION binlog_row_image = MINIMAL",
        "INSERT INTO t (id, y) VALUES (1, 2)",
    )
    replica.follow(database.source(), now)
    database.run("SET SESSION binlog_row_image = MINIMAL", "UPDATE t SET y = 3")
    replica.follow(database.source(), now)
    created, updated = replica.changes()
    assert created.after == {"id": 1, "x": 5, "y": 2}  # of MySQL it is read from the table
    assert created.op == ("c" if database.kind == "mariadb" else "r")
    assert (updated.before, updated.after) == ({"id": 1}, {"id": 1, "y": 3})


@both
@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (["SET SESSION binlog_format = STATEMENT", "INSERT INTO t VALUES (1)"], "logged as a statement"),
        (["XA START 'x'", "INSERT INTO t VALUES (1)", "XA END 'x'", "XA PREPARE 'x'", "XA COMMIT 'x'"], "of XA"),
        (["ALTER TABLE t DROP PRIMARY KEY"], "no primary key"),
        (["ALTER TABLE t ENGINE = MyISAM"], "engine MyISAM"),
        (["ALTER TABLE t ADD p POINT"], "point, which capture does not read"),
    ],
)  # fmt: skip
def test_what_cannot_be_captured_stops_the_capture(database, replica, statements, words):
    database.run("CREATE TABLE t (id INT PRIMARY KEY)")
    replica.follow(database.source(), now)
    stored = replica.progress
    database.run(*statements)
    for _ in range(2):  # and again, until somebody does something about it
        with pytest.raises(ConfigError, match=words):
            replica.follow(database.source(), now)
    assert replica.progress["tables"] == stored["tables"]


@both
def test_tables_that_are_added_later_are_read_among_the_changes(database, replica):
    database.run("CREATE TABLE t (id INT PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    database.run("CREATE TABLE later (id INT PRIMARY KEY)", "INSERT INTO later VALUES (1), (2)")
    replica.follow(database.source("t"), now)
    assert replica.rows("later") == []
    replica.follow(database.source("t", "later"), now)
    assert replica.rows("later") == [{"id": 1}, {"id": 2}]
