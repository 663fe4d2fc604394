"""What operators of patterns have in common: conditions are worked out before the shuffle, and rows wait for their time.

Let W be the operator's watermark, and L the lateness of its input. A row of time t waits until W > t + L. Then no row
before it follows, and it is matched among those of its key, after all rows of earlier times, and of
equal times in the order of the log. So what is matched depends on the rows alone, and not on batches.

Conditions are worked out by polars before the shuffle, for whole tables, as far as they look at the row alone: as gates and
values, which are columns of the rows from there on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import or_

import numpy as np
import polars as pl

from millstream.kernels.arrays import Float64s
from millstream.kernels.changes import concat_present
from millstream.kernels.columns import filter_rows, is_among
from millstream.kernels.frames import HASH, SPLIT, TIME, WATERMARK_SEEN
from millstream.kernels.joins.join_operator import add_late_rows, take_in_time
from millstream.kernels.joins.versions import TIE, row_order
from millstream.kernels.joins.waiting_rows import WaitingRows
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.operator_base import OperatorBase
from millstream.kernels.patterns import tables as m
from millstream.kernels.patterns.conditions import CompiledConditions
from millstream.kernels.patterns.keyed_matches import KeyedMatches, Known
from millstream.kernels.patterns.partial_matches import PartialMatch
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyhash import Hashes, hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.timers import Timers, slot_width_us
from millstream.kernels.time.watermarks import delayed_watermark

_HIDDEN = (TIME, SPLIT, WATERMARK_SEEN)
_GATE, _VALUE = "__gate", "__value"


def gate_column(number: int) -> str:
    """Return the column that says whether the row alone allows a condition."""
    return f"{_GATE}{number}"


def value_column(number: int) -> str:
    """Return the column of a row's value that conditions use."""
    return f"{_VALUE}{number}"


class PatternOperator(OperatorBase):
    """An operator of patterns; ``columns`` are those of the stream, ``side_output``: late rows go to the side output."""

    name: str
    by: tuple[str, ...]
    within_us: int | None
    columns: tuple[tuple[str, pl.DataType], ...]
    lateness_us: int
    side_output: bool

    @property
    @abstractmethod
    def compiled(self) -> CompiledConditions:
        """The conditions as gates and programs."""

    @property
    @abstractmethod
    def measured_columns(self) -> Sequence[str]:
        """The columns of the stream that matched rows must have."""

    @property
    @abstractmethod
    def needs_all_rows(self) -> bool:
        """Whether it matters that a row is there which satisfies no condition."""

    @abstractmethod
    def may_begin(self, rows: pl.DataFrame) -> pl.Series:
        """Return which rows something that is emitted may begin with, by what they say alone."""

    @abstractmethod
    def batch(self, state: OperatorState, context: BatchContext) -> PatternBatch:
        """Return what processes a batch."""

    @property
    def ordered(self) -> bool:
        return True

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - it has one input
        gates = [gate for gate in self.compiled.gates if gate is not None]
        expressions = [*gates, *(value.expression for value in self.compiled.values)]
        # What names columns by a pattern, as pl.all() does, stands for other columns if some are not read.
        if self.side_output or any(one.meta.has_multiple_outputs() for one in expressions):
            return {name for name, _ in self.columns}
        read = {root for one in expressions for root in one.meta.root_names()}
        return {*self.by, *read, *self.measured_columns}

    def output_watermark(self, watermark_us: int) -> int:
        """Return W - L: no match that was decided earlier follows."""
        return delayed_watermark(watermark_us, self.lateness_us)

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Work out what conditions say of each row alone; leave out rows that say nothing."""
        gates = [
            gate.fill_null(value=False).alias(gate_column(at))
            for at, gate in enumerate(self.compiled.gates)
            if gate is not None
        ]
        values = [one.column(value_column(at)) for at, one in enumerate(self.compiled.values)]
        own = [name for name, _ in self.columns if name in rows.columns]
        added = rows[own or rows.columns].with_columns(*gates, *values)
        found = [added[name] for name in added.columns if name.startswith((_GATE, _VALUE))]
        kept = [name for name, _ in self.columns if name in self._carried]
        hidden = [name for name in _HIDDEN if name in rows.columns]
        prepared = rows[[*kept, *hidden]].hstack([*found, row_order(rows)])
        if self.side_output or self.needs_all_rows or len(gates) < len(self.compiled.gates):
            return Prepared(prepared)
        says_something = reduce(or_, (added[gate_column(at)] for at in range(len(gates))))
        without = prepared.filter(says_something)
        return Prepared(without, counts={"filtered": prepared.height - without.height})

    @cached_property
    def _carried(self) -> set[str]:
        """The columns that go with a row: of the key, of measures, and all if it may be a late one."""
        if self.side_output:
            return {name for name, _ in self.columns}
        return {*self.by, *self.measured_columns}

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Match the rows that the watermark has passed; let the others wait."""
        result = OperatorResult(counts=Counter())
        in_time = concat_present(
            [self._in_time(rows, context, result) for rows in inputs.get(0, ())]
        )
        self.batch(state, context).take(in_time, result)
        return result

    def _in_time(
        self, rows: pl.DataFrame, context: BatchContext, result: OperatorResult
    ) -> pl.DataFrame:
        found = take_in_time(rows, self.lateness_us, context, result)
        if self.side_output:
            made = [name for name in rows.columns if name.startswith((_GATE, _VALUE))]
            add_late_rows(found, result, without=made)
        return found.in_time.drop(SPLIT, WATERMARK_SEEN, strict=False)

    # ── looked at ───────────────────────────────────────────────────────────────────────────

    def partial_matches(
        self, state: OperatorState, watermark_us: int, seed: int, key: pl.DataFrame | None = None
    ) -> Iterator[PartialMatch]:
        """Yield the partial matches that state has after a batch, key by key, the oldest of a key first.

        ``key`` has one row, with the value of each column that a key is to have: some columns of the key, or all.
        Without it, or with some, all that is held is read.
        """
        held = KeyedMatches(state, self.by)
        if key is not None and set(key.columns) == set(self.by):
            known = held.read(hash_columns(key, self.by, seed))
        else:
            known = held.scan()
        if key is not None:
            known = Known(_of_key(known.rows, key), _of_key(known.entries, key))
        if known.rows is not None:
            yield from self.partial_matches_of(known, self.output_watermark(watermark_us) - 1)

    @abstractmethod
    def partial_matches_of(self, known: Known, until_us: int) -> Iterator[PartialMatch]:
        """Yield the partial matches of rows that state has; no row of the time ``until_us`` or before it follows."""


