"""Faults of the server, the wire and the log that a capture has to bear: those that take a server of its own."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from capture_postgres_servers import Shop, start
from wire_faults import FAULTS, FaultyWire

import millstream as ms
from millstream.client import connect
from millstream.errors import ConflictError

MIB = 1 << 20


@pytest.fixture
def own_shop(request):
    with start(**getattr(request, "param", {})) as server:
        yield Shop(server)


def wait_until(done, timeout_s=60):
    end_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.02)


def values(log, topic):
    found = log.read(topic, 0, columns=("value",)).column("value").to_pylist()
    return [json.loads(value) for value in found if value is not None]


# Fault 5: a transaction that is larger than memory may be.
MEASURED = """
import resource, sys
import millstream as ms
status = ms.capture(sys.argv[1], to=sys.argv[2], name="shop").run(until="caught-up")
print(status.changes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def captured_apart(shop, folder):
    """Capture in a process of its own; return how many changes there are by now, and its memory in bytes."""
    command = [sys.executable, "-c", MEASURED, shop.url, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    changes, kib = map(int, done.stdout.split())
    return changes, kib << 10


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("own_shop", [{"logical_decoding_work_mem": "64kB"}], indirect=True)
def test_5_memory_does_not_grow_with_a_transaction(own_shop, tmp_path):
    own_shop.run("CREATE TABLE t (id int PRIMARY KEY, b text)")
    captured_apart(own_shop, tmp_path)
    fill = "INSERT INTO t SELECT n, repeat('x', 400) FROM generate_series({}, {}) n"
    own_shop.run(fill.format(1, 60_000))
    few, before = captured_apart(own_shop, tmp_path)
    with own_shop.connect() as session:
        session.execute("BEGIN")
        session.execute(fill.format(100_001, 400_000))
        session.execute("SAVEPOINT s")
        session.execute(fill.format(900_001, 910_000))
        session.execute("ROLLBACK TO s")
        session.execute("COMMIT")
        session.execute("BEGIN")
        session.execute(fill.format(900_001, 910_000))
        session.execute("ROLLBACK")
    many, after = captured_apart(own_shop, tmp_path)
    assert (few, many) == (60_000, 360_000)
    assert after < before + 64 * MIB  # the rows alone are 300 MiB as records
    with connect(tmp_path) as log:
        ends = [one for one in values(log, "shop.transaction") if one["status"] == "END"]
        # The first is that in which the table was defined, of which no rows came.
        assert [one["event_count"] for one in ends] == [0, 60_000, 300_000]


# Fault 8, its other half: the server gave up the WAL that the capture had not read.
@pytest.mark.parametrize("own_shop", [{"max_slot_wal_keep_size": "1MB"}], indirect=True)
def test_8_a_slot_that_lost_its_wal_is_refused_and_a_new_name_ends_with_the_truth(
    own_shop, tmp_path
):
    own_shop.run("CREATE TABLE t (id int PRIMARY KEY, b text)")
    ms.capture(own_shop.url, to=tmp_path, name="shop").run(until="caught-up")
    own_shop.run("INSERT INTO t SELECT n, 'x' FROM generate_series(1, 1000) n")
    for _ in range(4):  # each switch leaves a file of 16 MiB behind
        own_shop.run("SELECT pg_switch_wal()", "UPDATE t SET b = b || 'y'", "CHECKPOINT")
    status = own_shop.run("SELECT wal_status FROM pg_replication_slots")
    assert status == [("lost",)]
    with pytest.raises(ConflictError, match="new name"):
        ms.capture(own_shop.url, to=tmp_path, name="shop").run(until="caught-up")
    ms.capture(own_shop.url, to=tmp_path, name="again").run(until="caught-up")
    with connect(tmp_path) as log:
        found = {one["after"]["id"]: one["after"] for one in values(log, "again.public.t")}
    assert found == {row["id"]: row for row in own_shop.rows("t", ["id"]).values()}


# Fault 11: the log stands still for longer than the server waits for an answer: what counts are answers.
def test_11_a_log_that_stands_still_keeps_the_connection_and_fills_no_memory(own_shop):
    own_shop.run("CREATE TABLE t (id int PRIMARY KEY)")
    source = own_shop.source(heartbeat_s=0.05)
    units = source.units(None)
    for unit in units:
        list(unit.contents)
        source.acknowledge(unit.progress)
        if unit.kind == "progress":
            break
    own_shop.run("INSERT INTO t SELECT generate_series(1, 200000)")
    unit = next(one for one in units if one.kind == "transaction")  # and nothing of it is taken
    answers = set()

    def answered_again():
        answers.update(own_shop.run("SELECT pid, reply_time FROM pg_stat_replication"))
        return len(answers) >= 5

    wait_until(answered_again)
    assert len({pid for pid, _ in answers}) == 1  # and no new connection
    # What one look at the connection takes, a MiB and a message at most, of 8 MB that wait.
    assert sum(map(len, source._run._buffer)) < 2 << 20
    assert sum(len(block.rows) for block in unit.contents) == 200_000
    units.close()
    source.close()


# Fault 12: the network fails in the middle of anything.
@pytest.mark.parametrize("own_shop", [{"wal_sender_timeout": "2s"}], indirect=True)
@pytest.mark.timeout(300)
def test_12_a_wire_that_fails_loses_and_repeats_nothing(own_shop, tmp_path):
    rng = random.Random(12)
    own_shop.run("CREATE TABLE t (id int PRIMARY KEY, n int, b text)")
    wire = FaultyWire(own_shop.server.port)
    url = own_shop.url.replace(f":{own_shop.server.port}/", f":{wire.port}/")
    options = "?tcp_user_timeout=3000&keepalives_idle=1&keepalives_interval=1&keepalives_count=2"
    capturing = ms.capture(url + options, to=tmp_path, name="shop")
    capturing.run(until="caught-up")
    for number, fault in enumerate([*FAULTS, *FAULTS]):
        wire.break_after(rng.randrange(400, 60_000), fault)
        first = number * 1000
        own_shop.run(
            f"INSERT INTO t SELECT n, n, 'text ' || n FROM generate_series({first}, {first + 999}) n",
            f"UPDATE t SET n = n + 1 WHERE id % 7 = {number % 7}",
            f"DELETE FROM t WHERE id % 11 = {number}",
        )
        capturing.run(until="caught-up")
    wire.close()
    assert wire.faults >= len(FAULTS)
    rows = {}
    with connect(tmp_path) as log:
        for one in values(log, "shop.public.t"):
            if one["op"] == "d":
                del rows[one["before"]["id"],]
            else:
                assert (one["op"] == "c") == ((one["after"]["id"],) not in rows)
                rows[one["after"]["id"],] = one["after"]
        ids = [one["id"] for one in values(log, "shop.transaction") if one["status"] == "END"]
    assert rows == own_shop.rows("t", ["id"])
    assert len(ids) == len(set(ids))


# Beyond the twenty: a backup that was restored, and a standby that was promoted, have another timeline.
def test_a_server_with_another_timeline_is_refused(own_shop, tmp_path):
    own_shop.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    ms.capture(own_shop.url, to=tmp_path, name="shop").run(until="caught-up")
    server = own_shop.server
    server.kill()
    (server.folder / "data" / "standby.signal").touch()
    server.start()
    own_shop.run("SELECT pg_promote()")
    wait_until(lambda: not own_shop.run("SELECT pg_is_in_recovery()")[0][0])
    own_shop.run("INSERT INTO t VALUES (2)")
    with pytest.raises(ConflictError, match="timeline"):
        ms.capture(own_shop.url, to=tmp_path, name="shop").run(until="caught-up")


def test_the_twenty_faults_have_a_test_each():
    import re

    tests = Path(__file__).parents[1]
    names = re.findall(
        r"def test_(?:fault_)?((?:\d+_)+)", "".join(map(Path.read_text, tests.rglob("test_*.py")))
    )
    numbers = {int(number) for name in names for number in name.strip("_").split("_")}
    assert numbers == set(range(1, 21))
