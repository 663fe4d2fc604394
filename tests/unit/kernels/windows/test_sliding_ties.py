"""Rows of sliding windows over events of a key at one time: numbered, or refused where a view would lose one."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from signed_rows import UNIT, Change, Kernel, at, histories, signed_stream, told
from sliding_model import AGGREGATES, SIZE, Model

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.kernels.frames import REPLACED
from millstream.pipeline.promotion import emitting_changes

RANKED = ms.sliding(SIZE * UNIT, rank="place")
PLAIN = ms.sliding(SIZE * UNIT)


def coarse(history):
    """The same history with few times, so that many events share one."""
    few = [
        ([Change(c.time // 9 * 9, c.key, c.n, c.diff) for c in changes], watermark)
        for changes, watermark in history
    ]
    return [([c for c in changes if c.time >= -9], watermark) for changes, watermark in few]


def numbered(rows):
    """Number the rows of a bag, as those of one time are."""
    return {(*row, place) for row, times in rows.items() for place in range(1, times + 1)}


@pytest.mark.parametrize("mode", ["update", "retract", "correct"])
@settings(deadline=None, max_examples=some(20))
@given(
    history=histories().map(coarse),
    lateness=st.sampled_from([3, 30]),
    early=st.sampled_from(["batch", None]),
    panes=st.booleans(),
    suppress=st.booleans(),
)
def test_each_row_of_a_time_has_a_number_of_its_own(
    mode, history, lateness, early, panes, suppress
):
    policy = "correct" if mode == "correct" else "drop"
    windowed = signed_stream(lateness=lateness, late=policy).window(RANKED, by="key")
    if mode == "correct":
        early = None
    else:
        windowed = windowed.emit(mode, early=early, panes=panes, suppress_unchanged=suppress)
    kernel, model = Kernel.of(windowed.agg(**AGGREGATES)), Model(lateness)
    columns = ("window_start", "window_end", "key", *AGGREGATES, "place")
    held = {}
    for changes, watermark in history:
        model.take(changes, kernel.watermark)
        for sign, *row in told(kernel.batch(changes, watermark).rows, *columns):
            key = (*row[:3], row[-1])
            if mode == "retract" and sign < 0:
                assert held.pop(key) == tuple(row)
            elif sign < 0:
                del held[key]
            else:
                assert mode != "retract" or key not in held
                held[key] = tuple(row)
        if not panes:  # with panes, what is late for its split waits
            expected = model.rows(lambda t: early == "batch" or t < watermark)  # noqa: B023
            assert set(held.values()) == numbered(expected)
    assert set(held.values()) >= numbered(model.rows(lambda t: t < watermark))


@settings(deadline=None, max_examples=some(20))
@given(history=histories().map(coarse), lateness=st.sampled_from([3, 30]))
def test_the_changes_of_what_was_declared_are_the_rows_that_were_declared_and_retractions(
    history, lateness
):
    windowed = signed_stream(lateness=lateness).window(RANKED, by="key").emit("update")
    declared = windowed.agg(**AGGREGATES)
    kernel = Kernel.of(declared)
    changes_of = Kernel(emitting_changes(kernel.operator), type(kernel.store)())
    for changes, watermark in history:
        again = [Change(c.time, c.key, c.n, c.diff) for c in changes]
        rows = kernel.batch(changes, watermark).rows
        signed = changes_of.batch(again, watermark).rows
        shown = None if signed is None else signed.filter(~pl.col(REPLACED))
        assert Counter(told(shown)) == Counter(told(rows))


@dataclass
class Event:
    at: datetime
    key: str
    n: int


@pytest.mark.parametrize("mode", ["final", "update", "retract"])
@settings(deadline=None, max_examples=some(8))
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 20), st.sampled_from("ab"), st.integers(0, 3)), max_size=40
    ),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    crash=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_views_behind_steps_have_a_row_for_each_event_that_is_left(
    mode, rows, partitions, batches, crash, seed
):
    app = ms.App("ties", log="unused")
    stream = app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark(0 * UNIT, idle=None), lateness=40 * UNIT
    )
    counts = stream.window(ms.tumbling(4 * UNIT), by=["key", "n"]).emit("retract")
    odd = counts.agg(c=ms.count()).filter(pl.col("c") % 2 == 1)
    odd.view("odd")
    aggregates = {"rows": ms.count(), "total": ms.sum("n"), "top": ms.max("n")}
    ranked = odd.window(RANKED, by="key").emit(mode).agg(**aggregates)
    ranked.view("direct")
    ranked.filter(pl.col("top") > 1).view("filtered")
    ranked.top(2, by="total", per="key").view("best")
    plain = odd.window(PLAIN, by="key").emit(mode).agg(top=ms.max("n"))
    plain.table(key=["window_end", "key"]).view("table")
    end = testing.Watermark("events", at=at(10**6))
    run = testing.run(
        app,
        {"events": [*(Event(at(t), key, n) for t, key, n in rows), end]},
        partitions=partitions,
        batches=batches,
        crash=crash,
        seed=seed,
    )

    def shown(view, *columns):
        if view not in run.views:
            return Counter()
        table = run[view].with_columns(pl.col("window_end").dt.epoch("us"))
        return Counter(table.select("window_end", "key", *columns).rows())

    left = [(end_us - 1, key, n) for end_us, key, n in shown("odd", "n")]
    expected = Counter()
    for time, key, _ in left:
        seen = [n for t, k, n in left if k == key and time - SIZE <= t <= time]
        expected[time, key, len(seen), sum(seen), max(seen)] += 1
    every = numbered(expected)
    assert set(shown("direct", *aggregates, "place")) == every
    assert set(shown("filtered", *aggregates, "place")) == {row for row in every if row[4] > 1}
    best = {key: sorted((r[3] for r in every if r[1] == key), reverse=True)[:2] for key in "ab"}
    found = {key: [] for key in "ab"}
    for (_, key, total), count in shown("best", "total").items():
        found[key] += [total] * count
    assert {key: sorted(totals, reverse=True) for key, totals in found.items()} == best
    assert shown("table", "top") == Counter({(*row[:2], row[4]): 1 for row in expected})


def refused(match):
    return pytest.raises(ConfigError, match=match)


def shape_of(window, mode, *, by="key", above=("key", "n")):
    app = ms.App("refused", log="unused")
    stream = app.topic("events", Event, key="key").stream(time="at")
    if above:
        windowed = stream.window(ms.tumbling(4 * UNIT), by=list(above)).emit("retract")
        stream = windowed.agg(c=ms.count())
    return stream.window(window, by=by).emit(mode).agg(rows=ms.count())


def test_a_view_that_would_lose_one_of_several_equal_rows_is_refused():
    numbers = (
        r'Number them: ms\.sliding\(…, rank="place"\), or make a table.*\'window_start\', \'key\''
    )
    some_rows = pl.col("rows") > 1
    with refused(numbers):
        shape_of(PLAIN, "retract").view("out")
    with refused(numbers):
        shape_of(PLAIN, "update").filter(some_rows).view("out")
    with refused(
        numbers
    ):  # a row on which the step fails is not there, and takes the others with it
        shape_of(PLAIN, "update").with_columns(x=pl.col("key").str.to_integer()).view("out")
    with refused("Its rows have no key"):
        shape_of(PLAIN, "update", above=()).top(3, by="rows").view("out")
    with refused(r"window_start, place, key, which the key window_start, key does not have"):
        shape_of(RANKED, "retract").view("out", key=["window_start", "key"])


def test_views_that_lose_none_need_no_number():
    some_rows = pl.col("rows") > 1
    shape_of(PLAIN, "update").view("out")
    shape_of(PLAIN, "final").filter(some_rows).view("out")
    shape_of(PLAIN, "retract", above=()).filter(some_rows).view("out")
    shape_of(PLAIN, "retract", by=["key", "n"]).filter(some_rows).view("out")
    shape_of(PLAIN, "retract", above=("key",)).view("out")


def test_the_name_of_the_number_is_checked():
    for name in ("", "__x", "^x$", 3):
        with refused("sliding's rank is"):
            ms.sliding("1 second", rank=name)
    for name in ("rows", "key"):
        with refused("is one that"):
            shape_of(ms.sliding("1 second", rank=name), "update")
    with refused("a column that windows give"):
        shape_of(ms.sliding("1 second", rank="window_end"), "update")
