"""What is emitted of matches: the key, when they began and ended, and measures of their rows.

Measures are code of the user's: where one fails on a match, that match becomes a dead letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.errors.dead_letter_collector import FailedRows
from millstream.kernels.errors.user_code import UserCode
from millstream.kernels.frames import TIME, to_datetimes
from millstream.kernels.patterns.conditions import Matched, matched_in

MATCH_START, MATCH_END = "match_start", "match_end"
_MATCH = "__match"
_PLACE = "__place"


@dataclass(frozen=True)
class Measured:
    """What measures give: ``table`` has the rows on which none fails, ``places`` where these were; ``failed`` are the others."""

    table: pl.DataFrame
    places: Int64s
    failed: tuple[FailedRows, ...]


def measured(
    own: pl.DataFrame,
    given: pl.DataFrame,
    expressions: Sequence[tuple[str, pl.Expr]],
    code: UserCode,
) -> Measured:
    """Add measures to the ``own`` columns of what is emitted; they look at the columns of ``given``, row by row.

    Raises:
        UserCodeError: a measure fails, and failing rows are to stop the job, or all of many do.
    """

    def measure(table: pl.DataFrame) -> list[pl.Series]:
        # Not by select: a measure that looks at nothing, such as a literal, is one value there.
        made = table.with_columns(expression.alias(name) for name, expression in expressions)
        return [made[name] for name, _ in expressions]

    every = np.arange(own.height)
    done = code.run(measure, given.with_columns(pl.Series(_PLACE, every)))
    if not done.failing.height:
        assert done.result is not None
        return Measured(own.hstack(done.result), every, ())
    failed = (FailedRows(code.step, own[done.failing[_PLACE].to_numpy()], done.reasons),)
    places = done.passing[_PLACE].to_numpy()
    kept = own[places]
    return Measured(kept if done.result is None else kept.hstack(done.result), places, failed)


@dataclass(frozen=True)
class Measures:
    """The columns of a match besides its key: expressions over the key and aggregates of matched rows.

    ``columns`` are those of the stream, ``steps`` the names of the steps by their states.
    """

    expressions: tuple[tuple[str, pl.Expr], ...]
    columns: tuple[tuple[str, pl.DataType], ...]
    steps: tuple[str, ...]

    @property
    def matched(self) -> dict[str, Matched]:
        return matched_in(expression for _, expression in self.expressions)

    @property
    def columns_read(self) -> list[str]:
        """The columns of the stream that matched rows must have, in their order."""
        every = [name for name, _ in self.columns]
        asked = {one.column for one in self.matched.values() if one.aggregate != "count"}
        return every if None in asked else [name for name in every if name in asked]

    def of(
        self, by: Sequence[str], rows: pl.DataFrame, found: Int64s, count: int, code: UserCode
    ) -> Measured:
        """Return a row for each of ``count`` matches.

        ``found`` has the rows of the matches, as (number of the match, row, step), match by match in their order.
        """
        matches, places, states = found[:, 0], found[:, 1], found[:, 2]
        first = places[_first_of(matches)]
        last = places[_first_of(matches[::-1], len(matches))]
        table = pl.DataFrame(
            [
                *(rows[name][first] for name in by),
                to_datetimes(rows[TIME][first]).alias(MATCH_START),
                to_datetimes(rows[TIME][last]).alias(MATCH_END),
            ]
        )
        types = dict(self.columns)
        hidden = []
        for name, matched in self.matched.items():
            mine = states == self.steps.index(matched.step)
            lists = _lists(matched, found[mine], rows, count, self.columns)
            hidden.append(_aggregate(lists, matched).cast(matched.dtype(types)).alias(name))
        return measured(table, table.hstack(hidden), self.expressions, code)


def _first_of(matches: Int64s, backwards: int | None = None) -> Int64s:
    """Return where each match begins; ``backwards``: of so many given in reverse, where each ends, in their order."""
    begins = np.flatnonzero(np.diff(matches, prepend=-1))
    return begins if backwards is None else (backwards - 1 - begins)[::-1]


def _lists(
    matched: Matched,
    found: Int64s,
    rows: pl.DataFrame,
    count: int,
    columns: Sequence[tuple[str, pl.DataType]],
) -> pl.Series:
    """Return, for each match, the list of what the rows of a step have, given where these are."""
    matches, places = found[:, 0], found[:, 1]
    if matched.aggregate == "count":
        values = pl.Series("value", places)
    elif matched.column is None:
        values = rows[places].select(name for name, _ in columns).to_struct("value")
    else:
        values = rows[matched.column][places].alias("value")
        if matched.aggregate in ("sum", "mean"):  # polars adds up in the type of the values
            values = values.cast(matched.dtype(dict(columns)))
    table = pl.DataFrame({_MATCH: matches, "value": values})
    grouped = table.group_by(_MATCH, maintain_order=True).agg("value")
    every = pl.DataFrame({_MATCH: pl.int_range(count, eager=True)})
    lists = every.join(grouped, on=_MATCH, how="left", maintain_order="left")["value"]
    empty = pl.Series([[]], dtype=lists.dtype).new_from_index(0, count)
    return lists.zip_with(lists.is_not_null(), empty)


def _aggregate(lists: pl.Series, matched: Matched) -> pl.Series:
    """Return the aggregate of each list. They are summed one after the other, whatever else is in the batch."""
    if matched.aggregate == "list":
        return lists
    method = "len" if matched.aggregate == "count" else matched.aggregate
    made: pl.Series = getattr(lists.list, method)()
    return made
