"""Tables whose rows expire: the rule, applied to all records at once, against any division into batches."""

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
from millstream.kernels.frames import DIFF, ORDER, TIME
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.kernels.state.timers import Timers, slot_width_us
from millstream.kernels.tables.upserts import Upserts
from millstream.testing import Row, Watermark

START = datetime(2026, 1, 1, tzinfo=UTC)
TTL = 10


@dataclass
class Change:
    at: datetime
    k: str
    v: int
    gone: bool = False


@dataclass
class Event:
    at: datetime
    id: int
    k: str


def at(seconds):
    return START + timedelta(seconds=seconds)


def table_of(app, order, delay="0 seconds"):
    return app.table(
        "changes",
        Change,
        key="k",
        order=order,
        deleted=pl.col("gone"),
        time="at",
        watermark=ms.watermark(delay, idle=None),
        ttl=f"{TTL} seconds",
    )


def changes_of(rows):
    return [Change(at(t), k, number, gone) for number, (t, k, gone) in enumerate(rows)]


def held(rows, order, watermark):
    """Of each key its latest record, unless that deletes, or the watermark is above its time plus the ttl."""
    latest = {}
    for number, (time, key, gone) in enumerate(rows):
        version = (time, number) if order == "time" else (number,)
        if key not in latest or version > latest[key][0]:
            latest[key] = version, (key, number), gone or time + TTL < watermark
    return sorted(row for _, row, left in latest.values() if not left)


records = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(["a", "b", "c"]), st.booleans()), max_size=14
)


@settings(max_examples=some(80))
@given(records, st.sampled_from(["time", "offset"]), st.integers(0, 60), st.integers(0, 999))
def test_a_row_is_there_until_the_watermark_has_passed_it_by_the_ttl(rows, order, end, seed):
    app = ms.App("expiring", log="unused")
    table = table_of(app, order)
    table.view("rows")
    table.with_columns(one=pl.lit(1)).group_by("one").agg(n=ms.count(), v=ms.sum("v")).view("sums")
    out = testing.run(
        app,
        {"changes": [*changes_of(rows), Watermark("changes", at=at(end))]},
        batches=1 + seed % 7,
        partitions=1,
        seed=seed,
        crash=seed % 3,
    )
    watermark = max([end, *(time for time, _, _ in rows)])
    expected = held(rows, order, watermark)
    assert out["rows"].select("k", "v").sort("k").rows() == expected
    sums = [(len(expected), sum(v for _, v in expected))] if expected else []
    assert out["sums"].select("n", "v").rows() == sums
    assert out.late == 0


@settings(max_examples=some(40))
@given(records, st.sampled_from(["time", "offset"]), st.sampled_from([4, 7]), st.integers(0, 999))
def test_with_several_partitions_the_slowest_one_decides(rows, order, partitions, seed):
    app = ms.App("expiring", log="unused")
    table_of(app, order).view("rows")
    out = testing.run(
        app,
        {"changes": [*changes_of(rows), Watermark("changes", at=at(30))]},
        batches=1 + seed % 7,
        partitions=partitions,
        seed=seed,
        crash=seed % 3,
    )
    # Some partition has no more than the last watermark, as four partitions have three keys.
    assert out["rows"].select("k", "v").sort("k").rows() == held(rows, order, 30)


@settings(max_examples=some(40))
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["a", "b", "c"])), max_size=8),
    records,
    st.integers(0, 999),
)
def test_a_join_as_of_a_time_finds_no_row_that_had_expired_by_then(left, rows, seed):
    app = ms.App("expiring", log="unused")
    rule = ms.watermark("1 hour", idle=None)
    events = app.topic("events", Event, key="id").stream(time="at", watermark=rule)
    table = table_of(app, "offset", "1 hour").drop("gone", "at")
    events.join_asof(table, "k").view("out", key="id")
    end = at(90_000)
    inputs = {
        "events": [
            *(Event(at(t), number, k) for number, (t, k) in enumerate(left)),
            Watermark("events", at=end),
        ],
        "changes": [*changes_of(rows), Watermark("changes", at=end)],
    }
    out = testing.run(app, inputs, batches=1 + seed % 5, partitions=1 + seed % 4, seed=seed)
    expected = []
    for number, (time, key) in enumerate(left):
        versions = [(t, n, gone) for n, (t, k, gone) in enumerate(rows) if k == key and t <= time]
        t, n, gone = max(versions, default=(0, None, True))
        expected.append((number, None if gone or time - t > TTL else n))
    assert out["out"].select("id", "v").sort("id").rows() == expected


def test_a_look_up_finds_no_row_that_has_expired():
    app = ms.App("expiring", log="unused")
    rule = ms.watermark("0 seconds", idle=None)
    events = app.topic("events", Event, key="id").stream(time="at", watermark=rule)
    events.lookup(table_of(app, "offset"), "k").view("out", key="id")
    second = timedelta(seconds=1)
    inputs = {
        "changes": [
            Row(Change(at(0), "a", 7), at=START),
            Row(Change(at(11), "b", 8), at=START + 2 * second),
        ],
        "events": [
            Row(Event(at(1), 1, "a"), at=START + second),
            Row(Event(at(2), 2, "a"), at=START + 3 * second),
        ],
    }
    out = testing.run(app, inputs, partitions=1, batches=4)
    assert out["out"].sort("id")["v"].to_list()[1] is None


def test_the_state_of_a_table_whose_keys_come_and_go_stays_small():
    app = ms.App("expiring", log="unused")
    table_of(app, "time").view("rows")
    rows = [Change(at(n), f"k{n}", n) for n in range(200)]
    out = testing.run(app, {"changes": rows}, batches=20, partitions=1)
    assert out["rows"].height == TTL + 1


def test_a_table_of_all_rows_has_no_ttl():
    app = ms.App("expiring", log="unused")
    stream = app.topic("changes", Change, key="k").stream(time="at")
    with pytest.raises(ConfigError, match='keep="all" and key=, deleted= or ttl='):
        stream.table(keep="all", ttl="1 day", unbounded=True)


def test_a_ttl_of_more_than_a_hundred_years_is_refused():
    app = ms.App("expiring", log="unused")
    stream = app.topic("changes", Change, key="k").stream(time="at")
    with pytest.raises(ConfigError, match="at most 36,525 days"):
        stream.table(key="k", ttl=timedelta.max)


@pytest.mark.parametrize("order", ["time", "offset"])
def test_a_key_that_changes_all_the_time_has_few_timers(order):
    """A batch brings a row for one key each second, and the ttl is as long as all of them."""
    columns = {"k": pl.String(), "v": pl.Int64()}
    second = 1_000_000
    upserts = Upserts("table", ("k",), tuple(columns.items()), order, ttl_us=300 * second)
    state, held = OperatorState(MemoryRunStore()), []
    for n in range(600):
        state = OperatorState.from_message(state.to_message(), state.store)
        rows = pl.DataFrame({"k": ["a"], "v": [n], TIME: [n * second], ORDER: [n]})
        inputs = {0: [upserts.prepare(rows).table]} if n < 500 else {}
        context = BatchContext(n * second, (n + 1) * second)
        result = upserts.process(state, inputs, context)
        timers = Timers(state, "ttl", slot_width_us(300 * second)).runs
        held.append(sum(run.rows for runs in timers.slots.values() for run in runs))
        assert result.rows is None or n < 500
    assert max(held) < 5
    gone = upserts.process(state, {}, BatchContext(600 * second, 800 * second))
    assert gone.rows is not None
    assert gone.rows.select("v", DIFF).rows() == [(499, -1)]
