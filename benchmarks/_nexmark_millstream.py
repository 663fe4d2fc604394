"""Nexmark on Millstream, as a user would write it. One process runs the queries that it is told.

Results go to a view, or, for the queries in the setting ``discard``, to a function that does nothing
with them: the end of the way for us, as a blackhole is for Flink and ``noop`` for Spark. Views,
positions and books are committed with every batch in either case.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

import polars as pl
from _nexmark_passes import Spec, run_passes

import millstream as ms

CORES = 2
STATELESS = ("q0", "q1", "q2")
WATERMARK = ms.watermark("4 seconds", idle=None)


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

    def q0(self) -> ms.Stream:
        return self.bids

    def q1(self) -> ms.Stream:
        euros = (pl.col("price") * Decimal("0.908")).cast(pl.Decimal(23, 3))
        return self.bids.select("auction", "bidder", "date_time", "extra", price=euros)

    def q2(self) -> ms.Stream:
        return self.bids.filter(pl.col("auction") % 123 == 0).select("auction", "price")

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

    def q18(self) -> ms.Stream:
        days = self.bids.window(ms.tumbling("1 day"), by=["bidder", "auction"]).emit("update")
        last = days.agg(bid=ms.last(pl.struct("price", "channel", "url", "date_time", "extra")))
        return last.select("window_start", "bidder", "auction", *parts_of("bid", last))


def parts_of(column: str, stream: ms.Stream) -> list[pl.Expr]:
    """Give the fields of a struct as columns: those of a view are plain."""
    return [pl.col(column).struct.field(part.name) for part in stream.columns[column].fields]


def discard(_rows: pl.DataFrame, _context: ms.ForeachContext) -> None:
    """Do nothing with the rows."""


def end(stream: ms.Stream, query: str, spec: Spec, *, kept: bool) -> None:
    """Say where the results go."""
    if kept and query in STATELESS:
        stream.dataset(spec.out / query)
    elif not kept and query in spec.discard:
        stream.foreach(discard)
    elif query == "q5":
        stream.view(query, key=("window_end", "auction"))
    elif query == "q7":
        stream.view(query, key="window_start")
    else:
        stream.view(query)


def answer(query: str, spec: Spec, app: str) -> pl.DataFrame:
    """Read what a query gave, in the form of the answers."""
    if query in STATELESS:
        rows = ms.dataset(spec.out / query).scan().collect()
    else:
        rows = ms.view(query, log=spec.folder / spec.log, app=app).scan()
    ms_of = {"date_time": "at", "window_start": "start", "window_end": "end"}
    rows = rows.with_columns(
        pl.col(old).dt.epoch("ms").alias(new) for old, new in ms_of.items() if old in rows.columns
    )
    if query == "q1":
        rows = rows.with_columns(price_milli=pl.col("price") * 1000)
    if query == "q12":
        rows = rows.group_by("bidder").agg(pl.col("num").sum())
    return rows.rename({"start": "day"}) if query == "q17" else rows


def main() -> None:
    spec = Spec.read()
    log = spec.folder / spec.log
    shutil.rmtree(log / "apps", ignore_errors=True)
    # Spark stays up between the queries, as it does where several apps run in one program.
    ms.App("session", log=log).spark_session(cores=CORES)

    def run(query: str, number: int, kept: bool) -> None:  # noqa: FBT001 - as it is called
        app = ms.App(f"{query}-{number}", log=log)
        end(getattr(Queries(app), query)(), query, spec, kept=kept)
        rows = -(-spec.records // spec.batches)
        app.run(until="caught-up", cores=CORES, rows_per_batch=rows, show=False)
        if kept:
            answer(query, spec, app.name).write_parquet(spec.out / f"{query}.parquet")

    run_passes(spec, run)


if __name__ == "__main__":
    main()
