"""What outputs are given, row by row, hidden columns and all, before a view keeps the latest."""

import random
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest

from millstream.kernels.frames import decode_frame
from millstream.testing.kernel_engine import KernelEngine
from millstream.testing.run import _arrivals
from millstream.views.commit import gather


@dataclass
class Given:
    """What a run gives: rows by output (with ``batch``), counts by step, and the engine at its end."""

    rows: dict[str, pl.DataFrame]
    books: dict[str, Counter]
    engine: KernelEngine


def run_rows(app, inputs, *, batches=1, partitions=1, seed=0):
    plan = app.plan()
    counts = dict.fromkeys(app.topics, partitions)
    arrivals = {t: _arrivals(app, t, rows, partitions, seed) for t, rows in inputs.items()}
    sinks = {sink.port: sink.name for sink in plan.sinks}
    found = {name: [pl.DataFrame()] for name in sinks.values()}
    books = {}
    with tempfile.TemporaryDirectory() as folder:
        engine = KernelEngine(plan, Path(folder) / "views.db", counts, random.Random(seed))
        for number, rows in enumerate(engine._batches(arrivals, batches)):
            outcome = gather(plan, rows)
            outcome.check_balance()
            for step, line in outcome.books.items():
                books.setdefault(step, Counter()).update(line)
            for row in rows:
                if row.port in sinks:
                    table = decode_frame(row.frame)
                    found[sinks[row.port]].append(table.with_columns(batch=pl.lit(number)))
    tables = {name: pl.concat(tables, how="diagonal") for name, tables in found.items()}
    return Given(tables, books, engine)


@pytest.fixture(scope="session")
def rows_given():
    return run_rows
