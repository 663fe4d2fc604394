"""What deduplication costs over 0, 1 and 10 million ids held: exact, Bloom, and Bloom with a check.

In process, one bucket, no JVM: the operator with runs as Arrow files in a folder, memory-mapped as
they are in a job. A batch is 20,000 new ids; the second table is a stream with one repeat in ten.
Written bytes are those of all runs of the batches measured.

    python benchmarks/dedup_growth.py [--held 0 1000000 10000000] [--batches 25]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from _measure import table

from millstream import bloom
from millstream.kernels.dedup.operator import Dedup
from millstream.kernels.frames import TIME
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import Run, decode_run, encode_run
from millstream.kernels.time.watermarks import NO_WATERMARK

HOUR_US = 3_600_000_000
BATCH_IDS = 20_000
LOAD_IDS = 500_000


class FileRuns:
    """Runs as files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number, self.written, self.open = folder, 0, 0, {}

    def load(self, run: Run) -> pa.Table:
        return self.open[run.name]

    def save(self, slot: int, rows: pa.Table) -> Run:
        self.number += 1
        encoded = encode_run(rows)
        path = self.folder / str(self.number)
        path.write_bytes(encoded)
        self.written += len(encoded)
        self.open[str(self.number)] = decode_run(pa.memory_map(str(path)))
        return Run(str(self.number), slot, rows.num_rows, len(encoded))

    def drop(self, run: Run) -> None:
        del self.open[run.name]
        (self.folder / run.name).unlink()


def kernels(held: int) -> dict[str, Dedup]:
    expect = max(held, 1_000_000)

    def one(filters) -> Dedup:
        rule = filters and filters.rule(HOUR_US, 0, 1)
        return Dedup(
            "dedup",
            ("id",),
            lateness_us=0,
            side_output=False,
            types=("Int64",),
            within_us=HOUR_US,
            bloom=rule,
        )

    return {
        "exact": one(None),
        "bloom": one(bloom(fpr=1e-4, rotate="15 minutes", expect=expect)),
        "checked": one(bloom(fpr=1e-2, rotate="15 minutes", expect=expect, exact_check=True)),
    }


class Stream:
    """Feeds one operator; ids are scattered numbers, their times are even over the horizon."""

    def __init__(self, kernel: Dedup, folder: Path, held: int) -> None:
        self.kernel, self.runs = kernel, FileRuns(folder)
        self.message = None
        self.now = 0
        self.step_us = HOUR_US // max(held, 1_000_000)
        while self.now < held:
            self.feed(self.numbers(min(LOAD_IDS, held - self.now)))
        self.runs.written = 0

    def numbers(self, count: int) -> np.ndarray:
        self.now += count
        return np.arange(self.now - count, self.now)

    def feed(self, numbers: np.ndarray):
        now_us = self.now * self.step_us
        ids = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(1)
        rows = pl.DataFrame({"id": ids.astype(np.int64), TIME: numbers * self.step_us})
        state = OperatorState.from_message(self.message, self.runs)
        outcome = self.kernel.process(state, {0: [rows]}, BatchContext(NO_WATERMARK, now_us))
        self.message = state.to_message()
        self.size_bytes = state.size_bytes
        return outcome


def one_batch(stream: Stream, batches: int) -> list[float]:
    taken = []
    for _ in range(batches):
        numbers = stream.numbers(BATCH_IDS)
        started = time.process_time()
        stream.feed(numbers)
        taken.append((time.process_time() - started) * 1e3)
    return taken


def cpu_per_million(stream: Stream, events: int = 1_000_000, batch: int = 100_000) -> float:
    dice = np.random.default_rng(3)
    used = 0.0
    for _ in range(events // batch):
        new = stream.numbers(batch * 9 // 10)
        near = max(0, stream.now - 1_000_000)
        again = dice.integers(near, stream.now, batch // 10)
        numbers = dice.permutation(np.concatenate([new, again]))
        started = time.process_time()
        stream.feed(numbers)
        used += time.process_time() - started
    return used * 1e6 / events


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--held", type=int, nargs="+", default=[0, 1_000_000, 10_000_000])
    parser.add_argument("--stores", nargs="+", default=["exact", "bloom", "checked"])
    parser.add_argument("--batches", type=int, default=25)
    options = parser.parse_args()
    rows = []
    for held in options.held:
        for name in options.stores:
            kernel = kernels(held)[name]
            with tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder:
                stream = Stream(kernel, Path(folder), held)
                taken = one_batch(stream, options.batches)
                written = stream.runs.written / options.batches / BATCH_IDS
                size = stream.size_bytes / stream.now
                cpu_s = cpu_per_million(stream)
            rows.append(
                [
                    f"{held:,}",
                    name,
                    f"{statistics.median(taken):.1f}",
                    f"{max(taken):.1f}",
                    f"{written:.0f}",
                    f"{size:.1f}",
                    f"{cpu_s:.2f}",
                ]
            )
    header = [
        "ids held",
        "store",
        "batch p50 CPU ms",
        "max",
        "bytes written per id",
        "bytes per id",
    ]
    header += ["CPU s per million events, 10 % repeats"]
    table(f"batches of {BATCH_IDS:,} ids over ids held", header, rows)


if __name__ == "__main__":
    main()
