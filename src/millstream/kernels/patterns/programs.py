"""Conditions as programs for a stack: values of the row, aggregates of matched rows, arithmetic, comparison and logic.

Null, NaN and logic are as in polars. The functions are in the part of Python that numba compiles.
"""

from __future__ import annotations

import numpy as np

from millstream.kernels.patterns.row_tables import AnyRows, AnyTables, AnyWork

# Operations of conditions. Numbers are whole (I) or floating (F).
(
    ROW_I,
    ROW_F,
    MATCHED_I,
    MATCHED_F,
    TO_FLOAT,
    TO_FLOAT_BELOW,
    ADD_I,
    SUB_I,
    MUL_I,
    ADD_F,
    SUB_F,
    MUL_F,
    DIV_F,
    NEGATE_I,
    NEGATE_F,
    ABS_I,
    ABS_F,
    EQ_I,
    NE_I,
    LT_I,
    LE_I,
    EQ_F,
    NE_F,
    LT_F,
    LE_F,
    SWAP,
    AND,
    OR,
    NOT,
    IS_NULL,
    IS_NOT_NULL,
) = range(31)


def is_true(
    tables: AnyTables, rows: AnyRows, work: AnyWork, condition: int, entry: int, row: int
) -> bool:
    """Return whether a condition holds: null is false."""
    if not rows.gates[condition, row]:
        return False
    first, end = tables.program_of[condition], tables.program_of[condition + 1]
    if first == end:
        return True
    top = -1
    for step in range(first, end):
        operation, argument = tables.operation[step], tables.argument[step]
        if operation <= MATCHED_F:
            top += 1
            _load_value(rows, work, top, operation, argument, entry, row)
        elif operation < ADD_I or NEGATE_I <= operation <= ABS_F or operation >= NOT:
            _of_one(work, top, operation)
        elif operation == SWAP:
            _swap(work, top)
        else:
            top -= 1
            _of_two(work, top, operation)
    return bool(work.stack_whole[0]) and not work.stack_null[0]


def _load_value(
    rows: AnyRows, work: AnyWork, top: int, operation: int, argument: int, entry: int, row: int
) -> None:
    if operation <= ROW_F:
        work.stack_whole[top] = rows.whole[argument, row]
        work.stack_float[top] = rows.floating[argument, row]
        work.stack_null[top] = rows.null[argument, row]
    else:
        work.stack_whole[top] = work.whole[entry, argument]
        work.stack_float[top] = work.floating[entry, argument]
        work.stack_null[top] = work.null[entry, argument]


def _of_one(work: AnyWork, top: int, operation: int) -> None:
    whole, floating, null = work.stack_whole, work.stack_float, work.stack_null
    if operation == TO_FLOAT:
        floating[top] = whole[top]
    elif operation == TO_FLOAT_BELOW:
        floating[top - 1] = whole[top - 1]
    elif operation == NEGATE_I:
        whole[top] = -whole[top]
    elif operation == NEGATE_F:
        floating[top] = -floating[top]
    elif operation == ABS_I:
        whole[top] = abs(whole[top])
    elif operation == ABS_F:
        floating[top] = abs(floating[top])
    elif operation == NOT:
        whole[top] = 1 - whole[top]
    elif operation == IS_NULL:
        whole[top], null[top] = null[top], 0
    else:
        whole[top], null[top] = 1 - null[top], 0


def _swap(work: AnyWork, top: int) -> None:
    whole, floating, null = work.stack_whole, work.stack_float, work.stack_null
    whole[top], whole[top - 1] = whole[top - 1], whole[top]
    floating[top], floating[top - 1] = floating[top - 1], floating[top]
    null[top], null[top - 1] = null[top - 1], null[top]


def _of_two(work: AnyWork, at: int, operation: int) -> None:
    """Put the result of two values, at ``at`` and above it, there. What is null makes it null, but for logic."""
    whole, floating, null = work.stack_whole, work.stack_float, work.stack_null
    if operation in (AND, OR):
        decides = int(operation == OR)  # of two truths, this one decides whatever the other is
        one, two = not null[at], not null[at + 1]
        if (one and whole[at] == decides) or (two and whole[at + 1] == decides):
            whole[at], null[at] = decides, 0
        else:
            null[at] = 0 if one and two else 1
            whole[at] = 1 - decides
        return
    null[at] = null[at] | null[at + 1]
    if operation <= MUL_I:
        a, b = whole[at], whole[at + 1]
        whole[at] = a + b if operation == ADD_I else a - b if operation == SUB_I else a * b
    elif operation <= DIV_F:
        floating[at] = _float_result(floating[at], floating[at + 1], operation)
    elif operation <= LE_I:
        whole[at] = _compared_whole(whole[at], whole[at + 1], operation)
    else:
        whole[at] = _compared_floats(floating[at], floating[at + 1], operation)


def _float_result(a: float, b: float, operation: int) -> float:
    if operation == ADD_F:
        return a + b
    if operation == SUB_F:
        return a - b
    if operation == MUL_F:
        return a * b
    if b != 0:
        return a / b
    return np.nan if a == 0 or a != a else np.copysign(np.inf, a) * np.copysign(1.0, b)  # noqa: PLR0124


def _compared_whole(a: int, b: int, operation: int) -> int:
    if operation == EQ_I:
        return int(a == b)
    if operation == NE_I:
        return int(a != b)
    return int(a < b) if operation == LT_I else int(a <= b)


def _compared_floats(a: float, b: float, operation: int) -> int:
    """Compare floats as polars does: NaN is equal to NaN, and above all other numbers."""
    a_nan, b_nan = a != a, b != b  # noqa: PLR0124
    equal = a == b or (a_nan and b_nan)
    if operation == EQ_F:
        return int(equal)
    if operation == NE_F:
        return int(not equal)
    less = not a_nan and (b_nan or a < b)
    return int(less) if operation == LT_F else int(less or equal)
