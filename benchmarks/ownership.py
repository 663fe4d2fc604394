"""A folder written by its owner, beside the same folder written by a process that has joined it.

One acknowledged record at a time, on both sides in turns; columns (``send_many``); and how long it
takes from ``kill -9`` of the owner until a guest's next record is acknowledged. The sides are two
processes of this program, so that each has a Python of its own.

    python benchmarks/ownership.py [--seconds 2] [--records 500000] [--rounds 3] [--kills 20]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _measure import table

VALUE = b"x" * 100


class Side:
    """A process that does what it is told, a line at a time."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--side", name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, what: str, amount: float = 0) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, amount]) + "\n")
        self._process.stdin.flush()

    def told(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, what: str, amount: float = 0) -> Any:
        self.tell(what, amount)
        return self.told()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self) -> None:
        self._process.communicate(timeout=60)


def side(name: str, folder: Path) -> None:
    """Be one of the two processes."""
    import pyarrow as pa

    import millstream as ms

    with ms.connect(folder) as log:
        log.create_topic(name, exist_ok=True)
        producer = log.producer(linger_ms=0)
        producer.send(name, VALUE).result()
        for line in sys.stdin:
            what, amount = json.loads(line)
            found: Any = None
            if what == "single":
                found = []
                end_s = time.perf_counter() + amount
                while (began_s := time.perf_counter()) < end_s:
                    producer.send(name, VALUE).result()
                    found.append(time.perf_counter() - began_s)
            elif what == "bulk":
                values = pa.array([VALUE] * int(amount), pa.binary())
                began_s = time.perf_counter()
                producer.send_many(name, values=values).result()
                found = time.perf_counter() - began_s
            elif what == "after":  # when a record is acknowledged that was sent after a moment
                producer.send(name, VALUE).result()
                found = time.monotonic() - amount
            print(json.dumps(found), flush=True)


def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as work:
        folder = Path(work) / "data"
        owner = Side(folder, "owner")
        owner.ask("ready")
        guest = Side(folder, "guest")
        guest.ask("ready")
        singles: dict[str, list[float]] = {"owner": [], "guest": []}
        bulks: dict[str, list[float]] = {"owner": [], "guest": []}
        for _ in range(options.rounds):
            for one in (owner, guest):
                singles[one.name] += one.ask("single", options.seconds)
                bulks[one.name].append(options.records / one.ask("bulk", options.records))
        rows: list[list[object]] = [
            [
                name,
                f"{1e3 * statistics.median(times):.2f}",
                f"{1e3 * statistics.quantiles(times, n=100)[98]:.2f}",
                f"{len(times) / (options.seconds * options.rounds):,.0f}",
                f"{statistics.median(bulks[name]):,.0f}",
            ]
            for name, times in singles.items()
        ]
        header = ["side", "p50 ms", "p99 ms", "acknowledged/s", "columns, records/s"]
        table("one acknowledged record at a time, and columns", header, rows)
        taken = sorted(_take_overs(folder, owner, guest, options.kills))
        print(
            f"take-over after kill -9, {len(taken)} times: p50 {1e3 * statistics.median(taken):.0f} "
            f"ms, most {1e3 * taken[-1]:.0f} ms"
        )


def _take_overs(folder: Path, owner: Side, guest: Side, kills: int) -> list[float]:
    found = []
    for _ in range(kills):
        began_s = time.monotonic()
        owner.kill()
        found.append(guest.ask("after", began_s))
        owner, guest = guest, Side(folder, "guest")
        guest.ask("ready")
    owner.end()
    guest.end()
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        side(sys.argv[2], Path(sys.argv[3]))
    else:
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.add_argument("--seconds", type=float, default=2.0)
        parser.add_argument("--records", type=int, default=500_000)
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--kills", type=int, default=20)
        measure(parser.parse_args())
