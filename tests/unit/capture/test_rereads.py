"""Tables read again on demand, of each kind of database, while others write, and through kills."""

import itertools
import json
import random
import sqlite3
from contextlib import closing, suppress
from dataclasses import replace

import mariadb_database
import pytest
from capture_postgres_servers import Shop, start
from capture_replica import replayed

import millstream as ms
from millstream.capture.signals import SignalReader
from millstream.capture.sqlite.source import SqliteSource
from millstream.cli.main import run as run_command
from millstream.errors import ConfigError


class Lite:
    def __init__(self, folder):
        self.path = folder / "shop.db"
        self.address, self.schema = f"sqlite:///{self.path}", "main"

    def run(self, *statements):
        with closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            return [db.execute(statement).fetchall() for statement in statements][-1]

    def source(self):
        return SqliteSource(self.path, ["t"], chunk_rows=3, heartbeat_s=0.001, poll_s=0.001)


@pytest.fixture(scope="module")
def servers():
    with start() as postgres, mariadb_database.start() as mariadb:
        yield {"postgres": postgres, "mariadb": mariadb}


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def shop(request, tmp_path):
    if request.param == "sqlite":
        made = Lite(tmp_path)
    elif request.param == "postgres":
        made = Shop(request.getfixturevalue("servers")["postgres"])
        made.address, made.schema = made.url, "public"
    else:
        made = mariadb_database.Database(request.getfixturevalue("servers")["mariadb"])
        made.address, made.schema = made.url(), made.name
    made.kind, made.log = request.param, tmp_path / "log"
    made.run("CREATE TABLE t (id INTEGER PRIMARY KEY, n INTEGER)")
    made.run("INSERT INTO t VALUES " + ", ".join(f"({n}, 0)" for n in range(20)))
    return made


def capture_of(shop):
    made = ms.capture(shop.address, tables="t", to=shop.log, name="shop")
    source = shop.source("t") if shop.kind != "sqlite" else shop.source()
    if shop.kind == "postgres":
        source.name = made.source.name
    return replace(made, source=source)


def values(shop):
    with ms.connect(shop.log) as log:
        found = log.read(f"shop.{shop.schema}.t", 0, columns=("value",)).column("value").to_pylist()
    return [json.loads(value) for value in found if value is not None]


def captured(shop):
    rows = replayed(values(shop), ("id",)).values()
    return sorted((row["id"], row["n"]) for row in rows)


def rows_of(shop):
    return sorted(tuple(map(int, row)) for row in shop.run("SELECT id, n FROM t"))


def tamper(shop):
    """Have the topic say what the database does not: a row that is not there, and another value."""
    with ms.connect(shop.log) as log, log.producer() as producer:
        for key in (5, 77):
            value = {"before": None, "after": {"id": key, "n": -1}, "op": "c"}
            producer.send(
                f"shop.{shop.schema}.t", json.dumps(value).encode(), key=json.dumps({"id": key})
            )


class Killed(Exception):
    pass


def run_killed(shop, dice):
    """Capture, write meanwhile, and end at any place: what was not committed is gone."""
    left = dice.randrange(12)

    def on_status(_):
        nonlocal left
        shop.run(f"UPDATE t SET n = n + 1 WHERE id % 4 = {dice.randrange(4)}")
        left -= 1
        if left < 0:
            raise Killed

    with suppress(Killed):
        capture_of(shop).run(until="caught-up", on_status=on_status)


def test_a_table_that_is_read_again_is_what_the_database_has_and_rows_that_are_not_there_go(shop):
    dice = random.Random(7)
    capture_of(shop).run(until="caught-up")
    tamper(shop)
    assert captured(shop) != rows_of(shop)
    capture_of(shop).reread("t")
    for _ in range(4):
        run_killed(shop, dice)
    capture_of(shop).run(until="caught-up")
    assert captured(shop) == rows_of(shop)
    assert sum(value["op"] == "t" for value in values(shop)) == 1


def test_with_a_condition_only_its_rows_are_read_and_none_is_deleted(shop):
    capture_of(shop).run(until="caught-up")
    tamper(shop)
    before = len(values(shop))
    capture_of(shop).reread("t", where="id > 3 AND id < 14 OR id = 16")
    capture_of(shop).run(until="caught-up")
    capture_of(shop).run(until="caught-up")
    found = values(shop)[before:]
    assert [(value["op"], value["after"]["id"]) for value in found] == [
        ("r", number) for number in [*range(4, 14), 16]
    ]
    assert captured(shop) == sorted([*rows_of(shop), (77, -1)])


