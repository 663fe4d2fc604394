"""Row patterns over a stream: checked where they are declared, and built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import polars as pl

from millstream.choices import choose, did_you_mean
from millstream.errors import ConfigError
from millstream.kernels.errors.user_code import OnError, UserCode
from millstream.kernels.patterns.conditions import matched_in
from millstream.kernels.patterns.measures import MATCH_END, MATCH_START
from millstream.kernels.patterns.row_measures import RowMeasures, RowsPerMatch
from millstream.kernels.patterns.row_operator import RowPatternMatch
from millstream.kernels.patterns.row_pattern import (
    Anchor,
    Exclusion,
    first_variables,
    later_variables,
    nodes,
    rows_most,
)
from millstream.kernels.patterns.row_references import RowReference, readable, references_in
from millstream.pipeline.checks import declared_at, require_free, require_unreserved, type_of
from millstream.pipeline.expressions import Column, as_expression
from millstream.pipeline.patterns import require_condition
from millstream.pipeline.row_patterns import RowPattern
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StreamShape, check_events, late_columns_of


def build_match_recognize(
    shape: StreamShape,
    pattern: RowPattern,
    by: tuple[str, ...],
    *,
    measures: Mapping[str, Column] | None,
    rows_per_match: RowsPerMatch,
    unbounded: bool,
    name: str | None,
    on_error: OnError,
) -> tuple[RowPatternMatch, StreamShape]:
    """Check what is declared; return the operator, and the shape of its rows."""
    if not isinstance(pattern, RowPattern):
        raise ConfigError(
            f'match_recognize is given {pattern!r}. Give a row pattern: ms.row_pattern("A B+", define=…).'
        )
    choose("rows_per_match", rows_per_match, get_args(RowsPerMatch))
    check_events(shape, "match_recognize")
    _check_conditions(pattern, shape.columns)
    _check_pattern(pattern, rows_per_match)
    made, types = _measures(shape.columns, by, measures or {}, pattern, rows_per_match)
    late_columns = late_columns_of(shape, "match_recognize")
    step = shape.names.unique(name or f"match_recognize({pattern.text})")
    kernel = RowPatternMatch(
        step,
        by,
        pattern.node,
        pattern.variables,
        pattern.conditions,
        pattern.subsets,
        pattern.within_us,
        pattern.skip,
        pattern.skip_to,
        made,
        tuple(shape.columns.items()),
        shape.lateness_us,
        late_columns is not None,
        UserCode(step, declared_at(), on_error),
    )
    _ = kernel.tables  # says what cannot be compiled
    _check_bounded(pattern, kernel, unbounded=unbounded)
    # Matches are events that are never taken back, and that nothing is known to identify.
    return kernel, StreamShape(columns=types, late_columns=late_columns, names=shape.names)


# ── conditions and the pattern ──────────────────────────────────────────────────────────────


def _check_conditions(pattern: RowPattern, columns: ColumnTypes) -> None:
    for variable, condition in pattern.conditions:
        what = f"The condition of {variable!r}"
        hidden = _hidden_columns(what, condition, columns, pattern)
        for reference in references_in([condition]).values():
            if reference.final:
                raise ConfigError(
                    f"{what} looks at {reference}: a whole match is not there while rows are matched. Leave final out."
                )
        require_condition(what, condition, {**columns, **hidden}, 'pl.col("price") > 10')


def _hidden_columns(
    what: str, expression: pl.Expr, columns: ColumnTypes, pattern: RowPattern
) -> ColumnTypes:
    """Return the types of what an expression uses of matched rows.

    Raises:
        ConfigError: there is no such variable or column.
    """
    found: ColumnTypes = {}
    for name, one in references_in([expression]).items():
        if one.variable is not None and one.variable not in pattern.names:
            raise ConfigError(
                f"{what} looks at rows of {one.variable!r}. The pattern has {', '.join(pattern.names)}."
                f"{did_you_mean(one.variable, pattern.names)}"
            )
        if one.column is not None and one.column not in columns:
            raise ConfigError(
                f"{what} looks at the column {one.column!r} of matched rows. The columns there are {', '.join(columns)}."
                f"{did_you_mean(one.column, columns)}"
            )
        found[name] = one.dtype(columns)
    if matched_in([expression]):
        raise ConfigError(
            f"{what} uses ms.matched(…), which is for sequences. In row patterns say ms.variable(…)."
        )
    return found


def _check_pattern(pattern: RowPattern, rows_per_match: RowsPerMatch) -> None:
    every = list(nodes(pattern.node))
    if rows_per_match == "all_with_unmatched" and any(isinstance(one, Exclusion) for one in every):
        raise ConfigError(
            f'The pattern {pattern.text!r} has {{- -}}, and rows_per_match is "all_with_unmatched": a row that is left out would '
            'look as if it were matched by nothing. Choose "all", or leave {- -} out.'
        )
    ends = any(isinstance(one, Anchor) and one.at == "$" for one in every)
    if ends and pattern.within_us is None:
        raise ConfigError(
            f"The pattern {pattern.text!r} has $, and a stream has no last row. With a within, it is where no row follows "
            'until that is over: within="10 minutes".'
        )
    if pattern.skip in ("to_first", "to_last"):
        _check_skip(pattern)


def _check_skip(pattern: RowPattern) -> None:
    """Refuse to skip to what is the first row of every match."""
    members = set(dict(pattern.subsets).get(pattern.skip_to or "", (pattern.skip_to,)))
    takes_first = pattern.skip == "to_first" and first_variables(pattern.node) <= members
    if takes_first or not members & later_variables(pattern.node):
        raise ConfigError(
            f"after_match skips to {pattern.skip_to!r}, which is the first row of each match of {pattern.text!r}, so that the same "
            'match would be found for ever. Skip to another variable, or "to next row".'
        )


def _check_bounded(pattern: RowPattern, kernel: RowPatternMatch, *, unbounded: bool) -> None:
    if unbounded:
        return
    if kernel.numbers_matches:
        raise ConfigError(
            "match_number() is asked for, which is kept for each key for ever. Where state may grow with the keys that "
            "ever were, say so: unbounded=True."
        )
    if pattern.within_us is None and (rows_most(pattern.node) is None or kernel.rows_behind):
        what = (
            "rows before a match are looked at"
            if kernel.rows_behind
            else "a match may have any number of rows"
        )
        raise ConfigError(
            f"The pattern {pattern.text!r} has no within, and {what}, so that rows are kept for as long as no later row "
            'decides: for ever, where none comes. Say how long a match may take: within="10 minutes". Where state may grow '
            "with the keys that ever were, say so: unbounded=True."
        )


# ── measures ────────────────────────────────────────────────────────────────────────────────


def _measures(
    columns: ColumnTypes,
    by: tuple[str, ...],
    measures: Mapping[str, Column],
    pattern: RowPattern,
    rows_per_match: RowsPerMatch,
) -> tuple[RowMeasures, ColumnTypes]:
    """Return the measures, and the columns of what is emitted with their types."""
    times = pl.Datetime("us", "UTC")
    types: ColumnTypes = dict(columns)
    seen = dict(columns)
    if rows_per_match == "one":
        own: ColumnTypes = {name: columns[name] for name in by}
        require_free((MATCH_START, MATCH_END), own, "match_recognize gives its rows")
        types = {**own, MATCH_START: times, MATCH_END: times}
        seen |= {MATCH_START: times, MATCH_END: times}
    expressions = []
    for name, given in measures.items():
        require_unreserved(name, "match_recognize")
        require_free((name,), types, "match_recognize gives its rows")
        what = f"The measure {name!r}"
        expression = as_expression(given, what=what)
        hidden = _hidden_columns(what, expression, columns, pattern)
        _check_measure(what, expression, rows_per_match)
        types[name] = type_of(expression, {**seen, **hidden}, what)
        expressions.append((name, expression))
    made = RowMeasures(
        tuple(expressions),
        tuple(columns.items()),
        pattern.variables,
        pattern.subsets,
        rows_per_match,
    )
    return made, types


def _check_measure(what: str, expression: pl.Expr, rows_per_match: RowsPerMatch) -> None:
    if expression.meta.has_multiple_outputs():
        raise ConfigError(
            f"{what} is {readable(expression)}, which names columns by a pattern. Name each: a column is that of the current row."
        )
    for reference in references_in([expression]).values():
        if reference.kind == "list" and rows_per_match != "one" and not reference.final:
            raise ConfigError(
                f"{what} asks for {reference}, a list that would grow with each row. Ask for that of the whole match: "
                f"{_as_final(reference)}."
            )


def _as_final(reference: RowReference) -> str:
    return f"ms.variable({reference.variable!r}).final.list({reference.column!r})"
