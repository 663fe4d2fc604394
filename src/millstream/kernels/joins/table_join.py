"""The join of two tables, maintained: what changes in either input changes the result.

With A and B the tables before a batch, and ΔA and ΔB what the batch changes,

    Δ(A ⋈ B) = ΔA ⋈ B + A ⋈ ΔB + ΔA ⋈ ΔB

so only rows whose keys the batch touches are read. An outer join also has the rows that have no partner,
a semi-join only the left ones that have one, an anti-join only those that have none. A left row changes
sides when the first partner of its key comes, or the last one goes. Where the join has a condition besides
the keys, the partners of each left row of the touched keys are looked at, before and after the batch.

A row whose key is null has no partner, unless nulls are equal. It is not kept: its changes come out as they
come in, or not at all.

The time of a joined row is the later one of its two rows, so a row that is taken back has the time that it
had. The result is a bag, as the inputs are.

Source: Budiu et al., "DBSP", PVLDB 16(7), 2023, section 4 (joins of Z-sets); Griffin and Libkin,
"Incremental maintenance of views with duplicates", SIGMOD 1995 (outer joins by what is left without partner).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import polars as pl

from millstream.errors import ConfigError, UserCodeError
from millstream.kernels.changes import consolidate, total_weight, with_diff, with_weight
from millstream.kernels.errors.user_code import error_reason
from millstream.kernels.frames import DIFF, HASH, TIME, WEIGHT, in_one_chunk
from millstream.kernels.joins.join_input import (
    JoinedColumns,
    compared,
    null_keys,
    pair_weighted,
)
from millstream.kernels.joins.join_operator import JoinOperator
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.queryable import (
    KeyColumns,
    QueryKeys,
    as_often_as_weighed,
    held_with_weights,
)
from millstream.kernels.state.appended_rows import AppendedRows
from millstream.kernels.state.arrangement import Arrangement
from millstream.kernels.state.layout import StateLayout
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore

JoinKind = Literal["inner", "left", "right", "full", "semi", "anti"]
Kept = Arrangement | AppendedRows

_HIDDEN = (TIME, WEIGHT, HASH)
_ROW = "__row"
_BEFORE = "__before"
_AFTER = "__after"


@dataclass(frozen=True)
class TableJoin(JoinOperator):
    """The operator of the join of two tables.

    ``condition`` is over the columns of the result, and holds for pairs besides the equality of keys.
    ``append_only``: whether rows of the left and of the right input are only added.
    """

    name: str
    how: JoinKind
    columns: JoinedColumns
    nulls_equal: bool = False
    condition: pl.Expr | None = None
    append_only: tuple[bool, bool] = (False, False)

    @property
    def keeps_left(self) -> bool:
        """Whether left rows without a partner are in the result."""
        return self.how in ("left", "full", "anti")

    @property
    def keeps_right(self) -> bool:
        """Whether right rows without a partner are in the result."""
        return self.how in ("right", "full")

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int) -> Prepared:
        """Take keys, columns, time and weight; leave out rows that can be in no result."""
        taken = with_weight(self.inputs[number].project(rows, (TIME, DIFF)))
        if self.nulls_equal or (self.keeps_left, self.keeps_right)[number]:
            return Prepared(taken)
        return self.without_null_keys(taken)

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Return how the result changes with the batch; keep its changes."""
        result = OperatorResult(
            counts=Counter(held=sum(table.height for tables in inputs.values() for table in tables))
        )
        left, right = (self._changes(inputs.get(n, ()), n, context.seed) for n in (0, 1))
        kept = self._kept(state, 0), self._kept(state, 1)
        made: list[pl.DataFrame] = []
        ledger = StateLedger(self.name, (kept[0].runs, kept[1].runs))
        if not self.nulls_equal:
            (left, left_without), (right, right_without) = map(self._by_key, (left, right))
            made += self._without_key(left_without, right_without)
        ledger.events_in += total_weight(left) + total_weight(right)
        if left.height or right.height:
            made += _JoinBatch(self, kept, left, right).changes()
        rows = [table for table in made if table.height]
        if rows:
            changed = consolidate(pl.concat(rows)).drop(HASH)
            result.rows = with_diff(changed) if changed.height else None
        for rows_kept, changes in zip(kept, (left, right), strict=True):
            rows_kept.add(changes)
        ledger.check()
        return result

    @property
    def query_key(self) -> KeyColumns | None:
        left = self.columns.left
        return tuple(zip(left.on, left.key_types, strict=True))

    def current_rows(
        self,
        state: OperatorState,
        keys: QueryKeys | None,
        watermark_us: int,  # noqa: ARG002 - rows have no end in time
    ) -> pl.DataFrame:
        """Return the joined rows: those by which the result would change if all that is held came at once.

        Raises:
            ConfigError: a key has a null. Such rows are in the result, and not in the state.
        """
        self._check_keys(keys)
        empty = OperatorState(MemoryRunStore())
        nothing = self._kept(empty, 0), self._kept(empty, 1)
        left, right = (
            self._held(self._kept(state, number), keys, self._changes((), number, 0))
            for number in (0, 1)
        )
        made = [rows for rows in _JoinBatch(self, nothing, left, right).changes() if rows.height]
        if not made:
            return pl.DataFrame(schema=self.columns.types)
        return as_often_as_weighed(consolidate(pl.concat(made)))

    def _check_keys(self, keys: QueryKeys | None) -> None:
        if keys is None or self.nulls_equal or not (self.keeps_left or self.keeps_right):
            return
        if any(keys.rows[name].null_count() for name, _ in self.query_key or ()):
            raise ConfigError(
                f"{self.name!r}, a {self.how} join, was asked for a key that has a null. It does not hold such rows, as they join "
                "with nothing. Ask for keys without nulls, or read its view."
            )

    def _held(self, kept: Kept, keys: QueryKeys | None, none: pl.DataFrame) -> pl.DataFrame:
        held = held_with_weights(kept, keys, self.by)
        return none if held is None else held[none.columns]

    def _kept(self, state: OperatorState, number: int) -> Kept:
        """Return the rows that are kept of an input."""
        family = ("left", "right")[number]
        if self.append_only[number]:
            return AppendedRows(state, family, self.inputs[number].copied_keys)
        return Arrangement(state, family)

    @property
    def layout(self) -> StateLayout:
        families = zip(("left", "right"), self.append_only, strict=True)
        return StateLayout(appended=tuple(name for name, appended in families if appended))

    def _by_key(self, rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Divide rows into those with a key, and those of whose key a part is null."""
        null = null_keys(rows, self.by)
        return (rows.filter(~null), rows.filter(null)) if null.any() else (rows, rows.clear())

    def _changes(self, tables: Sequence[pl.DataFrame], number: int, seed: int) -> pl.DataFrame:
        """Return the changes of an input, with the hash of the key; equal rows of opposite sign cancel."""
        if not tables:
            empty = {WEIGHT: pl.Int64(), HASH: pl.UInt64()}
            return self.inputs[number].empty(**empty)
        return consolidate(self.hashed(in_one_chunk(tables), seed))

    def _without_key(self, left: pl.DataFrame, right: pl.DataFrame) -> list[pl.DataFrame]:
        """Return the joined rows of those whose key is null: they have no partner."""
        made = []
        if self.keeps_left:
            made.append(self.columns.of_left_alone(left, *_HIDDEN))
        if self.keeps_right:
            made.append(self.columns.of_right_alone(right, *_HIDDEN))
        return made

    def pairs(self, left: pl.DataFrame, right: pl.DataFrame) -> pl.DataFrame:
        """Pair rows whose keys are equal and for which the condition holds.

        Raises:
            UserCodeError: the condition failed.
        """
        pairs = pair_weighted(left, right, self.by, nulls_equal=self.nulls_equal)
        if self.condition is None or not pairs.height:
            return pairs
        try:
            # Of an expression such as pl.all(), the columns are those of the result, and no others.
            true = self.columns.visible(pairs).select(pl.all_horizontal(self.condition)).to_series()
        except pl.exceptions.PolarsError as error:
            raise UserCodeError(
                f"the condition of step {self.name!r} failed: {error_reason(error)}. Write it so that "
                "it gives true or false for every pair of rows.",
                step=self.name,
            ) from error
        return pairs.filter(
            true if len(true) == pairs.height else true.new_from_index(0, pairs.height)
        )


@dataclass
class _JoinBatch:
    """One batch of one bucket: the changes of both inputs, and what was kept of the keys they touch."""

    join: TableJoin
    kept: tuple[Kept, Kept]
    left: pl.DataFrame
    right: pl.DataFrame

    def __post_init__(self) -> None:
        of_left, of_right = self.left[HASH], self.right[HASH]
        both = pl.concat([of_left, of_right])
        join = self.join
        # Rows without a partner also depend on the partners that the other rows of their key have.
        looks_left = join.keeps_right or (join.condition is not None and self._marks_left)
        looks_right = self._marks_left or (join.condition is not None and join.keeps_right)
        self.left_before = self._look_up(0, both if looks_left else of_right)
        self.right_before = self._look_up(1, both if looks_right else of_left)

    @property
    def _marks_left(self) -> bool:
        return self.join.keeps_left or self.join.how == "semi"

    def _look_up(self, number: int, hashes: pl.Series) -> pl.DataFrame:
        found = self.kept[number].look_up(hashes.to_numpy())
        like = (self.left, self.right)[number]
        return like.clear() if found is None else found[like.columns]

    def changes(self) -> list[pl.DataFrame]:
        """Return the changes of the result."""
        join, columns = self.join, self.join.columns
        made: list[pl.DataFrame] = []
        if join.how not in ("semi", "anti"):
            made += self._pairs()
        if self._marks_left:
            alone = self._alone(0)
            made.append(columns.of_left_alone(alone, *_HIDDEN))
        if join.keeps_right:
            alone = self._alone(1)
            made.append(columns.of_right_alone(alone, *_HIDDEN))
        return made

    def _pairs(self) -> list[pl.DataFrame]:
        found = []
        if self.left.height and self.right_before.height:
            found.append(self.join.pairs(self.left, self.right_before))
        if self.right.height:
            found.append(self.join.pairs(in_one_chunk([self.left_before, self.left]), self.right))
        return [self.join.columns.of_pairs(pairs, *_HIDDEN) for pairs in found]

    # ── rows with or without partners ───────────────────────────────────────────────────────

    def _alone(self, number: int) -> pl.DataFrame:
        """Return how the rows of an input change that have no partner (semi-join: that have one)."""
        changed, before = (
            (self.left, self.left_before) if number == 0 else (self.right, self.right_before)
        )
        if self.join.condition is not None:
            return self._alone_by_pairs(number, changed, before)
        presence = self._presence(number)
        marked, marked_before = (self._marked(rows, presence) for rows in (changed, before))
        with_partner = self.join.how == "semi"
        was, now = (pl.col(name) == with_partner for name in (_BEFORE, _AFTER))
        came = marked_before.filter(~was & now)
        went = marked_before.filter(was & ~now).with_columns(-pl.col(WEIGHT))
        return pl.concat([marked.filter(now), came, went]).drop(_BEFORE, _AFTER)

    def _presence(self, number: int) -> pl.DataFrame:
        """Say of each key that the batch touches whether the other input has rows of it, before and after."""
        others, came = (
            (self.right_before, self.right) if number == 0 else (self.left_before, self.left)
        )
        on = compared(others, self.join.by)
        before, none = pl.col(WEIGHT).alias(_BEFORE), pl.lit(0, pl.Int64).alias(_BEFORE)
        after = pl.col(WEIGHT).alias(_AFTER)
        weights = pl.concat([others.select(*on, before, after), came.select(*on, none, after)])
        return weights.group_by(on).agg(pl.col(_BEFORE, _AFTER).sum() > 0)

    def _marked(self, rows: pl.DataFrame, presence: pl.DataFrame) -> pl.DataFrame:
        """Say of each row whether its key has partners before the batch, and after it."""
        return rows.join(
            presence,
            on=compared(rows, self.join.by),
            how="left",
            nulls_equal=self.join.nulls_equal,
            maintain_order="left",
        ).with_columns(pl.col(_BEFORE, _AFTER).fill_null(value=False))

    def _alone_by_pairs(
        self, number: int, changed: pl.DataFrame, before: pl.DataFrame
    ) -> pl.DataFrame:
        """Return the same where a condition decides, from the pairs before the batch and after it."""
        others_before, others = (
            (self.right_before, self.right) if number == 0 else (self.left_before, self.left)
        )
        after = consolidate(pl.concat([before, changed]))
        others_after = consolidate(pl.concat([others_before, others]))
        was = self._without_partner(before, others_before, number)
        now = self._without_partner(after, others_after, number)
        return pl.concat([now, was.with_columns(-pl.col(WEIGHT))])

    def _without_partner(
        self, rows: pl.DataFrame, others: pl.DataFrame, number: int
    ) -> pl.DataFrame:
        """Return the rows of an input without a partner (semi-join: those with one)."""
        numbered = rows.with_row_index(_ROW)
        pairs = (
            self.join.pairs(numbered, others) if number == 0 else self.join.pairs(others, numbered)
        )
        how: Literal["semi", "anti"] = "semi" if self.join.how == "semi" else "anti"
        kept = numbered.join(pairs.select(_ROW).unique(), on=_ROW, how=how, maintain_order="left")
        return kept.drop(_ROW)
