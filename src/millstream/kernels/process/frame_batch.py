"""What is stored of keys as the frames that the user's code is given, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from millstream.kernels.arrays import Bools, Int64s, are_counted_up
from millstream.kernels.column_types import of_one_zero
from millstream.kernels.frames import HASH
from millstream.kernels.process.declarations import StateDeclaration
from millstream.kernels.process.frame_calls import TIMERS, one_value, with_defaults
from millstream.kernels.process.frame_keys import FrameKeys
from millstream.kernels.process.stored_keys import (
    StateColumns,
    keys_of_batch,
    stored_frame,
    stored_parts,
)
from millstream.kernels.state.hash_order import (
    differs_from_previous,
    rising_order,
    sorted_distinct,
)
from millstream.kernels.state.hash_search import find
from millstream.kernels.state.keyhash import tells_keys_apart
from millstream.kernels.time.watermarks import NO_WATERMARK

_TIMES = pl.List(pl.Datetime("us", "UTC"))


class _NumberedKeys(NamedTuple):
    """The keys of a batch, by number; which of them each stored row is of, and each row of the batch."""

    keys: pl.DataFrame
    of_known: Int64s
    of_rows: Int64s


def frame_keys(
    known: pl.DataFrame | None, due: pl.DataFrame | None, columns: StateColumns, *, timers: bool
) -> tuple[FrameKeys, Int64s]:
    """Return the keys of a batch with their state, and the number of the key of each row."""
    keys, of_known, of_rows = _numbered(known, due, columns)
    states, now, timers_us = stored_parts(known, columns, timers=timers)
    if timers_us is not None:
        states = states.with_columns(timers_us.alias(TIMERS))
    now_us = np.full(keys.height, NO_WATERMARK, np.int64)
    now_us[of_known] = now.to_numpy()
    if not (len(of_known) == keys.height and are_counted_up(of_known)):
        places = np.full(keys.height, len(of_known), np.int64)
        places[of_known] = np.arange(len(of_known))
        states = pl.concat([states, states.clear(1)])[places]
    if timers:
        states = states.with_columns(pl.col(TIMERS).cast(_TIMES))
    return FrameKeys(keys, with_defaults(states, columns), now_us), of_rows


def _numbered(
    known: pl.DataFrame | None, due: pl.DataFrame | None, columns: StateColumns
) -> _NumberedKeys:
    """Return the keys of a batch, in the order of their hashes, or, where two of them share a hash, as they come."""
    names = [name for name, _ in columns.key]
    by_hash = _numbered_by_hash(known, due, names)
    if by_hash is not None:
        return by_hash
    every, numbers = keys_of_batch(known, due, columns)
    firsts = np.empty(int(numbers.max()) + 1, np.int64)
    firsts[numbers[::-1]] = np.arange(len(numbers))[::-1]
    held = 0 if known is None else known.height
    return _NumberedKeys(every[firsts], numbers[:held], numbers[held:])


def _numbered_by_hash(
    known: pl.DataFrame | None, due: pl.DataFrame | None, names: Sequence[str]
) -> _NumberedKeys | None:
    """Return keys in the order of their hashes, in which they are stored; None if keys share one."""
    held = np.empty(0, np.uint64) if known is None else known[HASH].to_numpy()
    if not differs_from_previous(held).all() or (held[1:] < held[:-1]).any():
        return None
    if due is None:
        assert known is not None
        return _NumberedKeys(
            _key_columns(known, names), np.arange(len(held)), np.empty(0, np.int64)
        )
    order = rising_order(due[HASH].to_numpy())
    rising = due[HASH].to_numpy()[order]
    begins = differs_from_previous(rising)
    if not (tells_keys_apart(due, names) or _equal_within(due, order, begins, names)):
        return None
    numbers, firsts = np.empty(len(order), np.int64), np.flatnonzero(begins)
    counts = np.diff(firsts, append=len(order))
    numbers[order] = np.repeat(np.arange(len(firsts)), counts)
    keys = _key_columns(due[[*names, HASH]][order[firsts]], names)
    if known is None:
        return _NumberedKeys(keys, np.empty(0, np.int64), numbers)
    return _merged(_key_columns(known, names), keys, numbers, names)


def _merged(
    known: pl.DataFrame, came: pl.DataFrame, numbers: Int64s, names: Sequence[str]
) -> _NumberedKeys | None:
    """Return the keys of two tables, each in the order of hashes; ``numbers`` are those of rows, in the second one."""
    held, new = known[HASH].to_numpy(), came[HASH].to_numpy()
    keys, of_known = came, find(new, held).places
    if len(of_known) < len(held):  # a key has only a timer
        every = sorted_distinct(np.concatenate([held, new]))
        of_known, of_came = np.searchsorted(every, held), np.searchsorted(every, new)
        places = np.empty(len(every), np.int64)
        places[of_known] = np.arange(len(held))
        places[of_came] = len(held) + np.arange(len(new))
        keys, numbers = pl.concat([known, came])[places], of_came[numbers]
    apart = tells_keys_apart(known, names) and tells_keys_apart(came, names)
    same = None if apart else keys[of_known]
    if same is not None and not all(same[name].eq_missing(known[name]).all() for name in names):
        return None
    return _NumberedKeys(keys, of_known, numbers)


def _key_columns(rows: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    return pl.DataFrame([of_one_zero(rows[name]) for name in (*names, HASH)])


def _equal_within(rows: pl.DataFrame, order: Int64s, begins: Bools, names: Sequence[str]) -> bool:
    """Return whether rows that stand side by side in an order, but where a group begins, are equal."""
    for name in names:
        values = rows[name].alias("0").gather(order)  # polars takes some names for patterns
        if not (begins[1:] | values[1:].eq_missing(values[:-1]).to_numpy()).all():
            return False
    return True


def kept_rows(keys: FrameKeys, columns: StateColumns) -> pl.DataFrame:
    """Return what is to be stored: of keys of which there is something that a later call could see."""
    state = keys.state
    empty = [_is_empty(name, one) for name, one in columns.states]
    if TIMERS in state.columns:
        empty.append(pl.col(TIMERS).list.len() == 0)
    kept = state.select(~pl.all_horizontal(pl.repeat(value=True, n=pl.len()), *empty)).to_series()
    now, own = pl.Series(keys.now_us), keys.keys
    if not kept.all():
        state, now, own = state.filter(kept), now.filter(kept), own.filter(kept)
    timers = state[TIMERS].cast(pl.List(pl.Int64)) if TIMERS in state.columns else None
    return stored_frame(own, state, now, timers, columns)


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
