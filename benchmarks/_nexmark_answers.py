"""The answers of Nexmark's queries in one form: names of columns, whole numbers and text; times in ms since 1970."""

from __future__ import annotations

import polars as pl

BID = ["auction", "bidder", "price", "channel", "url", "at", "extra"]
LEVELS = [
    f"{level}_{what}"
    for what in ("bids", "bidders", "auctions")
    for level in ("total", "rank1", "rank2", "rank3")
]
COLUMNS = {
    "q0": BID,
    "q1": ["auction", "bidder", "price_milli", "at", "extra"],
    "q2": ["auction", "price"],
    "q3": ["name", "city", "state", "id"],
    "q4": ["category", "final"],
    "q5": ["auction", "num", "end"],
    "q6": ["seller", "price"],
    "q7": ["auction", "bidder", "price", "at", "extra", "end"],
    "q8": ["id", "name", "start"],
    "q9": ["id", "item_name", "initial_bid", "seller", "category", "opened", "price", "at"],
    "q10": ["auction", "bidder", "price", "at", "extra", "day", "minute"],
    "q11": ["bidder", "num", "start", "end"],
    "q12": ["bidder", "num"],
    "q13": ["auction", "bidder", "price", "at", "value"],
    "q14": ["auction", "bidder", "price_milli", "kind", "at", "extra", "c_counts"],
    "q15": ["day", *LEVELS],
    "q16": ["channel", "day", "minute", *LEVELS],
    "q17": ["auction", "day", "total", "rank1", "rank2", "rank3", "min", "max", "avg", "sum"],
    "q18": ["auction", "bidder", "at"],
    "q19": ["auction", "price", "place"],
    "q20": [*BID, "item_name", "description", "initial_bid", "seller", "category", "opened"],
    "q21": ["auction", "bidder", "price", "channel", "channel_id"],
    "q22": ["auction", "bidder", "price", "channel", "dir1", "dir2", "dir3"],
    "q23": [
        "bidder",
        "price",
        "url",
        "name",
        "email",
        "city",
        "state",
        "item_name",
        "seller",
        "at",
    ],
}
_TEXT = {
    *("channel", "url", "extra", "name", "city", "state", "item_name", "description", "value"),
    *("minute", "kind", "channel_id", "dir1", "dir2", "dir3", "email"),
}
_TIMES = {
    "date_time": "at",
    "window_start": "start",
    "window_end": "end",
    "date_time_of_auction": "opened",
}


def canonical(query: str, rows: pl.DataFrame) -> pl.DataFrame:
    """Give the query's columns as 64-bit numbers and text."""
    text = _TEXT | ({"day"} if query == "q10" else set())
    types = {name: pl.String if name in text else pl.Int64 for name in COLUMNS[query]}
    return rows.select(COLUMNS[query]).cast(types)


def in_form(query: str, rows: pl.DataFrame) -> pl.DataFrame:
    """Bring what Millstream gave, in a view, topic or dataset, into the form of the answers."""
    if "_diff" in rows.columns:
        assert (rows["_diff"] == 1).all(), "rows were taken back, and are to be added up"
    dates = [
        name for name, dtype in rows.schema.items() if isinstance(dtype, (pl.Date, pl.Datetime))
    ]
    rows = rows.with_columns(rows[name].cast(pl.Datetime("ms")).dt.epoch("ms") for name in dates)
    rows = rows.rename({old: new for old, new in _TIMES.items() if old in rows.columns})
    if query in ("q1", "q14"):
        rows = rows.with_columns(price_milli=pl.col("price").cast(pl.Decimal(23, 3)) * 1000)
    if query == "q12":
        rows = rows.group_by("bidder").agg(pl.col("num").sum())
    if query in ("q4", "q6"):  # whole numbers, as in Flink
        rows = rows.with_columns(pl.col("final" if query == "q4" else "price").floor())
    if query == "q23":
        rows = rows.with_columns(seller="bidder")
    return rows.rename({"start": "day"}) if query == "q17" else rows
