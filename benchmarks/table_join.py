"""A stream, or a table's changes, joined with a table that is empty, or has up to 20 million rows.

In process, one bucket, no JVM: the operators of ``stream.lookup(table)`` and ``table.join(table)``, with
runs of state as Arrow files in a folder, memory-mapped as they are in a job. The table has as many rows
as is said, each of a key of its own (a number), a text of 16 characters and a float.
A batch has 10,000 rows with random keys; where the table is empty they find nothing. The joins also keep the rows of the batch.

Bytes per row are those of the files of state when they have the table alone. A second pass over the same
batches shows what the first touch of the files' pages costs; the time over that of an empty table is the second pass's.

    python benchmarks/table_join.py [--rows 0 1000000 20000000] [--batches 25]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from _measure import spread, table

import millstream as ms
from millstream.kernels.frames import ARRIVED, ORDER, TIME
from millstream.kernels.operator import BatchContext, Operator
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import Run, decode_run, write_run

BATCH_ROWS = 10_000
LOAD_ROWS = 500_000
KEYS_OF_NONE = 20_000_000  # from which keys are drawn where there is no table
STREAM, TABLE = {"k": int, "id": int, "n": int}, {"k": int, "text": str, "x": float}


class FileRuns:
    """Runs as files in a folder, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number, self.open = folder, 0, {}

    def load(self, run: Run) -> pa.Table:
        return self.open[run.name]

    def save(self, slot: int, rows: pa.Table) -> Run:
        self.number += 1
        name = str(self.number)
        with (self.folder / name).open("wb") as file:
            write_run(rows, file)
        mapped = pa.memory_map(str(self.folder / name))
        self.open[name] = decode_run(mapped)
        return Run(name, slot, rows.num_rows, mapped.size())

    def drop(self, run: Run) -> None:
        del self.open[run.name]
        (self.folder / run.name).unlink()


def operators() -> dict[str, tuple[Operator, int]]:
    """Return each join, and which of its inputs is the large table."""
    app = ms.App("bench", log="unused")
    events = app.topic("events", STREAM, key="id").stream()
    rows = app.table("rows", TABLE, key="k")
    orders = app.table("orders", STREAM, key="id")
    joins = {
        "stream.lookup": events.lookup(rows, "k"),
        "table.join, inner": orders.join(rows, "k"),
        "table.join, left": orders.join(rows, "k", how="left"),
    }
    return {name: (joined.node.kernel, 1) for name, joined in joins.items()}


@dataclass
class Joined:
    """One operator with its state; what it took for each batch."""

    kernel: Operator
    runs: FileRuns
    message: object = None
    size_bytes: int = 0
    emitted: int = 0
    offset: int = 0
    seconds: list[float] = field(default_factory=list)

    def feed(self, rows: pl.DataFrame, number: int) -> float:
        """Give a batch; return the CPU milliseconds that it took."""
        order = np.arange(self.offset, self.offset + rows.height)
        self.offset += rows.height
        rows = rows.with_columns(
            pl.Series(ORDER, order), pl.Series(ARRIVED, order), pl.lit(0, pl.Int64).alias(TIME)
        )
        began = time.process_time()
        prepared = self.kernel.prepare(rows, number)
        state = OperatorState.from_message(self.message, self.runs)
        result = self.kernel.process(state, {number: [prepared.table]}, BatchContext(0, 0))
        self.message = state.to_message()
        took = (time.process_time() - began) * 1e3
        self.size_bytes = state.size_bytes
        self.emitted += 0 if result.rows is None else result.rows.height
        return took


def table_rows(keys: np.ndarray) -> pl.DataFrame:
    text = pl.Series(keys).cast(pl.String).str.zfill(16)
    return pl.DataFrame({"k": keys, "text": text, "x": keys * 0.5})


def load(joined: Joined, rows: int, side: int) -> float:
    """Fill the table, in an order that is not that of its keys; return the seconds."""
    began = time.monotonic()
    keys = np.random.default_rng(7).permutation(rows)
    for start in range(0, rows, LOAD_ROWS):
        joined.feed(table_rows(keys[start : start + LOAD_ROWS]), side)
    return time.monotonic() - began


def batches(joined: Joined, count: int, keys: int, side: int) -> Callable[[int], list[float]]:
    """Return what gives a pass of batches of the stream, of keys drawn anew with each seed."""

    def one_pass(seed: int) -> list[float]:
        dice, took = np.random.default_rng(seed), []
        for _ in range(count):
            drawn = dice.integers(0, keys, BATCH_ROWS)
            ids = np.arange(joined.offset, joined.offset + BATCH_ROWS)
            rows = pl.DataFrame({"k": drawn, "id": ids, "n": ids})
            took.append(joined.feed(rows, 1 - side))
        return took

    return one_pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 1_000_000, 20_000_000])
    parser.add_argument("--batches", type=int, default=25)
    parser.add_argument("--joins", nargs="+", choices=[*operators()], default=[*operators()])
    options = parser.parse_args()
    shown, none = [], {}
    for name in options.joins:
        kernel, side = operators()[name]
        for rows in options.rows:
            with tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder:
                joined = Joined(kernel, FileRuns(Path(folder)))
                loaded_s = load(joined, rows, side)
                per_row = joined.size_bytes / rows if rows else 0
                one_pass = batches(joined, options.batches, rows or KEYS_OF_NONE, side)
                first, again = one_pass(1), one_pass(1)
            middle = statistics.median(again)
            none.setdefault(name, middle)
            ratio = middle / none[name]
            held = [name, f"{rows:,}", spread(first), spread(again), f"{ratio:.2f}"]
            shown.append([*held, f"{joined.emitted:,}", f"{per_row:.1f}", f"{loaded_s:.0f}"])
    header = ["join", "rows of the table", "CPU ms a batch", "the same keys again", "/ first line"]
    header += ["rows out", "bytes of state per row", "s to load"]
    table(f"batches of {BATCH_ROWS:,} rows, medians (range)", header, shown)


if __name__ == "__main__":
    main()
