"""Joins of tables that change: cases with published answers.

Sources: Kafka Streams, AbstractJoinIntegrationTest (its 23 inputs) and TableTableJoinIntegrationTest;
RisingWave, asof_join.slt (a maintained as-of join, with ties) and event_time_temporal_join.slt; DuckDB,
test_asof_join_integers, test_asof_join_inequalities and test_asof_join_timestamps.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import polars as pl
from published.batchings import replayed

import millstream as ms
from millstream.testing import Watermark

START = datetime(2026, 1, 1, tzinfo=UTC)
END = START + timedelta(days=9)


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


def kafka_app():
    app = ms.App("tables", log="unused", buckets=1)
    topics = [app.topic(name, Value, key="k") for name in ("left", "right")]
    for order in ("offset", "time"):
        left, right = (
            topic.table(order=order, time="at", deleted=pl.col("v").is_null()).drop("at")
            for topic in topics
        )
        for how in UNVERSIONED:
            left.join(right, "k", how=how).view(f"{how}_{order}")
    return app


def kafka_inputs():
    """Give each beginning of the 23 inputs as the history of a key of its own."""
    inputs = {"left": [], "right": []}
    for count in range(1, 24):
        for said in KAFKA.split()[:count]:
            value = None if said[1] == "∅" else said[1]
            row = Value(at(int(said[2:])), f"{count:02}", value)
            inputs["left" if said[0] == "L" else "right"].append(row)
    return inputs


def test_kafkas_joins_of_two_tables_hold_its_results_after_each_input():
    for out in replayed(kafka_app(), kafka_inputs()):
        for order, expected in (("offset", UNVERSIONED), ("time", VERSIONED)):
            for how, states in expected.items():
                rows = out[f"{how}_{order}"].select("k", "v", "v_right").rows()
                held = {k: f"{v or 'null'}-{w or 'null'}" for k, v, w in rows}
                assert len(held) == len(rows)
                found = [held.get(f"{count:02}", "·") for count in range(1, 24)]
                assert found == states.split(), (how, order)


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


def maintained(app, how):
    """The nearest row of the other table is the first one of a top over the join."""
    t1 = app.table(f"t1 {how}", One, key="v4", deleted=pl.col("gone")).drop("gone")
    t2 = app.table(f"t2 {how}", Other, key="v3", deleted=pl.col("gone")).drop("gone")
    ahead = how == "inner"
    near = pl.col("v2") <= pl.col("v2_right") if ahead else pl.col("v2") > pl.col("v2_right")
    pairs = t1.join(t2, "v1", how=how, where=near)
    order = [("v2_right", "asc" if ahead else "desc"), ("v3", "asc")]
    pairs.top(1, by=order, per="v4", rank="place").view(how)


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


STEPS = {"inner": INNER, "left": LEFT}
APART = 1000  # the keys of one history from those of the next


def test_risingwaves_maintained_asof_join_follows_both_tables_and_breaks_ties_by_the_smallest_key():
    """What is held after each step is what a history that ends there leaves, with keys of its own."""
    app, inputs = ms.App("maintained", log="unused", buckets=1), {}
    for how, steps in STEPS.items():
        maintained(app, how)
        t1, t2 = inputs.setdefault(f"t1 {how}", []), inputs.setdefault(f"t2 {how}", [])
        for number in range(len(steps)):
            own = APART * number
            for ones, others, _ in steps[: number + 1]:
                t1 += [replace(row, v1=row.v1 + own, v4=row.v4 + own) for row in ones]
                t2 += [replace(row, v1=row.v1 + own, v3=row.v3 + own) for row in others]
    for out in replayed(app, inputs):
        for how, steps in STEPS.items():
            found = out[how].select("v1", "v2", "v4", "v2_right", "v3").rows()
            assert sorted(found, key=lambda row: row[2]) == [
                (v1 + APART * n, v2, v4 + APART * n, near, None if v3 is None else v3 + APART * n)
                for n, (_, _, expected) in enumerate(steps)
                for v1, v2, v4, near, v3 in expected
            ]


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
