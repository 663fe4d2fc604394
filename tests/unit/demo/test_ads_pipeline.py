"""The demo's pipeline, run without a JVM, against the independent answers."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.demo.ads_events import PARTITIONS, TOPIC
from millstream.demo.ads_expected import difference, expected_results
from millstream.demo.ads_input import AdsInput, StopRule
from millstream.demo.ads_pipeline import build

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "ads"
SMALL = AdsInput("generated", seed=3, rate=60, minutes=4)
RULE = StopRule("1 minute", shown_min=20, windows=2, floor=0.006)


def rows_of(given: AdsInput) -> list[testing.Row]:
    travel = given.disorder()
    values = travel.records(travel.order)["value"]
    return [
        testing.Row(value, partition=partition)
        for value, partition in zip(values, travel.order["partition"], strict=True)
    ]


@pytest.fixture
def logged(tmp_path):
    """Return a function that writes an input to a log and gives the independent answers."""

    def write(given: AdsInput, rule: StopRule, clients=None):
        travel = given.disorder()
        records = travel.records(travel.order)
        with ms.connect(tmp_path / "log") as log:
            log.create_topic(TOPIC, partitions=PARTITIONS)
            with log.producer() as producer:
                producer.send_many(
                    TOPIC, keys=records["key"].to_arrow(), values=records["value"].to_arrow()
                ).result()
            return expected_results(log, clients or given.clients, rule)

    return write


def assert_equal(run, expected):
    for name, rows in expected.views.items():
        assert difference(run[name], rows).is_empty(), name
    for name, rows in expected.topics.items():
        records = run.topic(name).with_columns(
            pl.col(column).str.to_datetime("%Y-%m-%dT%H:%M:%S%.fZ", time_unit="us", time_zone="UTC")
            for column, dtype in rows.schema.items()
            if dtype == pl.Datetime("us", "UTC")
        )
        assert difference(records, rows).is_empty(), name


@pytest.mark.parametrize("chaos", [False, True])
@pytest.mark.parametrize("batches", [1, 7])
def test_views_and_topics_equal_the_independent_answers(logged, batches, chaos):
    given = AdsInput("generated", 3, SMALL.rate, SMALL.minutes, chaos=chaos)
    expected = logged(given, RULE)
    app = build("unused", given.clients, RULE)
    run = testing.run(app, {TOPIC: rows_of(given)}, batches=batches, seed=batches)
    assert_equal(run, expected)
    # All that the pipeline is there for did happen.
    assert min(rows.height for rows in (*expected.views.values(), *expected.topics.values())) > 0
    assert set(expected.topics["decisions"]["decision"]) == {"served", "refused"}
    assert set(expected.topics["budget-events"]["budget_event"]) == {"exhausted", "resumed"}
    assert run.dead.height > 0


def test_clients_that_are_not_in_the_table_are_decided_on_and_counted(logged):
    clients = dict(list(SMALL.clients.items())[3:])
    expected = logged(SMALL, RULE, clients)
    app = build("unused", clients, RULE)
    run = testing.run(app, {TOPIC: rows_of(SMALL)}, batches=5, seed=2, crash=2)
    assert_equal(run, expected)
    unknown = run["spend_by_day"].filter(~pl.col("client").is_in(clients))
    assert unknown.height > 0
    assert (unknown["spent"] <= 0).all()  # refunds alone


@pytest.mark.not_in_lane("thresholds", "a whole week, two rows at a time, takes too long")
@pytest.mark.thorough
def test_the_real_week_equals_the_independent_answers(logged):
    week = AdsInput()
    expected = logged(week, week.stop_rule)
    run = testing.run(
        build("unused", week.clients, week.stop_rule), {TOPIC: rows_of(week)}, batches=2
    )
    assert_equal(run, expected)
    spent = expected.views["spend_by_day"]
    assert (spent["spent"] <= spent["budget"]).all()
    assert expected.views["stopped_ads"].height == 10
    assert expected.views["ad_ctr"]["shown"].sum() > 59_000


def test_the_example_runs_the_pipeline_of_the_demo():
    example = runpy.run_path(str(EXAMPLES / "app.py"))["app"]
    week = AdsInput()
    assert example.plan().steps == build("./demo-data", week.clients, week.stop_rule).plan().steps


def test_the_second_version_rates_otherwise_and_counts_the_same(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    rows = {TOPIC: rows_of(AdsInput())[:8_000]}
    first = runpy.run_path(str(EXAMPLES / "app.py"))["app"]
    second = runpy.run_path(str(EXAMPLES / "second_version.py"))["app"]
    sys.modules.pop("app")
    views = [testing.run(app, rows, batches=2)["ad_ctr"] for app in (first, second)]
    counts = ("window_start", "ad", "shown", "clicked", "cost")
    assert views[0].select(counts).equals(views[1].select(counts))
    rates = views[1].filter(pl.col("shown") > 0)
    assert rates["rate"].is_between(0, 1).all()
    none = rates.filter(pl.col("clicked") == 0)["rate"]
    assert none.abs().max() < 1e-12
    clicked = rates.filter(pl.col("clicked") == 1, pl.col("shown") == 1)
    # Wilson's interval for 1 of 1 begins at 1 / (1 + z²).
    assert clicked["rate"].to_list() == pytest.approx([1 / (1 + 1.96**2)] * clicked.height)
