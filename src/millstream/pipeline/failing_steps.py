"""Which steps may fail on a row, as far as their expressions say.

Arithmetic and comparisons of numbers never fail in polars: whole numbers go round, and what is divided by zero is
infinite or null. Of everything else it is supposed that it may.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import polars as pl

from millstream.kernels.map_frames import MapFrames
from millstream.kernels.steps import Select, Step, WithColumns
from millstream.pipeline.schema import ColumnTypes

_OPERATORS = frozenset(
    {"Plus", "Minus", "Multiply", "TrueDivide", "And", "Or"}
    | {"Eq", "NotEq", "Lt", "LtEq", "Gt", "GtEq"}
)
_FUNCTIONS = ("FillNull", {"Boolean": "IsNull"}, {"Boolean": "IsNotNull"}, {"Boolean": "Not"})
_BITS = (8, 16, 32, 64)
_SCALARS = frozenset(
    {
        "Boolean",
        "Float32",
        "Float64",
        "Null",
        *(f"{kind}{n}" for kind in ("Int", "UInt") for n in _BITS),
    }
)
_UNSCALED_MAX, _SCALE_MAX = 10**18, 18  # times any whole number of 64 bits it has 38 digits


def may_fail(step: Step, columns: ColumnTypes) -> bool:
    """Return whether a step that gives a row for each row may fail on one."""
    if isinstance(step, MapFrames):
        return True
    if not isinstance(step, (Select, WithColumns)):
        return False
    return not all(_never_fails(expression, columns) for expression in step.expressions)


def _never_fails(expression: pl.Expr, columns: ColumnTypes) -> bool:
    if expression.meta.undo_aliases().meta.is_column():
        return True
    try:
        tree = json.loads(expression.meta.serialize(format="json"))
    except pl.exceptions.PolarsError:  # a function that cannot be packed
        return False
    return _is_arithmetic(tree, columns)


def _is_arithmetic(tree: Any, columns: ColumnTypes) -> bool:
    """Return whether an expression, as polars writes it down, is arithmetic of numbers."""
    if not isinstance(tree, dict) or len(tree) != 1:
        return False
    ((kind, node),) = tree.items()
    found = False
    if kind == "Column":
        found = _is_number(columns.get(node))
    elif kind == "Literal":
        found = _is_number_literal(node)
    elif kind == "Alias":
        found = _is_arithmetic(node[0], columns)
    elif kind == "Ternary":
        found = _all_arithmetic(list(node.values()), columns)
    elif kind == "Function":
        found = node.get("function") in _FUNCTIONS and _all_arithmetic(node["input"], columns)
    elif kind == "BinaryExpr":
        found = _is_of_numbers(node["left"], node["op"], node["right"], columns)
    return found


def _is_of_numbers(left: Any, operator: str, right: Any, columns: ColumnTypes) -> bool:
    if _is_whole(left, columns) and _is_short_decimal(right):
        return operator == "Multiply"
    return operator in _OPERATORS and _all_arithmetic([left, right], columns)


def _all_arithmetic(trees: Sequence[Any], columns: ColumnTypes) -> bool:
    return all(_is_arithmetic(tree, columns) for tree in trees)


def _is_number(dtype: pl.DataType | None) -> bool:
    return dtype is not None and (
        dtype.is_integer() or dtype.is_float() or isinstance(dtype, pl.Boolean)
    )


def _is_number_literal(node: Any) -> bool:
    """Return whether a literal is a number that is not a Decimal, or null."""
    value = node.get("Scalar", {}) if isinstance(node, dict) else {}
    return "Dyn" in node or (isinstance(value, dict) and bool(value) and set(value) <= _SCALARS)


def _is_whole(tree: Any, columns: ColumnTypes) -> bool:
    dtype = columns.get(tree.get("Column", "")) if isinstance(tree, dict) else None
    return dtype is not None and dtype.is_integer() and dtype not in (pl.Int128, pl.UInt128)


def _is_short_decimal(tree: Any) -> bool:
    scalar = tree.get("Literal", {}).get("Scalar", {}) if isinstance(tree, dict) else {}
    if not isinstance(scalar, dict) or "Decimal" not in scalar:
        return False
    unscaled, _, scale = scalar["Decimal"]
    return bool(abs(unscaled) < _UNSCALED_MAX and scale <= _SCALE_MAX)
