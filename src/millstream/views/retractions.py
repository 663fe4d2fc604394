"""Retractions: from a batch's rows with ``__diff`` to upserts and deletes.

A row with ``__diff`` -1 retracts one that was emitted before. The effect of a batch on a keyed sink is the
sum of its rows: equal rows of opposite sign cancel, a key with a row left over is set to it, a key with
nothing but retractions is deleted. The order of the rows does not matter, except that of several rows
left for one key the last counts.

Rows of ``emit("update")`` replace one another without a retraction before, so they have no sum: the last
row of a key says what the key is set to, or that it is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from millstream.kernels.column_types import view_kind
from millstream.kernels.frames import DIFF, visible
from millstream.kernels.plan import SinkPlan
from millstream.views.schema import ViewChange, ViewSchema

DIFF_COLUMN = "_diff"
"""The name under which sinks without keys show ``__diff``: topics, datasets, functions."""


_AT = "__at"


def split_upserts_and_deletes(
    rows: pl.DataFrame, key: Sequence[str], *, replaces: bool
) -> tuple[pl.DataFrame, pl.DataFrame | None]:
    """Return the rows to upsert and the keys to delete; None if the rows have no retractions.

    ``replaces``: a row replaces the one before it without a retraction. Hidden columns stay with the rows
    to upsert, except ``__diff``.
    """
    if DIFF not in rows.columns:
        return rows, None
    if rows.is_empty() or rows[DIFF].min() == 1:
        return rows.drop(DIFF), None
    own = visible(rows.columns)
    # Numbers for names meanwhile: polars takes a name such as "^a.*$" in an expression for a pattern.
    numbers = {name: str(number) for number, name in enumerate(own)}
    names = {number: name for name, number in numbers.items()}
    keys = [numbers[name] for name in key]
    named = rows.rename(numbers)
    if replaces:
        left = named.unique(keys, keep="last", maintain_order=True)
    else:
        left = _left(named, list(names), keys)
    kept = left.filter(pl.col(DIFF) > 0)
    gone = left.filter(pl.col(DIFF) < 0).select(keys)
    gone = gone.join(kept, on=keys, how="anti", nulls_equal=True, maintain_order="left")
    gone = gone.unique(maintain_order=True)
    return kept.drop(DIFF).rename(names), gone.rename({number: names[number] for number in keys})


def _left(rows: pl.DataFrame, own: list[str], keys: list[str]) -> pl.DataFrame:
    """Return the sum of rows. Only those are added up with whose key others are taken back, if that is enough."""
    if not keys:
        return _consolidate(rows, own)
    numbered = rows.with_row_index(_AT)
    taken = rows.filter(pl.col(DIFF) < 0).select(keys).unique()
    alone = numbered.join(taken, on=keys, how="anti", nulls_equal=True)
    if not alone.height or alone.select(keys).n_unique() < alone.height:
        return _consolidate(rows, own)
    touched = numbered.join(taken, on=keys, how="semi", nulls_equal=True)
    summed = _summed(touched, own).with_columns(pl.col(DIFF).cast(pl.Int64))
    alone = alone.with_columns(pl.col(DIFF).cast(pl.Int64))
    return pl.concat([alone, summed[alone.columns]]).sort(_AT).drop(_AT)


def _consolidate(rows: pl.DataFrame, own: list[str]) -> pl.DataFrame:
    """Cancel equal rows of opposite sign; what is left takes the place of its last row."""
    return _summed(rows.with_row_index(_AT), own).sort(_AT).drop(_AT)


def _summed(numbered: pl.DataFrame, own: list[str]) -> pl.DataFrame:
    others = pl.exclude(DIFF, *own).last()
    return numbered.group_by(own).agg(others, pl.col(DIFF).cast(pl.Int64).sum())


def with_diff_column(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows for a sink without keys, with ``__diff``, if there is one, as ``_diff``."""
    own = visible(rows.columns)
    if DIFF not in rows.columns:
        return rows.select([rows[name] for name in own])
    return rows.select([*(rows[name] for name in own), rows[DIFF].cast(pl.Int8).alias(DIFF_COLUMN)])


def view_schema(sink: SinkPlan) -> ViewSchema:
    """Return the schema of an output's view."""
    columns = tuple((name, view_kind(dtype)) for name, dtype in sink.schema)
    return ViewSchema(sink.name, columns, sink.key)


def view_change(sink: SinkPlan, rows: pl.DataFrame) -> ViewChange:
    """Return what rows of an output do to its view."""
    kept, gone = split_upserts_and_deletes(rows, sink.key, replaces=sink.replaces)
    return ViewChange(sink.name, with_diff_column(kept), gone)
