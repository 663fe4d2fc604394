"""Late versions in as-of joins, against plain Python: each row by itself, over the records as they were written.

The model is made from the rule as users read it. A version of time r that its partition's watermark w had
passed counts for rows from w on, less how long corrections go on; one in time counts from r on. Of those
that count for a row, the one with the latest time does, and of equal times the one that is later in the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.testing import Watermark

START = datetime(2026, 1, 1, tzinfo=UTC)
END = START + timedelta(days=1)


@dataclass
class Left:
    at: datetime
    id: int
    k: str | None


@dataclass
class Right:
    at: datetime
    k: str
    w: int
    gone: bool = False


def at(seconds):
    return START + timedelta(seconds=seconds)


keys = st.sampled_from(["a", "b"])
times = st.integers(0, 30)
lefts = st.lists(st.tuples(times, st.sampled_from(["a", "b", None])), max_size=10)
rights = st.lists(st.tuples(times, keys, st.booleans()), max_size=10)


def app_with(delay, **asof):
    app = ms.App("corrected", log="unused")
    rule = ms.watermark(f"{delay} seconds", idle=None)
    # A left row is never late here: what comes late is asked of versions.
    left = app.topic("left", Left, key="k").stream(
        time="at", watermark=ms.watermark("1 hour", idle=None)
    )
    table = app.topic("right", Right, key="k").table(
        time="at", watermark=rule, deleted=pl.col("gone")
    )
    left.join_asof(table.drop("gone", "at"), "k", **asof).view("out", key="id")
    return app


def inputs_of(left, right):
    rows = {
        "left": [Left(at(time), number, key) for number, (time, key) in enumerate(left)],
        "right": [Right(at(t), key, number, gone) for number, (t, key, gone) in enumerate(right)],
    }
    return {topic: [*made, Watermark(topic, at=END)] for topic, made in rows.items()}


def counting(right, *, delay, late, corrected):
    """Return of each version from which time of a row on it counts; None if for none. One partition."""
    found, watermark = [], None
    for time, _, _ in right:
        is_late = watermark is not None and watermark > time
        if not is_late:
            found.append(time)
        elif late == "drop":
            found.append(None)
        else:
            found.append(max(time, watermark - corrected))
        watermark = time - delay if watermark is None else max(watermark, time - delay)
    return found


def expected(left, right, *, delay, late, corrected=0, inner=False, tolerance=None):
    since = counting(right, delay=delay, late=late, corrected=corrected)
    rows = []
    for number, (time, key) in enumerate(left):
        versions = [
            (t, n)
            for n, (t, k, _) in enumerate(right)
            if k == key and since[n] is not None and since[n] <= time
        ]
        found = max(versions, default=None)
        if found is not None and tolerance is not None and time - found[0] > tolerance:
            found = None
        value = None if found is None or right[found[1]][2] else found[1]
        if value is not None or not inner:
            rows.append((number, value))
    return rows


def ways(seed):
    return {"batches": 1 + seed % 9, "partitions": 1, "seed": seed, "crash": seed % 3}


def found(out):
    return out["out"].select("id", "w").sort("id").rows()


@settings(max_examples=some(60))
@given(
    lefts,
    rights,
    st.sampled_from([0, 5]),
    st.sampled_from(["drop", "keep"]),
    st.sampled_from([None, 4]),
    st.integers(0, 999),
)
def test_a_late_version_counts_for_the_rows_after_its_partitions_watermark(
    left, right, delay, late, tolerance, seed
):
    limit = None if tolerance is None else f"{tolerance} seconds"
    app = app_with(delay, late=late, tolerance=limit)
    out = testing.run(app, inputs_of(left, right), **ways(seed))
    model = {"delay": delay, "late": late, "tolerance": tolerance}
    # The last row, which moves the watermark, is at the end; left rows wait an hour, and so see all versions.
    assert found(out) == expected(left, right, **model)


@settings(max_examples=some(80))
@given(
    lefts,
    rights,
    st.sampled_from([0, 5]),
    st.sampled_from([2, 8, 60]),
    st.sampled_from([None, 4]),
    st.integers(0, 999),
)
def test_rows_that_came_out_are_put_right_by_late_versions(
    left, right, delay, corrected, tolerance, seed
):
    app = ms.App("corrected", log="unused")
    stream = app.topic("left", Left, key="k").stream(
        time="at",
        watermark=ms.watermark("0 seconds", idle=None),
        lateness="40 seconds",
        late="drop",
    )
    rule = ms.watermark(f"{delay} seconds", idle=None)
    table = app.topic("right", Right, key="k").table(
        time="at", watermark=rule, deleted=pl.col("gone")
    )
    options = {"late": "correct", "lateness": f"{corrected} seconds"}
    if tolerance is not None:
        options["tolerance"] = f"{tolerance} seconds"
    stream.join_asof(table.drop("gone", "at"), "k", **options).view("out", key="id")
    out = testing.run(app, inputs_of(left, right), **ways(seed))
    # The left rows wait 40 seconds for late ones of theirs, and so count versions from so much earlier on.
    model = {"delay": delay, "late": "correct", "corrected": corrected + 40, "tolerance": tolerance}
    assert found(out) == expected(left, right, **model)


@settings(max_examples=some(60))
@given(lefts, rights, st.booleans(), st.sampled_from([1, 4, 7]), st.integers(0, 999))
def test_within_the_bound_corrections_give_what_a_join_over_all_records_gives(
    left, right, inner, partitions, seed
):
    """Sorted left rows, which come out at once; and versions in any order and any partition."""
    app = ms.App("corrected", log="unused")
    rule = ms.watermark("0 seconds", idle=None)
    stream = app.topic("left", Left, key="id").stream(time="at", watermark=rule)
    table = app.topic("right", Right, key="k").table(
        time="at", watermark=rule, deleted=pl.col("gone")
    )
    joined = stream.join_asof(
        table.drop("gone", "at"),
        "k",
        how="inner" if inner else "left",
        late="correct",
        lateness="1 hour",
    )
    joined.group_by("id", "w").agg(n=ms.count()).view("out")
    left = sorted(left, key=lambda row: row[0])
    out = testing.run(app, inputs_of(left, right), **{**ways(seed), "partitions": partitions})
    assert out["out"].sort("id").select("id", "w").rows() == expected(
        left, right, delay=0, late="correct", corrected=3600, inner=inner
    )
    assert (out["out"]["n"] == 1).all()
    assert out.late == 0


# ── worked examples ─────────────────────────────────────────────────────────────────────────


def run_with(asof, left, right, batches):
    app = app_with(0, **asof)
    return testing.run(app, inputs_of(left, right), batches=batches, partitions=1)


def test_rates_that_are_written_in_another_order_than_that_of_their_dates_all_count():
    rates = [(20, "a", False), (10, "a", False), (0, "b", False)]
    left = [(25, "a"), (25, "b")]
    for batches in range(1, 6):
        assert found(run_with({}, left, rates, batches)) == [(0, 0), (1, 2)]
        assert found(run_with({"late": "drop"}, left, rates, batches)) == [(0, 0), (1, None)]


def test_a_version_from_before_a_deletion_stays_hidden_however_late_it_is():
    right = [(0, "a", False), (10, "a", True), (50, "b", False), (5, "a", False)]
    for batches in range(1, 6):
        assert found(run_with({}, [(100, "a")], right, batches)) == [(0, None)]


def test_a_correction_takes_the_row_back_first():
    app = ms.App("corrected", log="unused")
    rule = ms.watermark("0 seconds", idle=None)
    stream = app.topic("left", Left, key="k").stream(time="at", watermark=rule)
    table = app.topic("right", Right, key="k").table(time="at", watermark=rule).drop("gone", "at")
    seen = []
    stream.join_asof(table, "k", late="correct", lateness="1 minute").foreach(
        lambda rows, context: seen.append(rows.select("id", "w", "_diff").rows()), name="seen"
    )
    inputs = {
        "left": [Left(at(10), 1, "a"), Watermark("left", at=at(30))],
        "right": [
            Right(at(0), "a", 702),
            Right(at(30), "a", 800),
            testing.Tick("1 second"),
            Right(at(5), "a", 715),
        ],
    }
    testing.run(app, inputs, partitions=1)
    assert [row for batch in seen for row in batch] == [
        (1, 702, 1),
        (1, 702, -1),
        (1, 715, 1),
    ]


@pytest.mark.parametrize(
    ("asof", "message"),
    [
        ({"late": "correct"}, "and no lateness"),
        ({"late": "correct", "lateness": "0 seconds"}, "and no lateness"),
        ({"lateness": "1 day"}, "how long results are corrected"),
        ({"late": "correct", "lateness": timedelta.max}, "at most 36,525 days"),
        ({"late": "side"}, "join_asof's late is 'side'"),
    ],
)
def test_options_that_do_not_fit_are_refused(asof, message):
    with pytest.raises(ConfigError) as refused:
        app_with(0, **asof)
    assert message in str(refused.value)


def test_late_quotes_count_only_looking_backward():
    app = ms.App("quotes", log="unused")
    left = app.topic("left", Left, key="k").stream(time="at")
    right = app.topic("right", Right, key="k").stream(time="at")
    options = {"direction": "nearest", "tolerance": "1 s", "late": "correct", "lateness": "1 s"}
    with pytest.raises(ConfigError, match="count only for"):
        left.join_asof(right, "k", **options)


def test_a_final_window_below_counts_corrected_rows_once():
    app = ms.App("corrected", log="unused")
    rule = ms.watermark("0 seconds", idle=None)
    stream = app.topic("left", Left, key="k").stream(time="at", watermark=rule)
    table = app.topic("right", Right, key="k").table(time="at", watermark=rule).drop("gone", "at")
    joined = stream.join_asof(table, "k", late="correct", lateness="1 minute")
    joined.window(ms.tumbling("10 seconds"), by="k").agg(n=ms.count(), w=ms.sum("w")).view("out")
    right = [(0, "a", False), (30, "a", False), (5, "a", False), (12, "a", False), (40, "b", False)]
    inputs = inputs_of([(4, "a"), (8, "a"), (15, "a"), (35, "a")], right)
    for seed in range(12):
        out = testing.run(app, inputs, **ways(seed))["out"]
        assert out.sort("window_start").select("n", "w").rows() == [(2, 0 + 2), (1, 3), (1, 1)]
