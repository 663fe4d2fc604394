"""The calls of the user's code for the rows and timers of a key, one after the other.

==================================  ====================================================================
comes                               when
==================================  ====================================================================
a timer for a time not after        next, at the time of the call that set it
that of the call that set it
a processing-time timer             before the rows of its batch, and after them if it was set by one
a timer at T, in order of time      after all rows before T, and before those at T
a timer at T, in order of arrival   after the rows of the batch in which the watermark passes T
a row                               in the order of (event time, place in the log), or of arrival
==================================  ====================================================================

So in the order of time the calls of a key depend on its rows alone. Timers of one key are in the order of
their times, and a key has one for each time. Keys know nothing of each other.

A call that fails is undone: what it wrote, the timers that it set or deleted, what it emitted. Its row, or its timer,
is a dead letter, and the next call is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import polars as pl

from millstream.errors import MillstreamError
from millstream.kernels.errors.user_code import (
    FAILURES,
    HOPELESS_ROWS_MIN,
    UnusableRowError,
    UserCode,
    error_reason,
)
from millstream.kernels.frames import DIFF
from millstream.kernels.process.context import (
    Emissions,
    PresentCall,
    ProcessContext,
    to_datetime,
)
from millstream.kernels.process.function import ProcessFunction
from millstream.kernels.process.key_state import KeyStates

TIMERS_AT_ONCE_MAX = 10_000  # of a key at one time: more are a loop of timers that set themselves
TIMER_COLUMN = "timer"
FAILED_ROWS = "__failed"  # the state with the rows that failed, where rows may be taken back
DIGEST = "__digest"


@dataclass(frozen=True)
class KeyRows:
    """The rows of a batch, key by key: their times, what orders rows of one time, and their values.

    ``signs`` are -1 of rows that are taken back; empty where none are. ``digests`` stand for the rows then.
    """

    table: pl.DataFrame
    times_us: Sequence[int]
    ties: Sequence[int]
    values: Sequence[dict[str, Any] | UnusableRowError]
    signs: Sequence[int] = ()
    digests: Sequence[int] = ()


@dataclass(frozen=True)
class Failures:
    """The calls that failed: rows by their number, timers by their key and time; each with the reason."""

    rows: list[tuple[int, str]] = field(default_factory=list)
    timers: list[tuple[Mapping[str, Any], int, str]] = field(default_factory=list)


@dataclass
class KeyCalls:
    """Makes the calls of one batch of one bucket.

    ``until_us``: event-time timers up to it are due at the end of the batch. ``floor_us``: nothing is emitted with
    an earlier event time. ``key_types`` are the columns of the key.
    """

    function: ProcessFunction
    code: UserCode
    states: KeyStates
    call: PresentCall
    rows: KeyRows
    in_time_order: bool
    until_us: int
    floor_us: int
    key_types: Sequence[tuple[str, pl.DataType]]
    failures: Failures = field(default_factory=Failures)
    last_error: BaseException | None = None
    count: int = 0
    at_once: int = 0

    def __post_init__(self) -> None:
        self.context = ProcessContext(self.call)
        self.outputs: tuple[Emissions, ...] = tuple(self.call.outputs.values())

    def key(self, key: dict[str, Any], key_hash: int, now_us: int, rows: Sequence[int]) -> None:
        """Make the calls of a key whose state is loaded; ``rows`` are the numbers of its rows, in their order."""
        call = self.call
        call.key, call.key_hash, call.now_us = MappingProxyType(key), key_hash, now_us
        call.tie = self._timer_tie
        self._processing_timers()
        timers, times = call.timers, self.rows.times_us
        for number in rows:
            until_us = times[number] if self.in_time_order else call.now_us
            while timers.past or (
                self.in_time_order and timers.times and timers.times[0] <= until_us
            ):
                self._timer(until_us)
            self._row(number)
        self._due_timers()
        while self._processing_timers():  # these may set timers that are due
            self._due_timers()

    def _due_timers(self) -> None:
        """Fire the event-time timers that are due at the end of the batch."""
        timers = self.call.timers
        while timers.past or (timers.times and timers.times[0] <= self.until_us):
            self._timer(self.until_us)

    def _row(self, number: int) -> None:
        rows = self.rows
        self.call.tie = rows.ties[number]
        self.at_once = 0
        taken_back = bool(rows.signs) and rows.signs[number] < 0
        if taken_back and self._forget_failed(number):
            return
        given = rows.values[number]
        error: BaseException | None
        if isinstance(given, UnusableRowError):
            error = given
            self.count += 1
        else:
            method = self.function.on_retraction if taken_back else self.function.on_row
            error = self._made(rows.times_us[number], method, given)
        if error is not None:
            self._require_going_on(error, lambda: (rows.table, number))
            self.failures.rows.append((number, error_reason(error)))
            if rows.signs and not taken_back:
                self._failed_rows(number).append(rows.digests[number])

    def _forget_failed(self, number: int) -> bool:
        """Return whether a row that is taken back is one that failed when it came; then it is forgotten."""
        failed, digest = self._failed_rows(number), self.rows.digests[number]
        if digest not in failed:
            return False
        failed.remove(digest)
        return True

    def _failed_rows(self, number: int) -> Any:
        """Return the state that has the digests of the rows that have failed, outside of a call of the user's."""
        self.states.begin(self.rows.times_us[number])
        return getattr(self.states.state, FAILED_ROWS)

    @property
    def _timer_tie(self) -> int:
        """What orders the rows that a timer emits among others of its time: they are before those of rows."""
        return -(self.call.key_hash >> 1) - 1

    def _timer(self, until_us: int) -> None:
        is_next = bool(self.call.timers.past)
        if not is_next:  # those come after the call that set them
            self.call.tie = self._timer_tie
        at_us = self.call.timers.take_due(until_us)
        assert at_us is not None
        self._fire(at_us, max(at_us, self.call.now_us), self.function.on_timer, is_next=is_next)

    def _processing_timers(self) -> bool:
        """Fire the processing-time timers that are due, and the event-time timers that these set for the past.

        Return whether there were any.
        """
        call, fired = self.call, False
        while True:
            is_next = bool(call.processing_timers.past)
            at_ms = call.processing_timers.take_due(call.wall_ms)
            if at_ms is None:
                return fired
            fired = True
            now_us = max(call.now_us, self.floor_us)
            self._fire(at_ms * 1000, now_us, self.function.on_processing_timer, is_next=is_next)
            while call.timers.past:
                self._timer(call.now_us)

    def _fire(
        self, at_us: int, now_us: int, method: Callable[..., object], *, is_next: bool
    ) -> None:
        """Call for a timer; ``is_next``: it was set for a time that had passed, as those are that set one another."""
        self.at_once = self.at_once + 1 if is_next and now_us == self.call.now_us else 0
        error = self._made(now_us, method, to_datetime(at_us))
        if error is not None:
            key = self.call.key
            self._require_going_on(
                error, lambda: (timer_rows([(key, at_us, "")], self.key_types), 0)
            )
            self.failures.timers.append((key, at_us, error_reason(error)))

    def _made(
        self, now_us: int, method: Callable[..., object], given: object
    ) -> BaseException | None:
        """Make a call; return the error with which it failed, after undoing what it did."""
        self.call.now_us = now_us
        self.states.begin(now_us)
        counts = [len(output.rows) for output in self.outputs]
        self.count += 1
        try:
            if self.at_once > TIMERS_AT_ONCE_MAX:
                raise UnusableRowError(
                    f"more than {TIMERS_AT_ONCE_MAX:,} timers of a key have fired at one time: a timer sets another "
                    "that is not after it"
                )
            returned = method(self.context, given)
            if returned is not None:
                raise UnusableRowError(
                    f"{method.__name__} returns a {type(returned).__name__}, and what it returns is not emitted: give "
                    "rows to context.emit"
                )
        except MillstreamError:
            raise
        except FAILURES as error:
            self.states.undo()
            for output, count in zip(self.outputs, counts, strict=True):
                output.truncate(count)
            return error
        return None

    def _require_going_on(
        self, error: BaseException, place: Callable[[], tuple[pl.DataFrame, int]]
    ) -> None:
        """Raise if a failing call is to stop the job."""
        self.last_error = error
        if self.code.on_error == "stop":
            raise self.code.refusal(error, *place())

    def require_hope(self) -> None:
        """Make sure that not every call of the batch has failed, if there were more than a few.

        Raises:
            UserCodeError: all have, so that the code is wrong and not the data.
        """
        failed = len(self.failures.rows) + len(self.failures.timers)
        if failed == self.count > HOPELESS_ROWS_MIN:
            assert self.last_error is not None
            number = self.failures.rows[0][0] if self.failures.rows else None
            raise self.code.refusal(self.last_error, self.rows.table, number, hopeless=True)


