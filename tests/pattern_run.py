"""Runs the operator of a pattern on rows of keys, in any batches, with its state through its manifest."""

import json
from datetime import datetime
from itertools import pairwise

import polars as pl

import millstream as ms
from millstream.errors import ConfigError
from millstream.kernels.frames import ORDER, TIME
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.kernels.time.watermarks import NO_WATERMARK

SCHEMA = {"at": datetime, "k": str, "v": str, "n": int, "row": int}
SECOND = 1_000_000
END = 10**6 * SECOND


class NothingToDeclareError(Exception):
    """The pattern is one that is refused."""


def kernel_of(sequence, **options):
    """Return the operator of a pattern over rows of ``SCHEMA``, whose measures say which rows it took."""
    events = ms.App("p", log="unused").topic("t", SCHEMA, key="k").stream(time="at")
    names = [name for name, _ in steps(sequence.elements)]
    measures = {name: ms.matched(name, "row").list() for name in names}
    try:
        return events.match(sequence, by="k", measures=measures, **options).node.kernel
    except ConfigError as error:
        raise NothingToDeclareError(str(error)) from error


def steps(elements):
    for element in elements:
        if hasattr(element, "sequences"):
            for one in element.sequences:
                yield from steps(one.elements)
        elif hasattr(element, "least"):
            yield element.name, element


def run(kernel, rows, batches, dice):
    """Return the matches, as (key, ((step, place of the row), …)), in the order in which they came."""
    table = as_table(rows)
    store, stored, before, made = MemoryRunStore(), None, NO_WATERMARK, []
    cuts = sorted(dice.randrange(table.height + 1) for _ in range(batches - 1))
    places = [0, *cuts, table.height]
    # Rows come in the order of time here, so the watermark may be that of any row that has come.
    for start, end in pairwise(places):
        reached = int(table[TIME][end - 1]) if end else NO_WATERMARK
        watermark = max(
            before, END if end == table.height else reached - dice.choice([0, 0, SECOND])
        )
        stored, output = batch(kernel, store, stored, table[start:end], before, watermark)
        made += [] if output is None else matches(kernel, output)
        before = watermark
    return made


def batch(kernel, store, stored, rows, before, watermark, failed=None):
    state = OperatorState.from_message(stored, store)
    inputs = {0: [kernel.prepare(rows).table]} if rows.height else {}
    result = kernel.process(state, inputs, BatchContext(before, watermark, seed=7))
    if failed is not None:
        failed += [row for one in result.failed for row in one.rows.rows(named=True)]
    if result.rows is not None:
        assert (result.rows[TIME] >= before).all()
        assert (result.rows[TIME] < watermark).all()
    return json.loads(json.dumps(state.to_message())), result.rows


def as_table(rows):
    every = [
        {"k": key, "row": place, TIME: row["at"] * SECOND, "v": row["v"], "n": row["n"]}
        for key, own in rows.items()
        for place, row in enumerate(own)
    ]
    types = {"k": pl.String, "row": pl.Int64, TIME: pl.Int64, "v": pl.String, "n": pl.Int64}
    table = pl.DataFrame(every, schema=types).sort(TIME, "k", "row")
    at = pl.from_epoch(TIME, time_unit="us").dt.replace_time_zone("UTC").alias("at")
    return table.with_columns(at, pl.int_range(pl.len(), dtype=pl.Int64).alias(ORDER))


def matches(kernel, output):
    names = kernel.measures.steps
    for row in output.iter_rows(named=True):
        taken = [(place, name) for name in names for place in row[name]]
        yield row["k"], tuple((name, place) for place, name in sorted(taken))
