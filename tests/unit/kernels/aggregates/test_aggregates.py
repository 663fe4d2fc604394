"""Every exact aggregate against a naive model, however the rows are split and merged on the way."""

import math
import random
import statistics
from collections import Counter
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction

import polars as pl
import pytest
from example_counts import some
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millstream.errors import ConfigError, UserCodeError
from millstream.kernels.aggregates import superaccumulator
from millstream.kernels.aggregates.count import Count
from millstream.kernels.aggregates.distribution import DistinctValues, Quantiles, TopValues
from millstream.kernels.aggregates.event_order import CollectList, Pick
from millstream.kernels.aggregates.extremes import Extreme
from millstream.kernels.aggregates.sums import Mean, Sum
from millstream.kernels.aggregates.variance import Variance
from millstream.kernels.frames import DIFF, ORDER, TIME

V = pl.col("v")
START = datetime(2020, 1, 1, tzinfo=UTC)

whole = st.integers(-5, 5) | st.integers(-(2**62), 2**62)
cents = st.decimals(-1000, 1000, places=2) | st.decimals(-(10**25), 10**25, places=2)
floats = st.floats(allow_nan=False, allow_infinity=False, width=64) | st.sampled_from(
    [0.0, -0.0, 1.0, 1e16, -1e16, 0.1, 5e-324, 2.0**-30, 2.0**30]
)
rngs = st.integers(0, 2**32).map(random.Random)
KINDS = {
    "int": (pl.Int64(), whole),
    "float": (pl.Float64(), floats),
    "decimal": (pl.Decimal(38, 2), cents),
    "text": (pl.String(), st.text(alphabet="abé", max_size=3)),
    "bytes": (pl.Binary(), st.binary(max_size=2)),
    "bool": (pl.Boolean(), st.booleans()),
    "time": (pl.Datetime("us", "UTC"), st.integers(-9, 9).map(lambda s: START + timedelta(s))),
    "duration": (pl.Duration("us"), st.integers(-9, 9).map(lambda s: timedelta(0, s))),
}
NUMBERS = ("int", "float", "decimal")


@st.composite
def tables(draw, kinds=tuple(KINDS)):
    """Draw a kind of values, and rows (key, time, value or None); places in the log are distinct."""
    kind = draw(st.sampled_from(kinds))
    values = st.none() | KINDS[kind][1]
    rows = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), values), max_size=40))
    return kind, rows


def frame_of(kind, rows, diffs=None):
    columns = {
        "k": [k for k, _, _ in rows],
        TIME: [t for _, t, _ in rows],
        ORDER: list(range(len(rows))),
        DIFF: diffs or [1] * len(rows),
        "v": pl.Series([v for _, _, v in rows], dtype=KINDS[kind][0], strict=True),
    }
    return pl.DataFrame(columns, schema_overrides={"k": pl.Int64})


def by_key(rows):
    """Give each key's values, in order of time and place, without nulls; keys of nulls only too."""
    ordered = sorted(enumerate(rows), key=lambda row: (row[1][1], row[0]))
    return {
        key: [v for _, (k, _, v) in ordered if k == key and v is not None]
        for key in {k for k, _, _ in rows}
    }