def timer_rows(
    timers: Sequence[tuple[Mapping[str, Any], int, str]], key: Sequence[tuple[str, pl.DataType]]
) -> pl.DataFrame:
    """Return failed timers as rows: the columns of the key, and the time."""
    columns = [
        pl.Series(name, [of[name] for of, *_ in timers], dtype, strict=True) for name, dtype in key
    ]
    time = timer_column([name for name, _ in key])
    times = pl.Series(time, [at_us for _, at_us, _ in timers], pl.Datetime("us", "UTC"))
    return pl.DataFrame([*columns, times])


def timer_column(key: Sequence[str]) -> str:
    """Return the name of the column that has the time, which the key has no column of."""
    name = TIMER_COLUMN
    while name in key:
        name += "_"
    return name


def key_rows(rows: pl.DataFrame, columns: Sequence[str], time: str, tie: str) -> KeyRows:
    """Return rows as the calls take them."""
    own = rows[[*columns]]
    values: Sequence[dict[str, Any] | UnusableRowError]
    try:
        values = own.to_dicts()
    except (ValueError, OverflowError):
        values = [_row_values(own, number) for number in range(own.height)]
    signed = [rows[name].to_list() for name in (DIFF, DIGEST) if name in rows.columns]
    return KeyRows(rows, rows[time].to_list(), rows[tie].to_list(), values, *signed)


def _row_values(rows: pl.DataFrame, number: int) -> dict[str, Any] | UnusableRowError:
    """Return a row, or why Python cannot hold it: its times go from the year 1 to 9999."""
    try:
        return rows.row(number, named=True)
    except (ValueError, OverflowError) as error:
        return UnusableRowError(f"the row has a value that Python cannot hold: {error}")
