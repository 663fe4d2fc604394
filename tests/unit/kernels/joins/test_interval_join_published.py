"""Published cases of joins within an interval: H1 to H7 of the reference, in any batches.

The shapes are those of Apache Kafka's and Apache Flink's documentation and tests; values are derived by the rule.
Events of both sides are in one topic, as Kafka's stream time is that of both.
"""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

import polars as pl
import pytest

import millstream as ms
from millstream import testing

START = datetime(1970, 1, 1, tzinfo=UTC)
BATCHINGS = 20


@dataclass
class Event:
    at: datetime
    side: str
    v: str
    k: str | None = "k"


def event(at_ms, side, v, k="k"):
    return Event(START + timedelta(milliseconds=at_ms), side, v, k)


def seconds_event(at, side, v, k="k"):
    return event(at * 1000, side, v, k)


def app_of(how, within, *, lateness="0 seconds", delay="0 seconds", **options):
    app = ms.App("published", log="unused", buckets=1)
    events = app.topic("t", Event, partitions=1).stream(
        time="at", watermark=ms.watermark(delay), lateness=lateness
    )
    left, right = (events.filter(pl.col("side") == side) for side in "lr")
    joined = left.join(right, "k", within=within, how=how, **options)
    joined.select("k", "v", "v_right").to("out")
    return app


def shown(table):
    """Return rows in their order: ``A+b``, and ``-A+null`` where one is taken back."""
    if not table.height:
        return []
    names = {None: "null"}
    return [
        ("-" if row.get("__diff", 1) < 0 else "")
        + "+".join(names.get(row[name], row[name]) for name in ("v", "v_right"))
        for row in table.iter_rows(named=True)
    ]


def steps(rows_given, app, events):
    """Return what each event leads to, with a batch for each."""
    found = []
    for count in range(1, len(events) + 1):
        before = Counter(of for each in found for of in each)
        out = shown(rows_given(app, {"t": events[:count]}).rows["to(out)"])
        found.append(sorted((Counter(out) - before).elements()))
    return found


def check_in_any_batches(rows_given, make_app, events, expected):
    """Make sure that the rows are the same in random batches; of signed rows, their sum is."""
    for seed in range(BATCHINGS):
        out = rows_given(make_app(), {"t": events}, batches=1 + seed % 7, seed=seed)
        total = Counter()
        for row in shown(out.rows["to(out)"]):
            total[row.removeprefix("-")] += -1 if row.startswith("-") else 1
        assert Counter({row: n for row, n in total.items() if n}) == Counter(expected), seed


# ── H1: the table of Kafka's documentation; what closes exactly at the end is a moment later ─────

MATRIX = [
    (3, "l", "A"), (4, "r", "a"), (5, "l", "B"), (6, "r", "b"), (9, "l", "C"), (10, "r", "c"),
    (14, "r", "d"), (15, "l", "D"), (40, "l", "E"), (61, "l", "F"), (82, "r", "f"), (103, "l", "G"),
]  # fmt: skip
PAIRS = [
    [], ["A+a"], ["B+a"], ["A+b", "B+b"], ["C+a", "C+b"], ["A+c", "B+c", "C+c"],
    ["A+d", "B+d", "C+d"], ["D+a", "D+b", "D+c", "D+d"], [], [], [], [],
]  # fmt: skip
ALONE = {
    "inner": {},
    "left": {9: ["E+null"], 10: ["F+null"]},
    "right": {11: ["null+f"]},
    "full": {9: ["E+null"], 10: ["F+null"], 11: ["null+f"]},
}


@pytest.mark.parametrize("how", ALONE)
def test_h1_kafkas_matrix_of_joins(rows_given, how):
    events = [seconds_event(*row) for row in MATRIX]
    make = partial(app_of, how, ("-15 seconds", "15 seconds"), lateness="5 seconds")
    expected = [pairs + ALONE[how].get(number, []) for number, pairs in enumerate(PAIRS)]
    assert steps(rows_given, make(), events) == expected
    check_in_any_batches(rows_given, make, events, [row for rows in expected for row in rows])


def test_h1_nothing_comes_out_exactly_at_the_close(rows_given):
    make = partial(app_of, "left", ("-15 seconds", "15 seconds"), lateness="5 seconds")
    events = [seconds_event(40, "l", "E"), seconds_event(60, "l", "F"), seconds_event(61, "l", "G")]
    assert steps(rows_given, make(), events) == [[], [], ["E+null"]]


def test_spark_an_upper_bound_of_five_minutes_is_over_at_six_and_not_at_five(rows_given):
    make = partial(app_of, "left", ("0 seconds", "5 minutes"))
    events = [seconds_event(60 * at, "l", name, name) for at, name in enumerate("abcdefg")]
    assert steps(rows_given, make(), events)[4:] == [[], [], ["a+null"]]


# ── H2: what was due earlier comes first ────────────────────────────────────────────────────────


def test_h2_a_row_alone_comes_before_later_pairs(rows_given):
    make = partial(app_of, "full", ("-100 ms", "100 ms"))
    events = [event(0, "l", "A0", "0"), event(100, "l", "A1", "1"), event(110, "r", "11", "1")]
    assert steps(rows_given, make(), events) == [[], [], ["A0+null", "A1+11"]]
    for seed in range(BATCHINGS):
        out = rows_given(make(), {"t": events}, batches=1 + seed % 4, seed=seed)
        assert shown(out.rows["to(out)"]) == ["A0+null", "A1+11"]


