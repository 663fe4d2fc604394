"""The order of the log: where a record stands among all that a job reads, as one whole number.

Of two records of one partition that with the lower offset goes first; of two partitions the lower
number; of two topics that whose name sorts first. The place of a row (``__order``) says nothing of when
and by whom it was read, so whatever takes rows in this order gives the same result however they were
divided among batches, tasks and producers; and nothing of how many streams a program declares, so that
places in state mean the same to the next one. Rows that were made of one record share its place: by one
stream they keep their order, of several streams of a topic the one declared first goes first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.arrays import Int64s
from millstream.kernels.frames import ORDER, RELEASED, RELEASED_TIE, SPLIT

SOURCES_MAX = 1 << 7
_PARTITION_BITS = 16
_OFFSET_BITS = 40
PARTITIONS_MAX = 1 << _PARTITION_BITS
OFFSETS_MAX = 1 << _OFFSET_BITS
_SPLIT_BITS = 12
_SESSION_BITS = 24
_SESSIONS = 1 << _SESSION_BITS  # so many producer sessions a split can have; see split_number


def log_order_of(topic: int, partition: int, offset: int) -> int:
    """Return a record's place: by topic, then by partition, and within it by offset.

    Raises:
        ConfigError: partition or offset is too large to have one: it would be that of another record.
    """
    assert 0 <= topic < SOURCES_MAX, topic
    _require_place(partition, offset)
    return (topic << _PARTITION_BITS | partition) << _OFFSET_BITS | offset


def _require_place(partition: int, offset: int) -> None:
    if not (0 <= partition < PARTITIONS_MAX and 0 <= offset < OFFSETS_MAX):
        raise ConfigError(
            f"A record to be read is at offset {offset:,} of partition {partition:,}. Pipelines read "
            f"offsets below {OFFSETS_MAX:,} of up to {PARTITIONS_MAX:,} partitions of a topic. Have what "
            "follows written to a topic of its own, and read that."
        )


def topic_in(orders: Int64s) -> Int64s:
    """Return the numbers of places' topics."""
    return orders >> (_PARTITION_BITS + _OFFSET_BITS)


def partitions_of(orders: Int64s) -> Int64s:
    """Return a number for the partition of each place, of whichever topic."""
    return orders >> _OFFSET_BITS


def partition_in(orders: Int64s) -> Int64s:
    """Return the partitions of places."""
    return (orders >> _OFFSET_BITS) & ((1 << _PARTITION_BITS) - 1)


def offset_in(orders: Int64s) -> Int64s:
    """Return the offsets of places."""
    return orders & ((1 << _OFFSET_BITS) - 1)


def split_number(source: int, partition: int, split: int, session: int = 0) -> int:
    """Return the number of one split of one partition's records, as one source reads them in a batch.

    Where producers are told apart, each producer session in the split has a number of its own; so the
    numbers follow the log from split to split, and not within one.

    Raises:
        ConfigError: the partition is too large to have one.
    """
    assert 0 <= source < SOURCES_MAX, source
    assert 0 <= split < 1 << _SPLIT_BITS, split
    _require_place(partition, 0)
    assert 0 <= session < _SESSIONS, session
    place = ((source << _PARTITION_BITS | partition) << _SPLIT_BITS) | split
    return place << _SESSION_BITS | session


def in_log_order(rows: pl.DataFrame) -> pl.DataFrame:
    """Sort rows by their place in the log.

    Rows that only know their split are sorted by split, in which they stand as they were read; rows that
    waited for their time are sorted by it; all others did not come from a source, and keep their order.
    """
    keys = []
    if RELEASED in rows.columns:
        keys += [_whole(rows[RELEASED_TIE]), _whole(rows[RELEASED])]
    if SPLIT in rows.columns:
        keys.append(_whole(rows[SPLIT]) >> _SESSION_BITS)
    if ORDER in rows.columns:
        keys.append(_whole(rows[ORDER]))  # the last key is the first to sort by
    if not keys or _stand_sorted(keys):
        return rows
    return rows[np.lexsort(keys)]


def _whole(places: pl.Series) -> Int64s:
    """Return places as whole numbers: what has none, beside such as have, comes last."""
    return places.fill_null(np.iinfo(np.int64).max).to_numpy()


def _stand_sorted(keys: Sequence[Int64s]) -> bool:
    """Return whether rows are in order already, as they are where one task after another has read them."""
    places, *minor = reversed(keys)
    if not (places[1:] >= places[:-1]).all():
        return False
    if not minor:
        return True
    splits = minor[0]
    return bool(((splits[1:] >= splits[:-1]) | (places[1:] > places[:-1])).all())
