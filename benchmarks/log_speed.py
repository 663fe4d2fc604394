"""The log beside SQLite and a plain file: appending, single acknowledged appends, and reading.

All sides get the same records in the same program. "Raw" writes the bytes that the log writes, in
pieces as large as the log's commits, with one fdatasync for each: what the disk allows.

    python benchmarks/log_speed.py [--records 2000000] [--rounds 5] [--only single --sync-ms 4]

With --sync-ms every fsync and fdatasync of all sides takes so much longer, as on a slower disk; it
needs a C compiler.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from _measure import table

import millstream as ms
from millstream.log.reader import LogReader

THREADS = 8
SINGLE_S = 3.0
SQL = "INSERT INTO records (key, value, at) VALUES (NULL, ?, ?)"


SLOW_SYNC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
static void wait_a_while(void) {
    struct timespec pause = {0, SYNC_NS};
    nanosleep(&pause, 0);
}
int fsync(int file) {
    wait_a_while();
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}
int fdatasync(int file) {
    wait_a_while();
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(file);
}
"""


def run_with_slow_syncs(sync_ms: float) -> int:
    """Run this program again with a library before the C library's that waits at each sync."""
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder:
        source, library = Path(folder) / "slow.c", Path(folder) / "slow.so"
        source.write_text(SLOW_SYNC.replace("SYNC_NS", str(int(sync_ms * 1e6))))
        build = ["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        subprocess.run(build, check=True)
        rest = [part for part in sys.argv if not part.startswith("--sync-ms")]
        rest = [part for part in rest if part != f"{sync_ms:g}"]
        print(f"every sync takes {sync_ms:g} ms longer")
        sys.stdout.flush()
        env = {**os.environ, "LD_PRELOAD": str(library)}
        return subprocess.run([sys.executable, *rest], env=env, check=False).returncode


class Clock:
    """Wall and CPU seconds of a stretch of work; the CPU of all threads counts."""

    def __enter__(self) -> Self:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s = time.perf_counter() - self._wall
        self.cpu_s = time.process_time() - self._cpu


def values(count: int, size: int, *, spread: int = 0) -> pa.Array:
    """Random bytes of ``size`` ± ``spread``; made before anything is measured."""
    dice = np.random.default_rng(1)
    sizes = (
        np.full(count, size) if not spread else dice.integers(size - spread, size + spread, count)
    )
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    data = dice.integers(32, 127, int(offsets[-1]), np.uint8)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


# -- appending ---------------------------------------------------------------------------------


def ours(folder: Path, payload: pa.Array, piece: int) -> Clock:
    with ms.connect(folder) as log, log.producer() as producer:
        log.create_topic("t")
        with Clock() as clock:
            for start in range(0, len(payload), piece):
                producer.send_many("t", values=payload.slice(start, piece))
            producer.flush()
    return clock


def raw(folder: Path, total_bytes: int, commit_bytes: int) -> Clock:
    folder.mkdir()
    data = os.urandom(commit_bytes)
    handle = os.open(folder / "raw", os.O_CREAT | os.O_WRONLY)
    with Clock() as clock:
        for _ in range(max(1, total_bytes // commit_bytes)):
            os.write(handle, data)
            os.fdatasync(handle)
    os.close(handle)
    return clock


def plain_file(folder: Path, payload: pa.Array) -> Clock:
    folder.mkdir()
    rows = payload.to_pylist()
    with Clock() as clock, (folder / "file").open("wb") as file:
        for row in rows:
            file.write(len(row).to_bytes(4, "big"))
            file.write(row)
        file.flush()
        os.fdatasync(file.fileno())
    return clock


def opened(folder: Path, synchronous: str) -> sqlite3.Connection:
    folder.mkdir(exist_ok=True)
    connection = sqlite3.connect(
        folder / "s.db", isolation_level=None, check_same_thread=False, timeout=60
    )
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute(
        "CREATE TABLE IF NOT EXISTS records "
        "(id INTEGER PRIMARY KEY, key BLOB, value BLOB, at INTEGER)"
    )
    return connection


def sqlite(folder: Path, payload: pa.Array, piece: int, synchronous: str) -> Clock:
    connection = opened(folder, synchronous)
    rows = [(row, 0) for row in payload.to_pylist()]
    with Clock() as clock:
        for start in range(0, len(rows), piece):
            connection.execute("BEGIN")
            connection.executemany(SQL, rows[start : start + piece])
            connection.execute("COMMIT")
    connection.close()
    return clock


def append_part(base: Path, count: int, rounds: int, piece: int) -> None:
    payload = values(count, 200)
    few = payload.slice(0, count // 10)
    figures: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds):
        folder = base / f"append{number}"
        folder.mkdir()

        def note(name: str, clock: Clock, records: int) -> None:
            figures.setdefault(name, []).append((records / clock.wall_s, records / clock.cpu_s))

        note("log, synced", ours(folder / "log", payload, piece), count)
        size = sum(path.stat().st_size for path in (folder / "log").glob("t/*/*/*.log"))
        note("raw, 1 MiB commits", raw(folder / "raw1", size, 1 << 20), count)
        note("raw, 16 MiB commits", raw(folder / "raw16", size, 16 << 20), count)
        note("raw, 64 MiB commits", raw(folder / "raw64", size, 64 << 20), count)
        note("plain file, one sync", plain_file(folder / "plain", few), len(few))
        for mode in ("FULL", "NORMAL"):
            clock = sqlite(folder / mode, few, 10_000, mode)
            note(f"SQLite {mode}, 10,000 per commit", clock, len(few))
        subprocess.run(["rm", "-rf", str(folder)], check=True)
    show(f"appending {count:,} records of 200 bytes", figures, "log, synced")


def show(title: str, figures: dict[str, list[tuple[float, float]]], mine: str) -> None:
    base_wall = statistics.median(wall for wall, _ in figures[mine])
    base_cpu = statistics.median(cpu for _, cpu in figures[mine])
    rows = []
    for name, found in figures.items():
        wall = sorted(one for one, _ in found)
        cpu = sorted(one for _, one in found)
        rows.append(
            [
                name,
                f"{statistics.median(wall):,.0f}",
                f"{wall[0]:,.0f}-{wall[-1]:,.0f}",
                f"{statistics.median(cpu):,.0f}",
                f"{base_wall / statistics.median(wall):.2f}",
                f"{base_cpu / statistics.median(cpu):.2f}",
            ]
        )
    header = ["", "records/s", "spread", "records/CPU-s", "log/this, time", "log/this, CPU"]
    table(title, header, rows)


# -- single appends ----------------------------------------------------------------------------


def from_threads(work: Callable[[], None]) -> float:
    """Let 8 threads do ``work`` again and again; return how often per second in all."""
    done = [0] * THREADS
    stop = time.perf_counter() + SINGLE_S

    def run(number: int) -> None:
        while time.perf_counter() < stop:
            work()
            done[number] += 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / SINGLE_S


def single_part(base: Path, rounds: int) -> None:
    value = os.urandom(200)
    figures: dict[str, list[float]] = {}
    for number in range(rounds):
        folder = base / f"single{number}"
        with ms.connect(folder / "log") as log, log.producer() as producer:
            log.create_topic("t")
            rate = from_threads(lambda: producer.send("t", value).result())
            figures.setdefault("log, send().result()", []).append(rate)
        for mode in ("FULL", "NORMAL"):
            own = threading.local()
            opened(folder / mode, mode).close()

            def one(
                place: Path = folder / mode, mode: str = mode, own: threading.local = own
            ) -> None:
                if not hasattr(own, "connection"):
                    own.connection = opened(place, mode)
                own.connection.execute(SQL, (value, 0))

            figures.setdefault(f"SQLite {mode}, one commit each", []).append(from_threads(one))
        subprocess.run(["rm", "-rf", str(folder)], check=True)
    mine = statistics.median(figures["log, send().result()"])
    rows = [
        [
            name,
            f"{statistics.median(found):,.0f}",
            f"{min(found):,.0f}-{max(found):,.0f}",
            f"{mine / statistics.median(found):.1f}",
        ]
        for name, found in figures.items()
    ]
    table(
        f"single acknowledged appends of 200 bytes from {THREADS} threads",
        ["", "per second", "spread", "log / this"],
        rows,
    )


# -- reading -----------------------------------------------------------------------------------


def read_part(base: Path, count: int, rounds: int) -> None:
    figures: dict[str, list[tuple[float, float]]] = {}
    for name, spread in (("100-byte values", 0), ("80 to 120 bytes", 20)):
        payload = values(count, 100, spread=spread)
        folder = base / f"read{spread}"
        ours(folder, payload, 100_000)
        for _ in range(rounds):
            for what, columns in (
                ("all columns", ("offset", "timestamp", "key", "value")),
                ("no values", ("offset", "timestamp")),
            ):
                with Clock() as clock:
                    found = sum(
                        batch.num_rows
                        for batch in LogReader(folder).read("t", 0, 0, count, columns=columns)
                    )
                assert found == count
                figures.setdefault(f"log, {name}, {what}", []).append(
                    (count / clock.wall_s, count / clock.cpu_s)
                )
    few = values(count // 5, 100)
    sqlite(base / "sqlite", few, 10_000, "NORMAL")
    connection = opened(base / "sqlite", "NORMAL")
    for _ in range(rounds):
        with Clock() as clock:
            for _row in connection.execute("SELECT id, at, key, value FROM records ORDER BY id"):
                pass
        figures.setdefault("SQLite, rows", []).append(
            (len(few) / clock.wall_s, len(few) / clock.cpu_s)
        )
    connection.close()
    show(f"reading {count:,} records", figures, "log, 100-byte values, all columns")


MEMORY = """
import resource, sys
from millstream.log.reader import LogReader
reader = LogReader(sys.argv[1])
start, end = reader.offsets("t")[0]
first = next(reader.read("t", 0, start, end)).num_rows
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
total = sum(batch.num_rows for batch in reader.read("t", 0, start, end))
assert total == end
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def memory_part(base: Path) -> None:
    rows = []
    for segment_mib in (128, 1024):
        folder = base / f"memory{segment_mib}"
        with ms.connect(folder) as log, log.producer() as producer:
            log.create_topic("t", settings={"segment.bytes": str(segment_mib << 20)})
            payload = values(1_000_000, 1000)
            producer.send_many("t", values=payload).result()
        largest = max(path.stat().st_size for path in folder.glob("t/*/*/*.log"))
        grown = subprocess.run(
            [sys.executable, "-c", MEMORY, str(folder)], capture_output=True, text=True, check=True
        ).stdout.strip()
        rows.append([f"{largest >> 20}", grown])
        subprocess.run(["rm", "-rf", str(folder)], check=True)
    table("memory of a reader", ["largest segment, MiB", "growth while reading all, MiB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--piece", type=int, default=200_000, help="records per send_many")
    parser.add_argument("--only", choices=["append", "single", "read", "memory"])
    parser.add_argument("--sync-ms", type=float)
    options = parser.parse_args()
    if options.sync_ms:
        sys.exit(run_with_slow_syncs(options.sync_ms))
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as name:
        base = Path(name)
        if options.only in (None, "append"):
            append_part(base, options.records, options.rounds, options.piece)
        if options.only in (None, "single"):
            single_part(base, options.rounds)
        if options.only in (None, "read"):
            read_part(base, options.records, options.rounds)
        if options.only in (None, "memory"):
            memory_part(base)


if __name__ == "__main__":
    main()
