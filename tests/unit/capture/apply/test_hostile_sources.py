"""Sources that are not what they were, or do not show all: a comparison says so, and a repair leaves the copy as it is."""

import shutil
import sqlite3
from contextlib import closing

import mariadb_database
import pytest

import millstream as ms
from millstream.capture.apply.compared_mysql import ComparedMariaDb, ComparedMySql
from millstream.capture.apply.compared_sqlite import ComparedSqlite
from millstream.capture.mysql.address import mariadb_address
from millstream.capture.table_patterns import TablePatterns
from millstream.errors import ConfigError, RetriableError


@pytest.fixture(scope="module")
def servers():
    started = {}
    yield started
    for server in started.values():
        server.close()


@pytest.fixture(params=["mariadb", "mysql"])
def database(servers, request):
    if request.param not in servers:
        servers[request.param] = mariadb_database.start(request.param)
    return mariadb_database.Database(servers[request.param])


class Shop:
    """The tables a and b of a server, captured, and their copy in SQLite."""

    def __init__(self, database, folder):
        self.database, self.log, self.path = database, folder / "log", folder / "copy.db"
        self.target = f"sqlite:///{self.path}"
        database.run(
            "CREATE TABLE a (id INT PRIMARY KEY, x DOUBLE)", "INSERT INTO a VALUES (1, -1e-200 * 1e-200), (2, 5)",
            "CREATE TABLE b (id INT PRIMARY KEY, x DOUBLE)", "INSERT INTO b VALUES (1, 1), (2, 2)",
        )  # fmt: skip
        self.follow()

    def follow(self, tables="*"):
        ms.capture(self.database.url(), to=self.log, name="shop", tables=tables).run(
            until="caught-up"
        )
        ms.apply("shop", self.target, log=self.log).run(until="caught-up")

    def spoil(self):
        with closing(sqlite3.connect(self.path)) as copy:
            copy.execute("DELETE FROM a WHERE id = 2")
            copy.execute("INSERT INTO a VALUES (9, 9)")
            copy.commit()

    def copy(self, table):
        with closing(sqlite3.connect(self.path)) as copy:
            return copy.execute(f"SELECT id, x FROM {table} ORDER BY id").fetchall()

    def repair(self, url=None, **changed):
        made = ms.reconcile("shop", url or self.database.url(), self.target, log=self.log)
        for name, value in {"sleep": lambda _: None, **changed}.items():
            setattr(made, name, value)
        return made.run(repair=True)

    def snapshot(self, tables):
        address = mariadb_address(self.database.url())
        if self.database.kind == "mariadb":
            return ComparedMariaDb(address)
        return ComparedMySql(address, tables)


@pytest.fixture
def shop(database, tmp_path):
    return Shop(database, tmp_path)


SPOILED = [(1, 0.0), (9, 9.0)]


@pytest.mark.parametrize("longer", [False, True], ids=["shorter", "longer"])
def test_a_log_that_was_made_anew_is_refused(shop, longer):
    """As of a backup that was restored, or of another server; its log is shorter, or longer, than the captured one's."""
    shop.spoil()
    run = shop.database.run
    ((before,),) = run("SELECT UNIX_TIMESTAMP()")
    while run("SELECT UNIX_TIMESTAMP()") == ((before,),):  # files are told apart by their second
        pass
    run("RESET MASTER")
    if longer:
        run(*(f"UPDATE a SET x = {number} WHERE id = 2" for number in range(60)))
    with pytest.raises(ConfigError, match="does not have what the capture has read"):
        shop.repair()
    assert shop.copy("a") == SPOILED


def test_a_place_in_the_log_that_is_none_is_refused(shop):
    """As of a server that has a file of that name, which was made in the same second."""
    shop.spoil()
    made = ms.reconcile("shop", shop.database.url(), shop.target, log=shop.log)
    progress = made._progress()
    shop.database.run(*(f"UPDATE a SET x = {number} WHERE id = 2" for number in range(9)))
    other = {**progress, "position": progress["position"] + 7}
    with pytest.raises(ConfigError, match="does not have what the capture has read"):
        shop.repair(_progress=lambda: other)
    assert shop.copy("a") == SPOILED


