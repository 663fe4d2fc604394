"""The real week: impressions and clicks of the Open Bandit Dataset, with prices laid over it.

See `ads_week.ATTRIBUTION.txt`. What the dataset does not say is made up: when a click came after its
impression, what things cost, and that one click in twenty is refunded.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import polars as pl

from millstream.demo.ads_events import (
    CLICK,
    DAY_US,
    EVENT_COLUMNS,
    HOUR_US,
    IMPRESSION,
    MINUTE_US,
    REFUND,
    SECOND_US,
    WEEK_CLIENTS,
)
from millstream.demo.seeded_random import uniform, uniform_integers

DATA = Path(__file__).parent / "ads_week.parquet"
START_US = int(datetime(2019, 11, 24, tzinfo=UTC).timestamp()) * SECOND_US
END_US = START_US + 7 * DAY_US

REFUNDED_SHARE = 0.05
STRAGGLING_SHARE = 0.01
OFFLINE_SHARE = 0.002
CLICK_US = (2 * SECOND_US, 5 * MINUTE_US)
REFUND_US = (30 * MINUTE_US, 6 * HOUR_US)
STRAGGLING_US = (MINUTE_US, 50 * MINUTE_US)
OFFLINE_US = (90 * MINUTE_US, 5 * HOUR_US)


@cache
def impressions() -> pl.DataFrame:
    """Return the week as shipped: 60,000 impressions in the order of time, ``clicked`` or not."""
    return pl.read_parquet(DATA).with_columns(pl.col("campaign", "policy").cast(pl.String))


def week_events(seed: int) -> pl.DataFrame:
    """Return every event of the week once: impressions, then clicks, then refunds."""
    table = impressions()
    shown = table.with_row_index("number").select(
        "number",
        "clicked",
        pl.col("occurred_at").to_physical().alias("at_us"),
        pl.concat_str("campaign", "policy", separator="-").alias("client"),
        pl.col("ad", "slot", "user").cast(pl.Int64),
        pl.Series("click_us", uniform_integers(CLICK_US, uniform(seed, "click", table.height))),
        pl.Series("refund_us", uniform_integers(REFUND_US, uniform(seed, "refund", table.height))),
        pl.Series("refunded", uniform(seed, "refund?", table.height) < REFUNDED_SHARE),
    )
    clicked = shown.filter("clicked").with_columns(pl.col("at_us") + pl.col("click_us"))
    refunded = clicked.filter("refunded").with_columns(pl.col("at_us") + pl.col("refund_us"))
    prices = {name: client.impression_micros for name, client in WEEK_CLIENTS.items()}
    clicks = {name: client.click_micros for name, client in WEEK_CLIENTS.items()}
    costs = pl.col("client").replace_strict(clicks, return_dtype=pl.Int64)
    once = pl.concat(
        [
            shown.with_columns(
                _named(IMPRESSION),
                cost_micros=pl.col("client").replace_strict(prices, return_dtype=pl.Int64),
            ),
            clicked.with_columns(_named(CLICK), cost_micros=costs),
            refunded.with_columns(_named(REFUND), cost_micros=-costs),
        ]
    )
    # The letter makes ids of an impression, of its click and of the click's refund different.
    ids = pl.concat_str(pl.col("kind").str.slice(0, 1), pl.col("number").cast(pl.String))
    return once.with_columns(ids.alias("event_id"), device_waits(seed, once.height)).select(
        *EVENT_COLUMNS
    )


def _named(kind: str) -> pl.Expr:
    return pl.lit(kind).alias("kind")


def device_waits(seed: int, count: int) -> pl.Series:
    """Return how long events wait on their device: most not at all, some minutes, a few hours."""
    who = uniform(seed, "who", count)
    minutes = uniform_integers(STRAGGLING_US, uniform(seed, "straggle", count))
    hours = uniform_integers(OFFLINE_US, uniform(seed, "offline", count))
    straggles = who < OFFLINE_SHARE + STRAGGLING_SHARE
    waited = pl.Series(minutes) * pl.Series(straggles).cast(pl.Int64)
    return waited.zip_with(pl.Series(who >= OFFLINE_SHARE), pl.Series(hours)).alias("waited_us")
