"""Servers, sessions and statements that are not as capture would like them: what they leave is right, or refused."""

import time

import pytest
from mariadb_database import Database, both, of_mysql, start

from millstream.capture.mysql import snapshot
from millstream.capture.mysql import source as sources
from millstream.errors import ConfigError, ConflictError, RetriableError


def now():
    return True


@both
def test_statements_are_read_in_the_character_set_of_their_session(database, replica):
    database.run("CREATE TABLE `größe` (id INT PRIMARY KEY)", "INSERT INTO `größe` VALUES (1)")
    replica.follow(database.source(), now)
    with database.connect(charset="latin1") as session, session.cursor() as cursor:
        cursor.execute("TRUNCATE TABLE größe")
        replica.follow(database.source(), now)
        assert replica.rows("größe") == []
        for statement in ("INSERT INTO größe VALUES (2)", "RENAME TABLE größe TO straße"):
            cursor.execute(statement)
        cursor.execute("CREATE TABLE über (id INT PRIMARY KEY, n INT)")
        cursor.execute("INSERT INTO über VALUES (3, 4)")
        cursor.execute("ALTER TABLE über ADD COLUMN ñ INT DEFAULT 5")
        replica.follow(database.source(), now)
        assert replica.rows("straße") == [{"id": 2}]
        assert replica.rows("über") == [{"id": 3, "n": 4, "ñ": 5}]
        cursor.execute("DROP TABLE straße, über")
    name = b"\x81`".decode("gbk")  # its second byte is that of a backquote
    with database.connect(charset="gbk") as session, session.cursor() as cursor:
        for statement in ("CREATE TABLE `{}` (id INT PRIMARY KEY)", "INSERT INTO `{}` VALUES (1)", "TRUNCATE `{}`"):  # fmt: skip
            cursor.execute(statement.format(name))
    replica.follow(database.source(), now)
    assert (replica.rows("straße"), replica.rows("über")) == ([], [])
    assert replica.tables[name] == {}


def test_savepoints_have_their_names_in_any_case(database, replica):
    """Of MariaDB: MySQL takes no such transaction while GTIDs are on."""
    database.run("CREATE TABLE t (id INT PRIMARY KEY)", "CREATE TABLE m (id INT) ENGINE = MyISAM")
    replica.follow(database.source("t"), now)
    database.run(
        "BEGIN", "INSERT INTO t VALUES (1)", "SAVEPOINT `a b`", "INSERT INTO m VALUES (1)", "INSERT INTO t VALUES (2)",
        "ROLLBACK TO `A B`", "INSERT INTO t VALUES (3)", "COMMIT",
    )  # fmt: skip
    replica.follow(database.source("t"), now)
    assert replica.rows("t") == [{"id": 1}, {"id": 3}]


def test_names_of_tables_are_small_where_the_server_makes_them_so(replica):
    with start("mariadb", lower_case_table_names="1") as server:
        own = Database(server)
        own.run("CREATE TABLE Orders (id INT PRIMARY KEY)", "INSERT INTO Orders VALUES (1)")
        replica.follow(own.source("orders"), now)
        own.run("TRUNCATE TABLE ORDERS", "INSERT INTO oRDERS VALUES (2)")
        replica.follow(own.source("orders"), now)
        assert replica.rows("orders") == [{"id": 2}]


@both
def test_a_cascade_is_seen_whether_names_are_quoted_or_not(database):
    database.run(
        "CREATE TABLE p (id INT PRIMARY KEY)",
        "CREATE TABLE t (id INT PRIMARY KEY, p INT, FOREIGN KEY (p) REFERENCES p (id) ON DELETE CASCADE)",
        "SET GLOBAL sql_quote_show_create = OFF",
    )
    try:
        with pytest.raises(ConfigError, match="ON DELETE CASCADE"):
            database.source().check()
    finally:
        database.run("SET GLOBAL sql_quote_show_create = ON")


@both
def test_no_table_is_missed_where_the_server_cuts_lists_short(database):
    database.run(*(f"CREATE TABLE t{number} (id INT PRIMARY KEY)" for number in range(30)))
    database.run("SET GLOBAL sql_select_limit = 25")
    try:
        assert len(database.source().check()) == 30
    finally:
        database.run("SET GLOBAL sql_select_limit = DEFAULT")


