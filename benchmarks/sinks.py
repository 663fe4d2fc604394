"""Records per CPU-second of each sink, from a log in a folder: reading, checking and writing, of the process alone.

Events of five fields, about 100 bytes as JSON, are in a topic. Each sink runs in a process of its own, some times over. The CPU
of the server that is written to is not counted.

    python benchmarks/sinks.py [--records 50000] [--repeats 3] [--sink http ...]
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
from typing import Any

SINKS = (
    "http",
    "redis-hashes",
    "redis-stream",
    "mariadb-by-key",
    "mariadb-added",
    "duckdb-by-key",
    "duckdb-added",
    "email",
    "digest",
    "opensearch",
)
TABLE = "CREATE TABLE {name} (id BIGINT{key}, customer INT NOT NULL, product VARCHAR(40), cents BIGINT, placed {time})"


def connector_of(name: str, place: str) -> Any:
    """Return the connector that is measured."""
    import millstream as ms

    if name == "http":
        return ms.to_http(place)
    kind, _, how = name.partition("-")
    if kind in ("mariadb", "duckdb"):
        make = ms.to_mariadb if kind == "mariadb" else ms.to_duckdb
        return make(place, table=how.replace("-", "_"), key="id" if how == "by-key" else None)
    if kind == "opensearch":
        return ms.to_opensearch(place, index="events")
    if kind in ("email", "digest"):
        of = "row" if kind == "email" else "digest"
        given = {"to": "ops@example.com", "sender": "me@example.com", "encryption": "none"}
        return ms.to_email(place, of=of, **given)
    return ms.to_redis(place, **({"hashes": "r:"} if name == "redis-hashes" else {"stream": "s"}))


def write(name: str, place: str, log: str, records: int, number: int) -> None:
    """Run a sink to its end, and print its CPU-seconds."""
    import millstream as ms

    run = ms.sink(connector_of(name, place), topic="events", log=log, name=f"{name}-{number}")
    before = resource.getrusage(resource.RUSAGE_SELF)
    status = run.run(until="caught-up")
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert (status.records, status.dead) == (records, 0), status
    print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def put(log_folder: str, records: int) -> None:
    """Write the topic."""
    import millstream as ms

    with ms.connect(log_folder) as log:
        log.create_topic("events")
        with log.producer() as producer:
            for n in range(records):
                row = {
                    "id": n,
                    "customer": n * 7919 % 100_000,
                    "product": f"product-{n % 977}",
                    "cents": n * 31 % 100_000,
                    "placed": "2026-01-02T03:04:05.678Z",
                }
                producer.send("events", json.dumps(row).encode(), key=b"%d" % n)


def place_of(name: str, stack: ExitStack) -> str:
    """Start what a sink writes to; return its address."""
    kind, _, how = name.partition("-")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    table = how.replace("-", "_")
    key = " PRIMARY KEY" if how == "by-key" else ""
    if kind == "http":
        import http_service

        return str(stack.enter_context(http_service.serving(lambda *_: (200, {}))).url)
    if kind == "mariadb":
        import mariadb_database

        database = mariadb_database.Database(stack.enter_context(mariadb_database.start()))
        database.run(TABLE.format(name=table, key=key, time="DATETIME(3)"))
        return str(database.url())
    if kind == "duckdb":
        import duckdb

        with duckdb.connect(str(folder / "f.duckdb")) as session:
            session.execute(TABLE.format(name=table, key=key, time="TIMESTAMPTZ"))
        return str(folder / "f.duckdb")
    if kind in ("email", "digest"):
        import smtp_server

        return str(stack.enter_context(smtp_server.started()).url)
    if kind == "opensearch":
        import opensearch_server

        return str(stack.enter_context(opensearch_server.start(folder)).url)
    import redis_server

    return str(stack.enter_context(redis_server.start(folder)).url)


def measure(name: str, log: str, records: int, repeats: int) -> list[float]:
    """Return records per CPU-second, of each repetition."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    with ExitStack() as stack:
        place = place_of(name, stack)
        rates = []
        for number in range(repeats):
            command = [sys.executable, __file__, "--run", name, place, log]
            command += ["--records", str(records), "--number", str(number)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rates.append(records / float(done.stdout))
        return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sink", nargs="*", default=SINKS, choices=SINKS)
    parser.add_argument("--run", nargs=3)
    parser.add_argument("--number", type=int, default=0)
    given = parser.parse_args()
    if given.run:
        write(*given.run, given.records, given.number)
        return
    with tempfile.TemporaryDirectory() as folder:
        put(folder, given.records)
        for name in given.sink:
            rates = measure(name, folder, given.records, given.repeats)
            print(
                f"{name}: {statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
            )


if __name__ == "__main__":
    main()
