"""The calls of the user's code for the rows and timers of many keys at once.

======================================  ================================================================
comes                                   when
======================================  ================================================================
all rows of the batch that are due      first, in one call, in their order
the timers that are due by its end      after them: of each key the earliest, then of each the next, ...
======================================  ================================================================

A call that fails is undone, and made again by halves, the first before the second, down to one row or timer: that one is
a dead letter. A half is given the state that the half before it left. So where the user's code is a fold over the rows of each key, which it
is asked to be, a bad row changes nothing but that it is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from millstream.errors import MillstreamError
from millstream.kernels.arrays import Int64s
from millstream.kernels.errors.user_code import (
    FAILURES,
    UnusableRowError,
    UserCode,
    error_reason,
    is_hopeless,
)
from millstream.kernels.frames import HASH, TIME
from millstream.kernels.process.context import unknown_output
from millstream.kernels.process.frame_function import FrameContext, FrameFunction
from millstream.kernels.process.stored_keys import StateColumns
from millstream.kernels.state.keyhash import Hashes

KEY = "__key"  # UInt32: which key of the call a row is about
TIMERS = "__timers"  # List(Datetime): the key's timers
TIMER_ROUNDS_MAX = 10_000  # of a batch: more are a loop of timers that set themselves
_INSTANT = pl.Datetime("us", "UTC")

Method = Callable[[FrameContext, pl.DataFrame, pl.DataFrame], pl.DataFrame]


@dataclass
class FrameEmissions:
    """The rows that calls have emitted to one output: in parts, one for each call."""

    columns: tuple[tuple[str, pl.DataType], ...]
    rows: list[pl.DataFrame] = field(default_factory=list)
    times: list[Int64s] = field(default_factory=list)
    tie_parts: list[Int64s] = field(default_factory=list)

    @property
    def times_us(self) -> Int64s:
        return np.concatenate(self.times)

    @property
    def ties(self) -> Int64s:
        return np.concatenate(self.tie_parts)

    def frame(self) -> pl.DataFrame:
        return pl.concat(self.rows)


@dataclass
class FrameKeys:
    """The keys of a batch, by number: their columns and hashes, their state, and the event time of their last calls."""

    keys: pl.DataFrame
    state: pl.DataFrame
    now_us: Int64s

    @property
    def hashes(self) -> Hashes:
        found: Hashes = self.keys[HASH].to_numpy()
        return found

    @property
    def ties(self) -> Int64s:
        """What orders the rows that are emitted for a key among others of their time."""
        ties: Int64s = -(self.hashes >> np.uint64(1)).astype(np.int64) - 1
        return ties

    def part(self, here: Int64s) -> FrameKeys:
        """Return some keys, in their order, by themselves: :meth:`put` takes back what becomes of them."""
        if len(here) == len(self.now_us):
            return FrameKeys(self.keys, self.state, self.now_us)
        return FrameKeys(self.keys[here], self.state[here], self.now_us[here])

    def put(self, here: Int64s, part: FrameKeys) -> None:
        """Replace what is known of some keys by what a part has of them."""
        self.now_us[here] = part.now_us
        count = self.state.height
        if len(here) == count:
            self.state = part.state
            return
        places = np.arange(count)
        places[here] = count + np.arange(len(here))
        self.state = pl.concat([self.state, part.state])[places]


@dataclass
class _Call:
    """One call: of each of its keys the time that it is at after it, and what orders its rows; and what it emits."""

    times_us: Int64s
    latest_us: int
    ties: Int64s
    floor_us: int
    outputs: Mapping[str | None, FrameEmissions]
    emitted: list[tuple[FrameEmissions, pl.DataFrame, Int64s, Int64s]] = field(default_factory=list)

    def emit(self, rows: object, to: str | None) -> None:
        """Take a frame of rows, if it is one of an output."""
        output = self.outputs.get(to)
        if output is None:
            raise unknown_output(self.outputs, to)
        if not isinstance(rows, pl.DataFrame):
            raise UnusableRowError(f"a {type(rows).__name__} is emitted, and not a frame of polars")
        declared = [name for name, _ in output.columns]
        if {*rows.columns} - {TIME} != {*declared, KEY}:
            raise UnusableRowError(
                f"a frame that is emitted has the columns {', '.join(rows.columns)}, and is declared with "
                f"{', '.join([KEY, *declared])}"
            )
        numbers = key_numbers(rows, len(self.times_us))
        times = self._times(rows, numbers)
        columns = [
            typed(rows[name], dtype, f"The column {name!r} of a frame that is emitted")
            for name, dtype in output.columns
        ]
        if rows.height:
            self.emitted.append((output, pl.DataFrame(columns), times, self.ties[numbers]))

    def _times(self, rows: pl.DataFrame, numbers: Int64s) -> Int64s:
        if TIME not in rows.columns:
            return self.times_us[numbers]
        given = typed(rows[TIME], pl.Int64(), f"The column {TIME!r} of a frame that is emitted")
        if given.null_count():
            raise UnusableRowError(f"a row is emitted whose {TIME} is null")
        times: Int64s = given.to_numpy()
        if len(times) and (times.min() < self.floor_us or times.max() > self.latest_us):
            raise UnusableRowError(
                f"a row is emitted whose {TIME} is before what was emitted already, or after the rows and timers of the call"
            )
        return times

    def give(self) -> None:
        """Let what was emitted be output."""
        for output, rows, times, ties in self.emitted:
            output.rows.append(rows)
            output.times.append(times)
            output.tie_parts.append(ties)


@dataclass
class _Tried:
    """The rows or timers for which a method is called, their times, and how they are named if one fails."""

    method: Method
    given: pl.DataFrame
    times_us: Int64s
    table: pl.DataFrame
    failed: Callable[[int, str], None]
    failures: int = 0


@dataclass
class FrameCalls:
    """Makes the calls of one batch of one bucket.

    ``until_us``: timers up to it are due. ``floor_us``: nothing is emitted with an earlier event time.
    """

    function: FrameFunction
    code: UserCode
    columns: StateColumns
    keys: FrameKeys
    outputs: Mapping[str | None, FrameEmissions]
    until_us: int
    floor_us: int
    failed_rows: list[tuple[int, str]] = field(default_factory=list)
    failed_timers: list[tuple[Mapping[str, Any], int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.has_timers = self.function.defines("on_timers")
        self._types = {name: one.stored_dtype for name, one in self.columns.states}
        if self.has_timers:
            self._types[TIMERS] = pl.List(_INSTANT)

    def rows(self, rows: pl.DataFrame, names: Sequence[str], numbers: Int64s) -> None:
        """Make the calls for rows, with ``__time``; ``numbers`` are those of their keys."""
        tried = _Tried(
            self.function.on_rows,
            rows[[*names, TIME]],
            rows[TIME].to_numpy(),
            rows,
            lambda at, reason: self.failed_rows.append((at, reason)),
        )
        self._by_halves(tried, self.keys, numbers)

    def timers(self) -> None:
        """Make the calls for the timers that are due: of each key the earliest, and again until none is."""
        rounds, keys, places = 0, self.keys, np.arange(len(self.keys.now_us))
        while self.has_timers:
            first = keys.state[TIMERS].list.first().dt.timestamp("us")
            here = np.flatnonzero((first <= self.until_us).fill_null(value=False).to_numpy())
            at_us = first[here].to_numpy()
            if 2 * len(here) <= len(places):  # the others get no call that could set a timer
                self.keys.put(places, keys)
                places = places[here]
                keys, here = self.keys.part(places), np.arange(len(here))
            if not len(here):
                return
            self._timers(keys, here, at_us)
            rounds += 1
            if rounds > TIMER_ROUNDS_MAX:
                loop = UnusableRowError(
                    f"more than {TIMER_ROUNDS_MAX:,} timers of a key have fired in one batch: a timer sets another that "
                    "is not after it"
                )
                raise self.code.refusal(loop, keys.keys.drop(HASH)[here], 0)

    def _timers(self, keys: FrameKeys, here: Int64s, at_us: Int64s) -> None:
        """Make the calls for one timer of each of some keys, which they have no more."""
        part = keys.part(here)
        part.state = part.state.with_columns(pl.col(TIMERS).list.slice(1))
        times = np.maximum(at_us, part.now_us)
        shown = pl.DataFrame({"time": pl.Series(at_us).cast(_INSTANT), TIME: times})
        names = part.keys.drop(HASH)

        def failed(at: int, reason: str) -> None:
            self.failed_timers.append((names.row(at, named=True), int(at_us[at]), reason))

        table = names.hstack(shown[["time"]])
        tried = _Tried(self.function.on_timers, shown, times, table, failed)
        self._by_halves(tried, part, np.arange(len(here)))
        keys.put(here, part)

    def _by_halves(self, tried: _Tried, keys: FrameKeys, numbers: Int64s, start: int = 0) -> None:
        """Call for the rows from ``start`` on, one for each of the numbers of their keys; where that fails, for halves.

        A half has its own keys alone: to copy the others for each call would take longer than the calls.

        Raises:
            UserCodeError: a row fails and failing rows are to stop the job, or all of many do.
        """
        present = np.zeros(len(keys.now_us), np.bool_)
        present[numbers] = True
        here = np.flatnonzero(present)
        mine = (np.cumsum(present) - 1)[numbers]
        part = keys.part(here)
        error = self._made(tried, part, mine, start)
        if error is not None and len(mine) == 1:
            self._fail(tried, start, error)
        elif error is not None:
            middle = len(mine) // 2
            self._by_halves(tried, part, mine[:middle], start)
            self._by_halves(tried, part, mine[middle:], start + middle)
        keys.put(here, part)

    def _fail(self, tried: _Tried, at: int, error: BaseException) -> None:
        tried.failures += 1
        if self.code.on_error == "stop":
            raise self.code.refusal(error, tried.table, at)
        if is_hopeless(tried.failures, at, tried.table.height):
            raise self.code.refusal(error, tried.table, at, hopeless=True)
        tried.failed(at, error_reason(error))

    def _made(
        self, tried: _Tried, keys: FrameKeys, numbers: Int64s, start: int
    ) -> BaseException | None:
        """Make a call for rows of all of some keys; return the error with which it failed, and then nothing has changed."""
        end = start + len(numbers)
        times = tried.times_us[start:end]
        now_us = np.empty(len(keys.now_us), np.int64)
        now_us[numbers] = times  # of several rows of a key, that of the last stays
        call = _Call(now_us, int(times.max()), keys.ties, self.floor_us, self.outputs)
        frame = tried.given[start:end].insert_column(0, pl.Series(KEY, numbers, pl.UInt32))
        try:
            returned = tried.method(FrameContext(call.emit), frame, _shown(keys))
            state = self._state(returned, len(now_us))
        except MillstreamError:
            raise
        except FAILURES as error:
            return error
        call.give()
        keys.state, keys.now_us = state, now_us
        return None

    def _state(self, returned: object, count: int) -> pl.DataFrame:
        """Return the new state of the keys of a call, in their order, from what the user's code returned."""
        if not isinstance(returned, pl.DataFrame):
            raise UnusableRowError(
                f"a {type(returned).__name__} is returned, and not the frame of the new state"
            )
        missing = [name for name in (KEY, *self._types) if name not in returned.columns]
        if missing:
            raise UnusableRowError(
                f"the state that is returned has no column {', '.join(missing)}; it has {', '.join(returned.columns)}"
            )
        numbers = key_numbers(returned, count)
        if np.bincount(numbers).max(initial=0) > 1:
            raise UnusableRowError(
                "the state that is returned has several rows of one key. Aggregate them by __key"
            )
        made = [
            typed(returned[name], dtype, f"The state {name!r}")
            for name, dtype in self._types.items()
        ]
        state = pl.DataFrame(made)
        self._check_maps(state)
        if self.has_timers:
            state = state.with_columns(pl.col(TIMERS).list.drop_nulls().list.unique().list.sort())
        return with_defaults(_placed(state, numbers, count), self.columns)

    def _check_maps(self, state: pl.DataFrame) -> None:
        for name in (name for name, one in self.columns.states if one.kind == "map"):
            keys = state[name].list.eval(pl.element().struct.field("key"))
            if (keys.list.n_unique() < keys.list.len()).any():
                raise UnusableRowError(f"The state {name!r} has a key of a map twice")