@both
def test_a_text_that_the_server_cannot_give_whole_is_refused_and_not_null(database, replica):
    ((before,),) = database.run("SELECT @@global.max_allowed_packet")
    database.run(
        "CREATE TABLE t (id INT PRIMARY KEY, x LONGTEXT)",
        "INSERT INTO t VALUES (1, REPEAT('x', 1100000))",
        "SET GLOBAL max_allowed_packet = 1048576",
    )
    try:
        replica.follow(database.source(), now)
    except ConfigError as error:
        assert "SET GLOBAL max_allowed_packet" in str(error)
    else:
        assert [len(row["x"]) for row in replica.rows("t")] == [1_100_000]
    finally:
        database.run(f"SET GLOBAL max_allowed_packet = {before}")


@both
def test_a_transaction_of_xa_that_was_prepared_before_is_waited_for(database, replica, monkeypatch):
    """Its rows are logged when it is prepared, before the place of a snapshot, which has them once it is committed."""
    monkeypatch.setattr(sources, "LOCK_PAUSE_S", 0.1)
    database.run("CREATE TABLE t (id INT PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    with database.connect() as session, session.cursor() as cursor:
        for statement in ("XA START 'z'", "INSERT INTO t VALUES (2)", "XA END 'z'", "XA PREPARE 'z'"):  # fmt: skip
            cursor.execute(statement)
        replica.follow(database.source(), now)
        assert replica.rows("t") == []
        cursor.execute("XA COMMIT 'z'")
    replica.follow(database.source(), now)
    assert [row["id"] for row in replica.rows("t")] == [1, 2]


@both
def test_administration_that_is_logged_as_a_statement_does_not_end_a_capture(database, replica):
    """MariaDB marks none of these as DDL."""
    user = f"reader_{database.name}@'%'"
    database.run(
        "CREATE TABLE t (id INT PRIMARY KEY, n INT)", f"CREATE USER {user} IDENTIFIED BY 'p'"
    )
    replica.follow(database.source("t"), now)
    database.run(
        "INSERT INTO t VALUES (1, 1)",
        f"GRANT SELECT (id), UPDATE (n) ON {database.name}.t TO {user}",
        f"REVOKE UPDATE (n) ON {database.name}.t FROM {user}",
        "FLUSH PRIVILEGES",
        "DROP FUNCTION IF EXISTS of_no_library",
        "CREATE TABLE u (id INT PRIMARY KEY)",
        "ALTER TABLE u DISCARD TABLESPACE",
        *(("CREATE SEQUENCE s", "ALTER SEQUENCE s RESTART 5") if database.kind == "mariadb" else ()),
        "INSERT INTO t VALUES (2, 2)",
    )  # fmt: skip
    replica.follow(database.source("t"), now)
    assert replica.rows("t") == [{"id": 1, "n": 1}, {"id": 2, "n": 2}]


@both
def test_a_log_that_is_made_anew_while_it_is_read_is_an_error(database, replica):
    database.run("CREATE TABLE t (id INT PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    replica.follow(database.source(), now)
    begun = []

    def reset():
        if not begun:
            database.run("RESET MASTER", "INSERT INTO t VALUES (2)")
        begun.append(time.monotonic())
        return begun[-1] > begun[0] + 10

    with pytest.raises(ConflictError, match="made anew"):
        replica.follow(database.source(), reset)
    assert replica.rows("t") == [{"id": 1}]


@of_mysql
def test_the_lock_goes_when_the_capture_stands_still_and_the_chunk_is_not_taken(
    database, replica, monkeypatch
):
    database.run("CREATE TABLE t (id INT PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    there = snapshot.current_position

    def stands_still(session):
        time.sleep(1.3)
        database.run("INSERT INTO t VALUES (2)")
        return there(session)

    monkeypatch.setattr(snapshot, "LOCKED_S_MAX", 1)
    monkeypatch.setattr(snapshot, "current_position", stands_still)
    with pytest.raises(RetriableError):
        replica.follow(database.source(), now)
    monkeypatch.setattr(snapshot, "current_position", there)
    replica.follow(database.source(), now)
    assert [row["id"] for row in replica.rows("t")] == [1, 2]
