"""The bytes of sketches are Spark's: Spark reads and merges ours, we read and merge Spark's."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest
from pyspark.sql import functions as F

from millstream.kernels.aggregates.sketches.frequent_items import FrequentItems
from millstream.kernels.aggregates.sketches.hll import Hll
from millstream.kernels.aggregates.sketches.kll import Kll

V = pl.col("v")
SIZES = [0, 1, 7, 8, 25, 400, 20_000]  # each kind of HLL sketch: list, set, registers


def bound(one, dtype):
    return one.bound("a", lambda e: pl.DataFrame(schema={"v": dtype}).select(e).dtypes[0])


def sketched(one, values):
    """Make the sketch of a series by way of two partials, merged."""
    one = bound(replace(one, as_sketch=True), values.dtype)
    halves = [values[: len(values) // 2], values[len(values) // 2 :]]
    rows = [pl.DataFrame({"k": [1], "v": pl.Series([None], dtype=values.dtype)})]
    rows += [
        pl.DataFrame({"v": half}).select(pl.lit(1, pl.Int64).alias("k"), "v") for half in halves
    ]
    partials = pl.concat(frame.group_by("k").agg(*one.partial("a")) for frame in rows)
    return partials.group_by("k").agg(*one.merge("a")).select(one.result("a"))[0, 0]


def answer(one, dtype, sketch):
    return bound(one, dtype).read(pl.Series([bytes(sketch)])).to_list()[0]


def whole(n):
    return pl.Series(range(n), dtype=pl.Int64) * 7919


def text(n):
    return pl.Series([f"wörd-{i}" for i in range(n)], dtype=pl.String)


@pytest.mark.quick
@pytest.mark.parametrize("values", [whole, text])
@pytest.mark.parametrize("lg_k", [8, 12])
def test_spark_reads_and_merges_our_hll_sketches_and_we_spark_s(spark, values, lg_k):
    one = Hll(V, lg_k=lg_k)
    table = [(n, bytearray(sketched(one, values(n)))) for n in SIZES]
    ours = spark.createDataFrame(table, "n int, s binary")
    read = {
        row.n: row.e for row in ours.select("n", F.hll_sketch_estimate("s").alias("e")).collect()
    }
    made = (
        spark.createDataFrame([(n,) for n in SIZES if n], "n int")
        .selectExpr("n", "explode(sequence(0L, n - 1L)) i")
        .selectExpr("n", "i * 7919 v" if values is whole else "concat('wörd-', i) v")
        .groupBy("n")
    )
    theirs = {
        row.n: row.s for row in made.agg(F.hll_sketch_agg("v", F.lit(lg_k)).alias("s")).collect()
    }
    merged = bound(one, pl.Int64)
    for n, sketch in table:
        mine = answer(one, values(1).dtype, sketch)
        assert read[n] == mine
        if n:
            assert merged.merged([bytes(theirs[n])]) == bytes(sketch)  # in our form they are equal
            assert merged.merged([bytes(theirs[n]), bytes(sketch)]) == bytes(sketch)
            assert answer(one, pl.Int64, theirs[n]) == pytest.approx(
                n, rel=4 * 1.04 / 2 ** (lg_k / 2)
            )
    union = ours.agg(F.hll_sketch_estimate(F.hll_union_agg("s")).alias("e")).collect()[0].e
    assert union == read[SIZES[-1]]


@pytest.mark.quick
def test_spark_reads_and_merges_our_kll_sketches_and_we_spark_s(spark):
    series = pl.Series([float(i) for i in range(150)]).shuffle(seed=1)
    shares = [0.0, 0.25, 0.5, 0.99, 1.0]
    ours = sketched(Kll(V), series)
    theirs = (
        spark.createDataFrame([(v,) for v in series.to_list()], "v double")
        .agg(F.kll_sketch_agg_double("v").alias("s"))
        .collect()[0]
        .s
    )
    table = spark.createDataFrame([(bytearray(ours),), (bytearray(theirs),)], "s binary")
    ranks = F.array(*map(F.lit, shares))
    read = table.select(
        F.kll_sketch_get_quantile_double("s", ranks).alias("q"),
        F.kll_sketch_get_n_double("s").alias("n"),
    ).collect()
    mine = answer(Kll(V, shares=tuple(shares), several=True), pl.Float64, ours)
    assert [tuple(row) for row in read] == [(mine, 150), (mine, 150)]
    assert answer(Kll(V, shares=tuple(shares), several=True), pl.Float64, theirs) == mine
    both = table.agg(F.kll_sketch_get_n_double(F.kll_merge_agg_double("s")).alias("n")).collect()[0]
    assert both.n == 300
    merged = bound(Kll(V), pl.Float64).merged([bytes(ours), bytes(theirs)])
    assert answer(Kll(V, shares=(0.5,)), pl.Float64, merged) == pytest.approx(74.5, abs=5)


def test_spark_reads_large_kll_sketches_of_ours_within_the_stated_error(spark):
    series = pl.Series([float(i) for i in range(50_000)]).shuffle(seed=2)
    table = spark.createDataFrame([(bytearray(sketched(Kll(V), series)),)], "s binary")
    read = table.select(F.kll_sketch_get_quantile_double("s", F.lit(0.5)).alias("q")).collect()[0].q
    assert abs(read / 50_000 - 0.5) < 0.02
    empty = bytearray(sketched(Kll(V), pl.Series([], dtype=pl.Float64)))
    empties = spark.createDataFrame([(empty,)], "s binary")
    assert empties.select(F.kll_sketch_get_n_double("s").alias("n")).collect()[0].n == 0


@pytest.mark.parametrize("kind", ["string", "bigint"])
def test_spark_estimates_from_our_frequent_items_and_we_from_spark_s(spark, kind):
    values = [n for n in range(6) for _ in range(10 + 3 * n)]  # no two as frequent
    series = pl.Series([f"v{n}" for n in values] if kind == "string" else values)
    one = FrequentItems(V, k=3)
    ours = sketched(one, series)
    mine = [(item["value"], item["count"]) for item in answer(one, series.dtype, ours)]
    spark.createDataFrame([(v,) for v in series.to_list()], f"v {kind}").createOrReplaceTempView(
        "rows"
    )
    nulls = bytes(8)  # Spark writes after the sketch how many nulls there were
    spark.createDataFrame([(bytearray(ours + nulls),)], "s binary").createOrReplaceTempView("ours")
    read = spark.sql(
        "select approx_top_k_estimate(named_struct('sketch', s, 'maxItemsTracked', 768, "
        f"'itemDataType', cast(null as {kind}), 'itemDataTypeDDL', 'item {kind}'), 3) t from ours"
    ).collect()[0]
    assert [(item[0], item[1]) for item in read.t] == mine
    theirs = spark.sql("select approx_top_k_accumulate(v, 768) s from rows").collect()[0].s
    found = answer(one, series.dtype, theirs["sketch"])
    assert [(item["value"], item["count"]) for item in found] == mine
