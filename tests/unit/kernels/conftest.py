"""What tests of kernels share: aggregates over rows split and merged at random; what outputs are given.

What an output is given is seen row by row, hidden columns and all, before a view keeps the latest.
"""

import random
import tempfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest

from millstream.kernels.frames import DIFF, ORDER, TIME, decode_frame
from millstream.kernels.state import hash_order
from millstream.kernels.state.sorted_runs import decode_run, encode_run
from millstream.kernels.windows import window_operator
from millstream.testing.inputs import items_of
from millstream.testing.kernel_engine import KernelEngine
from millstream.views.commit.committer import collect_results


def through_state(frame):
    """Write partials as a run and read them back, as state does."""
    table = frame.to_arrow(compat_level=pl.CompatLevel.oldest()).combine_chunks()
    back = pl.from_arrow(decode_run(encode_run(table)))
    assert back.schema == frame.schema
    assert back.equals(frame, null_equal=True)
    return back


def merged(frames, aggregates):
    table = pl.concat(frames)
    out = table.group_by("k").agg(*(e for n, a in aggregates.items() for e in a.merge(n)))
    assert out.schema == table.schema
    return out


@pytest.fixture(scope="session")
def aggregate():
    """Give a function: rows (with the key ``k``) and aggregates in, ``{key: {name: answer}}`` out.

    ``rng`` divides the rows into partials and chooses which are merged with which, and when.
    """

    def run(rows, aggregates, rng, *, changes=False, parts_max=4):
        hidden = {TIME: pl.Int64, ORDER: pl.Int64, DIFF: pl.Int8}
        rows = rows.cast({c: t for c, t in hidden.items() if c in rows.columns})
        if changes:
            aggregates = {name: one.for_retractions() for name, one in aggregates.items()}
        bound = {
            name: one.bound(name, lambda e: rows.clear().select(e).dtypes[0])
            for name, one in aggregates.items()
        }
        places = [rng.randrange(rng.randint(1, parts_max)) for _ in range(rows.height)]
        parts = [
            rows.filter(pl.Series([p == place for p in places], dtype=pl.Boolean))
            for place in sorted({0, *places})
        ]
        partials = [
            part.group_by("k").agg(*(e for n, a in bound.items() for e in a.partial(n)))
            for part in parts
        ]
        partials = [through_state(partial) for partial in partials]
        while len(partials) > 1:
            rng.shuffle(partials)
            taken = rng.randint(1, min(3, len(partials)))
            partials = [*partials[taken:], through_state(merged(partials[:taken], bound))]
        done = merged(partials, bound) if rng.random() < 0.5 else partials[0]
        out = done.select("k", *(one.result(name) for name, one in bound.items()))
        assert out.columns == ["k", *bound]
        return {row.pop("k"): row for row in out.to_dicts()}

    return run


@dataclass
class Given:
    """What a run gives: rows by output (with ``batch``), counts by step, and the engine at its end."""

    rows: dict[str, pl.DataFrame]
    books: dict[str, Counter]
    engine: KernelEngine


def run_rows(app, inputs, *, batches=1, partitions=1, seed=0):
    plan = app.plan()
    counts = dict.fromkeys(app.topics, partitions)
    items = {t: items_of(app.topics[t], rows, partitions, seed) for t, rows in inputs.items()}
    sinks = {sink.port: sink.name for sink in plan.sinks}
    found = {name: [pl.DataFrame()] for name in sinks.values()}
    books = {}
    with tempfile.TemporaryDirectory() as folder:
        engine = KernelEngine(plan, Path(folder) / "views.db", counts, random.Random(seed))
        for number, rows in enumerate(engine._batches(items, batches)):
            outcome = collect_results(plan, rows)
            outcome.check_balance(plan, {})
            for step, line in outcome.step_counts.items():
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


@pytest.fixture(scope="session")
def the_long_way():
    """Give a context in which what is known is joined by key, and partials of a batch are not merged."""

    @contextmanager
    def context(*, taken):
        with pytest.MonkeyPatch.context() as patch:
            if taken:
                patch.setattr(hash_order, "_WINDOWS_MAX", 0)
                patch.setattr(window_operator, "_SAMPLED_MIN", 0)
                patch.setattr(window_operator, "_APART", -1)
            yield

    return context
