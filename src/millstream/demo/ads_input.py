"""The two inputs of the demo, the real week and made-up events, and the pipeline's parameters for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from millstream.demo import ads_generated, ads_week
from millstream.demo.ads_disorder import (
    CHAOS_FAULTS,
    USUAL_FAULTS,
    DisorderedRecords,
    HeartbeatSchedule,
    disorder,
)
from millstream.demo.ads_events import (
    DAY_US,
    HOUR_US,
    MINUTE_US,
    SECOND_US,
    WEEK_CLIENTS,
    Client,
)
from millstream.errors import ConfigError

EVENTS_MAX = 10_000_000


@dataclass(frozen=True)
class StopRule:
    """When an ad is stopped: its rate is below ``floor`` in so many windows in a row.

    Only windows count in which it was shown ``shown_min`` times.
    """

    window: str
    shown_min: int
    windows: int = 3
    floor: float = 0.0042


@dataclass(frozen=True)
class AdsInput:
    """Which events, chosen by what: a demo that goes on must be given the same again."""

    source: Literal["week", "generated"] = "week"
    seed: int = 1
    rate: int = 1_000
    minutes: float = 10.0
    chaos: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What chose the events, as the command line names it."""
        sizes = {} if self.source == "week" else {"rate": self.rate, "minutes": self.minutes}
        return {"input": self.source, "seed": self.seed, **sizes, "chaos": self.chaos}

    def check(self) -> None:
        """Make sure that the events fit into memory as numbers.

        Raises:
            ConfigError: there are too many.
        """
        events = self.rate * 60 * self.minutes
        if self.source == "generated" and events > EVENTS_MAX:
            raise ConfigError(
                f"{self.rate:,} events per second for {self.minutes:g} minutes are {events:,.0f}; the "
                f"demo can make up to {EVENTS_MAX:,}. Give a lower --rate or fewer --minutes."
            )

    def disorder(self) -> DisorderedRecords:
        """Work out every record, in the order of arrival. Costs about 0.2 GB for a million."""
        trouble = CHAOS_FAULTS if self.chaos else USUAL_FAULTS
        if self.source == "week":
            end_us = ads_week.END_US + 3 * DAY_US
            beats = HeartbeatSchedule(ads_week.START_US, end_us, 10 * MINUTE_US, end_us + DAY_US)
            return disorder(ads_week.week_events(self.seed), self.seed, trouble, beats)
        start_us, end_us = ads_generated.span_us(self.minutes)
        end_us += MINUTE_US  # past most of the clicks and refunds
        beats = HeartbeatSchedule(start_us, end_us, SECOND_US, end_us + DAY_US + HOUR_US)
        once = ads_generated.generated_events(self.seed, self.rate, self.minutes)
        return disorder(once, self.seed, trouble, beats)

    @property
    def clients(self) -> Mapping[str, Client]:
        """Who pays for the ads."""
        if self.source == "week":
            return WEEK_CLIENTS
        return ads_generated.clients(self.seed, self.rate, self.minutes)

    @property
    def stop_rule(self) -> StopRule:
        """When ads are stopped: the week's are shown some fifty times in twelve hours."""
        if self.source == "week":
            return StopRule("12 hours", shown_min=60, windows=5)
        return StopRule("1 minute", shown_min=max(self.rate // 5, 50))

    @property
    def speed(self) -> float:
        """How many times faster than it was the input is replayed, if not said otherwise."""
        times = 36_000.0 if self.source == "week" else 1.0
        return times / 2 if self.chaos and self.source == "week" else times
