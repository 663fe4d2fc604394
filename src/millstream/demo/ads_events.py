"""What the demo's events are: the schema of the topic ``ad-events``, and who pays for the ads.

Amounts of money are whole numbers of millionths of a euro, as advertising systems count them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import numpy as np
import polars as pl

from millstream.demo.seeded_random import uniform

TOPIC = "ad-events"
PARTITIONS = 4

SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US
HOUR_US = 60 * MINUTE_US
DAY_US = 24 * HOUR_US

IMPRESSION, CLICK, REFUND, HEARTBEAT = "impression", "click", "refund", "heartbeat"

# Every input gives its events as such a table: each event once, with the time at which it really
# occurred, how long it then waited on the device, and null in what a heartbeat does not have.
EVENT_COLUMNS = {
    "event_id": pl.String(),
    "kind": pl.String(),
    "at_us": pl.Int64(),
    "waited_us": pl.Int64(),
    "client": pl.String(),
    "ad": pl.Int64(),
    "slot": pl.Int64(),
    "user": pl.Int64(),
    "cost_micros": pl.Int64(),
}


@dataclass(frozen=True)
class AdEvent:
    """One event of the topic ``ad-events``; a heartbeat has only its id, kind and times.

    ``occurred_at`` and ``sent_at`` are by the clock of the device, which may be wrong,
    ``received_at`` by that of the server. ``cost_micros`` is below zero for a refund.
    """

    event_id: str
    kind: str  # "impression", "click", "refund" or "heartbeat"
    occurred_at: datetime
    received_at: datetime
    sent_at: datetime | None = None
    client: str | None = None
    ad: int | None = None
    slot: int | None = None  # 1 to 3, from the left
    user: int | None = None
    cost_micros: int | None = None


@dataclass(frozen=True)
class Client:
    """Who pays: prices, the budget of a day, and the zone in which its days are counted."""

    zone: str
    thousand_micros: int  # for a thousand impressions
    click_micros: int
    budget_micros: int

    @property
    def impression_micros(self) -> int:
        return self.thousand_micros // 1000


# The dataset has no prices. These are ours, such that on most days some budgets are used up.
WEEK_CLIENTS = {
    "all-bts": Client("Asia/Tokyo", 2_400_000, 400_000, 6_000_000),
    "all-random": Client("America/New_York", 2_100_000, 350_000, 4_500_000),
    "men-bts": Client("Europe/Berlin", 3_200_000, 600_000, 10_000_000),
    "men-random": Client("UTC", 2_800_000, 500_000, 8_500_000),
    "women-bts": Client("Asia/Tokyo", 3_000_000, 550_000, 7_500_000),
    "women-random": Client("Europe/London", 2_600_000, 450_000, 12_000_000),
}

_ZONES = ("Europe/Berlin", "UTC", "America/New_York", "Asia/Tokyo")


def generated_clients(seed: int, count: int, events: int) -> dict[str, Client]:
    """Make up clients for about ``events`` impressions, skewed as :func:`uniform.skewed` has it.

    Budgets are between half of what the client would spend and twice that.
    """
    thousand = 1_000_000 + (uniform(seed, "price", count) * 4_000_000).astype(np.int64)
    shares = np.diff(np.cbrt(np.arange(count + 1) / count))
    spending = shares * events * thousand / 1000 * 4  # three quarters of it are for clicks
    budgets = spending * (0.5 + 1.5 * uniform(seed, "budget", count))
    return {
        f"client-{number:03}": Client(
            _ZONES[number % len(_ZONES)],
            int(thousand[number]) // 1000 * 1000,
            int(thousand[number]) // 5,
            int(budgets[number]) // 10_000 * 10_000,
        )
        for number in range(count)
    }