def _of_key(rows: pl.DataFrame | None, key: pl.DataFrame) -> pl.DataFrame | None:
    if rows is None:
        return None
    wanted = [pl.col(name).eq_missing(pl.lit(key[name]).first()) for name in key.columns]
    found = rows.filter(wanted)
    return found if found.height else None


@dataclass
class PatternBatch:
    """One batch of one bucket."""

    operator: PatternOperator
    state: OperatorState
    context: BatchContext
    timers: Timers | None = field(init=False)

    def __post_init__(self) -> None:
        operator, within_us = self.operator, self.operator.within_us
        self.waiting = WaitingRows(
            self.state, "waiting", lambda rows: hash_columns(rows, operator.by, self.context.seed)
        )
        self.matches = KeyedMatches(self.state, operator.by)
        self.timers = (
            None if within_us is None else Timers(self.state, "deadlines", slot_width_us(within_us))
        )
        self.until_us = delayed_watermark(self.context.watermark_us, operator.lateness_us) - 1
        self.ledger = StateLedger(operator.name, (self.waiting.runs, self.matches.rows.runs))

    def take(self, in_time: pl.DataFrame | None, result: OperatorResult) -> None:
        """Match what is due, and keep what may go on."""
        due, ends = self._due(in_time), self._ends()
        hashes = ends if due is None else np.concatenate([due[HASH].to_numpy(), ends])
        touched = sorted_distinct(hashes)
        if len(touched):
            known = self.matches.read(touched)
            new = self.candidates(due, known)
            if new is not None or known.entries is not None:
                self.match(new, known, touched, result)
        result.gauges["partial_match_rows"] = float(self.matches.rows.runs.events)
        self.ledger.check()

    def _due(self, in_time: pl.DataFrame | None) -> pl.DataFrame | None:
        """Return the rows whose time has come, in their order, and let the others wait."""
        due = self.waiting.due(in_time, self.until_us, self.ledger)
        if due is None:
            return None
        due = due.sort(TIME, TIE, maintain_order=True)
        return due.hstack([pl.Series(HASH, hash_columns(due, self.operator.by, self.context.seed))])

    def _ends(self) -> Hashes:
        """Return the keys of which a partial match may end by time."""
        if self.timers is None:
            return np.empty(0, np.uint64)
        return self.timers.due(self.until_us)

    def candidates(self, due: pl.DataFrame | None, known: Known) -> pl.DataFrame | None:
        """Return the rows that must be looked at: of keys that state has rows of, or that a match may begin in."""
        if due is None:
            return None
        hashes = due[HASH].to_numpy()
        found = [hashes[self.operator.may_begin(due).to_numpy()]]
        if known.entries is not None:
            found.append(known.entries[HASH].to_numpy())
        candidates = filter_rows(due, is_among(hashes, np.concatenate(found)))
        return candidates if candidates.height else None

    @abstractmethod
    def match(
        self, new: pl.DataFrame | None, known: Known, touched: Hashes, result: OperatorResult
    ) -> None:
        """Match the new rows of keys and what is known of them, and write what is kept."""

    def count(self, kept: Known, known: Known) -> None:
        """Count what came into state and left it: rows of partial matches."""
        after = 0 if kept.rows is None else kept.rows.height
        before = 0 if known.rows is None else known.rows.height
        self.ledger.events_in += after
        self.ledger.events_out += before


def gate_arrays(compiled: CompiledConditions, rows: pl.DataFrame) -> m.Bytes:
    """Return what rows alone say of conditions, as [condition, row]."""
    every = np.ones(rows.height, np.uint8)
    gates = [
        every if gate is None else rows[gate_column(at)].to_numpy().astype(np.uint8)
        for at, gate in enumerate(compiled.gates)
    ]
    return np.array(gates, np.uint8).reshape(len(gates), rows.height)


def value_arrays(
    compiled: CompiledConditions, rows: pl.DataFrame
) -> tuple[m.Places, Float64s, m.Bytes]:
    """Return the values of rows as whole numbers, as floats, and where they are null. Texts are ranks."""
    count = len(compiled.values)
    whole = np.zeros((count, rows.height), np.int64)
    floating = np.zeros((count, rows.height))
    null = np.zeros((count, rows.height), np.uint8)
    texts = [at for at, value in enumerate(compiled.values) if value.kind == "text"]
    for at, value in enumerate(compiled.values):
        column = rows[value_column(at)]
        null[at] = column.is_null().to_numpy()
        if value.kind == "float":
            floating[at] = column.fill_null(0.0).to_numpy()
        elif value.kind != "text":
            whole[at] = column.fill_null(0).to_numpy()
    if texts:
        every = pl.concat([rows[value_column(at)].alias("text") for at in texts])
        ranks = every.rank("dense").fill_null(0).cast(pl.Int64).to_numpy()
        whole[texts] = ranks.reshape(len(texts), rows.height)
    return whole, floating, null
