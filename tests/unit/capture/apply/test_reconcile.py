"""A copy is compared with its source at one position, and repaired."""

import random
import re
import sqlite3
import threading

import pytest
from capture_postgres_servers import Shop, start
from killed_applier import Writer, schema

import millstream as ms
from millstream.capture.apply.compared_sqlite import ComparedSqlite
from millstream.capture.postgres.source import PostgresSource
from millstream.errors import ConfigError, ConflictError, RetriableError


class Captured:
    """A capture that runs in a thread; use it in ``with``."""

    def __init__(self, url, folder):
        self.capture = ms.capture(url, to=folder, name="shop")
        if isinstance(self.capture.source, PostgresSource):
            self.capture.source.heartbeat_s = 0.2  # how soon an idle one says where it is
        self.streaming = threading.Event()
        self.thread = threading.Thread(target=self.capture.run, kwargs={"on_status": self.seen})

    def seen(self, status):
        if status.state == "idle" or status.changes:
            self.streaming.set()

    def __enter__(self):
        self.thread.start()
        assert self.streaming.wait(60)

    def __exit__(self, *_):
        self.capture.stop()
        self.thread.join()


def rows(path, table):
    session = sqlite3.connect(path)
    try:
        return session.execute(f"SELECT * FROM {table} ORDER BY id").fetchall()
    finally:
        session.close()


@pytest.fixture
def shop(tmp_path):
    database = sqlite3.connect(
        tmp_path / "shop.db", isolation_level=None, check_same_thread=False, timeout=60
    )
    database.execute("PRAGMA journal_mode = WAL")
    for statement in schema():
        database.execute(statement)
    yield database
    database.close()


def damage(path, dice):
    """Change some rows of a copy, and return how many rows of each table are wrong."""
    session = sqlite3.connect(path)
    ids = [key for (key,) in session.execute("SELECT id FROM a ORDER BY id")]
    gone, changed = dice.sample(ids, 2)
    session.execute("DELETE FROM a WHERE id = ?", (gone,))
    session.execute("UPDATE a SET note = 'damaged' WHERE id = ?", (changed,))
    session.execute("INSERT INTO b VALUES (-1, 0)")
    session.commit()
    session.close()
    return gone, changed


def test_a_copy_that_others_wrote_to_is_repaired_while_the_source_is_written(tmp_path, shop):
    source, target = f"sqlite:///{tmp_path / 'shop.db'}", f"sqlite:///{tmp_path / 'copy.db'}"
    folder, dice = tmp_path / "log", random.Random(1)
    with Captured(source, folder), Writer(shop.execute, 1, "BEGIN IMMEDIATE"):
        ms.apply("shop", target, log=folder).run(until="caught-up")
        compared = ms.reconcile("shop", source, target, log=folder)
        assert compared.run().faults == 0
        gone, changed = damage(tmp_path / "copy.db", dice)
        found = ms.reconcile("shop", source, target, log=folder).run()
        assert not found.is_repaired
        a, b = found.tables
        assert (a.table, b.table) == ("main.a", "main.b")
        # The writer may have written a damaged row meanwhile, and so corrected it.
        assert set(map(str, a.missing)) <= {str({"id": gone})}
        assert set(map(str, a.differing)) <= {str({"id": changed})}
        assert (b.missing, b.differing, b.surplus) == ((), (), ({"id": -1},))
        repaired = ms.reconcile("shop", source, target, log=folder).run(repair=True)
        assert repaired.is_repaired
        assert repaired.faults >= 1
        assert ms.reconcile("shop", source, target, log=folder).run().faults == 0
    ms.capture(source, to=folder, name="shop").run(until="caught-up")
    ms.apply("shop", target, log=folder).run(until="caught-up")
    for table in "ab":
        assert rows(tmp_path / "copy.db", table) == rows(tmp_path / "shop.db", table)


def test_all_rows_may_be_wrong_and_memory_hold_few(tmp_path, shop):
    source, target = f"sqlite:///{tmp_path / 'shop.db'}", f"sqlite:///{tmp_path / 'copy.db'}"
    with Captured(source, tmp_path / "log"):
        ms.apply("shop", target, log=tmp_path / "log").run(until="caught-up")
        compared = ms.reconcile("shop", source, target, log=tmp_path / "log")
        compared.run()
        session = sqlite3.connect(tmp_path / "copy.db")
        session.execute("UPDATE a SET n = -n, note = NULL")
        session.execute("DELETE FROM b")
        session.commit()
        session.close()
        compared = ms.reconcile("shop", source, target, log=tmp_path / "log")
        compared.rows_in_memory = 3
        found = compared.run(repair=True)
        assert [(len(one.differing), len(one.missing)) for one in found.tables] == [
            (20, 0),
            (0, 20),
        ]
        assert rows(tmp_path / "copy.db", "a") == rows(tmp_path / "shop.db", "a")
        assert compared.run().faults == 0


@pytest.mark.parametrize("scheme", ["sqlite", "parquet"])
def test_a_target_that_is_no_copy_is_refused_and_not_made(tmp_path, shop, scheme):
    source, target = f"sqlite:///{tmp_path / 'shop.db'}", f"{scheme}:///{tmp_path / 'copi'}"
    with Captured(source, tmp_path / "log"):
        compared = ms.reconcile("shop", source, target, log=tmp_path / "log")
        with pytest.raises(ConfigError, match=r"copi is no copy of the capture 'shop'.*apply"):
            compared.run(repair=True)
    assert not (tmp_path / "copi").exists()


