"""Events of an online auction, after Nexmark: persons, auctions, bids; seeded, made in columns.

Of every 50 events the first is a person, the next three are auctions and the rest bids, as in the
benchmark's own generator; half of the bids go to one "hot" auction of the moment, three quarters
come from one hot bidder, three quarters of the auctions are a hot seller's (the first and the second of the
newest hundred persons), and prices are spread log-uniformly over 10 to 10^8 cents. Half of the bids come
through one of four channels, the others through one of 10,000, most of which say in the url which. There are 10,000 events a second, at whole milliseconds, which is
as fine as Flink's event time goes. Texts are shorter than the original's padding.

Source: Tucker, Tufte, Papadimos, Maier, "NEXMark - A Benchmark for Queries over Data Streams",
2002; proportions and hot ratios as in the generator of Apache Beam and of the Flink community.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa

START_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z
EVENTS_PER_S = 10_000
_PERSONS, _AUCTIONS, _OF = 1, 3, 50
_HOT_AUCTION, _HOT_BIDDER, _HOT_SELLER = 2, 4, 4  # one in two bids, three in four, three in four
_HOT_SPAN = 100  # a hot auction stays hot for so many auctions
_ACTIVE = 1000  # a person stays active for so many persons
_CHANNELS = ("Apple", "Google", "Facebook", "Baidu")
_OTHER_CHANNELS = 10_000
_CITIES = (
    "Phoenix",
    "Los Angeles",
    "San Francisco",
    "Boise",
    "Portland",
    "Bend",
    "Redmond",
    "Seattle",
    "Kent",
    "Cheyenne",
)
_FIRST_NAMES = (
    "Peter",
    "Paul",
    "Luke",
    "John",
    "Saul",
    "Vicky",
    "Kate",
    "Julie",
    "Sarah",
    "Deiter",
)
_LAST_NAMES = (
    "Shultz",
    "Abrams",
    "Spencer",
    "White",
    "Bartels",
    "Walton",
    "Smith",
    "Jones",
    "Noris",
)
_STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
_FORMAT = "%Y-%m-%dT%H:%M:%S%.3fZ"


def persons(count_of_events: int, start: int) -> pl.DataFrame:
    """Make the persons among events ``[start, start + count_of_events)``."""
    dice = np.random.default_rng([5, start])
    number = np.arange(start, start + count_of_events)
    number = number[number % _OF < _PERSONS]
    count = len(number)
    return pl.DataFrame(
        {
            "id": number // _OF * _PERSONS + 1000,
            "name": _chosen(dice, _FIRST_NAMES, count) + " " + _chosen(dice, _LAST_NAMES, count),
            "email": _text(dice, count, 7) + "@" + _text(dice, count, 5) + ".com",
            "credit_card": pl.Series(dice.integers(10**15, 10**16, count)).cast(pl.String),
            "city": _chosen(dice, _CITIES, count),
            "state": _chosen(dice, _STATES, count),
            "date_time": _times(number).dt.strftime(_FORMAT),
            "extra": _extra(dice, count),
        }
    )


def auctions(count_of_events: int, start: int) -> pl.DataFrame:
    """Make the auctions among events ``[start, start + count_of_events)``."""
    dice = np.random.default_rng([6, start])
    number = np.arange(start, start + count_of_events)
    place = number % _OF - _PERSONS
    number, place = (each[(place >= 0) & (place < _AUCTIONS)] for each in (number, place))
    count = len(number)
    at = _times(number)
    return pl.DataFrame(
        {
            "id": number // _OF * _AUCTIONS + place + 1000,
            "item_name": "item " + pl.Series(dice.integers(0, 100_000, count)).cast(pl.String),
            "description": _text(dice, count, 20),
            "initial_bid": _price(dice, count),
            "reserve": _price(dice, count),
            "date_time": at.dt.strftime(_FORMAT),
            "expires": (
                at + pl.Series(dice.integers(1, 333, count)).cast(pl.Duration("ms"))
            ).dt.strftime(_FORMAT),
            "seller": _person(dice, number, _HOT_SELLER, 0),
            "category": dice.integers(10, 15, count),
            "extra": _extra(dice, count),
        }
    )


def bids(count_of_events: int, start: int) -> pl.DataFrame:
    """Make the bids among events ``[start, start + count_of_events)``."""
    dice = np.random.default_rng([7, start])
    number = np.arange(start, start + count_of_events)
    number = number[number % _OF >= _PERSONS + _AUCTIONS]
    count = len(number)
    opened = number // _OF * _AUCTIONS + _AUCTIONS  # so many auctions there are by then
    hot = dice.integers(0, _HOT_AUCTION, count) > 0
    some = opened - 1 - dice.integers(0, np.minimum(opened, 100))
    auction = np.where(hot, (opened - 1) // _HOT_SPAN * _HOT_SPAN, some)
    channel, url = _channel(dice, count)
    return pl.DataFrame(
        {
            "auction": auction + 1000,
            "bidder": _person(dice, number, _HOT_BIDDER, 1),
            "price": _price(dice, count),
            "channel": channel,
            "url": url,
            "date_time": _times(number).dt.strftime(_FORMAT),
            "extra": _extra(dice, count),
        }
    )


MADE_BY = {"bids": bids, "auctions": auctions, "persons": persons}


def as_json(frame: pl.DataFrame) -> pa.Array:
    """Give each row as JSON bytes."""
    lines = frame.select(pl.struct(pl.all()).struct.json_encode()).to_series()
    return lines.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(pa.binary())


def _person(
    dice: np.random.Generator, number: np.ndarray, hot_ratio: int, place: int
) -> np.ndarray:
    """Choose a person: the hot one of the moment, or an active one of those that have joined.

    ``place``: which of a hundred persons is hot. The second of a hundred is so five milliseconds before it joins,
    as in the benchmark's own generator: were the first one hot for so long, who sells most, half of q23's rows
    would be its.
    """
    joined = number // _OF + 1
    hot = dice.integers(0, hot_ratio, len(number)) > 0
    some = joined - 1 - dice.integers(0, np.minimum(joined, _ACTIVE))
    hottest = (joined - 1) // _HOT_SPAN * _HOT_SPAN + place
    return np.where(hot, hottest, some) + 1000


def _channel(dice: np.random.Generator, count: int) -> tuple[pl.Series, pl.Series]:
    """Choose channels, and make the urls that name nine in ten of those that few know."""
    known = dice.integers(0, 2, count) > 0
    number = dice.integers(0, _OTHER_CHANNELS, count)
    folders = [_text(dice, count, 5) for _ in range(3)]
    base = "https://www.nexmark.com/" + folders[0] + "/" + folders[1] + "/" + folders[2]
    made = pl.DataFrame(
        {
            "known": known,
            "named": number % 10 > 0,
            "word": _chosen(dice, _CHANNELS, count),
            "number": number,
            "base": base + "/item.htm?query=1",
        }
    )
    other = "channel-" + pl.col("number").cast(pl.String)
    told = pl.col("base") + "&channel_id=" + pl.col("number").cast(pl.String)
    chosen = made.select(
        channel=pl.when("known").then("word").otherwise(other),
        url=pl.when(pl.col("named") & ~pl.col("known")).then(told).otherwise("base"),
    )
    return chosen["channel"], chosen["url"]


def _price(dice: np.random.Generator, count: int) -> np.ndarray:
    return np.round(10.0 ** (1 + 7 * dice.random(count))).astype(np.int64)


def _chosen(dice: np.random.Generator, words: tuple[str, ...], count: int) -> pl.Series:
    return pl.Series(np.array(words)[dice.integers(0, len(words), count)], dtype=pl.String)


def _text(dice: np.random.Generator, count: int, length: int) -> pl.Series:
    """Make texts of small letters."""
    letters = dice.integers(ord("a"), ord("z") + 1, (count, length), dtype=np.uint8)
    return pl.Series(letters.view(f"S{length}").ravel().astype(str), dtype=pl.String)


def _extra(dice: np.random.Generator, count: int) -> pl.Series:
    return _text(dice, count, 18)


def _times(number: np.ndarray) -> pl.Series:
    return pl.Series(START_MS + number * 1000 // EVENTS_PER_S).cast(pl.Datetime("ms"))
