"""Rows as JSON and as CSV, without loss of values that JSON, or a reader of it, cannot represent.

==========  ===================================================================================
kind        as JSON
==========  ===================================================================================
int         a number; as text from 2^53 on, where many readers would round it
float       a number; ``"NaN"``, ``"Infinity"``, ``"-Infinity"`` as text
decimal     text with all its places: ``"0.10"``
datetime    text in UTC with microseconds: ``"2026-01-31T12:00:00.000000Z"``
date        text: ``"2026-01-31"``
duration    a number of seconds
bytes       text: hexadecimal digits
json        the list or struct itself
==========  ===================================================================================

A parameter of a query takes each of these forms, except json. CSV has the same texts without quotes, and
null is empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import polars as pl

from millstream.views.schema import ViewSchema

EXACT_BELOW = 2**53
_NUMBERED = ("_seq", "_batch_id")


def objects(rows: pl.DataFrame, schema: ViewSchema) -> list[str]:
    """Return each row as the text of a JSON object, with the columns of the change log if it has them."""
    columns = []
    for column in rows.iter_columns():
        kind = schema.kinds.get(column.name) or ("int" if column.name in _NUMBERED else "str")
        name = json.dumps(column.name, ensure_ascii=False)
        columns.append([f"{name}:{text}" for text in texts(column, kind)])
    return ["{" + ",".join(parts) + "}" for parts in zip(*columns, strict=True)]


def texts(column: pl.Series, kind: str) -> list[str]:
    """Return each value of a column as JSON text."""
    plain = kind.partition("(")[0]
    if plain == "datetime":
        column = column.dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ")
    elif plain in ("date", "decimal"):
        column = column.cast(pl.String)
    elif plain == "duration":
        column = column.dt.total_microseconds()
    write = _WRITERS.get(plain, _text)
    return ["null" if value is None else write(value) for value in column.to_list()]


def csv(rows: pl.DataFrame, schema: ViewSchema) -> str:
    """Return rows as CSV with a header line."""
    out = []
    for name, kind in schema.columns:
        values = [
            None if text == "null" else _unquoted(text, kind) for text in texts(rows[name], kind)
        ]
        out.append(pl.Series(name, values, pl.String))
    return pl.DataFrame(out).write_csv()


def _unquoted(text: str, kind: str) -> str:
    return text if kind == "json" or not text.startswith('"') else str(json.loads(text))


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _int(value: int) -> str:
    return str(value) if abs(value) < EXACT_BELOW else f'"{value}"'


def _float(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return '"NaN"' if math.isnan(value) else f'"{"-" if value < 0 else ""}Infinity"'


def _seconds(microseconds: int) -> str:
    return repr(microseconds / 1_000_000)


def _json(text: str) -> str:
    """Return JSON text as it is; NaN and Infinity, which only Python accepts, become strings."""
    if "NaN" in text or "Infinity" in text:
        return json.dumps(json.loads(text, parse_constant=str), ensure_ascii=False)
    return text


_WRITERS: dict[str, Callable[[Any], str]] = {
    "int": _int,
    "float": _float,
    "bool": lambda value: "true" if value else "false",
    "duration": _seconds,
    "bytes": lambda value: f'"{value.hex()}"',
    "json": _json,
}
