"""Nexmark's queries 17, 18 and 19 over generated bids, against the same in plain Python.

Source: Tucker et al., "NEXMark: a benchmark for queries over data streams", 2008; queries 17 (statistics of
auctions by day), 18 (the last bid of each bidder on each auction) and 19 (the ten highest bids of each auction)
as in github.com/nexmark/nexmark.
"""

import random
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream import testing

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Bid:
    at: datetime
    auction: int
    bidder: int
    price: int


def generated(count):
    dice = random.Random(17)
    return [
        Bid(
            START + timedelta(minutes=n * 7, microseconds=n),
            dice.randrange(6),
            dice.randrange(9),
            int(10 ** dice.uniform(2, 7)),
        )
        for n in range(count)
    ]


BIDS = generated(600)


@pytest.fixture(scope="module")
def out():
    app = ms.App("nexmark", log="unused", buckets=2)
    bids = app.topic("bids", Bid, key="auction").stream(time="at")
    price, day = pl.col("price"), pl.col("at").dt.date()
    by_day = bids.with_columns(day=day).group_by("auction", "day")
    by_day.agg(
        total_bids=ms.count(),
        rank1_bids=ms.count(price < 10_000),
        rank2_bids=ms.count((price >= 10_000) & (price < 1_000_000)),
        rank3_bids=ms.count(price >= 1_000_000),
        min_price=ms.min("price"),
        max_price=ms.max("price"),
        avg_price=ms.mean("price"),
        sum_price=ms.sum("price"),
    ).view("q17")
    bids.top(1, by="at", per=["bidder", "auction"], rank="place").view("q18")
    bids.top(10, by="price", per="auction", rank="place").view("q19")
    return testing.replay(app, {"bids": BIDS}, batchings=4)


def test_query_17_the_statistics_of_auctions_by_day(out):
    expected = []
    for auction, day in {(bid.auction, bid.at.date()) for bid in BIDS}:
        prices = [b.price for b in BIDS if (b.auction, b.at.date()) == (auction, day)]
        first, second = (sum(p < limit for p in prices) for limit in (10_000, 1_000_000))
        counts = len(prices), first, second - first, len(prices) - second
        values = min(prices), max(prices), sum(prices) / len(prices), sum(prices)
        expected.append((auction, day, *counts, *values))
    assert all(isinstance(row[1], date) for row in expected)
    assert out["q17"].rows() == sorted(expected)


def test_query_18_the_last_bid_of_each_bidder_on_each_auction(out):
    last = {(bid.bidder, bid.auction): bid for bid in BIDS}  # they are in the order of time
    found = out["q18"].select("at", "auction", "bidder", "price").rows()
    assert sorted(found) == sorted((b.at, b.auction, b.bidder, b.price) for b in last.values())


def test_query_19_the_ten_highest_bids_of_each_auction(out):
    expected = []
    for auction in {bid.auction for bid in BIDS}:
        own = sorted((b for b in BIDS if b.auction == auction), key=lambda b: (-b.price, b.at))
        expected += [(auction, n, b.price, b.bidder) for n, b in enumerate(own[:10], 1)]
    found = out["q19"].select("auction", "place", "price", "bidder").rows()
    assert sorted(found) == sorted(expected)
