"""Joins of two streams within an interval, against a naive model: all pairs over all rows that are in time.

The model is the published rule: keys are equal, the right time is from ``lower`` to ``upper`` after the left
one, both inclusive; a row without a partner comes out once the watermark is strictly above the last time at
which a partner would be in time. Whole seconds stand for time.
"""

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

START = datetime(1970, 1, 1, tzinfo=UTC)
NEVER = float("-inf")
FOREVER = 10_000


@dataclass
class Event:
    at: datetime
    k: str | None
    n: int
    side: str = ""


@dataclass(frozen=True)
class Given:
    """A row as it is drawn; ``part`` chooses its partition."""

    side: str
    at: int
    k: str | None
    n: int
    part: int = 0


@dataclass(frozen=True)
class Setup:
    """A join as it is drawn. ``topics``: "two", "one" (with two filters), "self"."""

    lower: int
    upper: int
    how: str = "full"
    emit: str = "final"
    nulls_equal: bool = False
    lateness: tuple[int, int] = (0, 0)
    delay: int = 0
    topics: str = "two"
    partitions: int = 1
    closed: bool = True


def instant(at):
    return START + timedelta(seconds=at)


def seconds(count):
    return timedelta(seconds=count)


def joined(setup, *, buckets=2):
    """Declare the join of a setup."""
    app = ms.App("joins", log="unused", buckets=buckets)
    watermark = ms.watermark(seconds(setup.delay), idle=None)

    def stream(topic, lateness):
        return topic.stream(time="at", watermark=watermark, lateness=seconds(lateness))

    if setup.topics == "two":
        left, right = (
            stream(app.topic(name, Event), lateness)
            for name, lateness in zip("lr", setup.lateness, strict=True)
        )
    else:
        both = stream(app.topic("t", Event), setup.lateness[0])
        left, right = both, both
        if setup.topics == "one":
            left, right = (both.filter(pl.col("side") == side) for side in "lr")
    within = (seconds(setup.lower), seconds(setup.upper))
    options = {"how": setup.how, "emit": setup.emit, "nulls_equal": setup.nulls_equal}
    return app, left.join(right, "k", within=within, name="the join", **options)


def inputs(setup, rows):
    """Return the rows by topic, and watermarks that end all."""
    topics = {"l": [], "r": []} if setup.topics == "two" else {"t": []}
    for row in rows:
        event = Event(instant(row.at), row.k, row.n, row.side)
        topic = row.side if setup.topics == "two" else "t"
        topics[topic].append(testing.Row(event, partition=row.part % setup.partitions))
    if setup.closed:
        for topic, items in topics.items():
            items.append(testing.Watermark(topic, at=instant(FOREVER)))
    return topics


# ── the model ──────────────────────────────────────────────────────────────────────────────────


def in_time(setup, rows):
    """Return the left and right rows in time, how many are late, and the watermark at the end."""
    reached = {}
    names = "lr" if setup.topics == "two" else "t"
    marks = {(name, part): NEVER for name in names for part in range(setup.partitions)}
    kept, late = {"l": [], "r": []}, 0
    lateness = dict(zip("lr", setup.lateness, strict=True))
    if setup.topics != "two":
        lateness["r"] = lateness["l"]
    for row in rows:
        place = (row.side if setup.topics == "two" else "t", row.part % setup.partitions)
        seen = reached.get(place, NEVER)
        for side in "lr" if setup.topics == "self" else row.side:
            if unknown(setup, row, side):
                continue
            if seen > row.at + lateness[side]:
                late += 1
            else:
                kept[side].append(row)
        reached[place] = max(seen, row.at - setup.delay)
    watermark = FOREVER if setup.closed else min((marks | reached).values())
    return kept["l"], kept["r"], late, watermark


def unknown(setup, row, side):
    """Say whether a row can be in no result: it is filtered, and never late."""
    outer = {"l": ("left", "full"), "r": ("right", "full")}[side]
    return row.k is None and not setup.nulls_equal and setup.how not in outer


def matches(setup, left, right):
    if left.k != right.k or (left.k is None and not setup.nulls_equal):
        return False
    return setup.lower <= right.at - left.at <= setup.upper