def test_a_database_that_nothing_was_applied_to_is_refused(tmp_path, shop):
    source, other = f"sqlite:///{tmp_path / 'shop.db'}", tmp_path / "other.db"
    with sqlite3.connect(other) as session:
        session.execute("CREATE TABLE a (id INTEGER PRIMARY KEY)")
    session.close()
    with Captured(source, tmp_path / "log"):
        compared = ms.reconcile("shop", source, f"sqlite:///{other}", log=tmp_path / "log")
        with pytest.raises(ConfigError, match="nothing of it was ever applied"):
            compared.run()
    assert rows(other, "a") == []


def test_a_capture_that_does_not_run_is_said_to_be_needed(tmp_path, shop, monkeypatch):
    monkeypatch.setattr(ComparedSqlite, "wait_s", 1.0)
    source, target = f"sqlite:///{tmp_path / 'shop.db'}", f"sqlite:///{tmp_path / 'copy.db'}"
    ms.capture(source, to=tmp_path / "log", name="shop").run(until="caught-up")
    ms.apply("shop", target, log=tmp_path / "log").run(until="caught-up")
    shop.execute("INSERT INTO b VALUES (77, 0)")
    compared = ms.reconcile("shop", source, target, log=tmp_path / "log")
    with pytest.raises(RetriableError, match="capture 'shop' has not come to"):
        compared.run()
    shop.execute("INSERT INTO b VALUES (78, 0)")  # nobody keeps writers out


def test_a_source_that_cannot_be_compared_is_refused():
    with pytest.raises(ConfigError, match=r"oracle://…\. Give"):
        ms.reconcile("shop", "oracle://root:secret@localhost/shop", "sqlite:///copy.db")


def test_what_is_compared_is_shown_before_it_runs_and_without_passwords():
    url = "postgresql://reader:secret@localhost/shop"
    shown = repr(ms.reconcile("shop", url, url.replace("shop", "copy")))
    assert "Reconcil" in shown
    assert "secret" not in shown


def refuse_other_servers(shop, target, log):
    """See that a server is refused that is not the captured one, lacks what was captured, or does not show its rows."""
    before = ms.reconcile("shop", shop.url, target, log=log)._progress()
    for changed, why in (
        ({"system": "7"}, "another server than the one that was captured"),
        ({"lsn": before["lsn"] + (1 << 40)}, "set back.*the log may have changes"),
        ({"timeline": 9}, "its history does not have.*cannot be compared"),
    ):
        compared = ms.reconcile("shop", shop.url, target, log=log)
        compared._progress = lambda changed=changed: before | changed
        with pytest.raises(ConfigError, match=f"(?i){why}"):
            compared.run(repair=True)
    compared = ms.reconcile("shop", shop.url, target, log=log)
    compared.sleep, taken = (lambda _: None), []

    def source(tables, take=compared.source):
        taken.append(take(tables))
        taken[-1]._snapshot.lsn = 1
        return taken[-1]

    compared.source = source
    with pytest.raises(ConfigError, match=r"lacks changes that .* has"):
        compared.run(repair=True)
    assert len(taken) == 4
    shop.run("CREATE ROLE half LOGIN REPLICATION PASSWORD 'half-secret'")
    half = ms.reconcile(
        "shop", re.sub("//[^@/]*@", "//half:half-secret@", shop.url), target, log=log
    )
    with pytest.raises(ConflictError, match="permission denied"):
        half.run(repair=True)
    shop.run(
        "GRANT SELECT ON t TO half",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY few ON t FOR SELECT USING (id < 10)",
    )
    with pytest.raises(ConflictError, match="row-level security"):
        half.run(repair=True)
    assert ms.reconcile("shop", shop.url, target, log=log).run().faults == 0


def test_a_copy_in_postgres_is_compared_and_repaired(tmp_path):
    with start() as server:
        shop = Shop(server)
        shop.run(
            "CREATE TABLE t (id int8, k numeric(6,2), ts timestamptz, j jsonb, a text[], PRIMARY KEY (id, k))",
            """INSERT INTO t SELECT i, i / 4.0, now() + i * interval '1.01 s', '{"a": 1.50}', ARRAY['x', NULL]
               FROM generate_series(1, 500) i""",
        )
        target = server.url("copy")
        with Captured(shop.url, tmp_path):
            compared = ms.reconcile("shop", shop.url, target, log=tmp_path)
            with pytest.raises(ConfigError, match="nothing of it was ever applied"):
                compared.run()
            ms.apply("shop", target, log=tmp_path).run(until="caught-up")
            compared = ms.reconcile("shop", shop.url, target, log=tmp_path)
            assert compared.run().faults == 0
            import psycopg

            with psycopg.connect(target) as session:
                session.execute("DELETE FROM t WHERE id = 7")
                session.execute("UPDATE t SET j = '{}' WHERE id < 3")
                session.execute("INSERT INTO t (id, k) VALUES (1000, 0)")
            shop.run("UPDATE t SET a = '{}' WHERE id > 490", "ALTER TABLE t ADD COLUMN later int")
            found = compared.run(repair=True)
            (table,) = found.tables
            assert (table.missing, table.surplus) == (
                ({"id": 7, "k": "1.75"},),
                ({"id": 1000, "k": "0"},),
            )
            assert (table.rows, len(table.differing), table.not_compared) == (500, 2, ("later",))
            assert compared.run().faults == 0
            refuse_other_servers(shop, target, tmp_path)
        query = "SELECT to_jsonb(t) - 'later' FROM t ORDER BY id"
        with psycopg.connect(target) as session:
            assert session.execute(query).fetchall() == shop.run(query)
