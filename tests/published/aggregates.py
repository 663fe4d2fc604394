"""What aggregates mean, over all rows of a window at once: exact arithmetic, sorted lists."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import polars as pl
from published.rules import Row

import millstream as ms


@dataclass(frozen=True)
class Drawn:
    """An aggregate as the library has it, and as the rules say it."""

    declared: Any
    meant: Callable[[list[Row]], Any]
    ordered: bool = False  # whether rows at one time need a place in the log


def values_of(rows: list[Row], column: str) -> list[Any]:
    return [row.values[column] for row in rows if row.values[column] is not None]


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.time, row.place))


def added(numbers: list[Any]) -> Any:
    """The sum, exact and rounded once; floats follow IEEE 754 where one is not finite."""
    if not any(isinstance(number, float) for number in numbers):
        return sum(numbers)
    special = [number for number in numbers if not math.isfinite(number)]
    if special:
        return sum(special)
    return float(sum(map(Fraction, numbers), Fraction(0)))


def total(column: str, *, floats: bool) -> Callable[[list[Row]], Any]:
    return lambda rows: (
        added(values_of(rows, column)) if values_of(rows, column) else (0.0 if floats else 0)
    )


def mean(column: str) -> Callable[[list[Row]], Any]:
    def of(rows: list[Row]) -> float | None:
        numbers = values_of(rows, column)
        if not numbers:
            return None
        if any(isinstance(n, float) and not math.isfinite(n) for n in numbers):
            return added(numbers) / len(numbers)
        return float(sum(map(Fraction, numbers)) / len(numbers))

    return of


def variance(column: str) -> Callable[[list[Row]], Any]:
    def of(rows: list[Row]) -> float | None:
        numbers = [Fraction(number) for number in values_of(rows, column)]
        if len(numbers) < 2:
            return None
        middle = sum(numbers) / len(numbers)
        return float(sum((n - middle) ** 2 for n in numbers) / (len(numbers) - 1))

    return of


def extreme(column: str, *, greatest: bool) -> Callable[[list[Row]], Any]:
    def of(rows: list[Row]) -> Any:
        every = values_of(rows, column)
        sound = [value for value in every if value == value]
        if not sound:
            return every[0] if every else None
        return max(sound) if greatest else min(sound)

    return of


def picked(column: str, *, last: bool) -> Callable[[list[Row]], Any]:
    """The value that comes first, or last, in the order of time, and of the log where times are equal."""

    def of(rows: list[Row]) -> Any:
        having = values_of(in_order(rows), column)
        return having[-1 if last else 0] if having else None

    return of


def picked_by(column: str, by: str, *, greatest: bool) -> Callable[[list[Row]], Any]:
    def of(rows: list[Row]) -> Any:
        both = (column, by)
        having = [row for row in in_order(rows) if None not in (row.values[c] for c in both)]
        if not having:
            return None
        most = (max if greatest else min)(row.values[by] for row in having)
        return next(row.values[column] for row in having if row.values[by] == most)

    return of


def quantile(column: str, share: Fraction) -> Callable[[list[Row]], Any]:
    def of(rows: list[Row]) -> Any:
        ranked = sorted(values_of(rows, column))
        return ranked[max(math.ceil(share * len(ranked)), 1) - 1] if ranked else None

    return of


def top(column: str, k: int) -> Callable[[list[Row]], Any]:
    def of(rows: list[Row]) -> list[Any]:
        counted = Counter(values_of(rows, column))
        best = sorted(counted.items(), key=lambda item: (-item[1], item[0]))[:k]
        return [{"value": value, "count": count} for value, count in best]

    return of


def counted(rows: list[Row]) -> int:
    return len(rows)


def drawn_from(integer: str, real: str | None, text: str | None, *, ordered: bool) -> list[Drawn]:
    """The aggregates that can be drawn over columns of these types."""
    tenth = pl.col(integer) > 3
    made = [
        Drawn(ms.count(), counted),
        Drawn(ms.count(tenth), lambda rows: sum(v > 3 for v in values_of(rows, integer))),
        Drawn(ms.sum(integer), total(integer, floats=False)),
        Drawn(ms.mean(integer), mean(integer)),
        Drawn(ms.variance(integer), variance(integer)),
        Drawn(ms.min(integer), extreme(integer, greatest=False)),
        Drawn(ms.max(integer), extreme(integer, greatest=True)),
        Drawn(ms.distinct(integer), lambda rows: len(set(values_of(rows, integer)))),
        Drawn(ms.set(integer), lambda rows: sorted(set(values_of(rows, integer)))),
        Drawn(ms.quantile(integer, 0.3), quantile(integer, Fraction(3, 10))),
        Drawn(ms.top_k(integer, 2), top(integer, 2)),
    ]
    if real is not None:
        made += [
            Drawn(ms.sum(real), total(real, floats=True)),
            Drawn(ms.mean(real), mean(real)),
            Drawn(ms.min(real), extreme(real, greatest=False)),
            Drawn(ms.max(real), extreme(real, greatest=True)),
        ]
    if ordered:
        value = text or integer
        made += [
            Drawn(ms.first(value), picked(value, last=False), ordered=True),
            Drawn(ms.last(value), picked(value, last=True), ordered=True),
            Drawn(ms.list(value), lambda rows: values_of(in_order(rows), value), ordered=True),
            Drawn(
                ms.min_by(value, integer), picked_by(value, integer, greatest=False), ordered=True
            ),
            Drawn(
                ms.max_by(value, integer), picked_by(value, integer, greatest=True), ordered=True
            ),
        ]
    return made
