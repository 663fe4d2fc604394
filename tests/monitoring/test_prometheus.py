"""The alerts that are shipped, in a real Prometheus and Alertmanager: each is caused, fires, and resolves."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from monitoring.prometheus_servers import missing, monitoring
from monitoring.troubled_shop import HEARTBEAT_S, SlowDisk, TroubledShop, small_disk

from millstream.metrics.exposition import Exposition

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
    rules = re.sub(r"\[(5m|10m)\]", "[16s]", rules)
    return rules.replace("offset 1h", "offset 8s")


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


@pytest.mark.timeout(900)  # it waits for what others do, on a machine that may be busy
def test_each_alert_fires_when_its_trouble_comes_and_resolves_when_it_is_over(
    tmp_path, monkeypatch
):
    # A text of figures is made with each scrape: how much of a CPU they may take is measured elsewhere.
    monkeypatch.setitem(Exposition.__init__.__kwdefaults__, "cpu_share_max", 1)
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(tmp_path / "disk"))
        shop = TroubledShop(disk, SlowDisk(monkeypatch), stack)
        with monitoring(tmp_path, hurried(RULES), shop.ports) as (alerts, prometheus):
            time.sleep(8)  # the counters have been seen
            assert firing(prometheus) == [] == alerts.told, "none is told while all is well"
            shop.trouble()
            while not alerts.have_told(ALERTS, "firing", within_s=HEARTBEAT_S):
                shop.go_on()
            for title, expression in panels():
                assert found(prometheus, expression), f"{title}: {expression} finds nothing"
            shop.stop_spare()
            alerts.wait_for([DOWN], "firing")
            shop.mend()
            alerts.wait_for([*ALERTS, DOWN], "resolved")


# No edge runs here, no job on Spark, no store at a URL, and the database has no log of its own.
NOT_HERE = re.compile(
    "_edge_|_object_|_state_cache_|_batch_phase_|_last_batch_duration|_step_state_rows|_behind_bytes|_kept_bytes"
)


def panels():
    """Yield title and query of what the dashboard draws, as Grafana asks for it with all apps."""
    for panel in json.loads((ROOT / "deploy/grafana/millstream.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            if not NOT_HERE.search(target["expr"]):
                asked = target["expr"].replace("$app", ".*").replace("$__rate_interval", "16s")
                yield panel["title"], asked


def found(prometheus, expression):
    """Return what Prometheus answers a query; it refuses one that it does not understand."""
    asked = urllib.parse.urlencode({"query": expression})
    url = f"http://127.0.0.1:{prometheus}/api/v1/query?{asked}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)["data"]["result"]


def firing(prometheus):
    with urllib.request.urlopen(
        f"http://127.0.0.1:{prometheus}/api/v1/alerts", timeout=60
    ) as found:
        alerts = json.load(found)["data"]["alerts"]
    return [one["labels"]["alertname"] for one in alerts if one["state"] == "firing"]
