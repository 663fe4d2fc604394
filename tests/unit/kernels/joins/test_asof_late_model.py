"""As-of joins of rows that come out of order, some too late, against plain Python: what is in time, joined at once.

Whether a row is in time is for its own partition to say: it is late if an earlier one had brought the
watermark above it. Which rows are in time decides the result, and nothing else does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.testing import Row, Watermark

START = datetime(2026, 1, 1, tzinfo=UTC)
NEVER = -(10**9)


@dataclass
class Event:
    at: datetime
    k: str | None
    n: int
    gone: bool = False


drawn = st.lists(
    st.tuples(
        st.integers(0, 15),
        st.sampled_from(["a", "a", "b", None]),
        st.booleans(),
        st.integers(0, 6),  # the partition
    ),
    max_size=14,
)


def in_time(rows, partitions, delay, *, unknown):
    """Return the rows in time, with their places, and how many are late; ``unknown`` rows count as neither."""
    reached, kept, late = {}, [], 0
    for number, (time, key, gone, part) in enumerate(rows):
        place = part % partitions
        if not unknown(key):
            if reached.get(place, NEVER) > time:
                late += 1
            else:
                kept.append((time, (place, number), key, gone, number))
        reached[place] = max(reached.get(place, NEVER), time - delay)
    return kept, late


def of_the_time(left, right, *, nulls_equal, versions):
    """Return the number of the version or quote that the left row has."""
    time, _, key, *_ = left
    if key is None and not nulls_equal:
        return None
    known = [row for row in right if row[2] == key and row[0] <= time]
    last = max(known, default=None, key=lambda row: row[:2])
    return None if last is None or (versions and last[3]) else last[4]


@pytest.mark.parametrize("versions", [True, False])
@settings(max_examples=some(25))
@given(
    drawn,
    drawn,
    st.tuples(st.sampled_from([0, 3, 20]), st.sampled_from([0, 3, 20])),
    st.booleans(),
    st.sampled_from(["left", "inner"]),
    st.sampled_from([1, 4, 7]),
    st.integers(0, 999),
)
def test_each_row_in_time_has_the_version_in_time_that_was_valid_at_its_time(
    versions, left, right, delays, nulls_equal, how, partitions, seed
):
    if versions:  # a table of a topic has no null among its keys
        right = [row for row in right if row[1] is not None]
    app = ms.App("late", log="unused")
    rules = [ms.watermark(timedelta(seconds=delay), idle=None) for delay in delays]
    stream = app.topic("left", Event, key="n").stream(time="at", watermark=rules[0])
    topic = app.topic("right", Event, key="n")
    other = topic.stream(time="at", watermark=rules[1])
    if versions:
        other = other.table("k", deleted=pl.col("gone"))
    joined = stream.join_asof(
        other, "k", how=how, nulls_equal=nulls_equal, late="drop", name="join"
    )
    joined.view("out", key="n")

    # The key of a table is never null, so there null is equal to nothing.
    without_key = how == "inner" and (versions or not nulls_equal)
    lefts, late = in_time(
        left, partitions, delays[0], unknown=lambda key: key is None and without_key
    )
    rights, late_rights = in_time(
        right, partitions, delays[1], unknown=lambda key: key is None and not nulls_equal
    )
    meant = Counter()
    for row in lefts:
        found = of_the_time(row, rights, nulls_equal=nulls_equal, versions=versions)
        if how == "left" or found is not None:
            meant[row[4], found] += 1

    inputs = {}
    for name, rows in (("left", left), ("right", right)):
        made = [
            Row(Event(START + timedelta(seconds=at), key, n, gone), partition=part % partitions)
            for n, (at, key, gone, part) in enumerate(rows)
        ]
        inputs[name] = [*made, Watermark(name, at=START + timedelta(days=1))]
    out = testing.run(
        app, inputs, batches=1 + seed % 6, partitions=partitions, seed=seed, crash=seed % 3
    )
    assert Counter(out["out"].select("n", "n_right").rows()) == meant
    assert (out.late, out.dead.height) == (late + late_rights, 0)
