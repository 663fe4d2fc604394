"""A week of ad impressions and clicks as events, in an order in which they might really arrive.

The week is real (see `ads_week.ATTRIBUTION.txt`); how its events travel is made up, to show what
a stream does to them. Front-end servers send each event to the log some seconds after it occurred;
about 1 % straggle by minutes up to nearly three hours; about 3 % are sent twice because an answer
got lost; and about 0.2 % come once more a day or two later, from a server that replays its disk.
Every ten minutes each partition also gets a heartbeat, "the time is now t", until long after the
last event, so that its watermark moves on while nobody clicks.

Everything is a pure function of the seed: events, payload bytes, partitions and order of arrival.
That is what lets `feed.py` go on after being killed, and what lets the answer be checked: copies
add nothing that did not also arrive in time, so dropping the late ones must change no result.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import count as counting
from pathlib import Path
from typing import TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from millstream.log.murmur2 import partition_of

TOPIC = "ad-events"
PARTITIONS = 4
DATA = Path(__file__).parent / "ads_week.parquet"

SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US
HOUR_US = 60 * MINUTE_US
DAY_US = 24 * HOUR_US

WEEK_START = datetime(2019, 11, 24, tzinfo=UTC)
START_US = int(WEEK_START.timestamp()) * SECOND_US
# Heartbeats go on for three days after the week: past the last late copy (40 hours after its
# event), and past what any window of the pipeline still waits for.
END_US = START_US + 10 * DAY_US
HEARTBEAT_US = 10 * MINUTE_US

RETRIED_SHARE = 0.03
STRAGGLING_SHARE = 0.01
LATE_SHARE = 0.002
# Straggling and being retried together stay below three hours, the lateness that the pipeline
# allows; late copies come after at least a day, far beyond it.
STRAGGLING_US = (MINUTE_US, 165 * MINUTE_US)
RETRIED_US = (SECOND_US, 10 * MINUTE_US)
LATE_US = (DAY_US, 40 * HOUR_US)
CLICK_US = (2 * SECOND_US, 5 * MINUTE_US)
JITTER_US = 20 * SECOND_US

_Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class AdEvent:
    """One event of the topic ``ad-events``. A heartbeat has its kind and time only."""

    event_id: str
    kind: str  # "impression", "click" or "heartbeat"
    occurred_at: datetime
    campaign: str | None = None  # "all", "men" or "women"
    policy: str | None = None  # "bts" or "random": who chose the ad
    ad: int | None = None
    slot: int | None = None  # 1 to 3, from the left
    user: int | None = None


def draws(seed: int, purpose: str, count: int) -> _Floats:
    """Return ``count`` numbers in [0, 1), the same for ever for a seed and a purpose.

    SplitMix64 over a counter: unlike a library's generator it cannot change with a version, so a
    feed stopped today goes on exactly after an upgrade. Source: Steele, Lea, Flood, "Fast
    Splittable Pseudorandom Number Generators" (2014).
    """
    name = int.from_bytes(purpose.encode(), "little")
    assert name < 2**64, purpose
    counter = np.arange(1, count + 1, dtype=np.uint64)
    start = _mixed(np.array([seed % 2**64], np.uint64) ^ _mixed(np.array([name], np.uint64)))
    mixed = _mixed(start + counter * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _between(limits: tuple[int, int], drawn: _Floats) -> NDArray[np.int64]:
    low, high = limits
    return low + (drawn * (high - low)).astype(np.int64)


@cache
def impressions() -> pl.DataFrame:
    """Return the week as shipped: 60,000 impressions in the order of time, ``clicked`` or not."""
    return pl.read_parquet(DATA).with_columns(pl.col("campaign", "policy").cast(pl.String))


def click_delays_us(seed: int, count: int) -> NDArray[np.int64]:
    """Return how long after each of ``count`` impressions its click, if any, comes.

    The dataset says that an impression was clicked, not when; this part is made up.
    """
    return _between(CLICK_US, draws(seed, "click", count))


def events(seed: int) -> pl.DataFrame:
    """Return every event once: impressions first, then clicks; ``at_us`` is the event time."""
    shown = impressions().with_row_index("number")
    shown = shown.with_columns(
        pl.col("occurred_at").to_physical().alias("at_us"),
        pl.Series("delay_us", click_delays_us(seed, shown.height)),
    )
    clicked = shown.filter("clicked").with_columns(at_us=pl.col("at_us") + pl.col("delay_us"))
    both = pl.concat(
        [
            shown.with_columns(kind=pl.lit("impression"), letter=pl.lit("i")),
            clicked.with_columns(kind=pl.lit("click"), letter=pl.lit("c")),
        ]
    )
    return both.select(
        pl.concat_str("letter", pl.col("number").cast(pl.String).str.zfill(6)).alias("event_id"),
        "kind",
        "at_us",
        "campaign",
        "policy",
        "ad",
        "slot",
        "user",
    )


def arrivals(seed: int) -> pl.DataFrame:
    """Return all records in the order in which they arrive.

    Columns: ``arrival_us`` (rising), ``partition``, ``place`` (the record's offset in its
    partition), ``timestamp_ms`` (the arrival, as the record's own time), ``key``, ``value``
    (bytes, as written to the log), ``sent`` ("once", "retried" or "late": which copy this is,
    or "heartbeat").
    """
    copies = pl.concat([_copies(seed), _heartbeats()])
    # Equal arrival times do occur; the record's number among all settles their order.
    ordered = copies.with_row_index("number").sort("arrival_us", "number")
    return ordered.select(
        "arrival_us",
        "partition",
        pl.int_range(pl.len(), dtype=pl.Int64).over("partition").alias("place"),
        (pl.col("arrival_us") // 1000).alias("timestamp_ms"),
        "key",
        "value",
        "sent",
    )


def _copies(seed: int) -> pl.DataFrame:
    """Return each event as often as it is sent, with the time at which each copy arrives."""
    once = events(seed)
    users = once.select("user").unique(maintain_order=True)
    users = users.with_columns(pl.col("user").cast(pl.String).cast(pl.Binary).alias("key"))
    chosen = [partition_of(key, PARTITIONS) for key in users["key"]]
    users = users.with_columns(pl.Series("partition", chosen, pl.Int32))
    once = once.join(users, on="user", how="left", maintain_order="left").with_columns(
        pl.Series("value", _payloads(once)),
        pl.Series("arrival_us", once["at_us"].to_numpy() + _first_delays_us(seed, once.height)),
    )
    return pl.concat(
        [
            _sent(once, "once"),
            _sent(_again(once, seed, "retried", RETRIED_SHARE, RETRIED_US), "retried"),
            _sent(_again(once, seed, "late", LATE_SHARE, LATE_US), "late"),
        ]
    )


def _first_delays_us(seed: int, count: int) -> NDArray[np.int64]:
    drawn = draws(seed, "jitter", count)
    # A cube leaves most near zero and some up to the limit; products, unlike logarithms, come out
    # the same to the last bit on every machine.
    usual = (drawn * drawn * drawn * JITTER_US).astype(np.int64)
    straggling = _between(STRAGGLING_US, draws(seed, "straggle", count))
    straggles = draws(seed, "who", count) < STRAGGLING_SHARE
    return np.where(straggles, straggling, usual)


def _again(
    once: pl.DataFrame, seed: int, purpose: str, share: float, delay_us: tuple[int, int]
) -> pl.DataFrame:
    """Return the events that are sent again, with the time at which their copy arrives."""
    chosen = draws(seed, f"{purpose}?", once.height) < share
    delays = _between(delay_us, draws(seed, purpose, once.height))
    later = once.with_columns(pl.col("arrival_us") + pl.Series(delays))
    return later.filter(pl.Series(chosen))


def _sent(rows: pl.DataFrame, copy: str) -> pl.DataFrame:
    return rows.select("arrival_us", "partition", "key", "value", pl.lit(copy).alias("sent"))


def heartbeat_key(partition: int) -> bytes:
    """Return a key that the log's partitioner puts into this partition.

    Heartbeats then travel like all other records, and still reach every partition.
    """
    keys = (f"heartbeat-{number}".encode() for number in counting())
    return next(key for key in keys if partition_of(key, PARTITIONS) == partition)


def _heartbeats() -> pl.DataFrame:
    """Return one heartbeat per partition and ten minutes, through to the end."""
    times = pl.int_range(START_US, END_US + 1, HEARTBEAT_US, eager=True)
    to = pl.DataFrame(
        {"partition": range(PARTITIONS), "key": [heartbeat_key(p) for p in range(PARTITIONS)]},
        schema={"partition": pl.Int32, "key": pl.Binary},
    )
    beats = pl.DataFrame({"at_us": times}).join(to, how="cross")
    text = pl.concat_str(
        pl.lit('{"event_id":"h'),
        "partition",
        pl.lit("-"),
        pl.col("at_us") // SECOND_US,
        pl.lit('","kind":"heartbeat","occurred_at":"'),
        _time_text(),
        pl.lit('"}'),
    )
    return _sent(
        beats.with_columns(
            text.cast(pl.Binary).alias("value"),
            pl.col("at_us").alias("arrival_us"),
        ),
        "heartbeat",
    )


def _time_text() -> pl.Expr:
    return pl.from_epoch("at_us", time_unit="us").dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ")


def _payloads(rows: pl.DataFrame) -> pl.Series:
    """Return each event as JSON text. No value holds a character that JSON would escape."""
    text = pl.concat_str(
        pl.lit('{"event_id":"'),
        "event_id",
        pl.lit('","kind":"'),
        "kind",
        pl.lit('","occurred_at":"'),
        _time_text(),
        pl.lit('","campaign":"'),
        "campaign",
        pl.lit('","policy":"'),
        "policy",
        *(part for name in ("ad", "slot", "user") for part in _number_text(name)),
        pl.lit("}"),
    )
    return rows.select(text.cast(pl.Binary).alias("value"))["value"]


def _number_text(name: str) -> tuple[pl.Expr, pl.Expr]:
    separator = '",' if name == "ad" else ","  # ad follows a text, whose quote is still open
    return pl.lit(f'{separator}"{name}":'), pl.col(name)
