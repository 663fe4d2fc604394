"""Aggregates of the user's own: kept by pickle or by type, merged in any grouping, tried out early."""

import random
from collections import Counter

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import ConfigError, UserCodeError
from millstream.kernels.aggregates.user_defined import UserAggregate, UserDefined
from millstream.kernels.frames import DIFF

V = pl.col("v")


class Range(UserAggregate):
    """The distance of the greatest from the least; kept by pickle; rows cannot be taken back."""

    result_type = pl.Int64

    def zero(self):
        return []

    def add(self, state, value):
        return self.merge(state, [] if value is None else [value])

    def merge(self, state, other):
        both = state + other
        return [min(both), max(both)] if both else []

    def result(self, state):
        return state[1] - state[0] if state else None


class Votes(UserAggregate):
    """A majority among dicts, kept as a list of structs, with a way back."""

    result_type = pl.String()
    state_type = pl.List(pl.Struct({"who": pl.String, "votes": pl.Int64}))

    def zero(self):
        return []

    def add(self, state, value):
        return self.merge(state, [{"who": value["v"], "votes": value["w"]}])

    def retract(self, state, value):
        return self.merge(state, [{"who": value["v"], "votes": -value["w"]}])

    def merge(self, state, other):
        votes = Counter()
        for entry in [*state, *other]:
            votes[entry["who"]] += entry["votes"]
        return [{"who": who, "votes": n} for who, n in sorted(votes.items()) if n]

    def result(self, state):
        return max(state, key=lambda e: (e["votes"], e["who"]))["who"] if state else None


rngs = st.integers(0, 2**32).map(random.Random)


@settings(deadline=None, max_examples=some(25))
@given(st.lists(st.tuples(st.integers(0, 2), st.none() | st.integers(-9, 9)), max_size=40), rngs)
def test_the_answer_is_that_of_adding_all_values_to_one_state(aggregate, rows, rng):
    frame = pl.DataFrame(rows, schema={"k": pl.Int64, "v": pl.Int64}, orient="row")
    found = aggregate(frame, {"a": UserDefined(V, Range())}, rng)
    for key, answers in found.items():
        values = [v for k, v in rows if k == key and v is not None]
        assert answers["a"] == (max(values) - min(values) if values else None)


@settings(deadline=None, max_examples=some(25))
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3)), max_size=30), rngs)
def test_values_taken_back_leave_the_answer_of_the_others(aggregate, votes, rng):
    gone = votes[::3]
    changes = [(0, *vote, 1) for vote in votes + gone] + [(0, *vote, -1) for vote in gone]
    rng.shuffle(changes)
    schema = {"k": pl.Int64, "v": pl.String, "w": pl.Int64, DIFF: pl.Int8}
    frame = pl.DataFrame(changes, schema=schema, orient="row")
    one = UserDefined(pl.struct("v", "w"), Votes())
    assert one.columns_read == {"v", "w"}
    found = aggregate(frame, {"a": one}, rng, changes=True)
    counted = Counter()
    for who, n in votes:
        counted[who] += n
    best = max(counted, key=lambda who: (counted[who], who)) if counted else None
    assert found == ({0: {"a": best}} if votes else {})


def test_a_class_without_retract_is_refused_over_rows_that_can_be_taken_back():
    with pytest.raises(ConfigError, match=r"Range .* has no retract. Give it one"):
        UserDefined(V, Range()).for_retractions()


def bound(own):
    rows = pl.DataFrame(schema={"v": pl.Int64})
    return UserDefined(V, own).bound("a", lambda e: rows.select(e).dtypes[0])


def test_an_error_in_the_class_names_file_line_and_aggregate():
    class Broken(Range):
        def add(self, state, value):
            return state[value]

    one = bound(Broken())
    frame = pl.DataFrame({"k": [1], "v": [7]})
    with pytest.raises(
        UserCodeError, match=r"Broken, the aggregate 'a', failed at .*test_user_defined"
    ):
        frame.group_by("k").agg(*one.partial("a"))


class NoType(Range):
    result_type = "int"


class HalfAType(Range):
    state_type = pl.List


class WrongResult(Range):
    def result(self, state):
        return "none"


class WrongState(Range):
    state_type = pl.Int64()


class Failing(Range):
    def merge(self, state, other):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (NoType, "NoType.result_type is 'int'. Give a polars type"),
        (HalfAType, "HalfAType.state_type is List. Give a polars type"),
        (WrongResult, "does not hold together"),
        (WrongState, "does not hold together"),
        (Failing, "ValueError: no"),
    ],
)
def test_a_class_that_does_not_hold_together_is_refused_when_it_is_declared(own, said):
    with pytest.raises(ConfigError, match=said):
        bound(own())
