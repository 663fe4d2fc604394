"""Records per CPU-second of each source, into a log in a folder: reading, checking and writing, of the process alone.

The same events of five fields, about 100 bytes as JSON, are put outside first: into ten files of a folder, or a stream of a
Redis server. Each source runs in a process of its own, some times over. A server's own CPU is not counted.

    python benchmarks/sources.py [--records 200000] [--repeats 3] [--source csv ...]
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

SOURCES = ("json-lines", "json-lines.gz", "csv", "csv-typed", "parquet", "generate", "redis")
FILES = 10


def events(first: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield events."""
    for n in range(first, first + count):
        yield {
            "id": n,
            "customer": n * 7919 % 100_000,
            "product": f"product-{n % 977}",
            "cents": n * 31 % 100_000,
            "placed": "2026-01-02T03:04:05.678Z",
        }


def put_files(source: str, folder: Path, records: int) -> None:
    """Write the files of a folder."""
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    for number in range(FILES):
        rows = list(events(number * records // FILES, records // FILES))
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        name = folder / f"{number}"
        if source == "json-lines":
            name.with_suffix(".jsonl").write_bytes(lines)
        elif source == "json-lines.gz":
            Path(f"{name}.jsonl.gz").write_bytes(gzip.compress(lines))
        elif source == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), name.with_suffix(".parquet"))
        else:
            with name.with_suffix(".csv").open("w", newline="") as stream:
                writer = csv.DictWriter(stream, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)


def connector_of(source: str, place: str, records: int) -> Any:
    """Return the connector that is measured."""
    import millstream as ms

    if source == "generate":
        schema = {"id": int, "customer": range(100_000), "product": str, "ok": bool, "x": float}
        return ms.generate(schema, count=records)
    if source == "redis":
        return ms.redis_stream(place, "events")
    types = {"id": int, "customer": int, "cents": int} if source == "csv-typed" else None
    return ms.folder(place, key="id", columns=types, settled="0 seconds")


def read(source: str, place: str, log: str, records: int) -> None:
    """Run a source to its end, and print its CPU-seconds."""
    import millstream as ms

    connector = connector_of(source, place, records)
    before = resource.getrusage(resource.RUSAGE_SELF)
    status = ms.source(connector, topic="events", to=log).run(until="caught-up")
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert (status.records, status.dead) == (records, 0), status
    print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def measure(source: str, records: int, repeats: int) -> list[float]:
    """Return records per CPU-second, of each repetition."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place = str(folder / "in")
        Path(place).mkdir()
        if source == "redis":
            sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
            import redis
            import redis_server

            server = stack.enter_context(redis_server.start(folder))
            place, client = server.url, redis.Redis(port=server.port)
            for first in range(0, records, 5000):
                with client.pipeline() as pipe:
                    for event in events(first, min(5000, records - first)):
                        pipe.xadd("events", event)
                    pipe.execute()
        elif source != "generate":
            put_files(source, Path(place), records)
        rates = []
        for number in range(repeats):
            command = [
                sys.executable,
                __file__,
                "--read",
                source,
                place,
                str(folder / f"log{number}"),
            ]
            found = subprocess.run(
                [*command, "--records", str(records)], check=True, stdout=subprocess.PIPE, text=True
            )
            rates.append(records / float(found.stdout))
        return rates


def main() -> None:
    """Measure, or be the process that is measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--source", nargs="*", choices=SOURCES, default=SOURCES)
    parser.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        read(*given.read, given.records)
        return
    for source in given.source:
        rates = measure(source, given.records, given.repeats)
        print(
            f"{source:14} {statistics.median(rates):10,.0f} records per CPU-second "
            f"({min(rates):,.0f} to {max(rates):,.0f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