def test_what_cannot_be_read_again_is_refused_when_asked_and_passed_over_when_signalled(shop):
    capture = capture_of(shop)
    capture.run(until="caught-up")
    with pytest.raises(ConfigError, match="is not captured, so it cannot be read again"):
        capture.reread("u")
    for where in ("nothing > 1", "id > ", "1) OR (SELECT"):
        with pytest.raises(ConfigError, match="cannot be asked of"):
            capture.reread("t", where=where)
    signals = [b"{", b'{"type": "log"}', b'{"type": "execute-snapshot", "data": {}}']
    table = f"{shop.schema}.u".encode()
    signals.append(b'{"type": "execute-snapshot", "data": {"data-collections": ["%s"]}}' % table)
    with ms.connect(shop.log) as log, log.producer() as producer:
        for signal in signals:
            producer.send("shop-signal", signal, key="shop")
        producer.send("shop-signal", b"{", key="another")
    alarms = []
    capture_of(shop).run(until="caught-up", on_alarm=alarms.append)
    assert len(alarms) == 3
    assert "at offset 0 of 'shop-signal' cannot be read" in alarms[0]
    assert "is not captured" in alarms[2]
    assert captured(shop) == rows_of(shop)


def test_the_command_asks_and_the_next_run_follows(tmp_path, capsys):
    shop = Lite(tmp_path)
    shop.log = tmp_path / "log"
    shop.run("CREATE TABLE t (id INTEGER PRIMARY KEY, n INTEGER)", "INSERT INTO t VALUES (1, 2)")
    arguments = ["capture", shop.address, "--to", str(shop.log)]
    assert run_command([*arguments, "--until", "caught-up"]) == 0
    assert run_command([*arguments, "--resnapshot", "t", "--where", "id = 1"]) == 0
    assert "Asked for." in capsys.readouterr().out
    assert run_command([*arguments, "--until", "caught-up"]) == 0
    assert [value["op"] for value in values(shop)] == ["r", "r"]
    assert run_command([*arguments, "--where", "id = 1"]) == 2
    assert "without --resnapshot" in capsys.readouterr().err


def test_what_is_asked_for_while_a_table_is_read_leaves_none_of_its_rows_out(shop):
    """Two conditions at once are both followed, and one amid a first snapshot leaves the rest of it to be read."""
    shop.run("INSERT INTO t VALUES " + ", ".join(f"({n}, 0)" for n in range(20, 600)))

    interrupted = capture_of(shop)
    units = interrupted.source.units

    def fifty_units(stored):
        yield from itertools.islice(units(stored), 50)
        raise Killed

    interrupted.source.units = fifty_units
    with suppress(Killed):
        interrupted.run(until="caught-up")
    assert 0 < len(captured(shop)) < 600
    capture_of(shop).reread("t", where="id = 7")
    capture_of(shop).run(until="caught-up")
    assert captured(shop) == rows_of(shop)
    before = len(values(shop))
    capture_of(shop).reread("t", where="id < 9")
    capture_of(shop).reread("t", where="id = 15 OR id = 16")
    capture_of(shop).run(until="caught-up")
    found = {value["after"]["id"] for value in values(shop)[before:]}
    assert found == {*range(9), 15, 16}


def test_a_crash_between_two_tables_of_a_signal_loses_neither(tmp_path):
    shop = Lite(tmp_path)
    shop.log = tmp_path / "log"
    shop.run("CREATE TABLE t (id INTEGER PRIMARY KEY)", "CREATE TABLE u (id INTEGER PRIMARY KEY)")
    source = SqliteSource(shop.path, ["t", "u"], heartbeat_s=0.001, poll_s=0.001)
    capture = replace(ms.capture(shop.address, to=shop.log, name="shop"), source=source)
    capture.run(until="caught-up")
    capture.reread("t", "u")
    stored = None
    for last in (False, True):
        source = SqliteSource(shop.path, ["t", "u"], heartbeat_s=0.001, poll_s=0.001)
        with ms.connect(shop.log) as log:
            signals = SignalReader(
                log,
                "shop-signal",
                "shop",
                0 if stored is None else stored["signals"],
                capture.split,
                float,
            )
            (asked,) = signals.requests()
        capture = replace(capture, source=source)
        capture._follow(asked)
        units = source.units(stored)
        read = [unit for unit in (next(units) for _ in range(8)) if "/again " in unit.position]
        assert [unit.position.split("/")[1] for unit in read] == ["t", "u"]
        stored = read[-1 if last else 0].progress
        units.close()
    assert stored["signals"] == 1