def _shown(keys: FrameKeys) -> pl.DataFrame:
    """Return the state of keys as the user's code sees it."""
    number = pl.Series(KEY, np.arange(len(keys.now_us)), pl.UInt32)
    columns = [*keys.keys.drop(HASH).get_columns(), *keys.state.get_columns()]
    return pl.DataFrame([number, *columns])


def _placed(state: pl.DataFrame, numbers: Int64s, count: int) -> pl.DataFrame:
    """Return state in the order of keys, with nulls for those that it has no row of."""
    if len(numbers) == count and np.array_equal(numbers, np.arange(count)):
        return state
    places = np.full(count, state.height, np.int64)
    places[numbers] = np.arange(len(numbers))
    placed: pl.DataFrame = pl.concat([state, state.clear(1)])[places]
    return placed


def with_defaults(state: pl.DataFrame, columns: StateColumns) -> pl.DataFrame:
    """Return state in which what a key has nothing of is as it is read: a default, or an empty list."""
    dtypes = state.schema
    fills = [
        pl.col(name).fill_null(
            pl.lit(one.default, dtypes[name])
            if one.kind == "value"
            else pl.lit(pl.Series([[]], dtype=dtypes[name])).first()
        )
        for name, one in columns.states
        if one.kind != "value" or one.default is not None
    ]
    if TIMERS in dtypes:
        empty = pl.lit(pl.Series([[]], dtype=dtypes[TIMERS])).first()
        fills.append(pl.col(TIMERS).fill_null(empty))
    return state.with_columns(fills)


