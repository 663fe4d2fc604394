"""What is emitted of the matches of a row pattern: a row for each match, or its rows, with measures.

A measure is an expression over the columns of a row and over references (:class:`RowReference`). For each row that is
emitted, the *current row* is that row of the match, or its last row where a match is one row. References are worked out for all rows
of a batch at once: those of the whole match (``final``), or of its rows up to the current one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import polars as pl

from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.errors.user_code import UserCode
from millstream.kernels.frames import TIME, to_datetimes
from millstream.kernels.patterns import row_tables as t
from millstream.kernels.patterns.measures import MATCH_END, MATCH_START, Measured, measured
from millstream.kernels.patterns.row_pattern import sets_of
from millstream.kernels.patterns.row_references import RowReference, references_in
from millstream.kernels.patterns.tables import Places

_SUMS = ("count", "sum", "mean")
_EXACT_MAX = 2**53

RowsPerMatch = Literal["one", "all", "all_omit_empty", "all_with_unmatched"]


@dataclass(frozen=True)
class FoundMatches:
    """Matches in a batch's rows. ``taken`` has their rows, as (variable, whether it is excluded), match by match.

    ``matches`` is as the matcher gives it. ``rows_of`` are where the rows of keys begin, ``group`` is the key of each row.
    """

    rows: pl.DataFrame
    group: Int64s
    rows_of: Int64s
    matches: Places
    taken: Places
    within_us: int | None


@dataclass(frozen=True)
class RowMeasures:
    """The columns of what is emitted. ``columns`` are those of the stream, ``subsets`` what names of several variables stand for."""

    expressions: tuple[tuple[str, pl.Expr], ...]
    columns: tuple[tuple[str, pl.DataType], ...]
    variables: tuple[str, ...]
    subsets: tuple[tuple[str, tuple[str, ...]], ...]
    rows_per_match: RowsPerMatch

    @cached_property
    def sets(self) -> dict[str, int]:
        """The sets of variables that names stand for, as bits."""
        return sets_of(self.variables, self.subsets)

    @cached_property
    def references(self) -> dict[str, RowReference]:
        """What the measures use of matched rows, by the name of the column."""
        return references_in(expression for _, expression in self.expressions)

    @property
    def columns_read(self) -> list[str]:
        """The columns of the stream that rows must have, in their order."""
        every = [name for name, _ in self.columns]
        if self.rows_per_match != "one":
            return every
        asked = {name for _, one in self.expressions for name in one.meta.root_names()}
        asked |= {one.column for one in self.references.values() if one.column is not None}
        if any(one.kind == "list" and one.column is None for one in self.references.values()):
            return every
        return [name for name in every if name in asked]

    def of(self, by: Sequence[str], found: FoundMatches, code: UserCode) -> tuple[Measured, Int64s]:
        """Return what is emitted, in the order of the matches, and which match each row is of.

        Of a row that no match has, measures are null, whatever they say. Of a match without rows there is no current row.
        """
        emitted = _Emitted(self, found)
        table = emitted.table()
        masked = table.select(pl.when(pl.Series(emitted.is_matched)).then(pl.all()))
        one = self.rows_per_match == "one"
        masked = masked.with_columns(
            table[name] for name in (*by, *([MATCH_START] if one else [])) if name in table.columns
        )
        hidden = [emitted.value(one).alias(name) for name, one in self.references.items()]
        own = [*by, MATCH_START, MATCH_END] if one else self.columns_read
        made = measured(table[own], masked.hstack(hidden), self.expressions, code)
        match = emitted.match[made.places]
        if self.rows_per_match != "all_with_unmatched" or not len(match):
            return made, match
        in_a_match = pl.Series(emitted.lengths[match] != t.UNMATCHED)
        nulled = [
            values.zip_with(in_a_match, pl.Series([None], dtype=values.dtype))
            for values in (made.table[name] for name, _ in self.expressions)
        ]
        return replace(made, table=made.table.with_columns(nulled)), match


@dataclass(frozen=True)
class _Emitted:
    """The rows that are emitted, and what is known of the matches that they are of.

    ``match`` is the number of each one's match, ``current`` how many rows that match has up to it: 0 where it has none.
    """

    measures: RowMeasures
    found: FoundMatches
    match: Int64s = field(init=False)
    current: Int64s = field(init=False)

    def __post_init__(self) -> None:
        lengths = np.maximum(self.lengths, 0)
        count = len(lengths)
        if self.measures.rows_per_match == "one":
            match, current = np.arange(count), lengths
        else:
            shown = np.maximum(lengths, 1)  # an empty match and a row without one are a row
            match = np.repeat(np.arange(count), shown)
            current = 1 + np.arange(len(match)) - np.repeat(np.cumsum(shown) - shown, shown)
            current = np.where(lengths[match] > 0, current, 0)
            kept = (current == 0) | ~self._is_excluded(match, current)
            match, current = match[kept], current[kept]
        object.__setattr__(self, "match", match)
        object.__setattr__(self, "current", current)

    @property
    def lengths(self) -> Int64s:
        lengths: Int64s = self.found.matches[:, t.LENGTH]
        return lengths

    @property
    def is_matched(self) -> Bools:
        matched: Bools = self.current > 0
        return matched

    def _is_excluded(self, match: Int64s, current: Int64s) -> Bools:
        if not len(self.found.taken):
            return np.zeros(len(match), np.bool_)
        place = np.maximum(self.found.matches[match, t.OFFSET] + current - 1, 0)
        excluded: Bools = self.found.taken[np.minimum(place, len(self.found.taken) - 1), 1] > 0
        return excluded

    def table(self) -> pl.DataFrame:
        """Return the columns of the current rows, or of the row at which nothing is matched; and when the match began and ended."""
        rows = self.found.rows
        start = self.found.matches[self.match, t.START]
        place = start + np.maximum(self.current - 1, 0)
        table: pl.DataFrame = rows[place][
            [name for name, _ in self.measures.columns if name in rows.columns]
        ]
        if self.measures.rows_per_match != "one":
            return table
        times = rows[TIME]
        ended = to_datetimes(times[place])
        return table.with_columns(
            to_datetimes(times[start]).alias(MATCH_START),
            ended.zip_with(pl.Series(self.is_matched), pl.Series([None], dtype=ended.dtype)).alias(
                MATCH_END
            ),
        )

    def value(self, reference: RowReference) -> pl.Series:
        """Return a reference's value for each row."""
        if reference.kind == "match_number":
            return pl.Series(self.found.matches[self.match, t.COUNTED])
        members = _Members.of(self, reference)
        if reference.navigates:
            return self._row_value(reference, members)
        return self._aggregate(reference, members)

    def _row_value(self, reference: RowReference, members: _Members) -> pl.Series:
        """Return the value of the row that a navigation leads to."""
        wanted = (
            reference.logical if reference.kind == "first" else members.seen - 1 - reference.logical
        )
        is_there = (wanted >= 0) & (reference.logical < members.seen)
        member = np.where(is_there, members.first + wanted, 0)
        depth = members.depth_at(member)
        start = self.found.matches[self.match, t.START]
        row = start + depth + reference.physical
        if reference.classifier:
            length = self.lengths[self.match]
            is_there &= (row >= start) & (row < start + length)
            place = np.where(is_there, self.found.matches[self.match, t.OFFSET] + row - start, 0)
            if not len(self.found.taken):
                return pl.Series([None], dtype=pl.String).new_from_index(0, len(row))
            names = pl.Series(self.measures.variables, dtype=pl.String)
            labels: pl.Series = names[self.found.taken[place, 0]]
            return labels.set(pl.Series(~is_there), None)
        assert reference.column is not None
        is_there &= self._exists(row, start)
        values = self.found.rows[reference.column][np.where(is_there, row, 0)]
        missing = pl.Series([None], dtype=values.dtype)
        return values.zip_with(pl.Series(is_there), missing)

    def _exists(self, row: Int64s, start: Int64s) -> Bools:
        """Return which rows are there for the matches that begin so: rows of their keys that are within."""
        key = self.found.group[start]
        inside: Bools = (row >= self.found.rows_of[key]) & (row < self.found.rows_of[key + 1])
        if self.found.within_us is None:
            return inside
        times = self.found.rows[TIME].to_numpy()
        distance = np.abs(times[np.where(inside, row, 0)] - times[start])
        near: Bools = distance <= self.found.within_us
        return inside & near

    def _aggregate(self, reference: RowReference, members: _Members) -> pl.Series:
        """Return an aggregate of the rows that are members, up to the current row or of the whole match."""
        dtype = reference.dtype(dict(self.measures.columns))
        if reference.kind == "count" and reference.column is None:
            return pl.Series(members.seen, dtype=pl.Int64)
        if reference.kind in _SUMS:
            exact = members.exact(reference, dtype)
            if exact is not None:
                return exact
        running = members.running(reference, dtype)
        some = members.seen > 0
        place = np.where(some, members.first + members.seen - 1, 0)
        if reference.kind == "list":
            return self._lists(running, members, dtype)
        empty = pl.Series([0 if reference.kind == "count" else None], dtype=dtype)
        if not running.len():
            return empty.new_from_index(0, len(some))
        return running[place].cast(dtype).zip_with(pl.Series(some), empty)

    def _lists(self, values: pl.Series, members: _Members, dtype: pl.DataType) -> pl.Series:
        """Return the values of whole matches as lists."""
        table = pl.DataFrame({"match": members.match, "value": values})
        grouped = table.group_by("match", maintain_order=True).agg("value")
        wanted = pl.DataFrame({"match": self.match})
        lists = wanted.join(grouped, on="match", how="left", maintain_order="left")["value"]
        return lists.fill_null([]).cast(dtype)


