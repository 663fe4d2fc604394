"""The demo's pipeline, run without a JVM over the whole week, against the independent answer."""

from __future__ import annotations

import random
import runpy
from pathlib import Path

import polars as pl
import pytest

from millstream.demo.ads_events import PARTITIONS, TOPIC, arrivals
from millstream.demo.ads_pipeline import RATES_BY_HOUR, TOTALS_BY_DAY, build
from millstream.demo.oracle import difference, rates_by_hour, totals_by_day
from millstream.pipeline import App
from millstream.testing.inputs import Record
from millstream.testing.kernel_engine import KernelEngine
from millstream.views.store import ViewStore

SEED = 1


EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "ads" / "app.py"


def _run(app: App, views: Path, records: pl.DataFrame, batches: int) -> None:
    rows = [Record(*row) for row in records.select("partition", "value").iter_rows()]
    engine = KernelEngine(app.plan(), views, {TOPIC: PARTITIONS}, random.Random(7))
    engine.run({TOPIC: rows}, batches)


@pytest.mark.parametrize("batches", [1, 13])
def test_the_views_equal_the_independent_answer(tmp_path, batches):
    app = build(tmp_path)
    views = tmp_path / "views.db"
    records = arrivals(SEED)
    _run(app, views, records, batches)
    with ViewStore(views, readonly=True) as store:
        by_hour, by_day = store.scan(RATES_BY_HOUR), store.scan(TOTALS_BY_DAY)
        late = sum(line["late"] for line in store.ledger(app.name))
    assert difference(by_hour, rates_by_hour(SEED)).is_empty()
    assert difference(by_day, totals_by_day(SEED)).is_empty()
    copies = dict(records["sent"].value_counts().rows())
    assert late == copies["late"]
    assert by_hour["copies"].sum() == by_day["copies"].sum() == copies["once"] + copies["retried"]
    assert (
        by_hour.select(pl.col("copies") - pl.col("shown") - pl.col("clicked")).sum().item()
        == (copies["retried"])
    )


def test_the_example_to_read_is_the_pipeline_that_the_demo_runs(tmp_path):
    example = runpy.run_path(str(EXAMPLE))["app"]
    views = {}
    for name, app in (("demo", build(tmp_path)), ("example", example)):
        path = tmp_path / name / "views.db"
        _run(app, path, arrivals(SEED).head(20_000), 3)
        with ViewStore(path, readonly=True) as store:
            views[name] = {schema: store.scan(schema.name) for schema in store.views()}
    assert views["demo"].keys() == views["example"].keys()
    for schema, rows in views["demo"].items():
        assert rows.equals(views["example"][schema])
    assert any(rows.height for rows in views["demo"].values())
