"""What a call of the user's code is given besides its row: state, timers, and where output goes."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl

from millstream.choices import did_you_mean
from millstream.kernels.errors.user_code import UnusableRowError
from millstream.kernels.process.key_state import KeyState
from millstream.kernels.process.values import Conversion, column_of, conversion

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)

Undo = list[Callable[[], object]]

EMITTED_ROWS = "__emitted"  # the state with the rows of a key that hold, where they may be taken back: digests, and event times


def to_datetime(at_us: int) -> datetime:
    """Return an event time as a datetime of UTC."""
    return _EPOCH + timedelta(microseconds=at_us)


def _to_us(at: datetime) -> int:
    if not isinstance(at, datetime) or at.tzinfo is None:
        raise UnusableRowError(
            f"a timer is set for {at!r}, and not for a datetime with a time zone, such as context.time + "
            "timedelta(minutes=30)"
        )
    return (at - _EPOCH) // _US


@dataclass(slots=True)
class KeyTimers:
    """The timers of the present key, of one kind, in the order of time; each time is there once.

    ``past`` are those that were set for a time that was not after the present: they come next. ``added`` has all
    that were set for later in this batch, with the key's hash. ``unit`` is that of times, in microseconds.
    """

    unit: int
    times: list[int] = field(default_factory=list)
    past: list[int] = field(default_factory=list)
    added: list[tuple[int, int]] = field(default_factory=list)

    def set(self, at: int, now: int, key_hash: int, undo: Undo) -> None:
        """Set a timer. One that is there already stays, or comes next if the present has passed its time."""
        if at <= now:
            _remove(self.times, at, undo)
        mine = self.past if at <= now else self.times
        place = bisect_left(mine, at)
        if place < len(mine) and mine[place] == at:
            return
        mine.insert(place, at)
        undo.append(lambda: mine.remove(at))
        if at > now:
            self.added.append((at, key_hash))

    def delete(self, at: int, undo: Undo) -> None:
        """Delete a timer, if it is there."""
        _remove(self.past, at, undo)
        _remove(self.times, at, undo)

    def take_due(self, until: int) -> int | None:
        """Remove and return the next timer, up to a time; None if there is none."""
        if self.past:
            return self.past.pop(0)
        return self.times.pop(0) if self.times and self.times[0] <= until else None


def _remove(times: list[int], at: int, undo: Undo) -> None:
    """Remove a time from a sorted list, if it is there."""
    place = bisect_left(times, at)
    if place < len(times) and times[place] == at:
        del times[place]
        undo.append(lambda: insort(times, at))


@dataclass
class Emissions:
    """The rows that calls have emitted to one output, with their event time, and what orders those of one time.

    ``signed``: rows may be taken back, and each has a sign.
    """

    columns: tuple[tuple[str, pl.DataType], ...]
    signed: bool = False
    times_us: list[int] = field(default_factory=list)
    ties: list[int] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    signs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._conversions: list[tuple[str, Conversion]] = [
            (name, conversion(dtype, f"The column {name!r} of a row that is emitted"))
            for name, dtype in self.columns
        ]

    def add(self, row: object, now_us: int, tie: int, sign: int = 1) -> None:
        """Add a row, which must have exactly the columns that were declared."""
        given = row if isinstance(row, Mapping) else _fields(row)
        if len(given) != len(self._conversions):
            raise self._refusal(given)
        try:
            values = tuple(convert(given[name]) for name, convert in self._conversions)
        except KeyError:
            raise self._refusal(given) from None
        self.times_us.append(now_us)
        self.ties.append(tie)
        self.rows.append(values)
        if self.signed:
            self.signs.append(sign)

    def truncate(self, count: int) -> None:
        """Keep only so many rows."""
        for of in (self.times_us, self.ties, self.rows, self.signs):
            del of[count:]

    def frame(self) -> pl.DataFrame:
        """Return the rows, without their times."""
        columns: Sequence[Sequence[Any]] = [*zip(*self.rows, strict=True)] or [()] * len(
            self.columns
        )
        return pl.DataFrame(
            [
                column_of(name, values, dtype)
                for (name, dtype), values in zip(self.columns, columns, strict=True)
            ]
        )

    def _refusal(self, given: Mapping[str, Any]) -> UnusableRowError:
        names = [name for name, _ in self.columns]
        return UnusableRowError(
            f"a row that is emitted has the columns {', '.join(map(str, given)) or '(none)'}, and is declared with "
            f"{', '.join(names)}"
        )


def _fields(row: object) -> Mapping[str, Any]:
    if is_dataclass(row) and not isinstance(row, type):
        return {one.name: getattr(row, one.name) for one in fields(row)}
    raise UnusableRowError(
        f"{row!r} is emitted, which is neither a dict of columns nor an instance of a dataclass"
    )


def _digest(output: str | None, values: tuple[Any, ...]) -> int:
    """Return a number for a row of an output, the same in every process; of -0.0 that of 0.0, which is equal to it."""
    shown = repr((output, values))
    if "-0.0" in shown:
        shown = repr((output, _of_one_zero(values)))
    made = hashlib.blake2b(shown.encode(), digest_size=8).digest()
    return int.from_bytes(made, "big", signed=True)


def _of_one_zero(value: Any) -> Any:
    """Return a value with 0.0 for each -0.0 in it."""
    if isinstance(value, float):
        return value + 0.0
    if isinstance(value, (list, tuple)):
        return type(value)(map(_of_one_zero, value))
    if isinstance(value, dict):
        return {name: _of_one_zero(item) for name, item in value.items()}
    return value


def unknown_output(outputs: Iterable[str | None], to: str | None) -> UnusableRowError:
    """Return the error of the user's code that emits to none of the outputs."""
    names = [name for name in outputs if name is not None]
    return UnusableRowError(
        f"a row is emitted to {to!r}, and the side outputs are {', '.join(names) or '(none)'}."
        f"{did_you_mean(str(to), names)}"
    )


