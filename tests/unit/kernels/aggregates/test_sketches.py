"""Sketches: their error is as stated, merging is safe, and what cannot be is refused."""

import math
import random
import sys
from collections import Counter
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import datasketches
import numpy as np
import polars as pl
import pytest
from example_counts import some
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millstream.errors import ConfigError, EnvironmentProblem, UserCodeError
from millstream.kernels.aggregates.sketches.frequent_items import FrequentItems
from millstream.kernels.aggregates.sketches.hll import Hll
from millstream.kernels.aggregates.sketches.kll import Kll
from millstream.kernels.aggregates.sketches.kll_levels import Levels

V = pl.col("v")


def frame_of(values, keys=None, dtype=None):
    keys = keys if keys is not None else [0] * len(values)
    return pl.DataFrame({"k": pl.Series(keys, dtype=pl.Int64), "v": pl.Series(values, dtype=dtype)})


def bound(one, dtype):
    return one.bound("a", lambda e: pl.DataFrame(schema={"v": dtype}).select(e).dtypes[0])


def sketch_of(one, values):
    """Make one sketch of all values, without any merging."""
    frame = frame_of(values)
    one = bound(replace(one, as_sketch=True), frame.schema["v"])
    return frame.group_by("k").agg(*one.partial("a")).select(one.result("a"))[0, 0]


def answer_of(one, sketch, dtype):
    return bound(one, dtype).read(pl.Series([sketch])).to_list()[0]


# HyperLogLog.


@settings(deadline=None, max_examples=some(25))
@given(
    st.lists(st.tuples(st.integers(0, 2), st.none() | st.integers(-600, 600)), max_size=80),
    st.sampled_from([1, 40]),
    st.sampled_from([4, 7, 12]),
    st.integers(0, 2**32).map(random.Random),
)
def test_equal_sets_have_equal_hll_bytes_however_they_were_merged(
    aggregate, rows, spread, lg_k, rng
):
    """With spread, each value stands for forty: the larger kinds of sketch are met, too."""
    rows = [(k, None if v is None else v * 97 + i) for k, v in rows for i in range(spread)]
    frame = frame_of([v for _, v in rows], [k for k, _ in rows], pl.Int64)
    found = aggregate(frame, {"a": Hll(V, as_sketch=True, lg_k=lg_k)}, rng)
    for key, answers in found.items():
        values = {v for k, v in rows if k == key and v is not None}
        plain = datasketches.hll_sketch(lg_k, datasketches.HLL_8)
        for value in values:
            plain.update(value)
        theirs = datasketches.hll_sketch.deserialize(answers["a"])
        in_order = sketch_of(Hll(V, lg_k=lg_k), pl.Series(sorted(values), dtype=pl.Int64))
        assert values == set() or answers["a"] == in_order
        assert theirs.get_estimate() == pytest.approx(len(values), rel=4 * 1.04 / 2 ** (lg_k / 2))
        assert theirs.is_empty() == (values == set())


def test_a_million_different_values_are_counted_within_three_standard_errors():
    millions = pl.Series(np.arange(1_000_000))
    estimate = answer_of(Hll(V), sketch_of(Hll(V), millions), pl.Int64)
    assert abs(estimate / 1e6 - 1) < 3 * 1.04 / math.sqrt(2**12)


