"""Budgets against a naive model, and the cases Q1 to Q5 of their rules."""

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import polars as pl
import pytest
from example_counts import some
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.errors import ConfigError
from millstream.kernels.budget import local_days

NOON = datetime(2026, 3, 10, 12, tzinfo=UTC)
TOLD = ("decision", "spent", "remaining", "budget_event")


@dataclass
class Shown:
    number: int
    at: datetime
    client: str | None
    cost: int | None
    limit: int | None = 10
    zone: str = "UTC"


def app_with(*, lateness="1 day", late="drop", zone=None, least=None):
    app = ms.App("budgets", log="unused")
    stream = app.topic("shown", Shown, key="client").stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None), lateness=lateness, late=late
    )
    zone = pl.col("zone") if zone is None else zone
    decided = stream.budget("client", cost="cost", limit="limit", least=least, zone=zone)
    decided.view("decided", key="number")
    if late == "side":
        decided.late.view("late", key="number")
    return app


def decided(run):
    rows = run.rows["decided"].sort("number").to_dicts()
    return [tuple(row[name] for name in TOLD) for row in rows]


def rows_of(*costs, client="a", start=NOON, first=0):
    return [
        Shown(first + n, start + timedelta(seconds=n), client, cost) for n, cost in enumerate(costs)
    ]


def test_q1_what_does_not_fit_is_refused_and_exhausted_is_said_once(rows_given):
    for batches in (1, 4):
        run = rows_given(app_with(), {"shown": rows_of(4, 4, 4, 2, 1, 1)}, batches=batches)
        assert decided(run) == [
            ("granted", 4, 6, None),
            ("granted", 8, 2, None),
            ("refused", 8, 2, None),
            ("granted", 10, 0, "exhausted"),
            ("refused", 10, 0, None),
            ("refused", 10, 0, None),
        ]


def test_q2_a_repeat_is_not_charged_behind_a_dedup(rows_given):
    app = ms.App("budgets", log="unused")
    shown = app.topic("shown", Shown, key="client").stream(time="at")
    once = shown.dedup("number", within="1 hour")
    once.budget("client", cost="cost", limit="limit").view("decided", key="number")
    run = rows_given(app, {"shown": [*rows_of(4, 4), *rows_of(4)]})
    assert decided(run) == [("granted", 4, 6, None), ("granted", 8, 2, None)]


def test_q3_a_refund_resumes_once(rows_given):
    run = rows_given(app_with(), {"shown": rows_of(10, 1, -4, -1, 2)}, batches=3)
    assert decided(run) == [
        ("granted", 10, 0, "exhausted"),
        ("refused", 10, 0, None),
        ("granted", 6, 4, "resumed"),
        ("granted", 5, 5, None),
        ("granted", 7, 3, None),
    ]


def test_q4_clients_do_not_touch_one_another(rows_given):
    rows = [*rows_of(10, 1), *rows_of(3, client="b", first=2)]
    assert decided(rows_given(app_with(), {"shown": rows})) == [
        ("granted", 10, 0, "exhausted"),
        ("refused", 10, 0, None),
        ("granted", 3, 7, None),
    ]


@pytest.mark.parametrize("batches", [1, 5])
def test_q5_a_late_event_charges_yesterday_and_a_new_day_resumes(rows_given, batches):
    rows = [
        *rows_of(10),
        *rows_of(1, start=NOON + timedelta(days=1), first=1),
        *rows_of(-3, 2, start=NOON, first=2),  # of yesterday: nothing is said of its standing
        *rows_of(9, start=NOON + timedelta(days=1), first=4),
    ]
    assert decided(rows_given(app_with(), {"shown": rows}, batches=batches)) == [
        ("granted", 10, 0, "exhausted"),
        ("granted", 1, 9, "resumed"),
        ("granted", 7, 3, None),
        ("granted", 9, 1, None),
        ("granted", 10, 0, "exhausted"),
    ]


def test_a_budget_is_exhausted_while_less_remains_than_is_of_use(rows_given):
    for batches in (1, 5):
        rows = rows_of(4, 3, 1, -2, 1, 1)
        run = rows_given(app_with(least=pl.lit(3)), {"shown": rows}, batches=batches)
        assert decided(run) == [
            ("granted", 4, 6, None),
            ("granted", 7, 3, None),
            ("granted", 8, 2, "exhausted"),
            ("granted", 6, 4, "resumed"),
            ("granted", 7, 3, None),
            ("granted", 8, 2, "exhausted"),
        ]


def test_a_day_is_that_of_the_rows_own_zone(rows_given):
    at = datetime(2026, 3, 10, 23, 30, tzinfo=UTC)
    zones = ["UTC", "Asia/Tokyo", "America/New_York"]
    rows = [Shown(n, at, zone, 1, 10, zone) for n, zone in enumerate(zones)]
    found = rows_given(app_with(), {"shown": rows}).rows["decided"].sort("number")
    assert found["budget_day"].to_list() == [date(2026, 3, d) for d in (10, 11, 10)]
    found = rows_given(app_with(zone="Asia/Tokyo"), {"shown": rows}).rows["decided"]
    assert set(found["budget_day"]) == {date(2026, 3, 11)}


def test_without_a_limit_or_a_cost_nothing_is_refused(rows_given):
    rows = [Shown(0, NOON, "a", 99, None), Shown(1, NOON, "a", None, 5), Shown(2, NOON, "a", 1, 5)]
    assert decided(rows_given(app_with(), {"shown": rows})) == [
        ("granted", 99, None, None),
        ("granted", 99, -94, "exhausted"),
        ("refused", 99, -94, None),
    ]


