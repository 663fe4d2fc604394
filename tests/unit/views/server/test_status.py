"""What an app is doing, as the page and programs get it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from millstream.errors import ConfigError
from millstream.views.runs.control_files import hold_run_lock
from millstream.views.runs.failure import record_failure
from millstream.views.server import status as app_status

TOPIC = "ad-events"
WINDOWS = "tumbling(1 minute) by ad_id"


def test_the_status_adds_up_the_books_and_knows_every_partition(ads, server):
    ads.commit((0, 7, 10, 1, "1.50"))
    ads.commit((1, 7, 20, 2, "1.50"), late=3, unread=5)
    status = server.json("/apps/ads/status")
    assert status["totals"] == {"read": 36, "late": 3, "dead": 0, "filtered": 0, "duplicate": 0}
    assert status["unread"] == 5
    assert status["batch_id"] == 1
    first, second = status["partitions"]
    assert first == {
        "topic": TOPIC,
        "partition": 0,
        "position": 36,
        "end": 41,
        "unread": 5,
        "watermark": "2026-01-31T12:01:00.000000Z",
        "idle": False,
    }
    assert (second["partition"], second["watermark"], second["idle"]) == (1, None, True)
    (step,) = status["steps"]
    assert (step["step"], step["late"], step["late_by_us_max"]) == (WINDOWS, 3, 90_000_000)
    total = {line["step"]: line for line in status["ledger"]["total"]}
    last = {line["step"]: line for line in status["ledger"]["last"]}
    assert (total[WINDOWS]["held"], total[WINDOWS]["late"]) == (33, 3)
    assert (last[WINDOWS]["read"], last[TOPIC]["read"]) == (25, 25)
    assert status["views"]["ad_ctr"] == 2


def test_the_books_go_on_from_one_look_to_the_next(ads, server):
    for number in range(1, 6):
        ads.commit((number, 7, number, 0, "0.00"))
        assert server.json("/apps/ads/status")["totals"]["read"] == sum(range(number + 1))
    rates = server.json("/apps/ads/status")["throughput"]
    assert len(rates) == 4
    assert all(sample["per_second"] > 0 for sample in rates)


def test_an_app_runs_while_its_process_says_so(ads, server):
    assert not server.json("/apps/ads/status")["running"]
    with hold_run_lock(ads.log / "apps" / "ads", 3):
        status = server.json("/apps/ads/status")
        assert status["running"]
        assert status["runs"][0]["run"] == 3
    assert not server.json("/apps/ads/status")["running"]


def test_since_when_records_wait_is_read_where_no_batch_has_come_for_a_minute(
    ads, server, monkeypatch
):
    before = datetime.now(UTC) - timedelta(seconds=1)
    ads.commit((0, 7, 10, 1, "1.50"), unread=5)
    with hold_run_lock(ads.log / "apps" / "ads", 3):
        assert server.json("/apps/ads/status")["unread_since"] is None
        monkeypatch.setattr(app_status, "_QUIET", timedelta(0))
        found = datetime.fromisoformat(server.json("/apps/ads/status")["unread_since"])
        assert before <= found <= datetime.now(UTC)
    assert server.json("/apps/ads/status")["unread_since"] is None  # it does not run


def test_a_crashed_app_is_told_with_reason_time_and_the_way_on(ads, server):
    assert server.json("/apps/ads/status")["failure"] is None
    state_store = ads.log / "apps" / "ads"
    with pytest.raises(ConfigError), record_failure(state_store, lambda: 0.0):
        raise ConfigError("the field is gone.")
    failure = server.json("/apps/ads/status")["failure"]
    assert (failure["at"], failure["reason"]) == (
        "1970-01-01T00:00:00.000000Z",
        "the field is gone.",
    )
    assert "run the app again" in failure["advice"]


def test_before_the_first_batch_there_is_nothing_to_tell(ads, server):
    status = server.json("/apps/ads/status")
    assert (status["batch_id"], status["at"], status["totals"]["read"]) == (None, None, 0)
    assert status["throughput"] == status["partitions"] == status["steps"] == []


def test_the_graph_leads_from_topics_to_views(ads, server):
    graph = server.json("/apps/ads/graph")
    nodes = {node["id"]: node for node in graph["nodes"]}
    kinds = {node["name"]: node["kind"] for node in nodes.values()}
    assert kinds == {
        TOPIC: "topic",
        "filter(kind)": "step",
        WINDOWS: "operator",
        "ad_ctr": "view",
        "with_columns(budget)": "step",
        "select(client, spent, budget)": "step",
        "budgets": "view",
        "select(ad_id, stopped_at, client)": "step",
        "stopped_ads": "view",
    }
    names = [(nodes[e["from"]]["name"], nodes[e["to"]]["name"]) for e in graph["edges"]]
    assert set(names) == {
        (TOPIC, "filter(kind)"),
        ("filter(kind)", WINDOWS),
        (WINDOWS, "ad_ctr"),
        ("filter(kind)", "with_columns(budget)"),
        ("with_columns(budget)", "select(client, spent, budget)"),
        ("select(client, spent, budget)", "budgets"),
        ("with_columns(budget)", "select(ad_id, stopped_at, client)"),
        ("select(ad_id, stopped_at, client)", "stopped_ads"),
    }
    assert len(names) == len(set(names))
