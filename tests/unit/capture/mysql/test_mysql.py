"""What is MySQL's own: its lock, its JSON, its privileges, its GTIDs, and transactions of XA."""

import random
import struct
import threading

import pytest
from mariadb_database import Database, of_mysql, start

from millstream.capture.mysql import source as sources
from millstream.errors import ConfigError, ConflictError, RetriableError


def now():
    return True


def random_value(dice, depth=0):
    """Return SQL of a random value of JSON, with what only the server can make."""
    inner = [random_value(dice, depth + 1) for _ in range(dice.randrange(4))] if depth < 4 else []
    number = struct.unpack("<d", dice.randbytes(8))[0]
    number = 0.5 if number != number or abs(number) > 1e308 else number
    text = "".join(dice.choice("a'\"\\é🎉\n\t\x01 ") for _ in range(dice.choice([0, 3, 200])))
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return dice.choice(
        [
            f"JSON_ARRAY({', '.join(inner)})",
            "JSON_OBJECT(" + ", ".join(f"'k{at}{'x' * at}', {one}" for at, one in enumerate(inner)) + ")",
            f"{number:.17e}",
            str(dice.choice([0, 32767, 32768, -32769, 65536, 2**31, -(2**31) - 1, 2**64 - 1, -(2**63)])),
            f"'{escaped}'",
            "NULL",
            dice.choice(["TRUE", "FALSE"]),
            f"CAST({dice.randrange(-(10**9), 10**9)}.{dice.randrange(10**6):06} AS DECIMAL(30,10))",
            f"CAST('{dice.randrange(1000, 9999)}-12-31' AS DATE)",
            f"CAST('-{dice.randrange(838)}:59:59.{dice.randrange(10**6):06}' AS TIME(6))",
            f"CAST('2026-01-02 03:04:05.{dice.randrange(10**6):06}' AS DATETIME(6))",
            f"REPEAT(x'{dice.randbytes(3).hex()}', {dice.choice([0, 1, 40])})",
        ]
    )  # fmt: skip


@of_mysql
def test_a_document_of_the_log_is_the_text_that_the_server_has_for_it(database, replica):
    dice = random.Random(1)
    database.run("CREATE TABLE t (id INT PRIMARY KEY, j JSON)")
    replica.follow(database.source(), now)
    rows = ", ".join(f"({at}, JSON_ARRAY({random_value(dice)}))" for at in range(400))
    large = ", ".join(f"REPEAT('{at}', 900)" for at in range(100))
    database.run(
        f"INSERT INTO t VALUES {rows}", f"INSERT INTO t VALUES (1000, JSON_ARRAY({large}))"
    )
    replica.follow(database.source(), now)
    served = database.run("SELECT id, CAST(j AS CHAR) FROM t ORDER BY id")
    assert {change.op for change in replica.changes()} == {"c"}
    assert [(row["id"], row["j"]) for row in replica.rows("t")] == list(served)


@of_mysql
def test_fault_18_a_document_that_changes_in_parts_is_logged_whole_or_refused(database, replica):
    database.run("CREATE TABLE t (id INT PRIMARY KEY, j JSON)")
    database.run("INSERT INTO t VALUES (1, JSON_OBJECT('a', REPEAT('x', 1000), 'b', 1))")
    replica.follow(database.source(), now)
    database.run("UPDATE t SET j = JSON_SET(j, '$.b', 2)")
    replica.follow(database.source(), now)
    assert replica.rows("t")[0]["j"].startswith('{"a": "xxx')
    assert replica.rows("t")[0]["j"].endswith('"b": 2}')
    database.run(
        "SET SESSION binlog_row_value_options = PARTIAL_JSON",
        "UPDATE t SET j = JSON_SET(j, '$.b', 3)",
    )
    with pytest.raises(ConfigError, match="type 39, a row with parts of a JSON document"):
        replica.follow(database.source(), now)


@of_mysql
def test_a_transaction_that_goes_on_keeps_a_table_from_being_read_and_others_may_write(
    database, replica, monkeypatch
):
    monkeypatch.setattr(sources, "LOCK_PAUSE_S", 0.5)
    database.run("CREATE TABLE a (id INT PRIMARY KEY)", "CREATE TABLE b (id INT PRIMARY KEY)")
    with database.connect(autocommit=False) as holding, holding.cursor() as cursor:
        cursor.execute("INSERT INTO a VALUES (1)")
        seen = []

        def waits():
            seen.append(replica.progress["tables"])
            return len(seen) > 3

        replica.follow(database.source("a"), waits)
        assert all("read" not in state for tables in seen for state in tables.values())
        database.run("INSERT INTO a VALUES (2)")  # after a second at most
        holding.commit()
    replica.follow(database.source("a"), now)
    assert sorted(row["id"] for row in replica.rows("a")) == [1, 2]


@of_mysql
def test_a_table_that_is_never_free_is_an_error_that_names_the_lock(database, replica, monkeypatch):
    monkeypatch.setattr(sources, "LOCK_PAUSE_S", 0.0)
    monkeypatch.setattr(sources, "_ATTEMPTS", 1)
    database.run("CREATE TABLE a (id INT PRIMARY KEY)")
    with database.connect(autocommit=False) as holding, holding.cursor() as cursor:
        cursor.execute("INSERT INTO a VALUES (1)")
        with pytest.raises(RetriableError, match="has not ended for"):
            replica.follow(database.source("a"), lambda: False)