def test_after_its_day_is_over_everywhere_a_row_is_late(rows_given):
    over = datetime(2026, 3, 11, 12, tzinfo=UTC) + timedelta(days=1)  # with a day of lateness
    for moved, late in ((over - timedelta(microseconds=1), 0), (over, 1)):
        rows = [*rows_of(1), Shown(1, moved, "a", 1), *rows_of(2, first=2)]
        run = rows_given(app_with(late="side"), {"shown": rows}, batches=3)
        assert run.rows["late"].height == late
        if late:
            (row,) = run.rows["late"].to_dicts()
            assert (row["number"], row["late_reason"]) == (2, "expired_day")


def test_amounts_may_be_decimals(rows_given):
    @dataclass
    class Priced:
        number: int
        at: datetime
        client: str
        cost: Decimal

    app = ms.App("budgets", log="unused")
    stream = app.topic("shown", Priced, key="client").stream(time="at")
    cost, limit = (pl.col("cost").cast(pl.Decimal(18, 4)), pl.lit(1).cast(pl.Decimal(10, 2)))
    stream.budget("client", cost=cost, limit=limit).view("decided", key="number")
    rows = [
        Priced(n, NOON, "a", Decimal(text)) for n, text in enumerate(["0.3333", "0.6667", "0.0001"])
    ]
    found = rows_given(app, {"shown": rows}).rows["decided"].sort("number")
    assert found["decision"].to_list() == ["granted", "granted", "refused"]
    assert found["spent"].to_list() == [Decimal("0.3333"), Decimal("1.0000"), Decimal("1.0000")]


def model(rows, least=1):
    """Decide one by one, in the order of arrival."""
    spent, standing, told = defaultdict(int), {}, {}
    for row in rows:
        day = row.at.astimezone(ZoneInfo(row.zone)).date()
        cost = row.cost or 0
        fits = cost <= 0 or row.limit is None or spent[row.client, day] + cost <= row.limit
        spent[row.client, day] += cost if fits else 0
        total = spent[row.client, day]
        newest, was_out = standing.get(row.client, (day, False))
        event, out = None, row.limit is not None and row.limit - total < least
        if day >= newest:
            event = None if out == was_out else ("exhausted" if out else "resumed")
            standing[row.client] = (day, out)
        remaining = None if row.limit is None else row.limit - total
        told[row.number] = ("granted" if fits else "refused", total, remaining, event)
    return [told[number] for number in sorted(told)]


drawn_rows = st.lists(
    st.builds(
        Shown,
        number=st.just(0),
        at=st.integers(-30, 30).map(lambda hours: NOON + timedelta(hours=hours)),
        client=st.sampled_from(["a", "b", "c", None]),
        cost=st.none() | st.integers(-4, 9),
        limit=st.none() | st.sampled_from([0, 10, 10, 10, 12, -1]),
        zone=st.sampled_from(["UTC", "Asia/Tokyo", "America/New_York"]),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=some(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drawn=drawn_rows,
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    seed=st.integers(0, 99),
    least=st.integers(1, 4),
)
def test_every_row_is_decided_as_the_model_does(
    drawn, partitions, batches, seed, least, rows_given
):
    for number, row in enumerate(drawn):
        row.number = number
        if partitions > 1 and row.client is None:  # without a key, a row may be in any partition
            row.client = "c"
    run = rows_given(
        app_with(lateness="9 days", least=pl.lit(least)),
        {"shown": drawn},
        batches=batches,
        partitions=partitions,
        seed=seed,
    )
    assert decided(run) == model(drawn, least)


def test_what_cannot_be_a_budget_is_refused():
    app = ms.App("budgets", log="unused")
    stream = app.topic("shown", Shown, key="client").stream(time="at")

    def refused(match, **words):
        words = {"cost": "cost", "limit": "limit", **words}
        with pytest.raises(ConfigError, match=match):
            stream.budget("client", **words)

    refused("The cost of 'budget.*' is of type Float64", cost=pl.col("cost") / 2)
    refused("The limit of 'budget.*' is of type String", limit="zone")
    refused("is 'Mars/Phobos', which is no time zone", zone="Mars/Phobos")
    refused("The zone of 'budget.*' is of type Int64", zone=pl.col("cost"))
    refused("uses the column 'price'", cost="price")
    twice = stream.budget("client", cost="cost", limit="limit")
    with pytest.raises(ConfigError, match="column 'budget_day', and the stream has one"):
        twice.budget("client", cost="cost", limit="limit")


ZONES = ("UTC", "America/St_Johns", "Asia/Kolkata", "Africa/Monrovia", "Pacific/Kiritimati")


@pytest.mark.parametrize(
    ("start", "apart"),
    [
        (datetime(2006, 10, 29, 2, 20, tzinfo=UTC), timedelta(seconds=7)),  # back at 00:01 local
        (datetime(2006, 4, 2, 3, 20, tzinfo=UTC), timedelta(seconds=7)),  # and on, in spring
        (datetime(2026, 3, 1, tzinfo=UTC), timedelta(minutes=37)),  # far apart
        (datetime(1971, 12, 31, 0, 43, tzinfo=UTC), timedelta(seconds=1)),  # half a minute off
    ],
)
def test_a_local_day_is_the_one_that_the_zones_clocks_show(start, apart):
    times = [start + n * apart for n in range(600)]
    zones = [ZONES[n % len(ZONES)] for n in range(600)]
    microseconds = pl.Series(times).dt.epoch("us")
    found = local_days(microseconds, pl.Series(zones)).to_list()
    assert found == [
        at.astimezone(ZoneInfo(zone)).date() for at, zone in zip(times, zones, strict=True)
    ]


def test_no_times_have_no_days():
    days = local_days(pl.Series([], dtype=pl.Int64), pl.Series([], dtype=pl.String))
    assert days.to_list() == []
    assert days.dtype == pl.Date
