"""Joins of a stream with a table as of a time and as of arrival: cases with published answers.

Sources: Kafka Streams, AbstractJoinIntegrationTest (its 23 inputs) and StreamTableJoinWithGraceIntegrationTest;
Flink, TemporalJoinITCase (rates of currencies); RisingWave, event_time_temporal_join.slt; DuckDB, test_asof_join.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from published.batchings import replayed

import millstream as ms
from millstream import testing
from millstream.testing import Row, Watermark

START = datetime(2026, 1, 1, tzinfo=UTC)
END = START + timedelta(days=9)


def at(seconds):
    return START + timedelta(seconds=seconds)


@dataclass
class Left:
    at: datetime
    k: str
    v: str


@dataclass
class Right:
    at: datetime
    k: str
    w: str | None = None


def unordered(**options):
    return ms.watermark("1 hour", idle=None, **options)


def app_with(*, delay=unordered, order="offset"):
    app = ms.App("joined", log="unused", buckets=2)
    left = app.topic("left", Left, key="k").stream(time="at", watermark=delay())
    right = app.table(
        "right",
        Right,
        key="k",
        order=order,
        time="at",
        watermark=delay(),
        deleted=pl.col("w").is_null(),
    )
    return app, left, right


def joined(out, name="out"):
    rows = out[name].sort("at", "v")
    return [f"{v}-{w or 'null'}" for v, w in rows.select("v", "w").iter_rows()]


# ── Kafka's 23 inputs ───────────────────────────────────────────────────────────────────────

KAFKA = "L∅1 R∅2 LA3 Ra4 LB5 Rb6 L∅7 R∅8 LC9 Rc10 R∅11 L∅12 R∅13 Rd7 LD6 L∅2 R∅3 Re14 LE15 L∅10 R∅9 LF4 Rf3"


def kafka_inputs():
    """Give the inputs, each a millisecond after the one before; a stream's null values are left out."""
    inputs = {"left": [], "right": []}
    for number, said in enumerate(KAFKA.split()):
        side, value, time = said[0], said[1], at(int(said[2:]))
        arrived = START + timedelta(milliseconds=number)
        if side == "L" and value != "∅":
            inputs["left"].append(Row(Left(time, "k", value), at=arrived))
        elif side == "R":
            row = Right(time, "k", None if value == "∅" else value)
            inputs["right"].append(Row(row, at=arrived))
    return inputs


def closed(inputs):
    return {topic: [*rows, Watermark(topic, at=END)] for topic, rows in inputs.items()}


@dataclass
class Said:
    at: datetime
    side: str
    k: str
    says: str | None


def in_turn(rows):
    """Let each row arrive a millisecond after the one before."""
    return [Row(row, at=START + timedelta(milliseconds=number)) for number, row in enumerate(rows)]


def looked_up(*orders):
    """Look rows up that come from the topic of the table, so that their common order is that of the log."""
    app = ms.App("looked-up", log="unused", buckets=2)
    both = app.topic("both", Said, key="k").stream(time="at", watermark=unordered())
    left, right = (
        both.filter(pl.col("side") == side).select("at", "k", **{column: "says"})
        for side, column in (("L", "v"), ("R", "w"))
    )
    for order in orders:
        table = right.table("k", order=order, deleted=pl.col("w").is_null())
        for how in ("left", "inner"):
            left.lookup(table, "k", how=how).view(f"{how}_{order}", key=["k", "v"])
    return app


def test_kafkas_inputs_looked_up_in_the_latest_table_and_inner_leaves_out_what_finds_nothing():
    rows = []
    for said in KAFKA.split():
        side, value = said[0], None if said[1] == "∅" else said[1]
        if side == "R" or value:
            rows.append(Said(at(int(said[2:])), side, "k", value))
    for out in replayed(looked_up("offset"), {"both": in_turn(rows)}):
        found = ["A-null", "B-a", "C-null", "D-d", "E-e", "F-null"]
        assert sorted(joined(out, "left_offset")) == found
        assert sorted(joined(out, "inner_offset")) == ["B-a", "D-d", "E-e"]


def test_kafkas_inputs_joined_as_of_their_times():
    """Kafka has emitted A when f@3 comes. Here A waits, and finds f among the versions of its time."""
    app, left, right = app_with()
    left.join_asof(right, "k").view("out", key=["k", "v"])
    inputs = kafka_inputs()
    but_the_last = {"left": inputs["left"], "right": inputs["right"][:-1]}
    both = {
        topic: [
            *rows,
            *(replace(row, values=replace(row.values, k="but f")) for row in but_the_last[topic]),
        ]
        for topic, rows in inputs.items()
    }
    for out in replayed(app, closed(both)):
        found = {k: sorted(joined({"out": out["out"].filter(k=k)})) for k in ("k", "but f")}
        assert found["but f"] == ["A-null", "B-a", "C-null", "D-b", "E-e", "F-a"]
        assert found["k"] == ["A-f", "B-a", "C-null", "D-b", "E-e", "F-a"]


