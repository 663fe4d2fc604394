"""Between polars columns and PostgreSQL: the text of a COPY for writing, rows for reading.

The values are those that `views/state_store/sqlite_values.py` makes for SQLite (times as numbers, decimals
as text), with two differences. PostgreSQL has NaN and nulls in keys, so they need no replacement. Its text
has no zero character, which is kept as U+FFFF (a noncharacter) and ``0``; U+FFFF itself is kept as U+FFFF
and ``1``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from millstream.kernels.columns import constant
from millstream.views.schema import ViewSchema
from millstream.views.state_store import sqlite_values

_TEXTS = ("str", "json")
_ESCAPE = "\uffff"
_ESCAPES = {"\0": f"{_ESCAPE}0", _ESCAPE: f"{_ESCAPE}1"}
_UNESCAPES = {kept: given for given, kept in _ESCAPES.items()}
# What COPY reads as the end of a value or a line, or as an escape.
_COPY = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", **_ESCAPES}


def encode_copy(
    frame: pl.DataFrame, schema: ViewSchema, *, start: int = 0, attempt: int | None = None
) -> bytes:
    """Return the rows of a normalised frame as COPY reads them, with their numbers from ``start`` before them.

    ``attempt``, if it is given, comes before these.
    """
    kinds = schema.kinds
    numbers = [pl.int_range(start, start + frame.height, eager=True).cast(pl.String).alias("i")]
    if attempt is not None:
        numbers.insert(0, constant(str(attempt), frame.height, pl.String, "attempt"))
    values = [
        _copy_column(column, kinds[column.name]).alias(f"c{n}")
        for n, column in enumerate(frame.iter_columns())
    ]
    lines = pl.DataFrame([*numbers, *values]).write_csv(
        include_header=False, separator="\t", null_value="\\N", quote_style="never"
    )
    return lines.encode()


def _copy_column(column: pl.Series, kind: str) -> pl.Series:
    if kind in ("datetime", "date", "duration"):
        column = column.to_physical()
    if kind == "bytes":
        return "\\\\x" + column.bin.encode("hex")
    if kind in _TEXTS:
        return _replaced(column, _COPY)
    return column.cast(pl.String)


def _replaced(column: pl.Series, names: Mapping[str, str]) -> pl.Series:
    expression = pl.col("0").str.replace_many(list(names), list(names.values()))
    return column.alias("0").to_frame().select(expression).to_series()


def decode_rows(
    rows: Sequence[Sequence[Any]], schema: ViewSchema, names: Sequence[str]
) -> pl.DataFrame:
    """Return rows as read from PostgreSQL (the named columns, in order) as a typed frame."""
    kinds = schema.kinds
    # Without a key: in keys, too, null is null here.
    plain = ViewSchema(schema.name, tuple((name, kinds[name]) for name in names), ())
    frame = sqlite_values.decode_rows(rows, plain)
    return pl.DataFrame(
        {
            column.name: _replaced(column, _UNESCAPES) if kinds[column.name] in _TEXTS else column
            for column in frame.iter_columns()
        }
    )


def encode_parameter(value: Any, kind: str) -> Any:
    """Return a parameter of a statement for a value that `state_store/sqlite_values.py` has encoded."""
    if kind in _TEXTS:
        return _escape(value)
    return bool(value) if kind == "bool" else value


def _escape(value: str) -> str:
    for given, kept in reversed(_ESCAPES.items()):  # U+FFFF first: the other escape contains one
        value = value.replace(given, kept)
    return value
