"""Windows: which spans of time an event belongs to. All spans are half-open: ``[start, end)``.

Time is cut into *slices*, such that a window is made of whole slices: an event is kept once, in its
slice, however many windows it is in. Where windows lie side by side, a slice is a window. All times
are microseconds since 1970 UTC, of either sign, in int64 arrays.

State and kernels name a window by one time, its *label*: its start, or where several windows have one
start, the start of its last slice. No two windows have the same label.

Source: Akidau et al., "The Dataflow Model", VLDB 2015, section 2.2 (window assignment); slices are
the panes of Li et al., "No Pane, No Gain", SIGMOD Record 34(1), 2005.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import polars as pl

from millstream.durations import format_us
from millstream.kernels.arrays import Int64s


class WindowAssigner(Protocol):
    """A division of time into windows.

    The labels of the windows that hold a slice are ``first(slice) + n · slide_us``, for n below
    ``counts(slice)``. They end in this order.
    """

    @property
    def slide_us(self) -> int:
        """The usual distance between the labels of two windows that follow one another."""
        ...

    @property
    def tiled(self) -> bool:
        """Whether every time is in exactly one window."""
        ...

    @property
    def window_key(self) -> tuple[str, ...]:
        """The result columns that identify a window."""
        ...

    def slices(self, times: pl.Series) -> pl.Series:
        """Return the start of the slice that holds each time."""
        ...

    def first(self, slices: Int64s) -> Int64s:
        """Return the label of the earliest window that holds each slice."""
        ...

    def counts(self, slices: Int64s) -> Int64s:
        """Return in how many windows each slice is."""
        ...

    def starts(self, labels: Int64s) -> Int64s:
        """Return the start of each window."""
        ...

    def ends(self, labels: Int64s) -> Int64s:
        """Return the end of each window."""
        ...

    def count_ended(self, slices: Int64s, reached: Int64s) -> Int64s:
        """Return how many of the windows that hold each slice end at or before a time."""
        ...

    def latest_end(self, time_us: int) -> int:
        """Return the end of the latest window that starts at or before a time."""
        ...

    def end_at_or_before(self, time_us: int) -> int:
        """Return the latest end of a window at or before a time."""
        ...


@dataclass(frozen=True)
class Tumbling:
    """Windows of one size, side by side. Window k is ``[offset + k·size, offset + (k+1)·size)``.

    Times before 1970 are in windows in the same way (the division rounds down).
    """

    size_us: int
    offset_us: int = 0

    window_key: ClassVar[tuple[str, ...]] = ("window_start",)

    @property
    def slide_us(self) -> int:
        return self.size_us

    @property
    def tiled(self) -> bool:
        return True

    def slices(self, times: pl.Series) -> pl.Series:
        return (times - self.offset_us) // self.size_us * self.size_us + self.offset_us

    def first(self, slices: Int64s) -> Int64s:
        return slices

    def counts(self, slices: Int64s) -> Int64s:
        return np.ones(len(slices), np.int64)

    def starts(self, labels: Int64s) -> Int64s:
        return labels

    def ends(self, labels: Int64s) -> Int64s:
        return labels + self.size_us

    def count_ended(self, slices: Int64s, reached: Int64s) -> Int64s:
        return (slices + self.size_us <= reached).astype(np.int64)

    def latest_end(self, time_us: int) -> int:
        start = (time_us - self.offset_us) // self.size_us * self.size_us + self.offset_us
        return start + self.size_us

    def end_at_or_before(self, time_us: int) -> int:
        return self.latest_end(time_us) - self.size_us

    def __str__(self) -> str:
        return f"tumbling({format_us(self.size_us)})"


@dataclass(frozen=True)
class Hopping:
    """Windows of one size, one begun every ``slide``: ``[offset + k·slide, offset + k·slide + size)``.

    A slice is as long as the greatest common divisor of size and slide. With a slide above the size
    there are gaps, whose times are in no window.
    """

    size_us: int
    slide_us: int
    offset_us: int = 0
    window_key: ClassVar[tuple[str, ...]] = ("window_start",)

    @property
    def slice_us(self) -> int:
        return math.gcd(self.size_us, self.slide_us)

    @property
    def tiled(self) -> bool:
        return self.size_us == self.slide_us

    def slices(self, times: pl.Series) -> pl.Series:
        return (times - self.offset_us) // self.slice_us * self.slice_us + self.offset_us

    def _grid(self, times: Int64s) -> Int64s:
        """Return the latest start of a window at or before each time."""
        return (times - self.offset_us) // self.slide_us * self.slide_us + self.offset_us

    def first(self, slices: Int64s) -> Int64s:
        return self._grid(slices - self.size_us) + self.slide_us

    def counts(self, slices: Int64s) -> Int64s:
        return (self._grid(slices) - self.first(slices)) // self.slide_us + 1

    def starts(self, labels: Int64s) -> Int64s:
        return labels

    def ends(self, labels: Int64s) -> Int64s:
        return labels + self.size_us

    def count_ended(self, slices: Int64s, reached: Int64s) -> Int64s:
        ended = (reached - self.ends(self.first(slices))) // self.slide_us + 1
        passed: Int64s = np.minimum(np.maximum(ended, 0), self.counts(slices))
        return passed

    def latest_end(self, time_us: int) -> int:
        start = (time_us - self.offset_us) // self.slide_us * self.slide_us + self.offset_us
        return start + self.size_us

    def end_at_or_before(self, time_us: int) -> int:
        return self.latest_end(time_us - self.size_us)

    def __str__(self) -> str:
        return f"hopping({format_us(self.size_us)}, {format_us(self.slide_us)})"


@dataclass(frozen=True)
class Cumulating:
    """Windows that begin together and end one step after the other: ``[s, s + n·step)``, up to ``size``.

    ``s`` is ``offset + k·size``. A slice is as long as a step, which divides the size.

    Source: the windowing function CUMULATE of Apache Flink's SQL.
    """

    size_us: int
    slide_us: int
    offset_us: int = 0
    window_key: ClassVar[tuple[str, ...]] = ("window_start", "window_end")

    @property
    def tiled(self) -> bool:
        return self.size_us == self.slide_us

    def slices(self, times: pl.Series) -> pl.Series:
        return (times - self.offset_us) // self.slide_us * self.slide_us + self.offset_us

    def first(self, slices: Int64s) -> Int64s:
        return slices

    def counts(self, slices: Int64s) -> Int64s:
        return (self.starts(slices) + self.size_us - slices) // self.slide_us

    def starts(self, labels: Int64s) -> Int64s:
        return (labels - self.offset_us) // self.size_us * self.size_us + self.offset_us

    def ends(self, labels: Int64s) -> Int64s:
        return labels + self.slide_us

    def count_ended(self, slices: Int64s, reached: Int64s) -> Int64s:
        ended = (reached - slices) // self.slide_us
        passed: Int64s = np.minimum(np.maximum(ended, 0), self.counts(slices))
        return passed

    def latest_end(self, time_us: int) -> int:
        start = (time_us - self.offset_us) // self.size_us * self.size_us + self.offset_us
        return start + self.size_us

    def end_at_or_before(self, time_us: int) -> int:
        return (time_us - self.offset_us) // self.slide_us * self.slide_us + self.offset_us

    def __str__(self) -> str:
        return f"cumulating({format_us(self.size_us)}, {format_us(self.slide_us)})"
