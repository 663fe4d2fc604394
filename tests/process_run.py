"""Runs the operator of a process function on rows of keys, in any batches, with its state through its manifest."""

import json
from datetime import datetime
from itertools import pairwise

import polars as pl

import millstream as ms
from millstream.kernels.frames import ORDER, SPLIT, TIME
from millstream.kernels.operator import BatchContext
from millstream.kernels.process.side_outputs import SelectOutput
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.kernels.time.watermarks import NO_WATERMARK

SECOND = 1_000_000
SCHEMA = {"at": datetime, "k": str, "do": str, "n": int}


def kernel_of(function, schema, **options):
    """Return the operator of a function over rows of ``SCHEMA``."""
    events = ms.App("p", log="unused").topic("t", SCHEMA, key="k").stream(time="at")
    node = events.process(function, by="k", schema=schema, **options).node
    return node.kernel if hasattr(node, "kernel") else node.parent.kernel


def as_table(rows):
    """Return rows of keys, as (time, do, n) in their order, as one table in the order of time."""
    every = [
        {"k": key, "do": do, "n": n, TIME: time * SECOND}
        for key, own in rows.items()
        for time, do, n in own
    ]
    types = {"k": pl.String, "do": pl.String, "n": pl.Int64, TIME: pl.Int64}
    table = pl.DataFrame(every, schema=types).sort(TIME, maintain_order=True)
    moment = pl.from_epoch(TIME, time_unit="us").dt.replace_time_zone("UTC").alias("at")
    return table.with_columns(moment, pl.int_range(pl.len(), dtype=pl.Int64).alias(ORDER))


class Run:
    """One run of an operator: batch by batch, with what came out of it."""

    def __init__(self, kernel):
        self.kernel, self.store, self.stored = kernel, MemoryRunStore(), None
        self.before, self.outputs, self.failed, self.counts = NO_WATERMARK, [], [], []

    def batch(self, rows, watermark, wall_ms=0, splits=None):
        """Process one batch; return its rows."""
        state = OperatorState.from_message(self.stored, self.store)
        context = BatchContext(
            self.before, watermark, split_watermarks_us=splits or {}, seed=7, wall_ms=wall_ms
        )
        given = {0: [self.kernel.prepare(rows).table]} if rows.height else {}
        result = self.kernel.process(state, given, context)
        if result.rows is not None:
            floor = self.kernel.output_watermark(self.before)
            assert (result.rows[TIME] >= floor).all()
            self.outputs.append(result.rows)
        self.failed += [
            (*one.rows.columns, reason) for one in result.failed for reason in one.reasons
        ]
        self.counts.append(result.counts)
        self.stored = json.loads(json.dumps(state.to_message()))
        self.before = watermark
        return result

    def output(self, number, columns):
        """Return the rows of one output, in the order in which they came."""
        step = SelectOutput("o", number, columns)
        return [
            row
            for table in self.outputs
            if (made := step.apply(table).table).height
            for row in made.select(columns).rows()
        ]


def run(kernel, table, batches, end, dice):
    """Run rows, which are in the order of time, in random batches; the watermark ends at ``end``."""
    done = Run(kernel)
    cuts = sorted(dice.randrange(table.height + 1) for _ in range(batches - 1))
    for start, stop in pairwise([0, *cuts, table.height]):
        reached = int(table[TIME][stop - 1]) if stop else NO_WATERMARK
        behind = dice.choice([0, 0, SECOND, 5 * SECOND])
        last = stop == table.height and stop > start
        done.batch(table[start:stop], end if last else max(done.before, reached - behind))
    if done.before < end:
        done.batch(table.clear(), end)
    return done


def stored_keys(run):
    """Return of how many keys something is stored."""
    state = OperatorState.from_message(run.stored, run.store)
    return sum(found.events for name, found in state.families.items() if name.startswith("keys"))


__all__ = ["SPLIT", "Run", "as_table", "kernel_of", "run", "stored_keys"]