def test_a_server_that_lacks_what_the_copy_has_is_refused(shop):
    """It may have more transactions than the copy, of others."""
    shop.database.run("INSERT INTO b VALUES (3, 3)")
    shop.follow()
    shop.spoil()
    taken = []

    def source(tables):
        found = shop.snapshot(tables)
        taken.append(found)
        if shop.database.kind == "mysql":
            ((uuid,),) = shop.database.run("SELECT @@server_uuid")
            found._executed.intervals.pop(uuid)
            found._executed.add(uuid, 1)
        else:
            found._last = {0: 1}
        return found

    with pytest.raises(ConfigError, match=r"lacks changes that .*copy\.db has"):
        shop.repair(source=source)
    assert len(taken) == 4
    assert shop.copy("a") == SPOILED


def test_a_table_that_the_user_may_not_read_is_no_empty_one(shop):
    shop.spoil()
    run, name = shop.database.run, shop.database.name
    status = "BINLOG MONITOR" if shop.database.kind == "mariadb" else "REPLICATION CLIENT"
    run(
        f"CREATE USER half_{name}@'%' IDENTIFIED BY 'p'",
        f"GRANT REPLICATION SLAVE, {status} ON *.* TO half_{name}@'%'",
        f"GRANT LOCK TABLES ON {name}.* TO half_{name}@'%'",
        f"GRANT SELECT ON {name}.a TO half_{name}@'%'",
    )
    half = shop.database.url(f"half_{name}", "p")
    shop.follow()
    # In MySQL the lock on the database lets the table be seen, and not be read.
    with pytest.raises(ConfigError, match=rf"does not show {name}\.b: the user may|command denied"):
        shop.repair(half)
    run(f"GRANT SELECT (id) ON {name}.b TO half_{name}@'%'")
    shop.follow()
    with pytest.raises(
        ConfigError, match=r"cannot be compared as it is[\s\S]*GRANT SELECT on whole"
    ):
        shop.repair(half)
    assert (shop.copy("a"), shop.copy("b")) == (SPOILED, [(1, 1.0), (2, 2.0)])


def test_a_table_that_was_dropped_unseen_is_no_empty_one(shop):
    shop.database.run("SET SESSION sql_log_bin = 0", "DROP TABLE b")
    with pytest.raises(ConfigError, match=rf"does not show {shop.database.name}\.b"):
        shop.repair()
    assert shop.copy("b") == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("statement", ["TRUNCATE TABLE b", "DROP TABLE b", "DELETE FROM b"])
def test_what_happens_to_a_table_after_the_snapshot_is_not_in_it(shop, statement):
    """MySQL holds DDL up; MariaDB does not, and then there are no rows of before."""

    def source(tables):
        found = shop.snapshot(tables)
        held_up = shop.database.kind == "mysql" and not statement.startswith("DELETE")
        if not held_up:
            shop.database.run(statement)
        return found

    try:
        found = shop.repair(source=source)
    except (RetriableError, ConfigError) as error:
        assert shop.database.kind == "mariadb"
        assert "run it again" in str(error).lower() or "read again" in str(error) or "does not show" in str(error)  # fmt: skip
    else:
        assert [one.faults for one in found.tables] == [0, 0]
    assert shop.copy("b") == [(1, 1.0), (2, 2.0)]


def test_a_table_that_the_capture_left_out_is_not_put_back(shop):
    shop.follow(tables=["a"])
    assert shop.copy("b") == []
    shop.spoil()
    a, b = shop.repair().tables
    assert (a.missing, a.surplus, a.left_out) == (({"id": 2},), ({"id": 9},), False)
    assert (b.faults, b.left_out) == (0, True)
    assert (shop.copy("a"), shop.copy("b")) == ([(1, 0.0), (2, 5.0)], [])
    shop.follow()  # named again, it is read again
    assert [(one.rows, one.faults, one.left_out) for one in shop.repair().tables] == [
        (2, 0, False),
        (2, 0, False),
    ]


