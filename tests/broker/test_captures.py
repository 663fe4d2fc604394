"""A capture whose log is killed: the broker that it writes to, or the process that owns the folder."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest
from broker.broker_process import AsProcess
from capture_replica import replayed

import millstream as ms
from millstream.client import connect

ROUNDS = 4
OWNER = """
import sys, time
from millstream.client import connect
with connect(sys.argv[1]) as log:
    log.create_topic("other", exist_ok=True)
    with log.producer() as producer:
        producer.send("other", b"it is mine now").result()
        print("owned", flush=True)
        time.sleep(3600)
"""


@contextmanager
def _broker(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Give the log's address, and what kills it and starts it again."""
    running = [AsProcess(folder)]
    address = running[0].address

    def kill() -> None:
        running[0].kill()
        running[0] = AsProcess(folder, listen=address)

    try:
        yield f"kafka://{address}", kill
    finally:
        running[0].stop()


@contextmanager
def _owned(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Give the folder, and what kills its owner; another process owns it then, or the capture itself."""

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "owned\n"
        return process

    running = [start()]

    def kill() -> None:
        running[0].kill()
        running[0].communicate()
        running[0] = start()

    try:
        yield str(folder), kill
    finally:
        running[0].kill()
        running[0].communicate()


class _Capturing:
    """A capture that runs in a thread; use it in ``with``."""

    def __init__(self, database: Path, log: str) -> None:
        self._capture = ms.capture(f"sqlite:///{database}", to=log, name="shop")
        self._thread = threading.Thread(target=self._run)
        self.rows = 0
        self.error: BaseException | None = None

    def _run(self) -> None:
        def look(status: ms.CaptureStatus) -> None:
            self.rows = status.snapshot_rows + status.changes

        try:
            self._capture.run(on_status=look)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def wait(self, rows: int) -> None:
        end_s = time.monotonic() + 240
        while self.rows < rows:
            assert self.error is None, self.error
            assert time.monotonic() < end_s
            time.sleep(0.02)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._capture.stop()
        self._thread.join()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [_broker, _owned])
def test_a_log_that_is_killed_has_every_transaction_once(kind, tmp_path: Path) -> None:
    rng = random.Random(3)
    database = tmp_path / "shop.db"
    writer = sqlite3.connect(database, isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, n INT)")
    folder = tmp_path / "log"
    folder.mkdir()
    written = 0
    with kind(folder) as (log, kill), _Capturing(database, log) as capturing:
        for number in range(ROUNDS):
            for _ in range(200):
                writer.execute("INSERT OR IGNORE INTO t VALUES (?, 0)", (rng.randrange(10**6),))
                writer.execute("UPDATE t SET n = n + 1 WHERE id % 50 = ?", (number,))
            written += 200
            capturing.wait(written // 2)  # it is in the middle of them, or has just begun
            kill()
        rows = dict(writer.execute("SELECT id, n FROM t"))
        (tail,) = writer.execute("INSERT INTO t VALUES (-1, -1) RETURNING id").fetchone()
        while True:
            with connect(log) as reader:
                found = _values(reader, "shop.main.t")
            if found and found[-1]["after"] and found[-1]["after"]["id"] == tail:
                break
            assert capturing.error is None
            time.sleep(0.2)
    assert {at: row["n"] for (at,), row in replayed(found, ("id",)).items()} == {**rows, -1: -1}
    assert len({(one["source"]["position"], one["source"]["seq"]) for one in found}) == len(found)


def _values(log: object, topic: str) -> list[dict]:
    if topic not in log.topics():
        return []
    read = log.read(topic, 0, columns=("value",)).column("value").to_pylist()
    return [json.loads(value) for value in read if value is not None]
