"""The demo's answer computed another way: one batch over the whole week, in plain polars.

It reads the Parquet file, not the log; it knows no windows, watermarks or duplicates, and shares
no code with the pipeline. What the two have in common is the data, and the made-up time of each
click. If the pipeline lost, doubled or misplaced a single event, its views would differ from this.
"""

from __future__ import annotations

import polars as pl

from millstream.demo.ads_events import DATA, click_delays_us

COUNTED = ("shown", "clicked", "rate")


def rates_by_hour(seed: int) -> pl.DataFrame:
    """Return impressions, clicks and rate per campaign and hour, as the view ``ctr_by_hour``."""
    return _rates(seed, "1h", ["campaign"])


def totals_by_day(seed: int) -> pl.DataFrame:
    """Return impressions, clicks and rate per campaign, policy and day: ``totals_by_day``."""
    return _rates(seed, "1d", ["campaign", "policy"])


def _rates(seed: int, size: str, by: list[str]) -> pl.DataFrame:
    week = pl.read_parquet(DATA).with_columns(pl.col("campaign", "policy").cast(pl.String))
    delay = pl.Series(click_delays_us(seed, week.height)).cast(pl.Duration("us"))
    impressions = week.select("occurred_at", *by, shown=pl.lit(1), clicked=pl.lit(0))
    clicks = week.with_columns(occurred_at=pl.col("occurred_at") + delay).filter("clicked")
    clicks = clicks.select("occurred_at", *by, shown=pl.lit(0), clicked=pl.lit(1))
    return (
        pl.concat([impressions, clicks])
        .group_by(pl.col("occurred_at").dt.truncate(size).alias("window_start"), *by)
        .agg(pl.col("shown").sum().cast(pl.Int64), pl.col("clicked").sum().cast(pl.Int64))
        .select(
            "window_start",
            pl.col("window_start").dt.offset_by(size).alias("window_end"),
            *by,
            "shown",
            "clicked",
            rate=pl.col("clicked") / pl.col("shown"),
        )
        .sort("window_start", *by)
    )


def difference(found: pl.DataFrame, expected: pl.DataFrame) -> pl.DataFrame:
    """Return the rows in which a view and the expected table differ; none if they are equal.

    Columns: the key, then each counted column as found (null where the view lacks the row) and as
    expected (null where the row should not be there).
    """
    keys = [name for name in expected.columns if name not in COUNTED]
    present = pl.lit(value=True).alias("present")
    both = found.select(*keys, *COUNTED, present).join(
        expected.with_columns(present), on=keys, how="full", suffix="_expected", coalesce=True
    )
    compared = [*COUNTED, "present"]
    differs = pl.any_horizontal(
        pl.col(name).ne_missing(pl.col(f"{name}_expected")) for name in compared
    )
    shown = [column for name in COUNTED for column in (name, f"{name}_expected")]
    return both.filter(differs).sort(keys).select(*keys, *shown)
