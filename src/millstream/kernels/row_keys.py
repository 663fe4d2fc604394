"""Which columns identify a row behind stateless steps, if some do before them."""

from __future__ import annotations

import polars as pl

from millstream.kernels.steps import (
    AssignBranch,
    Drop,
    Filter,
    Rename,
    Select,
    SelectBranch,
    Step,
    WithColumns,
)


def row_key_after(step: Step, key: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the columns that identify a row behind a step; None if that is not known.

    A step that leaves a column of the key out, or makes it anew, may make rows equal.
    """
    if key is None or isinstance(step, (Filter, AssignBranch, SelectBranch)):
        return key
    if isinstance(step, Rename):
        names = dict(step.names)
        return tuple(names.get(column, column) for column in key)
    kept: set[str] = set()
    if isinstance(step, Drop):
        kept = set(key) - set(step.columns)
    elif isinstance(step, WithColumns):
        kept = set(key) - {
            e.meta.output_name(raise_if_undetermined=False) for e in step.expressions
        }
        kept = set() if any(e.meta.has_multiple_outputs() for e in step.expressions) else kept
    elif isinstance(step, Select):
        names = {
            c: n for c in key for e in step.expressions if (n := _name_given(e, c)) is not None
        }
        return tuple(names[column] for column in key) if len(names) == len(key) else None
    return key if kept == set(key) else None


def _name_given(expression: pl.Expr, column: str) -> str | None:
    """Return the name under which an expression gives a column as it is; None if it is another one."""
    if not expression.meta.undo_aliases().meta.eq(pl.col(column)):
        return None
    return expression.meta.output_name(raise_if_undetermined=False)
