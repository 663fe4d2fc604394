"""Reads what Flink wrote for the check: JSON lines, or changes in Debezium's form, without order."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
from _nexmark_answers import COLUMNS

_NAMES = {"window_start": "start", "window_end": "end", "date_time": "at", "opened": "opened"}


def flink_answer(query: str, folder: Path) -> pl.DataFrame:
    """Read a query's result, in the form of the answers."""
    lines = [line for part in sorted(folder.rglob("*part-*")) for line in part.open("rb")]
    if not lines:  # of q12, when no window of processing time has ended
        return pl.DataFrame(schema=dict.fromkeys(COLUMNS[query], pl.Int64))
    rows = pl.from_dicts([json.loads(line) for line in lines], infer_schema_length=None)
    if "op" in rows.columns:
        rows = _folded(rows)
    for old, new in _NAMES.items():
        if old in rows.columns:
            text = pl.col(old).str.replace(" ", "T").str.strip_suffix("Z")
            at = text.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f", time_unit="ms").dt.epoch("ms")
            rows = rows.with_columns(at.alias(new))
    if query in ("q15", "q16", "q17"):
        rows = rows.with_columns(pl.col("day").str.to_date().cast(pl.Datetime("ms")).dt.epoch("ms"))
    if query in ("q1", "q14"):
        rows = rows.with_columns(price_milli=(pl.col("price") * 1000).round())
    if query == "q23":
        rows = rows.with_columns(seller="bidder")
    if query == "q12":
        rows = rows.group_by("bidder").agg(pl.col("num").sum())
    return rows


def _folded(changes: pl.DataFrame) -> pl.DataFrame:
    """Leave the rows that were inserted more often than deleted."""
    added = pl.col("op") == "c"
    row = pl.when(added).then(pl.col("after")).otherwise(pl.col("before")).struct.json_encode()
    counts = changes.group_by(row.alias("row")).agg(net=added.sum() - (~added).sum())
    left = counts.filter(pl.col("net") != 0)
    assert (left["net"] == 1).all(), "Flink's changes do not add up"
    return pl.from_dicts([json.loads(text) for text in left["row"]], infer_schema_length=None)
