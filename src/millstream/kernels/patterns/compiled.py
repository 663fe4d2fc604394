"""The matchers compiled, where numba is installed and it pays.

Compiling takes some 15 seconds the first time on a machine, and loading what was compiled before about one. So what is
small runs in Python, with the same result: the functions are the same.
"""

from __future__ import annotations

import numpy as np

from millstream.kernels import jit
from millstream.kernels.patterns import matcher, programs, row_matcher
from millstream.kernels.patterns.row_tables import PatternRows, RowTables, RowWork
from millstream.kernels.patterns.tables import MatcherRows, Tables, Work

COMPILED_ROWS_MIN = 50_000  # of one batch and bucket; in Python they take as long as loading


def match_keys(
    tables: Tables,
    rows: MatcherRows,
    work: Work,
    until_us: int,
) -> None:
    """Run :func:`millstream.kernels.patterns.matcher.match_keys`, compiled if there are so many rows."""
    if len(rows.time_us) >= COMPILED_ROWS_MIN and jit.is_available():
        jit.compiled(matcher.match_keys, programs, matcher)(tables, rows, work, until_us)
        return
    with np.errstate(over="ignore", invalid="ignore"):  # whole numbers go round, as in polars
        matcher.match_keys(tables, rows, work, until_us)


def match_row_patterns(tables: RowTables, rows: PatternRows, work: RowWork, until_us: int) -> None:
    """Run :func:`millstream.kernels.patterns.row_matcher.match_row_patterns` likewise."""
    if len(rows.time_us) >= COMPILED_ROWS_MIN and jit.is_available():
        function = jit.compiled(row_matcher.match_row_patterns, programs, matcher, row_matcher)
        function(tables, rows, work, until_us)
        return
    with np.errstate(over="ignore", invalid="ignore"):
        row_matcher.match_row_patterns(tables, rows, work, until_us)
