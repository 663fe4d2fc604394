"""Rows that may be taken back leave with what they were given when they came, by a naive model."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from signed_rows import (
    SCHEMA,
    TOGETHER,
    Change,
    Kernel,
    drawn_watermarks,
    histories,
    histories_together,
    of_many_histories,
    signed_stream,
)

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, CorruptionError
from millstream.kernels.enrichment.operator import Enrichment
from millstream.kernels.frames import DELETED, DIFF, ORDER, TIME
from millstream.kernels.joins.lookup import Lookup
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore


class Clock:
    """A service whose answer for a key is how often it was asked: no two batches get the same."""

    def __init__(self):
        self.calls, self.asked = 0, set()

    def __call__(self, keys):
        self.calls += 1
        self.asked = set(keys["key"].to_list())
        return keys.with_columns(answer=pl.lit(self.calls, pl.Int64))


def enriched(lateness, service):
    stream = signed_stream(lateness=lateness)
    return stream.enrich(
        service, on="key", schema={"answer": pl.Int64}, cache=None, batch_rows=1000
    )


LATENESSES = [0, 6, 100_000_000]


@settings(deadline=None, max_examples=some(60))
@given(history=histories(), lateness=st.sampled_from(LATENESSES))
def test_each_row_goes_with_the_answer_that_it_came_with(history, lateness):
    check_answers(history, lateness)


@pytest.mark.timeout(3600)  # of ten thousand
@of_many_histories
def test_rows_of_many_histories_go_with_the_answers_that_they_came_with(dice):
    check_answers(histories_together(dice, drawn_watermarks(dice)), dice.choice(LATENESSES))


def check_answers(history, lateness):
    service = Clock()
    kernel, before = Kernel.of(enriched(lateness, service)), -(2**62)
    held = defaultdict(Counter)  # by row, the answers that it was given
    for changes, watermark in history:
        calls = service.calls
        result = kernel.batch(changes, watermark)
        net = Counter()
        for change in changes:
            if before <= change.time + lateness:
                net[change.key, change.n, change.time] += change.diff
        assert result.counts["late"] == sum(c.time + lateness < before for c in changes)
        made = Counter()
        for sign, key, n, time, answer in rows_of(result.rows):
            held[key, n, time][answer] += sign
            assert held[key, n, time][answer] >= 0, "a row went with another answer"
            assert sign < 0 or answer == calls + 1, "a row came with an answer of another batch"
            made[key, n, time] += sign
        assert {row: n for row, n in made.items() if n} == {r: n for r, n in net.items() if n}
        come = {key for (key, _, _), n in net.items() if n > 0}
        assert service.calls == calls + bool(come)
        assert not come or service.asked == come
        before = watermark


def rows_of(rows):
    return [] if rows is None else rows.select(DIFF, "key", "n", TIME, "answer").rows()


def test_a_row_that_comes_and_goes_in_one_batch_is_not_asked_for():
    service = Clock()
    kernel = Kernel.of(enriched(0, service))
    assert kernel.batch([Change(5, "a", 1, 1), Change(5, "a", 1, -1)], 0).rows is None
    assert service.calls == 0


def test_rows_leave_the_state_when_nothing_can_take_them_back():
    kernel = Kernel.of(enriched(0, Clock()))
    kernel.batch([Change(5, "a", 1, 1), Change(7, "a", 2, 1)], 0)
    kernel.batch([Change(5, "a", 1, -1)], 1)
    kernel.batch([], 200_000_000)
    assert not kernel.store.tables


def test_taking_back_what_never_came_is_damage():
    kernel = Kernel.of(enriched(0, Clock()))
    with pytest.raises(CorruptionError, match="taken back that is not in it"):
        kernel.batch([Change(5, "a", 1, -1)], 0)
    kernel.batch([Change(5, "a", 1, 1)], 0)
    with pytest.raises(CorruptionError, match="taken back that is not in it"):
        kernel.batch([Change(5, "a", 2, -1)], 0)


def test_a_row_whose_call_failed_has_one_letter_and_is_taken_back_without_a_trace():
    def fails_for_b(keys):
        if "b" in keys["key"].to_list():
            raise ConnectionError
        return keys.with_columns(answer=pl.lit(1, pl.Int64))

    found = signed_stream().enrich(
        fails_for_b, on="key", schema={"answer": pl.Int64}, retries=0, batch_rows=1
    )
    kernel = Kernel.of(found)
    result = kernel.batch([Change(5, "a", 1, 1), Change(5, "b", 1, 1), Change(5, "b", 1, 1)], 0)
    assert [row[1] for row in rows_of(result.rows)] == ["a"]
    (failed,) = result.failed
    assert failed.rows.select("key", "n").rows() == [("b", 1)] * 2
    assert result.counts["dead"] == 2
    result = kernel.batch([Change(5, "b", 1, -1), Change(5, "a", 1, -1)], 0)
    assert [row[:2] for row in rows_of(result.rows)] == [(-1, "a")]
    assert result.failed == ()


# ── looked up ───────────────────────────────────────────────────────────────────────────────────


@dataclass
class Rate:
    key: str
    rate: int


table_changes = st.lists(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3) | st.none()), max_size=3),
    min_size=6,
    max_size=6,
)


def changed(there, changes, number, *, derived):
    """Apply changes to a table; return the rows that say so: signed ones, or versions."""
    rows = []
    for key, rate in changes:
        was = there.pop(key, None)
        if derived and was is not None:
            rows.append((key, was, -1, False))
        if rate is not None:
            there[key] = rate
        if not derived or rate is not None:
            rows.append((key, rate, 1, rate is None))
    schema = {"key": pl.String, "rate": pl.Int64, DIFF: pl.Int8, DELETED: pl.Boolean}
    made = pl.DataFrame(rows, schema=schema, orient="row")
    made = made.with_columns(
        pl.lit(number, pl.Int64).alias(TIME), (1000 * number + pl.int_range(pl.len())).alias(ORDER)
    )
    if derived:  # the same row whenever it comes and goes
        return made.drop(ORDER, DELETED).with_columns(pl.lit(0, pl.Int64).alias(TIME))
    return made.drop(DIFF)


@dataclass
class LookupModel:
    """Keeps for each row that is there what it was looked up with, once for each time that it is."""

    inner: bool
    held: defaultdict = field(default_factory=lambda: defaultdict(list))

    def check(self, net, table, made):
        """Compare what a batch made with the changes of rows, and with the table as it is then."""
        gone = Counter()
        for sign, *row, rate in made:
            if sign < 0:
                gone[tuple(row)] += 1
                self.held[tuple(row)].remove(rate)  # one of those that it had
        for row, count in net.items():
            for _ in range(-count - gone[row] if self.inner else 0):
                self.held[row].remove(None)  # it had found nothing, and never came
            assert self.inner or gone[row] == max(-count, 0)
        expected = []
        for row, count in net.items():
            rate = table.get(row[0])
            self.held[row] += [rate] * count
            expected += [(1, *row, rate)] * (0 if self.inner and rate is None else count)
        assert Counter(row for row in made if row[0] > 0) == Counter(expected)


@settings(deadline=None, max_examples=some(60))
@given(
    history=histories(),
    rates=table_changes,
    how=st.sampled_from(["left", "inner"]),
    derived=st.booleans(),
)
def test_a_row_goes_with_what_it_was_looked_up_with(history, rates, how, derived):
    check_looked_up(history, rates, how, derived=derived)


@pytest.mark.timeout(3600)  # of ten thousand
@pytest.mark.parametrize("how", ["left", "inner"])
@pytest.mark.parametrize("derived", [False, True])
@of_many_histories
def test_rows_of_many_histories_go_with_what_they_were_looked_up_with(how, derived, dice):
    history = histories_together(dice, drawn_watermarks(dice))
    keys = [f"{number}{letter}" for number in range(TOGETHER) for letter in "ab"]
    rates = [
        [(dice.choice(keys), dice.choice([0, 1, 2, 3, None])) for _ in range(dice.randint(0, 150))]
        for _ in history
    ]
    check_looked_up(history, rates, how, derived=derived)


def check_looked_up(history, rates, how, *, derived):
    stream = signed_stream(lateness=6)
    table = stream.app.table("rates", Rate, key="key")
    table = table.group_by("key").agg(rate=ms.max("rate")) if derived else table
    kernel = stream.lookup(table, "key", how=how).node.kernel
    store, message, before, there = MemoryRunStore(), None, -(2**62), {}
    model = LookupModel(how == "inner")
    for number, (changes, watermark) in enumerate(history):
        tables = (
            pl.DataFrame([(c.key, c.n, c.time, c.diff) for c in changes], SCHEMA, orient="row"),
            changed(there, rates[number], number, derived=derived),
        )
        inputs = {n: [kernel.prepare(t, n).table] for n, t in enumerate(tables) if t.height}
        state = OperatorState.from_message(message, store)
        result = kernel.process(state, inputs, BatchContext(before, watermark))
        message = state.to_message()
        net = Counter()
        for change in changes:
            if before <= change.time + 6:
                net[change.key, change.n, change.time] += change.diff
        columns = (DIFF, "key", "n", TIME, "rate")
        model.check(net, there, [] if result.rows is None else result.rows.select(columns).rows())
        before = watermark


def test_windows_are_looked_up_as_they_change_and_end_as_final_ones_do():
    """In a table that stays, so that the order of arrival does not matter."""
    results = []
    for mode, early in (("final", {}), ("update", {"early": "each"}), ("retract", {})):
        app = ms.App("a", log="unused", buckets=2)
        rates = app.static_table(pl.DataFrame({"key": ["k0", "k1"], "rate": [10, 20]}), key="key")
        events = app.topic("events", {"key": str, "second": int}, key="key")
        at = pl.from_epoch("second").dt.replace_time_zone("UTC")
        stream = events.stream(time=at, watermark=ms.watermark("0 seconds", idle=None))
        counts = stream.window(ms.tumbling("10 seconds"), by="key").emit(mode, **early)
        found = counts.agg(n=ms.count()).lookup(rates, "key", how="inner")
        found.view("out")
        found.window(ms.tumbling("1 minute"), by="rate").agg(n=ms.sum("n")).view("minutes")
        rows = [{"key": f"k{n % 3}", "second": n * 7 % 120} for n in range(60)]
        rows.append({"key": "k2", "second": 1000})
        out = testing.run(app, {"events": rows}, batches=6, partitions=1, seed=2, crash=3)
        results.append([out[name].rows() for name in ("out", "minutes")])
    assert results[0] == results[1] == results[2]
    assert results[0][1]


def test_events_are_given_what_they_get_without_being_stored():
    stream = signed_stream(signed=False)
    found = stream.enrich(Clock(), on="key", schema={"answer": pl.Int64})
    assert type(found.node.kernel) is Enrichment
    looked_up = stream.lookup(stream.app.table("rates", Rate, key="key"), "key")
    assert type(looked_up.node.kernel) is Lookup


def test_parts_are_refused_with_the_way_out():
    stream = signed_stream(signed=False)
    parts = stream.app.topic("e", {"key": str}).stream().window(ms.tumbling("1 s"), by="key")
    parts = parts.emit("discard").agg(n=ms.count())
    with pytest.raises(ConfigError, match="parts that add up"):
        parts.enrich(Clock(), on="key", schema={"answer": pl.Int64})