@dataclass(frozen=True)
class _Members:
    """The rows that are matched to one of a set of variables, match by match: their matches and places in these.

    For each row that is emitted: ``first`` is the number of its match's first member, ``seen`` how many members there are
    up to it, or in the whole match.
    """

    emitted: _Emitted
    match: Int64s
    depth: Int64s
    first: Int64s
    seen: Int64s

    @classmethod
    def of(cls, emitted: _Emitted, reference: RowReference) -> _Members:
        found = emitted.found
        lengths = np.maximum(emitted.lengths, 0)
        of_match = np.repeat(np.arange(len(lengths)), lengths)
        depth = np.arange(len(of_match)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        is_member = np.ones(len(of_match), np.bool_)
        if reference.variable is not None:
            wanted = emitted.measures.sets[reference.variable]
            is_member = (wanted >> found.taken[:, 0] & 1) > 0
        before = np.concatenate([[0], np.cumsum(is_member)])
        offset = found.matches[emitted.match, t.OFFSET]
        up_to = lengths[emitted.match] if reference.final else emitted.current
        first = before[offset]
        return cls(
            emitted, of_match[is_member], depth[is_member], first, before[offset + up_to] - first
        )

    def depth_at(self, member: Int64s) -> Int64s:
        if not len(self.depth):
            return np.zeros(len(member), np.int64)
        depth: Int64s = self.depth[np.minimum(member, len(self.depth) - 1)]
        return depth

    def exact(self, reference: RowReference, dtype: pl.DataType) -> pl.Series | None:
        """Return count, sum or mean of whole numbers as the difference of two sums over all members; None where it might round.

        A running sum in floats, as the matcher has it, is exact up to 2**53, too: so both are the same number.
        """
        rows = self.emitted.found.rows
        assert reference.column is not None
        column = rows[reference.column]
        if not column.dtype.is_integer() or column.dtype in (pl.Int128, pl.UInt128):
            return None
        values = column[self.emitted.found.matches[self.match, t.START] + self.depth]
        least, most = values.min(), values.max()
        if max(-int(least or 0), int(most or 0)) * values.len() >= _EXACT_MAX:
            return None
        until = self.first + self.seen
        counts = np.concatenate([[0], np.cumsum(values.is_not_null().to_numpy())])
        counted = counts[until] - counts[self.first]
        if reference.kind == "count":
            return pl.Series(counted, dtype=pl.Int64).cast(dtype)
        sums = np.concatenate([[0], np.cumsum(values.fill_null(0).to_numpy(), dtype=np.int64)])
        total = sums[until] - sums[self.first]
        made = pl.Series(total / np.maximum(counted, 1) if reference.kind == "mean" else total)
        return made.cast(dtype).zip_with(pl.Series(counted > 0), pl.Series([None], dtype=dtype))

    def running(self, reference: RowReference, dtype: pl.DataType) -> pl.Series:
        """Return an aggregate of the members of each match up to each member; of a list, the members' values."""
        rows = self.emitted.found.rows
        row = self.emitted.found.matches[self.match, t.START] + self.depth
        columns = self.emitted.measures.columns
        if reference.column is None:
            whole: pl.DataFrame = rows[row]
            return whole.select(name for name, _ in columns).to_struct("value")
        values: pl.Series = rows[reference.column][row]
        if reference.kind == "list":
            return values
        if reference.kind in ("sum", "mean"):
            values = values.cast(dtype)
        table = pl.DataFrame({"match": self.match, "value": values})
        value = pl.col("value")
        counted = value.is_not_null().cum_sum().cast(pl.Int64)
        total = value.fill_null(0).cum_sum()
        made = {
            "count": counted,
            "sum": pl.when(counted > 0).then(total),
            "mean": pl.when(counted > 0).then(total / counted),
            "min": value.cum_min().forward_fill(),
            "max": value.cum_max().forward_fill(),
        }[reference.kind]
        return table.select(made.over("match"))["value"]
