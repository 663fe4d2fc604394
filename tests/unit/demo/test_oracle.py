"""The independent answer, checked by counting one event at a time."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta

import polars as pl

from millstream.demo.ads_events import arrivals
from millstream.demo.oracle import difference, rates_by_hour, totals_by_day

SEED = 3


def _counted_by_hand(*, size: timedelta, by: list[str]) -> dict[tuple, Counter[str]]:
    """Count each event id that arrives once, in a dictionary."""
    counts: dict[tuple, Counter[str]] = {}
    seen = set()
    zero = datetime(2019, 11, 24, tzinfo=UTC)
    for value in arrivals(SEED)["value"]:
        event = json.loads(value)
        if event["kind"] == "heartbeat" or event["event_id"] in seen:
            continue
        seen.add(event["event_id"])
        at = datetime.fromisoformat(event["occurred_at"])
        start = zero + (at - zero) // size * size
        key = (start, start + size, *(event[name] for name in by))
        counts.setdefault(key, Counter())[event["kind"]] += 1
    return counts


def test_rates_by_hour_are_what_counting_the_arrivals_gives():
    expected = rates_by_hour(SEED)
    counts = _counted_by_hand(size=timedelta(hours=1), by=["campaign"])
    assert expected.height == len(counts) >= 3 * 7 * 24
    for *key, shown, clicked, rate in expected.rows():
        found = counts[tuple(key)]
        assert (shown, clicked) == (found["impression"], found["click"])
        assert rate == (clicked / shown if shown else float("inf"))
    assert expected["shown"].sum() == 60_000
    assert expected["clicked"].sum() == 287


def test_totals_by_day_are_what_counting_the_arrivals_gives():
    expected = totals_by_day(SEED)
    counts = _counted_by_hand(size=timedelta(days=1), by=["campaign", "policy"])
    assert {tuple(row[:4]): tuple(row[4:6]) for row in expected.rows()} == {
        key: (found["impression"], found["click"]) for key, found in counts.items()
    }


def test_equal_tables_have_no_difference():
    expected = rates_by_hour(SEED)
    found = expected.with_columns(copies=pl.lit(1)).sample(fraction=1, shuffle=True, seed=1)
    assert difference(found, expected).is_empty()


def test_every_row_that_differs_is_shown_with_both_values():
    expected = rates_by_hour(SEED)
    wrong = expected.with_columns(
        shown=pl.when(pl.int_range(pl.len()) == 7).then(0).otherwise("shown")
    ).tail(-1)
    extra = expected.tail(1).with_columns(campaign=pl.lit("kids"))
    found = difference(pl.concat([wrong, extra]), expected)
    assert found.height == 3
    rows = {row["campaign"]: row for row in found.to_dicts() if row["shown"] != 0}
    assert rows["kids"]["shown_expected"] is None
    assert rows["all"]["shown"] is None
    assert rows["all"]["shown_expected"] == expected["shown"][0]
    assert found.filter(pl.col("shown") == 0)["shown_expected"].to_list() == [expected["shown"][7]]
