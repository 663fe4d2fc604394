"""How many different values each group has had: sets that a batch only probes, and adds to.

A set is not part of its group's row, which is read and written whenever the group is touched: it would be written
again with every batch. Its values are rows of their own, found by the hash of group and value. So a batch costs what it
brings, and not what the groups hold. Of a group the number of values is kept.

Sets of one type share their rows: a row has a bit for each set that its value was new in. So to count the
bidders, and those above a price, takes one row for a bidder whose first bid was above it.

A group is known by a number here, which it gets when it comes, in the order of hashes. The first rescale raises the numbers of
all buckets but the first one, each bucket's into a *space* of numbers (:mod:`millstream.kernels.state.numbers`); the
numbers that come after it are a space of all. The sets stay as they are, a slot for each space, with the numbers as from
its start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Self

import numpy as np
import polars as pl

from millstream.kernels.aggregates.distribution import DistinctValues
from millstream.kernels.aggregates.groups import flat, numbered
from millstream.kernels.aggregates.protocol import Aggregate, TypeOf, bound_type
from millstream.kernels.aggregation import Aggregation
from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.columns import constant, filter_rows
from millstream.kernels.frames import HASH, ROWS
from millstream.kernels.state.hash_order import differs_from_previous, sort_by_hash, sorted_distinct
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.keyhash import Hashes, hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.numbers import take_numbers
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import EACH_ROW, Share, SortedRuns, every_row
from millstream.kernels.tables.group_times import GROUP

GROUP_ID = "__group_id"  # Int64: the number of a group, as long as it is in the table
GROUPS = "groups"  # the family of their rows
NEXT_ID = "groups.next"
SPACES = "groups.spaces"  # where the spaces of numbers start
SETS = "sets"  # the families of their sets begin so
_VALUE, _SETS = "__value", "__sets"
_SETS_MAX, _FEW = 63, 8  # in one row; such that the bits are a byte
# The number by which a value is found has 23 bits of the group and 40 of the value, or is a hash, above all these.
_ID_BITS, _VALUE_BITS = 23, 40
_HASHED = np.uint64(1 << 63)
_NO_CODE = np.uint64(2**64 - 1)


class RowCounter:
    """The part of an aggregate that reads no column of the user's: it counts what an operator itself knows."""

    @property
    def columns_read(self) -> set[str]:
        return set()

    @property
    def needs_order(self) -> bool:
        return False

    def bound(self, name: str, type_of: TypeOf) -> Self:  # noqa: ARG002 - reads no values
        return self

    def for_retractions(self) -> Self:
        return self


@dataclass(frozen=True)
class NewValues(RowCounter):
    """The aggregate that adds up how many values were new in a group's set."""

    def partial(self, name: str) -> list[pl.Expr]:
        return [pl.lit(0, pl.Int64).alias(count_column(name))]

    def merge(self, name: str) -> list[pl.Expr]:
        return [pl.col(count_column(name)).sum()]

    def result(self, name: str) -> pl.Expr:
        return pl.col(count_column(name)).alias(name)


def set_column(name: str) -> str:
    """Return the column of a partial that has the values of an aggregate's set."""
    return f"{name}.set"


def count_column(name: str) -> str:
    """Return the column that has their number instead."""
    return f"{name}.new"