def test_kafkas_inputs_with_a_wait_of_two_seconds():
    """A stream row that is later than the wait is late here; Kafka joins it at once, with what is there."""
    app, left, right = app_with(delay=lambda: ms.watermark("2 seconds", idle=None))
    left.join_asof(right, "k").view("out", key="v")
    # In several partitions the others, which have nothing, would hold the watermark.
    for out in replayed(app, kafka_inputs(), partitions=(1,)):
        assert sorted(joined(out)) == ["A-null", "B-a", "C-null"]  # E waits
        assert out.late == 2 + 4  # D, F; d@7, ∅@3, ∅@9, f@3


# ── rates of currencies ─────────────────────────────────────────────────────────────────────


@dataclass
class Order:
    at: datetime
    id: int
    currency: str | None
    amount: int


@dataclass
class Rate:
    at: datetime
    currency: str
    rate: int | None = None
    op: str = "u"


def rates_app():
    app = ms.App("rates", log="unused", buckets=2)
    orders = app.topic("orders", Order, key="id").stream(time="at", watermark=unordered())
    rates = app.topic("rates", Rate, key="currency").table(
        time="at", watermark=unordered(), deleted=pl.col("op") == "d"
    )
    for how in ("left", "inner"):
        orders.join_asof(rates.drop("op"), "currency", how=how).view(how, key="id")
    return app


def minute(number):
    return at(60 * number)


FLINK = {
    "orders": [
        Order(minute(0.5), 1, "Euro", 12),
        Order(minute(1.5), 2, "US Dollar", 18),
        Order(minute(1.5), 3, "RMB", 40),
        Order(minute(3), 4, "Euro", 14),
        Order(minute(3), 5, "RMB", 40),
        Order(minute(4), 7, None, 3),
    ],
    "rates": [
        Rate(minute(0), "US Dollar", 102),
        Rate(minute(0), "Euro", 114),
        Rate(minute(0), "Yen", 1),
        Rate(minute(0), "RMB", 702),
        Rate(minute(1), "Euro", 118),
        Rate(minute(2), "US Dollar", 106),
        Rate(minute(1), "US Dollar", 106),
        Rate(minute(2), "RMB", None, "d"),
    ],
}


def test_flinks_orders_have_the_rate_of_their_time_and_none_after_its_deletion():
    for out in replayed(rates_app(), closed(FLINK)):
        found = out["left"].select("id", "rate").rows()
        assert found == [(1, 114), (2, 106), (3, 702), (4, 118), (5, None), (7, None)]
        assert out["inner"]["id"].to_list() == [1, 2, 3, 4]


def test_a_deletion_counts_from_its_own_time_and_not_from_that_of_the_row_before():
    """Flink's anomaly of the before-time: order 3 would have no rate."""
    rates = [Rate(minute(0), "RMB", 702), Rate(minute(2), "RMB", None, "d")]
    inputs = {"orders": [Order(minute(1.9), 3, "RMB", 40), Order(minute(2), 5, "RMB", 1)]}
    for out in replayed(rates_app(), closed({**inputs, "rates": rates})):
        assert out["left"]["rate"].to_list() == [702, None]


# ── RisingWave: emitted once, when both watermarks have passed ──────────────────────────────


def test_risingwaves_row_has_the_update_that_came_before_the_watermark():
    rates = [Rate(minute(0), "EUR", 100), Rate(minute(0), "EUR", 110)]
    orders = [Order(minute(1), 1, "EUR", 20), Order(minute(1), 2, "GBP", 5)]
    for out in replayed(rates_app(), closed({"orders": orders, "rates": rates})):
        assert out["left"].select("id", "amount", "rate").rows() == [(1, 20, 110), (2, 5, None)]


def test_risingwaves_update_after_the_row_was_emitted_changes_nothing():
    inputs = {
        "orders": [Order(minute(1), 1, "EUR", 20), Watermark("orders", at=minute(9))],
        "rates": [
            Rate(minute(0), "EUR", 110),
            Watermark("rates", at=minute(9)),
            Rate(minute(0.5), "EUR", 999),
        ],
    }
    for out in replayed(rates_app(), inputs):
        assert out["left"]["rate"].to_list() == [110]
        assert out.late == 2  # at each of the two joins


# ── equal times, and tolerance ──────────────────────────────────────────────────────────────


FIVE = "5 seconds"
JOINS = {
    "plain": {},
    "strict": {"allow_equal": False},
    "backward": {"tolerance": FIVE},
    "forward": {"tolerance": FIVE, "direction": "forward"},
    "nearest": {"tolerance": FIVE, "direction": "nearest"},
}
# (the join, the time of the trade, the times of quotes, the quote that matches)
QUOTES = [
    ("plain", 10, [10], 10),
    ("strict", 10, [10], None),
    ("strict", 10, [9, 10, 11], 9),
    ("backward", 10, [5], 5),
    ("backward", 10, [4], None),
    ("forward", 10, [15], 15),
    ("forward", 10, [16], None),
    ("forward", 10, [10], 10),
    ("nearest", 10, [5, 15], 5),
    ("nearest", 10, [4, 15], 15),
    ("nearest", 10, [8, 11], 11),
    ("nearest", 10, [4, 16], None),
]