def result_row(left, right):
    """Return a row of the result: key, numbers, times, and the event time."""
    times = [row.at for row in (left, right) if row is not None]
    return (
        (left or right).k,
        left and left.n,
        right and right.n,
        left and left.at,
        right and right.at,
        max(times),
    )


def model(setup, rows):
    """Return the rows of the result, as a bag, and how many rows are late."""
    lefts, rights, late, watermark = in_time(setup, rows)
    lateness = setup.lateness if setup.topics == "two" else (setup.lateness[0],) * 2
    made = Counter(
        result_row(left, right) for left in lefts for right in rights if matches(setup, left, right)
    )

    def over(row, last_partner):
        without_key = row.k is None and not setup.nulls_equal
        return setup.emit == "eager" or without_key or watermark > last_partner

    if setup.how in ("left", "full"):
        for left in lefts:
            alone = not any(matches(setup, left, right) for right in rights)
            if alone and over(left, left.at + setup.upper + lateness[1]):
                made[result_row(left, None)] += 1
    if setup.how in ("right", "full"):
        for right in rights:
            alone = not any(matches(setup, left, right) for left in lefts)
            if alone and over(right, right.at - setup.lower + lateness[0]):
                made[result_row(None, right)] += 1
    return made, late


# ── what comes out ─────────────────────────────────────────────────────────────────────────────


def at_of(value):
    return None if value is None else int((datetime.fromisoformat(value) - START).total_seconds())


def rows_of(out):
    """Return the bag of rows that were written; rows that are taken back count against it."""
    made = Counter()
    records = out.topic("out")
    for row in records.iter_rows(named=True) if records.height else ():
        time = int((row["timestamp"] - START).total_seconds())
        key = (row["k"], row["n"], row["n_right"], at_of(row["at"]), at_of(row["at_right"]), time)
        made[key] += row.get("_diff", 1)
    return Counter({key: count for key, count in made.items() if count})


