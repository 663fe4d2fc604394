"""A server captured into a log by the command, which is killed again and again."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from decimal import Decimal

import pytest
from mariadb_database import KINDS_OF_A_LONG_TEST, both
from random_mariadb_workload import SCHEMA, Writers

import millstream as ms
from millstream import testing
from millstream.client import connect

# `make test-long` kills it more often.
KILLS = int(os.environ.get("MILLSTREAM_CAPTURE_KILLS", "5"))
SERVER_KILLS = max(1, KILLS // 10)


def start_capture(database, folder, *options):
    """Start the command; its password is in the environment."""
    server = database.server
    url = f"{database.kind}://{server.user}@127.0.0.1:{server.port}/{database.name}"
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
        env={**os.environ, "MILLSTREAM_CAPTURE_PASSWORD": server.password},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def capture_all(database, folder):
    """Capture until the database has nothing more."""
    process = start_capture(database, folder, "--until", "caught-up")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def read_all(log, topic):
    """Return the keys and values of a topic's records."""
    table = log.read(topic, 0, columns=("key", "value"))
    keys, values = (table.column(name).to_pylist() for name in ("key", "value"))
    return [
        (key, None if value is None else json.loads(value))
        for key, value in zip(keys, values, strict=True)
    ]


def replayed(records, key):
    """Return the rows that a table has after all records."""
    rows = {}
    for _, value in records:
        if value is None:
            continue
        if value["op"] == "t":
            rows.clear()
            continue
        if value["before"] is not None:
            rows.pop(tuple(value["before"][name] for name in key), None)
        if value["after"] is not None:
            rows[tuple(value["after"][name] for name in key)] = value["after"]
    return rows


def server_rows(database, table, key):
    import pymysql

    with database.connect(cursorclass=pymysql.cursors.DictCursor) as connection:
        cursor = connection.cursor()
        cursor.execute(f"SELECT * FROM {table}")
        return {tuple(row[name] for name in key): row for row in cursor.fetchall()}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("own_database", KINDS_OF_A_LONG_TEST, indirect=True)
def test_1_2_a_capture_and_a_server_that_are_killed_leave_every_transaction_once(
    own_database, tmp_path
):
    database, dice = own_database, random.Random(7)
    database.run(*SCHEMA)
    for number in range(SERVER_KILLS):
        with Writers(database.connect, 7 + 10 * number, ddl=False):
            for _ in range(KILLS // SERVER_KILLS):
                process = start_capture(database, tmp_path)
                time.sleep(dice.uniform(0.8, 2.5))
                process.kill()
                process.communicate()
        capturing = start_capture(database, tmp_path)
        time.sleep(1.5)
        database.server.kill()
        database.server.start()
        if number < SERVER_KILLS - 1:
            capturing.kill()
            capturing.communicate()
    with Writers(database.connect, 8, ddl=True, kind=database.kind):
        time.sleep(2)
    capturing.kill()
    capturing.communicate()
    capture_all(database, tmp_path)
    with connect(tmp_path) as log:
        for table, key in (("a", ("id",)), ("b", ("x", "y"))):
            found = replayed(read_all(log, f"shop.{database.name}.{table}"), key)
            assert found == server_rows(database, table, key)
        told = [value for _, value in read_all(log, "shop.transaction")]
        ids = [one["id"] for one in told if one["status"] == "END"]
        assert len(ids) == len(set(ids))
        numbers = [
            int(one.replace(":", "-").rpartition("-")[2])
            for one in ids
            if one.startswith("transaction:")
        ]
        assert numbers == sorted(numbers)
        borders = [one["status"] for one in told]
        assert borders == ["BEGIN", "END"] * (len(borders) // 2)


@both
def test_a_captured_table_is_a_table_of_an_app(database, tmp_path):
    database.run(
        "CREATE TABLE orders (id INT PRIMARY KEY, price DECIMAL(10, 2), at DATETIME(6), note TEXT)",
        "INSERT INTO orders VALUES (1, 1.50, '2026-01-02 03:04:05.6', 'ü'), (2, NULL, NULL, NULL)",
    )
    capture_all(database, tmp_path)
    database.run("UPDATE orders SET id = 3 WHERE id = 1", "DELETE FROM orders WHERE id = 2")
    capture_all(database, tmp_path)
    topics = (f"shop.{database.name}.orders", "shop.transaction")
    with connect(tmp_path) as log:
        records = {
            topic: [
                testing.Row(None if value is None else json.dumps(value).encode(), key=key)
                for key, value in read_all(log, topic)
            ]
            for topic in topics
        }
    app = ms.App("mirror", log="unused")
    whole = ms.debezium(transactions="shop.transaction", decimals="string")
    schema = {"id": int, "price": Decimal | None, "note": str | None}
    app.table(topics[0], schema, key="id", envelope=whole, partitions=1).view("orders")
    found = testing.run(app, records, batches=3, partitions=1)["orders"]
    assert found["id", "price", "note"].rows() == [(3, Decimal("1.50"), "ü")]


@both
def test_what_is_wrong_is_told_in_one_line_without_the_password(database, tmp_path):
    database.run("CREATE TABLE t (id INT PRIMARY KEY)")
    process = start_capture(database, tmp_path, "--tables", "nothing", "--check")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"no table of {database.kind}://" in err
    assert "are there and may be read" in err
    assert database.server.password not in err
    assert err.count("\n") == 1
