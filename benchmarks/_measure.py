"""What the benchmarks share: CPU of a process tree, runs in processes of their own, tables."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

TICKS = os.sysconf("SC_CLK_TCK")


def tree_cpu_s(root: int | None = None) -> float:
    """CPU seconds of a process (this one) and all below it, those that have ended included."""
    top = os.getpid() if root is None else root
    parents, used = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = sum(map(int, fields[11:15]))
    return sum(used[pid] for pid in used if _descends(pid, parents, top)) / TICKS


def tree_memory_mib(root: int | None = None) -> int:
    """Memory of a process (this one) and all below it, in MiB; a page that several map counts once.

    Pages of memory-mapped files count while they are in memory and mapped. They are the kernel's to
    take away.
    """
    top = os.getpid() if root is None else root
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    return sum(_pss_kib(pid) for pid in parents if _descends(pid, parents, top)) >> 10


def _pss_kib(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


class MemoryWatch(threading.Thread):
    """Looks at the memory of the tree every so often, and keeps the most that it saw."""

    def __init__(self, every_s: float = 1.0) -> None:
        super().__init__(daemon=True)
        self.mib_max = 0
        self._every_s = every_s
        self._ended = threading.Event()

    def now_mib(self) -> int:
        now = tree_memory_mib()
        self.mib_max = max(self.mib_max, now)
        return now

    def run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.now_mib()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def _descends(pid: int, parents: dict[int, int], root: int) -> bool:
    while pid in parents:
        if pid == root:
            return True
        pid = parents[pid]
    return False


class Meter:
    """Marks moments: wall time and CPU of the tree, since the first mark."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        self.marks.append((time.monotonic(), tree_cpu_s()))

    def between(self, first: int, last: int) -> tuple[float, float]:
        """Wall and CPU seconds between two marks."""
        (wall, cpu), (wall_then, cpu_then) = self.marks[first], self.marks[last]
        return wall_then - wall, cpu_then - cpu


def run_apart(program: str, *arguments: object) -> dict:
    """Run ``program --contender …`` in a process of its own; its last line of output is its result."""
    command = [sys.executable, program, "--contender", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(title: str, header: list[str], rows: list[list[object]]) -> None:
    """Print a plain table."""
    cells = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    print(f"\n{title}")
    for number, row in enumerate(cells):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths))
    sys.stdout.flush()


def spread(values: list[float], digits: int = 1) -> str:
    """Median and range of the values."""
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def plain_spark(
    cores: int,
    *,
    apply_settings: bool = True,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
):
    """A Spark session as a careful user sets it up, without anything of ours; on this machine, or on a cluster."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = (
        SparkSession.builder.master(master or f"local[{cores}]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "4g")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.log.level", "ERROR")
    )
    if apply_settings:
        state = "spark.sql.streaming.stateStore"
        builder = (
            builder.config("spark.sql.shuffle.partitions", str(cores))
            .config(
                f"{state}.providerClass",
                "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
            )
            .config(f"{state}.rocksdb.changelogCheckpointing.enabled", "true")
        )
    for name, value in (settings or {}).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
