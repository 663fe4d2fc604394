"""What each Nexmark query answers, worked out in one go over the rows, and how answers are compared.

Times are milliseconds since 1970. Of windows, only those count that end 7 s before the last event or
earlier: where the input ends, some engines close what is open and others do not. What the queries
leave open is settled like this:

q7   the row with the highest price of each window; no window has two with the same.
q8   persons who opened an auction in the ten seconds in which they joined, once each.
q12  windows of processing time differ from run to run: bids per bidder in all windows. Flink drops
     the windows that are open when the input ends, so of Flink it is only asked that no bidder has
     more than there are.
q6   one row per seller: the mean, cut down to a whole number, of the last ten winning bids, those of the
     same millisecond by the auction's number.
q9   of bids of the same price and time on one auction any is right, so bidders are not compared.
q17  one row per auction and day; the mean is cut down to a whole number, as in Flink.
q18  bids of one bidder on one auction may have the same time; any of the last is right. So time,
     auction and bidder are compared, and that the whole row is one of the bids.
q19  of bids of the same price any is right: price and place are compared, and that the row is a bid.

q3, q4, q6, q9, q10, q13 to q16 and q19 to q23 are computed by DuckDB, from SQL as that of the Nexmark project.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import duckdb
import polars as pl
from _nexmark_answers import BID, COLUMNS, canonical

_SIZE, _SLIDE, _DAY = 10_000, 2_000, 86_400_000
_FORMAT = "%Y-%m-%dT%H:%M:%S%.fZ"


class Rows(Protocol):
    """The input's rows, and until when windows are closed in every engine."""

    @property
    def closed_ms(self) -> int: ...

    def rows(self, kind: str) -> pl.LazyFrame: ...


@dataclass(frozen=True)
class Fingerprint:
    """A multiset of rows: how many, and the sums of two hashes of each."""

    rows: int
    sums: tuple[int, int]


def fingerprint(query: str, rows: pl.DataFrame) -> Fingerprint:
    """Bring rows to one form (whole numbers and text) and hash them."""
    plain = canonical(query, rows)
    sums = tuple(int(plain.hash_rows(seed).sum() or 0) for seed in (1, 2))
    return Fingerprint(plain.height, sums)


def closed(query: str, rows: pl.DataFrame, made: Rows) -> pl.DataFrame:
    """Leave out the windows that may be open at the end of the input."""
    if query == "q8":
        return rows.filter(pl.col("start") + _SIZE <= made.closed_ms)
    if query in ("q5", "q7", "q11"):
        return rows.filter(pl.col("end") <= made.closed_ms)
    return rows


def expected(query: str, made: Rows) -> pl.DataFrame:
    """Work out the answer by batch, in another way than any of the engines."""
    answer = _ANSWERS[query](made).collect() if query in _ANSWERS else _queried(_SQL[query], made)
    return canonical(query, closed(query, answer, made))


def difference(query: str, found: pl.DataFrame, made: Rows) -> str | None:
    """Say how what an engine found differs from the answer; None if it does not."""
    rows = closed(query, found, made)
    right = expected(query, made)
    if query in ("q18", "q19") and fingerprint("q0", rows) != fingerprint("q0", _among(rows, made)):
        return "it has rows that are none of the bids"
    if fingerprint(query, rows) == fingerprint(query, right):
        return None
    plain = canonical(query, rows)
    too_many = plain.join(right, on=COLUMNS[query], how="anti", nulls_equal=True)
    missing = right.join(plain, on=COLUMNS[query], how="anti", nulls_equal=True)
    return (
        f"{plain.height} rows for {right.height}; {too_many.height} are not in the answer, such as "
        f"{too_many.head(2).to_dicts()}, and {missing.height} are missing, such as "
        f"{missing.head(2).to_dicts()}"
    )


def excess(found: pl.DataFrame, made: Rows) -> str | None:
    """Say which bidders of q12 have more bids than there are; None if none has."""
    right = expected("q12", made).rename({"num": "there"})
    both = canonical("q12", found).join(right, on="bidder", how="left")
    over = both.filter(pl.col("there").is_null() | (pl.col("num") > pl.col("there")))
    return (
        f"{over.height} bidders have too many, such as {over.head(2).to_dicts()}"
        if over.height
        else None
    )


