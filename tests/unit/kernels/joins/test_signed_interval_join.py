"""The join of streams whose rows may be taken back, against the published rule over the rows that are there.

After each batch, what was emitted and not taken back must be the join of the rows in time that are there by then: pairs
within the interval, and rows without a partner that the watermark has passed (``eager``: all of them).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from signed_rows import (
    START,
    UNIT,
    Event,
    drawn_watermarks,
    histories,
    histories_together,
    of_many_histories,
    signed_stream,
    summed,
)

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.kernels.frames import DIFF, TIME
from millstream.kernels.joins import signed_interval_join
from millstream.kernels.joins.interval_join import IntervalJoin
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore

SCHEMA = {"key": pl.String, "n": pl.Int64, TIME: pl.Int64, DIFF: pl.Int8}
COLUMNS = ("key", "n", "n_right", TIME)


@pytest.fixture(autouse=True, scope="module")
def narrow_slots():
    """Divide the state into many slots, although times are a few microseconds apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IntervalJoin, "slot_us", property(lambda _: 4))
        yield


def kernel_of(*, how, emit, lower, upper, lateness, nulls_equal):
    left = signed_stream(lateness=lateness[0])
    right = left.app.topic("others", Event, key="key").stream(
        time="at", watermark=ms.watermark(0 * UNIT, idle=None), lateness=lateness[1] * UNIT
    )
    within = (lower * UNIT, upper * UNIT)
    joined = left.join(
        right.select("key", "n"), "key", within=within, how=how, emit=emit, nulls_equal=nulls_equal
    )
    kernel = joined.node.kernel
    assert isinstance(kernel, signed_interval_join.SignedIntervalJoin)
    return kernel


class Joined:
    """Runs the operator batch by batch, and stores its state in between as a job does."""

    def __init__(self, kernel):
        self.kernel, self.store, self.message = kernel, MemoryRunStore(), None
        self.watermark, self.found = -(2**62), Counter()

    def batch(self, sides, watermark):
        inputs, read = {}, 0
        for number, changes in enumerate(sides):
            rows = pl.DataFrame(
                [(c.key, c.n, c.time, c.diff) for c in changes], schema=SCHEMA, orient="row"
            )
            if rows.height:
                prepared = self.kernel.prepare(rows, number)
                read += prepared.table.height
                inputs[number] = [prepared.table]
        state = OperatorState.from_message(self.message, self.store)
        context = BatchContext(self.watermark, watermark, seed=3)
        result = self.kernel.process(state, inputs, context)
        assert sum(result.counts.values()) == read
        self.message, self.watermark = state.to_message(), watermark
        out_of = self.kernel.output_watermark(context.watermark_before_us)
        if result.rows is not None:
            assert result.rows[TIME].min() >= out_of, "late for the next operator"
            self.found += Counter()
            for diff, *row in result.rows.select(DIFF, *COLUMNS).iter_rows():
                self.found[tuple(row)] += diff
        assert not [row for row, count in self.found.items() if count < 0]
        return Counter({row: count for row, count in self.found.items() if count})


def model(sides, watermark, *, how, emit, lower, upper, lateness, nulls_equal):
    """Join the rows that are there: ``(time, key, n)`` with how often."""
    left, right = sides
    made, paired, of_key = Counter(), (set(), set()), defaultdict(list)
    for other in right.items():
        of_key[other[0][1]].append(other)
    for one, of_one in left.items():
        for other, of_other in of_key[one[1]] if one[1] is not None or nulls_equal else ():
            if lower <= other[0] - one[0] <= upper:
                made[one[1], one[2], other[2], max(one[0], other[0])] += of_one * of_other
                paired[0].add(one)
                paired[1].add(other)
    waits = upper + lateness[1], lateness[0] - lower
    kept = how in ("left", "full"), how in ("right", "full")
    for number, rows in enumerate(sides):
        for row, count in rows.items() if kept[number] else ():
            at_once = emit == "eager" or (row[1] is None and not nulls_equal)
            if row not in paired[number] and (at_once or watermark > row[0] + waits[number]):
                numbers = (None, row[2]) if number else (row[2], None)
                made[row[1], *numbers, row[0]] += count
    return made


LATENESSES = [(0, 0), (3, 0), (0, 9), (30, 2)]
INTERVALS = st.tuples(st.integers(-8, 8), st.integers(0, 12)).map(lambda b: (b[0], b[0] + b[1]))
KINDS = [
    ("inner", "final"),
    *((how, emit) for how in ("left", "right", "full") for emit in ("final", "eager")),
]


@pytest.mark.parametrize(("how", "emit"), KINDS)
@settings(deadline=None, max_examples=some(60))
@given(
    histories(),
    histories(),
    INTERVALS,
    st.sampled_from(LATENESSES),
    st.booleans(),
    st.booleans(),
)
def test_after_each_batch_the_changes_sum_up_to_the_join_of_the_rows_that_are_there(
    how, emit, of_left, of_right, interval, lateness, nulls_equal, with_nulls
):
    empty = [([], 0)] * max(len(of_left), len(of_right))
    sides = [[*side, *empty][: len(empty)] for side in (of_left, of_right)]
    for changes, _ in (*sides[0], *sides[1]):
        for change in changes:
            change.key = None if with_nulls and change.key == "b" else change.key
    options = {"how": how, "emit": emit, "lower": interval[0], "upper": interval[1]}
    check_joined(sides, lateness=lateness, nulls_equal=nulls_equal, **options)


