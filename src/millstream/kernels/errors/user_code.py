"""Failures of the user's code: which rows fail, where the error was raised, and the message.

An expression or function that fails, fails for the whole table. The failing rows are found by halving,
which is cheap while they are few; the others are processed by one more run without them. Code that fails on
every row is wrong itself: the job stops where all of the first 1,000 rows of a table fail, or every row of a
table of more than 100. A table without failing rows costs nothing extra.
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import polars as pl

from millstream.errors import MillstreamError, UserCodeError
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import visible

OnError = Literal["dead-letter", "stop"]
T = TypeVar("T")

HOPELESS_ROWS_MIN = 100  # a table of more rows than these, all of which fail, stops the job
HOPELESS_ROWS_MAX = 1000  # ... and so do these many at its beginning
_ROW_CHARS_MAX = 500
_MESSAGE_CHARS_MAX = 1_000
FAILURES = (Exception, pl.exceptions.PanicException)
# What polars says of values; that a column is not there, or of another type, is no matter of rows.
_OF_DATA = (
    pl.exceptions.ComputeError,
    pl.exceptions.InvalidOperationError,
    pl.exceptions.OutOfBoundsError,
    pl.exceptions.PanicException,
    pl.exceptions.SchemaError,  # a function gave a value of another type
    pl.exceptions.ShapeError,
)
# polars raises a function's error again, from its text alone; kinds of errors that take more, those
# of json and of codecs among them, come out as this TypeError.
_LOST = re.compile(
    r"(?:(\w+)\.__init__\(\) missing|function takes exactly 5 arguments \(1 given\))"
)
_OURS = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_POLARS = f"{Path(pl.__file__).resolve().parent}{os.sep}"
_INSTALLED = tuple(
    {f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")}
)


class UnusableRowError(Exception):
    """Raised by an operator about rows that it cannot take: these become dead letters, as rows do on which the
    user's code fails.
    """


class FailedRow(NamedTuple):
    """A row on which the user's code fails, by its position in the table."""

    position: int
    error: BaseException


@dataclass(frozen=True)
class UserCodeResult(Generic[T]):
    """What the user's code gave for the rows that pass (None: there are none), and the others."""

    result: T | None
    passing: pl.DataFrame
    failing: pl.DataFrame
    reasons: list[str]


@dataclass(frozen=True)
class UserCode:
    """The user's code in one step: its name, where it was declared, and what failing rows lead to.

    ``declared`` is a file and a line, as ``app.py:12``, or empty.
    """

    step: str
    declared: str = ""
    on_error: OnError = "dead-letter"

    def run(self, function: Callable[[pl.DataFrame], T], table: pl.DataFrame) -> UserCodeResult[T]:
        """Run the user's code over a table, and separate the rows on which it fails.

        Raises:
            UserCodeError: a row fails and failing rows are to stop the job, or too many fail.
        """
        try:
            return UserCodeResult(function(table), table, table.clear(), [])
        except MillstreamError:
            raise
        except FAILURES as error:
            if _is_ours(error) and not isinstance(error, UnusableRowError):
                raise
            if isinstance(error, pl.exceptions.PolarsError) and not isinstance(error, _OF_DATA):
                raise self._refusal(
                    error, table, None, "Fix the expression or function."
                ) from error
            return self._isolated(function, table, error)

    def refusal(
        self,
        error: BaseException,
        table: pl.DataFrame,
        position: int | None,
        *,
        hopeless: bool = False,
    ) -> UserCodeError:
        """Return the error that stops the job at a row: one that fails, or, ``hopeless``, as all others do."""
        return self._refusal(error, table, position, _HOPELESS if hopeless else _STOP)

    def _isolated(
        self, function: Callable[[pl.DataFrame], T], table: pl.DataFrame, error: BaseException
    ) -> UserCodeResult[T]:
        failed = failing_rows(function, table, first_only=self.on_error == "stop")
        if not failed:
            raise self._refusal(error, table, None, _ALONE) from error
        if self.on_error == "stop":
            raise self._refusal(failed[0].error, table, failed[0].position, _STOP)
        if is_hopeless(len(failed), failed[-1].position, table.height):
            raise self._refusal(failed[0].error, table, failed[0].position, _HOPELESS)
        passes = np.ones(table.height, np.bool_)
        passes[[row.position for row in failed]] = False
        passing = filter_rows(table, passes)
        return UserCodeResult(
            self._of_passing(function, passing),
            passing,
            filter_rows(table, ~passes),
            [error_reason(row.error) for row in failed],
        )

    def _of_passing(self, function: Callable[[pl.DataFrame], T], passing: pl.DataFrame) -> T | None:
        if not passing.height:
            return None
        try:
            return function(passing)
        except MillstreamError:
            raise
        except FAILURES as error:
            raise self._refusal(error, passing, None, _ALONE) from error

    def _refusal(
        self, error: BaseException, table: pl.DataFrame, position: int | None, remedy: str
    ) -> UserCodeError:
        declared = f" It is declared at {self.declared}." if self.declared else ""
        place = source_location(error)
        where = f", at {place}" if place else ""
        row = ""
        if position is not None:
            text = rows_as_json(table[position])[0]
            row = f" The row: {_cut(text, _ROW_CHARS_MAX)}."
        return UserCodeError(
            f"step {self.step!r} failed: {error_reason(error)}{where}.{row}{declared} {remedy}",
            step=self.step,
        )


