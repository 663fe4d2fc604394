"""A batch that is computed again gives the same rows, to the last bit, however its records are divided."""

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream.kernels.frames import decode_frame
from millstream.testing.inputs import items_of
from millstream.testing.kernel_engine import KernelEngine, _sections
from millstream.views.commit.committer import collect_results

START = datetime(2026, 1, 1, tzinfo=UTC)
BATCHES = 3
PARTITIONS = 2


@dataclass
class Event:
    at: datetime
    key: str
    x: float


AGGREGATES = {
    "total": ms.sum("x"),
    "mean": ms.mean("x"),
    "spread": ms.stddev("x"),
    "median": ms.quantile("x", 0.5, method="kll", k=8),
    "often": ms.top_k(pl.col("x").cast(int), 3, method="frequent_items", lg_size=3),
    "different": ms.distinct("x", method="hll"),
    "all": ms.list("x"),
    "set": ms.set("x"),
    "first": ms.first("x"),
    "least_by": ms.min_by("x", pl.col("x").abs()),
}

WINDOWS = {
    "tumbling": (ms.tumbling("40 seconds"), ["final", "update", "discard", "retract"]),
    "hopping": (ms.hopping("40 seconds", "15 seconds"), ["final", "update"]),
    "session": (ms.session("2 seconds"), ["final", "retract"]),
    "sliding": (ms.sliding("5 seconds"), ["final", "retract"]),
    "count": (ms.count_window(30, unbounded=True), ["final", "update"]),
}
CASES = [(kind, mode) for kind, (_, modes) in WINDOWS.items() for mode in modes]


def app_of(kind, mode, **emit):
    app = ms.App("again", log="unused", buckets=2)
    topic = app.topic("events", Event, key="key", partitions=PARTITIONS)
    stream = topic.stream(
        time="at", watermark=ms.watermark("3 seconds", idle=None), lateness="20 seconds"
    )
    windowed = stream.window(WINDOWS[kind][0], by="key").emit(mode, **emit)
    windowed.agg(**AGGREGATES).to("out")
    return app


def events(seed):
    dice = random.Random(seed)
    time, rows = 0, []
    for _ in range(400):
        time += dice.choice([0, 0, 1])
        at = START + timedelta(seconds=time - dice.choice([0, 0, 0, 2, 9]))
        rows.append(
            Event(at, dice.choice("abcd"), dice.choice([0.1, 1e16, -3.7, dice.gauss(0, 9)]))
        )
    return rows


def batches_of(app, rows, seed, folder):
    """Give the rows of each batch; the seed says only how the records of a batch are divided."""
    plan = app.plan()
    engine = KernelEngine(plan, folder / "views.db", {"events": PARTITIONS}, random.Random(seed))
    items = {"events": items_of(app.topics["events"], rows, PARTITIONS, 0)}
    (section,) = _sections(items)
    engine._append(section)
    sinks = {sink.port for sink in plan.sinks}
    before = {}
    for number in range(1, BATCHES + 1):
        ends = [len(log.items) * number // BATCHES for log in engine.logs["events"]]
        given = engine._batch({"events": ends})
        outcome = collect_results(plan, given)
        outcome.check_balance(plan, before)
        before = outcome.position
        yield [decode_frame(row.frame) for row in given if row.port in sinks]


def in_order(tables):
    """Give rows as text, which tells floats apart to the last bit."""
    return sorted(repr(sorted(row.items())) for table in tables for row in table.to_dicts())


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_the_same_records_give_the_same_rows_however_they_are_divided(kind, mode, tmp_path):
    rows = events(1)
    runs = [batches_of(app_of(kind, mode), rows, seed, tmp_path) for seed in (1, 2)]
    count = 0
    for first, *others in zip(*runs, strict=True):
        expected = in_order(first)
        count += len(expected)
        for other in others:
            assert in_order(other) == expected
    assert count