@pytest.mark.parametrize(("how", "emit"), KINDS)
@pytest.mark.timeout(3600)  # of ten thousand
@of_many_histories
def test_after_each_batch_the_changes_of_many_histories_sum_up_to_their_join(how, emit, dice):
    watermarks = drawn_watermarks(dice)
    sides = [histories_together(dice, watermarks) for _ in range(2)]
    nulls = {f"{number}b" for number in range(dice.choice([0, 8]))}  # each pairs with all, if equal
    for changes, _ in (*sides[0], *sides[1]):
        for change in changes:
            change.key = None if change.key in nulls else change.key
    lower = dice.randint(-8, 8)
    interval = {"lower": lower, "upper": lower + dice.randint(0, 12)}
    options = {"lateness": dice.choice(LATENESSES), "nulls_equal": dice.random() < 0.5, **interval}
    check_joined(sides, how=how, emit=emit, **options)


def check_joined(both, **options):
    """Run batches of changes of the left and the right, and compare with the model after each."""
    joined, there, watermark = Joined(kernel_of(**options)), (Counter(), Counter()), -(2**62)
    for left, right in zip(*both, strict=True):
        sides = left[0], right[0]
        for number, changes in enumerate(sides):
            for change in changes:
                if change.time + options["lateness"][number] >= watermark:
                    there[number][change.time, change.key, change.n] += change.diff
        watermark = max(watermark, left[1], right[1])
        found = joined.batch(sides, watermark)
        assert all(n >= 0 for side in there for n in side.values())  # what is late stays late
        rows = [Counter({row: n for row, n in side.items() if n > 0}) for side in there]
        assert found == model(rows, watermark, **options)


# ── behind windows ──────────────────────────────────────────────────────────────────────────


def counts(app, topic, mode):
    events = app.topic(topic, Event, key="key").stream(
        time="at", watermark=ms.watermark("30 seconds", idle=None)
    )
    windowed = events.window(ms.tumbling("10 seconds"), by="key")
    if mode != "final":
        windowed = windowed.emit(mode, early="each")
    return windowed.agg(n=ms.sum("n")).rename({"key": "k"})  # a record has a key of its own


def joined_windows(how, mode):
    app = ms.App("windows", log="unused", buckets=2)
    within = ("-10 seconds", "10 seconds")
    left, right = counts(app, "l", mode), counts(app, "r", mode)
    joined = left.join(right, "k", within=within, how=how)
    if mode != "final":
        joined.view("joined", key=["window_start", "k", "window_start_right"])
        joined.filter(pl.col("n") > 1).window(ms.tumbling("1 minute"), by="k").agg(
            pairs=ms.count()
        ).view("pairs")
    joined.to("out", partitions=1)
    return app


@pytest.mark.parametrize("how", ["inner", "left", "full"])
@pytest.mark.parametrize("mode", ["update", "retract"])
@settings(deadline=None, max_examples=some(12))
@given(data=st.data())
def test_windows_that_emit_early_are_joined_to_what_final_ones_are(how, mode, data):
    seconds = st.integers(0, 60)
    drawn = st.lists(st.tuples(seconds, st.sampled_from("ab"), st.integers(0, 3)), max_size=12)
    inputs = {
        topic: [
            *(Event(START + timedelta(seconds=s), key, n) for s, key, n in data.draw(drawn)),
            testing.Watermark(topic, at=START + timedelta(days=1)),
        ]
        for topic in ("l", "r")
    }
    ways = {"batches": data.draw(st.integers(1, 6)), "seed": data.draw(st.integers(0, 99))}
    partitions = data.draw(st.sampled_from([1, 4, 7]))
    out = testing.run(joined_windows(how, mode), inputs, partitions=partitions, crash=1, **ways)
    final = testing.run(joined_windows(how, "final"), inputs, partitions=partitions, **ways)
    names = ["window_start", "k", "n", "window_start_right", "n_right"]

    def bag(topic):
        rows = topic.topic("out")
        if not rows.height:
            return Counter()
        diffs = rows["_diff"] if "_diff" in rows.columns else pl.repeat(1, rows.height, eager=True)
        return summed(zip(diffs, *(rows[name] for name in names), strict=True))

    assert bag(out) == bag(final)
    found = Counter(
        tuple(None if v is None else str(v)[:19].replace(" ", "T") for v in row)
        for row in out["joined"].select(names).rows()
    )
    expected = Counter()
    for row, count in bag(final).items():
        expected[tuple(None if v is None else str(v)[:19] for v in row)] += count
    assert found == expected
    minutes = Counter()
    for row in final.topic("out").iter_rows(named=True) if final.topic("out").height else ():
        if row["n"] is not None and row["n"] > 1:
            minutes[row["k"], int(row["timestamp"].timestamp()) // 60] += 1
    pairs = out["pairs"].iter_rows(named=True) if out["pairs"].height else ()
    assert {
        (row["k"], int((row["window_start"] - START).total_seconds()) // 60): row["pairs"]
        for row in pairs
    } == minutes


def test_parts_are_refused_with_the_way_out():
    app = ms.App("parts", log="unused")
    left, right = counts(app, "l", "discard"), counts(app, "r", "final")
    with pytest.raises(ConfigError, match="parts that add up"):
        left.join(right, "k", within=("0 seconds", "1 second"))


def test_a_view_of_joined_changes_needs_what_identifies_both_rows():
    app = ms.App("views", log="unused")
    joined = counts(app, "l", "update").join(
        counts(app, "r", "update"), "k", within=("0 seconds", "1 second")
    )
    with pytest.raises(ConfigError, match="window_start, k, window_start_right"):
        joined.view("joined", key="k")
