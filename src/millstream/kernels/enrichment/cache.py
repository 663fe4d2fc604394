"""Answers in state, for as long as they may be used.

Their age is counted by a clock of the state's own, which between two batches moves by the job's running time
or by the time of day, whichever moved more. Both are in the source's offsets, so a repeated batch has the
same. With running time alone, an answer would be young again after a night in which the job did not run;
with the time of day alone, it would not age in a run up to the end of the log, in which that stands still,
nor after a clock that was set ahead by mistake.

An answer that has expired is removed in the next batch, whether its key comes or not: so the state holds the
answers of one span of time, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.frames import HASH, ROWS
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.timers import Timers, WaitingLedger

_EXPIRES = "__expires"  # Int64: the time on the cache's clock from which an answer is not used
_FAMILY, _TIMERS = "answers", "expiries"
_CLOCKS = "clocks"
_SLOTS_PER_SPAN = 16


@dataclass
class AnswerCache:
    """The answers of an operator in one bucket while a batch is worked on.

    ``key`` and ``schema`` are the columns of the key, and all with their types; ``span_ms`` is for how long
    an answer is used. Make it before anything is looked up: it moves the clock, and removes what has expired.
    """

    step: str
    state: OperatorState
    context: BatchContext
    key: tuple[str, ...]
    schema: dict[str, pl.DataType]
    span_ms: int
    now_ms: int = field(init=False)

    def __post_init__(self) -> None:
        slot = max(1, self.span_ms // _SLOTS_PER_SPAN)
        self._kept = KeyedRows(self.state, _FAMILY, ROWS)
        self._timers = Timers(self.state, _TIMERS, slot)
        self._waiting = WaitingLedger(self.step, self.state, slot)
        self._ledger = StateLedger(self.step, (self._kept.runs,))
        self.now_ms = self._advance()
        self._remove_expired()

    def _advance(self) -> int:
        """Move the clock; return its time, which begins at 0."""
        running_ms, day_ms = self.context.clock_ms, self.context.wall_ms
        before_ms, run_ms, at_ms = self.state.values.get(_CLOCKS, (0, running_ms, day_ms))
        now_ms: int = before_ms + max(running_ms - run_ms, day_ms - at_ms, 0)
        self.state.values[_CLOCKS] = [now_ms, max(running_ms, run_ms), max(day_ms, at_ms)]
        return now_ms

    def _remove_expired(self) -> None:
        held = self._kept.get(self._timers.due(self.now_ms))
        if held is None:
            self._waiting.update(_NO_TIMES, _NO_TIMES, self.now_ms)
            return
        over = held[_EXPIRES] <= self.now_ms
        expired, left = held.filter(over), held.filter(~over)
        self._kept.put(sorted_distinct(held[HASH].to_numpy()), left, held)
        self._ledger.events_out += expired.height
        self._waiting.update(expired[_EXPIRES].to_numpy(), _NO_TIMES, self.now_ms)

    def look_up(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return the answers that are held for some of these keys."""
        hashes = sorted_distinct(hash_columns(keys, self.key, self.context.seed))
        held = self._kept.get(hashes)
        if held is None:
            return pl.DataFrame(schema=self.schema)
        return held.select(self.schema.keys()).join(keys, on=self.key, how="semi")

    def add(self, answers: pl.DataFrame) -> None:
        """Keep answers for keys of which none is held."""
        if not answers.height:
            return
        expires_ms = self.now_ms + self.span_ms
        new = answers.select(self.schema.keys()).with_columns(
            pl.Series(HASH, hash_columns(answers, self.key, self.context.seed)),
            pl.lit(expires_ms, pl.Int64).alias(_EXPIRES),
            pl.lit(1, pl.Int64).alias(ROWS),
        )
        hashes = sorted_distinct(new[HASH].to_numpy())
        held = self._kept.get(hashes)  # of other keys that share a hash
        every = new if held is None else pl.concat([held.select(new.columns), new])
        self._kept.put(hashes, every, held)
        times = np.full(new.height, expires_ms, np.int64)
        self._timers.add(times[: len(hashes)], hashes)
        self._waiting.update(_NO_TIMES, times, self.now_ms)
        self._ledger.events_in += new.height

    def check(self) -> None:
        """Check that every answer that came is held, or has expired.

        Raises:
            CorruptionError: answers were lost or doubled; the batch must not be committed.
        """
        self._ledger.check()


_NO_TIMES: Int64s = np.empty(0, np.int64)
