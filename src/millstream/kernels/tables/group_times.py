"""The event time of a group's row: the greatest time of the rows in the group, or the least.

It depends on the rows that are there, and on nothing else: not on batches, nor on rows that went. So a row
that is taken back has the time with which it came.

The times of all rows are kept, as signed changes; of each group also the time that counts, and how many of its
rows have it. Mostly that is enough: rows with a time beyond it replace it, and it stays while a row has it. Only
when its last row goes, and none comes in its place, the times of the group are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from millstream.kernels.changes import group_numbers
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import HASH, TIME, WEIGHT
from millstream.kernels.state.arrangement import Arrangement
from millstream.kernels.state.hash_order import sorted_distinct

GROUP = "__group"  # Int64: the number of a row's group within a batch
GROUP_TIME = "__group_time"  # Int64: the time of the group's row
GROUP_TIME_ROWS = "__group_time_rows"  # Int64: how many rows of the group have it; 0: it has none
_BORDER = "__border"


@dataclass
class GroupTimes:
    """The times of the rows of groups, in one bucket. ``kept`` holds them by ``keys``."""

    kept: Arrangement
    keys: tuple[str, ...]
    greatest: bool

    def update(
        self, groups: pl.DataFrame, known: pl.DataFrame, changes: pl.DataFrame, present: pl.Series
    ) -> pl.DataFrame:
        """Add changes of times; return ``__group_time`` and ``__group_time_rows`` of each group.

        Args:
            groups: The keys and hashes of the groups; the n-th has the number n.
            known: ``__group``, ``__group_time`` and ``__group_time_rows`` of those that were there.
            changes: ``__group``, ``__time`` and ``__weight`` of rows that came or went.
            present: Which groups have rows after that.
        """
        changes = _summed(changes)
        found = self._beyond(known, changes)
        numbers = pl.Series(GROUP, np.arange(groups.height))
        times = pl.DataFrame([numbers]).join(
            found, on=GROUP, how="left", maintain_order="left", validate="1:1"
        )
        missing = times[GROUP_TIME].is_null() & present
        if missing.any():
            read = self._read(groups.filter(missing), numbers.filter(missing), changes)
            times = times.update(read, on=GROUP)
        rows = groups[changes[GROUP]].hstack(changes.select(TIME, WEIGHT))
        self.kept.add(rows)
        return times.sort(GROUP).select(
            pl.col(GROUP_TIME).fill_null(0), pl.col(GROUP_TIME_ROWS).fill_null(0)
        )

    def _beyond(self, known: pl.DataFrame, changes: pl.DataFrame) -> pl.DataFrame:
        """Return the time of groups as far as it follows from the time before and the changes."""
        held = known.filter(pl.col(GROUP_TIME_ROWS) > 0)
        border = held.select(GROUP, pl.col(GROUP_TIME).alias(_BORDER))
        came = changes.join(border, on=GROUP, how="left", maintain_order="left")
        beyond = (
            pl.col(TIME) >= pl.col(_BORDER) if self.greatest else pl.col(TIME) <= pl.col(_BORDER)
        )
        came = came.filter(pl.col(_BORDER).is_null() | beyond).drop(_BORDER)
        before = held.rename({GROUP_TIME: TIME, GROUP_TIME_ROWS: WEIGHT})
        return self._best(pl.concat([came, before.select(came.columns)]))

    def _read(
        self, groups: pl.DataFrame, numbers: pl.Series, changes: pl.DataFrame
    ) -> pl.DataFrame:
        """Return the time of groups from all times that are kept of them, and the changes."""
        own = changes.filter(pl.col(GROUP).is_in(numbers.implode()))
        kept = self.kept.look_up(sorted_distinct(groups[HASH].to_numpy()))
        if kept is None:
            return self._best(own)
        keys = list(self.keys)
        found = group_numbers(pl.concat([groups[keys], kept[keys]]), keys)[groups.height :]
        mine = found < groups.height
        kept = filter_rows(kept, mine).select(TIME, WEIGHT)
        of_groups = numbers.gather(found[mine])
        return self._best(pl.concat([kept.hstack([of_groups]).select(own.columns), own]))

    def _best(self, times: pl.DataFrame) -> pl.DataFrame:
        """Return of each group the time that counts, and how many rows have it."""
        there = _summed(times).filter(pl.col(WEIGHT) > 0).sort(GROUP, TIME)
        keep: Literal["first", "last"] = "last" if self.greatest else "first"
        best = there.unique(GROUP, keep=keep, maintain_order=True)
        return best.select(
            GROUP, pl.col(TIME).alias(GROUP_TIME), pl.col(WEIGHT).alias(GROUP_TIME_ROWS)
        )


def _summed(times: pl.DataFrame) -> pl.DataFrame:
    summed = times.group_by(GROUP, TIME).agg(pl.col(WEIGHT).sum())
    return summed.filter(pl.col(WEIGHT) != 0).sort(GROUP, TIME)
