"""The queries of Nexmark, as a user of Millstream would write them.

What they compute is what the SQL of the Nexmark project for Flink says; see ``_nexmark_expected.py`` for what that
leaves open. q6 there is the mean of a seller's last winning bids at each of them, and runs in no Flink. Here it
is a table: the mean of the last ten that each seller has had.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

import polars as pl

import millstream as ms

WATERMARK = ms.watermark("4 seconds", idle=None)
SIDE_ROWS = 10_000  # of the side input of q13
KNOWN_CHANNELS = {"apple": "0", "google": "1", "facebook": "2", "baidu": "3"}
STATES = ("OR", "ID", "CA")


@dataclass
class Bid:
    auction: int
    bidder: int
    price: int
    channel: str
    url: str
    date_time: datetime
    extra: str


@dataclass
class Auction:
    id: int
    item_name: str
    description: str
    initial_bid: int
    reserve: int
    date_time: datetime
    expires: datetime
    seller: int
    category: int
    extra: str


@dataclass
class Person:
    id: int
    name: str
    email: str
    credit_card: str
    city: str
    state: str
    date_time: datetime
    extra: str


@dataclass(frozen=True)
class Queries:
    """The queries over one app's topics."""

    app: ms.App

    def events(self, name: str, schema: type) -> ms.Stream:
        return self.app.topic(name, schema).stream(time="date_time", watermark=WATERMARK)

    @property
    def bids(self) -> ms.Stream:
        return self.events("bids", Bid)

    def all_rows(self, stream: ms.Stream) -> ms.Table:
        """Keep every event, without end, as a join in SQL over a stream does."""
        return stream.table(keep="all", unbounded=True)

    # ── row by row ──────────────────────────────────────────────────────────────────────────

    def q0(self) -> ms.Stream:
        return self.bids

    def q1(self) -> ms.Stream:
        euros = (pl.col("price") * Decimal("0.908")).cast(pl.Decimal(23, 3))
        return self.bids.select("auction", "bidder", "date_time", "extra", price=euros)

    def q2(self) -> ms.Stream:
        return self.bids.filter(pl.col("auction") % 123 == 0).select("auction", "price")

    def q10(self) -> ms.Stream:
        at = pl.col("date_time")
        return self.bids.select(
            "auction",
            "bidder",
            "price",
            "date_time",
            "extra",
            day=at.dt.strftime("%Y-%m-%d"),
            minute=at.dt.strftime("%H:%M"),
        )

    def q13(self) -> ms.Stream:
        side = self.app.static_table(side_rows(), key="key", name="side input")
        bids = self.bids.select(
            "auction", "bidder", "price", "date_time", key=pl.col("auction") % SIDE_ROWS
        )
        return bids.lookup(side, "key", how="inner").drop("key")

    def q14(self) -> ms.Stream:
        price = (pl.col("price") * Decimal("0.908")).cast(pl.Decimal(23, 3))
        hour = pl.col("date_time").dt.hour()
        kind = (
            pl.when(hour.is_between(8, 18))
            .then(pl.lit("dayTime"))
            .when((hour <= 6) | (hour >= 20))
            .then(pl.lit("nightTime"))
            .otherwise(pl.lit("otherTime"))
        )
        dear = self.bids.with_columns(price=price).filter(
            pl.col("price") > 1_000_000, pl.col("price") < 50_000_000
        )
        return dear.select(
            "auction",
            "bidder",
            "price",
            "date_time",
            "extra",
            kind=kind,
            c_counts=pl.col("extra").str.count_matches("c", literal=True).cast(pl.Int64),
        )

    def q21(self) -> ms.Stream:
        channel = pl.col("channel").str.to_lowercase()
        named = pl.col("url").str.extract(r"(?:&|^)channel_id=([^&]*)", 1)
        known = channel.replace_strict(KNOWN_CHANNELS, default=None, return_dtype=pl.String)
        bids = self.bids.select(
            "auction", "bidder", "price", "channel", channel_id=known.fill_null(named)
        )
        return bids.filter(pl.col("channel_id").is_not_null())

    def q22(self) -> ms.Stream:
        parts = pl.col("url").str.split("/")
        folders = {f"dir{n}": parts.list.get(n + 2, null_on_oob=True) for n in (1, 2, 3)}
        return self.bids.select("auction", "bidder", "price", "channel", **folders)

    # ── windows ─────────────────────────────────────────────────────────────────────────────

    def q5(self) -> ms.Stream:
        hops = self.bids.window(ms.hopping("10 seconds", "2 seconds"), by="auction")
        counts = hops.agg(num=ms.count()).select("auction", "num")
        # A hop's counts come at its end, and ends are 2 s apart.
        ends = counts.window(ms.tumbling("2 seconds"), by=())
        all_and_most = ends.agg(auctions=ms.list(pl.struct("auction", "num")), most=ms.max("num"))
        one = pl.col("auctions").struct
        each = all_and_most.explode("auctions").select(
            "window_end", "most", auction=one.field("auction"), num=one.field("num")
        )
        return (
            each.filter(pl.col("num") == pl.col("most"))
            .drop("most")
            .key_by("window_end", "auction")
        )

    def q7(self) -> ms.Stream:
        highest = ms.max_by(pl.struct("auction", "bidder", "price", "date_time", "extra"), "price")
        windows = self.bids.window(ms.tumbling("10 seconds")).agg(bid=highest)
        return windows.select("window_start", "window_end", *parts_of("bid", windows))

    def q8(self) -> ms.Stream:
        people, auctions = self.events("persons", Person), self.events("auctions", Auction)
        joined = people.select("id", "name", opened=pl.lit(value=False))
        no_name = pl.lit(None, pl.String).alias("name")
        opened = auctions.select(no_name, id=pl.col("seller"), opened=pl.lit(value=True))
        both = joined.union(opened).window(ms.tumbling("10 seconds"), by="id")
        counts = both.agg(
            name=ms.max("name"), joined=ms.count(~pl.col("opened")), auctions=ms.count("opened")
        )
        return counts.filter(pl.col("joined") > 0, pl.col("auctions") > 0)

    def q11(self) -> ms.Stream:
        return self.bids.window(ms.session("10 seconds"), by="bidder").agg(num=ms.count())

    def q12(self) -> ms.Stream:
        bids = self.app.topic("bids", Bid).stream(time=ms.processing_time())
        windows = bids.window(ms.tumbling("10 seconds"), by="bidder")
        return windows.emit("update").agg(num=ms.count())

    def q17(self) -> ms.Stream:
        price = pl.col("price")
        days = self.bids.window(ms.tumbling("1 day"), by="auction").emit("update")
        return days.agg(
            total=ms.count(),
            rank1=ms.count(price < 10_000),
            rank2=ms.count((price >= 10_000) & (price < 1_000_000)),
            rank3=ms.count(price >= 1_000_000),
            min=ms.min("price"),
            max=ms.max("price"),
            avg=ms.mean("price"),
            sum=ms.sum("price"),
        )

    # ── groups ──────────────────────────────────────────────────────────────────────────────

    def q15(self) -> ms.Table:
        days = self.bids.with_columns(day=pl.col("date_time").dt.date())
        return days.group_by("day").agg(**levels())

    def q16(self) -> ms.Table:
        at = pl.col("date_time")
        days = self.bids.with_columns(day=at.dt.date(), minute=at.dt.strftime("%H:%M"))
        return days.group_by("channel", "day").agg(minute=ms.max("minute"), **levels())

    def q18(self) -> ms.Table:
        return self.bids.top(1, by="date_time", per=["bidder", "auction"])

    def q19(self) -> ms.Table:
        return self.bids.top(10, by="price", per="auction", rank="place")

    # ── joins ───────────────────────────────────────────────────────────────────────────────

    def q3(self) -> ms.Table:
        auctions = self.events("auctions", Auction).filter(pl.col("category") == 10)
        persons = self.events("persons", Person).filter(pl.col("state").is_in(STATES))
        sellers = self.all_rows(persons.select("name", "city", "state", seller="id"))
        both = self.all_rows(auctions.select("seller", "id")).join(sellers, "seller")
        return both.select("name", "city", "state", "id")

    def valid_bids(self, auction_columns: list[str], bid_columns: list[str]) -> ms.Table:
        """Pair auctions with the bids that came while they were open."""
        auctions = self.events("auctions", Auction).select(
            *auction_columns, opened="date_time", closes="expires"
        )
        bids = self.bids.select(*bid_columns, id="auction")
        open_then = pl.col("date_time").is_between("opened", "closes")
        return self.all_rows(auctions).join(self.all_rows(bids), "id", where=open_then)

    def q4(self) -> ms.Table:
        bids = self.valid_bids(["id", "category"], ["price", "date_time"])
        winning = bids.group_by("id", "category").agg(final=ms.max("price"))
        return winning.group_by("category").agg(final=ms.mean("final"))

    def q6(self) -> ms.Table:
        bids = self.valid_bids(["id", "seller"], ["price", "date_time"])
        winning = bids.top(
            1, by=[("price", "desc"), ("date_time", "asc")], per=["id", "seller"], rank="place"
        )
        last = winning.top(
            10, by=[("date_time", "desc"), ("id", "desc")], per="seller", rank="recent"
        )
        return last.group_by("seller").agg(price=ms.mean("price"))

    def q9(self) -> ms.Table:
        auction = ["id", "item_name", "description", "initial_bid", "reserve", "seller", "category"]
        bids = self.valid_bids([*auction, "extra"], ["bidder", "price", "date_time", "extra"])
        order = [("price", "desc"), ("date_time", "asc")]
        return bids.top(1, by=order, per="id", rank="place")

    def q20(self) -> ms.Table:
        auctions = self.events("auctions", Auction).filter(pl.col("category") == 10)
        bids = self.all_rows(self.bids)
        return bids.join(self.all_rows(auctions), {"auction": "id"}, suffix="_of_auction")

    def q23(self) -> ms.Table:
        bids = self.bids.select("bidder", "price", "channel", "url", bid_extra="extra")
        persons = self.events("persons", Person).drop("date_time")
        auctions = self.events("auctions", Auction).rename({"id": "auction"})
        of_persons = self.all_rows(bids).join(
            self.all_rows(persons), {"bidder": "id"}, suffix="_of_person"
        )
        return of_persons.join(self.all_rows(auctions), {"bidder": "seller"}, suffix="_of_auction")


def levels() -> dict[str, Any]:
    """Give what q15 and q16 count: bids, bidders and auctions, in all and at three levels of price."""
    price = pl.col("price")
    of_level = {
        "rank1": price < 10_000,
        "rank2": (price >= 10_000) & (price < 1_000_000),
        "rank3": price >= 1_000_000,
    }
    made: dict[str, Any] = {"total_bids": ms.count()}
    made |= {f"{level}_bids": ms.count(true) for level, true in of_level.items()}
    for column in ("bidder", "auction"):
        made[f"total_{column}s"] = ms.distinct(column)
        for level, true in of_level.items():
            made[f"{level}_{column}s"] = ms.distinct(pl.when(true).then(column))
    return made


def side_rows() -> pl.DataFrame:
    """Make the side input of q13."""
    keys = pl.Series("key", range(SIDE_ROWS), pl.Int64)
    return pl.DataFrame([keys, ("value " + keys.cast(pl.String)).alias("value")])


def parts_of(column: str, stream: ms.Stream) -> list[pl.Expr]:
    """Give the fields of a struct as columns: those of a view are plain."""
    return [pl.col(column).struct.field(part.name) for part in stream.columns[column].fields]