def test_the_errors_of_many_hll_sketches_have_the_stated_spread():
    size, sketches = 20_000, 60
    values = np.arange(size * sketches)
    frame = frame_of(values, values // size)
    one = bound(Hll(V, lg_k=10), pl.Int64())
    out = frame.group_by("k").agg(*one.partial("a")).select(one.result("a"))
    errors = out["a"].to_numpy() / size - 1
    assert math.sqrt((errors**2).mean()) < 1.3 * 1.04 / math.sqrt(2**10)
    assert abs(errors.mean()) < 3 * 1.04 / math.sqrt(2**10) / math.sqrt(sketches)


def test_a_merged_sketch_counts_the_union_and_repeats_change_nothing():
    a, b = pl.Series(np.arange(60_000)), pl.Series(np.arange(30_000, 90_000))
    sketches = [sketch_of(Hll(V), s) for s in (a, b)]
    union = bound(Hll(V), pl.Int64()).merged(sketches)
    assert abs(answer_of(Hll(V), union, pl.Int64) / 90_000 - 1) < 3 * 1.04 / math.sqrt(2**12)
    assert bound(Hll(V), pl.Int64()).merged([union, *sketches, union]) == union
    assert sketch_of(Hll(V), pl.concat([a, a, a[:100]])) == sketches[0]


@pytest.mark.parametrize("method", ["hll", "kll", "frequent"])
def test_a_sketch_of_nothing_is_a_sketch_and_not_null(aggregate, method):
    kinds = {
        "hll": (Hll, 0, pl.Int64),
        "kll": (Kll, None, pl.Float64),
        "frequent": (FrequentItems, [], pl.String),
    }
    kind, answer, dtype = kinds[method]
    more = {"shares": (0.5,)} if method == "kll" else {}
    frame = frame_of([None, None], dtype=dtype)
    wanted = {"a": kind(V, **more), "s": kind(V, as_sketch=True, **more)}
    found = aggregate(frame, wanted, random.Random(1))[0]
    assert found["a"] == answer
    assert found["s"] is not None
    assert answer_of(kind(V, **more), found["s"], dtype) == answer


def test_different_types_are_told_apart_as_values_and_count_as_themselves():
    at = datetime(2020, 1, 1, tzinfo=UTC)
    for values in (
        [1, 2, 2, 3],
        [1.5, 2.5, 2.5, -0.0],
        ["a", "b", "b", "é"],
        [date(2020, 1, 1), date(2020, 1, 2), date(2020, 1, 2), date(1960, 1, 1)],
        [at, at + timedelta(seconds=1), at + timedelta(seconds=1), at - timedelta(days=40_000)],
        [timedelta(1), timedelta(2), timedelta(2), timedelta(0)],
        [Decimal("1.10"), Decimal("2.20"), Decimal("2.20"), Decimal("0.00")],
    ):
        series = pl.Series(values)
        assert answer_of(Hll(V), sketch_of(Hll(V), series), series.dtype) == 3


# KLL.


def rank_error(values, answer, share):
    """How far the rank of an answer is from the one asked for; it may lie within a run of equals."""
    ordered = np.sort(values)
    low = np.searchsorted(ordered, answer, side="left") / len(ordered)
    high = np.searchsorted(ordered, answer, side="right") / len(ordered)
    return max(0.0, low - share, share - high)


def test_the_median_of_a_kll_sketch_is_within_the_stated_rank_for_99_of_100_seeds():
    within = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        values = rng.normal(size=20_000)
        merged = bound(Kll(V), pl.Float64()).merged(
            [sketch_of(Kll(V), pl.Series(part)) for part in np.array_split(values, 5)]
        )
        answer = answer_of(Kll(V, shares=(0.5,)), merged, pl.Float64)
        within += rank_error(values, answer, 0.5) <= 0.0165
    assert within >= 99


@settings(deadline=None, max_examples=some(20))
@given(
    st.lists(st.tuples(st.integers(0, 1), st.none() | st.integers(-50, 50)), max_size=60),
    st.integers(0, 2**32).map(random.Random),
)
def test_up_to_k_values_a_kll_sketch_is_exact(aggregate, rows, rng):
    frame = frame_of([v for _, v in rows], [k for k, _ in rows], pl.Int64)
    wanted = {"a": Kll(V, shares=(0.0, 0.5, 0.9, 1.0), several=True)}
    found = aggregate(frame, wanted, rng)
    for key, answers in found.items():
        values = sorted(v for k, v in rows if k == key and v is not None)
        expected = [
            float(values[max(0, math.ceil(share * len(values)) - 1)])
            for share in (0.0, 0.5, 0.9, 1.0)
            if values
        ]
        assert answers["a"] == expected


def test_what_is_not_a_number_is_left_out_of_a_kll_sketch():
    sketch = sketch_of(Kll(V), pl.Series([1.0, math.nan, 3.0]))
    assert answer_of(Kll(V, shares=(1.0,)), sketch, pl.Float64) == 3.0


@settings(deadline=None, max_examples=some(10))
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3000)), max_size=60),
    st.integers(0, 2**32).map(random.Random),
    st.sampled_from([Kll(V, k=8, as_sketch=True), FrequentItems(V, lg_size=3, as_sketch=True)]),
)
def test_the_rows_of_a_batch_give_equal_bytes_however_they_are_divided(aggregate, rows, rng, one):
    rows = [(k, v * 97 + n) for k, v in rows for n in range(7)]
    frame = frame_of([v for _, v in rows], [k for k, _ in rows], pl.Int64)
    first = aggregate(frame, {"a": one}, rng)
    shuffled = frame.sample(fraction=1.0, shuffle=True, seed=rng.randrange(1000))
    assert aggregate(shuffled, {"a": one}, rng) == first