@dataclass(frozen=True)
class GroupSets:
    """The sets of the groups of one step: those of its aggregates that only count different values.

    ``aggregation`` is what the rows that come are reduced by.
    """

    step: str
    aggregation: Aggregation

    @cached_property
    def families(self) -> list[tuple[str, list[str]]]:
        """The sets whose values share rows: a name, and the aggregates."""
        by_type: dict[str, list[str]] = {}
        for name, aggregate in self.aggregation.aggregates:
            if is_counted_set(aggregate):
                by_type.setdefault(repr(bound_type(aggregate.dtype)), []).append(name)  # type: ignore[attr-defined]
        return [
            (f"{SETS} {number}.{first}", names[first : first + _SETS_MAX])
            for number, names in enumerate(by_type.values())
            for first in range(0, len(names), _SETS_MAX)
        ]

    @cached_property
    def kept(self) -> Aggregation:
        """The aggregation of what is kept of a group: numbers of values instead of values."""
        counted = {name for _, names in self.families for name in names}
        aggregates = tuple(
            (name, NewValues() if name in counted else aggregate)
            for name, aggregate in self.aggregation.aggregates
        )
        instead = {set_column(name): count_column(name) for name in counted}
        schema = tuple(
            (instead[name], pl.Int64()) if name in instead else (name, dtype)
            for name, dtype in self.aggregation.schema
        )
        return replace(self.aggregation, aggregates=aggregates, schema=schema)

    def count(
        self, state: OperatorState, fresh: pl.DataFrame, ids: Int64s, seed: int
    ) -> pl.DataFrame:
        """Return partials with the numbers of new values instead of the values, which are kept.

        Args:
            state: Where they are kept.
            fresh: The partials that came, with ``__group``.
            ids: The number that each group has, by ``__group``.
            seed: That of the hashes.
        """
        made = []
        groups = fresh[GROUP].to_numpy()
        first = np.unique(groups, return_index=True)[1]  # the partial that gets a group's counts
        for family, names in self.families:
            runs = state.runs(family, EACH_ROW, owned=every_row)
            ledger = StateLedger(self.step, (runs,))
            new = []
            for slot, (start, part) in enumerate(_by_space(state, fresh, ids)):
                came = _values_by_group(part, names, ids - start, seed)
                new.append(_unknown(runs, slot, came))
                _keep(state, runs, slot, new[-1])
            values = pl.concat(new)
            ledger.events_in = values.height
            ledger.check()
            made += list(_counts(values, names, first, fresh.height))
        sets = [set_column(name) for _, names in self.families for name in names]
        return fresh.drop(sets).hstack(made)


def _spaces(state: OperatorState) -> list[int]:
    """Return where the spaces of numbers start."""
    starts: list[int] = state.values.get(SPACES, [0])
    return starts


def _by_space(
    state: OperatorState, fresh: pl.DataFrame, ids: Int64s
) -> Iterator[tuple[int, pl.DataFrame]]:
    """Yield the start of each space of numbers, and the partials of its groups."""
    starts = _spaces(state)
    if len(starts) == 1:
        yield starts[0], fresh
        return
    spaces = np.searchsorted(starts, ids[fresh[GROUP].to_numpy()], side="right") - 1
    for slot, start in enumerate(starts):
        yield start, filter_rows(fresh, spaces == slot)


def _keep(state: OperatorState, runs: SortedRuns, slot: int, values: pl.DataFrame) -> None:
    """Keep new values of one space of numbers."""
    if values.height:
        runs.owned = partial(_of_own_groups, state, _spaces(state)[slot])
        runs.add(slot, values.drop(GROUP), lambda rows: rows)
        runs.owned = every_row


def _of_own_groups(state: OperatorState, start: int, rows: pl.DataFrame, share: Share) -> Bools:
    """Return which rows of sets are of groups in a share.

    Others of this bucket are not taken: it may have them from a fold of a bucket that is put together with this one.
    """
    groups = KeyedRows(state, GROUPS, ROWS, numbered=GROUP_ID).scan()
    if groups is None:
        return np.zeros(rows.height, np.bool_)
    own = groups[GROUP_ID].to_numpy()[share.has(groups[HASH].to_numpy())]
    return np.isin(rows[GROUP_ID].to_numpy() + start, own)


def is_counted_set(aggregate: Aggregate) -> bool:
    """Return whether an aggregate is the number of different values, none of which is taken back."""
    return isinstance(aggregate, DistinctValues) and aggregate.counted


def new_ids(state: OperatorState, groups: pl.DataFrame, keys: Sequence[str]) -> pl.Series:
    """Return numbers that no group has had, for groups with these hashes and keys."""
    numbers = take_numbers(state.values, NEXT_ID, groups.height)
    hashes = groups[HASH].to_numpy()
    order = np.argsort(hashes, kind="stable")
    if not differs_from_previous(hashes[order]).all():
        named = {str(number): groups[key] for number, key in enumerate(keys)}
        by = pl.DataFrame({HASH: hashes, **named})
        order = by.select(pl.arg_sort_by(by.columns)).to_series().to_numpy()
    ids = np.empty(groups.height, np.int64)
    ids[order] = numbers
    return pl.Series(GROUP_ID, ids)


