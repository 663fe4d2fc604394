"""Windows: which spans of time an event belongs to. All spans are half-open: ``[start, end)``.

Source: Akidau et al., "The Dataflow Model", VLDB 2015, section 2.2 (window assignment).
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl


@dataclass(frozen=True)
class Tumbling:
    """Windows of one size, side by side. Window k is ``[offset + k·size, offset + (k+1)·size)``.

    Microseconds. Times before 1970 fall into windows just so (the division rounds down).
    """

    size_us: int
    offset_us: int = 0

    def start(self, time_us: pl.Expr) -> pl.Expr:
        """Give the start of the window that holds each time."""
        return (time_us - self.offset_us) // self.size_us * self.size_us + self.offset_us