# ── H3: with a grace period ─────────────────────────────────────────────────────────────────────


def test_h3_rows_alone_wait_for_the_grace_period(rows_given):
    make = partial(app_of, "full", ("-100 ms", "100 ms"), lateness="10 ms")
    events = [
        event(0, "l", "A0", "0"),
        event(0, "r", "11", "1"),
        event(101, "l", "A1", "1"),
        event(101, "r", "10", "0"),
        event(112, "r", "100", "0"),
    ]
    expected = [[], [], [], [], ["A0+null", "null+11"]]
    assert steps(rows_given, make(), events) == expected
    check_in_any_batches(rows_given, make, events, expected[-1])
    events[-1] = event(110, "r", "100", "0")
    assert steps(rows_given, make(), events)[-1] == []


# ── H4: not the same to both sides: the right row is from 5 before to 20 after ────────────────


def test_h4_each_side_waits_for_as_long_as_its_partners_may_come(rows_given):
    make = partial(app_of, "full", ("-5 ms", "20 ms"))
    events = [
        event(29, "l", "A0", "0"),
        event(31, "r", "12", "2"),  # waits until 36
        event(36, "l", "A1", "1"),
        event(37, "l", "A2", "1"),
        event(44, "r", "13", "3"),  # waits until 49
        event(44, "r", "14", "4"),
        event(49, "l", "A3", "1"),  # A0 waits until 49, too
        event(50, "l", "A4", "1"),
    ]
    expected = [[], [], [], ["null+12"], [], [], [], ["A0+null", "null+13", "null+14"]]
    assert steps(rows_given, make(), events) == expected
    check_in_any_batches(rows_given, make, events, [row for rows in expected for row in rows])


# ── H5: bounds to the millisecond, and keys that are null ───────────────────────────────────────


@pytest.mark.parametrize("nulls_equal", [False, True])
def test_h5_bounds_are_inclusive_to_the_millisecond(rows_given, nulls_equal):
    make = partial(
        app_of, "inner", ("-5 seconds", "6 seconds"), delay="1 minute", nulls_equal=nulls_equal
    )
    events = [
        event(at, "l", f"L{at / 1000:g}", key)
        for at, key in ((999, "A"), (1000, "A"), (12_000, "A"), (12_001, "A"), (5000, None))
    ]
    # The left row is from 6 seconds before to 5 after.
    events += [event(7000, "r", "R7", "A"), event(6000, "r", "R6", None)]
    expected = ["L1+R7", "L12+R7"] + ["L5+R6"] * nulls_equal
    check_in_any_batches(rows_given, make, events, expected)
    check_in_any_batches(rows_given, make, events[::-1], expected)


# ── H6: eager rows ──────────────────────────────────────────────────────────────────────────────


def test_h6_a_row_that_came_out_alone_is_taken_back_once(rows_given):
    make = partial(app_of, "left", ("0 seconds", "10 seconds"), emit="eager")
    events = [seconds_event(0, "l", "l"), seconds_event(3, "r", "r"), seconds_event(4, "r", "r2")]
    check_in_any_batches(rows_given, make, events, ["l+r", "l+r2"])
    whole = set()
    for seed in range(BATCHINGS):
        table = rows_given(make(), {"t": events}, batches=9, seed=seed).rows["to(out)"]
        whole.add(tuple(tuple(shown(part)) for part in table.partition_by("batch")))
    assert (("l+null",), ("-l+null", "l+r"), ("l+r2",)) in whole
    assert all("-l+null" not in batch or batch[1] == "l+r" for way in whole for batch in way)


# ── H7: a left join and a window behind it ──────────────────────────────────────────────────────


def test_h7_a_window_behind_a_left_join_counts_rows_with_and_without_partners(rows_given):
    def make():
        app = ms.App("published", log="unused")
        events = app.topic("t", Event, partitions=1).stream(
            time="at", watermark=ms.watermark("0 seconds")
        )
        left, right = (events.filter(pl.col("side") == side) for side in "lr")
        joined = left.join(right, "k", within=("0 seconds", "5 seconds"), how="left")
        counted = joined.window(ms.tumbling("10 seconds"), name="windows").agg(
            rows=ms.count(), matched=ms.count(pl.col("v_right").is_not_null())
        )
        counted.to("out")
        return app

    events = [
        seconds_event(5, "l", "alone", "1"),
        seconds_event(12, "l", "paired", "2"),
        seconds_event(15, "r", "partner", "2"),
        seconds_event(60, "l", "last", "3"),
    ]
    for seed in range(BATCHINGS):
        out = rows_given(make(), {"t": events}, batches=1 + seed % 5, seed=seed)
        table = out.rows["to(out)"].sort("window_end")
        ends = [(end - START).seconds for end in table["window_end"]]
        assert list(zip(ends, table["rows"], table["matched"], strict=True)) == [
            (10, 1, 0),
            (20, 1, 1),
        ]
        assert out.books["windows"]["late"] == 0


def test_published_cases_survive_crashes():
    app = app_of("full", ("-15 seconds", "15 seconds"), lateness="5 seconds")
    events = [seconds_event(*row) for row in MATRIX]
    out = testing.run(app, {"t": events}, batches=6, crash=3, seed=2)
    expected = [row for rows in PAIRS for row in rows]
    expected += [row for rows in ALONE["full"].values() for row in rows]
    assert sorted(shown(out.topic("out"))) == sorted(expected)