def _among(rows: pl.DataFrame, made: Rows) -> pl.DataFrame:
    return canonical("q0", rows).join(_bids(made).collect(), on=BID, how="semi")


def _timed(rows: pl.LazyFrame) -> pl.LazyFrame:
    at = pl.col("date_time").str.to_datetime(_FORMAT).dt.epoch("ms")
    return rows.with_columns(at=at).drop("date_time")


def _bids(made: Rows) -> pl.LazyFrame:
    return _timed(made.rows("bids"))


def _end(at: pl.Expr) -> pl.Expr:
    return at // _SIZE * _SIZE + _SIZE


def _q1(made: Rows) -> pl.LazyFrame:
    return _bids(made).with_columns(price_milli=pl.col("price") * 908)


def _q2(made: Rows) -> pl.LazyFrame:
    return _bids(made).filter(pl.col("auction") % 123 == 0)


def _q5(made: Rows) -> pl.LazyFrame:
    ends = [
        pl.col("at") // _SLIDE * _SLIDE + _SLIDE * ahead for ahead in range(1, _SIZE // _SLIDE + 1)
    ]
    in_windows = _bids(made).select("auction", end=pl.concat_list(ends)).explode("end")
    counts = in_windows.group_by("auction", "end").agg(num=pl.len())
    return counts.filter(pl.col("num") == pl.col("num").max().over("end"))


def _q7(made: Rows) -> pl.LazyFrame:
    bids = _bids(made).with_columns(end=_end(pl.col("at")))
    return bids.filter(pl.col("price") == pl.col("price").max().over("end"))


def _q8(made: Rows) -> pl.LazyFrame:
    start = pl.col("at") // _SIZE * _SIZE
    sellers = _timed(made.rows("auctions")).select(start.alias("start"), id="seller").unique()
    return _timed(made.rows("persons")).with_columns(start=start).join(sellers, on=["id", "start"])


def _q11(made: Rows) -> pl.LazyFrame:
    bids = _bids(made).select("bidder", "at").sort("bidder", "at")
    first = (pl.col("at").diff().over("bidder") > _SIZE).fill_null(value=True)
    sessions = bids.with_columns(session=first.cum_sum()).group_by("bidder", "session")
    return sessions.agg(num=pl.len(), start=pl.col("at").min(), end=pl.col("at").max() + _SIZE)


def _q12(made: Rows) -> pl.LazyFrame:
    return _bids(made).group_by("bidder").agg(num=pl.len())


