"""Rows of windows that can still change, by key, as signed changes in slots of time.

An operator over the results of windows gets them in one of three ways (``Revision``):

``once``      each row comes once, and in the batch in which its window is over: nothing is kept here
``replaced``  a later row of a window and key replaces the one before; one with ``__diff`` -1 removes it
``signed``    a row that is replaced is taken back first

A window is *over* when the operator's watermark has reached its end: the watermark that comes out of windows
is behind by their lateness, so no row of the window comes after that. Rows are kept until all windows of
their slot are over, and then given out once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.changes import concat_present, consolidate
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import DIFF, HASH, TIME, WEIGHT
from millstream.kernels.state.hash_order import last_of_key, sorted_distinct
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import SortedRuns
from millstream.kernels.windows.assigners import Cumulating, Tumbling
from millstream.kernels.windows.calendar_windows import Calendar

Revision = Literal["once", "replaced", "signed"]
TiledWindow = Tumbling | Calendar
ComparedWindow = TiledWindow | Cumulating

START = (
    "__start"  # Int64: label of the row's window, microseconds since 1970 UTC: see WindowAssigner
)
_SLOTS_OPEN_MAX = 8
_FAMILY = "open"
_ROW = "__row"


@dataclass(frozen=True)
class WindowSlots:
    """Windows side by side, or cumulating ones, and slots of time for those that are open at a time.

    ``open_us`` is how long after its end a window's rows can change.
    """

    window: ComparedWindow
    open_us: int

    @property
    def width_us(self) -> int:
        slide_us = self.window.slide_us
        return slide_us * max(1, -(-self.open_us // (slide_us * _SLOTS_OPEN_MAX)))

    def starts(self, times: pl.Series) -> pl.Series:
        """Return the labels of the windows that hold these times; of windows side by side, their starts."""
        return self.window.slices(times).alias(START)

    def of(self, times_us: Int64s) -> Int64s:
        """Return the slots of times."""
        offset = self.window.latest_end(0)
        slots: Int64s = (times_us - offset) // self.width_us * self.width_us + offset
        return slots

    def is_over(self, slot: int, watermark_us: int) -> bool:
        """Return whether all windows that start in a slot are over."""
        return self.window.latest_end(slot + self.width_us - 1) <= watermark_us

    def divide(self, rows: pl.DataFrame, times_us: Int64s) -> Iterator[tuple[int, pl.DataFrame]]:
        """Divide rows among the slots of the times that each has, in the order of slots."""
        slots = self.of(times_us)
        for slot in np.unique(slots).tolist():
            yield slot, filter_rows(rows, slots == slot)


@dataclass
class OpenWindows:
    """The rows of windows that can still change, in an operator's state."""

    state: OperatorState
    slots: WindowSlots
    by: tuple[str, ...]

    @property
    def runs(self) -> SortedRuns:
        return self.state.runs(_FAMILY, WEIGHT, signed=True)

    def look_up(self, like: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of the keys whose hashes some rows have."""
        hashes = sorted_distinct(like[HASH].to_numpy())
        found = [
            rows for slot in sorted(self.runs.slots) for rows in self.runs.look_up(slot, hashes)
        ]
        held = concat_present(found)
        return like.clear() if held is None else consolidate(held[like.columns])

    def changes(self, rows: pl.DataFrame, held: pl.DataFrame, revision: Revision) -> pl.DataFrame:
        """Return the signed changes that rows, in their order, make to the rows held of their keys."""
        if revision == "signed":
            return consolidate(rows)
        latest = rows.filter(last_of_key(rows, (*self.by, START)))
        key = numbered_keys(latest, (*self.by, START))
        replaced = numbered_keys(held, (*self.by, START)).with_row_index(_ROW)
        replaced = replaced.join(
            key, on=key.columns, how="semi", nulls_equal=True, maintain_order="left"
        )
        gone = held[replaced[_ROW]].with_columns(-pl.col(WEIGHT))
        return consolidate(pl.concat([gone, latest.filter(pl.col(WEIGHT) > 0)]))

    def add(self, changes: pl.DataFrame) -> None:
        """Keep changes."""
        for slot, rows in self.slots.divide(changes, changes[START].to_numpy()):
            self.runs.add(slot, rows, consolidate)

    def take_over(self, like: pl.DataFrame, watermark_us: int) -> pl.DataFrame:
        """Give out the rows of the slots that are over, and forget them."""
        over = [s for s in sorted(self.runs.slots) if self.slots.is_over(s, watermark_us)]
        held = concat_present([rows for slot in over for rows in self.runs.scan(slot)])
        for slot in over:
            self.runs.drop_slot(slot)
        if held is None:
            return like.clear()
        return in_window_order(consolidate(held[like.columns]))


def window_rows(tables: Sequence[pl.DataFrame], slots: WindowSlots) -> pl.DataFrame:
    """Put the rows of a batch together, with the starts of their windows and weights."""
    rows = pl.concat(tables)
    weights = (
        rows[DIFF].cast(pl.Int64)
        if DIFF in rows.columns
        else pl.Series(np.ones(rows.height, np.int64))
    )
    return rows.drop(DIFF, strict=False).hstack([slots.starts(rows[TIME]), weights.alias(WEIGHT)])


def in_window_order(rows: pl.DataFrame) -> pl.DataFrame:
    """Order rows by window, then by the hash of their keys."""
    return rows.sort(START, HASH, maintain_order=True)


def numbered_keys(rows: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    """Return the key columns under numbers: polars takes a name such as ``^a.*$`` for a pattern.

    Where there are none, all rows have one key, and a column for it.
    """
    if not by:
        return pl.DataFrame({"0": pl.zeros(rows.height, pl.Int8, eager=True)})
    return pl.DataFrame({str(number): rows[name] for number, name in enumerate(by)})
