"""Runs the operator of a row pattern on rows of keys, in any batches, with its state through its manifest."""

import random
from itertools import pairwise

import polars as pl
from pattern_run import END, SCHEMA, SECOND, NothingToDeclareError, as_table, batch
from row_pattern_model import declared

import millstream as ms
from millstream.errors import ConfigError
from millstream.kernels.frames import ORDER, TIME
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.kernels.time.watermarks import NO_WATERMARK


def kernel_of(pattern, measures, rows="one", *, by="k", **options):
    """Return the operator of a row pattern over rows of ``SCHEMA``."""
    events = ms.App("p", log="unused").topic("t", SCHEMA, key="k").stream(time="at")
    made = events.match_recognize(
        pattern,
        partition_by=by,
        measures=measures,
        rows_per_match=rows,
        unbounded=True,
        **options,
    )
    return made.node.kernel


def run(kernel, rows, batches, dice, *, end=END, delay=0, failed=None):
    """Return what is emitted, as rows of all columns, in the order in which it came.

    ``delay``: rows come in another order, each at most so many seconds after those of its time. ``failed`` takes
    the rows that become dead letters.
    """
    table = as_table(rows)
    if delay:
        comes = [
            time + random.Random(place).randrange(delay * SECOND)
            for place, time in enumerate(table[TIME])
        ]
        table = table[sorted(range(table.height), key=comes.__getitem__)]
        table = table.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias(ORDER))
    store, stored, before, made = MemoryRunStore(), None, NO_WATERMARK, []
    cuts = sorted(dice.randrange(table.height + 1) for _ in range(batches - 1))
    places = [0, *cuts, table.height]
    for start, stop in pairwise(places):
        reached = int(table[TIME][:stop].max()) if stop else NO_WATERMARK
        lag = dice.choice([0, 0, SECOND]) + delay * SECOND
        watermark = max(before, end if stop == table.height else reached - lag)
        stored, output = batch(kernel, store, stored, table[start:stop], before, watermark, failed)
        made += [] if output is None else output.rows(named=True)
        before = watermark
    return made


def kernel_of_drawn(pattern):
    """Return the operator of a pattern of the model.

    Raises:
        NothingToDeclareError: it is refused, as it must be.
    """
    measures = {
        name: ms.match_number() if ref == "number" else ref.expression
        for name, ref in pattern.measures.items()
    }
    try:
        return kernel_of(declared(pattern), measures, pattern.rows)
    except ConfigError as error:
        assert "{- -}" in str(error) or "first row of each match" in str(error), error
        raise NothingToDeclareError(str(error)) from error
