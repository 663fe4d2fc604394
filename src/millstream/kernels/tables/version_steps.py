"""Stateless steps on the versions of a table: a version that is deleted goes on as a deletion.

A deletion (``__deleted``) has the key and nothing else, so expressions are only applied to the versions that
have a row. A filter makes a deletion of a version that does not pass: from its time on the filtered table has
no row of that key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.columns import constant
from millstream.kernels.frames import DELETED, HIDDEN_PREFIX
from millstream.kernels.steps import ColumnNames, Filter, Step, StepResult


@dataclass(frozen=True)
class MarkDeletions:
    """Make deletions of the rows for which a condition is true: null counts as false."""

    name: str
    condition: pl.Expr

    def apply(self, table: pl.DataFrame) -> StepResult:
        deleted = table.select(self.condition.fill_null(value=False)).to_series().alias(DELETED)
        return StepResult(_with_deleted(table, deleted), table.height)

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:
        return None if wanted is None else wanted | set(self.condition.meta.root_names())


@dataclass(frozen=True)
class FilterVersions:
    """Make deletions of the versions that do not pass all conditions: null counts as false."""

    name: str
    conditions: tuple[pl.Expr, ...]

    def apply(self, table: pl.DataFrame) -> StepResult:
        there = _there(table)
        numbered = table.filter(there).with_columns(
            pl.Series(_NUMBER, np.flatnonzero(there.to_numpy()))
        )
        passed = Filter(self.name, self.conditions).apply(numbered).table[_NUMBER]
        deleted = np.ones(table.height, np.bool_)
        deleted[passed.to_numpy()] = False
        return StepResult(_with_deleted(table, pl.Series(DELETED, deleted)), table.height)

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:
        return Filter(self.name, self.conditions).columns_before(wanted)


@dataclass(frozen=True)
class ApplyToVersions:
    """Apply a step that makes one row of each to the versions; deletions keep their key and get its columns.

    ``key`` names the columns of the key, each before the step, which leaves its values as they are, and after it.
    """

    name: str
    step: Step
    key: tuple[tuple[str, str], ...]

    def apply(self, table: pl.DataFrame) -> StepResult:
        there = _there(table)
        made = self.step.apply(table.filter(there)).table
        if there.all():
            return StepResult(made, table.height)
        deleted = table.filter(~there)
        nulls = made.clear(deleted.height)
        hidden = [name for name in made.columns if name.startswith(HIDDEN_PREFIX)]
        kept = [*((name, name) for name in hidden), *self.key]
        nulls = nulls.with_columns(deleted[before].alias(after) for before, after in kept)
        places = np.concatenate(
            [np.flatnonzero(there.to_numpy()), np.flatnonzero(~there.to_numpy())]
        )
        return StepResult(pl.concat([made, nulls])[np.argsort(places)], table.height)

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:
        return self.step.columns_before(wanted)


_NUMBER = "__number"


def _there(table: pl.DataFrame) -> pl.Series:
    """Return which versions are no deletions."""
    if DELETED not in table.columns:
        return constant(True, table.height, pl.Boolean)
    return ~table[DELETED].fill_null(value=False)


def _with_deleted(table: pl.DataFrame, deleted: pl.Series) -> pl.DataFrame:
    return table.with_columns((~_there(table) | deleted).alias(DELETED))
