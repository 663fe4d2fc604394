"""A standby that is promoted is captured on where its WAL is proved to continue what was captured, and else refused.

Servers of the wheel: synchronised slots are of PostgreSQL 17.
"""

import json
import os
import random
import subprocess
import threading
import time

import pytest
from capture_postgres_servers import LOGICAL, Shop

import millstream as ms
from millstream.capture.postgres.timelines import parse_history
from millstream.client import connect
from millstream.errors import ConflictError
from millstream.testing.postgres import PostgresServer, wheel_programs

PHYSICAL = "standby"
needs_wheel = pytest.mark.skipif(
    wheel_programs() is None, reason="there is no PostgreSQL of version 17 or later here"
)


class Standby(PostgresServer):
    """A standby of a server, made of a base backup, to which logical slots are copied."""

    def __init__(self, primary):
        self._primary = primary
        conninfo = (
            f"host=127.0.0.1 port={primary.port} user={primary.user} "
            f"password='{primary.password}' dbname=postgres"
        )
        settings = {
            "hot_standby_feedback": "on",
            "primary_slot_name": PHYSICAL,
            "primary_conninfo": conninfo,
        }
        super().__init__(wheel_programs(), **{**LOGICAL, **settings})

    def _initialise(self):
        conninfo = self._primary._url("postgres")
        where = ["-D", str(self.folder / "data"), "-d", conninfo, "--no-sync", "--checkpoint=fast"]
        if self._account is not None:
            os.chown(self.folder, self._account.pw_uid, self._account.pw_gid)
        subprocess.run(
            [self.program("pg_basebackup"), *where, "-X", "stream"],
            check=True,
            capture_output=True,
            **self._as_account(),
        )
        (self.folder / "data" / "standby.signal").touch()

    def url(self, database="views"):
        return self._url(database)  # databases come from the primary


def wait_until(done, timeout_s=120):
    end_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.02)


class Pair:
    """A primary with a standby; ``shop`` is a database of the primary, ``later`` the same one of the standby."""

    def __init__(self, primary):
        self.primary = primary
        self.shop = Shop(primary)
        self.shop.run(f"SELECT pg_create_physical_replication_slot('{PHYSICAL}', true)")
        self.standby = Standby(primary)
        self.later = Shop(self.standby)
        self.later.name, self.later.url = self.shop.name, self.standby.url(self.shop.name)

    def capture(self, shop, folder, url=None):
        return ms.capture(url or shop.url, to=folder, name="shop").run(until="caught-up")

    def wait_until_copied(self, folder, url=None):
        """Capture until the standby would keep the slot after a promotion: it waits for the slot to move on.

        A standby copies slots by itself with ``sync_replication_slots``, but may take half a minute to look.
        """
        ready = "SELECT 1 FROM pg_replication_slots WHERE synced AND NOT temporary AND invalidation_reason IS NULL"

        def copied():
            (place,) = self.shop.run("SELECT pg_log_standby_snapshot()::text")[0]
            flushed = f"SELECT pg_current_wal_flush_lsn() >= '{place}'"
            wait_until(lambda: self.shop.run(flushed)[0][0])
            self.capture(self.shop, folder, url)
            self.shop.wait_until_released()  # the server has read all that the capture acknowledged
            self.wait_until_replayed()
            self.later.run("SELECT pg_sync_replication_slots()")
            return self.later.run(ready)

        wait_until(copied)

    def wait_until_replayed(self):
        (place,) = self.shop.run("SELECT pg_current_wal_flush_lsn()::text")[0]
        wait_until(lambda: self.later.run(f"SELECT pg_last_wal_replay_lsn() >= '{place}'")[0][0])

    def promote(self):
        self.later.run("SELECT pg_promote()")

    @property
    def urls(self):
        """Return one address of both, of which the driver takes the primary."""
        both = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.standby.port}"
        url = self.shop.url.replace(f"127.0.0.1:{self.primary.port}", both)
        return f"{url}?target_session_attrs=read-write"


@pytest.fixture
def pair():
    with PostgresServer(wheel_programs(), **LOGICAL) as primary:
        made = Pair(primary)
        with made.standby:
            yield made


def transact(shop, rng, count):
    """Make random transactions; some are rolled back."""
    with shop.connect() as session:
        for _ in range(count):
            session.execute("BEGIN")
            for _ in range(rng.choice([1, 2, 9])):
                key, other = rng.randrange(30), rng.randrange(1000)
                session.execute(
                    rng.choice(
                        [
                            f"INSERT INTO t VALUES ({key}, {other}) ON CONFLICT (id) DO UPDATE SET n = {other}",
                            f"UPDATE t SET n = n + 1 WHERE id < {key}",
                            f"DELETE FROM t WHERE id = {key}",
                        ]
                    )
                )
            session.execute("COMMIT" if rng.random() < 0.8 else "ROLLBACK")


def replayed(folder):
    """Return the rows that the topic makes, and the ids of its transactions, of which none may come twice."""
    rows = {}
    with connect(folder) as log:
        for topic in ("shop.public.t", "shop.transaction"):
            found = log.read(topic, 0, columns=("value",)).column("value").to_pylist()
            values = [json.loads(value) for value in found if value is not None]
            if topic == "shop.transaction":
                ids = [value["id"] for value in values if value["status"] == "END"]
                break
            for value in values:
                if value["op"] == "t":
                    rows.clear()
                elif value["op"] == "d":
                    del rows[value["before"]["id"],]
                else:
                    key = (value["after"]["id"],)
                    assert (value["op"] in "cr") == (key not in rows)
                    rows[key] = value["after"]
    assert len(ids) == len(set(ids))
    return rows, len(ids)


