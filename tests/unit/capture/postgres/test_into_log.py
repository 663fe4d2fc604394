"""A PostgreSQL server captured into a log by the command, which is killed again and again, and so is the server."""

import contextlib
import itertools
import json
import os
import random
import re
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import psycopg
import pytest
from capture_postgres_servers import Shop, start

import millstream as ms
from millstream.client import connect
from millstream.errors import ConfigError
from millstream.views.address import is_refused_login

# `make test-long` kills it more often.
KILLS = int(os.environ.get("MILLSTREAM_CAPTURE_KILLS", "6"))
SERVER_KILLS = max(1, KILLS // 10)
SCHEMA = (
    "CREATE TABLE a (id int PRIMARY KEY, n int, s text)",
    "CREATE TABLE b (x text, y int, n numeric, PRIMARY KEY (x, y))",
)


@pytest.fixture
def own_shop():
    # Sessions that wait for each other would mostly do that.
    with start(max_prepared_transactions="50", deadlock_timeout="20ms") as server:
        yield Shop(server)


def change(rng):
    """Return a statement that changes rows of one of the tables."""
    key, other, number = rng.randrange(40), rng.randrange(40), rng.randrange(1000)
    large = f"repeat('s', {number * 5})"
    return rng.choice(
        [
            f"INSERT INTO a VALUES ({key}, {number}, {large}) ON CONFLICT (id) DO UPDATE SET n = excluded.n",
            f"INSERT INTO b VALUES ('k{key}', {other % 3}, {number}.50) ON CONFLICT DO NOTHING",
            f"UPDATE a SET n = {number} WHERE id < {key}",
            f"UPDATE a SET id = {other} WHERE id = {key} AND NOT EXISTS (SELECT 1 FROM a WHERE id = {other})",
            f"UPDATE b SET x = 'K{other}' || n WHERE x = 'k{key}'",
            f"DELETE FROM a WHERE id = {key}",
            f"DELETE FROM b WHERE n % 7 = {key % 7}",
            "TRUNCATE b" if rng.random() < 0.1 else f"DELETE FROM b WHERE y = {key}",
        ]
    )


class Writers:
    """Sessions that write until they are stopped; use it in ``with``. The server may be killed meanwhile."""

    def __init__(self, shop, seed, sessions=3):
        # The first of the sessions alters tables, too.
        self._shop, self._stop, self.errors = shop, threading.Event(), []
        self._numbers = itertools.count(seed * 100_000)
        self._lock, self.commits = threading.Lock(), 0
        self._threads = [
            threading.Thread(target=self._write, args=(random.Random(seed + n), n == 0))
            for n in range(sessions)
        ]

    def _write(self, rng, alters):
        while not self._stop.wait(0.005):
            try:
                with self._shop.connect() as session:
                    while not self._stop.wait(0.005):
                        self._transact(session, rng)
                        if alters and rng.random() < 0.01:
                            self._alter(session, rng.randrange(3))
            except psycopg.OperationalError:
                continue  # the server is down
            except psycopg.Error as error:
                self.errors.append(error)
                return

    def _alter(self, session, number):
        name = f"extra{number}"
        has = "SELECT 1 FROM pg_attribute WHERE attrelid = 'a'::regclass AND attname = %s AND NOT attisdropped"
        kind = "DROP COLUMN" if session.execute(has, (name,)).fetchone() else "ADD COLUMN"
        default = f" int DEFAULT {number}" if kind.startswith("ADD") else ""
        with contextlib.suppress(psycopg.errors.DeadlockDetected):
            session.execute(f"ALTER TABLE a {kind} {name}{default}")

    def _transact(self, session, rng):
        try:
            session.execute("BEGIN")
            changes = [session.execute(change(rng)) for _ in range(rng.choice([1, 1, 3, 30]))]
            if rng.random() < 0.2:
                session.execute("SAVEPOINT s")
                session.execute(change(rng))
                session.execute("ROLLBACK TO s")
            if rng.random() < 0.1:
                name = f"two{next(self._numbers)}"
                session.execute(f"PREPARE TRANSACTION '{name}'")
                session.execute(f"{rng.choice(['COMMIT', 'ROLLBACK'])} PREPARED '{name}'")
            else:
                end = rng.choice(["COMMIT"] * 6 + ["ROLLBACK"])
                session.execute(end)
                self._count(end == "COMMIT" and any(one.rowcount > 0 for one in changes))
        except (psycopg.errors.DeadlockDetected, psycopg.errors.UniqueViolation):
            session.execute("ROLLBACK")
        except psycopg.errors.UndefinedObject:
            return  # what was prepared has been ended by the test, after the server was killed

    def _count(self, changed):
        with self._lock:
            self.commits += changed

    def wait_for_commits(self, number):
        """Wait until so many more transactions that changed rows were acknowledged."""
        until = self.commits + number
        while self.commits < until:
            assert any(thread.is_alive() for thread in self._threads), self.errors
            time.sleep(0.01)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()


def start_capture(shop, folder, *options):
    """Start the command; its password is in the environment."""
    url = f"postgresql://{shop.server.user}@127.0.0.1:{shop.server.port}/{shop.name}"
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "millstream",
            "capture",
            url,
            "--to",
            str(folder),
            "--name",
            "shop",
            *options,
        ],
        env={**os.environ, "MILLSTREAM_CAPTURE_PASSWORD": shop.server.password},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def capture_all(shop, folder):
    process = start_capture(shop, folder, "--until", "caught-up")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out


