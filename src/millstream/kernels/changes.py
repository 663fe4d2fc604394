"""Signed changes: a table as a bag of rows, and what a batch does to it.

A row with ``__diff`` +1 was added, one with -1 was taken back; rows without the column were all added. Inside
operators a row has a weight instead, which is how many times it was added, less how many times it was taken
back. Two rows are equal if all their columns are, the event time among them; NaN is equal to NaN, and -0.0
to 0.0, as in keys.

Source: Budiu et al., "DBSP: Automatic Incremental View Maintenance for Rich Query Languages", PVLDB 16(7),
2023 (arXiv 2203.16684), section 4: tables and their changes are Z-sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl

from millstream.errors import CorruptionError
from millstream.kernels.arrays import Int64s
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import DIFF, HASH, WEIGHT

_PLACE = "__place"
_SLOT = "__slot"


def with_weight(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows with ``__weight`` instead of ``__diff``."""
    if DIFF not in rows.columns:
        return rows.with_columns(pl.lit(1, pl.Int64).alias(WEIGHT))
    return rows.with_columns(pl.col(DIFF).cast(pl.Int64).alias(WEIGHT)).drop(DIFF)


def with_diff(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows with ``__diff`` instead of ``__weight``: each as many times as it weighs."""
    weights = rows[WEIGHT].to_numpy()
    sign = pl.Series(DIFF, np.sign(weights).astype(np.int8))
    signed = rows.drop(WEIGHT).hstack([sign])
    times = np.abs(weights)
    if (times == 1).all():
        return signed
    repeated: pl.DataFrame = signed[np.repeat(np.arange(len(times)), times)]
    return repeated


def consolidate(rows: pl.DataFrame) -> pl.DataFrame:
    """Add up the weights of equal rows, and leave out those that come to nothing.

    Equal rows have equal values of ``__hash``. Rows that were only added stay as they are, however many are
    equal; the order of rows is kept.
    """
    negative = rows[WEIGHT].to_numpy() < 0
    if not negative.any():
        return rows
    hashes = rows[HASH].to_numpy()
    touched = np.isin(hashes, hashes[negative])
    if touched.all():
        return _summed(rows)
    # In the order of their places, so that a batch that is repeated gives the same.
    numbered = rows.with_columns(pl.Series(_PLACE, np.arange(rows.height)))
    apart = filter_rows(numbered, ~touched)
    summed = _summed(filter_rows(numbered, touched), place=_PLACE)
    return pl.concat([apart, summed[apart.columns]]).sort(_PLACE).drop(_PLACE)


def _summed(rows: pl.DataFrame, place: str | None = None) -> pl.DataFrame:
    own = [name for name in rows.columns if name not in (WEIGHT, place)]
    # Numbers for names meanwhile: polars takes a name such as "^a.*$" for a pattern.
    numbers = {name: str(number) for number, name in enumerate(own)}
    made = [pl.col(WEIGHT).sum(), *([] if place is None else [pl.col(place).first()])]
    summed = rows.rename(numbers).group_by(list(numbers.values()), maintain_order=True).agg(*made)
    names = {number: name for name, number in numbers.items()}
    kept = summed.filter(pl.col(WEIGHT) != 0).rename(names)
    return kept[rows.columns]


def check_nothing_owed(rows: pl.DataFrame, step: str) -> None:
    """Make sure that the sum of all changes of some rows has none that is there less than not at all.

    Raises:
        CorruptionError: an event was taken back that never came.
    """
    if (rows[WEIGHT] < 0).any():
        raise CorruptionError(
            f"The step {step!r} was to take back an event that it does not hold: its state, "
            "or that of a step above, is not of this input. Nothing of this batch was committed. "
            "Restore the app's whole folder, or restart from the log (millstream reset)."
        )


def total_weight(rows: pl.DataFrame | None) -> int:
    """Return the sum of the weights of rows."""
    return 0 if rows is None else int(rows[WEIGHT].sum())


def concat_present(tables: Sequence[pl.DataFrame | None]) -> pl.DataFrame | None:
    """Put the tables that have rows into one; None if there are none."""
    present = [table for table in tables if table is not None and table.height]
    if not present:
        return None
    return present[0] if len(present) == 1 else pl.concat(present)


def divide_by(rows: pl.DataFrame, slots: Int64s) -> Iterator[tuple[int, pl.DataFrame]]:
    """Divide rows by a number that each has."""
    if not rows.height:
        return
    if slots.min() == slots.max():
        yield int(slots[0]), rows
        return
    parts = rows.hstack([pl.Series(_SLOT, slots)]).partition_by(
        _SLOT, as_dict=True, include_key=False
    )
    for (slot,), part in sorted(parts.items()):
        yield int(slot), part


def group_numbers(rows: pl.DataFrame, columns: Sequence[str]) -> Int64s:
    """Return for each row the number of its group: of rows equal in the columns, counted by first rows."""
    if not columns or not rows.height:
        return np.zeros(rows.height, np.int64)
    if HASH in columns and (numbers := _numbers_by_hash(rows, columns)) is not None:
        return numbers
    # Numbers for names: polars takes a name such as "^a.*$" for a pattern.
    keys = pl.DataFrame({str(number): rows[name] for number, name in enumerate(columns)})
    places = keys.with_row_index(_PLACE).group_by(keys.columns, maintain_order=True).agg(_PLACE)
    lists = places[_PLACE]
    lengths = lists.list.len().to_numpy()
    numbers = np.empty(rows.height, np.int64)
    numbers[lists.explode().to_numpy()] = np.repeat(np.arange(len(lengths)), lengths)
    return numbers


def _numbers_by_hash(rows: pl.DataFrame, columns: Sequence[str]) -> Int64s | None:
    """Return the numbers of groups where rows with one ``__hash`` are equal; None if some are not.

    It sorts whole numbers instead of grouping by all columns, which takes a third of the time.
    """
    if any(rows[name].dtype.is_nested() for name in columns):
        return None
    hashes = rows[HASH].to_numpy()
    order = np.argsort(hashes)
    rising = hashes[order]
    begins = np.ones(len(order), np.bool_)
    np.not_equal(rising[1:], rising[:-1], out=begins[1:])
    for name in columns:
        if name != HASH:
            values = rows[name].alias(_PLACE)[order]  # polars takes some names for patterns
            if not (begins[1:] | values[1:].eq_missing(values[:-1]).to_numpy()).all():
                return None
    starts = np.flatnonzero(begins)
    first = np.minimum.reduceat(order, starts)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.repeat(number, np.diff(starts, append=len(order)))
    return numbers
