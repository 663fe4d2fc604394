"""Tables of a capture on Spark: beside the capture in one process and in another, and over PostgreSQL."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
from capture_postgres_servers import start
from test_examples import run as run_example

import millstream as ms
from millstream.errors import ConfigError

ROWS = 300


def shop_of(folder):
    path = folder / "shop.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, cents INTEGER NOT NULL)")
    return path


def write(path):
    with closing(sqlite3.connect(path, isolation_level=None, timeout=60)) as db:
        for number in range(ROWS):
            db.execute("INSERT INTO orders VALUES (?, 0)", (number,))
            db.execute("UPDATE orders SET cents = cents + 1 WHERE id % 7 = ?", (number % 7,))
            time.sleep(0.001)


def rows_of(path):
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT id, cents FROM orders ORDER BY id").fetchall()


def app_over(folder, capture):
    app = ms.App("shop", log=folder)
    app.table("orders", {"id": int, "cents": int}, key="id", capture=capture).view("orders")
    return app


@pytest.mark.timeout(600)
@pytest.mark.parametrize("where", ["thread", "process"])
def test_capture_and_app_run_side_by_side(spark, tmp_path, where):
    path, folder = shop_of(tmp_path), tmp_path / "log"
    url = f"sqlite:///{path}"
    capture = ms.capture(url, to=folder)
    app = app_over(folder, capture)
    writer = threading.Thread(target=write, args=(path,))
    if where == "thread":
        capturing = threading.Thread(target=capture.run)
        capturing.start()
    else:
        program = [sys.executable, "-m", "millstream", "capture", url, "--to", str(folder)]
        process = subprocess.Popen(program, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        writer.start()

        def until(_):
            return not writer.is_alive() and shown(folder) == rows_of(path)

        app.run(until=until, timeout="5 minutes")
    finally:
        writer.join()
        if where == "thread":
            capture.stop()
            capturing.join(60)
            assert not capturing.is_alive()
        else:
            process.terminate()
            assert process.wait(60) == 0
    assert shown(folder) == rows_of(path)
    assert len(rows_of(path)) == ROWS


def shown(folder):
    return sorted(ms.view("orders", log=folder).scan()["id", "cents"].rows())


@pytest.mark.timeout(300)
def test_topics_that_are_compacted_are_refused(spark, tmp_path):
    path, folder = shop_of(tmp_path), tmp_path / "log"
    ms.capture(f"sqlite:///{path}", to=folder, cleanup="compact").run(until="caught-up")
    with ms.connect(folder) as log:
        log.create_topic("shop.main.orders", partitions=1, cleanup="compact", exist_ok=True)
    with pytest.raises(
        ConfigError, match=r"shop.main.orders' is compacted.*waited for without end"
    ):
        app_over(folder, ms.capture(f"sqlite:///{path}", to=folder)).run(until="caught-up")


@pytest.mark.timeout(900)
def test_the_example_of_campaigns_on_postgresql_and_sqlite():
    expected = "('autumn', 1, 100)\n('shoes', 1, 700)\n('spring', 2, 6500)"
    assert expected in run_example("campaigns.py")
    with start() as server:
        assert expected in run_example("campaigns.py", server.url("shop"))
