"""Constraints on single values: checked for one value, or for a whole column at once.

Both ways give the same result: patterns are searched by one engine (Rust's, which pydantic uses as
well), comparisons are those of IEEE numbers, lengths count characters, bytes or elements.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

Rule = Literal[
    "ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern", "one_of", "finite"
]

# How far a float may lie from a multiple, relative to itself, and still be one: pydantic's number.
_FLOAT_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Constraint:
    """One constraint. ``limit`` is what the rule compares with; None for ``finite``."""

    rule: Rule
    limit: Any = None

    def holds(self, value: Any) -> bool:
        """Whether a value that is not null satisfies the constraint."""
        return bool(_RULES[self.rule].one(value, self.limit))

    def holds_in(self, column: pa.Array) -> pa.Array:
        """Whether each value of a column satisfies the constraint; null for null."""
        return _RULES[self.rule].many(column, self.limit)

    @property
    def requirement(self) -> str:
        """What the constraint asks for, as the end of a sentence: ``must be >= 0``."""
        limit = self.limit
        if self.rule == "one_of":
            limit = ", ".join(map(repr, limit))
        return _RULES[self.rule].demand.format(repr(limit) if self.rule == "pattern" else limit)


@dataclass(frozen=True)
class _Rule:
    """A rule: for one value, for a column, and in words."""

    one: Callable[[Any, Any], Any]
    many: Callable[[pa.Array, Any], pa.Array]
    demand: str


def _compared(compare: Callable[[pa.Array, pa.Scalar], pa.Array]) -> Callable[[Any, Any], Any]:
    def many(column: pa.Array, limit: Any) -> pa.Array:
        fraction = pa.types.is_integer(column.type) and isinstance(limit, float)
        return compare(column, pa.scalar(limit, None if fraction else column.type))

    return many


def _lengths(column: pa.Array) -> pa.Array:
    if pa.types.is_string(column.type):
        return pc.utf8_length(column)
    if pa.types.is_binary(column.type):
        return pc.binary_length(column)
    return pc.list_value_length(column)


def _is_multiple(value: Any, of: Any) -> bool:
    if isinstance(value, float):
        if not math.isfinite(value):
            return False
        rest = abs(math.fmod(value, float(of)))
        tolerance = abs(value) * _FLOAT_TOLERANCE
        return rest <= tolerance or abs(rest - abs(float(of))) <= tolerance
    if isinstance(value, Decimal) or isinstance(of, float | Decimal):
        return Decimal(value) % Decimal(str(of)) == 0
    return bool(value % of == 0)


def _one_of(column: pa.Array, allowed: tuple[Any, ...]) -> pa.Array:
    found = pc.is_in(column, pa.array(allowed, column.type))
    return pc.if_else(column.is_valid(), found, None)


def _matching(column: pa.Array, pattern: str) -> pa.Array:
    return pl.Series(column).cast(pl.String).str.contains(pattern).to_arrow()


def _multiples(column: pa.Array, of: Any) -> pa.Array:
    held = [None if value is None else _is_multiple(value, of) for value in column.to_pylist()]
    return pa.array(held, pa.bool_())


_RULES: dict[Rule, _Rule] = {
    "ge": _Rule(operator.ge, _compared(pc.greater_equal), "must be >= {}"),
    "gt": _Rule(operator.gt, _compared(pc.greater), "must be > {}"),
    "le": _Rule(operator.le, _compared(pc.less_equal), "must be <= {}"),
    "lt": _Rule(operator.lt, _compared(pc.less), "must be < {}"),
    "multiple_of": _Rule(_is_multiple, _multiples, "must be a multiple of {}"),
    "min_length": _Rule(
        lambda value, limit: len(value) >= limit,
        lambda column, limit: pc.greater_equal(_lengths(column), limit),
        "must have a length of at least {}",
    ),
    "max_length": _Rule(
        lambda value, limit: len(value) <= limit,
        lambda column, limit: pc.less_equal(_lengths(column), limit),
        "must have a length of at most {}",
    ),
    "pattern": _Rule(
        lambda value, pattern: pl.Series([value]).str.contains(pattern)[0],
        _matching,
        "must match {}",
    ),
    "one_of": _Rule(lambda value, allowed: value in allowed, _one_of, "must be one of {}"),
    "finite": _Rule(
        lambda value, _: math.isfinite(value),
        lambda column, _: pc.is_finite(column),
        "must be a finite number",
    ),
}
