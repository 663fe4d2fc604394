"""What an app costs that has nothing to do: memory and CPU of all its processes, on Spark and on the engine `local`.

    python benchmarks/idle_app.py [--seconds 60] [--warm 75] [--engines spark local]

The app has one window over one topic, and has processed a few records. Then nothing arrives: after `--warm` seconds, in
which Spark ends workers that nobody needs, CPU is counted for `--seconds`. Memory is that of all processes of
the run, a page that several share counted once, at the end; without the program that measures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from _measure import TICKS, table, tree_cpu_s, tree_memory_mib

import millstream as ms

RECORDS = 2_000
STARTS_S = 300.0


def declare(folder: Path) -> ms.App:
    """Declare the app."""
    app = ms.App("idle", log=folder)
    clicks = app.topic("clicks", {"ad": str, "at": datetime}, key="ad").stream(time="at")
    clicks.window(ms.tumbling("1 minute"), by="ad").emit("update").agg(n=ms.count()).view("counts")
    return app


def contender(folder: Path, engine: str, java_options: str) -> None:
    """Run the app until the program that measures kills it."""
    settings = {"spark.driver.extraJavaOptions": java_options} if java_options else None
    declare(folder).run(engine=engine, settings=settings, show=False)  # type: ignore[arg-type]


def commands(root: int) -> dict[int, str]:
    """Return what runs below a process, and itself."""
    parents, names = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            line = (entry / "cmdline").read_bytes().split(b"\0")
            threads = int(fields[17])
        except OSError:
            continue
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        names[pid] = f"{' '.join(word.decode() for word in line[:3])[:60]}, {threads} threads"
    found = {}
    for pid, words in names.items():
        at = pid
        while at in parents and at != root:
            at = parents[at]
        if at == root:
            found[pid] = words
    return found


def memory_of(pid: int) -> tuple[int, int]:
    """Return the PSS and the private memory of a process, in MiB."""
    figures = {"Pss": 0, "Private_Clean": 0, "Private_Dirty": 0}
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    for line in lines:
        name, _, rest = line.partition(":")
        if name in figures:
            figures[name] = int(rest.split()[0])
    return figures["Pss"] >> 10, (figures["Private_Clean"] + figures["Private_Dirty"]) >> 10


def used_s(pid: int) -> float:
    """Return the CPU seconds of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / TICKS


def measure(engine: str, given: argparse.Namespace) -> dict[str, float]:
    """Run the app, let it become idle, and return what it then costs."""
    with tempfile.TemporaryDirectory(prefix="millstream-idle-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with ms.connect(folder) as log:
            log.create_topic("clicks", partitions=4)
            with log.producer() as producer:
                for number in range(RECORDS):
                    value = {"ad": str(number % 50), "at": f"2026-01-01T12:{number % 60:02}:00Z"}
                    producer.send("clicks", value, key=str(number % 50))
        options = given.java_options if engine == "spark" else ""
        command = [
            sys.executable,
            __file__,
            f"--java-options={options}",
            "--contender",
            name,
            engine,
        ]
        began = time.monotonic()
        with subprocess.Popen(command) as running:
            while time.monotonic() - began < STARTS_S:
                try:
                    if ms.view("counts", log=folder).scan().height:
                        break
                except ms.MillstreamError:
                    pass
                time.sleep(0.2)
            started_s = time.monotonic() - began
            time.sleep(given.warm)
            before, each = (
                tree_cpu_s(running.pid),
                {pid: used_s(pid) for pid in commands(running.pid)},
            )
            time.sleep(given.seconds)
            cpu_s = tree_cpu_s(running.pid) - before
            mib = tree_memory_mib(running.pid)
            for pid, words in commands(running.pid).items() if given.details else ():
                pss, private = memory_of(pid)
                share = (used_s(pid) - each.get(pid, 0.0)) / given.seconds * 100
                print(f"  {pss:5} MiB PSS, {private:5} private, {share:5.1f} %: {words}")
            running.kill()
            running.wait()
        time.sleep(2)  # the JVM notices, and ends
    return {"first rows, s": started_s, "memory, MiB": mib, "CPU, %": cpu_s / given.seconds * 100}


def main() -> None:
    """Measure each engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm", type=float, default=75.0)
    parser.add_argument("--engines", nargs="+", default=["spark", "local"])
    parser.add_argument("--details", action="store_true", help="list the processes")
    parser.add_argument("--java-options", default="", help="further options of Spark's JVM")
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contender:
        contender(Path(given.contender[0]), given.contender[1], given.java_options)
        return
    rows = []
    for engine in given.engines:
        found = measure(engine, given)
        rows.append([engine, *(round(value, 1) for value in found.values())])
        print(json.dumps({"engine": engine, **found}), file=sys.stderr)
    table("An idle app", ["engine", "first rows, s", "memory, MiB", "CPU of a core, %"], rows)


if __name__ == "__main__":
    main()
