"""The operator of process functions: which rows and timers a batch has, and what is stored after their calls.

Let W be the operator's watermark, and L the lateness of its input. In the order of time, a row of time t waits until
W > t + L, and a timer at T fires once W >= T + L: then no row before it follows. So the calls of a key, and their order,
depend on the rows alone and not on batches (:mod:`millstream.kernels.process.calls`). In the order of arrival, a row is
processed in the batch that brings it. Either way nothing is emitted with an event time before W - L of the batch before, so the
watermark of the output is W - L.

Timers are with the key's state. Beside it their times are indexed, and so are the times at which state expires
(:mod:`millstream.kernels.state.timers`): an entry only leads to its key, so those of deleted timers are harmless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.changes import concat_present
from millstream.kernels.errors.dead_letter_collector import FailedRows
from millstream.kernels.errors.user_code import UserCode
from millstream.kernels.frames import (
    HASH,
    ORDER,
    SPLIT,
    TIME,
    WATERMARK_SEEN,
)
from millstream.kernels.joins.join_operator import add_late_rows, take_in_time
from millstream.kernels.joins.versions import TIE, row_order
from millstream.kernels.joins.waiting_rows import WaitingRows
from millstream.kernels.operator import NOT_DEFINING, BatchContext, OperatorResult, Prepared
from millstream.kernels.operator_base import OperatorBase
from millstream.kernels.process.calls import Failures, KeyCalls, KeyRows, key_rows, timer_rows
from millstream.kernels.process.context import Emissions, KeyTimers, PresentCall
from millstream.kernels.process.declarations import StateDeclaration
from millstream.kernels.process.frame_batch import frame_keys, kept_rows
from millstream.kernels.process.frame_calls import TIMERS, FrameCalls, FrameEmissions
from millstream.kernels.process.frame_function import FrameFunction
from millstream.kernels.process.frame_keys import FrameKeys
from millstream.kernels.process.function import ProcessFunction
from millstream.kernels.process.key_state import KeyStates
from millstream.kernels.process.row_sort import in_order
from millstream.kernels.process.side_outputs import Emitted, merged_outputs
from millstream.kernels.process.stored_keys import (
    StateColumns,
    StoredKey,
    StoredKeys,
    StoredRows,
    keyed_rows,
    keys_of_batch,
)
from millstream.kernels.queryable import KeyColumns, QueryKeys, held_by_key
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyhash import Hashes, hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.timers import Timers
from millstream.kernels.time.watermarks import NO_WATERMARK, delayed_watermark

RowOrder = Literal["time", "arrival"]
"""``time``: by event time, up to the watermark. ``arrival``: by topic, partition and offset, as they come."""

OutputColumns = tuple[tuple[str, pl.DataType], ...]

_HOUR_US = 3_600_000_000
_MINUTE_MS = 60_000
_HEARTBEAT_MS = 1_000  # for processing-time timers: how late they may fire while nothing comes
_HIDDEN = (TIME, SPLIT, WATERMARK_SEEN)


@dataclass(frozen=True)
class KeyedProcess(OperatorBase):
    """The operator of one process function. Durations in microseconds.

    ``outputs`` are the main output, which has the name None, and the side outputs. ``columns`` are those of the
    stream. ``version`` is that of the state; ``migrates``: the function has a way from older versions.
    ``processing_timers``: it may set processing-time timers. ``side_output``: late rows go to the side output.
    """

    name: str
    by: tuple[str, ...]
    function: ProcessFunction | FrameFunction
    states: tuple[tuple[str, StateDeclaration], ...]
    outputs: tuple[tuple[str | None, OutputColumns], ...]
    columns: OutputColumns
    order: RowOrder
    lateness_us: int
    side_output: bool
    version: int
    migrates: bool
    processing_timers: bool
    code: UserCode = field(metadata=NOT_DEFINING)

    @property
    def ordered(self) -> bool:
        return True

    @property
    def signed(self) -> bool:
        """Whether rows that were emitted may be taken back."""
        return False

    @property
    def heartbeat_ms(self) -> int | None:
        return _HEARTBEAT_MS if self.processing_timers else None

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - it has one input
        return {name for name, _ in self.columns}

    def output_watermark(self, watermark_us: int) -> int:
        """Return W - L: nothing is emitted with an earlier event time from now on."""
        return delayed_watermark(watermark_us, self.lateness_us)

    @cached_property
    def state_columns(self) -> StateColumns:
        """The columns of stored keys."""
        types = dict(self.columns)
        return StateColumns(tuple((name, types[name]) for name in self.by), self.states)

    # ── what is held between batches ────────────────────────────────────────────────────────

    @property
    def query_key(self) -> KeyColumns | None:
        return self.state_columns.key

    @property
    def queried_as_emitted(self) -> bool:
        return False  # but as its states

    def current_rows(
        self,
        state: OperatorState,
        keys: QueryKeys | None,
        watermark_us: int,  # noqa: ARG002 - what has expired is not held
    ) -> pl.DataFrame:
        """Return the states of the keys, each in the column of its name."""
        held = held_by_key(keyed_rows(state, self.version), keys, self.by)
        rows = pl.DataFrame(schema=self.state_columns.schema) if held is None else held
        return self.state_columns.shown(rows)

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Take all rows, with what orders those of one time."""
        hidden = [name for name in _HIDDEN if name in rows.columns]
        return Prepared(
            rows[[*(name for name, _ in self.columns), *hidden]].hstack([row_order(rows)])
        )

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Make the calls of the batch."""
        result = OperatorResult(counts=Counter())
        tables = [self._in_time(rows, context, result) for rows in inputs.get(0, ())]
        ProcessBatch(self, state, context, result).take(concat_present(tables))
        return result

    def _in_time(
        self, rows: pl.DataFrame, context: BatchContext, result: OperatorResult
    ) -> pl.DataFrame:
        found = take_in_time(rows, self.lateness_us, context, result)
        if self.side_output:
            add_late_rows(found, result)
        return found.in_time.drop(WATERMARK_SEEN, strict=False)


@dataclass
class ProcessBatch:
    """One batch of one bucket."""

    operator: KeyedProcess
    state: OperatorState
    context: BatchContext
    result: OperatorResult

    def __post_init__(self) -> None:
        operator, state = self.operator, self.state
        self.waiting = WaitingRows(state, "waiting", self._hashes)
        self.timers = Timers(state, "timers", _HOUR_US)
        self.processing_timers = Timers(state, "processing_timers", _MINUTE_MS)
        self.expiries = Timers(state, "expiries", _HOUR_US)
        function = operator.function
        frames = isinstance(function, FrameFunction)
        self.keys = StoredKeys(
            operator.name,
            state,
            operator.state_columns,
            operator.version,
            function.migrate,
            timers_taken=not frames or function.defines("on_timers"),
            processing_timers_taken=not frames,
        )
        self.until_us = operator.output_watermark(self.context.watermark_us)
        self.floor_us = operator.output_watermark(self.context.watermark_before_us)
        self._index_expiries(self.keys.open())
        self.ledger = StateLedger(operator.name, (self.waiting.runs, self.keys.rows.runs))

    def take(self, in_time: pl.DataFrame | None) -> None:
        """Make the calls that are due, and store what they leave."""
        due = self._due(in_time) if self.operator.order == "time" else self._arrived(in_time)
        touched = self._touched(due)
        if len(touched):
            known = self.keys.rows.get(touched, self._columns_read)
            if due is not None or known is not None:
                self._call(due, known, touched)
        self.ledger.check()

    @property
    def _columns_read(self) -> list[str] | None:
        function = self.operator.function
        without = isinstance(function, FrameFunction) and not function.defines("on_timers")
        return self.operator.state_columns.without_timers if without else None

    def _due(self, in_time: pl.DataFrame | None) -> pl.DataFrame | None:
        """Return the rows whose time has come, in their order, and let the others wait."""
        due = self.waiting.due(in_time, self.until_us - 1, self.ledger)
        return None if due is None else self._hashed(in_order(due, TIME, TIE))

    def _arrived(self, in_time: pl.DataFrame | None) -> pl.DataFrame | None:
        """Return the rows in the order of their arrival; without a place in the log, in that of time."""
        if in_time is None or not in_time.height:
            return None
        return self._hashed(in_order(in_time, TIE if SPLIT in in_time.columns else TIME, TIE))

    def _hashes(self, rows: pl.DataFrame) -> Hashes:
        return hash_columns(rows, self.operator.by, self.context.seed)

    def _hashed(self, rows: pl.DataFrame) -> pl.DataFrame:
        return rows.hstack([pl.Series(HASH, self._hashes(rows))])

    def _touched(self, due: pl.DataFrame | None) -> Hashes:
        """Return the hashes of keys that have a row, a timer, or state that has expired."""
        found = [
            self.timers.due(self.until_us),
            self.processing_timers.due(self.context.wall_ms),
            self.expiries.due(self.until_us),
        ]
        if due is not None:
            found.append(due[HASH].to_numpy())
        return sorted_distinct(np.concatenate(found))

    # ── the calls ───────────────────────────────────────────────────────────────────────────

    def _call(self, due: pl.DataFrame | None, known: pl.DataFrame | None, touched: Hashes) -> None:
        """Make the calls of all keys, and replace what is stored of them."""
        function = self.operator.function
        if isinstance(function, FrameFunction):
            after = self._call_frames(function, due, known)
        else:
            after = self._call_rows(function, due, known)
        before = after.clear() if known is None else known
        self.keys.rows.put(touched, after, before)
        self.ledger.events_in += after.height
        self.ledger.events_out += before.height

    def _call_frames(
        self, function: FrameFunction, due: pl.DataFrame | None, known: pl.DataFrame | None
    ) -> pl.DataFrame:
        """Make the calls of all keys at once; return what is to be stored of them."""
        operator = self.operator
        timers = function.defines("on_timers")
        keys, numbers = frame_keys(known, due, operator.state_columns, timers=timers)
        outputs = {
            name: FrameEmissions(columns, operator.signed) for name, columns in operator.outputs
        }
        calls = FrameCalls(
            function,
            operator.code,
            operator.state_columns,
            keys,
            outputs,
            self.until_us,
            self.floor_us,
        )
        rows = pl.DataFrame() if due is None else due
        before = keys.state[TIMERS] if timers else None
        if rows.height:
            calls.rows(rows, [name for name, _ in operator.columns], numbers)
        calls.timers()
        if before is not None:
            self.timers.add(*_new_timers(before, keys))
        self._give(outputs.values(), rows, Failures(calls.failed_rows, calls.failed_timers))
        return kept_rows(keys, operator.state_columns)

    def _call_rows(
        self, function: ProcessFunction, due: pl.DataFrame | None, known: pl.DataFrame | None
    ) -> pl.DataFrame:
        """Make the calls of all keys, one after the other; return what is to be stored of them."""
        columns = self.operator.state_columns
        keys = _BatchKeys.of(known, due, columns)
        calls, kept = self._calls(function, due), StoredRows(columns)
        expiries: list[tuple[int, int]] = []
        for place, key, key_hash, one, rows in keys:
            self._one_key(key, key_hash, one, rows, calls)
            self._keep(place, key_hash, calls, kept, expiries)
        calls.require_hope()
        self._index(calls.call, expiries)
        self._give(calls.call.outputs.values(), calls.rows.table, calls.failures)
        return kept.frame(keys.every[[*self.operator.by, HASH]])

    def _calls(self, function: ProcessFunction, due: pl.DataFrame | None) -> KeyCalls:
        operator, states = self.operator, KeyStates(self.operator.state_columns.states)
        names = [name for name, _ in operator.columns]
        call = PresentCall(
            states.state,
            KeyTimers(unit=1),
            KeyTimers(unit=1000),
            {name: Emissions(columns, operator.signed) for name, columns in operator.outputs},
            states.cells.undo,
            self.context.wall_ms,
        )
        rows = (
            KeyRows(pl.DataFrame(), (), (), ()) if due is None else key_rows(due, names, TIME, TIE)
        )
        return KeyCalls(
            function,
            operator.code,
            states,
            call,
            rows,
            in_time_order=operator.order == "time",
            until_us=self.until_us,
            floor_us=self.floor_us,
            key_types=operator.state_columns.key,
        )

    def _one_key(
        self,
        key: dict[str, object],
        key_hash: int,
        one: StoredKey | None,
        rows: Sequence[int],
        calls: KeyCalls,
    ) -> None:
        call, states = calls.call, calls.states
        if one is None:
            states.load_nothing()
            call.timers.times, call.processing_timers.times = [], []
        else:
            states.load(one.values, one.written_us)
            call.timers.times = one.timers_us
            call.processing_timers.times = one.processing_timers_ms
        calls.key(key, key_hash, NO_WATERMARK if one is None else one.now_us, rows)

    def _keep(
        self,
        place: int,
        key_hash: int,
        calls: KeyCalls,
        kept: StoredRows,
        expiries: list[tuple[int, int]],
    ) -> None:
        """Note what is to be stored of a key, if there is anything that a later call could see, and when it expires."""
        call, states = calls.call, calls.states
        states.expire(self.until_us)  # before which no call can be any more
        timers, processing = call.timers.times, call.processing_timers.times
        if states.is_empty() and not timers and not processing:
            return
        kept.add(place, states, call.now_us, timers, processing)
        expires_us = states.expires_us()
        if expires_us is not None:
            expiries.append((expires_us, key_hash))

    # ── what comes of them ──────────────────────────────────────────────────────────────────

    def _index(self, call: PresentCall, expiries: list[tuple[int, int]]) -> None:
        _add(self.timers, call.timers.added)
        _add(self.processing_timers, call.processing_timers.added)
        _add(self.expiries, expiries)

    def _index_expiries(self, migrated: list[tuple[int, int]]) -> None:
        """Note when the state of keys that were migrated expires; of some that has been already."""
        _add(self.expiries, [(max(at, self.floor_us + 1), key_hash) for at, key_hash in migrated])

    def _give(self, outputs: Iterable[Emitted], table: pl.DataFrame, failures: Failures) -> None:
        """Give what was emitted, and the rows and timers that failed."""
        ordered = self.operator.order == "time"
        self.result.rows = merged_outputs([*outputs], ordered=ordered)
        self.result.failed = self._failed(table, failures)
        if not ordered and failures.rows:
            count = len(failures.rows)
            self.result.counts.update(dead=count, held=-count)

    def _failed(self, table: pl.DataFrame, failures: Failures) -> tuple[FailedRows, ...]:
        failed: list[FailedRows] = []
        name = self.operator.name
        if failures.rows:
            rows = table[[number for number, _ in failures.rows]]
            rows = rows.rename({TIE: ORDER}) if SPLIT in rows.columns else rows
            failed.append(FailedRows(name, rows, [reason for _, reason in failures.rows]))
        if failures.timers:
            rows = timer_rows(failures.timers, self.operator.state_columns.key)
            failed.append(FailedRows(name, rows, [reason for *_, reason in failures.timers]))
        return tuple(failed)


def _new_timers(before: pl.Series, keys: FrameKeys) -> tuple[Int64s, Hashes]:
    """Return the timers of the keys whose timers have changed, and the hashes of these keys."""
    after = keys.state[TIMERS]
    changed = pl.DataFrame({HASH: keys.keys[HASH], TIMERS: after}).filter(after.ne_missing(before))
    timers = changed.explode(TIMERS).drop_nulls(TIMERS)
    return timers[TIMERS].dt.timestamp("us").to_numpy(), timers[HASH].to_numpy()


def _add(timers: Timers, made: Sequence[tuple[int, int]]) -> None:
    times = np.array([at for at, _ in made], np.int64)
    timers.add(times, np.array([key_hash for _, key_hash in made], np.uint64))


@dataclass(frozen=True)
class _BatchKeys:
    """The keys of a batch: each has one stored row or none, and its rows in their order.

    ``every`` has the key of each stored row, and then of each row; ``numbers`` say which key that is.
    """

    every: pl.DataFrame
    numbers: Int64s
    stored: Sequence[StoredKey]

    @classmethod
    def of(
        cls, known: pl.DataFrame | None, due: pl.DataFrame | None, columns: StateColumns
    ) -> _BatchKeys:
        every, numbers = keys_of_batch(known, due, columns)
        return cls(every, numbers, [] if known is None else columns.keys_of(known))

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any], int, StoredKey | None, list[int]]]:
        """Yield of each key a place in ``every``, its columns and hash, what is stored of it, and its rows."""
        places = np.argsort(self.numbers, kind="stable")
        starts = np.flatnonzero(np.diff(self.numbers[places], prepend=-1))
        firsts = self.every[places[starts]]
        hashes = firsts[HASH].to_list()
        keys = firsts.drop(HASH).to_dicts()
        order, held = places.tolist(), len(self.stored)
        ends = np.append(starts[1:], len(places)).tolist()
        for at, (start, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
            first = order[start]
            one = self.stored[first] if first < held else None
            rows = [place - held for place in order[start + (one is not None) : end]]
            yield first, keys[at], hashes[at], one, rows
