"""Made-up ad events for the live part of the demo: a day of traffic that rises and falls, and bots.

Every hour and a half of event time a bot comes to the ads of one client: for some minutes it loads them
far more often than readers do, and clicks on most. The pipeline is to notice (`live_pipeline.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import polars as pl

from millstream.demo.ads_disorder import (
    USUAL_FAULTS,
    DisorderedRecords,
    HeartbeatSchedule,
    disorder,
)
from millstream.demo.ads_events import (
    CLICK,
    DAY_US,
    EVENT_COLUMNS,
    HOUR_US,
    IMPRESSION,
    MINUTE_US,
    SECOND_US,
    Client,
)
from millstream.demo.ads_input import StopRule
from millstream.demo.ads_week import device_waits
from millstream.demo.seeded_random import IntArray, skewed, uniform, uniform_integers

START_US = int(datetime(2026, 6, 1, 6, tzinfo=UTC).timestamp()) * SECOND_US
SPEED = 60.0  # a minute of event time in a second
STOP_RULE = StopRule("10 minutes", shown_min=60)

# The first clients have most of the traffic. Some budgets last for the day, some for an hour of it.
CLIENTS = {
    "travel": Client("UTC", 2_400_000, 320_000, 140_000_000),
    "shoes": Client("Europe/Berlin", 3_000_000, 400_000, 60_000_000),
    "cinema": Client("Europe/London", 2_600_000, 350_000, 90_000_000),
    "books": Client("America/New_York", 2_000_000, 250_000, 16_000_000),
    "bank": Client("Europe/Berlin", 4_000_000, 600_000, 120_000_000),
    "garden": Client("UTC", 1_800_000, 240_000, 9_000_000),
    "games": Client("Asia/Tokyo", 2_800_000, 380_000, 70_000_000),
    "tea": Client("Europe/London", 1_600_000, 200_000, 25_000_000),
}
ADS_PER_CLIENT = 5
UNLIKED_PLACE = 3  # the ad at this place of each client is never clicked by a reader
USERS = 20_000
IMPRESSIONS_LEAST, IMPRESSIONS_MOST = 160, 420  # a minute, over the day
CLICK_RATES = (0.008, 0.036)
CLICK_US = (2 * SECOND_US, 40 * SECOND_US)

BOT_FIRST_MINUTE = 18
BOT_EVERY_MINUTES = 90
BOT_MINUTES = 8
BOT_IMPRESSIONS = 45  # a minute
BOT_CLICK_RATE = 0.7
_BOT_TARGETS = ("cinema", "bank", "shoes", "games")


@dataclass(frozen=True)
class BotVisit:
    """A bot at the ads of one client, in a half-open interval of event time."""

    client: str
    start_us: int
    end_us: int


@dataclass(frozen=True)
class LiveInput:
    """The events of some minutes of event time, chosen by a seed."""

    seed: int = 1
    minutes: int = 60

    @property
    def clients(self) -> dict[str, Client]:
        """Who pays for the ads."""
        return CLIENTS

    @property
    def stop_rule(self) -> StopRule:
        """When ads are stopped."""
        return STOP_RULE

    @property
    def end_us(self) -> int:
        """When the last event may come; all arrive until then."""
        return START_US + self.minutes * MINUTE_US

    @property
    def bots(self) -> list[BotVisit]:
        """The visits of bots, in their order."""
        starts = range(BOT_FIRST_MINUTE, self.minutes, BOT_EVERY_MINUTES)
        return [
            BotVisit(
                _BOT_TARGETS[number % len(_BOT_TARGETS)],
                START_US + start * MINUTE_US,
                START_US + min(start + BOT_MINUTES, self.minutes) * MINUTE_US,
            )
            for number, start in enumerate(starts)
        ]

    def disorder(self) -> DisorderedRecords:
        """Work out every record, in the order of arrival, with the faults of the demo."""
        last_us = self.end_us + DAY_US + HOUR_US
        beats = HeartbeatSchedule(START_US, self.end_us, 20 * SECOND_US, last_us)
        return disorder(live_events(self), self.seed, USUAL_FAULTS, beats)


def live_events(given: LiveInput) -> pl.DataFrame:
    """Return every event once: impressions of readers and bots, then the clicks on them."""
    shown = pl.concat(
        [_readers(given), *(_bot(given.seed, *each) for each in enumerate(given.bots))]
    )
    shown = shown.with_row_index("number")
    chance = shown["chance"].to_numpy()
    clicked = shown.filter(pl.Series(uniform(given.seed, "clicked", shown.height) < chance))
    after = uniform_integers(CLICK_US, uniform(given.seed, "click", clicked.height))
    clicks = clicked.with_columns(pl.col("at_us") + pl.Series(after), _kind(CLICK), _cost("click"))
    once = pl.concat([shown.with_columns(_kind(IMPRESSION), _cost("impression")), clicks])
    ids = pl.concat_str(pl.col("kind").str.slice(0, 1), pl.col("number").cast(pl.String))
    waited = device_waits(given.seed, once.height)
    return once.with_columns(ids.alias("event_id"), waited).select(*EVENT_COLUMNS)


def _readers(given: LiveInput) -> pl.DataFrame:
    """Return the impressions of readers."""
    seed = given.seed
    minute = np.repeat(np.arange(given.minutes), _traffic(seed, given.minutes))
    count = len(minute)
    owner = skewed(uniform(seed, "client", count), len(CLIENTS))
    place = skewed(uniform(seed, "ad", count), ADS_PER_CLIENT)
    low, high = CLICK_RATES
    rates = low + (high - low) * uniform(seed, "rate", len(CLIENTS) * ADS_PER_CLIENT)
    ad = owner * ADS_PER_CLIENT + place
    chance = np.where(place == UNLIKED_PLACE, 0.0, rates[ad])
    at_us = START_US + minute * MINUTE_US
    at_us += uniform_integers((0, MINUTE_US), uniform(seed, "moment", count))
    users = skewed(uniform(seed, "user", count), USERS)
    slots = uniform_integers((1, 4), uniform(seed, "slot", count))
    return _impressions(at_us, owner, ad, slots, users).with_columns(chance=pl.Series(chance))


def _traffic(seed: int, minutes: int) -> IntArray:
    """Return how many impressions each minute has: a parabola over each 16 hours of a day, and noise.

    Sums and products alone, unlike a sine, come to the same on every machine.
    """
    hour = (np.arange(minutes) / 60 + 6) % 24
    awake = np.clip((hour - 6) / 16, 0.0, 1.0)
    day = 4 * awake * (1 - awake)
    noise = 0.85 + 0.3 * uniform(seed, "traffic", minutes)
    most = IMPRESSIONS_LEAST + (IMPRESSIONS_MOST - IMPRESSIONS_LEAST) * day
    return (most * noise).astype(np.int64)


def _bot(seed: int, number: int, visit: BotVisit) -> pl.DataFrame:
    """Return the impressions of one visit of a bot."""
    count = BOT_IMPRESSIONS * ((visit.end_us - visit.start_us) // MINUTE_US)
    purpose = f"bot{number}"
    at_us = uniform_integers((visit.start_us, visit.end_us), uniform(seed, purpose, count))
    owner = np.full(count, list(CLIENTS).index(visit.client))
    ad = owner * ADS_PER_CLIENT
    users = np.full(count, USERS + number % 100)
    slots = np.ones(count, np.int64)
    return _impressions(at_us, owner, ad, slots, users).with_columns(chance=pl.lit(BOT_CLICK_RATE))


def _impressions(
    at_us: IntArray, owner: IntArray, ad: IntArray, slots: IntArray, users: IntArray
) -> pl.DataFrame:
    names = pl.Series(list(CLIENTS))
    return pl.DataFrame(
        {"at_us": at_us, "client": names.gather(owner), "ad": ad, "slot": slots, "user": users}
    ).cast(dict.fromkeys(("at_us", "ad", "slot", "user"), pl.Int64))


def _kind(name: str) -> pl.Expr:
    return pl.lit(name).alias("kind")


def _cost(of: str) -> pl.Expr:
    costs = {name: getattr(client, f"{of}_micros") for name, client in CLIENTS.items()}
    return pl.col("client").replace_strict(costs, return_dtype=pl.Int64).alias("cost_micros")
