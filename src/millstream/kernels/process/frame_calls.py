"""The calls of the user's code for the rows and timers of many keys at once.

======================================  ================================================================
comes                                   when
======================================  ================================================================
rows that are taken back                first, in one call, in the order of time
all rows of the batch that are due      then, in one call, in their order
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
from millstream.kernels.arrays import Bools, Int64s, are_counted_up
from millstream.kernels.errors.user_code import (
    FAILURES,
    UnusableRowError,
    UserCode,
    error_reason,
    is_hopeless,
)
from millstream.kernels.frames import DIFF, HASH, HIDDEN_PREFIX, TIME
from millstream.kernels.process.calls import (
    DIGEST,
    FAILED_ROWS,
    TIMERS_AT_ONCE_MAX,
    timer_column,
)
from millstream.kernels.process.context import unknown_output
from millstream.kernels.process.emitted_rows import HELD_ROWS, EmittedRows
from millstream.kernels.process.frame_function import FrameContext, FrameFunction
from millstream.kernels.process.frame_keys import FrameKeys
from millstream.kernels.process.stored_keys import StateColumns

KEY = "__key"  # UInt32: which key of the call a row is about
TIMERS = "__timers"  # List(Datetime): the key's timers
_INSTANT = pl.Datetime("us", "UTC")

Method = Callable[[FrameContext, pl.DataFrame, pl.DataFrame], pl.DataFrame]


@dataclass
class FrameEmissions:
    """The rows that calls have emitted to one output: in parts, one for each call.

    ``signed``: rows may be taken back, and each has a sign.
    """

    columns: tuple[tuple[str, pl.DataType], ...]
    signed: bool = False
    rows: list[pl.DataFrame] = field(default_factory=list)
    times: list[Int64s] = field(default_factory=list)
    tie_parts: list[Int64s] = field(default_factory=list)
    sign_parts: list[Int64s] = field(default_factory=list)

    @property
    def times_us(self) -> Int64s:
        return np.concatenate(self.times)

    @property
    def ties(self) -> Int64s:
        return np.concatenate(self.tie_parts)

    @property
    def signs(self) -> Int64s:
        return np.concatenate([np.empty(0, np.int64), *self.sign_parts])

    def frame(self) -> pl.DataFrame:
        return pl.concat(self.rows)


@dataclass
class _Call:
    """One call: its keys, by their numbers in the batch, the times that they are at after it, and what it emits."""

    here: Int64s
    times_us: Int64s
    latest_us: int
    ties: Int64s
    floor_us: int
    outputs: Mapping[str | None, FrameEmissions]
    held: EmittedRows | None
    emitted: list[tuple[FrameEmissions, pl.DataFrame, Int64s, Int64s, int]] = field(
        default_factory=list
    )
    is_over: bool = False

    def emit(self, rows: object, to: str | None, sign: int) -> None:
        """Take a frame of rows, or take them back, if it is one of an output."""
        if self.is_over:
            raise UnusableRowError(
                "rows are emitted by a context that was kept from another call. Take that of each call"
            )
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
        numbers = key_numbers(rows, len(self.here))
        whole = len(numbers) == len(self.here) and are_counted_up(numbers)
        columns = [
            typed(rows[name], dtype, f"The column {name!r} of a frame that is emitted")
            for name, dtype in output.columns
        ]
        times = self._noted(rows, to, columns, numbers, sign)
        if rows.height:
            ties = self.ties if whole else self.ties[numbers]
            self.emitted.append((output, pl.DataFrame(columns), times, ties, sign))

    def _noted(
        self,
        rows: pl.DataFrame,
        to: str | None,
        columns: Sequence[pl.Series],
        numbers: Int64s,
        sign: int,
    ) -> Int64s:
        """Return the event times of rows, after noting that they hold, or hold no more."""
        if sign < 0:
            if self.held is None:
                raise UnusableRowError(
                    "rows are taken back by retract, and what the function emits holds for good: no row that it is given is "
                    "taken back. Say retracts = True in its class"
                )
            return self.held.take_back(to, columns, numbers)
        times = self._times(rows, numbers)
        if self.held is not None:
            self.held.add(to, columns, numbers, times)
        return times

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
        for output, rows, times, ties, sign in self.emitted:
            output.rows.append(rows)
            output.times.append(times)
            output.tie_parts.append(ties)
            if output.signed:
                output.sign_parts.append(np.full(rows.height, sign, np.int64))


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
        self._tie_of = -(self.keys.hashes >> np.uint64(1)).astype(np.int64) - 1
        self._own = [n for n, _ in self.columns.states if n.startswith(HIDDEN_PREFIX)]
        self._types = {n: one.stored_dtype for n, one in self.columns.states if n not in self._own}
        if self.has_timers:
            self._types[TIMERS] = pl.List(_INSTANT)

    def rows(self, rows: pl.DataFrame, names: Sequence[str], numbers: Int64s) -> None:
        """Make the calls for rows, with ``__time``; ``numbers`` are those of their keys.

        With ``__diff`` and ``__digest`` they may be rows that are taken back.
        """
        every = np.arange(rows.height)
        if DIFF not in rows.columns:
            self._rows(self.function.on_rows, rows, names, numbers, every)
            return
        came = rows[DIFF].to_numpy() > 0
        digests = rows[DIGEST].to_numpy()
        back = every[~came]
        back = back[~self._forget_failed(numbers[back], digests[back])]
        self._rows(self.function.on_retractions, rows, names, numbers, back)
        failed = self._rows(self.function.on_rows, rows, names, numbers, every[came])
        self._note_failed(numbers[failed], digests[failed])

    def _rows(
        self,
        method: Method,
        rows: pl.DataFrame,
        names: Sequence[str],
        numbers: Int64s,
        places: Int64s,
    ) -> list[int]:
        """Make the calls for rows at some places; return the places of those that fail alone."""
        if not len(places):
            return []
        given = rows if len(places) == rows.height else rows[places]
        times, of_key = given[TIME].to_numpy(), numbers[places]
        table, failed = given[[*names, TIME]], list[int]()

        def one(start: int, end: int) -> BaseException | None:
            return self._made(method, table[start:end], of_key[start:end], times[start:end])

        def note(at: int, reason: str) -> None:
            failed.append(int(places[at]))
            self.failed_rows.append((int(places[at]), reason))

        self._by_halves(one, given, note)
        return failed

    def _forget_failed(self, numbers: Int64s, digests: Int64s) -> Bools:
        """Return which rows that are taken back are ones that failed when they came; these are forgotten."""
        found = np.zeros(len(numbers), np.bool_)
        if not len(numbers):
            return found
        here = np.unique(numbers)
        state = self.keys.some(here)
        lists = state[FAILED_ROWS].to_list()
        if not any(lists):
            return found
        of_key = dict(zip(here.tolist(), lists, strict=True))
        for at, (number, digest) in enumerate(zip(numbers.tolist(), digests.tolist(), strict=True)):
            if digest in of_key[number]:
                of_key[number].remove(digest)
                found[at] = True
        self._put_failed(here, state, lists)
        return found

    def _note_failed(self, numbers: Int64s, digests: Int64s) -> None:
        if not len(numbers):
            return
        here = np.unique(numbers)
        state = self.keys.some(here)
        lists = state[FAILED_ROWS].to_list()
        of_key = dict(zip(here.tolist(), lists, strict=True))
        for number, digest in zip(numbers.tolist(), digests.tolist(), strict=True):
            of_key[number].append(digest)
        self._put_failed(here, state, lists)

    def _put_failed(self, here: Int64s, state: pl.DataFrame, lists: list[list[int]]) -> None:
        column = pl.Series(FAILED_ROWS, lists, state.schema[FAILED_ROWS])
        self.keys.put(here, state.with_columns(column), self.keys.now_us[here])

    def timers(self) -> None:
        """Make the calls for the timers that are due: of each key the earliest, and again until none is."""
        if not self.has_timers:
            return
        at_once = np.zeros(len(self.keys.now_us), np.int64)
        first = _first_timers(self.keys.state)
        while len(here := np.flatnonzero(first <= self.until_us)):
            at_us = first[here]
            at_once[here] = np.where(at_us > self.keys.now_us[here], 0, at_once[here] + 1)
            if at_once.max() > TIMERS_AT_ONCE_MAX:
                loop = UnusableRowError(
                    f"more than {TIMERS_AT_ONCE_MAX:,} timers of a key have fired at one time: a timer sets another that "
                    "is not after it"
                )
                raise self.code.refusal(loop, self._timer_rows(here), int(at_once[here].argmax()))
            self._timers(here, at_us)
            first[here] = _first_timers(self.keys.some(here))

    def _timers(self, here: Int64s, at_us: Int64s) -> None:
        """Make the calls for one timer of each of some keys, which they have no more."""
        rest = self.keys.some(here).with_columns(pl.col(TIMERS).list.slice(1))
        self.keys.put(here, rest, self.keys.now_us[here])
        times = np.maximum(at_us, self.keys.now_us[here])
        shown = pl.DataFrame({"time": pl.Series(at_us).cast(_INSTANT), TIME: times})

        def one(start: int, end: int) -> BaseException | None:
            return self._made(
                self.function.on_timers, shown[start:end], here[start:end], times[start:end]
            )

        def failed(at: int, reason: str) -> None:
            key = self.keys.keys.drop(HASH).row(int(here[at]), named=True)
            self.failed_timers.append((key, int(at_us[at]), reason))

        table = self._timer_rows(here)
        times_of = shown["time"].alias(timer_column(table.columns))
        self._by_halves(one, table.hstack([times_of]), failed)

    def _timer_rows(self, here: Int64s) -> pl.DataFrame:
        rows: pl.DataFrame = self.keys.keys.drop(HASH)[here]
        return rows

    def _by_halves(
        self,
        one: Callable[[int, int], BaseException | None],
        table: pl.DataFrame,
        failed: Callable[[int, str], None],
    ) -> None:
        """Call for a range, and where that fails for its halves.

        Raises:
            UserCodeError: a row fails and failing rows are to stop the job, or all of many do.
        """
        ranges, failures = [(0, table.height)], 0
        while ranges:
            start, end = ranges.pop()
            error = one(start, end) if end > start else None
            if error is None:
                continue
            if end - start > 1:
                middle = (start + end) // 2
                ranges += [(middle, end), (start, middle)]
                continue
            failures += 1
            if self.code.on_error == "stop":
                raise self.code.refusal(error, table, start)
            if is_hopeless(failures, start, table.height):
                raise self.code.refusal(error, table, start, hopeless=True)
            failed(start, error_reason(error))

    def _made(
        self, method: Method, given: pl.DataFrame, numbers: Int64s, times: Int64s
    ) -> BaseException | None:
        """Make a call; return the error with which it failed, and then nothing has changed."""
        here, mine = _distinct(numbers, len(self.keys.now_us))
        now_us = np.empty(len(here), np.int64)
        now_us[mine] = times  # of several rows of a key, that of the last stays
        before = self.keys.some(here)
        call = _Call(
            here,
            now_us,
            int(times.max()),
            self._tie_of if len(here) == len(self._tie_of) else self._tie_of[here],
            # Where rows may be taken back, they may be older than what was emitted before.
            min(self.floor_us, int(times.min())) if self._own else self.floor_us,
            self.outputs,
            EmittedRows(before[HELD_ROWS]) if HELD_ROWS in self._own else None,
        )
        frame = given.insert_column(0, pl.Series(KEY, mine, pl.UInt32))
        shown = self._shown(here, before)
        try:
            returned = method(FrameContext(call.emit), frame, shown)
            state = self._state(returned, before, call)
        except MillstreamError:
            raise
        except FAILURES as error:
            return error
        finally:
            call.is_over = True
        call.give()
        self.keys.put(here, state, now_us)
        return None

    def _shown(self, here: Int64s, state: pl.DataFrame) -> pl.DataFrame:
        """Return the state of some keys as the user's code sees it."""
        whole = len(here) == len(self.keys.now_us)
        keys, state = self.keys.keys if whole else self.keys.keys[here], state.drop(self._own)
        number = pl.Series(KEY, np.arange(len(here), dtype=np.uint32))
        return pl.DataFrame([number, *keys.drop(HASH).get_columns(), *state.get_columns()])

    def _state(self, returned: object, before: pl.DataFrame, call: _Call) -> pl.DataFrame:
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
        numbers, count = key_numbers(returned, before.height), before.height
        in_order = are_counted_up(numbers)
        if not in_order and np.bincount(numbers).max(initial=0) > 1:
            raise UnusableRowError(
                "the state that is returned has several rows of one key. Aggregate them by __key"
            )
        if TIMERS in returned.columns and not self.has_timers:
            raise UnusableRowError(
                f"the state that is returned has {TIMERS}, and the function has no on_timers that they would call"
            )
        made = [
            typed(returned[name], dtype, f"The state {name!r}")
            for name, dtype in self._types.items()
        ]
        state = pl.DataFrame(made)
        self._check_maps(state)
        if self.has_timers:
            state = state.with_columns(pl.col(TIMERS).list.drop_nulls().list.unique().list.sort())
        if len(numbers) < count or not in_order:
            state = _placed(state, numbers, count)
        if self._own:
            own = before.select(self._own)
            state = state.hstack(own if call.held is None else own.with_columns(call.held.column()))
            state = state[before.columns]
        return with_defaults(state, self.columns)

    def _check_maps(self, state: pl.DataFrame) -> None:
        for name in (n for n, one in self.columns.states if one.kind == "map" and n in self._types):
            items = state[name]
            keys = items.list.eval(pl.element().struct.field("key"))
            if items.list.eval(pl.element().is_null()).list.any().any():
                raise UnusableRowError(f"The state {name!r} has an item of a map that is null")
            if _is_float_list(keys) and keys.list.eval(pl.element().is_nan()).list.any().any():
                raise UnusableRowError(
                    f"A key of the state {name!r} is NaN, which is equal to no key, not even to itself"
                )
            if (keys.list.n_unique() < keys.list.len()).any():
                raise UnusableRowError(f"The state {name!r} has a key of a map twice")


