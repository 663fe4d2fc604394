"""Windows: which spans of time an event belongs to. All spans are half-open: ``[start, end)``.

Time is cut into *pieces*, such that a window is made of whole pieces: an event is kept once, in its
piece, however many windows it is in. Where windows lie side by side, a piece is a window. All times
are microseconds since 1970 UTC, of either sign, in int64 arrays.

Source: Akidau et al., "The Dataflow Model", VLDB 2015, section 2.2 (window assignment); pieces are
the panes of Li et al., "No Pane, No Gain", SIGMOD Record 34(1), 2005.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from millstream.durations import describe_us

Times = npt.NDArray[np.int64]


class TimeWindows(Protocol):
    """A division of time into windows.

    The windows that hold a piece are ``first(piece) + n · slide_us``, for n below ``counts(piece)``.
    """

    @property
    def slide_us(self) -> int:
        """The usual distance between the starts of two windows that follow one another."""
        ...

    @property
    def tiled(self) -> bool:
        """Whether every time is in exactly one window."""
        ...

    def pieces(self, times: pl.Series) -> pl.Series:
        """Give the start of the piece that holds each time."""
        ...

    def first(self, pieces: Times) -> Times:
        """Give the start of the earliest window that holds each piece."""
        ...

    def counts(self, pieces: Times) -> Times:
        """Say in how many windows each piece is."""
        ...

    def ends(self, starts: Times) -> Times:
        """Give the end of each window."""
        ...

    def passed(self, pieces: Times, reached: Times) -> Times:
        """Say how many of the windows that hold each piece end at or before a time."""
        ...

    def latest_end(self, time_us: int) -> int:
        """Give the end of the latest window that starts at or before a time."""
        ...

    def ended(self, time_us: int) -> int:
        """Give the latest end of a window at or before a time."""
        ...


@dataclass(frozen=True)
class Tumbling:
    """Windows of one size, side by side. Window k is ``[offset + k·size, offset + (k+1)·size)``.

    Times before 1970 fall into windows just so (the division rounds down).
    """

    size_us: int
    offset_us: int = 0

    @property
    def slide_us(self) -> int:
        return self.size_us

    @property
    def tiled(self) -> bool:
        return True

    def pieces(self, times: pl.Series) -> pl.Series:
        return (times - self.offset_us) // self.size_us * self.size_us + self.offset_us

    def first(self, pieces: Times) -> Times:
        return pieces

    def counts(self, pieces: Times) -> Times:
        return np.ones(len(pieces), np.int64)

    def ends(self, starts: Times) -> Times:
        return starts + self.size_us

    def passed(self, pieces: Times, reached: Times) -> Times:
        return (pieces + self.size_us <= reached).astype(np.int64)

    def latest_end(self, time_us: int) -> int:
        start = (time_us - self.offset_us) // self.size_us * self.size_us + self.offset_us
        return start + self.size_us

    def ended(self, time_us: int) -> int:
        return self.latest_end(time_us) - self.size_us

    def __str__(self) -> str:
        return f"tumbling({describe_us(self.size_us)})"


@dataclass(frozen=True)
class Hopping:
    """Windows of one size, one begun every ``slide``: ``[offset + k·slide, offset + k·slide + size)``.

    A piece is as long as the greatest common divisor of size and slide. With a slide above the size
    there are gaps, whose times are in no window.
    """

    size_us: int
    slide_us: int
    offset_us: int = 0

    @property
    def piece_us(self) -> int:
        return math.gcd(self.size_us, self.slide_us)

    @property
    def tiled(self) -> bool:
        return self.size_us == self.slide_us

    def pieces(self, times: pl.Series) -> pl.Series:
        return (times - self.offset_us) // self.piece_us * self.piece_us + self.offset_us

    def _grid(self, times: Times) -> Times:
        """Give the latest start of a window at or before each time."""
        return (times - self.offset_us) // self.slide_us * self.slide_us + self.offset_us

    def first(self, pieces: Times) -> Times:
        return self._grid(pieces - self.size_us) + self.slide_us

    def counts(self, pieces: Times) -> Times:
        return (self._grid(pieces) - self.first(pieces)) // self.slide_us + 1

    def ends(self, starts: Times) -> Times:
        return starts + self.size_us

    def passed(self, pieces: Times, reached: Times) -> Times:
        ended = (reached - self.ends(self.first(pieces))) // self.slide_us + 1
        passed: Times = np.minimum(np.maximum(ended, 0), self.counts(pieces))
        return passed

    def latest_end(self, time_us: int) -> int:
        start = (time_us - self.offset_us) // self.slide_us * self.slide_us + self.offset_us
        return start + self.size_us

    def ended(self, time_us: int) -> int:
        return self.latest_end(time_us - self.size_us)

    def __str__(self) -> str:
        return f"hopping({describe_us(self.size_us)}, {describe_us(self.slide_us)})"
