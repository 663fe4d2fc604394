"""Aggregates inside Spark's workers: what has functions, sketches and user's code travels there."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import UserCodeError

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Reading:
    at: datetime
    sensor: str
    value: float


def app_with(**aggregates):
    app = ms.App("readings", log="unused")
    readings = app.topic("readings", Reading, key="sensor", partitions=2)
    stream = readings.stream(time="at", watermark=ms.watermark("1 hour", idle=None))
    windowed = stream.window(ms.tumbling("1 minute"), by="sensor").emit("update")
    windowed.agg(**aggregates).view("out")
    return app


def readings():
    return [
        Reading(START + timedelta(seconds=i % 90), f"s{i % 5}", (i * 37 % 101) / 10)
        for i in range(400)
    ]


@pytest.mark.quick
def test_aggregates_give_the_same_answers_on_spark_as_in_process(spark):
    class Product(ms.UserAggregate):
        result_type = pl.Int64

        def zero(self):
            return 1

        def add(self, state, value):
            return state * int(value * 10 + 1) % 1_000_003

        def merge(self, state, other):
            return state * other % 1_000_003

    def app():
        return app_with(
            total=ms.sum("value"),
            spread=ms.variance("value"),
            first=ms.first("value"),
            every=ms.list("value"),
            median=ms.quantile("value", 0.5),
            seen=ms.distinct("value", method="hll"),
            sketch=ms.hll_sketch("value"),
            approx=ms.quantile("value", 0.9, method="kll"),
            product=ms.aggregate(Product(), "value"),
        )

    rows = {"readings": readings()}
    here = testing.run(app(), rows, partitions=2)["out"]
    there = testing.run(app(), rows, partitions=2, batches=3, engine="spark")["out"]
    assert here.height == 10
    assert there.sort("window_start", "sensor").equals(here.sort("window_start", "sensor"))


def test_an_error_in_a_user_s_aggregate_comes_out_of_spark_with_its_file_and_line(spark):
    class Fragile(ms.UserAggregate):
        result_type = pl.Float64

        def zero(self):
            return 0.0

        def add(self, state, value):
            return 1 / (value - value)

        def merge(self, state, other):
            return state + other

    app = app_with(bad=ms.aggregate(Fragile(), "value"))
    with pytest.raises(UserCodeError, match=r"'bad', failed at .*test_aggregates_on_spark.py:\d+"):
        testing.run(app, {"readings": readings()}, engine="spark")
