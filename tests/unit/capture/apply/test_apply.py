"""What was applied is the source after some transaction, whatever is interrupted."""

import itertools
import json
import random
import sqlite3
import subprocess
import sys
import time

import pytest
from applied_model import KEY, TABLES, ModelDatabase, topic_of, write

import millstream as ms
from millstream.capture.apply.run import ApplySession
from millstream.capture.apply.sqlite import SqliteApplyTarget
from millstream.client import connect
from millstream.errors import RetriableError

STEPS = ("begin", "define", "truncate", "write", "rows", "commit")


class Crash(RetriableError):
    """The process ended here."""


class CrashingTarget:
    """A target that crashes before or after its nth call, having done or not what was asked."""

    def __init__(self, path, at):
        self.target = SqliteApplyTarget(path)
        self.shown = self.target.shown
        self.at = at
        self.calls = itertools.count()

    def __getattr__(self, name):
        found = getattr(self.target, name)
        if name not in STEPS:
            return found

        def call(*arguments):
            number = next(self.calls)
            if number == self.at:
                raise Crash(name)
            result = found(*arguments)
            if name == "rows":
                result = list(result)
            if number + 0.5 == self.at:
                raise Crash(name)
            return result

        return call

    def rollback(self):
        """Do nothing: nobody does, after a crash."""


def applier(log, path, target=None, **options):
    run = ms.apply("shop", f"sqlite:///{path}", log=log)
    if target is not None:
        run.target = target
    for name, value in options.items():
        setattr(run, name, value)
    return run


def applied(path):
    """Return the number of transactions that a copy has, and its rows."""
    session = sqlite3.connect(path)
    session.row_factory = sqlite3.Row
    found = session.execute("SELECT state FROM _millstream_apply").fetchone()
    state = json.loads(found[0]) if found and found[0] else {"transactions": 0}
    tables = {}
    for table in TABLES:
        exists = session.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        rows = map(dict, session.execute(f"SELECT * FROM {table}")) if exists else ()
        tables[table] = {tuple(row[name] for name in KEY): row for row in rows}
    session.close()
    return state["transactions"], tables


def without_nulls(tables):
    """Return the rows without columns that are null: a column that is added later is null in rows from before."""
    return {
        table: {key: {n: v for n, v in row.items() if v is not None} for key, row in rows.items()}
        for table, rows in tables.items()
    }


def check(database, path):
    count, tables = applied(path)
    assert without_nulls(tables) == without_nulls(database.states[count]), database.seed
    return count


@pytest.mark.parametrize("partitions", [1, 4, 7])
@pytest.mark.parametrize("seed", range(4))
def test_a_copy_is_the_source_after_some_transaction_at_every_step(tmp_path, seed, partitions):
    database, path, folder = ModelDatabase(seed), tmp_path / "copy.db", tmp_path / "log"
    dice = random.Random(seed)
    applied_before = 0
    with connect(folder) as log:
        for _ in range(6):
            write(log, [database.unit() for _ in range(8)], partitions=partitions)
            while applied_before < database.number:
                at = dice.randrange(14) + dice.choice([0, 0.5])
                run = applier(
                    folder,
                    path,
                    lambda at=at: CrashingTarget(path, at),
                    batch_changes=dice.choice([1, 5, 20, 1000]),
                )
                try:
                    with ApplySession(run) as session:
                        while session.step().state != "idle":
                            pass
                except Crash:
                    pass
                count = check(database, path)
                assert count >= applied_before
                applied_before = count
    assert applied_before == database.number


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_copy_made_from_compacted_topics_is_the_source(tmp_path, seed, partitions):
    database = ModelDatabase(seed, unavailable=False)
    with connect(tmp_path) as log:
        for table in TABLES:
            log.create_topic(
                topic_of(table),
                partitions=partitions,
                cleanup="compact",
                settings={
                    "segment.bytes": "1048576",
                    "min.cleanable.dirty.ratio": "0.0",
                    "segment.ms": "1",
                },
            )
        for _ in range(4):
            write(
                log, [database.unit() for _ in range(30)], partitions=partitions, cleanup="compact"
            )
            log.run_maintenance()
            log.run_maintenance()
        kept = sum(len(log.read(topic_of(table), p)) for table in TABLES for p in range(partitions))
        written = sum(end for table in TABLES for _, end in log.offsets(topic_of(table)))
        assert kept < written / 2
        path = tmp_path / "copy.db"
        applier(tmp_path, path).run(until="caught-up")
        assert check(database, path) == database.number


def test_a_capture_behind_a_broker_is_applied(tmp_path):
    ready = tmp_path / "ready"
    options = ("--listen", "127.0.0.1:0", "--ready-file", str(ready))
    broker = subprocess.Popen(
        [sys.executable, "-m", "millstream", "broker", tmp_path / "log", *options]
    )
    try:
        until = time.monotonic() + 120
        while not ready.exists():
            assert broker.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        url, database = f"kafka://{ready.read_text().strip()}", ModelDatabase(2)
        with connect(url) as log:
            for _ in range(2):
                write(log, [database.unit() for _ in range(10)], partitions=3)
                applier(url, tmp_path / "copy.db").run(until="caught-up")
                assert check(database, tmp_path / "copy.db") == database.number
    finally:
        broker.kill()
        broker.wait()