@settings(deadline=None, max_examples=some(10))
@example(
    parts=[[-0.0]], k=8, rng=random.Random(0)
)  # the least of -0.0 and 0.0 is whichever is first
@given(
    st.lists(st.lists(st.floats(-5, 5), max_size=200), min_size=1, max_size=5),
    st.sampled_from([8, 9, 200]),
    st.integers(0, 2**32).map(random.Random),
)
def test_kll_sketches_are_those_of_datasketches_and_merge_in_any_order(parts, k, rng):
    kind = bound(Kll(V, k=k), pl.Float64)
    ours = [sketch_of(Kll(V, k=k), pl.Series(part or [None], dtype=pl.Float64)) for part in parts]
    theirs = []
    for part in parts:
        theirs.append(datasketches.kll_doubles_sketch(k))
        theirs[-1].update(np.array(part))
    values = sorted(v for part in parts for v in part)
    images = ours + [sketch.serialize() for sketch in theirs]
    for image in (kind.merged(ours), kind.merged(ours[:1]), kind.merged(images)):
        read = datasketches.kll_doubles_sketch.deserialize(image)
        again = datasketches.kll_doubles_sketch(k)
        again.merge(read)
        assert (again.n, again.k) == (read.n, k)
        assert Levels.read(again.serialize()).count == read.n
        if not read.is_empty():
            assert read.get_rank(math.inf) == 1.0
            assert (
                sum(len(level) << n for n, level in enumerate(Levels.read(image).levels)) == read.n
            )
    whole = datasketches.kll_doubles_sketch.deserialize(kind.merged(images))
    assert whole.n == 2 * len(values)
    if values:
        assert (whole.get_min_value(), whole.get_max_value()) == (values[0], values[-1])
    assert kind.merged(rng.sample(ours, len(ours))) == kind.merged(sorted(ours))
    assert kind.merged(rng.sample(images, len(images))) == kind.merged(sorted(images))


# Frequent items.


