"""Joins of tables that change: cases with published answers.

Sources: Kafka Streams, AbstractJoinIntegrationTest (its 23 inputs) and TableTableJoinIntegrationTest;
RisingWave, asof_join.slt (a maintained as-of join, with ties) and event_time_temporal_join.slt; DuckDB,
test_asof_join_integers, test_asof_join_inequalities and test_asof_join_timestamps.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from example_counts import some

import millstream as ms
from millstream import testing
from millstream.testing import Watermark

START = datetime(2026, 1, 1, tzinfo=UTC)
END = START + timedelta(days=9)
BATCHINGS = some(20)


def at(seconds):
    return START + timedelta(seconds=seconds)


# ── Kafka: what a join of two tables holds after each of its inputs ─────────────────────────

KAFKA = "L∅1 R∅2 LA3 Ra4 LB5 Rb6 L∅7 R∅8 LC9 Rc10 R∅11 L∅12 R∅13 Rd7 LD6 L∅2 R∅3 Re14 LE15 L∅10 R∅9 LF4 Rf3"

# After the n-th input; "·" is no row. Kafka's lists have what changes, these what the table is then.
UNVERSIONED = {
    "inner": "· · · A-a B-a B-b · · · C-c · · · · D-d · · · E-e · · · F-f",
    "left": "· · A-null A-a B-a B-b · · C-null C-c C-null · · · D-d · · · E-e · · F-null F-f",
    "full": "· · A-null A-a B-a B-b null-b · C-null C-c C-null · · null-d D-d null-d · null-e E-e null-e · "
    "F-null F-f",
}
VERSIONED = {
    "inner": "· · · A-a B-a B-b · · · C-c · · · · · · · · E-e E-e E-e E-e E-e",
    "left": "· · A-null A-a B-a B-b · · C-null C-c C-null · · · · · · · E-e E-e E-e E-e E-e",
    "full": "· · A-null A-a B-a B-b null-b · C-null C-c C-null · · · · · · null-e E-e E-e E-e E-e E-e",
}


@dataclass
class Value:
    at: datetime
    k: str
    v: str | None


def kafka_app(order):
    app = ms.App("tables", log="unused")
    left, right = (
        app.table(name, Value, key="k", order=order, time="at", deleted=pl.col("v").is_null())
        for name in ("left", "right")
    )
    for how in UNVERSIONED:
        left.drop("at").join(right.drop("at"), "k", how=how).view(how)
    return app


def kafka_inputs(count):
    inputs = {"left": [], "right": []}
    for said in KAFKA.split()[:count]:
        value = None if said[1] == "∅" else said[1]
        inputs["left" if said[0] == "L" else "right"].append(Value(at(int(said[2:])), "k", value))
    return inputs


def held(out, name):
    rows = out[name].select("v", "v_right").rows()
    return " ".join(f"{v or 'null'}-{w or 'null'}" for v, w in rows) or "·"


@pytest.mark.parametrize(
    ("order", "expected"), [("offset", UNVERSIONED), ("time", VERSIONED)], ids=["offset", "time"]
)
def test_kafkas_joins_of_two_tables_hold_its_results_after_each_input(order, expected):
    app = kafka_app(order)
    for count in range(1, 24):
        inputs, seed = kafka_inputs(count), 7 * count
        out = testing.run(app, inputs, batches=1 + seed % 5, partitions=2, seed=seed)
        for how, states in expected.items():
            assert held(out, how) == states.split()[count - 1], (how, count)


@pytest.mark.parametrize("order", ["offset", "time"])
def test_kafkas_joins_of_two_tables_end_the_same_in_any_batches(order):
    out = testing.replay(kafka_app(order), kafka_inputs(23), batchings=BATCHINGS)
    last = "F-f" if order == "offset" else "E-e"
    assert [held(out, how) for how in UNVERSIONED] == [last] * 3


# ── RisingWave: an as-of join that is maintained, by numbers; ties go to the smallest key ───


@dataclass
class One:
    v1: int
    v2: int
    v4: int
    gone: bool = False


@dataclass
class Other:
    v1: int
    v2: int
    v3: int
    gone: bool = False


def maintained(how):
    """The nearest row of the other table is the first one of a top over the join."""
    app = ms.App("maintained", log="unused")
    t1 = app.table("t1", One, key="v4", deleted=pl.col("gone")).drop("gone")
    t2 = app.table("t2", Other, key="v3", deleted=pl.col("gone")).drop("gone")
    ahead = how == "inner"
    near = pl.col("v2") <= pl.col("v2_right") if ahead else pl.col("v2") > pl.col("v2_right")
    pairs = t1.join(t2, "v1", how=how, where=near)
    order = [("v2_right", "asc" if ahead else "desc"), ("v3", "asc")]
    pairs.top(1, by=order, per="v4", rank="place").view("mv1")
    return app


INNER = [  # what is written to t1 and t2, and the result then
    ([One(1, 2, 3)], [], []),
    ([], [Other(1, 3, 4)], [(1, 2, 3, 3, 4)]),
    ([], [Other(1, 2, 3)], [(1, 2, 3, 2, 3)]),
    ([One(1, 2, 3, gone=True)], [], []),
    ([One(2, 3, 4)], [Other(2, 3, 6)], [(2, 3, 4, 3, 6)]),
    ([], [Other(2, 3, 7)], [(2, 3, 4, 3, 6)]),
    ([], [Other(2, 3, 5)], [(2, 3, 4, 3, 5)]),
    ([], [Other(2, 3, 1), Other(2, 3, 2)], [(2, 3, 4, 3, 1)]),
]
LEFT = [
    ([One(1, 2, 3)], [Other(1, 2, 4)], [(1, 2, 3, None, None)]),
    ([], [Other(1, 1, 3)], [(1, 2, 3, 1, 3)]),
    ([One(1, 2, 3, gone=True)], [], []),
    ([One(2, 3, 4)], [Other(2, 2, 6), Other(2, 2, 7), Other(2, 2, 5)], [(2, 3, 4, 2, 5)]),
    ([], [Other(2, 2, 1), Other(2, 2, 2)], [(2, 3, 4, 2, 1)]),
    ([], [Other(2, 2, n, gone=True) for n in (6, 7, 5, 1, 2)], [(2, 3, 4, None, None)]),
]


@pytest.mark.parametrize(("how", "steps"), [("inner", INNER), ("left", LEFT)])
def test_risingwaves_maintained_asof_join_follows_both_tables_and_breaks_ties_by_the_smallest_key(
    how, steps
):
    app, inputs = maintained(how), {"t1": [], "t2": []}
    for t1, t2, expected in steps:
        inputs["t1"] += t1
        inputs["t2"] += t2
        out = testing.replay(app, inputs, batchings=some(4))["mv1"]
        assert out.select("v1", "v2", "v4", "v2_right", "v3").rows() == expected


# ── RisingWave: rows change before the watermark has passed them ────────────────────────────


@dataclass
class Order:
    at: datetime
    id: int
    currency: str
    amount: int


@dataclass
class Rate:
    at: datetime
    currency: str
    cents: int


def minute(number):
    return at(60 * number)


RATES = [
    Rate(minute(0), "USD", 100),
    Rate(minute(0), "EUR", 110),
    Rate(minute(10), "EUR", 120),
    Rate(minute(20), "USD", 100),
]
ORDERS = [
    Order(minute(5), 1, "EUR", 10),
    Order(minute(5), 1, "EUR", 20),
    Order(minute(6), 3, "GBP", 10),
    Order(minute(12), 2, "EUR", 10),
    Order(minute(20), 5, "USD", 1),
]
EXPECTED = [(1, 20, 110), (2, 10, 120), (3, 10, None)]


@pytest.mark.parametrize(
    ("how", "late"),
    [("inner", "keep"), ("inner", "drop"), ("left", "keep"), ("left", "drop"), ("left", "correct")],
)
def test_risingwaves_order_that_is_updated_in_time_is_final_and_an_update_after_it_changes_nothing(
    how, late
):
    """The left input has events: an update is one more, which the view keeps by its id.

    RisingWave's order 4, which is deleted before it is final, cannot be said of events.
    """
    app = ms.App("orders", log="unused")
    rule = ms.watermark("1 second", idle=None)
    orders = app.topic("orders", Order, key="id", partitions=1).stream(
        time="at", watermark=ms.watermark("10 minutes", idle=None)
    )
    rates = app.topic("rates", Rate, key="currency").table(time="at", watermark=rule)
    options = {"late": late, "lateness": "1 minute" if late == "correct" else None}
    orders.join_asof(rates.drop("at"), "currency", how=how, **options).view("out", key="id")
    inputs = {
        "rates": [*RATES, Watermark("rates", at=minute(60))],
        "orders": [*ORDERS, Watermark("orders", at=minute(19)), Order(minute(5), 1, "EUR", 30)],
    }
    for seed in range(BATCHINGS):
        out = testing.run(app, inputs, batches=1 + seed % 7, partitions=1, seed=seed)
        found = out["out"].sort("id").select("id", "amount", "cents").rows()
        assert found == [row for row in EXPECTED if row[2] is not None or how == "left"]
        assert out.late == 1


# ── DuckDB: numbers as seconds, all four comparisons, the first and the last time there are ─


@dataclass
class Probe:
    at: datetime | None
    id: int
    k: int = 0


@dataclass
class Event:
    at: datetime | None
    value: int
    k: int = 0


FOREVER = datetime(2300, 1, 1, tzinfo=UTC)
FIRST, LAST = datetime(1930, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
WIDE = "36500 days"
COMPARISONS = {
    ">=": {},
    ">": {"allow_equal": False},
    "<=": {"direction": "forward", "tolerance": WIDE},
    "<": {"direction": "forward", "tolerance": WIDE, "allow_equal": False},
}


def duckdb_app():
    app = ms.App("asof", log="unused")
    rule = ms.watermark("73000 days", idle=None, future_max="73000 days")
    probe = app.topic("probe", Probe, key="id").stream(time="at", watermark=rule)
    events = app.topic("events", Event, key="k").stream(time="at", watermark=rule)
    for number, options in enumerate(COMPARISONS.values()):
        probe.join_asof(events, "k", how="left", **options).view(f"left{number}", key="id")
        probe.join_asof(events, "k", how="inner", **options).view(f"inner{number}", key="id")
    return app


def compared(probe, events):
    """Return for each comparison the values that rows get, by their number."""
    inputs = {
        "probe": [
            *(Probe(time, n) for n, time in enumerate(probe)),
            Watermark("probe", at=FOREVER),
        ],
        "events": [*(Event(time, n) for time, n in events), Watermark("events", at=FOREVER)],
    }
    out = testing.replay(duckdb_app(), inputs, batchings=some(10))
    dead = sum(time is None for time in [*probe, *(time for time, _ in events)])
    assert out.dead.height == dead  # no time: an event that cannot be placed is a dead letter
    found = {}
    for number, comparison in enumerate(COMPARISONS):
        left, inner = out[f"left{number}"].sort("id"), out[f"inner{number}"].sort("id")
        found[comparison] = left["value"].to_list()
        assert inner["value"].to_list() == [v for v in found[comparison] if v is not None]
    return found


def test_duckdbs_integers():
    events = [(None, -1), (at(1), 0), (at(3), 1), (at(6), 2), (at(8), 3), (at(999_999), 9)]
    found = compared([at(n) for n in range(10)], events)
    assert found[">="] == [None, 0, 0, 1, 1, 1, 2, 2, 3, 3]


def test_duckdbs_inequalities_with_the_first_and_the_last_time():
    hours = [START + timedelta(hours=n) for n in range(12, 22)]
    events = [(START + timedelta(hours=13 + n), n) for n in range(4)]
    events += [(None, -10), (LAST, 9), (FIRST, -1)]
    found = compared([*hours, LAST, None], events)
    assert found[">"] == [-1, -1, 0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert found["<="] == [0, 0, 1, 2, 3, 9, 9, 9, 9, 9, 9]
    assert found["<"] == [0, 1, 2, 3, 9, 9, 9, 9, 9, 9, None]


@dataclass
class Trade:
    at: datetime
    id: int
    symbol: str | None
    venue: int | None


def test_duckdbs_null_keys_are_equal_only_where_that_is_said():
    app = ms.App("nulls", log="unused")
    rule = ms.watermark("1 hour", idle=None)
    trades = app.topic("trades", Trade, key="id").stream(time="at", watermark=rule)
    prices = app.topic("prices", Trade, key="id").stream(time="at", watermark=rule)
    trades.join_asof(prices, "symbol", nulls_equal=True).view("safe", key="id")
    trades.join_asof(prices, ["symbol", "venue"]).view("plain", key="id")
    inputs = {
        "trades": [
            Trade(at(5), 1, None, 1),
            Trade(at(5), 3, "A", None),
            Watermark("trades", at=END),
        ],
        "prices": [
            Trade(at(3), 10, None, 1),
            Trade(at(3), 20, "A", None),
            Watermark("prices", at=END),
        ],
    }
    out = testing.replay(app, inputs, batchings=some(10))
    assert out["safe"].sort("id")["id_right"].to_list() == [10, 20]
    assert out["plain"].sort("id")["id_right"].to_list() == [None, None]