def key_numbers(rows: pl.DataFrame, count: int) -> Int64s:
    """Return the column ``__key``, which must number keys of the call."""
    column = rows[KEY]
    if not column.dtype.is_integer() or column.null_count():
        raise UnusableRowError(
            f"the column {KEY} is {column.dtype} with {column.null_count()} nulls"
        )
    numbers: Int64s = column.cast(pl.Int64).to_numpy()
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < count:
        raise UnusableRowError(
            f"the column {KEY} has {numbers.min()} to {numbers.max()}, and the call has {count} keys from 0"
        )
    return numbers


def typed(column: pl.Series, dtype: pl.DataType, what: str) -> pl.Series:
    """Return a column in a type that can hold it: numbers may become wider, and nothing is parsed."""
    if column.dtype == dtype:
        return column
    numbers = column.dtype.is_integer() and dtype.is_numeric()
    if not (numbers or column.dtype == pl.Null or (column.dtype.is_float() and dtype.is_float())):
        raise UnusableRowError(f"{what} is {column.dtype}, and is declared as {dtype}")
    try:
        return column.cast(dtype, strict=True)
    except pl.exceptions.InvalidOperationError as error:
        raise UnusableRowError(
            f"{what} has a value that is declared as {dtype}: {error}"
        ) from error
