"""The independent answers, on logs so small that one can work them out by hand."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import polars as pl
import pytest

import millstream as ms
from millstream.demo.ads_events import Client
from millstream.demo.ads_expected import difference, expected_results
from millstream.demo.ads_input import StopRule

NOON = datetime(2026, 3, 10, 12, tzinfo=UTC)
CLIENTS = {"a": Client("UTC", 1_000_000, 3_000, 10_000), "b": Client("Asia/Tokyo", 0, 1, 10_000)}
RULE = StopRule("1 minute", shown_min=2, windows=2, floor=0.005)


def event(event_id, seconds, kind="impression", *, sent=None, off=0, client="a", ad=1, cost=1_000):
    """An event at a time after noon, sent at once, or later; by a clock that is off."""
    at = NOON + timedelta(seconds=seconds)
    left = NOON + timedelta(seconds=seconds if sent is None else sent)
    wrong = timedelta(seconds=off)
    return {
        "event_id": event_id,
        "kind": kind,
        "occurred_at": stamp(at + wrong),
        "sent_at": stamp(left + wrong),
        "received_at": stamp(left),
        "client": client,
        "ad": ad,
        "cost_micros": cost,
    }


def stamp(at):
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def beat(seconds):
    at = stamp(NOON + timedelta(seconds=seconds))
    return {"event_id": "h", "kind": "heartbeat", "occurred_at": at, "received_at": at}


@pytest.fixture
def answered(tmp_path):
    def run(*events):
        with ms.connect(tmp_path / "log") as log:
            log.create_topic("ad-events", partitions=1)
            with log.producer() as producer:
                for value in events:
                    text = value if isinstance(value, bytes) else json.dumps(value).encode()
                    producer.send("ad-events", text)
            return expected_results(log, CLIENTS, RULE)

    return run


def test_copies_count_once_and_a_record_that_is_cut_short_not_at_all(answered):
    cut = json.dumps(event("i3", 5)).encode()[:50]
    click = event("c1", 30, "click", cost=3_000)
    found = answered(event("i1", 1), event("i2", 2), event("i1", 1, sent=9), cut, click)
    (row,) = found.views["ad_ctr"].to_dicts()
    assert (row["window_start"], row["shown"], row["clicked"]) == (NOON, 2, 1)
    assert row["cost"] == Decimal("0.005")
    assert row["rate"] == (1 + 0.005 * 200) / (2 + 200)


def test_an_id_counts_again_half_an_hour_later(answered):
    found = answered(event("i1", 0), event("i1", 1800), event("i1", 1801))
    assert found.views["ad_ctr"]["window_start"].to_list() == [NOON, NOON + timedelta(minutes=30)]


def test_a_wrong_clock_and_a_wait_on_the_device_are_taken_into_account(answered):
    found = answered(event("i1", 10, off=18_000), event("i2", 20, sent=100, off=-1e9))
    (row,) = found.views["ad_ctr"].to_dicts()
    assert (row["window_start"], row["shown"]) == (NOON, 2)


def test_what_is_more_than_an_hour_behind_is_late(answered):
    in_time, late = event("i1", 0, sent=3660), event("i2", -1, sent=3660)
    found = answered(beat(3660), in_time, late)
    assert found.views["ad_ctr"]["shown"].to_list() == [1]
    (row,) = found.views["late_events"].to_dicts()
    assert (row["event_id"], row["late_by"]) == ("i2", timedelta(seconds=1))
    assert row["occurred_at"] == NOON - timedelta(seconds=1)


def test_budgets_refuse_and_tell_when_no_click_can_be_paid(answered):
    found = answered(
        event("i1", 1, cost=6_000),
        event("i2", 2, cost=5_000),  # would be 11,000 of 10,000
        event("i3", 3, cost=2_000),  # leaves 2,000, and a click costs 3,000
        event("r1", 4, "refund", cost=-3_000),
        event("i4", 86_400, cost=9_000),
        event("i5", 5, sent=86_401, cost=5_000),  # of yesterday, and not yet an hour behind? it is
        event("i6", 86_402, client="b", cost=1),
    )
    assert found.topics["decisions"]["decision"].to_list() == [
        "served",
        "refused",
        "served",
        "served",
        "served",
    ]
    told = found.topics["budget-events"].select("event_id", "budget_event").rows()
    assert told == [("i3", "exhausted"), ("r1", "resumed"), ("i4", "exhausted")]
    days = found.views["spend_by_day"].rows()
    assert days == [
        ("a", date(2026, 3, 10), Decimal("0.005"), Decimal("0.01")),
        ("a", date(2026, 3, 11), Decimal("0.009"), Decimal("0.01")),
        ("b", date(2026, 3, 11), Decimal("0.000001"), Decimal("0.01")),
    ]
    assert found.views["late_events"]["event_id"].to_list() == ["i5"]


def test_an_ad_is_stopped_once_after_enough_low_windows_in_a_row(answered):
    low = [event(f"i{n}", 20 * n) for n in range(12)]
    clicked = [event(f"j{n}", 20 * n, ad=2) for n in range(6)]
    click = event("c1", 10, "click", ad=2)
    found = answered(*low, *clicked, click).views["stopped_ads"]
    (row,) = found.to_dicts()
    assert (row["ad"], row["shown"], row["clicked"]) == (1, 6, 0)
    assert row["stopped_at"] == NOON + timedelta(minutes=2)
    assert row["rate_max"] == 1 / 203


def test_a_difference_is_a_row_that_only_one_has():
    one = pl.DataFrame({"a": [1, 2, 2, None], "b": [0.5, 1.0, 1.0, None]})
    assert difference(one, one.reverse()).is_empty()
    other = pl.DataFrame({"a": [1, 2, None, 4], "b": [0.5, 1.0, None, 0.0]})
    assert difference(one, other).rows() == [(2, 1.0, 1, "found"), (4, 0.0, 1, "expected")]
