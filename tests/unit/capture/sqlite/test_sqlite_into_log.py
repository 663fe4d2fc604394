"""A SQLite database captured into a log by the command, which is killed again and again."""

import json
import os
import random
import re
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from capture_replica import replayed

from millstream.client import connect
from millstream.errors import UnknownTopicError

# `make test-long` kills it more often.
KILLS = int(os.environ.get("MILLSTREAM_CAPTURE_KILLS", "12"))
SCHEMA = (
    "PRAGMA journal_mode = WAL",
    "CREATE TABLE t (id INTEGER PRIMARY KEY, n INT)",
    "CREATE TABLE u (k TEXT PRIMARY KEY NOT NULL, n INT UNIQUE)",
)
STATEMENTS = (
    "INSERT INTO t (n) VALUES ({b})",
    "INSERT OR REPLACE INTO t VALUES ({a}, {b})",
    "UPDATE OR REPLACE t SET id = {b} WHERE id = {a}",
    "DELETE FROM t WHERE id % 40 = {a}",
    "INSERT OR REPLACE INTO u VALUES ('{a}', {b})",
    "UPDATE OR REPLACE u SET n = {b} WHERE k = '{a}'",
    "DELETE FROM u WHERE n = {b}",
)
TEST_S = 1800
PAUSE = threading.Event()
# Another program writes: it knows nothing of capture.
WRITER = """
import random, sqlite3, sys, time
path, seed, seconds, *statements = sys.argv[1:]
rng, end = random.Random(int(seed)), time.monotonic() + float(seconds)
db = sqlite3.connect(path, isolation_level=None, timeout=60)
while time.monotonic() < end:
    db.execute("BEGIN IMMEDIATE")
    for _ in range(rng.randrange(1, 5)):
        db.execute(rng.choice(statements).format(a=rng.randrange(40), b=rng.randrange(40)))
    db.execute(rng.choice(["COMMIT", "COMMIT", "COMMIT", "ROLLBACK"]))
    time.sleep(0.002)
"""


def start(program, *arguments):
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def capture(path, log, *options):
    program = ("-m", "millstream", "capture", f"sqlite:///{path}", "--to", log, "--name", "shop")
    return start(program, *options)


def values(log, topic):
    found = log.read(topic, 0, columns=("value",)).column("value").to_pylist()
    return [json.loads(value) for value in found if value is not None]


def records(folder):
    """Return how many BEGINs and ENDs are in the log."""
    try:
        with connect(folder) as log:
            return log.end_offsets("shop.transaction")[0]
    except UnknownTopicError:
        return 0


@pytest.mark.timeout(TEST_S)
@pytest.mark.parametrize("kills", [2, pytest.param(KILLS, marks=pytest.mark.long)])
def test_1_2_a_capture_that_is_killed_leaves_every_change_once(tmp_path, kills):
    path, folder, rng = tmp_path / "shop.db", tmp_path / "log", random.Random(3)
    database = sqlite3.connect(path, isolation_level=None)
    for statement in SCHEMA:
        database.execute(statement)
    writers = [start(("-c", WRITER), path, seed, TEST_S, *STATEMENTS) for seed in range(2)]
    for _ in range(kills):
        wanted = records(folder) + rng.randrange(2, 40)
        process = capture(path, folder)
        while records(folder) < wanted:
            assert process.poll() is None, process.communicate()
            PAUSE.wait(0.02)
        PAUSE.wait(rng.uniform(0, 0.05))  # a moment of its life, whichever
        process.kill()
        process.communicate()
    for writer in writers:
        assert writer.poll() is None, writer.communicate()
        writer.terminate()
        writer.communicate()
    process = capture(path, folder, "--until", "caught-up")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    with connect(folder) as log:
        for table, key in (("t", "id"), ("u", "k")):
            rows = replayed(values(log, f"shop.main.{table}"), (key,))
            assert sorted((row[key], row["n"]) for row in rows.values()) == sorted(
                database.execute(f"SELECT {key}, n FROM {table}").fetchall()
            )
        borders = values(log, "shop.transaction")
        assert [one["status"] for one in borders] == ["BEGIN", "END"] * (len(borders) // 2)
        ids = [one["id"] for one in borders if one["status"] == "END"]
        assert len(ids) == len(set(ids)) > 2
        (kept,) = database.execute(
            "SELECT COUNT(*) FROM _millstream_changes WHERE op <> '?'"
        ).fetchone()
        (made,) = database.execute(
            "SELECT seq FROM sqlite_sequence WHERE name = '_millstream_changes'"
        ).fetchone()
        assert made > 20
        assert kept < made
    database.close()


def test_what_is_wrong_is_told_in_one_line(tmp_path):
    path = tmp_path / "shop.db"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE t (a INT)")
    database.close()
    for options, words in (((), "no primary key"), (("--tables", "x"), "no table of")):
        process = capture(path, tmp_path, "--check", *options)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        assert words in err


def test_the_program_of_the_document_runs(tmp_path):
    document = Path(__file__).parents[4] / "docs" / "capture-sqlite.md"
    (program,) = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
