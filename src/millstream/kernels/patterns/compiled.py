"""The matchers compiled, where numba is installed and it pays.

Compiling takes some 15 seconds the first time on a machine, and loading what was compiled before about one. So what is
small runs in Python, with the same result: the functions are the same. A process that has spent seconds in Python loads them all
the same: few rows may take many steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from millstream.kernels import jit
from millstream.kernels.patterns import matcher, programs, row_matcher
from millstream.kernels.patterns.row_tables import PatternRows, RowTables, RowWork
from millstream.kernels.patterns.tables import MatcherRows, Tables, Work

COMPILED_ROWS_MIN = 50_000  # of one batch and bucket; in Python they take as long as loading
PYTHON_CPU_S_MAX = 5.0  # of this process: then what was spent is a third of what compiling takes, and less than it will spare


class _Spent:
    """How long this process has matched in Python."""

    cpu_s = 0.0


def match_keys(
    tables: Tables,
    rows: MatcherRows,
    work: Work,
    until_us: int,
) -> None:
    """Run :func:`millstream.kernels.patterns.matcher.match_keys`, compiled if that pays."""
    if _pays(len(rows.time_us)):
        jit.compiled(matcher.match_keys, programs, matcher)(tables, rows, work, until_us)
    else:
        _in_python(lambda: matcher.match_keys(tables, rows, work, until_us))


def match_row_patterns(tables: RowTables, rows: PatternRows, work: RowWork, until_us: int) -> None:
    """Run :func:`millstream.kernels.patterns.row_matcher.match_row_patterns` likewise."""
    if _pays(len(rows.time_us)):
        function = jit.compiled(row_matcher.match_row_patterns, programs, matcher, row_matcher)
        function(tables, rows, work, until_us)
    else:
        _in_python(lambda: row_matcher.match_row_patterns(tables, rows, work, until_us))


def _pays(rows: int) -> bool:
    enough = rows >= COMPILED_ROWS_MIN or _Spent.cpu_s >= PYTHON_CPU_S_MAX
    return enough and jit.is_available()


def _in_python(matched: Callable[[], None]) -> None:
    begun = time.thread_time()
    with np.errstate(over="ignore", invalid="ignore"):  # whole numbers go round, as in polars
        matched()
    _Spent.cpu_s += time.thread_time() - begun