_STOP = 'Fix it, or send such rows to the dead letters with on_error="dead-letter".'
_HOPELESS = (
    "It fails on each of more than 100 rows, so the code is wrong, not the data. Fix it; nothing was "
    "lost."
)
_ALONE = (
    "No single row makes it fail, only several together. A step must treat each row by itself, "
    "because which rows share a table is arbitrary."
)


def failing_rows(
    function: Callable[[pl.DataFrame], object], table: pl.DataFrame, *, first_only: bool = False
) -> list[FailedRow]:
    """Find the rows of a table on which a function fails alone, in their order.

    Stops at the first when ``first_only``, and once the first 1,000 have failed with none passing.
    """
    failed: list[FailedRow] = []
    ranges = [(0, table.height)]
    while ranges:
        start, end = ranges.pop()
        if end - start > 1:
            try:
                function(table[start:end])
            except FAILURES:
                middle = (start + end) // 2
                ranges += [(middle, end), (start, middle)]
            continue
        try:
            function(table[start:end])
        except FAILURES as error:
            failed.append(FailedRow(start, error))
            if first_only or len(failed) == start + 1 == HOPELESS_ROWS_MAX:
                break
    return failed


def _is_ours(error: BaseException) -> bool:
    """Return whether Millstream itself raised an error: it is not to be taken for the user's."""
    frames = _frames(error.__traceback__)
    return bool(frames) and frames[-1][0].startswith(_OURS)


def is_hopeless(failed: int, last: int, height: int) -> bool:
    """Return whether all rows of a table fail, or the first 1,000; of a few that may be chance.

    ``last`` is the position of the last one of those that failed.
    """
    return failed > HOPELESS_ROWS_MIN and failed == last + 1 == min(height, HOPELESS_ROWS_MAX)


def error_reason(error: BaseException) -> str:
    """Return what failed, in one line: the kind of error and the first line of what it says, of 1,000 characters at most.

    Half of a surrogate pair, which a message may have from the data, cannot be stored; it is spelled out.
    """
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an error of the user's, whose text is his code, too
        text = "its message cannot be read"
    text = text.encode(errors="backslashreplace").decode()
    lines = text.strip().splitlines()
    said = _cut(lines[0].rstrip("."), _MESSAGE_CHARS_MAX) if lines else ""
    kind = type(error).__name__
    if isinstance(error, UnusableRowError):
        return said
    if isinstance(error, TypeError) and (lost := _LOST.match(said)):
        kind, said = lost.group(1) or "UnicodeError", ""
    return f"{kind}: {said}" if said else kind


def _cut(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else f"{text[: chars_max - 1]}…"


def source_location(error: BaseException) -> str:
    """Name the file, line and function of the user's code that raised an error; "" if none did.

    It is the innermost frame outside of Millstream, polars and what else is installed.
    """
    library = ""
    for path, line, function in reversed(_frames(error.__traceback__)):
        if path.startswith((_OURS, _POLARS, "<")):
            continue
        place = f"{path}:{line} in {function}"
        if not path.startswith(_INSTALLED):
            return place
        library = library or place
    return library


def _frames(trace: TracebackType | None) -> list[tuple[str, int, str]]:
    frames: list[tuple[str, int, str]] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return frames


def rows_as_json(rows: pl.DataFrame) -> list[str]:
    """Return each row as the JSON object of its visible columns."""
    return [
        json.dumps(row, default=plain_value, ensure_ascii=False, separators=(",", ":"))
        for row in pl.DataFrame(
            [_in_python(rows[name]) for name in visible(rows.columns)]
        ).to_dicts()
    ]


def _in_python(column: pl.Series) -> pl.Series:
    """Return a column that Python can hold: of times, its own go from the year 1 to 9999."""
    if not column.dtype.is_temporal() and not column.dtype.is_nested():
        return column
    try:
        column.to_list()
    except (ValueError, OverflowError):
        return column.to_physical() if column.dtype.is_nested() else column.cast(pl.String)
    return column


def plain_value(value: Any) -> object:
    """Return a value of a row that JSON has no kind for as one that it has."""
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return b64encode(value).decode()
    return str(value)
