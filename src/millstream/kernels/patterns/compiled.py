"""The matcher compiled, where numba is installed and it pays.

Compiling takes some 15 seconds the first time on a machine, and loading what was compiled before about one. So what is
small runs in Python, with the same result: the functions are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import numpy as np

from millstream.kernels.patterns import matcher, programs, row_matcher
from millstream.kernels.patterns.row_tables import PatternRows, RowTables, RowWork
from millstream.kernels.patterns.tables import MatcherRows, Tables, Work

COMPILED_ROWS_MIN = 50_000  # of one batch and bucket; in Python they take as long as loading

_loading = threading.Lock()


def match_keys(
    tables: Tables,
    rows: MatcherRows,
    work: Work,
    until_us: int,
) -> None:
    """Run :func:`millstream.kernels.patterns.matcher.match_keys`, compiled if there are so many rows."""
    if len(rows.time_us) >= COMPILED_ROWS_MIN and is_available():
        compiled_match_keys()(tables, rows, work, until_us)
        return
    with np.errstate(over="ignore", invalid="ignore"):  # whole numbers go round, as in polars
        matcher.match_keys(tables, rows, work, until_us)


def match_row_patterns(tables: RowTables, rows: PatternRows, work: RowWork, until_us: int) -> None:
    """Run :func:`millstream.kernels.patterns.row_matcher.match_row_patterns` likewise."""
    if len(rows.time_us) >= COMPILED_ROWS_MIN and is_available():
        compiled_match_row_patterns()(tables, rows, work, until_us)
        return
    with np.errstate(over="ignore", invalid="ignore"):
        row_matcher.match_row_patterns(tables, rows, work, until_us)


@cache
def is_available() -> bool:
    """Return whether numba is installed."""
    return find_spec("numba") is not None


def compiled_match_keys() -> Callable[..., None]:
    """Return the compiled function; it is compiled when it is first called."""
    with _loading:
        return _compiled(matcher.match_keys)


def compiled_match_row_patterns() -> Callable[..., None]:
    """Return the compiled function for row patterns."""
    with _loading:
        return _compiled(row_matcher.match_row_patterns)


@cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    numba: Any = import_module("numba")
    _let_compile()
    compiled: Callable[..., None]
    try:
        compiled = numba.njit(cache=True)(function)
    except RuntimeError:  # no folder to keep it in can be written to: each process compiles it
        compiled = numba.njit(function)
    return compiled


@cache
def _let_compile() -> None:
    """Let compiled functions call the functions of these modules."""
    extending: Any = import_module("numba.extending")
    for module in (programs, matcher, row_matcher):
        for function in vars(module).values():
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                extending.register_jitable(function)
