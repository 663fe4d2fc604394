"""Events of an online auction, after Nexmark: persons, auctions, bids; seeded, made in columns.

Of every 50 events the first is a person, the next three are auctions and the rest bids, as in the
benchmark's own generator; half of the bids go to one "hot" auction of the moment, three quarters
come from one hot bidder, and prices are spread log-uniformly over 10 to 10^8 cents. There are
10,000 events a second, at whole milliseconds, which is as fine as Flink's event time goes. Texts are shorter than the original's padding.

Source: Tucker, Tufte, Papadimos, Maier, "NEXMark - A Benchmark for Queries over Data Streams",
2002; proportions and hot ratios as in the generator of Apache Beam and of the Flink community.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

START_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z
_EVENTS_PER_MS = 10
_PERSONS, _AUCTIONS, _OF = 1, 3, 50
_HOT_AUCTION, _HOT_BIDDER = 2, 4  # one in two bids, three in four bids
_HOT_SPAN = 100  # a hot auction stays hot for so many auctions
_CHANNELS = ("apple", "google", "facebook", "baidu")


def bids(count_of_events: int, start: int) -> pl.DataFrame:
    """Make the bids among events ``[start, start + count_of_events)``."""
    dice = np.random.default_rng([7, start])
    number = np.arange(start, start + count_of_events)
    number = number[number % _OF >= _PERSONS + _AUCTIONS]
    count = len(number)
    auctions = number // _OF * _AUCTIONS + _AUCTIONS  # so many have been opened by then
    persons = number // _OF + 1
    hot = dice.integers(0, _HOT_AUCTION, count) > 0
    some = np.maximum(auctions - 1 - dice.integers(0, 100, count), 0)
    auction = np.where(hot, (auctions - 1) // _HOT_SPAN * _HOT_SPAN, some)
    hot = dice.integers(0, _HOT_BIDDER, count) > 0
    some = np.maximum(persons - 1 - dice.integers(0, 1000, count), 0)
    bidder = np.where(hot, (persons - 1) // _HOT_SPAN * _HOT_SPAN, some)
    price = np.round(10.0 ** (1 + 7 * dice.random(count))).astype(np.int64)
    channel = dice.integers(0, len(_CHANNELS), count)
    at = pl.Series(START_MS + number // _EVENTS_PER_MS).cast(pl.Datetime("ms"))
    return pl.DataFrame(
        {
            "auction": auction + 1000,
            "bidder": bidder + 1000,
            "price": price,
            "channel": np.array(_CHANNELS)[channel],
            "url": "https://www.nexmark.com/item.htm?id="
            + pl.Series(dice.integers(0, 10_000, count)).cast(pl.String),
            "date_time": at.dt.strftime("%Y-%m-%dT%H:%M:%S%.3fZ"),
            "extra": pl.Series(dice.integers(0, 2**62, count)).cast(pl.String),
        }
    )


def as_json(frame: pl.DataFrame) -> pa.Array:
    """Give each row as JSON bytes."""
    lines = frame.select(pl.struct(pl.all()).struct.json_encode()).to_series()
    return lines.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(pa.binary())


def write(folder: Path, events: int, *, batch: int, partitions: int) -> int:
    """Write the bids to a log and to JSON files, ``batch`` events a file; give their number."""
    import millstream as ms

    files = folder / "bids"
    files.mkdir()
    total = 0
    with ms.connect(folder / "log") as log, log.producer() as producer:
        log.create_topic("bids", partitions=partitions)
        for start in range(0, events, batch):
            lines = as_json(bids(min(batch, events - start), start))
            producer.send_many("bids", values=lines)
            text = b"\n".join(value.as_py() for value in lines)
            (files / f"{start:012}.json").write_bytes(text + b"\n")
            total += len(lines)
    return total
