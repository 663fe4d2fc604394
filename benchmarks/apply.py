"""Rows per CPU-second into each target, of the applier alone, from a log that is there already.

A capture is written into the log through capture's own writer: 100 transactions that make rows, and as many that
update them, of a table of 8 columns. Then each target is built from the beginning, in a process of its own, some
times over. Rates are changes per second of the CPU of that process and its children; a server's own CPU is beside it.

    python benchmarks/apply.py [--rows 50000] [--repeats 3] [--target sqlite ...]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

TARGETS = ("read", "sqlite", "postgres", "redis", "tantivy", "parquet", "delta", "iceberg")
TRANSACTIONS = 100
COLUMNS = (
    ("id", "int8"),
    ("a", "int4"),
    ("b", "text"),
    ("c", "numeric"),
    ("ts", "timestamptz"),
    ("j", "jsonb"),
    ("f", "bool"),
    ("d", "float8"),
)


def units(rows: int):
    """Units as PostgreSQL's source gives them."""
    from millstream.capture.units import CaptureUnit, TableChange, TableDefinition

    described = [{"name": name, "type": kind} for name, kind in COLUMNS]
    described[3] |= {"length": 18, "scale": 4}
    size = rows // TRANSACTIONS
    for number in range(2 * TRANSACTIONS):
        first = number % TRANSACTIONS * size
        op = "c" if number < TRANSACTIONS else "u"
        contents = [TableDefinition("public", "t", tuple(described), ("id",))] if not number else []
        for key in range(first, first + size):
            row = {
                "id": key,
                "a": key % 1000 + number,
                "b": f"the name of row {key}",
                "c": f"{key}.2500",
                "ts": "2026-01-02T03:04:05.678901Z",
                "j": '{"a": 1, "b": [true, null]}',
                "f": key % 2 == 0,
                "d": key / 7,
            }
            contents.append(TableChange("public", "t", op, ("id",), None, row))
        yield CaptureUnit("transaction", f"p{number}", 1000, iter(contents), {}, {"db": "shop"})


def fill(folder: Path, rows: int) -> None:
    import millstream as ms
    from millstream.capture.envelope import CaptureTopics
    from millstream.capture.writer import CaptureWriter

    topics = CaptureTopics("shop")
    with ms.connect(folder) as log, CaptureWriter(log, topics, "postgresql", lambda: 1) as writer:
        for unit in units(rows):
            writer.write([unit])


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(folder: str, url: str) -> None:
    """Build one target in this process, and print changes and CPU seconds."""
    import millstream as ms

    if url == "read":
        from millstream.capture.apply.change_stream import ChangeStream
        from millstream.capture.table_patterns import TablePatterns

        began, count = cpu_s(), 0
        stream = ChangeStream(folder, "shop", TablePatterns(("*",), "*"))
        while (one := stream.next()) is not None:
            count += sum(1 for _ in one.changes)
        print(json.dumps([count, cpu_s() - began]))
        return
    run = ms.apply("shop", url, log=folder)
    run.target().close()  # what is imported is not counted
    began = cpu_s()
    status = run.run(until="caught-up")
    print(json.dumps([status.changes, cpu_s() - began]))


def address(kind: str, folder: Path, number: int, stack: ExitStack) -> str:
    if kind == "read":
        return "read"
    if kind == "postgres":
        from millstream.testing.postgres import PostgresServer

        return stack.enter_context(PostgresServer()).url(f"copy{number}")
    if kind == "redis":
        from redis_server import RedisServer

        made = folder / f"redis{number}"
        made.mkdir()
        return stack.enter_context(RedisServer(made)).url
    return f"{kind}:///{folder}/{kind}{number}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--measure", nargs=2, metavar=("LOG", "URL"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(*given.measure)
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(folder / "log", given.rows)
        print("| target | changes per CPU-second, median (lowest to highest) |\n|---|---|")
        for kind in given.target:
            rates = []
            for number in range(given.repeats):
                with ExitStack() as stack:
                    url = address(kind, folder, number, stack)
                    command = [sys.executable, __file__, "--measure", str(folder / "log"), url]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                changes, seconds = json.loads(done.stdout)
                rates.append(changes / seconds)
            print(
                f"| {kind} | {statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
