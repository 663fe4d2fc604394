"""A function over the state of keys: updates per CPU-second, by row and in frames, beside PySpark's transformWithState.

    python benchmarks/process_state.py [--keys 1000000] [--rows 4000000] [--batch 1000000] [--row-batch 100000]
        [--job-rows 200000] [--job-batches 2] [--rounds 1] [--jobs-only]

The function counts the rows of a key, and gives the count: it reads and writes a value for each row. Keys are random. In frames it groups
rows and joins the counts, in polars; or (``numbers``) it counts how often each key's number comes, in numpy.

The step alone, in one process, with its state in files of a folder: what a stage does with a batch after it was decoded and
divided. First all keys are put into state, which is not measured; then rows of random keys come in batches.

Jobs (``_process_state_jobs.py``): the same function in our job by row and in frames, and in transformWithState with RocksDB, two cores
each; state is empty first. CPU is that of all processes in a second pass, with reading and the commit of each batch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl
from _measure import run_apart, spread, table

import millstream as ms
from millstream.engine.stages.run_files import RunFiles
from millstream.kernels.frames import TIME
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.operator_state import OperatorState
from millstream.object_store.folder import FolderStore

HERE = Path(__file__).parent
START_US = 1_767_225_600_000_000
SCHEMA = {"key": pl.Int64, "count": pl.Int64}
LOADED_AT_ONCE = 1_000_000
STARTS = (
    5  # Spark gives a worker ten seconds to connect, which are not always enough on a busy machine
)


class Frames(ms.FrameFunction):
    count = ms.value_state(pl.Int64, default=0)

    def on_rows(self, context, rows, state):
        found = rows.group_by("__key").agg(pl.len().cast(pl.Int64).alias("more"))
        state = state.join(found, on="__key", maintain_order="left")
        state = state.with_columns(pl.col("count") + pl.col("more"))
        context.emit(state.select("__key", "key", "count"))
        return state


class Numbers(Frames):
    """The same, counted by the numbers of the keys, which are those of the rows of ``state``."""

    def on_rows(self, context, rows, state):
        more = np.bincount(rows["__key"].to_numpy(), minlength=state.height)
        state = state.with_columns(pl.col("count") + pl.Series(more))
        context.emit(state.select("__key", "key", "count"))
        return state


class ByRow(ms.ProcessFunction):
    count = ms.value_state(pl.Int64, default=0)

    def on_row(self, context, row):
        context.state.count += 1
        context.emit({"key": row["key"], "count": context.state.count})


FUNCTIONS = {"frames": Frames, "numbers": Numbers, "rows": ByRow}


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

        def one(given):
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


def jobs(options) -> None:
    """Run the jobs, one after the other, and print what they took."""
    folder = Path(tempfile.mkdtemp(prefix="process-state-jobs-"))
    try:
        _write_input(folder, options)
        spent = {kind: [] for kind in ("frames", "rows", "peer")}
        for _ in range(options.rounds):
            for kind, found in spent.items():
                given = (kind, folder, options.job_batches, options.job_rows)
                done = _started(*given)
                found.append(done["cpu_s"])
                print(
                    f"  job {kind}: {done['cpu_s']:.2f} CPU-s, {done['rows']:,} rows out",
                    flush=True,
                )
    finally:
        shutil.rmtree(folder)
    lines = []
    for kind, found in spent.items():
        rates = [options.job_rows / one for one in found]
        ratios = [theirs / one for theirs, one in zip(spent["peer"], found, strict=True)]
        lines.append([kind, spread(found, 2), spread(rates, 0), spread(ratios, 1)])
    header = ["job", "CPU-s", "rows per CPU-s", "peer / this"]
    table(f"{options.job_rows:,} rows of {options.keys:,} keys", header, lines)


def _started(*given) -> dict:
    """Return what a job took, started again where Spark's worker did not connect in time."""
    for _ in range(STARTS - 1):
        try:
            return run_apart(str(HERE / "_process_state_jobs.py"), *given)
        except SystemExit as error:
            if "Python worker failed to connect back" not in str(error):
                raise
            print("  (Spark's worker did not connect in time: again)", flush=True)
    return run_apart(str(HERE / "_process_state_jobs.py"), *given)


def _write_input(folder, options) -> None:
    keys = np.random.default_rng(4).integers(0, options.keys, options.job_rows)
    rows = rows_of(keys, 0).drop(TIME)
    (folder / "parquet").mkdir()
    per_batch = options.job_rows // options.job_batches
    for number in range(options.job_batches):
        part = rows[number * per_batch : (number + 1) * per_batch]
        part.write_parquet(folder / "parquet" / f"{number}.parquet")
    with ms.connect(folder / "log") as log:
        log.create_topic("events", partitions=2)
        with log.producer() as producer:
            for number, (key, at) in enumerate(rows.iter_rows()):
                value = json.dumps({"key": key, "at": at.isoformat()}).encode()
                producer.send("events", value, key=str(key), partition=number % 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--batch", type=int, default=1_000_000)
    parser.add_argument("--row-batch", type=int, default=100_000)
    parser.add_argument("--job-rows", type=int, default=200_000)
    parser.add_argument("--job-batches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--jobs-only", action="store_true")
    options = parser.parse_args()
    if not options.jobs_only:
        steps_alone(options)
    if options.rounds:
        jobs(options)


def steps_alone(options) -> None:
    """Measure the step by itself, and print what it took."""
    lines = []
    for kind, rows, batch in (
        ("frames", options.rows, options.batch),
        ("numbers", options.rows, options.batch),
        ("rows", 3 * options.row_batch, options.row_batch),
    ):
        spent, size = step_alone(kind, options.keys, rows, batch)
        rates = [batch / each for each in spent]
        lines.append([kind, f"{batch:,}", spread(spent, 2), spread(rates, 0), size >> 20])
        print(lines[-1], flush=True)
    header = [
        "step alone",
        "rows of a batch",
        "CPU-s of a batch",
        "updates per CPU-s",
        "state, MiB",
    ]
    table(f"{options.keys:,} keys", header, lines)


if __name__ == "__main__":
    main()