def same(found, expected):
    """Compare answers; floats must be equal to the last bit, 0.0 and -0.0 apart."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and found == expected


ANY = {
    "n": (Count(), None),
    "known": (Count(V.is_not_null()), len),
    "least": (Extreme(V, greatest=False), lambda vs: min(vs, default=None)),
    "most": (Extreme(V, greatest=True), lambda vs: max(vs, default=None)),
    "first": (Pick(V, "first"), lambda vs: vs[0] if vs else None),
    "last": (Pick(V, "last"), lambda vs: vs[-1] if vs else None),
    "all": (CollectList(V), list),
    "set": (DistinctValues(V, counted=False), lambda vs: sorted(set(vs))),
    "distinct": (DistinctValues(V, counted=True), lambda vs: len(set(vs))),
    "median": (Quantiles(V, shares=(Fraction(1, 2),)), lambda vs: ranked(vs, Fraction(1, 2))),
    "tails": (
        Quantiles(V, shares=(Fraction(0), Fraction(9, 10), Fraction(1)), several=True),
        lambda vs: [ranked(vs, Fraction(q, 10)) for q in (0, 9, 10)] if vs else [],
    ),
    "top": (TopValues(V, k=2), lambda vs: [{"value": v, "count": n} for v, n in most(vs)[:2]]),
}


def ranked(values, share):
    """Find the first value that at least the share of all values is not above, one by one."""
    for value in sorted(values):
        if Fraction(sum(v <= value for v in values), len(values)) >= share:
            return value
    return None


def most(values):
    return sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))


@settings(deadline=None, max_examples=some(15))
@given(tables(), rngs)
def test_the_answer_is_the_models_however_rows_are_split_and_partials_merged(aggregate, drawn, rng):
    kind, rows = drawn
    found = aggregate(frame_of(kind, rows), {n: one for n, (one, _) in ANY.items()}, rng)
    values = by_key(rows)
    assert found.keys() == values.keys()
    for key, answers in found.items():
        assert answers.pop("n") == sum(k == key for k, _, _ in rows)
        for name, answer in answers.items():
            assert same(answer, ANY[name][1](values[key])), (name, answer, values[key])


@settings(deadline=None, max_examples=some(15))
@given(tables(), rngs, st.data())
def test_rows_taken_back_leave_the_answer_of_those_that_stay(aggregate, drawn, rng, data):
    kind, rows = drawn
    gone = data.draw(st.lists(st.sampled_from(rows), max_size=10)) if rows else []
    changes = [(row, 1) for row in rows + gone] + [(row, -1) for row in gone]
    rng.shuffle(changes)
    frame = frame_of(kind, [row for row, _ in changes], [d for _, d in changes])
    names = [n for n in ANY if n not in ("first", "last")]
    found = aggregate(frame, {n: ANY[n][0] for n in names}, rng, changes=True)
    for key, values in by_key(rows).items():
        answers = found[key]
        assert answers.pop("n") == sum(k == key for k, _, _ in rows)
        for name, answer in answers.items():
            expected = sorted(values) if name == "all" else ANY[name][1](values)
            assert same(answer, expected), (name, answer, values)


def exact(values):
    return sum(map(Fraction, values), Fraction(0))


@settings(deadline=None, max_examples=some(25))
@given(tables(NUMBERS), rngs, st.booleans())
def test_sums_and_means_are_exact_sums_rounded_once(aggregate, drawn, rng, changes):
    kind, rows = drawn
    wide = {"total": Sum(V), "mean": Mean(V)}
    try:
        found = aggregate(frame_of(kind, rows), wide, rng, changes=changes)
    except UserCodeError as error:
        assert "does not fit into Int64" in str(error)
        assert any(abs(exact(vs)) > 2**62 for vs in by_key(rows).values())
        return
    for key, values in by_key(rows).items():
        total, mean = found[key]["total"], found[key]["mean"]
        if kind == "float":
            assert same(total, rounded(exact(values)))
            assert mean is None if not values else mean == total / len(values)
        elif kind == "int":
            assert total == exact(values)
            assert mean is None if not values else mean == float(total) / len(values)
        else:
            assert total == exact(values)
            assert mean == (half_up(values) if values else None)


def rounded(number):
    """Round to the nearest float, or to infinity."""
    try:
        return number.numerator / number.denominator
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def half_up(values):
    units = exact(values) * 100 / len(values)
    return Decimal(math.floor(units + Fraction(1, 2))).scaleb(-2)


@settings(deadline=None, max_examples=some(25))
@given(st.lists(st.floats(width=64), max_size=30), rngs)
@example([1e16, 1.0, -1e16], random.Random(1))
@example([math.inf, -math.inf], random.Random(1))
@example([1.7e308, 1.7e308, -1.7e308], random.Random(1))
def test_a_sum_of_floats_is_the_same_to_the_last_bit_in_any_order_and_grouping(
    aggregate, values, rng
):
    sums = set()
    for _ in range(3):
        shuffled = rng.sample(values, len(values))
        frame = frame_of("float", [(0, 0, v) for v in shuffled])
        found = aggregate(frame, {"total": Sum(V)}, rng)
        sums |= {repr(answers["total"]) for answers in found.values()}
    assert len(sums) <= 1
    if values and all(map(math.isfinite, values)):
        assert sums == {repr(rounded(exact(values)))}


odd_floats = floats | st.floats(width=64)


@pytest.mark.parametrize("long", [False, True])
@settings(deadline=None, max_examples=some(20))
@given(
    st.lists(st.tuples(st.integers(0, 4), odd_floats), max_size=25),
    st.lists(st.tuples(st.integers(0, 4), odd_floats), max_size=8),
    rngs,
)
@example([(0, 1.0)], [(0, math.inf), (0, math.nan), (0, -math.inf)], random.Random(1))
@example([(0, 1.0), (0, 1e-300)], [(0, 1e18), (0, 1e300)], random.Random(1))
@example([(0, 5e-324), (0, -1e308), (0, -1e308)], [(0, 1e308)], random.Random(1))
@example([(0, 2.0**-75), (0, 2.0**60), (0, 2.0**7)], [], random.Random(1))
def test_what_is_taken_back_leaves_no_trace_in_sums_means_and_spread(
    aggregate, long, stays, gone, rng
):
    changes = [(row, 1) for row in stays + gone] + [(row, -1) for row in gone]
    rng.shuffle(changes)
    rows = [(k, 0, v) for (k, v), _ in changes]
    wanted = {"total": Sum(V), "mean": Mean(V), "spread": Variance(V, sample=False)}
    frame = frame_of("float", rows, [d for _, d in changes])
    with pytest.MonkeyPatch.context() as patch:
        if long:  # digits are large early, and few sums are gathered, or merged, at a time
            patch.setattr(superaccumulator, "_LARGE", 1 << 31)
            patch.setattr(superaccumulator, "_GATHERED", 2)
            patch.setattr(superaccumulator, "_PARTS_MAX", 2)
        found = aggregate(frame, wanted, rng, changes=True)
    for key, answers in found.items():
        values = [v for k, v in stays if k == key]
        assert repr(answers["total"]) == repr(ieee_sum(values)), values
        mean = ieee_sum(values) / len(values) if values else None
        assert repr(answers["mean"]) == repr(mean), values
        assert repr(answers["spread"]) == repr(spread_of(values)), values


def ieee_sum(values):
    """Add up exactly, and round once; infinities and what is no number go by IEEE 754."""
    if not all(map(math.isfinite, values)):
        return sum(v for v in values if not math.isfinite(v)) + 0.0
    return rounded(exact(values)) + 0.0


def spread_of(values):
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return math.nan
    return rounded(statistics.pvariance([Fraction(v) for v in values]))


def test_a_sum_of_floats_keeps_what_adding_one_by_one_would_lose(aggregate):
    frame = frame_of("float", [(0, 0, v) for v in [1e16, *[1.0] * 1000, -1e16]])
    assert aggregate(frame, {"total": Sum(V)}, random.Random(0)) == {0: {"total": 1000.0}}


@settings(deadline=None, max_examples=some(25))
@given(
    st.lists(st.integers(-1000, 1000), max_size=30),
    st.sampled_from([0.0, 1e6, 1e9]),
    rngs,
    st.booleans(),
)
def test_the_spread_is_right_even_where_the_mean_is_many_times_larger(
    aggregate, numbers, away, rng, changes
):
    values = [away + n / 8 for n in numbers]
    frame = frame_of("float", [(0, 0, v) for v in values])
    wanted = {
        "var": Variance(V),
        "pvar": Variance(V, sample=False),
        "sd": Variance(V, root=True),
    }
    found = aggregate(frame, wanted, rng, changes=changes).get(0)
    exactly = [Fraction(v) for v in values]
    expected = statistics.variance(exactly) if len(values) > 1 else None
    assert found == (
        {
            "var": None if expected is None else float(expected),
            "pvar": float(statistics.pvariance(exactly)),
            "sd": None if expected is None else pytest.approx(math.sqrt(expected), rel=1e-15),
        }
        if values
        else None
    )


@settings(deadline=None, max_examples=some(25))
@given(st.lists(floats, min_size=1, max_size=12), st.lists(floats, max_size=5), rngs)
@example([1e300, 1.0], [1e-300], random.Random(0))
@example([1.0, 2.0], [math.inf, math.nan], random.Random(0))
def test_the_spread_of_any_floats_is_exact_and_rounded_once(aggregate, values, gone, rng):
    answers = set()
    for _ in range(2):
        changes = [(v, 1) for v in values + gone] + [(v, -1) for v in gone]
        rng.shuffle(changes)
        frame = frame_of("float", [(0, 0, v) for v, _ in changes], [d for _, d in changes])
        found = aggregate(frame, {"a": Variance(V, sample=False)}, rng, changes=True)
        answers.add(found[0]["a"])
    (answer,) = answers
    expected = statistics.pvariance([Fraction(v) for v in values])
    assert answer == rounded(expected)


def test_a_value_that_is_no_number_makes_the_spread_none_until_it_is_taken_back(aggregate):
    for odd in (math.nan, math.inf):
        rows = [(0, 0, v) for v in (1.0, 3.0, odd)]
        found = aggregate(frame_of("float", rows), {"a": Variance(V)}, random.Random(1))
        assert math.isnan(found[0]["a"])
        frame = frame_of("float", [*rows, (0, 0, odd)], [1, 1, 1, -1])
        found = aggregate(frame, {"a": Variance(V)}, random.Random(1), changes=True)
        assert found == {0: {"a": 2.0}}


def alone(one, dtype):
    """Bind an aggregate over the column v of this type."""
    return one.bound(
        "a", lambda e: pl.DataFrame(schema={"v": dtype, "w": dtype}).select(e).dtypes[0]
    )


def test_a_float_that_is_no_number_counts_where_there_is_nothing_else(aggregate):
    nan = math.nan
    frame = frame_of("float", [(0, 0, nan), (0, 1, 2.0), (0, 2, nan), (1, 0, nan)])
    wanted = {
        "least": Extreme(V, greatest=False),
        "most": Extreme(V, greatest=True),
        "n": DistinctValues(V, counted=True),
        "total": Sum(V),
    }
    for seed in range(5):
        for changes in (False, True):
            found = aggregate(frame, wanted, random.Random(seed), changes=changes)
            assert (found[0]["least"], found[0]["most"], found[0]["n"]) == (2.0, 2.0, 2)
            assert math.isnan(found[1]["least"])
            assert math.isnan(found[1]["most"])
            assert all(math.isnan(answers["total"]) for answers in found.values())


def test_a_sum_that_does_not_fit_stops_and_says_which_and_what_to_do(aggregate):
    rows = [(0, 0, 2**62), (0, 0, 2**62), (1, 0, 7)]
    with pytest.raises(UserCodeError, match="'a' is 9223372036854775808, which does not fit into"):
        aggregate(frame_of("int", rows), {"a": Sum(V)}, random.Random(0))
    big = Decimal(10) ** 35 * 9
    with pytest.raises(UserCodeError, match=r"'a' is 1.*does not fit into Decimal"):
        aggregate(frame_of("decimal", [(0, 0, big)] * 20), {"a": Sum(V)}, random.Random(0))


def test_a_sum_that_overflows_only_on_the_way_is_right_in_the_end(aggregate):
    rows = [(0, 0, n) for n in (2**62, 2**62, 2**62, -(2**62), -(2**62), 5)]
    assert aggregate(frame_of("int", rows), {"a": Sum(V)}, random.Random(3))[0]["a"] == 2**62 + 5


def test_the_same_smallest_or_largest_row_is_picked_however_rows_come(aggregate):
    frame = pl.DataFrame(
        {
            "k": [0] * 5,
            TIME: [3, 1, 1, 2, 0],
            ORDER: [0, 4, 1, 2, 3],
            "v": ["late", "second", "first", "other", None],
            "w": [7, 7, 7, None, 99],
        }
    )
    wanted = {
        "most": Pick(V, "max_by", pl.col("w")),
        "least": Pick(V, "min_by", pl.col("w")),
        "first": Pick(V, "first"),
        "last": Pick(V, "last"),
        "all": CollectList(V),
    }
    for seed in range(10):
        assert aggregate(frame, wanted, random.Random(seed))[0] == {
            "most": "first",
            "least": "first",
            "first": "first",
            "last": "late",
            "all": ["first", "second", "other", "late"],
        }


def test_lists_and_structs_can_be_collected_and_picked(aggregate):
    frame = pl.DataFrame(
        {
            "k": [0, 0],
            TIME: [2, 1],
            ORDER: [0, 1],
            "v": [{"a": [1], "b": "x"}, {"a": [], "b": None}],
        }
    )
    found = aggregate(frame, {"l": CollectList(V), "f": Pick(V, "first")}, random.Random(1))
    assert found == {
        0: {"l": [{"a": [], "b": None}, {"a": [1], "b": "x"}], "f": {"a": [], "b": None}}
    }


@pytest.mark.parametrize(
    ("one", "dtype", "said"),
    [
        (Sum(V), pl.String, "values of type String. It takes numbers, Decimals and durations"),
        (Mean(V), pl.Date, "values of type Date"),
        (Variance(V), pl.Duration("us"), "numbers and Decimals"),
        (Extreme(V, greatest=True), pl.List(pl.Int64), "It takes numbers, booleans, text"),
        (DistinctValues(V, counted=True), pl.Struct({"a": pl.Int64}), "It takes numbers"),
        (Quantiles(V), pl.List(pl.Int64), "It takes numbers"),
        (Pick(V, "max_by", pl.col("w")), pl.List(pl.Int64), "an order by numbers"),
        (Count(V), pl.Int64, "a condition"),
        (Sum(pl.lit(1)), pl.Int64, "ms.count.. counts rows"),
        (Sum(pl.col("v", "w")), pl.Int64, "Give one column"),
    ],
)
def test_what_an_aggregate_cannot_take_is_refused_when_it_is_declared(one, dtype, said):
    with pytest.raises(ConfigError, match=said):
        alone(one, dtype)


@pytest.mark.parametrize("word", ["first", "last", "min_by", "max_by"])
def test_what_has_no_place_cannot_be_taken_back_and_says_what_to_use(word):
    with pytest.raises(ConfigError, match=f"{word} is over rows that can be retracted.*Use ms.m"):
        Pick(V, word).for_retractions()


def test_only_what_asks_for_order_reads_it_and_all_say_what_they_read():
    assert Count().columns_read == set()
    assert Pick(V, "max_by", pl.col("w")).columns_read == {"v", "w"}
    ordered = [one for one, _ in ANY.values() if one.needs_order]
    assert {type(one) for one in ordered} == {Pick, CollectList}
    for one, _ in ANY.values():
        read = {name for e in alone(one, pl.Int64()).partial("a") for name in e.meta.root_names()}
        assert read - {TIME, ORDER} == one.columns_read
        assert bool(read & {TIME, ORDER}) == one.needs_order
