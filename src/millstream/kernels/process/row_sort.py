"""Rows in the order of two columns of whole numbers: those that are in order already are left as they are."""

from __future__ import annotations

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s, stable_order


def in_order(rows: pl.DataFrame, first: str, second: str) -> pl.DataFrame:
    """Return rows by two columns of whole numbers without nulls; equal rows keep their order."""
    order = _order(rows[first].to_numpy(), rows[second].to_numpy())
    return rows if order is None else rows[order]


def _order(numbers: Int64s, ties: Int64s) -> Int64s | None:
    """Return the places of numbers in their order, and of equal ones in that of their ties; None: they are in it."""
    later, earlier = numbers[1:], numbers[:-1]
    if ((later > earlier) | ((later == earlier) & (ties[1:] >= ties[:-1]))).all():
        return None
    # Without an order of equal ones numpy sorts some ten times as fast; those are put in order after it.
    lowest, highest = int(numbers.min()), int(numbers.max())
    fits = highest - lowest < 1 << (63 - len(numbers).bit_length())
    order = stable_order(numbers - lowest) if fits else np.argsort(numbers)
    placed = numbers[order]
    equal = np.zeros(len(order), np.bool_)
    np.equal(placed[1:], placed[:-1], out=equal[1:])
    equal[:-1] |= equal[1:]
    again = np.sort(order[equal])
    order[equal] = again[np.lexsort((ties[again], numbers[again]))]
    return order