def check_frames(rows_given, setup, rows, **options):
    """Compare the rows that the sink is given, and what the ledger counts, with the model."""
    app, stream = joined(setup)
    stream.to("out")
    found = rows_given(app, inputs(setup, rows), partitions=setup.partitions, **options)
    expected, late = model(setup, rows)
    made = Counter()
    for row in found.rows["to(out)"].iter_rows(named=True):
        at, at_right = (row[name] and (row[name] - START).seconds for name in ("at", "at_right"))
        key = (row["k"], row["n"], row["n_right"], at, at_right, row["__time"] // 1_000_000)
        made[key] += row.get("__diff") or 1
    assert Counter({key: count for key, count in made.items() if count}) == expected
    assert found.books.get("the join", Counter())["late"] == late


def check(setup, rows, **options):
    """The same of what is written, with crashes."""
    app, stream = joined(setup)
    stream.to("out")
    out = testing.run(app, inputs(setup, rows), partitions=setup.partitions, **options)
    expected, late = model(setup, rows)
    assert rows_of(out) == expected
    assert out.late == late
    assert out.dead.height == 0
    return out


ROWS = st.lists(
    st.builds(
        Given,
        st.sampled_from("lr"),
        st.integers(0, 40),
        st.sampled_from(["a", "a", "b", None]),
        st.integers(0, 1),
        st.integers(0, 6),
    ),
    max_size=25,
)
NEARLY_SORTED = st.lists(
    st.builds(
        Given,
        st.sampled_from("lr"),
        st.integers(0, 6),
        st.sampled_from(["a", "a", "b", None]),
        st.integers(0, 1),
        st.integers(0, 6),
    ),
    max_size=25,
).map(lambda rows: [Given(r.side, r.at + n, r.k, r.n, r.part) for n, r in enumerate(rows)])
BOUNDS = st.tuples(st.integers(-12, 12), st.integers(0, 12)).map(lambda b: (b[0], b[0] + b[1]))


@st.composite
def setups(draw, **fixed):
    lower, upper = draw(BOUNDS)
    how = fixed.pop("how", None) or draw(st.sampled_from(["inner", "left", "right", "full"]))
    drawn = {
        "nulls_equal": draw(st.booleans()),
        "lateness": (draw(st.sampled_from([0, 0, 3])), draw(st.sampled_from([0, 0, 7]))),
        "delay": draw(st.sampled_from([0, 0, 4, 40])),
        "topics": draw(st.sampled_from(["two", "two", "one", "self"])),
        "partitions": draw(st.sampled_from([1, 1, 4, 7])),
        "closed": draw(st.booleans()),
    }
    return Setup(lower, upper, how, **(drawn | fixed))


RUNS = st.fixed_dictionaries(
    {"batches": st.sampled_from([1, 2, 3, 6]), "seed": st.integers(0, 1000)}
)
OUTER = st.sampled_from(["left", "right", "full"])


@settings(max_examples=some(80))
@given(setups(), ROWS | NEARLY_SORTED, RUNS)
def test_a_join_gives_the_pairs_and_the_rows_alone_that_the_model_gives(
    rows_given, setup, rows, options
):
    check_frames(rows_given, setup, rows, **options)


@settings(max_examples=some(20))
@given(OUTER.flatmap(lambda how: setups(how=how, emit="eager")), ROWS | NEARLY_SORTED, RUNS)
def test_an_eager_join_takes_back_what_is_no_longer_true(rows_given, setup, rows, options):
    check_frames(rows_given, setup, rows, **options)


@settings(max_examples=some(8))
@given(setups() | OUTER.flatmap(lambda how: setups(how=how, emit="eager")), NEARLY_SORTED, RUNS)
def test_crashes_neither_lose_rows_nor_double_them(setup, rows, options):
    check(setup, rows, crash=2, **options)


@settings(max_examples=some(20))
@given(
    OUTER.flatmap(lambda how: setups(how=how, emit="eager", partitions=1)),
    NEARLY_SORTED,
    st.integers(1, 6),
)
def test_nothing_is_taken_back_before_it_was_there(rows_given, setup, rows, batches):
    app, stream = joined(setup, buckets=1)
    stream.to("out")
    out = rows_given(app, inputs(setup, rows), batches=batches).rows["to(out)"]
    there = Counter()
    for row in out.iter_rows(named=True):
        key = (row["n"], row["n_right"], row["at"], row["at_right"], row["k"], row["__time"])
        there[key] += row["__diff"]
        assert there[key] >= 0


@settings(max_examples=some(20))
@given(
    setups(nulls_equal=True),
    NEARLY_SORTED,
    st.integers(1, 8),
    st.sampled_from(["final", "eager"]),
)
def test_nothing_that_comes_out_is_late_for_the_next_operator(
    rows_given, setup, rows, batches, emit
):
    if setup.how != "inner":
        setup = Setup(**{**vars(setup), "emit": emit})
    app, stream = joined(setup)
    stream.window(ms.tumbling("5 seconds"), by=(), name="windows").agg(rows=ms.count()).to("out")
    given_inputs = inputs(setup, rows)
    out = rows_given(app, given_inputs, partitions=setup.partitions, batches=batches, seed=batches)
    assert out.books.get("windows", Counter())["late"] == 0
    if setup.closed:
        expected = Counter()
        for row, count in model(setup, rows)[0].items():
            expected[instant(row[-1] // 5 * 5)] += count
        found = out.rows["to(out)"]
        counted = found.select("window_start", "rows").iter_rows() if found.height else ()
        assert dict(counted) == expected


@settings(max_examples=some(20))
@given(setups(partitions=1), NEARLY_SORTED, st.integers(1, 6))
def test_rows_of_a_batch_come_in_the_order_of_time(rows_given, setup, rows, batches):
    app, stream = joined(setup, buckets=1)
    stream.to("out")
    out = rows_given(app, inputs(setup, rows), batches=batches)
    made = out.rows["to(out)"]
    for table in made.partition_by("batch") if made.height else ():
        assert table["__time"].is_sorted()


def test_state_is_let_go_once_no_partner_can_come(rows_given):
    setup = Setup(-5, 20, lateness=(3, 3), closed=False)
    app, stream = joined(setup)
    stream.to("out")
    rows = [Given(side, at, "ab"[at % 2], 0) for at in range(400) for side in "lr"]
    out = rows_given(app, inputs(setup, rows), batches=40)
    held = Counter()
    for state in out.engine.states.values():
        for store in state.stores.values():
            for table in store.tables.values():
                held["left" if "__time" in table.column_names else "other"] += table.num_rows
    # 23 seconds and 8, of one row a second each, and a slot's width of ten more.
    assert held["left"] <= 23 + 8 + 2 * 10 + 2


def test_both_bounds_are_inclusive():
    setup = Setup(-5, 6, "full")
    rows = [Given("l", 100, "a", 0)]
    rows += [Given("r", 100 + apart, "a", 1) for apart in (-6, -5, 6, 7)]
    out = check(Setup(-5, 6, "full", delay=50), rows)
    pairs = [row[4] for row in rows_of(out) if None not in row]
    assert sorted(pairs) == [95, 106]
    assert matches(setup, rows[0], rows[2])


def test_equal_rows_are_several_rows():
    twice = [Given("l", 1, "a", 0)] * 2 + [Given("r", 2, "a", 0)] * 3 + [Given("l", 3, "b", 0)] * 2
    made = rows_of(check(Setup(0, 5), twice, batches=3))
    assert sorted(made.values()) == [2, 6]


def test_a_join_of_a_stream_with_itself_pairs_each_row_with_itself_too():
    rows = [Given("l", at, "a", at) for at in (1, 3, 9)]
    made = rows_of(check(Setup(-2, 2, "inner", topics="self"), rows, batches=3))
    assert {(row[1], row[2]) for row in made} == {(1, 1), (1, 3), (3, 1), (3, 3), (9, 9)}


def test_null_keys_have_no_partner_and_come_out_alone():
    rows = [Given("l", 1, None, 0), Given("r", 1, None, 1)]
    made = rows_of(check(Setup(-9, 9, "full"), rows))
    assert sorted(row[1:3] for row in made if row[1] is not None) == [(0, None)]
    assert sorted(row[1:3] for row in made if row[2] is not None) == [(None, 1)]
    assert set(rows_of(check(Setup(-9, 9, "full", nulls_equal=True), rows))) == {
        (None, 0, 1, 1, 1, 1)
    }


def test_rows_that_cannot_be_in_the_result_are_counted_as_filtered():
    rows = [Given("l", 1, None, 0), Given("r", 1, None, 1), Given("r", 2, "a", 1)]
    out = check(Setup(-9, 9, "left"), rows)
    counts = out.ledger.filter(step="the join").sum().to_dicts()[0]
    assert (counts["read"], counts["held"], counts["filtered"]) == (3, 2, 1)


def test_an_idle_partition_does_not_hold_back_rows_alone():
    app = ms.App("idle", log="unused")
    left, right = (
        app.topic(name, Event).stream(
            time="at", watermark=ms.watermark("0 seconds", idle="1 minute")
        )
        for name in "lr"
    )
    left.join(right, "k", within=("0 seconds", "10 seconds"), how="left").to("out")
    tick = testing.Tick(after="2 minutes")

    def row(at, k, n, partition):
        return testing.Row(Event(instant(at), k, n), partition=partition)

    rows = {
        "l": [row(1, "a", 1, 0), row(2, "b", 2, 1), tick, row(60, "c", 3, 0), row(61, "c", 4, 0)],
        "r": [row(3, "a", 1, 0), tick, row(60, "c", 3, 0)],
    }
    # Partition 1 of both topics has nothing more to say.
    out = testing.run(app, rows, partitions=2, batches=2)
    assert {(row[1], row[2]) for row in rows_of(out)} == {(1, 1), (2, None), (3, 3)}


def test_pairs_of_windows_and_events_are_joined():
    app = ms.App("windows", log="unused")
    events = app.topic("t", Event).stream(time="at", watermark=ms.watermark("0 seconds"))
    per_window = events.window(ms.tumbling("10 seconds"), by="k").agg(rows=ms.count())
    joined = events.join(per_window, "k", within=("0 seconds", "9999999 us"), how="full")
    joined.select("k", "n", "rows").to("out")
    rows = [Given("l", at, "ab"[at % 2], at) for at in (1, 2, 3, 11, 12, 99)]
    items = [Event(instant(row.at), row.k, row.n) for row in rows]
    items.append(testing.Watermark("t", at=instant(FOREVER)))
    for batches in (1, 2, 7):
        out = testing.run(app, {"t": items}, batches=batches, partitions=1, seed=batches)
        assert sorted(out.topic("out").select("n", "rows").iter_rows()) == [
            (1, 2), (2, 1), (3, 2), (11, 1), (12, 1), (99, 1),
        ]  # fmt: skip


def test_joined_rows_are_kept_in_a_view():
    app, stream = joined(Setup(0, 5, "left", "eager"))
    stream.view("latest", key=("k", "n"))
    rows = [Given("l", 1, "a", 1), Given("l", 2, "b", 2), Given("r", 4, "a", 7)]
    out = testing.replay(app, inputs(Setup(0, 5, "left"), rows), batchings=5, partitions=(1,))
    assert list(out["latest"].select("k", "n", "n_right").iter_rows()) == [
        ("a", 1, 7),
        ("b", 2, None),
    ]


def test_columns_may_have_names_that_look_like_patterns():
    app = ms.App("odd", log="unused")
    watermark = ms.watermark("0 seconds")
    left, right = (app.topic(name, Event).stream(time="at", watermark=watermark) for name in "lr")
    names = {"k": "^k.*$", "n": "^.*$"}
    pairs = left.rename(names).join(
        right.rename(names), "^k.*$", within=("0 seconds", "5 seconds"), how="full"
    )
    pairs.rename({"^k.*$": "k", "^.*$": "n", "^.*$_right": "n_right"}).to("out")
    setup = Setup(0, 5)
    rows = [
        Given("l", 1, "a", 1),
        Given("r", 2, "a", 2),
        Given("l", 3, "b", 3),
        Given("r", 1, "c", 1),
    ]
    out = testing.run(app, inputs(setup, rows), partitions=1, batches=3)
    assert rows_of(out) == model(setup, rows)[0]


@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
def test_the_order_of_arrival_changes_nothing(how):
    rows = [
        Given("l", 5, "a", 0),
        Given("l", 9, "b", 1),
        Given("r", 7, "a", 2),
        Given("r", 1, "b", 3),
    ]
    setup = Setup(-8, 2, how, delay=50)
    expected = rows_of(check(setup, rows))
    for seed in range(4):
        assert rows_of(check(setup, rows[::-1], batches=4, seed=seed)) == expected


@pytest.mark.parametrize("emit", ["final", "eager"])
@pytest.mark.parametrize("how", ["left", "right"])
def test_the_output_watermark_waits_for_rows_alone(rows_given, how, emit):
    bounds = {"left": (0, 60), "right": (-60, 0)}[how]
    setup = Setup(*bounds, how, emit, topics="one")
    rows = [Given(how[0], at, str(at), at) for at in range(0, 200, 5)]
    # Partners that come late in the interval: of eager rows, what was alone is taken back then.
    other = "r" if how == "left" else "l"
    rows += [Given(other, at + 55, str(at), at) for at in range(0, 200, 50)]
    rows.sort(key=lambda row: row.at)
    app, stream = joined(setup)
    stream.window(ms.tumbling("5 seconds"), by=(), name="windows").agg(rows=ms.count()).to("out")
    expected = Counter()
    for row, count in model(setup, rows)[0].items():
        expected[instant(row[-1] // 5 * 5)] += count
    for batches in (1, 20, 40):
        out = rows_given(app, inputs(setup, rows), batches=batches, seed=batches)
        assert out.books["windows"]["late"] == 0
        assert dict(out.rows["to(out)"].select("window_start", "rows").iter_rows()) == expected


def test_a_row_waits_for_the_lateness_of_its_partners(rows_given):
    rows = [Given("l", 10, "a", 1), Given("r", 15, "b", 2), Given("r", 10, "a", 3)]
    rows += [Given("l", 15, "c", 4), Given("l", 15, "d", 5)]
    for lateness, late in (((0, 5), 0), ((5, 0), 1)):
        setup = Setup(0, 0, "left", lateness=lateness)
        check_frames(rows_given, setup, rows, batches=5)
        assert model(setup, rows)[1] == late
    # The left row is due at 10 + 0, and the right one in time until 15: it is held until then.
    for seed in range(8):
        setup = Setup(0, 0, "left", lateness=(0, 5))
        check_frames(rows_given, setup, rows, batches=8, seed=seed)
