"""Stored searches: a million alerts of users, and flats in batches, beside a loop over tantivy.

    python benchmarks/stored_searches.py [queries] [rows]

The step alone, in this process, with state in memory: what a stage does with a batch after it was decoded. The loop
makes an index of each batch with tantivy and runs queries on it one by one; as it would take hours, it runs 2,000 of
them (words and a range of numbers, for tantivy has no places), and its time for all is computed from that.
Times are seconds of CPU.
"""

from __future__ import annotations

import random
import resource
import sys

import numpy as np
import polars as pl
import tantivy

from millstream.kernels.frames import TIME
from millstream.kernels.joins.join_input import JoinInput
from millstream.kernels.operator import BatchContext
from millstream.kernels.search.compiled_queries import QueryLanguage
from millstream.kernels.search.fields import SearchField
from millstream.kernels.search.operator import Percolate
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore

BATCH = 1000
SAMPLE = 2000
TEXT, INT, FLOAT = pl.String(), pl.Int64(), pl.Float64()
FIELDS = (
    SearchField("title", ("title",), "text", TEXT, "standard"),
    SearchField("rent", ("rent",), "number", INT),
    SearchField("place", ("lat", "lon"), "point", FLOAT),
)
COLUMNS = (("id", INT), ("title", TEXT), ("rent", INT), ("lat", FLOAT), ("lon", FLOAT))
KEY = JoinInput(("key",), (INT,), (("key", "key", INT), ("query", "query", TEXT)))


def cpu_s():
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


def words(dice, count, first=1):
    """Words by Zipf's law; those of a query are not among the most frequent."""
    return [f"w{int(first * (50_000 / first) ** dice.random())}" for _ in range(count)]


def place(dice):
    return round(dice.gauss(52.52, 0.3), 5), round(dice.gauss(13.4, 0.4), 5)


def queries(count, *, places):
    dice, made = random.Random(1), []
    for _ in range(count):
        lat, lon = place(dice)
        text = f"{' '.join(words(dice, dice.randint(1, 3), 100))} rent:<{dice.randint(5, 25) * 100}"
        near = f"place:near({lat} {lon} {dice.randint(1, 5)}km)"
        made.append(f"{text} {near}" if places else text)
    return made


def rows(count):
    dice = random.Random(2)
    made = [
        (number, " ".join(words(dice, 60)), dice.randint(400, 2500), *place(dice))
        for number in range(count)
    ]
    return pl.DataFrame(made, schema=dict(COLUMNS), orient="row")


def timed(table, first_us):
    return table.with_columns(pl.Series(TIME, first_us + np.arange(table.height)))


def main():
    count, documents = map(int, sys.argv[1:]) if len(sys.argv) > 2 else (1_000_000, 10_000)
    for places in (True, False):
        measure(queries(count, places=places), rows(documents), places=places)


def measure(texts, found, *, places):
    step = Percolate("step", COLUMNS, KEY, "query", QueryLanguage(FIELDS, (0,)), (0, 0))
    state = OperatorState(MemoryRunStore())
    start = cpu_s()
    stored = timed(pl.DataFrame({"key": range(len(texts)), "query": texts}), 0)
    for at in range(0, stored.height, 100_000):
        prepared = step.prepare(stored[at : at + 100_000], 1).table
        step.process(state, {1: [prepared]}, BatchContext(-(10**6), -(10**6)))
    loaded = cpu_s() - start
    print(
        f"{len(texts):,} queries {'with' if places else 'without'} places stored in {loaded:.1f} s CPU; state {state.size_bytes >> 20} MiB"
    )
    found = timed(found, 10**9)
    matched, spent = 0, []
    for at in range(0, found.height, BATCH):
        start = cpu_s()
        prepared = step.prepare(found[at : at + BATCH], 0).table
        result = step.process(state, {0: [prepared]}, BatchContext(-(10**6), 10**15))
        spent.append(cpu_s() - start)
        matched += 0 if result.rows is None else result.rows.height
    rates = sorted(BATCH / each for each in spent)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"  {found.height:,} rows: {rates[len(rates) // 2]:,.0f} rows per second of CPU (least {rates[0]:,.0f}, most {rates[-1]:,.0f}); {matched:,} matches; peak {peak:,} MiB"
    )
    if not places:
        beside(texts, found)


def beside(texts, found):
    """Run some queries on an index of one batch with tantivy."""
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("title")
    builder.add_integer_field("rent", indexed=True, fast=True)
    index = tantivy.Index(builder.build())
    start = cpu_s()
    writer = index.writer(15_000_000, 1)
    for title, rent in found[:BATCH].select("title", "rent").iter_rows():
        writer.add_document(tantivy.Document(title=title, rent=rent))
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    indexed = cpu_s() - start
    searcher, start, matched = index.searcher(), cpu_s(), 0
    for text in texts[:SAMPLE]:
        terms, rent = text.rsplit(" rent:<", 1)
        query = index.parse_query(
            f"+{' +'.join(terms.split())} +rent:[0 TO {int(rent) - 1}]", ["title"]
        )
        matched += searcher.search(query, limit=BATCH).count
    each = (cpu_s() - start) / SAMPLE
    rate = BATCH / (indexed + each * len(texts))
    print(
        f"  tantivy: {each * 1e6:.0f} us for a query on {BATCH} rows, so {rate:,.1f} rows per second of CPU with {len(texts):,} queries; {matched:,} matches of {SAMPLE:,} queries"
    )
    mine = matches_of(texts[:SAMPLE], found[:BATCH])
    print(f"  the step finds {mine:,} for these")


def matches_of(texts, found):
    step = Percolate("step", COLUMNS, KEY, "query", QueryLanguage(FIELDS, (0,)), (0, 0))
    state = OperatorState(MemoryRunStore())
    stored = timed(pl.DataFrame({"key": range(len(texts)), "query": texts}), 0)
    inputs = {0: [step.prepare(found, 0).table], 1: [step.prepare(stored, 1).table]}
    result = step.process(state, inputs, BatchContext(-(10**6), 10**15))
    return 0 if result.rows is None else result.rows.height


if __name__ == "__main__":
    main()