def _q17(made: Rows) -> pl.LazyFrame:
    price = pl.col("price")
    return (
        _bids(made)
        .group_by("auction", day=pl.col("at") // _DAY * _DAY)
        .agg(
            total=pl.len(),
            rank1=(price < 10_000).sum(),
            rank2=((price >= 10_000) & (price < 1_000_000)).sum(),
            rank3=(price >= 1_000_000).sum(),
            min=price.min(),
            max=price.max(),
            avg=price.sum() // pl.len(),
            sum=price.sum(),
        )
    )


def _q18(made: Rows) -> pl.LazyFrame:
    return _bids(made).group_by("auction", "bidder").agg(pl.col("at").max())


_ANSWERS = {
    "q0": _bids,
    "q1": _q1,
    "q2": _q2,
    "q5": _q5,
    "q7": _q7,
    "q8": _q8,
    "q11": _q11,
    "q12": _q12,
    "q17": _q17,
    "q18": _q18,
}


def _queried(query: str, made: Rows) -> pl.DataFrame:
    """Let DuckDB answer a query over the rows, of which times are milliseconds since 1970."""
    with duckdb.connect() as database:
        database.execute("SET threads = 2")
        for kind in ("bids", "auctions", "persons"):
            rows = _timed(made.rows(kind))
            if kind == "auctions":
                closes = pl.col("expires").str.to_datetime(_FORMAT).dt.epoch("ms")
                rows = rows.with_columns(opened="at", closes=closes)
            database.register(kind, rows.collect())
        return pl.DataFrame(database.sql(query).to_arrow_table())


_WINNING = """
    SELECT a.id, a.seller, a.category, a.item_name, a.initial_bid, a.opened, b.price, b."at",
        row_number() OVER (PARTITION BY a.id ORDER BY b.price DESC, b."at") AS place
    FROM auctions a JOIN bids b ON a.id = b.auction AND b."at" BETWEEN a.opened AND a.closes
"""


def _levels() -> str:
    conditions = {
        "total": "true",
        "rank1": "price < 10000",
        "rank2": "price >= 10000 AND price < 1000000",
        "rank3": "price >= 1000000",
    }
    counted = {"bids": "*", "bidders": "DISTINCT bidder", "auctions": "DISTINCT auction"}
    return ", ".join(
        f"count({what}) FILTER (WHERE {condition}) AS {level}_{name}"
        for name, what in counted.items()
        for level, condition in conditions.items()
    )


_SQL = {
    "q3": """SELECT p.name, p.city, p.state, a.id FROM auctions a JOIN persons p ON a.seller = p.id
        WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')""",
    "q4": f"""SELECT category, sum(price) // count(*) AS final FROM ({_WINNING})
        WHERE place = 1 GROUP BY category""",
    "q6": f"""SELECT seller, sum(price) // count(*) AS price FROM (
            SELECT *, row_number() OVER (PARTITION BY seller ORDER BY "at" DESC, id DESC) AS recent
            FROM ({_WINNING}) WHERE place = 1
        ) WHERE recent <= 10 GROUP BY seller""",
    "q9": f"SELECT * FROM ({_WINNING}) WHERE place = 1",
    "q10": """SELECT *, strftime(epoch_ms("at"), '%Y-%m-%d') AS day, strftime(epoch_ms("at"), '%H:%M') AS minute
        FROM bids""",
    "q13": "SELECT *, 'value ' || (auction % 10000) AS value FROM bids",
    "q14": """SELECT *, price * 908 AS price_milli,
            CASE WHEN hour(epoch_ms("at")) BETWEEN 8 AND 18 THEN 'dayTime'
                WHEN hour(epoch_ms("at")) <= 6 OR hour(epoch_ms("at")) >= 20 THEN 'nightTime'
                ELSE 'otherTime' END AS kind,
            length(extra) - length(replace(extra, 'c', '')) AS c_counts
        FROM bids WHERE price * 908 > 1000000000 AND price * 908 < 50000000000""",
    "q15": f"""SELECT "at" // {_DAY} * {_DAY} AS day, {_levels()} FROM bids GROUP BY 1""",
    "q16": f"""SELECT channel, "at" // {_DAY} * {_DAY} AS day, max(strftime(epoch_ms("at"), '%H:%M')) AS minute,
        {_levels()} FROM bids GROUP BY 1, 2""",
    "q19": """SELECT * FROM (SELECT auction, price,
            row_number() OVER (PARTITION BY auction ORDER BY price DESC) AS place FROM bids)
        WHERE place <= 10""",
    "q20": """SELECT b.*, a.item_name, a.description, a.initial_bid, a.seller, a.category, a.opened
        FROM bids b JOIN auctions a ON b.auction = a.id WHERE a.category = 10""",
    "q21": """SELECT * FROM (SELECT *, CASE lower(channel)
            WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3'
            ELSE nullif(regexp_extract(url, '(&|^)channel_id=([^&]*)', 2), '') END AS channel_id
        FROM bids) WHERE channel_id IS NOT NULL""",
    "q22": """SELECT *, split_part(url, '/', 4) AS dir1, split_part(url, '/', 5) AS dir2,
        split_part(url, '/', 6) AS dir3 FROM bids""",
    "q23": """SELECT b.bidder, b.price, b.url, p.name, p.email, p.city, p.state, a.item_name, a.seller, a."at"
        FROM bids b JOIN persons p ON p.id = b.bidder JOIN auctions a ON a.seller = b.bidder""",
}