def read_all(log, topic):
    values = log.read(topic, 0, columns=("value",)).column("value").to_pylist()
    return [json.loads(value) for value in values if value is not None]


def replayed(records, key):
    """Return the rows that a table has after all records: by the envelope's rules, and nothing else."""
    rows, deleted = {}, {}
    for value in records:
        before, after = value["before"], value["after"]
        if value["op"] == "t":
            rows.clear()
        elif value["op"] == "d":
            at = tuple(before[name] for name in key)
            deleted = {json.dumps({name: before[name] for name in key}): rows.pop(at, {})}
        else:
            at = tuple(after[name] for name in key)
            if "carry_from" in value:
                base = deleted[json.dumps(value["carry_from"])]
            else:
                base = rows.get(at, {}) if value["op"] == "u" else {}
            rows[at] = {**base, **after}
    return rows


def wait_for_line(process, beginning):
    """Wait until the command says that it is in a state."""
    for line in process.stderr:
        if line.startswith(beginning):
            return
    raise AssertionError("the command ended")


def kill_and_wait(process):
    process.kill()
    process.communicate()


def check_transactions(told):
    """Check that each transaction is there once, whole, and in the order of commits; return how many there are."""
    borders = [one["status"] for one in told]
    assert borders == ["BEGIN", "END"] * (len(borders) // 2)
    ids = [one["id"] for one in told if one["status"] == "END"]
    assert len(ids) == len(set(ids))
    places = [one.partition(":")[2].split("/") for one in ids if one.startswith("transaction:")]
    numbers = [(int(high, 16), int(low, 16)) for high, low in places]
    assert numbers == sorted(numbers)
    return len(numbers)


def sorted_rows(rows):
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def end_prepared(shop):
    """End what a killed session has left prepared: it holds locks, and holds up every new slot."""
    for (name,) in shop.run("SELECT gid FROM pg_prepared_xacts"):
        with contextlib.suppress(psycopg.errors.UndefinedObject):  # its session was quicker
            shop.run(f"ROLLBACK PREPARED '{name}'")


@pytest.mark.timeout(1800)
def test_1_2_a_capture_and_a_server_that_are_killed_leave_every_transaction_once(
    own_shop, tmp_path
):
    shop, dice = own_shop, random.Random(11)
    shop.run(*SCHEMA, "INSERT INTO a SELECT n, n, 's' FROM generate_series(100, 3000) n")
    process = start_capture(shop, tmp_path)
    wait_for_line(process, "snapshot")
    kill_and_wait(process)
    capture_all(shop, tmp_path)
    with Writers(shop, 7) as writers:
        for number in range(KILLS):
            process = start_capture(shop, tmp_path)
            if number % 4:
                wait_for_line(process, "streaming")
            writers.wait_for_commits(dice.randrange(20))
            time.sleep(dice.uniform(0, 1))
            if number % (KILLS // SERVER_KILLS) == 1:
                shop.server.kill()
                shop.server.start()
                end_prepared(shop)
            kill_and_wait(process)
    assert not writers.errors
    end_prepared(shop)
    shop.run("UPDATE a SET n = n + 1")  # an alteration is seen at the first change after it
    capture_all(shop, tmp_path)
    with connect(tmp_path) as log:
        for table, key in (("a", ("id",)), ("b", ("x", "y"))):
            truth = shop.rows(table, key)
            if table == "b":
                truth = {at: {**row, "n": f"{row['n']:.2f}"} for at, row in truth.items()}
            found = replayed(read_all(log, f"shop.public.{table}"), key)
            names = next(
                iter(truth.values()), {}
            ).keys()  # columns that were dropped stay in old records
            assert {at: {name: row[name] for name in names} for at, row in found.items()} == truth
        assert check_transactions(read_all(log, "shop.transaction")) > writers.commits > 0


# What pgbench keeps equal: each of its transactions adds one number to four tables.
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_tables_of_pgbench_are_captured_while_the_capture_is_killed(own_shop, tmp_path):
    shop, dice = own_shop, random.Random(5)
    program = shop.server.program("pgbench")
    subprocess.run([program, "--initialize", "--init-steps=dtgp", "--quiet", shop.url], check=True)
    shop.run("ALTER TABLE pgbench_history REPLICA IDENTITY FULL")
    capture_all(shop, tmp_path)
    paced = ["--rate=100", "--transactions=800", "--client=3", "--random-seed=9"]
    load = subprocess.Popen([program, "--no-vacuum", *paced, shop.url], stdout=subprocess.DEVNULL)
    kills = 0
    while load.poll() is None:
        process = start_capture(shop, tmp_path)
        time.sleep(dice.uniform(1, 4))
        kill_and_wait(process)
        kills += 1
    assert load.returncode == 0
    assert kills > 3
    capture_all(shop, tmp_path)
    keys = {"accounts": "aid", "branches": "bid", "tellers": "tid"}
    with connect(tmp_path) as log:
        for name, key in keys.items():
            found = replayed(read_all(log, f"shop.public.pgbench_{name}"), (key,))
            assert found == shop.rows(f"pgbench_{name}", (key,))
        rows = [
            one["after"] for one in read_all(log, "shop.public.pgbench_history") if one["after"]
        ]
        assert len(rows) == 2400
        truth = shop.run("SELECT to_jsonb(h) FROM pgbench_history h")
        assert sorted_rows(rows) == sorted_rows(row for (row,) in truth)
        assert check_transactions(read_all(log, "shop.transaction")) == 2400


def test_a_record_has_its_database_schema_and_transaction(own_shop, tmp_path):
    own_shop.run("CREATE TABLE t (id int PRIMARY KEY)")
    capture_all(own_shop, tmp_path)
    own_shop.run("INSERT INTO t VALUES (1)")
    out = capture_all(own_shop, tmp_path)
    assert "1 changes" in out
    with connect(tmp_path) as log:
        (record,) = read_all(log, "shop.public.t")
    source = record["source"]
    assert (source["db"], source["schema"], source["table"]) == (own_shop.name, "public", "t")
    assert (source["connector"], source["snapshot"]) == ("postgresql", "false")
    assert isinstance(source["txId"], int)
    assert isinstance(source["lsn"], int)


def test_a_run_of_a_moment_lets_the_server_remove_what_is_in_the_log(shop, tmp_path):
    shop.run("CREATE TABLE t (id int PRIMARY KEY)")
    capture = partial(ms.capture, shop.url, tables="t", to=tmp_path, name="shop")
    capture().run(until="caught-up")
    shop.run("INSERT INTO t VALUES (1)")
    (end,) = shop.run("SELECT pg_current_wal_flush_lsn()::text")[0]
    capture().run(until="caught-up")
    shop.wait_until_released()
    moved = f"SELECT confirmed_flush_lsn >= '{end}' FROM pg_replication_slots WHERE slot_name = '{shop.slot()}'"
    assert shop.run(moved) == [(True,)]


def test_what_is_wrong_is_told_without_the_password(own_shop, tmp_path):
    own_shop.run("CREATE TABLE t (id int)")
    process = start_capture(own_shop, tmp_path, "--check")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "REPLICA IDENTITY FULL" in err
    assert own_shop.server.password not in err


def test_a_login_that_is_refused_is_not_tried_again(shop, tmp_path):
    shop.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    wrong = re.sub("://([^:]*):[^@]*@", r"://\1:wr0ng@", shop.url)
    for url in (wrong, wrong.replace(":wr0ng", ""), f"{shop.url}_no"):
        with pytest.raises(
            ConfigError, match=r"refuses: .*Correct the user, the password"
        ) as raised:
            ms.capture(url, to=tmp_path, name="shop").run(until="caught-up")
        assert "wr0ng" not in str(raised.value)
    ms.capture(shop.url, to=tmp_path, name="shop").run(until="caught-up")
    with pytest.raises(ConfigError, match=r"refuses: .*Correct the user, the password"):
        ms.apply("shop", wrong, log=tmp_path).run(until="caught-up")


def test_of_several_hosts_one_that_refuses_may_be_the_wrong_one():
    one = 'connection failed: connection to server at "::1", port 5 failed: FATAL:  database "x" does not exist'
    assert is_refused_login(one)
    several = "Multiple connection attempts failed. All failures were:\n- host: 'a': Connection refused\n- host: 'b': "
    assert not is_refused_login(several + one)
    assert not is_refused_login("FATAL:  the database system is starting up")


def test_a_table_that_was_made_anew_and_is_empty_is_copied_by_its_own_definition(shop, tmp_path):
    """Its columns have the names of those before, and the first row comes behind the snapshot."""

    def follow():
        made = ms.capture(shop.url, tables="t", to=tmp_path / "log", name="shop")
        source = shop.source("t")
        source.name = made.source.name
        replace(made, source=source).run(until="caught-up")
        copy = ms.apply("shop", f"sqlite:///{tmp_path}/copy.db", log=tmp_path / "log")
        copy.run(until="caught-up")

    shop.run("CREATE TABLE t (a int PRIMARY KEY, b int)", "INSERT INTO t VALUES (1, 1)")
    follow()
    shop.run("DROP TABLE t", "CREATE TABLE t (a int, b text PRIMARY KEY)")
    follow()
    shop.run("INSERT INTO t VALUES (1, '007'), (1, '7')")
    follow()
    with contextlib.closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        assert copy.execute("SELECT a, b FROM t ORDER BY b").fetchall() == [(1, "007"), (1, "7")]
