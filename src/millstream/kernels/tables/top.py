"""The first rows of each group in an order, as a table: SQL's row_number, rank and dense_rank up to n.

======================  ===============================================================================
``row_number``          1, 2, 3, …: rows that are equal in the order are told apart by the tie-break
``rank``                1 + how many rows come before: equal rows have one rank, and numbers are left out
``dense_rank``          1 + how many different values come before: no number is left out
======================  ===============================================================================

What is not a number is behind all numbers, and null behind that, whichever the direction.

Where rows can be taken back, all rows are kept: the next one must be known when one of the first goes. A
batch reads the groups that it touches, and writes what it changes.

Where rows are only added, a row that is not among the first never will be. So of each group only the first rows are
sent, and only those of them are kept that are among the first after the batch. Those that are no longer among
them stay in the runs of state until a fold leaves them out: a batch writes what is new, and takes nothing back.

What is emitted is the difference between the first rows before the batch and after it, so a row that stays, with
the rank that it had, is not emitted again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.changes import (
    concat_present,
    consolidate,
    total_weight,
    with_diff,
    with_weight,
)
from millstream.kernels.columns import constant, filter_rows
from millstream.kernels.frames import DIFF, HASH, TIME, WEIGHT, in_one_chunk
from millstream.kernels.given_out import as_given_out
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.queryable import (
    KeyColumns,
    QueryKeys,
    as_often_as_weighed,
    columns_at,
    held_in_runs,
    held_with_weights,
)
from millstream.kernels.state.arrangement import Arrangement
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.hash_parts import parts_by_hash
from millstream.kernels.state.keyhash import Hashes, hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import EACH_ROW
from millstream.kernels.tables.row_order import RowOrder, Ties
from millstream.kernels.untimed_operator import UntimedOperator

_RANK = "__rank"
_SLOT = 0


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

    @property
    def row_order(self) -> RowOrder:
        """How the rows of a group are ordered."""
        return RowOrder(self.per, self.order, self.tie_break)

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Take the columns; where rows are only added, of each group those that are first here."""
        own = [rows[name].alias(str(place)) for place, (name, _) in enumerate(self.columns)]
        hidden = [rows[name] for name in (TIME, DIFF) if name in rows.columns]
        taken = pl.DataFrame([*own, *hidden])
        if self.weighted:
            return Prepared(with_weight(taken))
        first = taken[self._first_places(taken, hash_columns(taken, self.per))]
        return Prepared(first, counts={"held": taken.height - first.height})

    def _first_places(self, rows: pl.DataFrame, hashes: Hashes) -> Int64s:
        """Return where the rows are whose rank is not above ``count``, in their order."""
        found = self.row_order.sort(rows, hashes, (self.ties, self.count))
        return found.places[found.ranks(self.ties) <= self.count]

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
        came = in_one_chunk(tables)
        result.counts["held"] = came.height
        came = came.hstack([pl.Series(HASH, hash_columns(came, self.per, context.seed))])
        changed = self._weighted(state, came) if self.weighted else self._added(state, came)
        result.rows = changed if changed.height else None
        return result

    # ── what is held between batches ────────────────────────────────────────────────────────

    @property
    def query_key(self) -> KeyColumns | None:
        return columns_at(self.columns, self.per)

    def current_rows(
        self,
        state: OperatorState,
        keys: QueryKeys | None,
        watermark_us: int,  # noqa: ARG002 - rows have no end in time
    ) -> pl.DataFrame:
        """Return the first rows of the groups, in their order."""
        if self.weighted:
            held = held_with_weights(Arrangement(state, "rows"), keys, self.per)
        else:
            held = concat_present(held_in_runs(state.runs("first", EACH_ROW), keys, self.per))
            held = None if held is None else held.with_columns(pl.lit(1, pl.Int64).alias(WEIGHT))
        if held is None:
            rank = {} if self.rank is None else {self.rank: pl.Int64()}
            return pl.DataFrame(schema={**dict(self.columns), **rank})
        return as_often_as_weighed(self._rows(self._first(held)))

    @property
    def row_key(self) -> tuple[str, ...]:
        return ()

    @property
    def is_total(self) -> bool:
        """Whether no two rows are alike in all that orders them: which are first does not depend on what came first."""
        ordering = {*self.per, *(place for place, _ in self.order), *self.tie_break}
        nested = any(self.columns[int(place)][1].is_nested() for place in ordering)
        return self.ties != "row_number" or not nested

    @property
    def rows_family(self) -> str:
        return "rows" if self.weighted else "first"

    def given_out(self, state: OperatorState, rows_max: int) -> Iterator[pl.DataFrame]:
        """Yield the first rows of the groups in one bucket."""
        if self.weighted:
            parts = Arrangement(state, "rows").parts(rows_max)
        else:
            added = parts_by_hash(state.runs("first", EACH_ROW), _SLOT, rows_max)
            weight = pl.lit(1, pl.Int64).alias(WEIGHT)
            parts = (pl.concat(pieces).with_columns(weight) for pieces in added)
        for held in parts:
            yield as_given_out(self._rows(self._first(held)))

    # ── rows that are only added ────────────────────────────────────────────────────────────

    def _added(self, state: OperatorState, came: pl.DataFrame) -> pl.DataFrame:
        """Return the changes with ``__diff``; keep the rows that are among the first now."""
        runs = state.runs("first", EACH_ROW)
        ledger = StateLedger(self.name, (runs,), came.height)
        found = list(runs.look_up(_SLOT, sorted_distinct(came[HASH].to_numpy())))
        # Those that are held stand first: of equal rows, they keep their ranks.
        every = in_one_chunk([*(rows[came.columns] for rows in found), came])
        held = every.height - came.height
        after = self.row_order.sort(every, every[HASH].to_numpy())
        of_held = after.places < held
        before = after.among(of_held)
        ranks_before = np.full(every.height, self.count + 1)
        ranks_before[of_held] = before.ranks(self.ties)
        ranks_after = after.ranks(self.ties)
        was, now = ranks_before <= self.count, ranks_after <= self.count
        moved = ranks_before != ranks_after if self.rank is not None else was != now
        added = every[after.places[now & moved]]
        new = filter_rows(added, ~of_held[now & moved])
        gone = int(np.count_nonzero(was & ~now))
        ledger.events_out = gone + came.height - new.height
        runs.spend(_SLOT, gone)
        if new.height:
            runs.add(_SLOT, new, lambda rows: rows, alive=self._alive, tiered=True)
        ledger.check()
        taken = every[after.places[was & moved]]
        changes = [(taken, -1, ranks_before[was & moved]), (added, 1, ranks_after[now & moved])]
        rows = pl.concat([self._signed(*change) for change in changes])
        # Of rows that are equal, one may have got the rank that another had.
        return with_diff(consolidate(rows) if after.repeated else rows).drop(HASH)

    def _alive(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return, of the rows of some groups, those that are among the first, in their order."""
        return rows[self._first_places(rows, rows[HASH].to_numpy())]

    def _signed(self, rows: pl.DataFrame, sign: int, ranks: Int64s) -> pl.DataFrame:
        """Return rows with their ranks, as added or as taken back."""
        weights = constant(sign, rows.height, pl.Int64, WEIGHT)
        return self._rows(rows.hstack([pl.Series(_RANK, ranks), weights]))

    # ── rows that may be taken back ─────────────────────────────────────────────────────────

    def _weighted(self, state: OperatorState, came: pl.DataFrame) -> pl.DataFrame:
        """Return the changes with ``__diff``; keep all rows."""
        came = consolidate(came)
        kept = Arrangement(state, "rows")
        ledger = StateLedger(self.name, (kept.runs,), total_weight(came))
        held = kept.look_up(sorted_distinct(came[HASH].to_numpy()))
        held = came.clear() if held is None else held[came.columns]
        every = consolidate(pl.concat([held, came]))
        kept.add(came)
        ledger.check()
        before, after = (self._rows(self._first(rows)) for rows in (held, every))
        return with_diff(
            consolidate(pl.concat([before.with_columns(-pl.col(WEIGHT)), after])).drop(HASH)
        )

    def _first(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the rows whose rank is not above ``count``, in their order, with ``__rank``."""
        rows = rows.filter(pl.col(WEIGHT) > 0)
        found = self.row_order.sort(rows, rows[HASH].to_numpy())
        ranks = found.ranks(self.ties, rows[WEIGHT].to_numpy())
        first = ranks <= self.count
        rows, ranks = rows[found.places[first]], ranks[first]
        if self.ties == "row_number":
            # Equal rows that are one with a weight have a number each.
            copies = np.minimum(rows[WEIGHT].to_numpy(), self.count - ranks + 1)
            at = np.repeat(np.arange(len(copies)), copies)
            nth = np.arange(len(at)) - np.repeat(np.cumsum(copies) - copies, copies)
            rows = rows[at].with_columns(pl.lit(1, pl.Int64).alias(WEIGHT))
            ranks = ranks[at] + nth
        return rows.hstack([pl.Series(_RANK, ranks)])

    def _rows(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return rows under the user's names, with the rank if it is asked for."""
        named = [rows[str(place)].alias(name) for place, (name, _) in enumerate(self.columns)]
        rank = [] if self.rank is None else [rows[_RANK].alias(self.rank)]
        return pl.DataFrame([*named, *rank, rows[TIME], rows[HASH], rows[WEIGHT]])
