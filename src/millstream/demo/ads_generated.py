"""Made-up ad events at any rate, around the end of a month: few clients, ads and users have most of it.

An event's time is when it reached a server less what it waited on its device; so events that occurred
hours before the first one come right from the beginning.
"""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import polars as pl

from millstream.demo.ads_events import (
    CLICK,
    EVENT_COLUMNS,
    IMPRESSION,
    MINUTE_US,
    REFUND,
    SECOND_US,
    Client,
    generated_clients,
)
from millstream.demo.ads_week import device_waits
from millstream.demo.seeded_random import IntArray, skewed, uniform, uniform_integers

CLIENTS = 40
ADS_PER_CLIENT = 10
USERS = 50_000
CLICK_RATE_MAX = 0.04
# Ads of these places among a client's ten are never clicked, for the pipeline to find.
LOW_RATE_ADS = (3, 8)
REFUNDED_SHARE = 0.05
CLICK_US = (2 * SECOND_US, 40 * SECOND_US)
REFUND_US = (20 * SECOND_US, 2 * MINUTE_US)
MONTH_END_US = int(datetime(2026, 1, 31, 23, tzinfo=UTC).timestamp()) * SECOND_US  # in Berlin


def span_us(minutes: float) -> tuple[int, int]:
    """Return when the first event can come, and when the last one has: midnight is in the middle."""
    half = round(minutes * MINUTE_US / 2)
    return MONTH_END_US - half, MONTH_END_US + half


def clients(seed: int, rate: int, minutes: float) -> dict[str, Client]:
    """Return the clients whose ads the events are of."""
    return generated_clients(seed, CLIENTS, round(rate * 60 * minutes))


def generated_events(seed: int, rate: int, minutes: float) -> pl.DataFrame:
    """Return every event once: ``rate`` impressions per second, then clicks, then refunds."""
    count = round(rate * 60 * minutes)
    start_us, end_us = span_us(minutes)
    owner = skewed(uniform(seed, "client", count), CLIENTS)
    place = skewed(uniform(seed, "ad", count), ADS_PER_CLIENT)
    ad = owner * ADS_PER_CLIENT + place
    at_us = start_us + (np.arange(count) * ((end_us - start_us) / max(count, 1))).astype(np.int64)
    known = clients(seed, rate, minutes).values()
    prices = np.array([client.impression_micros for client in known])[owner]
    per_click = np.array([client.click_micros for client in known])[owner]
    shown = pl.DataFrame(
        {
            "number": np.arange(count),
            "at_us": at_us,
            "client": pl.Series(owner).cast(pl.String).str.zfill(3),
            "ad": ad,
            "slot": uniform_integers((1, 4), uniform(seed, "slot", count)),
            "user": skewed(uniform(seed, "user", count), USERS),
            "cost_micros": prices,
            "click_micros": per_click,
        }
    ).with_columns(pl.format("client-{}", "client").alias("client"), kind=pl.lit(IMPRESSION))
    clicked = shown.filter(pl.Series(_draw_clicks(seed, ad, place)))
    after = pl.Series(uniform_integers(CLICK_US, uniform(seed, "click", clicked.height)))
    clicks = clicked.with_columns(
        at_us=clicked["at_us"] + after, cost_micros="click_micros", kind=pl.lit(CLICK)
    )
    back = clicks.filter(pl.Series(uniform(seed, "refund?", clicks.height) < REFUNDED_SHARE))
    later = pl.Series(uniform_integers(REFUND_US, uniform(seed, "refund", back.height)))
    refunds = back.with_columns(
        at_us=back["at_us"] + later, cost_micros=-pl.col("click_micros"), kind=pl.lit(REFUND)
    )
    once = pl.concat([shown, clicks, refunds])
    ids = pl.concat_str(pl.col("kind").str.slice(0, 1), pl.col("number").cast(pl.String))
    waited = device_waits(seed, once.height)
    return once.with_columns(ids.alias("event_id"), waited, at_us=once["at_us"] - waited).select(
        *EVENT_COLUMNS
    )


def _draw_clicks(
    seed: int, ad: IntArray, place: IntArray
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Say which impressions are clicked: each ad has a rate of its own, some have none."""
    rates = CLICK_RATE_MAX * uniform(seed, "rate", CLIENTS * ADS_PER_CLIENT)
    chance = np.where(np.isin(place, LOW_RATE_ADS), 0.0, rates[ad])
    clicked: np.ndarray[tuple[int], np.dtype[np.bool_]] = uniform(seed, "clicked", len(ad)) < chance
    return clicked
