"""The nearest row before or after a time, for many rows at once.

All rows of both sides are sorted together, by key and time; so the row before another one is found by looking
back, whatever the numbers of rows and of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.columns import filter_rows

Direction = Literal["backward", "forward", "nearest"]
NO_MATCH = -1
_NUMBER = "__number"
_ONE = "__one"


def key_numbers(
    left: pl.DataFrame, right: pl.DataFrame, keys: Sequence[str], *, nulls_equal: bool
) -> tuple[Int64s, Int64s]:
    """Return the numbers of the keys of both sides: a left key that the right has not is -1.

    NaN is equal to NaN, and -0.0 to 0.0, as in joins; right keys are numbered as they come.
    """
    names = [*keys, _ONE]
    # With a second column: polars merges by a single one of floats that is sorted, and finds no NaN there.
    left, right = (rows[list(keys)].with_columns(pl.lit(1).alias(_ONE)) for rows in (left, right))
    known = right.unique(maintain_order=True).with_row_index(_NUMBER)
    left_numbers, right_numbers = (
        rows.join(known, on=names, how="left", nulls_equal=equal, maintain_order="left")[_NUMBER]
        .cast(pl.Int64)
        .fill_null(NO_MATCH)
        .to_numpy()
        for rows, equal in ((left, nulls_equal), (right, True))
    )
    return left_numbers, right_numbers


def last_before(
    left: tuple[Int64s, Int64s], right: tuple[Int64s, Int64s, Int64s], *, allow_equal: bool
) -> Int64s:
    """Return for each left row the position of the last right row of its key up to its time, or -1.

    ``left`` are key numbers and times, ``right`` key numbers, times, and what orders rows of one time.
    ``allow_equal``: a row of the same time counts, too.
    """
    keys, times = (np.concatenate(pair) for pair in zip(left, right[:2], strict=True))
    count = len(left[0])
    is_right = np.arange(len(keys)) >= count
    first = ~is_right if allow_equal else is_right  # what comes later of one time
    ties = np.concatenate([np.zeros(count, np.int64), right[2]])
    order = np.lexsort((ties, first, times, keys))
    places = np.where(is_right[order], np.arange(len(order)), NO_MATCH)
    latest = np.maximum.accumulate(places) if len(places) else places
    found = order[np.maximum(latest, 0)]
    same = (latest >= 0) & (keys[found] == keys[order]) & (keys[order] >= 0)
    matches = np.full(len(order), NO_MATCH, np.int64)
    matches[order] = np.where(same, found - count, NO_MATCH)
    return matches[:count]


def last_valid(
    left: tuple[Int64s, Int64s],
    right: tuple[Int64s, Int64s, Int64s],
    valid_from: Int64s,
    *,
    allow_equal: bool,
) -> Int64s:
    """Return the same, where a right row counts only for left rows from a time on, which is not before its own.

    Of the right rows that count for a left row, the one with the latest time matches.
    """
    count, (keys, times, ties) = len(left[0]), right
    by_rank = np.lexsort((ties, times, keys))
    ranks = np.empty(len(by_rank), np.int64)
    ranks[by_rank] = np.arange(len(by_rank))
    every_key = np.concatenate((left[0], keys))
    every_time = np.concatenate((left[1], valid_from))
    # Of one time: right rows that count at it already, left rows, right rows that count after it.
    turn = np.where((valid_from > times) | allow_equal, 0, 2)
    order = np.lexsort((np.concatenate((np.ones(count, np.int64), turn)), every_time, every_key))
    is_right = order >= count
    found = np.full(len(order), NO_MATCH, np.int64)
    found[is_right] = ranks[order[is_right] - count]
    # Keys come in the order of their numbers, and so do ranks: those of an earlier key are lower.
    latest = np.maximum.accumulate(found) if len(found) else found
    there = latest >= 0
    rows = np.full(len(order), NO_MATCH, np.int64)
    rows[there] = by_rank[latest[there]]
    there[there] = keys[rows[there]] == every_key[order][there]
    matches = np.full(len(order), NO_MATCH, np.int64)
    matches[order] = np.where(there, rows, NO_MATCH)
    return matches[:count]


def nearest_rows(
    left: tuple[Int64s, Int64s],
    right: tuple[Int64s, Int64s, Int64s],
    *,
    direction: Direction,
    allow_equal: bool,
    tolerance_us: int | None,
    valid_from: Int64s | None = None,
) -> Int64s:
    """Return for each left row the position of the right row that matches it, or -1.

    Of right rows of one time the last one matches. Of two that are equally near the earlier one does.
    ``valid_from``: looking backward, a right row counts only for left rows from this time on.
    """
    times = left[1]
    limit = np.iinfo(np.int64).max if tolerance_us is None else tolerance_us
    earlier = later = np.full(len(times), NO_MATCH, np.int64)
    if direction != "forward":
        if valid_from is None or (valid_from <= right[1]).all():
            earlier = last_before(left, right, allow_equal=allow_equal)
        else:
            earlier = last_valid(left, right, valid_from, allow_equal=allow_equal)
        earlier = _within(earlier, times, right[1], limit)
    if direction != "backward":
        mirrored = (left[0], -times), (right[0], -right[1], right[2])
        later = last_before(*mirrored, allow_equal=allow_equal)
        later = _within(later, times, right[1], limit)
    if direction == "nearest":
        by_earlier = _distance(earlier, times, right[1]) <= _distance(later, times, right[1])
        return np.where(by_earlier, earlier, later)
    return earlier if direction == "backward" else later


def _distance(matches: Int64s, times: Int64s, right_times: Int64s) -> Int64s:
    far = np.full(len(matches), np.iinfo(np.int64).max)
    if len(right_times):
        there = matches >= 0
        far[there] = np.abs(times[there] - right_times[matches[there]])
    return far


def _within(matches: Int64s, times: Int64s, right_times: Int64s, limit: int) -> Int64s:
    return np.where(_distance(matches, times, right_times) <= limit, matches, NO_MATCH)


def without_deletions(matches: Int64s, deleted: pl.Series) -> Int64s:
    """Return the matches without those that are deletions, which leave no row."""
    gone = deleted.to_numpy()
    if not gone.any():
        return matches
    return np.where(gone[matches] & (matches != NO_MATCH), NO_MATCH, matches)


def with_match(rows: pl.DataFrame, matches: Int64s) -> tuple[pl.DataFrame, Int64s]:
    """Return the rows that have a match, and their matches."""
    found = matches != NO_MATCH
    return filter_rows(rows, found), matches[found]


def taken(rows: pl.DataFrame, names: Sequence[str], matches: Int64s) -> list[pl.Series]:
    """Return columns of the rows that match, null where none does."""
    places = pl.Series(matches).replace(NO_MATCH, None)
    # Under another name meanwhile: polars takes a name such as "^a.*$" for a pattern.
    return [rows[name].alias("0").gather(places).alias(name) for name in names]
