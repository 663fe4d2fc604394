"""What is stored of keys as the frames that the user's code is given, and back."""

from __future__ import annotations

import math

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.process.declarations import StateDeclaration
from millstream.kernels.process.frame_calls import TIMERS, one_value, with_defaults
from millstream.kernels.process.frame_keys import FrameKeys
from millstream.kernels.process.stored_keys import (
    StateColumns,
    keys_of_batch,
    stored_frame,
    stored_parts,
)
from millstream.kernels.time.watermarks import NO_WATERMARK

_TIMES = pl.List(pl.Datetime("us", "UTC"))


def frame_keys(
    known: pl.DataFrame | None, due: pl.DataFrame | None, columns: StateColumns, *, timers: bool
) -> tuple[FrameKeys, Int64s]:
    """Return the keys of a batch with their state, those that are stored first; and the number of the key of each row."""
    every, numbers = keys_of_batch(known, due, columns)
    firsts = np.empty(int(numbers.max()) + 1, np.int64)
    firsts[numbers[::-1]] = np.arange(len(numbers))[::-1]
    held = 0 if known is None else known.height
    states, now, timers_us = stored_parts(known, columns)
    places = np.minimum(firsts, held)
    state = pl.concat([states, states.clear(1)])[places]
    if timers:
        none = pl.Series(TIMERS, [[]], pl.List(pl.Int64))
        state = state.with_columns(
            pl.concat([timers_us.alias(TIMERS), none])[places].cast(_TIMES).alias(TIMERS)
        )
    now_us = np.append(now.to_numpy(), NO_WATERMARK)[places]
    return FrameKeys(every[firsts], with_defaults(state, columns), now_us), numbers[held:]


def kept_rows(keys: FrameKeys, columns: StateColumns) -> pl.DataFrame:
    """Return what is to be stored: of keys of which there is something that a later call could see."""
    state = keys.state
    empty = [_is_empty(name, one) for name, one in columns.states]
    if TIMERS in state.columns:
        empty.append(pl.col(TIMERS).list.len() == 0)
    kept = state.select(~pl.all_horizontal(pl.repeat(value=True, n=pl.len()), *empty)).to_series()
    mine = state.filter(kept)
    timers = mine[TIMERS].cast(pl.List(pl.Int64)) if TIMERS in state.columns else None
    now = pl.Series(keys.now_us).filter(kept)
    return stored_frame(keys.keys.filter(kept), mine, now, timers, columns)


def _is_empty(name: str, one: StateDeclaration) -> pl.Expr:
    """Return whether a state is that of a key of which nothing is held."""
    held = pl.col(name)
    if one.kind != "value":
        return held.list.len() == 0
    if one.default is None:
        return held.is_null()
    same = held == one_value(one.default, one.dtype)
    if (
        one.dtype.is_float() and one.default == 0
    ):  # what is equal need not be the same: 0.0 and -0.0
        same &= (1 / held) == math.copysign(math.inf, one.default)
    return same.fill_null(value=False)