@dataclass(slots=True)
class PresentCall:
    """The call that is going on: its key, its event time, and what it may change. ``wall_ms`` is the time of day."""

    state: KeyState
    timers: KeyTimers
    processing_timers: KeyTimers
    outputs: Mapping[str | None, Emissions]
    undo: Undo
    wall_ms: int
    key: Mapping[str, Any] = field(default_factory=dict[str, Any])
    key_hash: int = 0
    now_us: int = 0
    tie: int = 0


class ProcessContext:
    """What a :class:`ProcessFunction` is given with each call.

    All of it is of the key that the call is about, and only valid during the call. If the call
    fails, whatever it has written, set, deleted or emitted is undone.
    """

    __slots__ = ("_call",)

    def __init__(self, call: PresentCall) -> None:
        self._call = call

    @property
    def key(self) -> Mapping[str, Any]:
        """The columns of the key, with their values."""
        return self._call.key

    @property
    def state(self) -> Any:
        """The key's state: an attribute for each that the function declares."""
        return self._call.state

    @property
    def time(self) -> datetime:
        """The event time of the call, in UTC: of a row its own; of a timer, the later of its time and that of the call that
        set it; of a processing-time timer, how far event time has got.

        What is emitted has this event time.
        """
        return to_datetime(self._call.now_us)

    @property
    def processing_time(self) -> datetime:
        """The time of day in UTC, which is fixed for a batch, and the same when it is repeated."""
        return to_datetime(self._call.wall_ms * 1000)

    @property
    def timers(self) -> list[datetime]:
        """The event-time timers of the key, in their order."""
        return [*_datetimes(self._call.timers)]

    @property
    def processing_timers(self) -> list[datetime]:
        """The processing-time timers of the key, in their order."""
        return [*_datetimes(self._call.processing_timers)]

    def emit(self, row: object, *, to: str | None = None) -> None:
        """Emit a row: a dict, or an instance of a dataclass, with exactly the columns that were declared.

        ``to`` is the name of a side output; by default the row is one of the main output.
        """
        call, output = self._call, self._output(to)
        output.add(row, call.now_us, call.tie)
        if output.signed:
            held, digest = getattr(call.state, EMITTED_ROWS), _digest(to, output.rows[-1])
            held[digest] = [*held.get(digest, ()), call.now_us]

    def retract(self, row: object, *, to: str | None = None) -> None:
        """Take back a row that was emitted for this key, by giving it again.

        A function may do so after rows that may be taken back; after events, if its class has ``retracts = True``. The row is taken back with the event time that it was emitted with. One that does not hold is an error of the call.
        """
        call, output = self._call, self._output(to)
        if not output.signed:
            raise UnusableRowError(
                "a row is taken back by retract, and what the function emits holds for good: no row that it is given is "
                "taken back. Say retracts = True in its class"
            )
        output.add(row, call.now_us, call.tie, -1)
        held, digest = getattr(call.state, EMITTED_ROWS), _digest(to, output.rows[-1])
        times_us = held.get(digest)
        if not times_us:
            output.truncate(len(output.rows) - 1)  # the user's code may catch the error and go on
            raise UnusableRowError(
                f"{row!r} is taken back, which was not emitted for this key, or was taken back before"
            )
        output.times_us[-1] = times_us[-1]
        if len(times_us) > 1:
            held[digest] = [*times_us[:-1]]
        else:
            del held[digest]

    def _output(self, to: str | None) -> Emissions:
        output = self._call.outputs.get(to)
        if output is None:
            raise unknown_output(self._call.outputs, to)
        return output

    def set_timer(self, at: datetime) -> None:
        """Call ``on_timer`` at an event time: after all rows of the key before it, and before those at it.

        A key has one timer for each time. One that is not after :attr:`time` comes next.
        """
        call = self._call
        call.timers.set(_to_us(at), call.now_us, call.key_hash, call.undo)

    def delete_timer(self, at: datetime) -> None:
        """Delete the timer for an event time; nothing happens if there is none."""
        self._call.timers.delete(_to_us(at), self._call.undo)

    def set_processing_timer(self, at: datetime) -> None:
        """Call ``on_processing_timer`` when the clock has reached a time, rounded up to milliseconds."""
        call = self._call
        call.processing_timers.set(-(-_to_us(at) // 1000), call.wall_ms, call.key_hash, call.undo)

    def delete_processing_timer(self, at: datetime) -> None:
        """Delete the processing-time timer for a time; nothing happens if there is none."""
        self._call.processing_timers.delete(-(-_to_us(at) // 1000), self._call.undo)


def _datetimes(timers: KeyTimers) -> Iterator[datetime]:
    return (to_datetime(at * timers.unit) for at in sorted({*timers.past, *timers.times}))
