"""The first rows of each group in an order, as a table: SQL's row_number, rank and dense_rank up to n.

======================  ===============================================================================
``row_number``          1, 2, 3, …: rows that are equal in the order are told apart by the tie-break
``rank``                1 + how many rows come before: equal rows have one rank, and numbers are left out
``dense_rank``          1 + how many different values come before: no number is left out
======================  ===============================================================================

What is not a number is behind all numbers, and null behind that, whichever the direction.

Where rows can be taken back, all rows are kept: the next one must be known when one of the first goes. A
batch reads the groups that it touches. Where rows are only added, a row that is not among the first never will
be, so only the first are kept, and only these are read. In both cases a batch writes what it changes.

What is emitted is the difference between the first rows before the batch and after it, so a row that stays, with
the rank that it had, is not emitted again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.changes import (
    consolidate,
    group_numbers,
    total_weight,
    with_diff,
    with_weight,
)
from millstream.kernels.column_types import of_one_zero
from millstream.kernels.frames import DIFF, HASH, TIME, WEIGHT
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.state.arrangement import Arrangement
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.untimed_operator import UntimedOperator

Ties = Literal["row_number", "rank", "dense_rank"]

_RANK = "__rank"


@dataclass(frozen=True)
class TopRows(UntimedOperator):
    """The operator that keeps the first rows of each group.

    Inside, columns are named by their places: "0", "1", …; ``per``, ``order`` and ``tie_break`` are such names.

    Attributes:
        columns: All columns, with their types.
        per: The columns that make groups; none: all rows are one group.
        order: The columns that order rows, each with whether the greatest is first.
        tie_break: The columns that order those that are equal then; the event time comes last.
        count: The greatest rank that is kept.
        rank: The name of the column that has the rank; None: the rows do not have it.
        weighted: Rows can be taken back.
    """

    name: str
    columns: tuple[tuple[str, pl.DataType], ...]
    per: tuple[str, ...]
    order: tuple[tuple[str, bool], ...]
    tie_break: tuple[str, ...]
    count: int
    ties: Ties
    rank: str | None
    weighted: bool

    @property
    def by(self) -> tuple[str, ...]:
        return self.per

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Take the columns; where rows are only added, of each group those that are first here."""
        own = [rows[name].alias(str(place)) for place, (name, _) in enumerate(self.columns)]
        hidden = [rows[name] for name in (TIME, DIFF) if name in rows.columns]
        taken = with_weight(pl.DataFrame([*own, *hidden]))
        if self.weighted:
            return Prepared(taken)
        first = self._first(taken).drop(_RANK)[taken.columns]
        return Prepared(first, counts={"held": taken.height - first.height})

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Return how the first rows change with the batch; keep what can be among them."""
        result = OperatorResult(counts=Counter())
        tables = inputs.get(0, ())
        if not tables:
            return result
        came = pl.concat(tables)
        result.counts["held"] = came.height
        came = came.hstack([pl.Series(HASH, hash_columns(came, self.per, context.seed))])
        came = consolidate(came)
        kept = Arrangement(state, "rows")
        ledger = StateLedger(self.name, (kept.runs,), total_weight(came))
        held = kept.look_up(sorted_distinct(came[HASH].to_numpy()))
        held = came.clear() if held is None else held[came.columns]
        every = consolidate(pl.concat([held, came]))
        before, after = self._first(held), self._first(every)
        changes = came
        if not self.weighted:
            ledger.events_out = total_weight(every) - total_weight(after)
            changes = _difference(before.drop(_RANK), after.drop(_RANK))
        kept.add(changes[came.columns])
        ledger.check()
        changed = _difference(*(self._rows(rows) for rows in (before, after))).drop(HASH)
        result.rows = with_diff(changed) if changed.height else None
        return result

    def _rows(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return rows under the user's names, with the rank if it is asked for."""
        named = [rows[str(place)].alias(name) for place, (name, _) in enumerate(self.columns)]
        rank = [] if self.rank is None else [rows[_RANK].alias(self.rank)]
        return pl.DataFrame([*named, *rank, rows[TIME], rows[HASH], rows[WEIGHT]])

    # ── ranks ───────────────────────────────────────────────────────────────────────────────

    def _first(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the rows whose rank is not above ``count``, in their order, with ``__rank``."""
        rows = rows.filter(pl.col(WEIGHT) > 0)
        keys = self._sort_keys(rows)
        by = pl.arg_sort_by(list(keys), descending=list(keys.values()), nulls_last=True)
        order = self._with_sort_columns(rows).select(by).to_series()
        rows = rows[order]
        groups = group_numbers(rows, self.per)
        ranks = self._ranks(rows, groups)
        if self.ties == "row_number":
            # Equal rows that are one with a weight have a number each.
            copies = np.minimum(rows[WEIGHT].to_numpy(), np.maximum(self.count - ranks + 1, 0))
            at = np.repeat(np.arange(len(copies)), copies)
            nth = np.arange(len(at)) - np.repeat(np.cumsum(copies) - copies, copies)
            rows = rows[at].with_columns(pl.lit(1, pl.Int64).alias(WEIGHT))
            return rows.hstack([pl.Series(_RANK, ranks[at] + nth)])
        return rows.hstack([pl.Series(_RANK, ranks)]).filter(pl.Series(ranks <= self.count))

    def _sort_keys(self, rows: pl.DataFrame) -> dict[str, bool]:
        """Return the columns to sort by, made by :meth:`_with_sort_columns`; true: the greatest first."""
        hashes = {HASH: False} if HASH in rows.columns else {}
        order = {
            name: down
            for column, descending in self.order
            for name, down in ((f"n{column}", False), (f"o{column}", descending))
        }
        others = [*(f"p{name}" for name in self.per), *order, *(f"t{n}" for n in self.tie_break)]
        return {**hashes, **{name: order.get(name, False) for name in others}, TIME: False}

    def _with_sort_columns(self, rows: pl.DataFrame) -> pl.DataFrame:
        per = [of_one_zero(rows[name]).alias(f"p{name}") for name in self.per]
        ties = [of_one_zero(rows[name]).alias(f"t{name}") for name in self.tie_break]
        order = [of_one_zero(rows[name]).alias(f"o{name}") for name, _ in self.order]
        last = [_behind(rows[name]).alias(f"n{name}") for name, _ in self.order]
        return rows.hstack([*per, *order, *last, *ties])

    def _ranks(self, rows: pl.DataFrame, groups: Int64s) -> Int64s:
        """Return the rank of each row; of equal rows that are one with a weight, the first's."""
        begins = _differs(groups)
        weights = rows[WEIGHT].to_numpy()
        before: Int64s = np.cumsum(weights) - weights
        if self.ties == "row_number":
            return before - _at_last(before, begins) + 1
        another = begins.copy()
        for name, _ in self.order:
            column = of_one_zero(rows[name])
            another |= column.ne_missing(column.shift(1)).to_numpy()
        if self.ties == "rank":
            return _at_last(before, another) - _at_last(before, begins) + 1
        values: Int64s = np.cumsum(another, dtype=np.int64)
        return values - _at_last(values, begins) + 1


def _difference(before: pl.DataFrame, after: pl.DataFrame) -> pl.DataFrame:
    """Return what was added and taken back."""
    return consolidate(pl.concat([before.with_columns(-pl.col(WEIGHT)), after]))


def _behind(column: pl.Series) -> pl.Series:
    """Return 2 for null, 1 for what is not a number, and 0 for other values."""
    behind = column.is_null().cast(pl.Int8) * 2
    if not column.dtype.is_float():
        return behind
    return behind + column.is_nan().fill_null(value=False).cast(pl.Int8)


def _differs(values: Int64s) -> Bools:
    differs = np.ones(len(values), np.bool_)
    differs[1:] = values[1:] != values[:-1]
    return differs


def _at_last(values: Int64s, begins: Bools) -> Int64s:
    """Return for each place the value at the last beginning up to it."""
    places = np.maximum.accumulate(np.where(begins, np.arange(len(values)), 0))
    found: Int64s = values[places]
    return found
