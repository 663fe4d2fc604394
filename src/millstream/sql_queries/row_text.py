"""Rows of a result as lines of JSON, and as CSV, with the forms that views have over HTTP (docs/views.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence

import polars as pl

from millstream.kernels.column_types import column_type
from millstream.views.schema import ViewSchema
from millstream.views.server.json_rows import csv, texts
from millstream.views.state_store.sqlite_values import in_kinds


def json_lines(rows: pl.DataFrame, types: Sequence[str]) -> str:
    """Return each row as a JSON object on a line of its own. ``types`` are the engine's, which tell JSON from text."""
    frame, schema = _in_kinds(rows, types)
    names = [json.dumps(name, ensure_ascii=False) for name in rows.columns]
    columns = [
        [f"{name}: {text}" for text in texts(column, kind)]
        for name, column, (_, kind) in zip(names, frame.iter_columns(), schema.columns, strict=True)
    ]
    return "".join(f"{{{', '.join(parts)}}}\n" for parts in zip(*columns, strict=True))


def csv_text(rows: pl.DataFrame, types: Sequence[str]) -> str:
    """Return rows as CSV with a header line; null is empty."""
    frame, schema = _in_kinds(rows, types)
    header = pl.DataFrame([rows.columns], orient="row").write_csv(include_header=False)
    return header + csv(frame, schema).split("\n", 1)[1]


def _in_kinds(rows: pl.DataFrame, types: Sequence[str]) -> tuple[pl.DataFrame, ViewSchema]:
    """Return rows as a view would keep them, with numbers for names: a view's may not be all that SQL's may."""
    columns, kinds = [], []
    for number, (column, kind) in enumerate(zip(rows.iter_columns(), types, strict=True)):
        name = f"c{number}"
        given = column_type(column.dtype).kind
        if given is None:
            column, given = column.cast(pl.String), "str"  # noqa: PLW2901 - the same column, as text
        if kind == "JSON":
            given = "json"
        if given == "decimal":
            given = f"decimal({column.dtype.precision},{column.dtype.scale})"  # type: ignore[attr-defined]
        columns.append(column.alias(name))
        kinds.append((name, given))
    schema = ViewSchema("rows", tuple(kinds), ())
    return in_kinds(pl.DataFrame(columns), schema), schema
