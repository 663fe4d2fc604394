"""Aggregates of groups without windows, as a table: one row for each group that has rows.

Rows are reduced to partials before the shuffle, as those of windows are. Of each group the merged partial is
kept, so the row that is taken back equals the one that was emitted to the last bit. A group without rows
leaves the table, and the state.

The time of a group's row is the greatest of its rows' times. If rows are only added, it is kept as one more
aggregate; if they can be taken back, see :mod:`millstream.kernels.tables.group_times`.

Keys are ``__key0``, ``__key1``, …: a user's column may have any name. Floats that are keys have one zero.

Source: Budiu et al., "DBSP", PVLDB 16(7), 2023, section 7.2 (aggregates over groups of changes: the value
before is taken back, the value after is added).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from millstream.kernels.aggregation import Aggregation, event_count
from millstream.kernels.changes import consolidate, group_numbers, total_weight, with_diff
from millstream.kernels.column_types import of_one_zero
from millstream.kernels.columns import constant, filter_rows
from millstream.kernels.frames import (
    DIFF,
    HASH,
    HIDDEN_PREFIX,
    ROWS,
    TIME,
    WEIGHT,
    visible,
)
from millstream.kernels.given_out import as_given_out
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.queryable import (
    KeyColumns,
    QueryKeys,
    as_often_as_weighed,
    held_by_key,
)
from millstream.kernels.state.arrangement import Arrangement
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.keyhash import Hashes, hash_columns
from millstream.kernels.state.layout import StateLayout
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.tables.group_sets import (
    GROUP_ID,
    GROUPS,
    NEXT_ID,
    SETS,
    SPACES,
    GroupSets,
    new_ids,
)
from millstream.kernels.tables.group_times import (
    GROUP,
    GROUP_TIME,
    GROUP_TIME_ROWS,
    GroupTimes,
)
from millstream.kernels.untimed_operator import UntimedOperator

_KEY = "__key"


def group_keys(count: int) -> tuple[str, ...]:
    """Return the names that the columns of a key have inside the operator."""
    return tuple(f"{_KEY}{number}" for number in range(count))


@dataclass(frozen=True)
class GroupBy(UntimedOperator):
    """The operator that keeps the aggregates of groups.

    ``columns`` are the columns of the key, in their order; ``aggregation`` is by their hidden names. Without
    ``weighted``, it has an aggregate ``__time``.
    """

    name: str
    columns: tuple[tuple[str, pl.DataType], ...]
    aggregation: Aggregation

    @property
    def keys(self) -> tuple[str, ...]:
        """All columns of the key, under their hidden names."""
        return group_keys(len(self.columns))

    @property
    def by(self) -> tuple[str, ...]:
        """The columns of the key that can be hashed: all that are not nested."""
        named = zip(self.keys, self.columns, strict=True)
        return tuple(key for key, (_, dtype) in named if not dtype.is_nested())

    @property
    def weighted(self) -> bool:
        return self.aggregation.weighted

    @property
    def ordered(self) -> bool:
        return self.aggregation.ordered

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - all inputs have the same
        read = {c for c in self.aggregation.columns_read if not c.startswith(HIDDEN_PREFIX)}
        return read | {name for name, _ in self.columns}

    @cached_property
    def sets(self) -> GroupSets:
        """The sets of values that are kept beside the groups."""
        return GroupSets(self.name, self.aggregation)

    @property
    def kept(self) -> Aggregation:
        """The aggregation of what is kept of a group itself."""
        return self.sets.kept if self.sets.families else self.aggregation

    # ── what a group gives ──────────────────────────────────────────────────────────────────

    @property
    def greatest(self) -> bool:
        """Whether the greatest time of a group counts, or the least."""
        return True

    @property
    def timed(self) -> str:
        """The partial that says how many of the rows count for the time."""
        return WEIGHT

    def copies(self, groups: pl.DataFrame) -> pl.Series:
        """Return how many times the row of each group is in the table."""
        if not self.weighted:
            return pl.ones(groups.height, pl.Int64, eager=True)
        return (groups[WEIGHT] > 0).cast(pl.Int64)

    def results(self, groups: pl.DataFrame) -> list[pl.Series]:
        """Return the columns of the groups' rows besides the key."""
        made = groups.select(self.kept.results)
        return [made[name] for name in made.columns if name != TIME]

    def _times(self, groups: pl.DataFrame) -> pl.Series:
        if self.weighted:
            return groups[GROUP_TIME].alias(TIME)
        own = dict(self.aggregation.aggregates)[TIME]
        return groups.select(own.result(TIME)).to_series()

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:
        """Reduce rows to a partial for each key; if rows can be taken back, for each key and time."""
        keyed = self.with_keys(rows, number)
        return Prepared(self.aggregation.reduce(keyed, *self._by_time)[self._sent])

    def with_keys(self, rows: pl.DataFrame, number: int) -> pl.DataFrame:  # noqa: ARG002
        """Return rows with their keys under hidden names."""
        keys = [
            of_one_zero(rows[name]).alias(key)
            for key, (name, _) in zip(self.keys, self.columns, strict=True)
        ]
        if self.weighted and DIFF not in rows.columns:
            keys.append(constant(1, rows.height, pl.Int8, DIFF))
        return rows.hstack(keys)

    @property
    def _by_time(self) -> list[str]:
        return [TIME] if self.weighted else []

    @property
    def _sent(self) -> list[str]:
        return [*self._by_time, *self.keys, *self.aggregation.partials]

    def pack(self, tables: Sequence[pl.DataFrame], number: int = 0) -> pl.DataFrame:  # noqa: ARG002
        """Merge the partials of several tables."""
        if len(tables) == 1:
            return tables[0]
        merged = self.aggregation.merge(pl.concat(tables), *self._by_time, *self.keys)
        return merged[self._sent]

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Return how the table changes with the batch; keep what its groups are."""
        tables = [table for number in sorted(inputs) for table in inputs[number]]
        if not tables:
            return OperatorResult()
        fresh = pl.concat(tables)
        hashes = hash_columns(fresh, self.by, context.seed)
        hashed = fresh.hstack([pl.Series(HASH, hashes)])
        batch = _GroupBatch(self, state, hashed, context.seed)
        changed = batch.changes()
        result = OperatorResult(counts=Counter(held=event_count(fresh)))
        result.rows = with_diff(changed) if changed.height else None
        return result

    @property
    def stored(self) -> dict[str, pl.DataType]:
        """The columns that are kept of a group, with their types."""
        types = (dtype for _, dtype in self.columns)
        times = (GROUP_TIME, GROUP_TIME_ROWS) if self.weighted else ()
        return {
            **dict(zip(self.keys, types, strict=True)),
            HASH: pl.UInt64(),
            **dict(self.kept.schema),
            **({GROUP_ID: pl.Int64()} if self.sets.families else {}),
            **dict.fromkeys(times, pl.Int64()),
        }

    @property
    def layout(self) -> StateLayout:
        if not self.sets.families:
            return StateLayout()
        return StateLayout(numbered={NEXT_ID: (GROUPS,)}, sets=(SETS, NEXT_ID, SPACES))

    @property
    def query_key(self) -> KeyColumns | None:
        return tuple(column for column in self.columns if not column[1].is_nested())

    def current_rows(
        self,
        state: OperatorState,
        keys: QueryKeys | None,
        watermark_us: int,  # noqa: ARG002 - groups have no end in time
    ) -> pl.DataFrame:
        """Return the rows of the groups."""
        numbered = GROUP_ID if self.sets.families else None
        kept = KeyedRows(state, GROUPS, ROWS, numbered=numbered)
        held = held_by_key(kept, keys, self.by)
        groups = pl.DataFrame(schema=self.stored) if held is None else held
        return as_often_as_weighed(self.rows(groups, 1))

    @property
    def row_key(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.columns)

    @property
    def rows_family(self) -> str:
        return GROUPS

    def given_out(self, state: OperatorState, rows_max: int) -> Iterator[pl.DataFrame]:
        """Yield the rows of the groups in one bucket."""
        numbered = GROUP_ID if self.sets.families else None
        for groups in KeyedRows(state, GROUPS, ROWS, numbered=numbered).parts(rows_max):
            yield as_given_out(self.rows(groups, 1))

    def rows(self, groups: pl.DataFrame, sign: int) -> pl.DataFrame:
        """Return the rows that groups have in the table, with hash and weight."""
        keys = [
            groups[key].alias(name) for key, (name, _) in zip(self.keys, self.columns, strict=True)
        ]
        made = [*keys, *self.results(groups), self._times(groups), groups[HASH]]
        weights = (self.copies(groups) * sign).alias(WEIGHT)
        return pl.DataFrame([*made, weights]).filter(weights != 0)


@dataclass
class _GroupBatch:
    """One batch of one bucket: the partials that came, and the groups that they touch."""

    step: GroupBy
    state: OperatorState
    fresh: pl.DataFrame
    seed: int

    def __post_init__(self) -> None:
        numbered = GROUP_ID if self.step.sets.families else None
        self.kept = KeyedRows(self.state, GROUPS, ROWS, numbered=numbered)
        self.times = Arrangement(self.state, "times")
        self.ledger = StateLedger(self.step.name, (self.kept.runs,), event_count(self.fresh))

    def changes(self) -> pl.DataFrame:
        """Return how the rows of the groups change, and keep the groups as they are now."""
        step, keys = self.step, list(self.step.keys)
        hashes = sorted_distinct(self.fresh[HASH].to_numpy())
        found = self.kept.get(hashes)
        known = pl.DataFrame(schema=step.stored) if found is None else found[[*step.stored]]
        numbers = group_numbers(pl.concat([self.fresh[keys], known[keys]]), keys)
        self.fresh = self.fresh.hstack([pl.Series(GROUP, numbers[: self.fresh.height])])
        groups = self._first_rows()
        of_known = numbers[self.fresh.height :]
        touched = of_known < groups.height
        before = filter_rows(known.hstack([pl.Series(GROUP, of_known)]), touched)
        after = self._after(groups, before)
        self._keep(hashes, filter_rows(known, ~touched), after, found)
        rows = pl.concat([step.rows(before, -1), step.rows(after, 1)])
        return _in_order(consolidate(rows), [name for name, _ in step.columns])

    def _first_rows(self) -> pl.DataFrame:
        """Return key and hash of each group that is touched, in the order of their numbers."""
        first = np.unique(self.fresh[GROUP].to_numpy(), return_index=True)[1]
        return self.fresh[first][[*self.step.keys, HASH]]

    def _after(self, groups: pl.DataFrame, before: pl.DataFrame) -> pl.DataFrame:
        """Return the groups with what came."""
        step = self.step
        if step.sets.families:
            groups = groups.hstack([self._ids(groups, before)])
            ids = groups[GROUP_ID].to_numpy()
            self.fresh = step.sets.count(self.state, self.fresh, ids, self.seed)
        partials = [GROUP, *step.kept.partials]
        every = pl.concat([before[partials], self.fresh[partials]])
        merged = step.kept.merge(every, GROUP).sort(GROUP)[step.kept.partials]
        after = groups.hstack(merged)
        if not step.weighted:
            return after
        ledger = StateLedger(step.name, (self.times.runs,))
        changes = pl.DataFrame(
            [self.fresh[GROUP], self.fresh[TIME], self.fresh[step.timed].alias(WEIGHT)]
        )
        ledger.events_in = total_weight(changes)
        times = GroupTimes(self.times, step.keys, step.greatest).update(
            groups,
            before[[GROUP, GROUP_TIME, GROUP_TIME_ROWS]],
            changes,
            after[step.timed] > 0,
        )
        ledger.check()
        return after.hstack(times)

    def _ids(self, groups: pl.DataFrame, before: pl.DataFrame) -> pl.Series:
        """Return the numbers of groups: those that they have, and others for those that are new."""
        ids = np.full(groups.height, -1, np.int64)
        ids[before[GROUP].to_numpy()] = before[GROUP_ID].to_numpy()
        new = ids < 0
        fresh = filter_rows(groups, new)
        ids[new] = new_ids(self.state, fresh, self.step.keys).to_numpy()
        return pl.Series(GROUP_ID, ids)

    def _keep(
        self,
        hashes: Hashes,
        others: pl.DataFrame,
        after: pl.DataFrame,
        found: pl.DataFrame | None,
    ) -> None:
        """Keep the groups that have rows, with all others that share their hashes."""
        present = after
        if self.step.weighted:
            gone = after.filter(pl.col(WEIGHT) == 0)
            self.ledger.events_out = event_count(gone)
            present = after.filter(pl.col(WEIGHT) != 0)
        stored = self.step.kept.for_state(present)[others.columns]
        self.kept.put(hashes, pl.concat([others, stored]), found)
        self.ledger.check()


def _in_order(rows: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    """Order changes by group, what is taken back first: the same however the rows came."""
    columns = [HASH, *keys, WEIGHT]
    by = pl.DataFrame({str(number): rows[name] for number, name in enumerate(columns)})
    ordered: pl.DataFrame = rows[by.select(pl.arg_sort_by(by.columns)).to_series()]
    return ordered[[*visible(ordered.columns), TIME, WEIGHT]]
