"""Tables, joins and what else is maintained, on Spark: the views are those of the kernels in process."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.testing import Row

START = datetime(2026, 1, 1, tzinfo=UTC)
CITIES = pl.DataFrame({"id": ["x", "y", "z"], "country": ["X", "Y", "Z"]})


def at(seconds):
    return START + timedelta(seconds=seconds)


def countries(keys: pl.DataFrame) -> pl.DataFrame:
    """Know all countries but one."""
    known = keys.filter(pl.col("country") != "Z")
    return known.with_columns(capital=pl.col("country") + "-town")


def app_of_tables():
    app = ms.App("tables", log="unused")
    users = app.table("users", {"id": int, "city": str | None}, key="id", partitions=3)
    cities = app.static_table(CITIES, key="id")
    placed = users.join(cities, {"city": "id"}, how="full")
    placed.view("placed", key=("id", "city"))
    counts = placed.group_by("country").agg(n=ms.count(), most=ms.max("id"))
    counts.view("counts")
    counts.top(2, by=["n", "country"], per=(), rank="place").view("top")
    users.select("id").except_(users.filter(pl.col("city") == "x").select("id")).view("elsewhere")

    clicks = app.topic("clicks", {"user": int, "at": datetime}, key="user", partitions=1)
    clicks = clicks.stream(time="at", watermark=ms.watermark("5 seconds", idle=None))
    rates = app.topic("rates", {"user": int, "at": datetime, "rate": int}, key="user", partitions=1)
    quotes = rates.stream(time="at", watermark=ms.watermark("5 seconds", idle=None))
    clicks.join(quotes, "user", within=("-5 seconds", "5 seconds"), how="left").to("pairs")
    clicks.join_asof(quotes.table("user").drop("at"), "user").to("priced")
    per_minute = clicks.window(ms.tumbling("10 seconds"), by="user").emit("update")
    updates = per_minute.agg(n=ms.count())
    updates.view("updates")
    updates.filter(pl.col("n") > 1).view("often")
    return app


def inputs():
    users = [{"id": n % 7, "city": [None, "x", "y", "q"][n % 4]} for n in range(40)]
    users.insert(25, Row(None, key="3"))
    clicks = [{"user": n % 3, "at": at(n * 2)} for n in range(60)]
    rates = [{"user": n % 4, "at": at(n * 5), "rate": n} for n in range(30)]
    return {"users": users, "clicks": clicks, "rates": rates}


def rows_of(found):
    views = {name: sorted(found[name].rows(), key=repr) for name in found.views}
    topics = {}
    for topic in ("pairs", "priced"):
        records = found.topic(topic).drop("partition", "offset", "timestamp")
        topics[topic] = sorted(records.rows(), key=repr)
    return views, topics


@pytest.mark.timeout(600)
def test_what_is_maintained_on_spark_is_what_the_kernels_maintain_in_process():
    on_spark = rows_of(testing.run(app_of_tables(), inputs(), batches=4, engine="spark"))
    in_process = rows_of(testing.run(app_of_tables(), inputs(), batches=5, seed=3, crash=1))
    assert on_spark == in_process
    views, topics = on_spark
    assert views["top"]
    assert views["often"]
    assert len(topics["priced"]) > 20


@pytest.mark.timeout(600)
def test_a_function_that_looks_up_outside_is_called_on_spark():
    app = ms.App("enriched", log="unused")
    rows = app.topic("rows", {"country": str, "n": int}, partitions=2).stream()
    rows.enrich(countries, on="country", schema={"capital": pl.String}).view("out", key="n")
    given = [{"country": "XYZ"[n % 3], "n": n} for n in range(30)]
    found = testing.run(app, {"rows": given}, batches=3, engine="spark")["out"]
    expected = [(n, None if n % 3 == 2 else f"{'XYZ'[n % 3]}-town") for n in range(30)]
    assert found.select("n", "capital").sort("n").rows() == expected


@pytest.mark.timeout(600)
def test_a_table_follows_a_view_of_another_app(tmp_path):
    def shop():
        app = ms.App("shop", log=tmp_path, buckets=1)
        app.table("prices", {"item": str, "price": float}, key="item").view("prices")
        return app

    def mirror():
        app = ms.App("mirror", log=tmp_path, buckets=1)
        prices = app.view_table(ms.view("prices", log=tmp_path, app="shop"))
        prices.view("copy")
        orders = app.topic("orders", {"id": int, "item": str}, key="item").stream()
        orders.lookup(prices, "item").view("priced", key="id")
        return app

    def both(prices, orders):
        with ms.connect(tmp_path) as log:
            for topic in ("prices", "orders"):
                log.create_topic(topic, partitions=2, exist_ok=True)
            with log.producer() as producer:
                for item, price in prices.items():
                    value = None if price is None else {"item": item, "price": price}
                    producer.send("prices", value, key=item)
                for number, item in orders.items():
                    producer.send("orders", {"id": number, "item": item}, key=item)
        shop().run(until="caught-up")
        mirror().run(until="caught-up")
        found = [ms.view(name, log=tmp_path, app="mirror").scan() for name in ("copy", "priced")]
        return [dict(view.select(view.columns[0], "price").rows()) for view in found]

    copy, priced = both({"a": 0.1, "b": 2.0}, {1: "a", 2: "c"})
    assert copy == {"a": 0.1, "b": 2.0}
    assert priced == {1: 0.1, 2: None}
    copy, priced = both({"a": 3.5, "b": None}, {3: "a", 4: "b"})
    assert copy == {"a": 3.5}
    assert priced == {1: 0.1, 2: None, 3: 3.5, 4: None}
