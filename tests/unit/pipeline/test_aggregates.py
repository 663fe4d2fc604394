"""The words for aggregates, through the public surface: answers, types, and what they refuse."""

import random
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError

START = datetime(2024, 1, 1, tzinfo=UTC)
SOONEST = timedelta(seconds=10)


@dataclass
class Sale:
    at: datetime
    shop: str
    n: int
    price: Decimal
    weight: float | None = None
    note: str | None = None


class Longest(ms.UserAggregate):
    result_type = pl.String
    state_type = pl.String

    def zero(self):
        return ""

    def add(self, state, value):
        return self.merge(state, value["note"] or "")

    def merge(self, state, other):
        return max(state, other, key=lambda text: (len(text), text))


def sales():
    rng = random.Random(5)
    return [
        Sale(
            at=START + timedelta(seconds=rng.randrange(20)),
            shop=rng.choice("ab"),
            n=rng.randrange(6),
            price=Decimal(rng.randrange(1000)).scaleb(-2),
            weight=rng.choice([None, 0.1, 0.2, 0.7, 1e15]),
            note=rng.choice([None, "x", "yy", "zz"]),
        )
        for _ in range(200)
    ] + [
        Sale(START + timedelta(hours=1), shop, 0, Decimal(0))
        for shop in "abcdefghijklmnopqrstuvwxyz"
    ]


AGGREGATES = {
    "rows": ms.count(),
    "cheap": ms.count(pl.col("price") < 5),
    "units": ms.sum("n"),
    "paid": ms.sum("price"),
    "heavy": ms.sum("weight"),
    "avg": ms.mean("n"),
    "avg_price": ms.mean("price"),
    "var": ms.variance("n"),
    "pop_sd": ms.stddev("n", population=True),
    "least": ms.min("price"),
    "most": ms.max("note"),
    "opened": ms.first("n"),
    "closed": ms.last("note"),
    "cheapest": ms.min_by("n", by="price"),
    "dearest": ms.max_by("n", by=pl.col("price") * 2),
    "every": ms.list("n"),
    "kinds": ms.set("note"),
    "kinds_n": ms.distinct("note"),
    "kinds_hll": ms.distinct("note", method="hll"),
    "median": ms.quantile("price", 0.5),
    "tails": ms.quantiles("n", [0.1, "0.9"]),
    "median_kll": ms.quantile("n", Fraction(1, 2), method="kll"),
    "tails_kll": ms.quantiles("n", [0, 1], method="kll"),
    "common": ms.top_k("n", 2),
    "common_fi": ms.top_k("note", 1, method="frequent_items"),
    "longest": ms.aggregate(Longest(), "note", "n"),
    "hll": ms.hll_sketch("n"),
    "kll": ms.kll_sketch("weight"),
    "fi": ms.frequent_items_sketch("n"),
}
TYPES = {
    "units": pl.Int64(),
    "paid": pl.Decimal(38, 9),
    "heavy": pl.Float64(),
    "avg_price": pl.Decimal(38, 9),
    "least": pl.Decimal(38, 9),
    "every": pl.List(pl.Int64),
    "kinds": pl.List(pl.String),
    "kinds_hll": pl.Int64(),
    "median": pl.Decimal(38, 9),
    "median_kll": pl.Float64(),
    "common": pl.List(pl.Struct({"value": pl.Int64, "count": pl.Int64})),
    "longest": pl.String(),
    "hll": pl.Binary(),
}


def app_with(**aggregates):
    app = ms.App("sales", log="unused")
    stream = app.topic("sales", Sale, key="shop").stream(
        time="at", watermark=ms.watermark("10 minutes", idle=None)
    )
    windowed = stream.window(ms.tumbling(SOONEST), by="shop")
    return app, windowed.agg(**aggregates)


def test_results_have_the_types_of_their_values():
    _, stream = app_with(**AGGREGATES)
    assert {name: stream.columns[name] for name in TYPES} == TYPES


def plain(frame):
    """Sort the rows; leave out the sketches whose bytes, not their answers, depend on the order."""
    return frame.drop("kll", "fi").sort("shop", "window_start").to_dicts()


@pytest.mark.parametrize("partitions", [1, 7])
def test_every_aggregate_gives_the_same_answers_in_any_batching(partitions):
    outs = []
    for batches, seed in ((1, 0), (4, 1)):
        app, stream = app_with(**AGGREGATES)
        stream.view("out")
        rows = {"sales": sales()}
        outs.append(
            plain(testing.run(app, rows, partitions=partitions, batches=batches, seed=seed)["out"])
        )
    assert len(outs[0]) > 0
    assert outs[0] == outs[1]