def quotes_app(joins):
    app = ms.App("quotes", log="unused", buckets=2)
    left = app.topic("left", Left, key="k").stream(time="at", watermark=unordered())
    right = app.topic("right", Right, key="k").stream(time="at", watermark=unordered())
    for name, options in joins.items():
        left.join_asof(right, "k", **options).view(name, key="k")
    return app


def test_quotes_match_by_time_and_tolerance_which_is_inclusive():
    inputs = {"left": [], "right": []}
    for number, (_, trade, quotes, _) in enumerate(QUOTES):
        inputs["left"].append(Left(at(trade), str(number), "trade"))
        inputs["right"] += [Right(at(quote), str(number), str(quote)) for quote in quotes]
    for out in replayed(quotes_app(JOINS), closed(inputs)):
        for number, (name, _, _, match) in enumerate(QUOTES):
            found = out[name].filter(pl.col("k") == str(number))["w"].to_list()
            assert found == [None if match is None else str(match)], QUOTES[number]


def test_a_quote_that_arrives_after_the_trade_in_the_same_batch_still_matches():
    arrived = [START + timedelta(milliseconds=n) for n in range(2)]
    inputs = {
        "left": [Row(Left(at(10), "k", "trade"), at=arrived[0])],
        "right": [Row(Right(at(8), "k", "8"), at=arrived[1])],
    }
    assert testing.run(quotes_app({"out": {}}), closed(inputs))["out"]["w"].to_list() == ["8"]


# ── one batch, both orders; a version that comes too late to count ─────────────────────────


@pytest.mark.parametrize(("row_ms", "seen"), [(1, "old"), (2, "new"), (3, "new")])
@pytest.mark.parametrize("partitions", [1, 4, 7])
def test_in_one_batch_a_row_sees_what_arrived_before_it(row_ms, seen, partitions):
    app, left, right = app_with()
    left.lookup(right, "k").view("out", key="v")
    inputs = {
        "left": [Row(Left(at(5), "k", "row"), at=START + timedelta(milliseconds=row_ms))],
        "right": [
            Row(Right(at(1), "k", "old"), at=START),
            Row(Right(at(2), "k", "new"), at=START + timedelta(milliseconds=2)),
        ],
    }
    assert testing.run(app, inputs, partitions=partitions)["out"]["w"].to_list() == [seen]


def test_a_version_with_a_lower_sequence_does_not_replace_a_later_one():
    rows = [Said(at(5), "R", "k", "c"), Said(at(3), "R", "k", "u"), Said(at(6), "L", "k", "row")]
    rows += [Said(at(1), "R", "l", "old"), Said(at(5), "L", "l", "before")]
    rows += [Said(at(2), "R", "l", "new"), Said(at(5), "L", "l", "behind")]
    for out in replayed(looked_up("time", "offset"), {"both": in_turn(rows)}):
        for order, seen in (("time", "c"), ("offset", "u")):
            found = dict(out[f"left_{order}"].select("v", "w").rows())
            assert found == {"row": seen, "before": "old", "behind": "new"}


# ── a tax rate that changes with the year ───────────────────────────────────────────────────


@dataclass
class Sale:
    at: datetime
    id: int
    country: str
    net: int


@dataclass
class Tax:
    valid_from: datetime
    country: str
    percent: int


def test_sales_around_new_year_have_the_tax_of_their_time_though_it_was_announced_ahead():
    year = datetime(2026, 1, 1, tzinfo=UTC)
    app = ms.App("taxes", log="unused", buckets=2)
    sales = app.topic("sales", Sale, key="id").stream(time="at")
    taxes = app.table(
        "taxes",
        Tax,
        key="country",
        time="valid_from",
        watermark=ms.watermark("400 days", idle="30 seconds"),
    )
    sales.join_asof(taxes, "country").view("out", key="id")
    second = timedelta(seconds=1)
    announced = [
        Tax(year - timedelta(days=300), "de", 19),
        Tax(year, "de", 21),
        Tax(year - timedelta(days=300), "fr", 20),
    ]
    inputs = {
        "taxes": [*announced, testing.Tick("1 minute")],
        "sales": [
            testing.Tick("1 minute"),
            Sale(year - second, 1, "de", 100),
            Sale(year, 2, "de", 100),
            Sale(year + second, 3, "fr", 100),
            Sale(year + 9 * second, 9, "fr", 100),
        ],
    }
    out = testing.run(app, inputs, partitions=1)
    assert out["out"].select("id", "percent").rows() == [(1, 19), (2, 21), (3, 20)]
    assert out.late == 0
