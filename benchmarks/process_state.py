"""A function over the state of keys: updates per CPU-second, by row and in frames, beside PySpark's transformWithState.

    python benchmarks/process_state.py [--keys 1000000] [--rows 2000000] [--batch 1000000] [--peer-rows 200000] [--no-peer]

The function counts the rows of a key and gives the count: it reads and writes a value for each row. Keys are random. First all keys
are put into state, which is not measured; then rows of random keys come in batches.

"frames" and "by row" are the step alone, in one process, with its state in files of a folder: what a stage does with a batch after it
was decoded and divided. "peer" is the same function in transformWithState with RocksDB, in a job over parquet files with two cores, and
"job by row", "job in frames" are ours in a job over a log of JSON, with the state of all keys first: the CPU of all processes between the
first measured batch and the last, so without start, and with reading. Seconds are of CPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl
from _measure import run_apart, spread, table, tree_cpu_s

import millstream as ms
from millstream.kernels.frames import TIME
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.operator_state import OperatorState
from millstream.object_store.folder import FolderStore
from millstream.spark.stages.run_files import RunFiles

START_US = 1_767_225_600_000_000
SCHEMA = {"key": pl.Int64, "count": pl.Int64}
LOADED_AT_ONCE = 1_000_000


class Frames(ms.FrameFunction):
    count = ms.value_state(pl.Int64, default=0)

    def on_rows(self, context, rows, state):
        found = rows.group_by("__key").agg(pl.len().cast(pl.Int64).alias("more"))
        state = state.join(found, on="__key", maintain_order="left")
        state = state.with_columns(pl.col("count") + pl.col("more"))
        context.emit(state.select("__key", "key", "count"))
        return state


class ByRow(ms.ProcessFunction):
    count = ms.value_state(pl.Int64, default=0)

    def on_row(self, context, row):
        context.state.count += 1
        context.emit({"key": row["key"], "count": context.state.count})


FUNCTIONS = {"frames": Frames, "rows": ByRow}


def kernel(kind):
    fields = {"key": int, "at": datetime}
    events = ms.App("p", log="unused").topic("t", fields, key="key").stream(time="at")
    return events.process(FUNCTIONS[kind](), by="key", schema=SCHEMA).node.kernel


def rows_of(keys, first):
    at = START_US + first + np.arange(len(keys))
    frame = pl.DataFrame({"key": keys, "at": at, TIME: at})
    return frame.with_columns(pl.col("at").cast(pl.Datetime("us", "UTC")))


def step_alone(kind, keys, rows, batch):
    """Return the CPU seconds of each batch, and how many bytes of state there are."""
    step, spent, done = kernel(kind), [], 0
    folder = Path(tempfile.mkdtemp(prefix="process-state-"))
    try:
        store = RunFiles(FolderStore(folder), 0)
        stored, before = None, START_US - 1
        dice = np.random.default_rng(3)

        def one(given, prepared=None):
            nonlocal stored, before, done
            until = START_US + done + len(given) + 1
            table_in = step.prepare(rows_of(given, done)).table
            begun = time.process_time()
            state = OperatorState.from_message(stored, store)
            result = step.process(state, {0: [table_in]}, BatchContext(before, until, seed=7))
            store.sync()
            spent.append(time.process_time() - begun)
            assert result.rows.height
            stored, before = json.loads(json.dumps(state.to_message())), until
            done += len(given)

        loader, step = step, kernel("frames")
        for start in range(0, keys, LOADED_AT_ONCE):
            one(np.arange(start, min(start + LOADED_AT_ONCE, keys)))
        step, spent[:] = loader, []
        for _ in range(rows // batch):
            one(dice.integers(0, keys, batch))
        size = OperatorState.from_message(stored, store).size_bytes
    finally:
        shutil.rmtree(folder)
    return spent, size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--batch", type=int, default=1_000_000)
    parser.add_argument("--row-batch", type=int, default=100_000)
    options = parser.parse_args()
    lines = []
    for kind, rows, batch in (
        ("frames", options.rows, options.batch),
        ("rows", 3 * options.row_batch, options.row_batch),
    ):
        spent, size = step_alone(kind, options.keys, rows, batch)
        rates = [batch / each for each in spent]
        lines.append([kind, f"{batch:,}", spread(spent, 2), spread(rates, 0), size >> 20])
        print(lines[-1], flush=True)
    header = ["step alone", "rows of a batch", "CPU-s of a batch", "updates per CPU-s", "state, MiB"]
    table(f"{options.keys:,} keys", header, lines)


if __name__ == "__main__":
    main()
