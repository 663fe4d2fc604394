"""The figures of apps and of the log, as Prometheus scrapes them from the server of views."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
from metrics_text import figures

import millstream as ms
from millstream.errors import CorruptionError
from millstream.metrics.exposition import Exposition
from millstream.metrics.readings import Readings
from millstream.views.server.app_metrics import AppMetrics, topics_of_views
from millstream.views.server.catalog import ViewCatalog

STEP = "tumbling(1 minute) by ad_id"
HOUR_S = 3600.0


def of(app_metrics):
    return figures(Exposition({"apps": app_metrics.read}, cpu_share_max=1).text().decode())


@pytest.fixture
def metrics_at(ads):
    """Return what makes figures as of a time that many seconds from now."""
    with closing(ViewCatalog(ads.log)) as catalog:
        yield lambda later_s: AppMetrics(catalog, ads.log, wall_clock=lambda: time.time() + later_s)


def test_a_scrape_has_what_the_app_has_committed(ads, server):
    ads.commit((0, 7, 3, 1, "1.00"), late=2, unread=4)
    answer = server.ask("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = figures(answer.text)
    assert found["millstream_app_batches_total", "app=ads"] == 1
    assert found["millstream_app_running", "app=ads"] == 0
    assert found["millstream_app_late_events_total", "app=ads"] == 2
    exits = {
        name: found["millstream_step_exit_rows_total", "app=ads", f"exit={name}", f"step={STEP}"]
        for name in ("emitted", "held", "late", "dead", "filtered", "duplicate")
    }
    assert exits == {"emitted": 0, "held": 4, "late": 2, "dead": 0, "filtered": 0, "duplicate": 0}
    assert found["millstream_step_read_rows_total", "app=ads", f"step={STEP}"] == 6
    labels = "app=ads", "partition=0", "topic=ad-events"
    assert found["millstream_source_lag_records", *labels] == 4
    assert found["millstream_log_end_offset", "partition=0", "topic=ad-events"] == 10
    assert found["millstream_metrics_failed", "source=apps"] == 0


def test_lag_and_freshness_grow_with_the_clock_while_records_wait(ads, metrics_at):
    ads.commit((0, 7, 1, 0, "1.00"), unread=1)
    found = of(metrics_at(HOUR_S))
    waited_s = found["millstream_source_lag_seconds", "app=ads", "partition=0", "topic=ad-events"]
    assert HOUR_S <= waited_s < HOUR_S + 60
    assert found["millstream_view_freshness_seconds", "app=ads", "view=ad_ctr"] == waited_s


def test_what_is_caught_up_is_fresh_however_long_ago_its_last_batch_was(ads, metrics_at):
    ads.commit((0, 7, 1, 0, "1.00"))
    found = of(metrics_at(HOUR_S))
    assert found["millstream_view_freshness_seconds", "app=ads", "view=ad_ctr"] == 0
    assert found["millstream_source_lag_records", "app=ads", "partition=0", "topic=ad-events"] == 0


def test_counters_go_on_in_the_next_process(ads, metrics_at):
    ads.commit((0, 7, 2, 0, "1.00"), late=1)
    of(metrics_at(0))
    ads.commit((1, 7, 3, 0, "1.00"), late=1)
    for _ in range(2):  # one that has seen the first batch, and one that has not
        found = of(metrics_at(0))
        assert found["millstream_step_read_rows_total", "app=ads", f"step={STEP}"] == 7
        assert found["millstream_app_late_events_total", "app=ads"] == 2


def test_an_app_is_stalled_where_records_wait_and_no_batch_comes(ads, metrics_at):
    ads.commit((0, 7, 1, 0, "1.00"))
    assert metrics_at(HOUR_S).why_stalled("ads", 60.0) is None  # nothing waits
    ads.commit((1, 7, 1, 0, "1.00"), unread=1)
    assert metrics_at(0).why_stalled("ads", 60.0) is None
    assert "oldest unread record of ads has waited" in metrics_at(HOUR_S).why_stalled("ads", 60.0)


def test_a_view_goes_by_the_topics_above_it_alone(tmp_path):
    app = ms.App("two", log=tmp_path / "data")
    left, right = (app.topic(name, {"n": int}).stream() for name in ("left", "right"))
    left.view("of_left", key="n")
    left.union(right).view("of_both", key="n")
    from millstream.views.commit.pipeline_graph import pipeline_graph

    assert topics_of_views(pipeline_graph(app.plan())) == {
        "of_left": {"left"},
        "of_both": {"left", "right"},
    }


def test_one_app_that_cannot_be_read_does_not_hide_the_others(ads, metrics_at, monkeypatch):
    ads.commit((0, 7, 1, 0, "1.00"))
    metrics = metrics_at(0)
    monkeypatch.setattr(metrics, "_apps", lambda: ["gone", "ads"])
    found = of(metrics)
    assert found["millstream_metrics_failed", "source=apps"] == 1
    assert found["millstream_app_batches_total", "app=ads"] == 1


def test_one_app_that_is_removed_meanwhile_does_not_hide_the_others(ads, metrics_at, monkeypatch):
    ads.commit((0, 7, 1, 0, "1.00"))
    metrics = metrics_at(0)
    store_of = metrics._catalog.state_store

    def state_store(app):
        if app == "removed":
            raise FileNotFoundError(app)
        return store_of(app)

    monkeypatch.setattr(metrics._catalog, "state_store", state_store)
    monkeypatch.setattr(metrics, "_apps", lambda: ["removed", "ads"])
    assert of(metrics)["millstream_app_batches_total", "app=ads"] == 1


def test_records_that_cannot_be_read_have_no_age_and_still_a_number(ads, metrics_at, monkeypatch):
    ads.commit((0, 7, 1, 0, "1.00"), unread=3)
    metrics = metrics_at(0)
    metrics.read(Readings())  # opens the log

    def damaged(*_args, **_named):
        raise CorruptionError("torn")

    monkeypatch.setattr(metrics._reader, "read", damaged)
    found = of(metrics)
    labels = "app=ads", "partition=0", "topic=ad-events"
    assert found["millstream_source_lag_records", *labels] == 3
    assert ("millstream_source_lag_seconds", *labels) not in found
    # The other partition has no unread records: its 0 is not the age of the oldest one.
    assert ("millstream_view_freshness_seconds", "app=ads", "view=ad_ctr") not in found
    assert found["millstream_metrics_failed", "source=apps"] == 1
    monkeypatch.setattr(metrics, "_wall_clock", lambda: time.time() + HOUR_S)
    assert "cannot be read" in metrics.why_stalled("ads", 60.0)


def test_a_topic_that_was_made_anew_is_not_one_that_is_read_to_its_end(ads, metrics_at):
    ads.commit((0, 7, 3, 1, "1.00"))
    ads._producer.close()
    with closing(ms.connect(ads.log)) as log:
        log.delete_topic("ad-events")
        log.create_topic("ad-events", partitions=2)
        with log.producer() as producer:
            producer.send("ad-events", {}, partition=0)
    found = of(metrics_at(0))
    assert found["millstream_source_lag_records", "app=ads", "partition=0", "topic=ad-events"] == 1
    assert found["millstream_metrics_failed", "source=apps"] == 1


def test_counters_begin_again_when_an_app_is_reset_in_the_same_database(
    ads, metrics_at, monkeypatch
):
    ads.commit((0, 7, 2, 0, "1.00"))
    ads.commit((1, 7, 3, 0, "1.00"))
    metrics = metrics_at(0)
    of(metrics)
    store = metrics._catalog.state_store("ads")
    lines = [line for line in store.ledger("ads") if line["batch_id"] == 0]
    monkeypatch.setattr(store, "checkpoint_id", lambda *_: "two")
    monkeypatch.setattr(store, "ledger", lambda _app, since: lines[: None if since == 0 else 0])
    found = of(metrics)
    assert found["millstream_step_read_rows_total", "app=ads", f"step={STEP}"] == 2


def test_the_server_is_alive_and_ready(ads, server):
    assert server.ask("/healthz").text == "alive\n"
    ads.commit((0, 7, 1, 0, "1.00"))
    assert server.ask("/readyz").status == 200
    damaged = ads.log / "apps/other/views.db"
    damaged.parent.mkdir()
    damaged.write_bytes(b"no database" * 100)
    answer = server.ask("/readyz")
    assert (answer.status, server.ask("/healthz").status) == (503, 200)
    assert "views.db" in answer.text


def test_what_an_edited_app_does_not_read_or_compute_any_more_has_no_figures(
    ads, metrics_at, monkeypatch
):
    ads.commit((0, 7, 1, 0, "1.00"), unread=1)
    catalog = metrics_at(0)._catalog
    store = catalog.state_store("ads")
    status = store.status("ads")
    old = {**status["time"][STEP], "watermark_us": 1}
    old["clocks"] = {"ad-events": {**old["clocks"]["ad-events"], "partitions": {"0": 1}}}
    edited = {**status, "time": {**status["time"], "a step before": old}}
    monkeypatch.setattr(store, "status", lambda _app: edited)
    monkeypatch.setattr(
        store, "position", lambda _app: {"ad-events": {"0": 1}, "topic-before": {"0": 5}}
    )
    found = of(metrics_at(0))
    assert not [key for key in found if "step=a step before" in key or "topic=topic-before" in key]
    delay = "millstream_source_watermark_delay_seconds", "app=ads", "partition=0", "topic=ad-events"
    of_step = "millstream_step_watermark_delay_seconds", "app=ads", f"step={STEP}"
    assert found[delay] == found[of_step]