def _values_by_group(
    fresh: pl.DataFrame, names: Sequence[str], ids: Int64s, seed: int
) -> pl.DataFrame:
    """Return each value of a group once, with a bit for each of the sets in which it is; by ``__hash``."""
    groups = fresh[GROUP].to_numpy()
    parts = []
    for bit, name in enumerate(names):
        values, lengths = flat(fresh[set_column(name)])
        of_values = pl.Series(GROUP, groups[numbered(lengths)])
        bits = constant(1 << bit, len(values), _bits_type(names))
        parts.append(pl.DataFrame([of_values, values.alias(_VALUE), bits.alias(_SETS)]))
    every = pl.concat(parts)
    codes = _whole_codes(every, ids)
    if codes is None or (codes == _NO_CODE).any():
        every = every.group_by(GROUP, _VALUE).agg(pl.col(_SETS).bitwise_or())
        every = every.hstack([pl.Series(GROUP_ID, ids[every[GROUP].to_numpy()])])
        every = sort_by_hash(every.hstack([pl.Series(HASH, _codes(every, ids, seed))]))
        if differs_from_previous(every[HASH].to_numpy()).all():
            return every
        return every.sort(HASH, GROUP_ID, _VALUE)  # group_by gives them in any order
    order = np.argsort(codes)
    codes = codes[order]
    first = np.flatnonzero(differs_from_previous(codes))
    sets = every[_SETS].to_numpy()[order]
    once = every.select(GROUP, _VALUE)[order[first]]
    of_once = pl.Series(GROUP_ID, ids[once[GROUP].to_numpy()])
    joined = np.bitwise_or.reduceat(sets, first) if len(first) else sets
    return once.hstack([pl.Series(_SETS, joined), of_once, pl.Series(HASH, codes[first])])


def _bits_type(names: Sequence[str]) -> pl.DataType:
    return pl.UInt8() if len(names) <= _FEW else pl.Int64()


def _codes(values: pl.DataFrame, ids: Int64s, seed: int) -> Hashes:
    """Return the numbers by which values are found; few that are not equal share one."""
    hashes = hash_columns(values, (GROUP_ID, _VALUE), seed) >> np.uint64(1) | _HASHED
    codes = _whole_codes(values, ids)
    return hashes if codes is None else np.where(codes == _NO_CODE, hashes, codes)


def _whole_codes(values: pl.DataFrame, ids: Int64s) -> Hashes | None:
    """Return group and value as one number, where they fit into it: such are sorted but once.

    None where values are not whole numbers.
    """
    if not values.schema[_VALUE].is_integer() or values.schema[_VALUE] == pl.UInt64:
        return None
    groups = ids[values[GROUP].to_numpy()]
    whole = values[_VALUE].to_numpy().astype(np.int64)
    fits = (whole >= 0) & (whole < 1 << _VALUE_BITS) & (groups < 1 << _ID_BITS)
    return np.where(fits, groups << _VALUE_BITS | whole, -1).view(np.uint64)


def _unknown(runs: SortedRuns, slot: int, values: pl.DataFrame) -> pl.DataFrame:
    """Return the values that a set does not have yet, with the bits of these sets."""
    hashes = values[HASH].to_numpy()
    alone = differs_from_previous(hashes).all()
    unknown = values[_SETS].to_numpy().copy()
    for found in runs.look_up(slot, sorted_distinct(hashes)):
        if alone:
            at = np.searchsorted(hashes, found[HASH].to_numpy())
            same = _equal(values[at], found)
            at, bits = at[same], found[_SETS].to_numpy()[same]
        else:
            at, bits = _joined(values, found)
        np.bitwise_and.at(unknown, at, ~bits)
    new = unknown != 0
    return filter_rows(values.with_columns(pl.Series(_SETS, unknown)), new)


def _equal(values: pl.DataFrame, found: pl.DataFrame) -> Bools:
    groups, same = (values[n].eq_missing(found[n]).to_numpy() for n in (GROUP_ID, _VALUE))
    equal: Bools = groups & same
    return equal


def _joined(values: pl.DataFrame, found: pl.DataFrame) -> tuple[Int64s, Int64s]:
    """Return where the rows that were found are among values of which some share a hash, and their bits."""
    on = [GROUP_ID, _VALUE]
    placed = values.select(on).with_row_index("at")
    met = placed.join(found.select(*on, _SETS), on=on, nulls_equal=True)
    return met["at"].to_numpy().astype(np.int64), met[_SETS].to_numpy()


def _counts(
    values: pl.DataFrame, names: Sequence[str], first: Int64s, height: int
) -> Iterator[pl.Series]:
    """Yield, for each set, how many values are new in each group, at the group's first partial."""
    groups, sets = values[GROUP].to_numpy(), values[_SETS].to_numpy()
    for bit, name in enumerate(names):
        counts = np.zeros(height, np.int64)
        counts[first] = np.bincount(groups[sets >> bit & 1 == 1], minlength=len(first))
        yield pl.Series(count_column(name), counts)