@needs_wheel
@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("one_address", [False, True])
def test_capture_goes_on_with_the_standby_that_was_promoted(pair, tmp_path, one_address):
    rng = random.Random(17)
    before = pair.urls if one_address else pair.shop.url
    after = pair.urls if one_address else pair.later.url
    pair.shop.run("CREATE TABLE t (id int PRIMARY KEY, n int)")
    transact(pair.shop, rng, 30)
    pair.wait_until_copied(tmp_path, before)
    for _ in range(4):
        transact(pair.shop, rng, 30)
        pair.capture(pair.shop, tmp_path, before)
    transact(pair.shop, rng, 30)  # what is not captured when the primary dies
    pair.wait_until_replayed()
    truth = pair.shop.rows("t", ["id"])
    pair.primary.kill()
    pair.promote()
    assert pair.later.rows("t", ["id"]) == truth
    pair.capture(pair.later, tmp_path, after)
    rows, count = replayed(tmp_path)
    assert rows == truth
    transact(pair.later, rng, 30)
    pair.capture(pair.later, tmp_path, after)
    again, more = replayed(tmp_path)
    assert again == pair.later.rows("t", ["id"])
    assert more > count
    # The primary of before comes back: what it has is no continuation any more.
    pair.primary.start()
    with pytest.raises(ConflictError, match="which its history does not have"):
        pair.capture(pair.shop, tmp_path)
    assert replayed(tmp_path) == (again, more)


@needs_wheel
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_standby_that_lacks_what_was_captured_is_refused(pair, tmp_path):
    pair.shop.run("CREATE TABLE t (id int PRIMARY KEY, n int)", "INSERT INTO t VALUES (1, 1)")
    pair.wait_until_copied(tmp_path)
    pair.wait_until_replayed()
    pair.standby.kill()
    pair.shop.run("INSERT INTO t VALUES (2, 2)")
    pair.capture(pair.shop, tmp_path)
    held = replayed(tmp_path)
    pair.primary.kill()
    pair.standby.start()
    pair.promote()
    pair.later.run("INSERT INTO t SELECT n, 3 FROM generate_series(3, 5000) n")  # the WAL is longer
    with pytest.raises(ConflictError, match=r"had not reached it.*synchronized_standby_slots"):
        pair.capture(pair.later, tmp_path)
    assert replayed(tmp_path) == held


@needs_wheel
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_synchronized_standby_slots_hold_back_what_a_standby_lacks(pair, tmp_path):
    pair.shop.run(
        "CREATE TABLE t (id int PRIMARY KEY, n int)",
        "INSERT INTO t VALUES (1, 1)",
        f"ALTER SYSTEM SET synchronized_standby_slots = '{PHYSICAL}'",
        "SELECT pg_reload_conf()",
    )
    pair.wait_until_copied(tmp_path)
    pair.wait_until_replayed()
    pair.standby.kill()
    pair.shop.run("INSERT INTO t VALUES (2, 2)")  # lost with the primary
    capture = ms.capture(pair.shop.url, to=tmp_path, name="shop")
    thread = threading.Thread(target=capture.run)
    thread.start()
    time.sleep(3)
    capture.stop()
    thread.join()
    assert replayed(tmp_path)[0].keys() == {(1,)}
    pair.primary.kill()
    pair.standby.start()
    pair.promote()
    pair.later.run("INSERT INTO t VALUES (3, 3)")
    pair.capture(pair.later, tmp_path)
    assert replayed(tmp_path)[0] == pair.later.rows("t", ["id"])
    assert replayed(tmp_path)[0].keys() == {(1,), (3,)}


@needs_wheel
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_promoted_standby_without_a_copied_slot_is_refused(pair, tmp_path):
    pair.shop.run("CREATE TABLE t (id int PRIMARY KEY, n int)", "INSERT INTO t VALUES (1, 1)")
    pair.wait_until_copied(tmp_path)
    slot = pair.shop.run("SELECT slot_name FROM pg_replication_slots WHERE slot_type = 'logical'")[
        0
    ][0]
    pair.wait_until_replayed()
    pair.primary.kill()
    pair.promote()
    pair.later.run(f"SELECT pg_drop_replication_slot('{slot}')")
    with pytest.raises(ConflictError, match="it was not copied to this standby in time"):
        pair.capture(pair.later, tmp_path)
    pair.later.run(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    with pytest.raises(ConflictError, match="was not copied from the primary"):
        pair.capture(pair.later, tmp_path)


@needs_wheel
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_second_standby_of_the_same_timeline_number_is_refused(pair, tmp_path):
    """Another server with a timeline 2: restored, as a backup would be, from the primary's own files."""
    pair.shop.run("CREATE TABLE t (id int PRIMARY KEY, n int)", "INSERT INTO t VALUES (1, 1)")
    pair.wait_until_copied(tmp_path)
    pair.wait_until_replayed()
    pair.primary.kill()
    pair.promote()
    pair.capture(pair.later, tmp_path)
    pair.primary.start()
    pair.shop.run("INSERT INTO t SELECT i, 0 FROM generate_series(2, 500) i")
    pair.primary.kill()
    (pair.primary.folder / "data" / "standby.signal").touch()
    pair.primary.start()
    pair.shop.run("SELECT pg_promote()")
    (written,) = pair.shop.run("SELECT pg_walfile_name(pg_current_wal_insert_lsn())")[0]
    assert written.startswith("00000002")
    with pytest.raises(ConflictError, match="two standbys were promoted"):
        pair.capture(pair.shop, tmp_path)


def test_a_history_says_where_each_timeline_was_left():
    text = "1\t0/5000148\tno recovery target specified\n\n# a comment\n2\t1A/60\tbefore 2000-01-01 00:00:00+00\n"
    assert parse_history(text) == {1: 0x5000148, 2: 0x1A00000060}
