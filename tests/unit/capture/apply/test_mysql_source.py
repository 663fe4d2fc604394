"""Copies of MySQL are compared with the server at one place, and repaired: the rows that are wrong are those that the test knows."""

import random
import sqlite3
import threading
from contextlib import closing
from functools import partial

import mariadb_database
import pytest
from mariadb_types import ALL_VALUES, EVERY_TYPE

import millstream as ms
from millstream.capture.apply import compared_mysql
from millstream.capture.apply.compared_mysql import ComparedMySql
from millstream.capture.mysql.address import mariadb_address
from millstream.errors import ConfigError, RetriableError


@pytest.fixture(scope="module")
def server():
    with mariadb_database.start("mysql") as started:
        yield started


@pytest.fixture
def database(server):
    return mariadb_database.Database(server)


class Shop:
    """A captured database, its copy in SQLite, and a comparison of them."""

    def __init__(self, database, folder):
        self.url, self.log = database.url(), folder / "log"
        self.path = folder / "copy.db"
        self.target = f"sqlite:///{self.path}"

    def follow(self):
        ms.capture(self.url, to=self.log, name="shop").run(until="caught-up")
        ms.apply("shop", self.target, log=self.log).run(until="caught-up")

    def spoil(self, *statements):
        with closing(sqlite3.connect(self.path)) as copy:
            for statement in statements:
                copy.execute(statement)
            copy.commit()

    def compare(self, *, repair=False, source=None, chunk_rows=17):
        made = ms.reconcile("shop", self.url, self.target, log=self.log)
        address = mariadb_address(self.url)
        made.source = source or partial(ComparedMySql, address, chunk_rows=chunk_rows)
        return made.run(repair=repair)


@pytest.fixture
def shop(database, tmp_path):
    return Shop(database, tmp_path)


