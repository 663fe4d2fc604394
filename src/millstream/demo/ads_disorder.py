"""How events travel: each reaches the log late, out of order, and sometimes more than once.

Front-end servers write events to the log as they come. On the way the network takes up to 20 seconds; some
events wait on their device first, minutes or hours; about 3 % are sent again because a response got lost;
about 0.2 % come once more a day later, from a server that replays its disk; some devices have a wrong
clock; and three records in ten thousand are cut short. With chaos all that is more frequent. Each partition
also gets heartbeats, "the time is now t", so that its watermark moves on while nobody clicks.

Everything is a pure function of the seed: records, partitions and order of arrival. That is what lets
`feed.py` go on after being killed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count as counting

import numpy as np
import polars as pl

from millstream.demo.ads_events import (
    DAY_US,
    EVENT_COLUMNS,
    HEARTBEAT,
    HOUR_US,
    MINUTE_US,
    PARTITIONS,
    SECOND_US,
)
from millstream.demo.seeded_random import uniform, uniform_integers
from millstream.log.murmur2 import partition_of

TRANSIT_US = 20 * SECOND_US
RETRIED_US = (SECOND_US, 5 * MINUTE_US)
REPLAYED_US = (DAY_US, 40 * HOUR_US)
# Of every 200 devices one is five hours fast, and one has never had its clock set.
CLOCKS_US = {7: 5 * HOUR_US, 8: -int(365.25 * 50) * DAY_US}
DEVICES_PER_CLOCK = 200


@dataclass(frozen=True)
class FaultRates:
    """How often what goes wrong: shares of the events."""

    retried: float = 0.03
    replayed: float = 0.002
    broken: float = 0.0003


USUAL_FAULTS = FaultRates()
CHAOS_FAULTS = FaultRates(retried=0.15, replayed=0.01, broken=0.001)


@dataclass(frozen=True)
class DisorderedRecords:
    """All records in the order in which they arrive, and what they are about.

    ``order``: arrival_us (rising), partition, place (the record's offset in its partition), event
    (the row of ``events``), sent_us, received_us, whether it is broken. Nothing is text before it is
    due: of millions of events only numbers are held.
    """

    events: pl.DataFrame
    order: pl.DataFrame

    @property
    def lengths(self) -> list[int]:
        """How many records each partition has once everything has arrived."""
        counts = dict(self.order["partition"].value_counts().rows())
        return [counts.get(partition, 0) for partition in range(PARTITIONS)]

    @property
    def last_heartbeats(self) -> pl.DataFrame:
        """The rows of the heartbeats that come after everything else: they close all windows."""
        return self.order.tail(PARTITIONS)

    def records(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Write some rows of ``order`` out: key, value and timestamp_ms of each record."""
        records = self.events[rows["event"]].hstack(rows.select("sent_us", "received_us", "broken"))
        whole = records.select(_payload().alias("value"))["value"]
        half = whole.str.slice(0, 60)
        return pl.DataFrame(
            {
                "key": records["key"].cast(pl.Binary),
                "value": half.zip_with(records["broken"], whole).cast(pl.Binary),
                "timestamp_ms": rows["arrival_us"] // 1000,
            }
        )


@dataclass(frozen=True)
class HeartbeatSchedule:
    """When heartbeats come: every so often until the end; then a last one, with a later time.

    By the last one the pipeline closes what it still holds open. Nothing arrives after it: what would
    is there at the end.
    """

    start_us: int
    end_us: int
    every_us: int
    last_time_us: int

    def times(self) -> pl.DataFrame:
        """Return the time in each heartbeat, and when it arrives."""
        times = pl.int_range(self.start_us, self.end_us + 1, self.every_us, eager=True)
        usual = pl.DataFrame({"at_us": times, "arrival_us": times})
        last = pl.DataFrame({"at_us": [self.last_time_us], "arrival_us": [self.end_us + 1]})
        return pl.concat([usual, last])


def disorder(
    once: pl.DataFrame, seed: int, trouble: FaultRates, beats: HeartbeatSchedule
) -> DisorderedRecords:
    """Send events, each given once as :data:`EVENT_COLUMNS` has it, on their way."""
    heartbeats = _heartbeats(beats)
    events = _with_partitions(pl.concat([once, heartbeats.select(*EVENT_COLUMNS)]))
    first = _first_copies(events[: once.height], seed)
    copies = pl.concat([first, *_more_copies(first, seed, trouble)])
    clamped = copies.with_columns(pl.min_horizontal("arrival_us", pl.lit(beats.end_us)))
    numbers = pl.int_range(once.height, events.height, eager=True, dtype=pl.UInt32)
    heartbeat_order = events[once.height :].select(
        numbers.alias("event"),
        "partition",
        pl.col("at_us").alias("sent_us"),
        pl.col("at_us").alias("received_us"),
        heartbeats["arrival_us"],
        broken=pl.lit(value=False),
    )
    # Equal arrival times do occur; the record's number among all settles their order.
    ordered = (
        pl.concat([clamped, heartbeat_order]).with_row_index("number").sort("arrival_us", "number")
    )
    place = pl.int_range(pl.len(), dtype=pl.Int64).over("partition").alias("place")
    return DisorderedRecords(events, ordered.drop("number").with_columns(place))


def heartbeat_key(partition: int) -> str:
    """Return a key that the log's partitioner puts into this partition.

    Heartbeats then travel like all other records, and still reach every partition.
    """
    keys = (f"heartbeat-{number}" for number in counting())
    return next(key for key in keys if partition_of(key.encode(), PARTITIONS) == partition)


def _heartbeats(beats: HeartbeatSchedule) -> pl.DataFrame:
    """Return all heartbeats as events, with ``arrival_us``."""
    keys = [heartbeat_key(partition) for partition in range(PARTITIONS)]
    every = beats.times().join(pl.DataFrame({"client": keys}), how="cross")
    return every.select(
        pl.concat_str(pl.lit("h"), pl.col("at_us") // SECOND_US).alias("event_id"),
        pl.lit(HEARTBEAT).alias("kind"),
        "at_us",
        pl.lit(0, pl.Int64).alias("waited_us"),
        "client",  # the record's key; it is not among the values of a heartbeat
        *(pl.lit(None, EVENT_COLUMNS[name]).alias(name) for name in list(EVENT_COLUMNS)[5:]),
        "arrival_us",
    )


def _with_partitions(events: pl.DataFrame) -> pl.DataFrame:
    """Add key, partition, and how wrong the device's clock is."""
    keys = events["client"].unique(maintain_order=True).to_list()
    homes = {key: partition_of(key.encode(), PARTITIONS) for key in keys}
    device = pl.col("user") % DEVICES_PER_CLOCK
    return events.with_columns(
        pl.col("client").alias("key"),
        pl.col("client").replace_strict(homes, return_dtype=pl.Int32).alias("partition"),
        device.replace_strict(CLOCKS_US, default=0, return_dtype=pl.Int64)
        .fill_null(0)
        .alias("off_us"),
    )


def _first_copies(events: pl.DataFrame, seed: int) -> pl.DataFrame:
    drawn = uniform(seed, "transit", events.height)
    # A cube leaves most near zero; products, unlike logarithms, are the same on every machine.
    transit = pl.Series((drawn * drawn * drawn * TRANSIT_US).astype(np.int64))
    sent = events["at_us"] + events["waited_us"]
    return pl.DataFrame(
        {
            "event": pl.int_range(events.height, eager=True, dtype=pl.UInt32),
            "partition": events["partition"],
            "sent_us": sent,
            "received_us": sent + transit,
            "arrival_us": sent + transit,
        }
    ).with_columns(broken=pl.lit(value=False))


def _more_copies(first: pl.DataFrame, seed: int, trouble: FaultRates) -> list[pl.DataFrame]:
    def chosen(purpose: str, share: float) -> pl.DataFrame:
        return first.filter(pl.Series(uniform(seed, purpose, first.height) < share))

    def after(rows: pl.DataFrame, purpose: str, limits: tuple[int, int]) -> pl.Series:
        return pl.Series(uniform_integers(limits, uniform(seed, purpose, rows.height)))

    retried = chosen("retried?", trouble.retried)
    again = after(retried, "retried", RETRIED_US)
    replayed = chosen("replay?", trouble.replayed)
    broken = chosen("broken?", trouble.broken)
    return [
        retried.with_columns(pl.col("sent_us", "received_us", "arrival_us") + again),
        replayed.with_columns(pl.col("arrival_us") + after(replayed, "replay", REPLAYED_US)),
        broken.with_columns(broken=pl.lit(value=True)),
    ]


def _time_text(column: str | pl.Expr) -> pl.Expr:
    return pl.from_epoch(column, time_unit="us").dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ")


def _payload() -> pl.Expr:
    """Write an event as JSON. No value holds a character that JSON would escape."""
    off = pl.col("off_us")
    always = (
        ('{"event_id":"', "event_id"),
        ('","kind":"', "kind"),
        ('","occurred_at":"', _time_text(pl.col("at_us") + off)),
        ('","received_at":"', _time_text("received_us")),
    )
    # Null, as a whole, for a heartbeat.
    besides = (
        ('","sent_at":"', _time_text(pl.col("sent_us") + off)),
        ('","client":"', "client"),
        ('","ad":', "ad"),
        (',"slot":', "slot"),
        (',"user":', "user"),
        (',"cost_micros":', "cost_micros"),
    )
    first, rest = (
        pl.concat_str(part for text, value in parts for part in (pl.lit(text), value))
        for parts in (always, besides)
    )
    return pl.concat_str(first, rest.fill_null('"'), pl.lit("}"))
