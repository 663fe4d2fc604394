"""The table of metrics: names by Prometheus' rules, and what is shipped names nothing else."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from millstream.metrics.definitions import METRICS, SERVED_BY

ROOT = Path(__file__).parents[3]
NAME = re.compile(r"millstream_[a-z0-9_]+")
LABELS_MATCHED = re.compile(r"(millstream_[a-z0-9_]+)\{([^}]*)\}")
RULES = ROOT / "deploy/prometheus/millstream.rules.yaml"
DASHBOARD = ROOT / "deploy/grafana/millstream.json"


def samples_of(metric):
    """Return the names that a metric's samples have."""
    ends = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
    return {metric.name + end for end in ends}


SAMPLES = {name: metric for metric in METRICS.values() for name in samples_of(metric)}


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_a_metric_is_named_as_prometheus_wants_it(metric):
    assert re.fullmatch(r"millstream_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    base = metric.name.removesuffix("_total")
    assert not re.search(
        r"_(ms|us|millis|minutes|kb|mb|percent|seconds_total|count|sum|bucket)$", base
    )
    for unit in ("seconds", "bytes"):
        assert f"_{unit}" not in base or base.endswith(f"_{unit}"), "the unit is at the end"
    for label in metric.labels:
        assert re.fullmatch(r"[a-z]+", label)
        assert label not in ("job", "instance", "le", "quantile")
    assert metric.source in SERVED_BY
    assert metric.help[0].isupper() or metric.help[0] == "1"
    assert metric.help.endswith(".")


def test_the_document_has_the_table_as_it_is():
    spec = importlib.util.spec_from_file_location("docs_metrics", ROOT / "docs/metrics.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    text = program.DOCUMENT.read_text()
    assert program.filled(text) == text, "run: python docs/metrics.py"


def shipped():
    """Yield (where, expression) of all that is shipped."""
    for line in re.split(r"(?m)^\s+- alert: ", RULES.read_text())[1:]:
        yield line.split("\n")[0], line.split("labels: {severity")[0].partition("expr:")[2]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("where", "expression"), list(shipped()))
def test_dashboard_and_rules_name_metrics_and_labels_that_exist(where, expression):
    names = set(NAME.findall(expression))
    assert names or " (up{" in expression  # what Prometheus has of each target
    assert names <= SAMPLES.keys(), where
    for name, matchers in LABELS_MATCHED.findall(expression):
        used = {one.partition("=")[0].strip("!~ ") for one in matchers.split(",")}
        assert used <= {*SAMPLES[name].labels, "instance"}, where
    grouped = {
        one.strip()
        for group in re.findall(r"by \(([^)]*)\)", expression)
        for one in group.split(",")
    }
    known = {label for name in names for label in SAMPLES[name].labels} | {"instance", "le"}
    assert grouped <= known, where


def test_every_alert_says_what_happened_and_what_to_do():
    alerts = re.split(r"(?m)^\s+- alert: ", RULES.read_text())[1:]
    assert len(alerts) == 19
    for alert in alerts:
        assert re.search(r'summary: ".+\."', alert)
        assert re.search(r'action: ".+\."', alert)


def test_the_dashboard_is_one_that_grafana_can_load():
    dashboard = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another"
        assert place["x"] + place["w"] <= 24
        taken |= cells