@of_mysql
def test_a_snapshot_has_what_the_log_has_up_to_its_place_and_nothing_more(database, replica):
    """While sessions write each row of a table again and again: a row's counter never goes back."""
    database.run("CREATE TABLE t (id INT PRIMARY KEY, n INT)")
    database.run("INSERT INTO t VALUES " + ", ".join(f"({at}, 0)" for at in range(20)))
    stop = threading.Event()

    def write():
        with database.connect() as session, session.cursor() as cursor:
            while not stop.wait(0.001):
                cursor.execute(f"UPDATE t SET n = n + 1 WHERE id = {random.randrange(20)}")

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        replica.follow(database.source(chunk_rows=2), lambda: len(replica.units) > 60)
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    replica.follow(database.source(), now)
    counters = {}
    for change in replica.changes():
        key, n = change.after["id"], change.after["n"]
        step = 1 if change.op == "u" else 0
        assert n == counters.get(key, n - step) + step, change
        counters[key] = n
    served = dict(database.run("SELECT id, n FROM t"))
    assert counters == served


@of_mysql
def test_a_user_needs_these_privileges_and_no_more_by_itself_or_by_a_role(database, replica):
    database.run("CREATE TABLE t (id INT PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    name = f"reader_{database.name}"
    database.run(
        f"CREATE USER {name}@'%' IDENTIFIED WITH caching_sha2_password BY 'p é'",
        f"GRANT SELECT ON {database.name}.* TO {name}@'%'",
    )
    url = database.url(name, "p é")
    with pytest.raises(ConfigError) as error:
        database.source(url=url).check()
    grants = [line.split("Mend it: ")[1] for line in str(error.value).splitlines()[1:]]
    assert grants == [
        f"GRANT REPLICATION SLAVE ON *.* TO '{name}'@'%'",
        f"GRANT REPLICATION CLIENT ON *.* TO '{name}'@'%'",
    ]
    role = f"role_{database.name}"
    database.run(f"CREATE ROLE {role}", *(grant.replace(f"'{name}'", role) for grant in grants))
    database.run(f"GRANT {role} TO {name}@'%'", f"SET DEFAULT ROLE {role} TO {name}@'%'")
    with pytest.raises(ConfigError, match=rf"GRANT LOCK TABLES ON `{database.name}`\.\* TO"):
        database.source(url=url).check()
    database.run(f"GRANT LOCK TABLES ON `{database.name}`.* TO {role}")
    replica.follow(database.source(url=url), now)
    assert replica.rows("t") == [{"id": 1}]


@of_mysql
def test_transactions_are_named_by_their_gtids(database, replica):
    database.run("CREATE TABLE t (id INT PRIMARY KEY)")
    replica.follow(database.source(), now)
    database.run("INSERT INTO t VALUES (1)", "INSERT INTO t VALUES (2)")
    replica.follow(database.source(), now)
    ((uuid, executed),) = database.run("SELECT @@server_uuid, @@global.gtid_executed")
    last = int(executed.rpartition("-")[2])
    named = [at for kind, at, _ in replica.units if kind == "transaction"]
    assert named == [f"{uuid}:{last - 1}", f"{uuid}:{last}"]
    assert replica.progress["server"] == uuid


def test_a_server_that_became_another_one_is_refused_though_it_has_the_same_files(replica):
    with start("mysql") as server:
        own = Database(server)
        own.run("CREATE TABLE t (id INT PRIMARY KEY)")
        replica.follow(own.source(), now)
        server.kill()
        (server.folder / "data" / "auto.cnf").unlink()  # as clones and restored backups do
        server.start()
        with pytest.raises(ConflictError, match=rf"capture read {replica.progress['server']}"):
            replica.follow(own.source(), now)


@of_mysql
def test_a_transaction_of_xa_is_captured_when_it_is_of_one_phase_and_refused_when_of_two(
    database, replica
):
    database.run("CREATE TABLE t (id INT PRIMARY KEY)", "CREATE TABLE other (id INT PRIMARY KEY)")
    source = database.source("t")
    replica.follow(source, now)
    one = ["XA START 'y'", "INSERT INTO t VALUES (1)", "XA END 'y'", "XA COMMIT 'y' ONE PHASE"]
    two = ["XA START 'x'", "INSERT INTO {} VALUES (2)", "XA END 'x'", "XA PREPARE 'x'", "XA COMMIT 'x'"]  # fmt: skip
    database.run(*one, *(statement.format("other") for statement in two))
    replica.follow(source, now)
    assert replica.rows("t") == [{"id": 1}]
    database.run(*(statement.format("t") for statement in two))
    with pytest.raises(ConfigError, match="is of XA"):
        replica.follow(source, now)


@of_mysql
def test_an_index_on_an_expression_is_refused(database):
    database.run("CREATE TABLE t (id INT PRIMARY KEY, INDEX i ((id * 2)))")
    with pytest.raises(ConfigError, match="DROP INDEX `i`"):
        database.source().check()


@of_mysql
def test_a_server_is_captured_by_its_own_name(database):
    database.run("CREATE TABLE t (id INT PRIMARY KEY)")
    with pytest.raises(ConfigError, match=r"is MySQL 8\.0\.15, and the URL begins with mariadb://"):
        database.source(url=database.url().replace("mysql://", "mariadb://")).check()


def test_without_gtids_transactions_are_named_by_their_place(replica):
    with start("mysql", gtid_mode="OFF", enforce_gtid_consistency="OFF") as server:
        own = Database(server)
        own.run("CREATE TABLE t (id INT PRIMARY KEY)")
        replica.follow(own.source(), now)
        own.run("INSERT INTO t VALUES (1)", "CREATE TABLE u (id INT PRIMARY KEY) SELECT 5 AS id")
        replica.follow(own.source(), now)
        assert (replica.rows("t"), replica.rows("u")) == ([{"id": 1}], [{"id": 5}])
        named = [at for kind, at, _ in replica.units if kind == "transaction"]
        assert len(set(named)) == len(named) >= 2
        assert all(at.startswith("binlog.0") for at in named)
