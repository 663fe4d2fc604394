"""The trend example in process: hours are compared across the change of clocks, and one page's alert fires."""

import importlib.util
import sys
from datetime import timedelta
from pathlib import Path

import polars as pl
import pytest

from millstream import testing

PATH = Path(__file__).resolve().parents[3] / "examples" / "trend.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("trend", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["trend"] = module  # where a dataclass looks its types up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["trend"]


def test_the_page_that_runs_away_fires_once_and_is_resolved(example):
    rows = list(example.requests())
    over = testing.Watermark("requests", at=rows[-1].at + timedelta(days=1))
    out = testing.run(
        example.pipeline("unused"), {"requests": [*rows, over]}, batches=4, partitions=3
    )
    assert_told(example, out)
    again = out["trend"].filter(pl.col("page") == "/home", pl.col("n_ratio").is_not_null())
    assert again["n_ratio"].unique().to_list() == [1.0]  # local hours, before the change and after


def test_the_alerts_come_without_a_clock_as_the_program_has_none(example):
    app = example.pipeline("unused")
    partitions = app.topics["requests"].partitions
    out = testing.run(app, {"requests": list(example.requests())}, partitions=partitions)
    assert_told(example, out)


def assert_told(example, out):
    alerts = out["alerts"].with_columns(
        pl.col("window_start").dt.convert_time_zone(example.ZONE.key).dt.hour().alias("hour")
    )
    assert alerts.select("page", "hour", "alert").rows() == [
        (example.RUNS_AWAY, 10, "firing"),
        (example.RUNS_AWAY, 15, "resolved"),
    ]
