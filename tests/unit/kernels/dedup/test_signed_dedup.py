"""Of rows that may be taken back, deduplication keeps what the published rule keeps of those that are there."""

from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from signed_rows import (
    START,
    UNIT,
    Change,
    Event,
    Kernel,
    at,
    histories,
    signed_stream,
    summed,
)

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, CorruptionError
from millstream.kernels.dedup import signed_dedup
from millstream.kernels.frames import DIFF, TIME, visible


@pytest.fixture(autouse=True, scope="module")
def narrow_slots():
    """Divide the state into many slots, although times are a few microseconds apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signed_dedup, "_SLOT_US_MIN", 1)
        yield


drawn = settings(deadline=None, max_examples=some(40))


def kept(rows, ids, within):
    """Give the rows ``(time, values…)`` that are kept: in order, each that no kept one before it is near to."""
    last, found = {}, Counter()
    for time, *values in sorted(rows, key=nulls_first):
        key = tuple(values[place] for place in ids)
        if None in key or key not in last or time - last[key] > within:
            last[key] = time
            found[time, *values] += 1
    return found


def nulls_first(row):
    return [(value is not None, 0 if value is None else value) for value in row]


def told(rows):
    if rows is None:
        return []
    return rows.select(DIFF, TIME, "key", "n").rows()


def kernel_of(ids, within, *, lateness=0, **options):
    stream = signed_stream(lateness=lateness)
    return Kernel.of(stream.dedup(ids, within=within * UNIT, **options))


IDS = {"key": [0], "n": [1], "both": [0, 1]}


@drawn
@given(
    history=histories(),
    ids=st.sampled_from(list(IDS)),
    within=st.sampled_from([0, 1, 4, 15, 60]),
    lateness=st.sampled_from([0, 3, 30]),
    nulls=st.booleans(),
)
def test_what_was_emitted_and_not_taken_back_is_what_the_rule_keeps(
    history, ids, within, lateness, nulls
):
    names = {"key": "key", "n": "n", "both": ["key", "n"]}[ids]
    kernel = kernel_of(names, within, lateness=lateness)
    there, bag, late = Counter(), Counter(), 0
    for number, (changes, watermark) in enumerate(history):
        late = 0
        for change in changes:
            change.key = None if nulls and change.key == "b" else change.key
            if kernel.watermark > change.time + lateness:
                late += 1
            else:
                there[change.time, change.key, change.n] += change.diff
        before_us = kernel.operator.output_watermark(kernel.watermark)
        result = kernel.batch(changes, watermark)
        assert result.counts["late"] == late
        if result.rows is not None and number:
            assert result.rows[TIME].min() >= before_us
        for row, count in summed(told(result.rows)).items():
            bag[row] += count
        assert +bag == kept(there.elements(), IDS[ids], within)
        assert min(bag.values(), default=0) >= 0, "a row was taken back that was not there"


@drawn
@given(history=histories(), within=st.sampled_from([0, 4, 15]), lateness=st.sampled_from([0, 5]))
def test_state_holds_no_row_and_no_id_that_nothing_can_change_or_repeat(history, within, lateness):
    kernel = kernel_of("key", within, lateness=lateness)
    for changes, watermark in history:
        kernel.batch(changes, watermark)
        slot = kernel.operator.slot_us
        for family, held_for in (("rows", lateness), ("kept", lateness + within)):
            entries = kernel.message["runs"].get(family, [])
            assert all((entry[1] + 1) * slot > watermark - held_for for entry in entries)
    kernel.batch([], 10**6)
    assert kernel.message["runs"] == {}


@pytest.mark.not_in_lane("thresholds", "runs are divided into parts of two rows")
@pytest.mark.parametrize("within", [0, 1_000_000])
def test_rows_far_apart_in_time_are_in_few_slots_and_those_that_are_past_are_not_stored(
    within, monkeypatch
):
    monkeypatch.setattr(signed_dedup, "_SLOT_US_MIN", 10_000_000)
    kernel = kernel_of("key", within)
    second = 1_000_000
    changes = [Change(n * second, "ab"[n % 2], 1, 1) for n in range(1000)]
    kernel.batch(changes, 980 * second)
    assert len(kernel.message["runs"]["rows"]) == 2
    assert kernel.store.saved <= 6
    kernel.batch([], 2000 * second)
    assert kernel.message["runs"] == {}


def test_a_row_that_comes_before_the_kept_one_takes_its_place():
    kernel = kernel_of("key", 10)
    assert told(kernel.batch([Change(20, "a", 1, 1)], 0).rows) == [(1, 20, "a", 1)]
    assert told(kernel.batch([Change(31, "a", 2, 1)], 1).rows) == [(1, 31, "a", 2)]
    before = kernel.batch(
        [Change(15, "a", 3, 1)], 2
    )  # within 10 of 20, and 31 is not within 10 of it
    assert told(before.rows) == [(-1, 20, "a", 1), (1, 15, "a", 3)]
    before = kernel.batch([Change(21, "a", 4, 1)], 3)
    assert told(before.rows) == []
    gone = kernel.batch([Change(15, "a", 3, -1)], 4)
    assert told(gone.rows) == [(-1, 15, "a", 3), (1, 20, "a", 1)]
    gone = kernel.batch([Change(20, "a", 1, -1)], 5)
    assert told(gone.rows) == [(-1, 20, "a", 1), (-1, 31, "a", 2), (1, 21, "a", 4)]


def test_the_horizon_is_inclusive():
    kernel = kernel_of("key", 10)
    rows = kernel.batch([Change(0, "a", 1, 1), Change(10, "a", 2, 1), Change(21, "a", 3, 1)], -1)
    assert told(rows.rows) == [(1, 0, "a", 1), (1, 21, "a", 3)]


def test_what_was_kept_before_the_watermark_repeats_rows_for_as_long_as_within():
    kernel = kernel_of("key", 10)
    kernel.batch([Change(0, "a", 1, 1)], 8)
    assert told(kernel.batch([Change(10, "a", 2, 1)], 9).rows) == []
    assert told(kernel.batch([Change(11, "a", 3, 1)], 10).rows) == [(1, 11, "a", 3)]
    # The one at 10 goes: it was no kept one.
    assert told(kernel.batch([Change(10, "a", 2, -1)], 10).rows) == []


def test_a_row_that_is_late_changes_nothing_whether_it_comes_or_goes():
    kernel = kernel_of("key", 10, lateness=3)
    kernel.batch([Change(0, "a", 1, 1)], 4)
    for diff in (1, -1):
        result = kernel.batch([Change(0, "a", 1, diff)], 4)
        assert (+result.counts, result.rows, result.late_by_us) == ({"late": 1}, None, 1)


def test_taking_back_what_never_came_is_damage():
    kernel = kernel_of("key", 10)
    kernel.batch([Change(5, "a", 1, 1)], 0)
    with pytest.raises(CorruptionError, match="taken back that is not in it"):
        kernel.batch([Change(5, "a", 1, -1), Change(5, "a", 1, -1)], 1)


# ── behind windows ──────────────────────────────────────────────────────────────────────────────


def changing(app, mode, name="n", lateness=20):
    """Return windows whose rows change with every batch, or when late rows come."""
    stream = app.topic("events", Event, key="key").stream(
        time="at",
        watermark=ms.watermark(0 * UNIT, idle=None),
        lateness=lateness * UNIT,
        late="correct" if mode == "correct" else "drop",
    )
    windowed = stream.window(ms.tumbling(4 * UNIT), by="key")
    windowed = windowed if mode == "correct" else windowed.emit(mode)
    rows = windowed.agg(m=ms.sum("n"), list=ms.list("n")).filter(pl.col("m") > 0)
    return rows.rename({"m": name})


END = testing.Watermark("events", at=at(10**6))
events = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from("abc"), st.integers(-3, 3)), max_size=40
)
batchings = {
    "partitions": st.sampled_from([1, 4, 7]),
    "batches": st.integers(1, 6),
    "crash": st.integers(0, 2),
    "seed": st.integers(0, 99),
}


@pytest.mark.parametrize("mode", ["update", "retract", "correct"])
@settings(deadline=None, max_examples=some(12))
@given(
    rows=events,
    ids=st.sampled_from(["key", "^n.*$", ["key", "^n.*$"]]),
    within=st.integers(0, 15),
    ended=st.booleans(),
    batching=st.fixed_dictionaries(batchings),
)
def test_behind_windows_the_rule_holds_for_the_rows_that_they_show(
    mode, rows, ids, within, ended, batching
):
    app = ms.App("behind", log="unused")
    shown = changing(app, mode, "^n.*$")
    shown.view("shown")
    once = shown.dedup(ids, within=within * UNIT, name="dedup")
    once.view("once")
    once.window(ms.tumbling(20 * UNIT), by="key").emit("update").agg(rows=ms.count()).view("counts")
    inputs = {"events": [*(Event(at(t), k, n) for t, k, n in rows), *([END] if ended else [])]}
    run = testing.run(app, inputs, **batching)
    names = ["window_start", "window_end", "key", "^n.*$"]
    table = [tuple(row[name] for name in names) for row in run["shown"].to_dicts()]
    there = [((row[1] - START) // UNIT, *row) for row in table]
    places = [
        3 + ["key", "^n.*$"].index(one) - 1 for one in ([ids] if isinstance(ids, str) else ids)
    ]
    expected = kept(there, places, within)
    found = Counter(
        ((row["window_end"] - START) // UNIT, *(row[name] for name in names))
        for row in run["once"].to_dicts()
    )
    assert found == expected
    counts = Counter((row[0] - 1) // 20 for row in expected)
    told_counts = Counter()
    for row in run["counts"].to_dicts():
        told_counts[(row["window_start"] - START) // UNIT // 20] += row["rows"]
    assert told_counts == counts
    line = run.ledger.filter(step="dedup").sum().to_dicts()[0]
    assert line["read"] == line["held"]
    assert line["late"] == 0


def test_dedup_of_changes_does_not_depend_on_batches_partitions_or_crashes():
    app = ms.App("replayed", log="unused")
    shown = changing(app, "update", lateness=100)
    shown.dedup("key", within=9 * UNIT).view("once")
    shown.dedup("n", within=30 * UNIT, null="drop").view("numbers")
    rows = [Event(at(n * 7 % 61), "abc"[n % 3], n % 5 - 1) for n in range(120)]
    out = testing.replay(app, {"events": [*rows, END]}, batchings=6, crash=2)
    assert out["once"].height > 3


@dataclass
class Mixed:
    at: datetime
    id: float | None
    parts: list[int]


def test_ids_are_equal_as_keys_are_and_any_column_may_be_there():
    app = ms.App("types", log="unused")
    stream = app.topic("t", Mixed).stream(time="at", watermark=ms.watermark(0 * UNIT, idle=None))
    stream = replace(stream, shape=replace(stream.shape, mode="retract"))
    once = stream.dedup("id", within="1 minute", name="once")
    once.to("once", partitions=1)
    values = [
        (float("nan"), [2]),
        (0.0, []),
        (-0.0, [1]),
        (float("nan"), [1]),
        (None, []),
        (None, []),
    ]
    rows = [Mixed(START + timedelta(seconds=n), *value) for n, value in enumerate(values)]
    out = testing.run(app, {"t": rows}, partitions=1, batches=3)
    assert out.topic("once").height == 4


# ── what is refused where it is declared ────────────────────────────────────────────────────────


def refused(match):
    return pytest.raises(ConfigError, match=match)


def test_what_dedup_of_rows_that_are_taken_back_cannot_do_is_refused():
    app = ms.App("refused", log="unused")
    rows = changing(app, "update")
    with refused("a filter cannot forget an id. Leave bloom out"):
        rows.dedup("key", within="1 day", bloom=ms.bloom(fpr=1e-3, rotate="1 hour", expect=100))
    with refused("a filter cannot forget"):
        bloom = ms.bloom(fpr=1e-3, rotate="1 hour", expect=100, exact_check=True)
        rows.dedup("key", within="1 day", bloom=bloom)
    with refused("dedup keeps every id"):
        rows.dedup("key", within="60 days")
    with refused("identified by window_start, key"):
        rows.dedup("key", within="1 day").view("last", key="key")
    rows.dedup("key", within="1 day").view("out")
    stream = app.topic("others", Event).stream(time="at")
    parts = stream.window(ms.tumbling("1 minute"), by="key").emit("discard").agg(n=ms.count())
    with refused('after emit."discard".*"final", "update" or "retract" there'):
        parts.dedup("key", within="1 day")
    counted = stream.window(ms.count_window(3, unbounded=True), by="key")
    for mode in ("update", "retract"):
        with refused('dedup comes after count_window.*would be late. Emit "final"'):
            counted.emit(mode).agg(n=ms.count()).dedup("key", within="1 day")


def test_late_changes_are_given_with_their_sign_where_they_are_asked_for():
    kernel = kernel_of("key", 10, late="side")
    kernel.batch([Change(0, "a", 1, 1)], 4)
    late = kernel.batch([Change(0, "a", 1, -1), Change(1, "b", 2, 1)], 4).late
    assert late.select("key", "n", "late_by", DIFF).rows() == [
        ("a", 1, 4 * UNIT, -1),
        ("b", 2, 3 * UNIT, 1),
    ]
    assert visible(late.columns) == ["key", "n", "late_by", "late_reason"]
