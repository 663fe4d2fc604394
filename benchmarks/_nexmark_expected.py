"""What each Nexmark query answers, worked out in one go over the rows, and how answers are compared.

Times are milliseconds since 1970. Of windows, only those count that end 7 s before the last event or
earlier: where the input ends, some engines close what is open and others do not. What the queries
leave open is settled like this:

q7   the row with the highest price of each window; no window has two with the same.
q8   persons who opened an auction in the ten seconds in which they joined, once each.
q12  windows of processing time differ from run to run: bids per bidder in all windows. Flink drops
     the windows that are open when the input ends, so of Flink it is only asked that no bidder has
     more than there are.
q17  one row per auction and day; the mean is cut down to a whole number, as in Flink.
q18  bids of one bidder on one auction may have the same time; any of the last is right. So time,
     auction and bidder are compared, and that the whole row is one of the bids.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl
from _nexmark_input import Input

WHOLE = ["auction", "bidder", "price", "channel", "url", "at", "extra"]
COLUMNS = {
    "q0": WHOLE,
    "q1": ["auction", "bidder", "price_milli", "at", "extra"],
    "q2": ["auction", "price"],
    "q5": ["auction", "num", "end"],
    "q7": ["auction", "bidder", "price", "at", "extra", "end"],
    "q8": ["id", "name", "start"],
    "q11": ["bidder", "num", "start", "end"],
    "q12": ["bidder", "num"],
    "q17": ["auction", "day", "total", "rank1", "rank2", "rank3", "min", "max", "avg", "sum"],
    "q18": ["auction", "bidder", "at"],
}
_SIZE, _SLIDE, _DAY = 10_000, 2_000, 86_400_000


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


def canonical(query: str, rows: pl.DataFrame) -> pl.DataFrame:
    """Give the query's columns as 64-bit numbers and text."""
    types = {
        name: pl.String if name in ("channel", "url", "extra", "name") else pl.Int64
        for name in COLUMNS[query]
    }
    return rows.select(COLUMNS[query]).cast(types)


def closed(query: str, rows: pl.DataFrame, made: Input) -> pl.DataFrame:
    """Leave out the windows that may be open at the end of the input."""
    if query == "q8":
        return rows.filter(pl.col("start") + _SIZE <= made.closed_ms)
    if query in ("q5", "q7", "q11"):
        return rows.filter(pl.col("end") <= made.closed_ms)
    return rows


def expected(query: str, made: Input) -> pl.DataFrame:
    """Work out the answer by batch, in another way than any of the engines."""
    answer = _ANSWERS[query](made).collect()
    return canonical(query, closed(query, answer, made))


def difference(query: str, found: pl.DataFrame, made: Input) -> str | None:
    """Say how what an engine found differs from the answer; None if it does not."""
    rows = closed(query, found, made)
    right = expected(query, made)
    if query == "q18" and fingerprint("q0", rows) != fingerprint("q0", _among(rows, made)):
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


def excess(found: pl.DataFrame, made: Input) -> str | None:
    """Say which bidders of q12 have more bids than there are; None if none has."""
    right = expected("q12", made).rename({"num": "there"})
    both = canonical("q12", found).join(right, on="bidder", how="left")
    over = both.filter(pl.col("there").is_null() | (pl.col("num") > pl.col("there")))
    return (
        f"{over.height} bidders have too many, such as {over.head(2).to_dicts()}"
        if over.height
        else None
    )


def _among(rows: pl.DataFrame, made: Input) -> pl.DataFrame:
    return canonical("q0", rows).join(_bids(made).collect(), on=WHOLE, how="semi")


def _timed(rows: pl.LazyFrame) -> pl.LazyFrame:
    at = pl.col("date_time").str.to_datetime("%Y-%m-%dT%H:%M:%S%.fZ").dt.epoch("ms")
    return rows.with_columns(at=at).drop("date_time")


def _bids(made: Input) -> pl.LazyFrame:
    return _timed(made.rows("bids"))


def _end(at: pl.Expr) -> pl.Expr:
    return at // _SIZE * _SIZE + _SIZE


def _q1(made: Input) -> pl.LazyFrame:
    return _bids(made).with_columns(price_milli=pl.col("price") * 908)


def _q2(made: Input) -> pl.LazyFrame:
    return _bids(made).filter(pl.col("auction") % 123 == 0)


def _q5(made: Input) -> pl.LazyFrame:
    ends = [
        pl.col("at") // _SLIDE * _SLIDE + _SLIDE * ahead for ahead in range(1, _SIZE // _SLIDE + 1)
    ]
    in_windows = _bids(made).select("auction", end=pl.concat_list(ends)).explode("end")
    counts = in_windows.group_by("auction", "end").agg(num=pl.len())
    return counts.filter(pl.col("num") == pl.col("num").max().over("end"))


def _q7(made: Input) -> pl.LazyFrame:
    bids = _bids(made).with_columns(end=_end(pl.col("at")))
    return bids.filter(pl.col("price") == pl.col("price").max().over("end"))


def _q8(made: Input) -> pl.LazyFrame:
    start = pl.col("at") // _SIZE * _SIZE
    sellers = _timed(made.rows("auctions")).select(start.alias("start"), id="seller").unique()
    return _timed(made.rows("persons")).with_columns(start=start).join(sellers, on=["id", "start"])


def _q11(made: Input) -> pl.LazyFrame:
    bids = _bids(made).select("bidder", "at").sort("bidder", "at")
    first = (pl.col("at").diff().over("bidder") > _SIZE).fill_null(value=True)
    sessions = bids.with_columns(session=first.cum_sum()).group_by("bidder", "session")
    return sessions.agg(num=pl.len(), start=pl.col("at").min(), end=pl.col("at").max() + _SIZE)


def _q12(made: Input) -> pl.LazyFrame:
    return _bids(made).group_by("bidder").agg(num=pl.len())


def _q17(made: Input) -> pl.LazyFrame:
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


def _q18(made: Input) -> pl.LazyFrame:
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
