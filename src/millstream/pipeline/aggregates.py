"""The aggregates of ``agg(name=...)``.

All leave nulls out, and give the same result in any batches, unless stated otherwise. A value is a column's
name, or a polars expression that makes one value per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Literal

import polars as pl

from millstream.choices import choose
from millstream.errors import ConfigError
from millstream.kernels.aggregates.count import Count
from millstream.kernels.aggregates.distribution import DistinctValues, Quantiles, TopValues
from millstream.kernels.aggregates.event_order import CollectList, Pick
from millstream.kernels.aggregates.extremes import Extreme
from millstream.kernels.aggregates.protocol import Aggregate
from millstream.kernels.aggregates.sketches import frequent_items, hll, kll
from millstream.kernels.aggregates.sketches.frequent_items import FrequentItems
from millstream.kernels.aggregates.sketches.hll import Hll
from millstream.kernels.aggregates.sketches.kll import Kll
from millstream.kernels.aggregates.sums import Mean, Sum
from millstream.kernels.aggregates.user_defined import UserAggregate, UserDefined
from millstream.kernels.aggregates.variance import Variance
from millstream.pipeline.checks import whole_number
from millstream.pipeline.expressions import Column, as_expression

_Fraction = float | str | Decimal | Fraction


def count(condition: Column | None = None) -> Aggregate:
    """Count the rows; with a condition, those for which it is true (null counts as false).

    Example: ``ms.count(pl.col("kind") == "click")``.
    """
    return Count(None if condition is None else as_expression(condition, what="count's condition"))


def sum(value: Column) -> Aggregate:  # noqa: A001 - its name in every query language
    """Sum a number or duration over the rows; the sum of none is 0.

    Sums of whole numbers (Int64), Decimals and durations are exact; one that does not fit its type
    stops the job and says so. Sums of floats are exact and rounded once, so they are the same to
    the last bit in whatever order the rows came, and whatever was retracted; never -0.0.
    """
    return Sum(as_expression(value, what="sum's value"))


def mean(value: Column) -> Aggregate:
    """Average a number or duration over the rows that have one; null where none has.

    It is the sum (see :func:`sum`) over the count: a float, or for a Decimal or duration the same
    type, rounded to its last place.
    """
    return Mean(as_expression(value, what="mean's value"))


def variance(value: Column, *, population: bool = False) -> Aggregate:
    """Return the variance of a number, as a float, of a sample or with ``population`` of all there is.

    Null where no row has a value and, for a sample, where only one has. Computed exactly and rounded
    once, so it is sound even where the mean is many times the spread.
    """
    expression = as_expression(value, what="variance's value")
    return Variance(expression, sample=not population)


def stddev(value: Column, *, population: bool = False) -> Aggregate:
    """Return the standard deviation of a number: the root of :func:`variance`."""
    expression = as_expression(value, what="stddev's value")
    return Variance(expression, sample=not population, root=True)


def min(value: Column) -> Aggregate:  # noqa: A001
    """Return the smallest value; null where no row has one.

    Numbers, text, bytes, booleans, dates, times and durations. A float that is not a number counts
    only where there is nothing else.
    """
    return Extreme(as_expression(value, what="min's value"), greatest=False)


def max(value: Column) -> Aggregate:  # noqa: A001
    """Return the greatest value; see :func:`min`."""
    return Extreme(as_expression(value, what="max's value"), greatest=True)


def first(value: Column) -> Aggregate:
    """Return the value of the row with the earliest event time; null where no row has a value.

    Of rows with the same time, the one that comes first in the log (by stream, partition, offset).
    """
    return Pick(as_expression(value, what="first's value"), "first")


def last(value: Column) -> Aggregate:
    """Return the value of the row with the latest event time; see :func:`first`."""
    return Pick(as_expression(value, what="last's value"), "last")


def min_by(value: Column, by: Column) -> Aggregate:
    """Return the value of the row where ``by`` is smallest; of several such rows, the first.

    Rows in which either is null are left out.
    """
    by = as_expression(by, what="min_by's by")
    return Pick(as_expression(value, what="min_by's value"), "min_by", by)


def max_by(value: Column, by: Column) -> Aggregate:
    """Return the value of the row where ``by`` is greatest; of several such rows, the first."""
    by = as_expression(by, what="max_by's by")
    return Pick(as_expression(value, what="max_by's value"), "max_by", by)


def list(value: Column) -> Aggregate:  # noqa: A001
    """Collect all values, in order of event time, and of log order where times are equal.

    The state holds every value of a key. Over rows that can be retracted, values are sorted.
    """
    return CollectList(as_expression(value, what="list's value"))


def set(value: Column) -> Aggregate:  # noqa: A001
    """Collect the different values, sorted. The state holds each of them."""
    return DistinctValues(as_expression(value, what="set's value"), counted=False)


def distinct(
    value: Column,
    *,
    method: Literal["exact", "hll"] = "exact",
    lg_k: int = 12,
    of_sketches: bool = False,
) -> Aggregate:
    """Count the different values.

    Args:
        method: ``"exact"`` holds every different value. ``"hll"`` holds a sketch (see
            :func:`hll_sketch`) of at most 2^lg_k bytes, with a relative standard error of 1.04 /
            sqrt(2^lg_k), that is 1.6 % for 12; repeated values never change it.
        lg_k: 4 to 21.
        of_sketches: The values are such sketches, made before with the same ``lg_k``; count what
            all of them together have seen.
    """
    expression = as_expression(value, what="distinct's value")
    if _is_exact(method, "hll", "distinct", of_sketches=of_sketches):
        return DistinctValues(expression, counted=True)
    whole_number(lg_k, hll.LG_K_MIN, hll.LG_K_MAX, "distinct's lg_k")
    return Hll(expression, of_sketches=of_sketches, lg_k=lg_k)


def quantile(
    value: Column,
    q: _Fraction,
    *,
    method: Literal["exact", "kll"] = "exact",
    k: int = 200,
    of_sketches: bool = False,
) -> Aggregate:
    """Return the value that a share ``q`` of all values is not above; null where there is none.

    It is the nearest rank, one of the values (SQL's ``percentile_disc``): 0 gives the smallest, 0.5
    the median, 1 the greatest.

    Args:
        q: 0 to 1; taken as written, so that 0.7 is seven tenths.
        method: ``"exact"`` takes values of any type that can be sorted, and holds the different
            ones. ``"kll"`` takes numbers and holds a sketch of about 3 KiB (see :func:`kll_sketch`);
            the rank of its result is within 1.33 % in 99 of 100 cases, for ``k`` = 200.
        k: 8 to 65535; the error falls as 1 / k^0.9.
        of_sketches: The values are such sketches, made before with the same ``k``.
    """
    return _quantiles(value, (q,), "quantile", method, k, of_sketches=of_sketches)


def quantiles(
    value: Column,
    qs: Sequence[_Fraction],
    *,
    method: Literal["exact", "kll"] = "exact",
    k: int = 200,
    of_sketches: bool = False,
) -> Aggregate:
    """Return several quantiles as a list, in the order asked for; empty where there is no value.

    See :func:`quantile`.
    """
    if isinstance(qs, str) or not isinstance(qs, Sequence) or not qs:
        raise ConfigError(f"quantiles' qs is {qs!r}. Give a list of shares, such as [0.5, 0.99].")
    return _quantiles(value, tuple(qs), "quantiles", method, k, of_sketches=of_sketches)


def _quantiles(
    value: Column,
    qs: tuple[_Fraction, ...],
    word: str,
    method: str,
    k: int,
    *,
    of_sketches: bool,
) -> Aggregate:
    expression = as_expression(value, what=f"{word}'s value")
    shares = tuple(_share(q, word) for q in qs)
    several = word == "quantiles"
    if _is_exact(method, "kll", word, of_sketches=of_sketches):
        return Quantiles(expression, shares=shares, several=several)
    whole_number(k, kll.K_MIN, kll.K_MAX, f"{word}'s k")
    return Kll(
        expression,
        of_sketches=of_sketches,
        k=k,
        shares=tuple(float(share) for share in shares),
        several=several,
    )


def top_k(
    value: Column,
    k: int,
    *,
    method: Literal["exact", "frequent_items"] = "exact",
    lg_size: int = 10,
    of_sketches: type[str | int] | None = None,
) -> Aggregate:
    """Return the most frequent values with their counts, most frequent first; ties by value.

    The result is a list of ``{value, count}``, of ``k`` at most.

    Args:
        method: ``"exact"`` holds every different value with its count. ``"frequent_items"`` takes
            text and whole numbers and holds a sketch (see :func:`frequent_items_sketch`); its results
            also have ``count_min``, and the true count is between the two, which are at most
            3.5 / 2^lg_size of all values apart; every value more frequent than that is known.
        lg_size: 3 to 26.
        of_sketches: The values are such sketches, made before, of ``str`` or of ``int``.
    """
    expression = as_expression(value, what="top_k's value")
    whole_number(k, 1, 1_000_000, "top_k's k")
    if _is_exact(method, "frequent_items", "top_k", of_sketches=of_sketches is not None):
        return TopValues(expression, k=k)
    return _frequent(expression, k, lg_size, of_sketches, "top_k", as_sketch=False)


def _frequent(
    value: pl.Expr, k: int, lg_size: int, items: type | None, word: str, *, as_sketch: bool
) -> Aggregate:
    whole_number(
        lg_size, frequent_items.LG_SIZE_MIN, frequent_items.LG_SIZE_MAX, f"{word}'s lg_size"
    )
    if items not in (None, str, int):
        raise ConfigError(f"{word}'s of_sketches is {items!r}. Give str, int or None.")
    types: dict[type | None, pl.DataType | None] = {str: pl.String(), int: pl.Int64()}
    return FrequentItems(
        value,
        as_sketch=as_sketch,
        of_sketches=items is not None,
        k=k,
        lg_size=lg_size,
        items=types.get(items),
    )


def hll_sketch(value: Column, *, lg_k: int = 12, of_sketches: bool = False) -> Aggregate:
    """Return a HyperLogLog sketch of the values, as bytes, to be merged later.

    :func:`distinct` with ``of_sketches`` counts what such sketches have seen, and so do Spark's
    ``hll_sketch_estimate`` and ``hll_union_agg``. A sketch of no values is a sketch, not null.

    Args:
        lg_k: The size: 4 to 21; see :func:`distinct`.
        of_sketches: The values are sketches, to be merged into one.
    """
    whole_number(lg_k, hll.LG_K_MIN, hll.LG_K_MAX, "hll_sketch's lg_k")
    expression = as_expression(value, what="hll_sketch's value")
    return Hll(expression, as_sketch=True, of_sketches=of_sketches, lg_k=lg_k)


def kll_sketch(value: Column, *, k: int = 200, of_sketches: bool = False) -> Aggregate:
    """Return a KLL sketch of numbers, as bytes, to be merged later.

    :func:`quantile` with ``of_sketches`` reads such sketches, and so do Spark's functions for KLL
    sketches of doubles. What a sketch of more than ``k`` values keeps depends on where batches end,
    within the stated error; a batch that is repeated gives the same bytes.

    Args:
        k: The size: 8 to 65535; see :func:`quantile`.
        of_sketches: The values are sketches, to be merged into one.
    """
    whole_number(k, kll.K_MIN, kll.K_MAX, "kll_sketch's k")
    expression = as_expression(value, what="kll_sketch's value")
    return Kll(expression, as_sketch=True, of_sketches=of_sketches, k=k)


def frequent_items_sketch(
    value: Column, *, lg_size: int = 10, of_sketches: type[str | int] | None = None
) -> Aggregate:
    """Return a frequent-items sketch of text or whole numbers, as bytes, to be merged later.

    :func:`top_k` with ``of_sketches`` reads such sketches.

    Args:
        lg_size: The size: 3 to 26; see :func:`top_k`.
        of_sketches: The values are sketches, of ``str`` or of ``int``, to be merged into one.
    """
    expression = as_expression(value, what="frequent_items_sketch's value")
    return _frequent(expression, 1, lg_size, of_sketches, "frequent_items_sketch", as_sketch=True)


def aggregate(own: UserAggregate, *values: Column) -> Aggregate:
    """Aggregate with your own class: see :class:`UserAggregate`.

    With one column, ``add`` gets its values; with several, dicts of them by name.
    """
    if not isinstance(own, UserAggregate):
        raise ConfigError(
            f"aggregate was given {own!r}. Give an instance of a class of yours that derives from "
            "ms.UserAggregate."
        )
    if not values:
        raise ConfigError(
            f"aggregate({type(own).__name__}()) names no column. Name those whose values it takes."
        )
    expressions = [as_expression(value, what="aggregate's value") for value in values]
    taken = expressions[0] if len(expressions) == 1 else pl.struct(*expressions)
    return UserDefined(taken, own)


def _is_exact(method: str, other: str, word: str, *, of_sketches: bool) -> bool:
    choose(f"{word}'s method", method, ("exact", other))
    if of_sketches and method == "exact":
        raise ConfigError(
            f'{word} is over sketches, which give no exact result. Set method="{other}".'
        )
    return method == "exact"


def _share(q: _Fraction, word: str) -> Fraction:
    try:
        share = Fraction(str(q)) if not isinstance(q, float) or math.isfinite(q) else None
    except (ValueError, ZeroDivisionError):
        share = None
    if share is None or not 0 <= share <= 1:
        raise ConfigError(f"{word}'s q is {q!r}. Allowed are shares from 0 to 1, such as 0.95.")
    return share
