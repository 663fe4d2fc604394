"""Wherever an expression is taken, one over several rows is refused: the answer would be chance."""

from dataclasses import dataclass
from datetime import datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream.errors import ConfigError

OVER_SEVERAL = [
    pl.col("x") - pl.col("x").min(),
    pl.col("x").diff(),
    pl.col("x").shift(),
    pl.col("x").rank().cast(pl.Int64),
    pl.col("x").cum_sum(),
    pl.col("x").sum().over("k"),
    pl.col("x").fill_null(strategy="forward"),
    pl.when(pl.col("x").is_first_distinct()).then(1).otherwise(0),
    pl.when(pl.len() > 2).then(pl.col("x")),
    pl.col("x").is_in(pl.col("x").head(1).implode()).cast(pl.Int64),
]


@dataclass
class Event:
    at: datetime
    k: str
    x: int
    sketch: bytes = b""


class Last(ms.UserAggregate):
    result_type = pl.Int64

    def zero(self):
        return None

    def add(self, state, value):
        return value

    def merge(self, state, other):
        return other


def topic():
    return ms.App("rows", log="unused").topic("events", Event)


def stream():
    return topic().stream(time="at")


def text(e):
    return e.cast(pl.String)


def instant(e):
    return pl.from_epoch(e)


def aggregated(make):
    return lambda e: stream().window(ms.tumbling("1 minute"), by="k").agg(x=make(e))


PLACES = {
    "count": aggregated(lambda e: ms.count(e > 1)),
    "sum": aggregated(ms.sum),
    "mean": aggregated(ms.mean),
    "variance": aggregated(ms.variance),
    "stddev": aggregated(ms.stddev),
    "min": aggregated(ms.min),
    "max": aggregated(ms.max),
    "first": aggregated(ms.first),
    "last": aggregated(ms.last),
    "min_by": aggregated(lambda e: ms.min_by("x", e)),
    "max_by": aggregated(lambda e: ms.max_by(e, "x")),
    "list": aggregated(ms.list),
    "set": aggregated(ms.set),
    "distinct": aggregated(ms.distinct),
    "distinct, about": aggregated(lambda e: ms.distinct(e, method="hll")),
    "quantile": aggregated(lambda e: ms.quantile(e, 0.5)),
    "quantile, about": aggregated(lambda e: ms.quantile(e, 0.5, method="kll")),
    "quantiles": aggregated(lambda e: ms.quantiles(e, [0.5])),
    "top_k": aggregated(lambda e: ms.top_k(e, 3)),
    "hll_sketch": aggregated(ms.hll_sketch),
    "kll_sketch": aggregated(ms.kll_sketch),
    "frequent_items_sketch": aggregated(ms.frequent_items_sketch),
    "aggregate": aggregated(lambda e: ms.aggregate(Last(), e)),
    "aggregate of several": aggregated(lambda e: ms.aggregate(Last(), "k", e.alias("x"))),
    "session": lambda e: (
        stream()
        .window(ms.session(pl.duration(seconds=e), max_gap="1 day"), by="k")
        .agg(n=ms.count())
    ),
    "count window": lambda e: (
        stream().window(ms.count_window(3, unbounded=True), by="k").agg(x=ms.sum(e))
    ),
    "sliding": lambda e: stream().window(ms.sliding("1 minute"), by="k").agg(x=ms.sum(e)),
    "cost": lambda e: stream().budget("k", cost=e, limit="x"),
    "limit": lambda e: stream().budget("k", cost="x", limit=e),
    "least": lambda e: stream().budget("k", cost="x", limit="x", least=e),
    "zone": lambda e: stream().budget("k", cost="x", limit="x", zone=text(e)),
    "time": lambda e: topic().stream(time=instant(e)),
    "punctuation": lambda e: topic().stream(watermark=ms.watermark(punctuation=instant(e))),
    "punctuation_only": lambda e: topic().stream(
        watermark=ms.watermark("1 minute", punctuation_only=e > 1)
    ),
    "per": lambda e: topic().stream(watermark=ms.watermark("1 minute", per=e)),
    "ends": lambda e: topic().stream(watermark=ms.watermark("1 minute", per="k", ends=e > 1)),
    "device_time": lambda e: topic().stream(
        time=ms.device_time(created=instant(e), sent="at", received="at")
    ),
    "filter": lambda e: stream().filter(e > 1),
    "select": lambda e: stream().select(e.alias("y")),
    "with_columns": lambda e: stream().with_columns(y=e),
    "split": lambda e: stream().split(e > 1),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("over_several", OVER_SEVERAL)
def test_an_expression_over_several_rows_is_refused_wherever_one_is_taken(place, over_several):
    with pytest.raises(ConfigError, match="looks at more than one row"):
        PLACES[place](over_several)


@pytest.mark.parametrize("place", PLACES)
def test_an_expression_over_one_row_is_taken_there(place):
    PLACES[place](pl.when(pl.col("x") > 3).then(pl.col("x") + 1).otherwise(0))


def test_the_refusal_says_where_it_stands_and_what_to_do():
    with pytest.raises(ConfigError) as refused:
        stream().budget("k", cost="x", limit=pl.col("x").sum())
    for said in ("the limit of 'budget(k)'", 'col("x").sum()', "use a window"):
        assert said in str(refused.value)


def test_a_gap_of_fixed_length_is_no_expression():
    assert stream().window(ms.session(timedelta(minutes=1)), by="k").agg(n=ms.count()).columns
