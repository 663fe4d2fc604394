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

SINKS = ("http", "redis-hashes", "redis-stream")


def connector_of(name: str, place: str) -> Any:
    """Return the connector that is measured."""
    import millstream as ms

    if name == "http":
        return ms.to_http(place)
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


def measure(name: str, log: str, records: int, repeats: int) -> list[float]:
    """Return records per CPU-second, of each repetition."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    with ExitStack() as stack:
        if name == "http":
            import http_service

            place = stack.enter_context(http_service.serving(lambda *_: (200, {}))).url
        else:
            import redis_server

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            place = stack.enter_context(redis_server.start(folder)).url
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