def _first_timers(state: pl.DataFrame) -> Int64s:
    """Return the first timer of each key, and what is after all times where it has none."""
    first = state[TIMERS].list.first().dt.timestamp("us")
    return np.array(first.fill_null(np.iinfo(np.int64).max), np.int64)


def _distinct(numbers: Int64s, count: int) -> tuple[Int64s, Int64s]:
    """Return the distinct numbers, which are below ``count``, in their order, and the place of each number among them."""
    if len(numbers) < count // 16:
        here, mine = np.unique(numbers, return_inverse=True)
        return here, mine
    present = np.zeros(count, np.bool_)
    present[numbers] = True
    if present.all():
        return np.arange(count), numbers
    return np.flatnonzero(present), (np.cumsum(present) - 1)[numbers]


def _is_float_list(column: pl.Series) -> bool:
    return isinstance(column.dtype, pl.List) and column.dtype.inner.is_float()


def _placed(state: pl.DataFrame, numbers: Int64s, count: int) -> pl.DataFrame:
    """Return state in the order of keys, with nulls for those that it has no row of."""
    places = np.full(count, state.height, np.int64)
    places[numbers] = np.arange(len(numbers))
    placed: pl.DataFrame = pl.concat([state, state.clear(1)])[places]
    return placed


def with_defaults(state: pl.DataFrame, columns: StateColumns) -> pl.DataFrame:
    """Return state in which what a key has nothing of is as it is read: a default, or an empty list."""
    dtypes = state.schema
    fills = [
        pl.col(name).fill_null(one_value(one.default if one.kind == "value" else [], dtypes[name]))
        for name, one in columns.states
        if one.kind != "value" or one.default is not None
    ]
    if TIMERS in dtypes:
        fills.append(pl.col(TIMERS).fill_null(one_value([], dtypes[TIMERS])))
    return state.with_columns(fills)


def one_value(value: object, dtype: pl.DataType) -> pl.Expr:
    """Return a value as a column of a type has it: an instant may be of another time zone, which ``pl.lit`` refuses."""
    return pl.lit(pl.Series([value], dtype=dtype)).first()


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
        made = column.cast(dtype, strict=True)
    except pl.exceptions.InvalidOperationError as error:
        raise UnusableRowError(
            f"{what} has a value that is declared as {dtype}: {error}"
        ) from error
    if dtype.is_float() and column.dtype != pl.Null:
        _require_rounded(column, made, what)
    return made


def _require_rounded(column: pl.Series, made: pl.Series, what: str) -> None:
    """Make sure that floats stand for numbers: for whole ones themselves, and for others unless they are too large."""
    if column.dtype.is_integer():
        lost = made.cast(column.dtype, strict=False).ne_missing(column)
    else:
        lost = (made.is_infinite() != column.is_infinite()).fill_null(value=False)
    if lost.any():
        raise UnusableRowError(
            f"{what} has {column.filter(lost)[0]!r}, and is declared as {made.dtype}, which cannot hold it"
        )
