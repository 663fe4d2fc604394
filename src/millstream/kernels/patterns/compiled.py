"""The matchers compiled, where numba is installed and it pays.

Compiling takes some 15 seconds the first time on a machine, and loading what was compiled before about one. So what is
small runs in Python, with the same result: the functions are the same. A process that has spent as long in Python loads them all
the same: few rows may take many steps. What is loaded is used for the smallest batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from millstream.kernels import jit
from millstream.kernels.patterns import matcher, programs, row_matcher
from millstream.kernels.patterns.row_tables import PatternRows, RowTables, RowWork
from millstream.kernels.patterns.tables import MatcherRows, Tables, Work

COMPILED_ROWS_MIN = 50_000  # of one batch and bucket; in Python they take as long as loading
# Of this process: then what was spent is a third of what compiling takes, or as much as loading does, and less than it will spare.
PYTHON_CPU_S_MAX = 5.0
PYTHON_CPU_S_MAX_IF_KEPT = 1.0


class _Spent:
    """How long this process has matched in Python, and which matchers it has loaded: these are run compiled from then on."""

    cpu_s = 0.0
    loaded: ClassVar[set[str]] = set()


def match_keys(
    tables: Tables,
    rows: MatcherRows,
    work: Work,
    until_us: int,
) -> None:
    """Run :func:`millstream.kernels.patterns.matcher.match_keys`, compiled if that pays."""
    _run(matcher.match_keys, (programs, matcher), len(rows.time_us), (tables, rows, work, until_us))


def match_row_patterns(tables: RowTables, rows: PatternRows, work: RowWork, until_us: int) -> None:
    """Run :func:`millstream.kernels.patterns.row_matcher.match_row_patterns` likewise."""
    modules = (programs, matcher, row_matcher)
    given = (tables, rows, work, until_us)
    _run(row_matcher.match_row_patterns, modules, len(rows.time_us), given)


def _run(
    function: Callable[..., None],
    modules: tuple[ModuleType, ...],
    rows: int,
    given: tuple[Any, ...],
) -> None:
    if _pays(function, modules, rows):
        jit.compiled(function, *modules, allocates=False, inlined=True)(*given)
        _Spent.loaded.add(function.__name__)
        return
    begun = time.thread_time()
    with np.errstate(over="ignore", invalid="ignore"):  # whole numbers go round, as in polars
        function(*given)
    _Spent.cpu_s += time.thread_time() - begun


def _pays(function: Callable[..., None], modules: tuple[ModuleType, ...], rows: int) -> bool:
    if function.__name__ in _Spent.loaded:
        return True
    enough = rows >= COMPILED_ROWS_MIN or _Spent.cpu_s >= PYTHON_CPU_S_MAX
    if not enough and _Spent.cpu_s >= PYTHON_CPU_S_MAX_IF_KEPT:
        enough = jit.is_kept(function, *modules, allocates=False, inlined=True)
    return enough and jit.is_available()
