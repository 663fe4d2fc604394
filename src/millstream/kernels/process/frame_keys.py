"""The state of the keys of a batch while calls are made: each call may replace that of some of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.frames import HASH, in_one_chunk
from millstream.kernels.state.keyhash import Hashes

_REPLACED_MIN = 8
_REPLACED_SHARE = 16


@dataclass
class FrameKeys:
    """The keys of a batch, by number: their columns and hashes, their state, and the event time of their last calls.

    Rows that replace others are kept behind those that calls began with, until they are a sixteenth as many. So
    a call for few keys costs little, as there are many where rows fail or where one key has many timers.
    """

    keys: pl.DataFrame
    held: pl.DataFrame
    now_us: Int64s

    def __post_init__(self) -> None:
        self._began_with(self.held)

    def _began_with(self, held: pl.DataFrame) -> None:
        self.held, self._replaced = held, held.clear()
        self._places = np.arange(len(self.now_us))  # of each key, in both tables as one

    @property
    def hashes(self) -> Hashes:
        found: Hashes = self.keys[HASH].to_numpy()
        return found

    @property
    def state(self) -> pl.DataFrame:
        """The state of all keys, in their order."""
        if self._replaced.height:
            self._put_together()
        return self.held

    def _put_together(self) -> None:
        self._began_with(in_one_chunk([self.held, self._replaced])[self._places])

    def some(self, here: Int64s) -> pl.DataFrame:
        """Return the state of some keys, in the order of their numbers."""
        count = len(self.now_us)
        if len(here) == count:
            return self.state
        places = self._places[here]
        replaced = places >= count
        if not replaced.any():
            return self.held[places]
        parts = [self.held[places[~replaced]], self._replaced[places[replaced] - count]]
        order = np.argsort(replaced, kind="stable")
        found: pl.DataFrame = in_one_chunk(parts)[np.argsort(order)]
        return found

    def put(self, here: Int64s, state: pl.DataFrame, now_us: Int64s) -> None:
        """Replace what is known of some keys."""
        self.now_us[here] = now_us
        count = len(self.now_us)
        if len(here) == count:
            self._began_with(state)
            return
        self._places[here] = count + self._replaced.height + np.arange(len(here))
        self._replaced = in_one_chunk([self._replaced, state])
        if self._replaced.height > _REPLACED_MIN + count // _REPLACED_SHARE:
            self._put_together()