@settings(deadline=None, max_examples=some(20))
@given(
    st.lists(st.tuples(st.integers(0, 1), st.none() | st.integers(0, 60)), max_size=200),
    st.integers(0, 2**32).map(random.Random),
    st.booleans(),
)
def test_no_frequent_item_is_missed_and_the_true_count_is_within_the_bounds(
    aggregate, rows, rng, text
):
    values = [None if v is None else f"v{v // 3}" if text else v // 3 for _, v in rows]
    frame = frame_of(values, [k for k, _ in rows], pl.String if text else pl.Int64)
    found = aggregate(frame, {"a": FrequentItems(V, k=99, lg_size=3)}, rng)
    for key, answers in found.items():
        counts = Counter(v for (k, _), v in zip(rows, values, strict=True) if k == key)
        counts.pop(None, None)
        reported = {item["value"]: item for item in answers["a"]}
        for value, count in counts.items():
            if count > 3.5 / 2**3 * counts.total():
                assert value in reported
        for value, item in reported.items():
            assert item["count_min"] <= counts[value] <= item["count"]
            assert item["count"] - item["count_min"] <= 3.5 / 2**3 * counts.total()
        if len(counts) <= 6:  # 0.75 of 2^3
            exactly = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            assert [(i["value"], i["count"]) for i in answers["a"]] == exactly


# What is refused.


def test_rows_taken_back_are_refused_with_what_to_use_instead():
    for one, said in ((Hll(V), "distinct"), (Kll(V), "quantile"), (FrequentItems(V), "top_k")):
        with pytest.raises(ConfigError, match=f"which no sketch can do. Use ms.{said}.*exact"):
            one.for_retractions()


@pytest.mark.parametrize(
    ("one", "dtype", "said"),
    [
        (Hll(V), pl.Binary, "It takes numbers, booleans, text, dates"),
        (Hll(V, of_sketches=True), pl.Int64, "It takes sketches, as bytes"),
        (Kll(V), pl.String, "It takes numbers and Decimals"),
        (FrequentItems(V), pl.Float64, "It takes text and whole numbers"),
    ],
)
def test_values_that_cannot_be_sketched_are_refused(one, dtype, said):
    with pytest.raises(ConfigError, match=said):
        bound(one, dtype)


@pytest.mark.parametrize("kind", [Hll, Kll, FrequentItems])
@pytest.mark.parametrize("image", [b"", b"abc", b"\x00" * 40])
def test_bytes_that_are_no_sketch_are_named_as_such(kind, image):
    one = bound(kind(V, of_sketches=True), pl.Binary)
    frame = frame_of([image], dtype=pl.Binary)
    with pytest.raises(UserCodeError, match=r"'a' was given bytes that are no .* sketch"):
        frame.group_by("k").agg(*one.partial("a"))


def test_sketches_of_another_size_are_not_merged():
    small = sketch_of(Hll(V, lg_k=10), pl.Series([1, 2, 3]))
    with pytest.raises(UserCodeError, match="lg_k is 10 there and 12 here"):
        frame_of([small]).group_by("k").agg(
            *bound(Hll(V, of_sketches=True), pl.Binary).partial("a")
        )
    small = sketch_of(Kll(V, k=100), pl.Series([1.0, 2.0]))
    with pytest.raises(UserCodeError, match="k is 100 there and 200 here"):
        frame_of([small]).group_by("k").agg(
            *bound(Kll(V, of_sketches=True), pl.Binary).partial("a")
        )


def test_sketches_that_were_kept_are_merged_and_read_later(aggregate):
    parts = [sketch_of(Hll(V), pl.Series(range(n, n + 50))) for n in (0, 25, 1000)]
    found = aggregate(
        frame_of([*parts, None]),
        {"n": Hll(V, of_sketches=True), "s": Hll(V, of_sketches=True, as_sketch=True)},
        random.Random(2),
    )[0]
    assert found["n"] == 125
    assert found["s"] == sketch_of(Hll(V), pl.Series([*range(75), *range(1000, 1050)]))
    texts = [sketch_of(FrequentItems(V), pl.Series(t)) for t in (["a", "b"], ["b"])]
    top = FrequentItems(V, of_sketches=True, items=pl.String())
    assert aggregate(frame_of(texts), {"t": top}, random.Random(2))[0]["t"] == [
        {"value": "b", "count": 2, "count_min": 2},
        {"value": "a", "count": 1, "count_min": 1},
    ]


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketches", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'millstream\[sketches\]'"):
        bound(Hll(V), pl.Int64())
