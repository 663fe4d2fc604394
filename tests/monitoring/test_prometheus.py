"""The alerts that are shipped, in a real Prometheus and Alertmanager: each is caused, fires, and resolves."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from monitoring.prometheus_servers import missing, monitoring

from millstream.metrics.exposition import Exposition
from millstream.metrics.histogram import DurationHistogram
from millstream.metrics.server import serve_metrics

ROOT = Path(__file__).parents[2]
RULES = (ROOT / "deploy/prometheus/millstream.rules.yaml").read_text()
DOWN = "MillstreamServerDown"
ALERTS = [name for name in re.findall(r"- alert: (\w+)", RULES) if name != DOWN]

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}"),
]


def hurried(rules):
    """Return the rules with short times: what they compare, and with which limits, is as it was."""
    rules = rules.replace(
        "for: 2m", "for: 6 s"
    )  # of a server that is down: a scrape may be late here
    rules = re.sub(r"\n +for: \d+m", "\n        for: 1s", rules).replace("for: 6 s", "for: 6s")
    rules = re.sub(r"\[(5m|10m)\]", "[8s]", rules)
    return rules.replace("offset 1h", "offset 4s")


def test_the_rules_are_ones_that_prometheus_accepts(tmp_path):
    for name, text in (("as-shipped.yaml", RULES), ("hurried.yaml", hurried(RULES))):
        (tmp_path / name).write_text(text)
        done = subprocess.run(
            ["promtool", "check", "rules", str(tmp_path / name)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr + done.stdout


def test_what_a_server_exposes_is_what_promtool_accepts(ads_figures):
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=ads_figures,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.fixture
def ads_figures(tmp_path):
    """The text of a page of an app that has run."""
    import millstream as ms
    from millstream.views.server.app_metrics import AppMetrics
    from millstream.views.server.catalog import ViewCatalog

    ran(tmp_path, ms)
    with closing(ViewCatalog(tmp_path / "data")) as catalog:
        figures = AppMetrics(catalog, tmp_path / "data")
        text = Exposition({"apps": figures.read}).text().decode()
        figures.close()
    # The library's own figures of a process are not for promtool to judge.
    return "".join(
        f"{line}\n"
        for line in text.splitlines()
        if " process_" not in line and not line.startswith("process_")
    )


def ran(tmp_path, ms):
    from millstream.views.commit.open_committer import open_committer

    app = ms.App("shop", log=tmp_path / "data")
    app.topic("orders", {"n": int}).stream().view("by_n", key="n")
    with ms.connect(tmp_path / "data") as log:
        log.create_topic("orders")
    app.folder.mkdir(parents=True)
    with open_committer(app.plan(), app.folder / "views.db", tmp_path / "data") as committer:
        committer.begin_run("main", "one")


@dataclass
class Trouble:
    """The figures of servers, which are well or in every trouble that there is an alert for."""

    troubled: bool = False
    dead: int = 0
    refused: int = 0
    syncs: DurationHistogram = None
    state_bytes: float = 1.0e9

    def read(self, readings):
        bad = self.troubled
        grown = 1 if bad else 0
        self.dead, self.refused = self.dead + grown, self.refused + grown
        self.state_bytes = min(self.state_bytes * 1.2, 1e12) if bad else self.state_bytes
        source = {"app": "shop", "topic": "orders"}
        readings.add("app_failed", float(bad), app="shop")
        readings.add("source_lag_seconds", 400.0 if bad else 0.0, partition=0, **source)
        readings.add("view_freshness_seconds", 700.0 if bad else 0.0, app="shop", view="by_n")
        for partition, delay_s in enumerate([60.0, 2000.0 if bad else 70.0, 90_000.0]):
            readings.add("source_watermark_delay_seconds", delay_s, partition=partition, **source)
            readings.add("source_idle", float(partition == 2), partition=partition, **source)
        readings.add("step_read_rows_total", self.dead, app="shop", step="orders")
        readings.add("step_exit_rows_total", self.dead, app="shop", step="orders", exit="dead")
        readings.add("app_late_events_total", self.dead, app="shop")
        readings.add("step_state_bytes", self.state_bytes, app="shop", step="orders")
        group = {"group": "g", "topic": "orders", "partition": 0}
        readings.add("group_at_risk_records", float(bad), **group)
        readings.add("group_lost_records", float(bad), **group)
        readings.add("log_disk_size_bytes", 100.0)
        readings.add("log_disk_free_bytes", 5.0 if bad else 50.0)
        readings.add("broker_log_writable", float(not bad))
        self.syncs.add(2.0 if bad else 0.001)
        readings.add_histogram("log_sync_seconds", self.syncs)
        readings.add("edge_refusals_total", self.refused)
        readings.add("webhook_undeliverable_records_total", self.refused, topic="orders", group="g")
        if bad:
            raise OSError("the disk of this source is gone")


def test_each_alert_fires_when_its_trouble_comes_and_resolves_when_it_is_over(tmp_path):
    trouble = Trouble(syncs=DurationHistogram())
    exposition = Exposition({"shop": trouble.read}, cpu_share_max=1)
    with ExitStack() as serving:
        url = serving.enter_context(serve_metrics("127.0.0.1:0", exposition))
        port = urllib.parse.urlsplit(url).port
        with monitoring(tmp_path, hurried(RULES), [port]) as (alerts, prometheus):
            deadline_s = time.monotonic() + 12
            while time.monotonic() < deadline_s:
                time.sleep(0.5)
            assert firing(prometheus) == [] == alerts.told  # none is told while all is well
            trouble.troubled = True
            alerts.wait_for(ALERTS, "firing")
            trouble.troubled = False
            alerts.wait_for(ALERTS, "resolved")
            assert {name for name, _ in alerts.told} == set(ALERTS)
            serving.close()
            alerts.wait_for([DOWN], "firing")


def firing(prometheus):
    with urllib.request.urlopen(
        f"http://127.0.0.1:{prometheus}/api/v1/alerts", timeout=60
    ) as found:
        return [one["labels"]["alertname"] for one in json.load(found)["data"]["alerts"]]


def test_a_pipeline_that_falls_behind_and_meets_bad_records_is_told_of(tmp_path):
    import millstream as ms
    from millstream.spark.local_run import LocalRun
    from millstream.views.server.server import serve

    app = ms.App("shop", log=tmp_path / "data")
    app.topic("orders", {"n": int}).stream().view("by_n", key="n")
    pipeline = LocalRun(app.plan(), tmp_path / "data", app.folder, app.folder / "views.db")
    app.folder.mkdir(parents=True)
    caused = ["MillstreamSourceLag", "MillstreamViewStale"]
    with ms.connect(tmp_path / "data") as log, serve(tmp_path / "data", listen="127.0.0.1:0") as up:
        log.create_topic("orders")
        port = urllib.parse.urlsplit(up.url).port

        def send(*values):
            an_hour_ago_ms = int((time.time() - 3600) * 1000)
            with log.producer() as producer:
                for value in values:
                    producer.send("orders", value, timestamp_ms=an_hour_ago_ms)

        send({"n": 1})
        pipeline.run()
        with monitoring(tmp_path, hurried(RULES), [port]) as (alerts, _):
            time.sleep(6)  # the counters have been seen
            assert alerts.told == []
            send({"n": 2}, b"no JSON")
            alerts.wait_for(caused, "firing")
            pipeline.run()
            alerts.wait_for(["MillstreamDeadLetters"], "firing")
            alerts.wait_for([*caused, "MillstreamDeadLetters"], "resolved")