def test_a_negative_zero_is_zero(shop):
    """SQLite keeps no sign of it, and MariaDB shows none: each comparison would repair the row again."""
    found = str(shop.database.run("SELECT x FROM a WHERE id = 1")[0][0])
    assert found == ("-0.0" if shop.database.kind == "mysql" else "0.0")
    assert [one.faults for one in shop.repair().tables] == [0, 0]


# ── SQLite ────────────────────────────────────────────────────────────────────────────────────


class File:
    """A captured file of SQLite, with a backup of before its last change, and its copy."""

    def __init__(self, folder):
        self.path, self.folder = folder / "shop.db", folder
        self.run("CREATE TABLE t (id INTEGER PRIMARY KEY, x REAL)", "INSERT INTO t VALUES (1, 1)")
        self.follow()
        shutil.copy(self.path, folder / "backup.db")
        self.run("INSERT INTO t VALUES (2, 2)")
        self.follow()

    def run(self, *statements):
        with closing(sqlite3.connect(self.path)) as session:
            for statement in statements:
                session.execute(statement)
            session.commit()

    def follow(self):
        ms.capture(f"sqlite:///{self.path}", to=self.folder / "log").run(until="caught-up")
        target = f"sqlite:///{self.folder / 'copy.db'}"
        ms.apply("shop", target, log=self.folder / "log").run(until="caught-up")

    def repair(self, path=None, source=None):
        target = f"sqlite:///{self.folder / 'copy.db'}"
        made = ms.reconcile(
            "shop", f"sqlite:///{path or self.path}", target, log=self.folder / "log"
        )
        made.source = source or made.source
        return made.run(repair=True)

    def copy(self):
        with closing(sqlite3.connect(self.folder / "copy.db")) as session:
            return session.execute("SELECT id, x FROM t ORDER BY id").fetchall()


@pytest.mark.parametrize("written", [0, 1, 5])
def test_a_file_that_was_restored_is_refused(tmp_path, written):
    file = File(tmp_path)
    shutil.copy(tmp_path / "backup.db", file.path)
    for number in range(written):
        file.run(f"INSERT INTO t VALUES ({10 + number}, 0)")
    with pytest.raises(ConfigError, match=r"does not have change .*restored from a backup"):
        file.repair()
    assert file.copy() == [(1, 1.0), (2, 2.0)]


def test_another_captured_file_is_refused(tmp_path):
    file = File(tmp_path)
    (tmp_path / "other").mkdir()
    other = File(tmp_path / "other")
    with pytest.raises(ConfigError, match="is not the database that the capture reads"):
        file.repair(other.path)
    assert file.repair().faults == 0


def test_a_table_that_is_still_being_read_is_not_compared(tmp_path):
    """The log may lack deletions of it: a row that a repair puts in would stay for ever."""
    file = File(tmp_path)

    class Reading(ComparedSqlite):
        def tables(self, progress):
            return dict.fromkeys(super().tables(progress), False)

    with pytest.raises(RetriableError, match=r"has not read main\.t to the end.*Run this again"):
        file.repair(source=lambda _: Reading(file.path, TablePatterns(["*"], "*")))


def test_a_capture_that_goes_on_after_the_snapshot_is_of_the_same_file(tmp_path):
    """It deletes the changes that it has stored, and has ones that the snapshot has not."""
    file = File(tmp_path)
    file.run("PRAGMA journal_mode = WAL")  # in which writers do not wait for the snapshot

    def source(_):
        found = ComparedSqlite(file.path, TablePatterns(["*"], "*"))
        file.run("INSERT INTO t VALUES (9, 9)", "DELETE FROM t WHERE id = 1")
        ms.capture(f"sqlite:///{file.path}", to=tmp_path / "log").run(until="caught-up")
        return found

    assert file.repair(source=source).faults == 0
    assert file.copy() == [(1, 1.0), (2, 2.0)]
    file.follow()
    assert file.repair().faults == 0
    assert file.copy() == [(2, 2.0), (9, 9.0)]
