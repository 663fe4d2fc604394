"""Joins of tables that change: cases with published answers.

Sources: Kafka Streams, AbstractJoinIntegrationTest (its 23 inputs) and TableTableJoinIntegrationTest;
RisingWave, asof_join.slt (a maintained as-of join, with ties) and event_time_temporal_join.slt; DuckDB,
test_asof_join_integers, test_asof_join_inequalities and test_asof_join_timestamps.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from cases import tables
from published.batchings import BATCHINGS, PARTITIONS, replayed

import millstream as ms
from millstream.testing import Watermark

START = datetime(2026, 1, 1, tzinfo=UTC)
END = START + timedelta(days=9)


def at(seconds):
    return START + timedelta(seconds=seconds)


# ── Kafka's and RisingWave's tables, declared in tests/cases, after each step of their histories ─


@pytest.mark.parametrize("partitions", PARTITIONS)
@pytest.mark.parametrize(
    "cases", [tables.OF_ONE_KEY, tables.J3], ids=["kafka's inputs", "risingwave's nearest rows"]
)
def test_joins_of_two_tables_hold_what_was_published_after_each_input(cases, partitions):
    trials = tables.trials_of(cases, [partitions])
    for seed in range(BATCHINGS):
        tables.run(trials, batches=1 + seed % 9, seed=seed, crash=1)


# ── RisingWave: rows change before the watermark has passed them ────────────────────────────


@dataclass
class Order:
    at: datetime
    id: int
    currency: str
    amount: int
    gone: bool = False


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


def orders_with_rates():
    app = ms.App("orders", log="unused", buckets=2)
    orders = app.topic("orders", Order, key="id").stream(
        time="at", watermark=ms.watermark("10 minutes", idle=None)
    )
    rule = ms.watermark("1 second", idle=None)
    rates = app.topic("rates", Rate, key="currency").table(time="at", watermark=rule)
    return app, orders, rates.drop("at")


KINDS = [
    ("inner", "keep"),
    ("inner", "drop"),
    ("left", "keep"),
    ("left", "drop"),
    ("left", "correct"),
]


def test_risingwaves_order_that_is_updated_in_time_is_final_and_an_update_after_it_changes_nothing():
    """The left input has events: an update is one more, which the view keeps by its id."""
    app, orders, rates = orders_with_rates()
    for how, late in KINDS:
        options = {"late": late, "lateness": "1 minute" if late == "correct" else None}
        joined = orders.join_asof(rates, "currency", how=how, **options)
        joined.view(f"{how}_{late}", key="id")
    inputs = {
        "rates": [*RATES, Watermark("rates", at=minute(60))],
        "orders": [*ORDERS, Watermark("orders", at=minute(19)), Order(minute(5), 1, "EUR", 30)],
    }
    for out in replayed(app, inputs):
        for how, late in KINDS:
            found = out[f"{how}_{late}"].sort("id").select("id", "amount", "cents").rows()
            assert found == [row for row in EXPECTED if row[2] is not None or how == "left"]
        assert out.late == len(KINDS)


def test_risingwaves_order_that_is_deleted_in_time_has_no_row_and_one_deleted_later_stays():
    """Orders and deletions are events of the order's time; behind the join they are a table again."""
    app, orders, rates = orders_with_rates()
    joined = orders.join_asof(rates, "currency")
    final = joined.table("id", deleted=pl.col("gone"), unbounded=True)
    final = final.select("id", "amount", "cents")
    final.view("left")
    final.filter(pl.col("cents").is_not_null()).view("inner")
    final.to("changes")
    deleted = [Order(minute(7), 4, "EUR", 7), Order(minute(7), 4, "EUR", 7, gone=True)]
    too_late = [Order(minute(5), 1, "EUR", 30), Order(minute(12), 2, "EUR", 10, gone=True)]
    given = [*ORDERS[:-1], *deleted, ORDERS[-1], Watermark("orders", at=minute(19)), *too_late]
    inputs = {"rates": [*RATES, Watermark("rates", at=minute(60))], "orders": given}
    for out in replayed(app, inputs):
        assert out["left"].rows() == EXPECTED
        assert out["inner"].rows() == [row for row in EXPECTED if row[2] is not None]
        changes = out.topic("changes").select("id", "amount", "cents", "_diff").sort("id")
        assert changes.rows() == [(*row, 1) for row in EXPECTED]
        assert out.late == len(too_late)


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
    app = ms.App("asof", log="unused", buckets=2)
    rule = ms.watermark("73000 days", idle=None, future_max="73000 days")
    probe = app.topic("probe", Probe, key="id").stream(time="at", watermark=rule)
    events = app.topic("events", Event, key="k").stream(time="at", watermark=rule)
    for number, options in enumerate(COMPARISONS.values()):
        probe.join_asof(events, "k", how="left", **options).view(f"left{number}", key="id")
        probe.join_asof(events, "k", how="inner", **options).view(f"inner{number}", key="id")
    return app


HOURS = [START + timedelta(hours=n) for n in range(12, 22)]
# By a key each: the times of rows, and the times and values of what they are compared with.
INTEGERS = (
    [at(n) for n in range(10)],
    [(None, -1), (at(1), 0), (at(3), 1), (at(6), 2), (at(8), 3), (at(999_999), 9)],
)
INEQUALITIES = (
    [*HOURS, LAST, None],
    [(START + timedelta(hours=13 + n), n) for n in range(4)]
    + [(None, -10), (LAST, 9), (FIRST, -1)],
)
MATCHES = {
    0: {">=": [None, 0, 0, 1, 1, 1, 2, 2, 3, 3]},
    1: {
        ">": [-1, -1, 0, 1, 2, 3, 3, 3, 3, 3, 3],
        "<=": [0, 0, 1, 2, 3, 9, 9, 9, 9, 9, 9],
        "<": [0, 1, 2, 3, 9, 9, 9, 9, 9, 9, None],
    },
}


def test_duckdbs_integers_and_inequalities_with_the_first_and_the_last_time():
    inputs = {"probe": [], "events": []}
    for k, (probe, events) in enumerate((INTEGERS, INEQUALITIES)):
        inputs["probe"] += [Probe(time, 100 * k + n, k) for n, time in enumerate(probe)]
        inputs["events"] += [Event(time, value, k) for time, value in events]
    dead = sum(row.at is None for rows in inputs.values() for row in rows)
    inputs = {name: [*rows, Watermark(name, at=FOREVER)] for name, rows in inputs.items()}
    for out in replayed(duckdb_app(), inputs):
        assert out.dead.height == dead  # no time: an event that cannot be placed is a dead letter
        for number, comparison in enumerate(COMPARISONS):
            left, inner = out[f"left{number}"].sort("id"), out[f"inner{number}"].sort("id")
            assert inner.equals(left.filter(pl.col("value").is_not_null()))
            for k, expected in MATCHES.items():
                found = left.filter(k=k)["value"].to_list()
                assert found == expected.get(comparison, found), (k, comparison)


@dataclass
class Trade:
    at: datetime
    id: int
    symbol: str | None
    venue: int | None


def test_duckdbs_null_keys_are_equal_only_where_that_is_said():
    app = ms.App("nulls", log="unused", buckets=2)
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
    for out in replayed(app, inputs):
        assert out["safe"].sort("id")["id_right"].to_list() == [10, 20]
        assert out["plain"].sort("id")["id_right"].to_list() == [None, None]
