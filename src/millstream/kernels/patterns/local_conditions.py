"""Conditions of row patterns that say the same of a row wherever a match begins, for whole tables.

A condition may look at the row, and at rows that stand so many places before it in the key. Where its variable has at least as
many rows of the match before it, these are always there: so what it says does not depend on the match. It is then worked out for
all rows at once, and the matcher reads it as it reads what a row alone says (gates).

Operations, null and NaN are those of :mod:`millstream.kernels.patterns.programs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millstream.kernels.arrays import Bools, Float64s, Int64s
from millstream.kernels.patterns import programs as p
from millstream.kernels.patterns.row_conditions import RowConditions
from millstream.kernels.patterns.tables import Bytes, Places


def local_conditions(
    compiled: RowConditions, variables: Sequence[str], before: Mapping[str, int]
) -> tuple[bool, ...]:
    """Return which conditions are such; ``before``: of a variable how many rows of a match are before a row of it at least."""
    return tuple(
        _is_local(compiled, number, before.get(variable, 0))
        for number, variable in enumerate(variables)
    )


def _is_local(compiled: RowConditions, number: int, before: int) -> bool:
    navigations = [compiled.navigations[at] for at in compiled.navigations_of[number]]
    rows_before = all(
        one.variables == compiled.every
        and not one.is_first
        and not one.logical
        and one.value >= 0
        and -before <= one.physical <= 0
        for one in navigations
    )
    registers = [
        argument
        for operation, argument in compiled.programs[number]
        if operation in (p.MATCHED_I, p.MATCHED_F) and argument >= 0
    ]
    return rows_before and not registers


@dataclass(frozen=True)
class RowValues:
    """The values of rows, as [value, row]: whole numbers, floating ones, and where they are null."""

    whole: Places
    floating: Float64s
    null: Bytes

    def at(self, value: int, back: int) -> _Column:
        """Return a value of the rows that stand so many places before each."""
        count = self.null.shape[1]
        rows = np.maximum(np.arange(count) - back, 0) if back else slice(None)
        return _Column(
            self.whole[value][rows], self.floating[value][rows], self.null[value][rows] != 0
        )


@dataclass(frozen=True)
class _Column:
    """One place of the stack, for all rows."""

    whole: Int64s
    floating: Float64s
    null: Bools


def truths(compiled: RowConditions, number: int, values: RowValues) -> Bools:
    """Return for all rows whether the program of a condition holds: null is false."""
    stack: list[_Column] = []
    with np.errstate(all="ignore"):
        for operation, argument in compiled.programs[number]:
            if operation in (p.ROW_I, p.ROW_F):
                stack.append(values.at(argument, 0))
            elif operation in (p.MATCHED_I, p.MATCHED_F):
                one = compiled.navigations[-argument - 1]
                stack.append(values.at(one.value, -one.physical))
            elif operation == p.TO_FLOAT_BELOW:
                stack[-2] = _of_one(stack[-2], p.TO_FLOAT)
            elif operation == p.SWAP:
                stack[-2:] = stack[-1], stack[-2]
            elif operation in _OF_ONE:
                stack[-1] = _of_one(stack[-1], operation)
            else:
                above = stack.pop()
                stack[-1] = _of_two(stack[-1], above, operation)
    holds: Bools = (stack[0].whole != 0) & ~stack[0].null
    return holds


_OF_ONE = {
    *(p.TO_FLOAT, p.NEGATE_I, p.NEGATE_F, p.ABS_I, p.ABS_F),
    *(p.NOT, p.IS_NULL, p.IS_NOT_NULL),
}


def _of_one(one: _Column, operation: int) -> _Column:
    whole, floating, null = one.whole, one.floating, one.null
    if operation == p.TO_FLOAT:
        floating = whole.astype(np.float64)
    elif operation == p.NEGATE_I:
        whole = -whole
    elif operation == p.NEGATE_F:
        floating = -floating
    elif operation == p.ABS_I:
        whole = np.abs(whole)
    elif operation == p.ABS_F:
        floating = np.abs(floating)
    elif operation == p.NOT:
        whole = 1 - whole
    else:
        whole = (null if operation == p.IS_NULL else ~null).astype(np.int64)
        null = np.zeros(len(null), np.bool_)
    return _Column(whole, floating, null)


def _of_two(one: _Column, two: _Column, operation: int) -> _Column:
    if operation in (p.AND, p.OR):
        return _logic(one, two, int(operation == p.OR))
    null = one.null | two.null
    if operation <= p.MUL_I:
        made = {p.ADD_I: np.add, p.SUB_I: np.subtract, p.MUL_I: np.multiply}[operation]
        return _Column(made(one.whole, two.whole), one.floating, null)
    if operation <= p.DIV_F:
        made = {p.ADD_F: np.add, p.SUB_F: np.subtract, p.MUL_F: np.multiply, p.DIV_F: np.divide}[
            operation
        ]
        return _Column(one.whole, made(one.floating, two.floating), null)
    if operation <= p.LE_I:
        compare = {p.EQ_I: np.equal, p.NE_I: np.not_equal, p.LT_I: np.less, p.LE_I: np.less_equal}
        found = compare[operation](one.whole, two.whole)
    else:
        found = _compared_floats(one.floating, two.floating, operation)
    return _Column(found.astype(np.int64), one.floating, null)


def _logic(one: _Column, two: _Column, decides: int) -> _Column:
    """Return both, or one of both: of two truths one decides, whatever the other is, and that may be null."""
    decided = (~one.null & (one.whole == decides)) | (~two.null & (two.whole == decides))
    whole = np.where(decided, decides, 1 - decides)
    return _Column(whole, one.floating, ~decided & (one.null | two.null))


def _compared_floats(a: Float64s, b: Float64s, operation: int) -> Bools:
    """Compare floats as polars does: NaN is equal to NaN, and above all other numbers."""
    a_nan, b_nan = np.isnan(a), np.isnan(b)
    equal: Bools = (a == b) | (a_nan & b_nan)
    if operation == p.EQ_F:
        return equal
    if operation == p.NE_F:
        return ~equal
    less: Bools = ~a_nan & (b_nan | (a < b))
    return less if operation == p.LT_F else less | equal