def test_the_answers_are_those_of_plain_python():
    app, stream = app_with(**AGGREGATES)
    stream.view("out")
    rows = sales()
    out = testing.run(app, {"sales": rows}, partitions=1, batches=4, seed=1)["out"].to_dicts()
    assert len(out) == 4
    for answer in out:
        end = answer["window_start"] + SOONEST
        mine = [
            (i, r)
            for i, r in enumerate(rows)
            if r.shop == answer["shop"] and answer["window_start"] <= r.at < end
        ]
        in_order = [r for _, r in sorted(mine, key=lambda entry: (entry[1].at, entry[0]))]
        notes = [r.note for r in in_order if r.note is not None]
        numbers = sorted(r.n for r in in_order)
        assert answer["rows"] == len(mine)
        assert answer["cheap"] == sum(r.price < 5 for r in in_order)
        assert answer["units"] == sum(numbers)
        assert answer["paid"] == sum(r.price for r in in_order)
        assert answer["opened"] == in_order[0].n
        assert answer["closed"] == notes[-1]
        assert answer["cheapest"] == min(in_order, key=lambda r: r.price).n
        assert answer["dearest"] == max(in_order, key=lambda r: r.price).n
        assert answer["kinds_n"] == answer["kinds_hll"] == len(set(notes))
        assert answer["median_kll"] == numbers[(len(numbers) + 1) // 2 - 1]
        common = Counter(notes).most_common()
        assert answer["common_fi"] is not None
        assert common[0][1] >= 1
        assert answer["longest"] == max(notes, key=lambda text: (len(text), text))


def test_sketches_of_short_windows_are_merged_over_longer_ones():
    app = ms.App("sales", log="unused")
    stream = app.topic("sales", Sale, key="shop").stream(
        time="at", watermark=ms.watermark("10 minutes", idle=None)
    )
    short = stream.window(ms.tumbling("2 seconds"), by="shop").agg(
        prices=ms.hll_sketch("price"), kinds=ms.frequent_items_sketch("n"), ns=ms.kll_sketch("n")
    )
    long = short.window(ms.tumbling("1 minute"), by="shop").agg(
        prices=ms.distinct("prices", method="hll", of_sketches=True),
        kinds=ms.top_k("kinds", 1, method="frequent_items", of_sketches=int),
        most=ms.quantile("ns", 1, method="kll", of_sketches=True),
        opening=ms.first("window_start"),
    )
    long.view("out")
    rows = sales()
    out = testing.run(app, {"sales": rows}, partitions=1, batches=3)["out"]
    for answer in out.to_dicts():
        mine = [r for r in rows if r.shop == answer["shop"] and r.at < START + timedelta(minutes=1)]
        assert answer["prices"] == len({r.price for r in mine})
        assert answer["most"] == max(r.n for r in mine)
        assert answer["opening"] == min(r.at for r in mine).replace(second=0)
    assert out.height == 2


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (lambda: ms.sum(5), "sum's value is 5"),
        (lambda: ms.quantile("n", 1.5), "quantile's q is 1.5. Allowed are shares from 0 to 1"),
        (lambda: ms.quantile("n", "half"), "quantile's q is 'half'"),
        (lambda: ms.quantile("n", float("nan")), "quantile's q is nan"),
        (lambda: ms.quantiles("n", []), "quantiles' qs is"),
        (lambda: ms.quantiles("n", 0.5), "Give a list of shares"),
        (lambda: ms.quantile("n", 0.5, method="tdigest"), 'Choose "exact" or "kll"'),
        (lambda: ms.quantile("n", 0.5, method="kll", k=7), "k is 7. Give a whole number from 8 to"),
        (lambda: ms.distinct("n", method="hll", lg_k=22), "lg_k is 22.*from 4 to 21"),
        (lambda: ms.distinct("n", of_sketches=True), 'no exact result. Set method="hll"'),
        (lambda: ms.hll_sketch("n", lg_k=3), "hll_sketch's lg_k is 3"),
        (lambda: ms.kll_sketch("n", k=2.5), "kll_sketch's k is 2.5"),
        (lambda: ms.top_k("n", 0), "top_k's k is 0"),
        (lambda: ms.top_k("n", True), "top_k's k is True"),
        (lambda: ms.top_k("n", 1, method="frequent_items", lg_size=2), "lg_size is 2.*from 3 to"),
        (lambda: ms.frequent_items_sketch("n", of_sketches=float), "Give str, int or None"),
        (lambda: ms.aggregate(Longest, "n"), "Give an instance of a class"),
        (lambda: ms.aggregate(Longest()), "names no column"),
    ],
)
def test_what_is_out_of_range_is_refused_where_it_is_written(declare, said):
    with pytest.raises(ConfigError, match=said):
        declare()


def test_a_misspelt_column_of_an_aggregate_is_named_with_the_step():
    with pytest.raises(ConfigError, match=r"uses the column 'prise'.*Did you mean 'price'"):
        app_with(total=ms.sum("prise"))
    with pytest.raises(ConfigError, match="uses the column 'prise'"):
        app_with(total=ms.max_by("n", by="prise"))


def test_what_state_depends_on_stands_in_its_columns():
    def state(**aggregates):
        _, stream = app_with(**aggregates)
        return dict(stream.node.kernel.aggregation.schema)

    assert state(a=ms.min("n")) != state(a=ms.max("n"))
    assert state(a=ms.hll_sketch("n", lg_k=10)) != state(a=ms.hll_sketch("n", lg_k=12))
    assert state(a=ms.quantile("n", 0.5)) == state(a=ms.top_k("n", 3))
