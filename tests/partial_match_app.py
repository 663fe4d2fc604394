"""An app with a pattern whose partial matches have what a page must not get wrong: markup, the greatest number, infinity."""

from datetime import UTC, datetime, timedelta

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
GREATEST = 2**63 - 1
MARKUP = '<img src=x onerror="alert(1)">'
SOURCE = """
from datetime import datetime

import polars as pl

import millstream as ms

app = ms.App("carts", log=LOG, buckets=2)
clicks = app.topic("clicks", {"ad": str, "kind": str, "n": int, "at": datetime})
stream = clicks.stream(time="at", watermark=ms.watermark("5 seconds")).with_columns(share=pl.lit(float("inf")))
seen = {"n": ms.matched("cart", "n").last(), "share": ms.matched("cart", "share").last()}
unpaid = ms.sequence("cart", pl.col("kind") == "cart").one_or_more().consecutive().greedy()
unpaid = unpaid.next("pay", pl.col("kind") == "pay").within("1 hour").skip("past_last")
stream.match(unpaid, by="ad", name="unpaid", measures=seen).view("unpaid", key=["ad", "match_start"])
paid = ms.row_pattern("A B", define={"A": pl.col("kind") == "none", "B": pl.col("kind") == "pay"}, within="1 hour")
stream.match_recognize(paid, partition_by="ad", name="paid").view("paid", key=["ad", "match_start"])
stream.group_by("ad", name="counted").agg(n=ms.count()).view("counted")
"""


def click(second, ad="a0", n=1, kind="cart"):
    return {"ad": ad, "kind": kind, "n": n, "at": START + timedelta(seconds=second)}