def test_each_value_of_every_type_is_compared_and_corrected(database, shop):
    rows = ALL_VALUES["mysql"]
    database.run(EVERY_TYPE["mysql"].format("t"), "SET SESSION sql_mode = ''")
    names = [row[0] for row in database.run("SHOW COLUMNS FROM t") if row[0] != "id"]
    assert len(names) > 40
    values = [f"({n}, {rows[n % 3]})" for n in range(3 * len(names))]

    def insert(some):
        database.run("SET SESSION sql_mode = ''", f"INSERT INTO t VALUES {', '.join(some)}")

    insert([f"(-1, {rows[3]})", *values[::2]])
    shop.follow()  # by the snapshot
    insert([f"(-2, {rows[3]})", *values[1::2]])
    shop.follow()  # by the log
    assert shop.compare(chunk_rows=20).faults == 0
    whole = "SELECT * FROM t ORDER BY id"
    with closing(sqlite3.connect(shop.path)) as copy:
        before = copy.execute(whole).fetchall()
    # Of each column the three values, in three rows, of which one or two may be null.
    shop.spoil(
        *(f"UPDATE t SET {name} = NULL WHERE id / 3 = {n} AND id >= 0" for n, name in enumerate(names)),
        "DELETE FROM t WHERE id = -2",
        "INSERT INTO t (id) VALUES (-9)",
    )  # fmt: skip
    with closing(sqlite3.connect(shop.path)) as copy:
        after = copy.execute(whole).fetchall()
    changed = {row[0] for row in {*before} - {*after}} - {-2}
    assert {n // 3 for n in changed} == {*range(len(names))}
    (found,) = shop.compare(chunk_rows=20, repair=True).tables
    assert {row["id"] for row in found.differing} == changed
    assert (found.missing, found.surplus) == (({"id": -2},), ({"id": -9},))
    assert shop.compare().faults == 0
    with closing(sqlite3.connect(shop.path)) as copy:
        assert copy.execute(whole).fetchall() == before


KEYS = {
    "ai_ci": ("VARCHAR(9) COLLATE utf8mb4_0900_ai_ci", lambda dice: f"'{letters(dice)}'"),
    "as_cs": ("VARCHAR(9) COLLATE utf8mb4_0900_as_cs", lambda dice: f"'{letters(dice)}'"),
    "spanish": ("VARCHAR(9) COLLATE utf8mb4_es_trad_0900_ai_ci", lambda dice: f"'{letters(dice)}'"),
    "padded": ("CHAR(9) COLLATE utf8mb4_general_ci", lambda dice: f"'{letters(dice)}'"),
    "latin": ("VARCHAR(9) CHARACTER SET latin1 COLLATE latin1_german2_ci", lambda dice: f"'{letters(dice)}'"),
    "bytes": ("VARBINARY(9)", lambda dice: f"x'{dice.randbytes(dice.randrange(3)).hex()}'"),
    "fixed": ("BINARY(3)", lambda dice: f"x'{dice.randbytes(dice.randrange(3)).hex()}'"),
    "label": ("ENUM('z','a','M')", lambda dice: str(dice.randrange(1, 4))),
    "bits": ("BIT(12)", lambda dice: str(dice.randrange(4096))),
    "exact": ("DECIMAL(30,10)", lambda dice: f"{dice.randrange(-(10**6), 10**6)}.{dice.randrange(10**9)}"),
    "day": ("DATE", lambda dice: f"'{dice.randrange(1000, 9999)}-0{dice.randrange(1, 10)}-11'"),
    "span": ("TIME(3)", lambda dice: f"'{dice.choice('- ')}{dice.randrange(838)}:00:00.{dice.randrange(1000):03}'"),
}  # fmt: skip


def letters(dice):
    return "".join(dice.choice("aAbßÄäzchllñn ") for _ in range(dice.randrange(6)))


def test_keys_are_those_of_their_type_and_collation(database, shop):
    """Each table has random keys of one type, and a number that makes them keys; some are spoiled."""
    dice = random.Random(7)
    spoiled = {}
    for name, (kind, value) in KEYS.items():
        keys = [(number, value(dice)) for number in range(60)]
        database.run(
            f"CREATE TABLE {name} (k {kind}, n INT, x FLOAT, PRIMARY KEY (k, n))",
            f"INSERT INTO {name} VALUES "
            + ", ".join(f"({key}, {number % 20 if name == 'bits' else number}, {number}e-3)" for number, key in keys),
        )  # fmt: skip
        spoiled[name] = sorted(dice.sample(range(20), 3))
    shop.follow()
    for name, (gone, changed, _) in spoiled.items():
        shop.spoil(
            f"DELETE FROM {name} WHERE n = {gone}", f"UPDATE {name} SET x = -1 WHERE n = {changed}"
        )
        # What a session does not log, no log has.
        database.run(
            "SET SESSION sql_log_bin = 0", f"UPDATE {name} SET x = 99 WHERE n = {spoiled[name][2]}"
        )
    found = shop.compare(repair=True)
    for table in found.tables:
        name = table.table.partition(".")[2]
        gone, changed, hidden = spoiled[name]
        assert {row["n"] for row in table.missing} == {gone}, name
        assert {row["n"] for row in table.differing} == {changed, hidden}, name
        assert (table.rows, table.surplus) == (60, ()), name
    assert shop.compare(chunk_rows=1000).faults == 0


def test_a_copy_is_compared_while_sessions_write_all_its_tables(database, shop):
    database.run(
        "CREATE TABLE t (id INT PRIMARY KEY, n INT)", "CREATE TABLE u (id INT PRIMARY KEY, n INT)"
    )
    values = ", ".join(f"({n}, 0)" for n in range(50))
    database.run(f"INSERT INTO t VALUES {values}", f"INSERT INTO u VALUES {values}")
    shop.follow()
    stop, failed = threading.Event(), []

    def write(seed):
        dice = random.Random(seed)
        try:
            with database.connect() as session, session.cursor() as cursor:
                while not stop.wait(0.01):
                    table = dice.choice("tu")
                    cursor.execute(f"UPDATE {table} SET n = n + 1 WHERE id = {dice.randrange(40)}")
        except Exception as error:  # noqa: BLE001 - the test looks at it
            failed.append(error)

    # Nobody writes these: only they are wrong.
    shop.spoil("DELETE FROM t WHERE id = 44", "UPDATE u SET n = 7 WHERE id = 45")
    capture = ms.capture(shop.url, to=shop.log, name="shop")
    threads = [threading.Thread(target=capture.run)]
    threads += [threading.Thread(target=write, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        found = shop.compare(repair=True, chunk_rows=11)
        again = shop.compare()
    finally:
        stop.set()
        capture.stop()
        for thread in threads:
            thread.join()
    assert not failed
    t, u = found.tables
    assert (t.missing, t.differing, t.surplus) == (({"id": 44},), (), ())
    assert (u.missing, u.differing, u.surplus) == ((), ({"id": 45},), ())
    assert again.faults == 0
    shop.follow()
    with closing(sqlite3.connect(shop.path)) as copy:
        for table in "tu":
            assert tuple(copy.execute(f"SELECT * FROM {table} ORDER BY id")) == database.run(
                f"SELECT * FROM {table} ORDER BY id"
            )


def test_a_transaction_that_goes_on_is_waited_for_and_then_an_error(database, shop, monkeypatch):
    monkeypatch.setattr(compared_mysql, "LOCK_PAUSE_S", 0.0)
    database.run("CREATE TABLE a (id INT PRIMARY KEY)", "CREATE TABLE b (id INT PRIMARY KEY)")
    database.run("INSERT INTO a VALUES (1)", "INSERT INTO b VALUES (1)")
    shop.follow()
    with database.connect(autocommit=False) as holding, holding.cursor() as cursor:
        cursor.execute("INSERT INTO b VALUES (2)")
        with pytest.raises(RetriableError, match="has not ended for a second"):
            shop.compare()
        database.run("INSERT INTO a VALUES (2)")  # nothing is locked any more
        holding.commit()
    shop.follow()
    assert shop.compare().faults == 0


def test_a_transaction_that_is_executed_out_of_its_order_is_not_taken_for_one_in_the_snapshot(
    database, shop
):
    """As on a replica with several workers: number 9 of another server comes after the snapshot, and 10 before it."""
    origin = "aaaaaaaa-1111-2222-3333-444444444444"
    database.run("CREATE TABLE t (id INT PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    shop.follow()

    def executed(number):
        database.run(
            f"SET gtid_next = '{origin}:{number}'",
            f"INSERT INTO t VALUES ({number})",
            "SET gtid_next = 'AUTOMATIC'",
        )

    executed(10)
    taken = []

    def source(tables):
        found = ComparedMySql(mariadb_address(shop.url), tables)
        taken.append(found.position)
        if len(taken) == 1:
            executed(9)
            ms.capture(shop.url, to=shop.log, name="shop").run(until="caught-up")
        return found

    ms.capture(shop.url, to=shop.log, name="shop").run(until="caught-up")
    (found,) = shop.compare(source=source).tables
    assert (found.rows, found.faults, len(taken)) == (3, 0, 2)


def test_a_table_that_is_gone_or_was_made_meanwhile(database, shop):
    database.run("CREATE TABLE a (id INT PRIMARY KEY)", "INSERT INTO a VALUES (1)")
    database.run("CREATE TABLE gone (id INT PRIMARY KEY)", "INSERT INTO gone VALUES (1)")
    shop.follow()
    taken = []

    def source(tables):
        if not taken:
            database.run("CREATE TABLE made (id INT PRIMARY KEY)", "INSERT INTO made VALUES (5)")
            database.run("DROP TABLE gone")
            ms.capture(shop.url, to=shop.log, name="shop").run(until="caught-up")
        taken.append(ComparedMySql(mariadb_address(shop.url), tables))
        return taken[-1]

    found = shop.compare(source=source, repair=True)
    assert len(taken) == 2
    names = [(one.table.partition(".")[2], one.rows, one.faults) for one in found.tables]
    assert names == [("a", 1, 0), ("gone", 0, 0), ("made", 1, 0)]


def test_another_server_and_another_kind_of_server_are_refused(database, shop, tmp_path):
    database.run("CREATE TABLE a (id INT PRIMARY KEY)", "INSERT INTO a VALUES (1)")
    shop.follow()
    made = ms.reconcile(
        "shop", shop.url.replace("mysql://", "mariadb://"), shop.target, log=shop.log
    )
    with pytest.raises(ConfigError, match="give mysql://"):
        made.run()
    address = mariadb_address(shop.url)

    def other(tables):
        found = ComparedMySql(address, tables)
        found._server = "bbbbbbbb-1111-2222-3333-444444444444"
        return found

    with pytest.raises(ConfigError, match=r"is the server bbbb.*Give the address that the capture"):
        shop.compare(source=other)


def test_a_user_who_may_not_lock_is_told_the_grant(database, shop):
    database.run("CREATE TABLE a (id INT PRIMARY KEY)", "INSERT INTO a VALUES (1)")
    shop.follow()
    name = f"comparer_{database.name}"
    database.run(
        f"CREATE USER {name}@'%' IDENTIFIED BY 'p'",
        f"GRANT SELECT ON {database.name}.* TO {name}@'%'",
        f"GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO {name}@'%'",
    )
    made = ms.reconcile("shop", database.url(name, "p"), shop.target, log=shop.log)
    with pytest.raises(ConfigError, match=rf"GRANT LOCK TABLES ON `{database.name}`\.\* TO"):
        made.run()
