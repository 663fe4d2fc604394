"""The operator of patterns: rows wait until the watermark has passed them, and are then matched in their order.

Let W be the operator's watermark, and L the lateness of its input. A row of time t waits until W > t + L. Then no row
before it follows, and it goes through the automaton of its key, after all rows of earlier times, and of
equal times in the order of the log. So what is matched depends on the rows alone, and not on batches. With
``within``, a partial match ends once W > its first row's time + ``within`` + L. A match is emitted with the time at which
it was decided: that of the row with which it was complete; with a skip strategy, of the row or the end of
time with which nothing could go before it any more; where it ends by an absence, the end of ``within``. No earlier one
follows, so the watermark of the output is W - L.

Conditions are worked out by polars before the shuffle, for whole tables, as far as they look at the row alone. Where
no row between two others matters, rows that satisfy none are left out there. After it, keys that have neither
a partial match nor a row that may begin one are left out. What remains goes through
:mod:`millstream.kernels.patterns.matcher`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import or_

import numpy as np
import polars as pl

from millstream.errors import UserCodeError
from millstream.kernels.arrays import Float64s
from millstream.kernels.changes import concat_present
from millstream.kernels.frames import (
    HASH,
    RELEASED,
    RELEASED_TIE,
    SPLIT,
    TIME,
    WATERMARK_SEEN,
    WEIGHT,
)
from millstream.kernels.joins.join_operator import add_late_rows, take_in_time
from millstream.kernels.joins.versions import TIE, row_order
from millstream.kernels.joins.waiting_rows import WaitingRows
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.operator_base import OperatorBase
from millstream.kernels.patterns import tables as m
from millstream.kernels.patterns.automaton import SkipStrategy, new_work, tables_of
from millstream.kernels.patterns.compiled import match_keys
from millstream.kernels.patterns.conditions import CompiledConditions
from millstream.kernels.patterns.keyed_matches import KeyedBatch, KeyedMatches, Known
from millstream.kernels.patterns.matcher import mark_kept, matched_rows
from millstream.kernels.patterns.measures import Measures
from millstream.kernels.patterns.nfa import START, Nfa
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyhash import Hashes, hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.timers import Timers, slot_width_us
from millstream.kernels.time.watermarks import delayed_watermark

ENTRIES_MAX = 50_000_000  # of a bucket in one batch, at some 100 bytes each
_ENTRIES_FIRST = 1024
_HIDDEN = (TIME, SPLIT, WATERMARK_SEEN)


_GATE, _VALUE = "__gate", "__value"


def _gate(number: int) -> str:
    return f"{_GATE}{number}"


def _value(number: int) -> str:
    return f"{_VALUE}{number}"


@dataclass(frozen=True)
class PatternMatch(OperatorBase):
    """The operator of a pattern. Durations in microseconds.

    ``conditions`` are those that the automaton names by number, with what each is called in an error. ``columns`` are those of the stream.
    ``side_output``: late rows go to the side output.
    """

    name: str
    by: tuple[str, ...]
    nfa: Nfa
    conditions: tuple[tuple[str, pl.Expr], ...]
    within_us: int | None
    skip: SkipStrategy
    measures: Measures
    columns: tuple[tuple[str, pl.DataType], ...]
    lateness_us: int
    side_output: bool = False

    @property
    def ordered(self) -> bool:
        return True

    @cached_property
    def compiled(self) -> CompiledConditions:
        """The conditions as gates and programs."""
        states = {step.name: state for state, step in enumerate(self.nfa.steps)}
        compiled = CompiledConditions(states, dict(self.columns))
        for what, condition in self.conditions:
            compiled.add(condition, what)
        return compiled

    @cached_property
    def tables(self) -> m.Tables:
        """The automaton as arrays."""
        return tables_of(self.nfa, self.compiled, self.within_us, self.skip)

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - it has one input
        gates = [gate for gate in self.compiled.gates if gate is not None]
        expressions = [*gates, *(value.expression for value in self.compiled.values)]
        # What names columns by a pattern, as pl.all() does, stands for other columns if some are not read.
        if self.side_output or any(one.meta.has_multiple_outputs() for one in expressions):
            return {name for name, _ in self.columns}
        read = {root for one in expressions for root in one.meta.root_names()}
        return {*self.by, *read, *self.measures.columns_read}

    def output_watermark(self, watermark_us: int) -> int:
        """Return W - L: no match that was decided earlier follows."""
        return delayed_watermark(watermark_us, self.lateness_us)

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Work out what conditions say of each row alone; leave out rows that say nothing."""
        gates = [
            gate.fill_null(value=False).alias(_gate(at))
            for at, gate in enumerate(self.compiled.gates)
            if gate is not None
        ]
        values = [one.column(_value(at)) for at, one in enumerate(self.compiled.values)]
        own = [name for name, _ in self.columns if name in rows.columns]
        added = rows[own or rows.columns].with_columns(*gates, *values)
        found = [added[name] for name in added.columns if name.startswith((_GATE, _VALUE))]
        kept = [name for name, _ in self.columns if name in self._carried]
        hidden = [name for name in _HIDDEN if name in rows.columns]
        prepared = rows[[*kept, *hidden]].hstack([*found, row_order(rows)])
        if self.side_output or self.nfa.looks_at_all_rows or len(gates) < len(self.conditions):
            return Prepared(prepared)
        says_something = reduce(or_, (added[_gate(at)] for at in range(len(gates))))
        without = prepared.filter(says_something)
        return Prepared(without, counts={"filtered": prepared.height - without.height})

    @cached_property
    def _carried(self) -> set[str]:
        """The columns that go with a row: of the key, of measures, and all if it may be a late one."""
        if self.side_output:
            return {name for name, _ in self.columns}
        return {*self.by, *self.measures.columns_read}

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
        _PatternBatch(self, state, context).take(in_time, result)
        return result

    def _in_time(
        self, rows: pl.DataFrame, context: BatchContext, result: OperatorResult
    ) -> pl.DataFrame:
        found = take_in_time(rows, self.lateness_us, context, result)
        if self.side_output:
            made = [name for name in rows.columns if name.startswith((_GATE, _VALUE))]
            add_late_rows(found, result, without=made)
        return found.in_time.drop(SPLIT, WATERMARK_SEEN, strict=False)

    def may_begin(self, rows: pl.DataFrame) -> pl.Series:
        """Return which rows may be the first of a match, by what they say alone."""
        starts = {self.nfa.steps[one.target].condition for one in self.nfa.leaving(START)}
        gates = [rows[_gate(at)] for at in sorted(starts) if self.compiled.gates[at] is not None]
        if len(gates) < len(starts):
            return pl.repeat(value=True, n=rows.height, eager=True)
        return reduce(or_, gates)

    def partial_matches(self, state: OperatorState) -> Known:
        """Return the partial matches that state holds, and their rows: for looking at them."""
        return KeyedMatches(state, self.by).scan()


@dataclass
class _PatternBatch:
    """One batch of one bucket."""

    operator: PatternMatch
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
            new = self._candidates(due, known)
            if new is not None or known.entries is not None:
                self._match(new, known, touched, result)
        result.gauges["partial_match_rows"] = float(self.matches.rows.runs.events)
        self.ledger.check()

    def _due(self, in_time: pl.DataFrame | None) -> pl.DataFrame | None:
        """Return the rows whose time has come, in their order, and let the others wait."""
        held = self.waiting.take(self.until_us)
        self.ledger.events_out += 0 if held is None else held.height
        if in_time is not None:
            comes_due = in_time[TIME] <= self.until_us
            kept = in_time.filter(~comes_due)
            self.waiting.add(kept)
            self.ledger.events_in += kept.height
            in_time = in_time.filter(comes_due)
        due = concat_present([held, in_time])
        if due is None:
            return None
        due = due.sort(TIME, TIE, maintain_order=True)
        return due.hstack([pl.Series(HASH, hash_columns(due, self.operator.by, self.context.seed))])

    def _ends(self) -> Hashes:
        """Return the keys of which a partial match may end by time."""
        if self.timers is None:
            return np.empty(0, np.uint64)
        return self.timers.due(self.until_us)

    def _candidates(self, due: pl.DataFrame | None, known: Known) -> pl.DataFrame | None:
        """Return the rows of keys that have a partial match, or a row that may begin one."""
        if due is None:
            return None
        hashes = due[HASH].to_numpy()
        found = [hashes[self.operator.may_begin(due).to_numpy()]]
        if known.entries is not None:
            found.append(known.entries[HASH].to_numpy())
        candidates = due.filter(pl.Series(np.isin(hashes, np.concatenate(found))))
        return candidates if candidates.height else None

    def _match(
        self, new: pl.DataFrame | None, known: Known, touched: Hashes, result: OperatorResult
    ) -> None:
        if new is None:
            assert known.rows is not None
            new = known.rows.clear()[[c for c in known.rows.columns if c != "__number"]]
        else:
            new = new.with_columns(pl.lit(1, pl.Int64).alias(WEIGHT))
        batch = KeyedBatch.of(known, new, self.operator.by)
        work = self._run(batch)
        kept = batch.kept(work, mark_kept(work))
        self.matches.write(touched, known, kept)
        self._count(batch, kept, known)
        self._set_timers(batch, work)
        result.rows = self._rows(batch, work)

    def _run(self, batch: KeyedBatch) -> m.Work:
        """Run the automaton, with more room where it had too little."""
        operator = self.operator
        rows = self._rows_of(batch)
        room = _ENTRIES_FIRST + len(batch.entries) + 2 * batch.rows.height
        while True:
            work = new_work(operator.tables, room)
            held = len(batch.entries)
            work.entries[1 : held + 1] = batch.entries
            work.numbers[m.ENTRIES] = held + 1
            match_keys(operator.tables, rows, work, self.until_us)
            if not work.numbers[m.FULL]:
                return work
            if room >= ENTRIES_MAX:
                raise UserCodeError(
                    f"The pattern of step {operator.name!r} has more than {ENTRIES_MAX:,} partial matches of the "
                    f"keys of a batch. Give a shorter within, conditions that fewer rows satisfy, followed_by "
                    "instead of followed_by_any, or until() of a step that repeats.",
                    step=operator.name,
                )
            room = min(4 * room, ENTRIES_MAX)

    def _rows_of(self, batch: KeyedBatch) -> m.MatcherRows:
        compiled, rows = self.operator.compiled, batch.rows
        every = np.ones(rows.height, np.uint8)
        gates = np.array(
            [
                every if gate is None else rows[_gate(at)].to_numpy().astype(np.uint8)
                for at, gate in enumerate(compiled.gates)
            ]
        )
        values = _value_arrays(compiled, rows)
        return m.MatcherRows(
            rows[TIME].to_numpy(),
            gates,
            gates.max(axis=0, initial=0),
            *values,
            batch.rows_of,
            batch.new_from,
            batch.entries_of,
        )

    def _count(self, batch: KeyedBatch, kept: Known, known: Known) -> None:
        """Count what came into state and left it: rows of partial matches."""
        after = 0 if kept.rows is None else kept.rows.height
        before = 0 if known.rows is None else known.rows.height
        assert before == int(batch.were_held().sum())
        self.ledger.events_in += after
        self.ledger.events_out += before

    def _set_timers(self, batch: KeyedBatch, work: m.Work) -> None:
        """Set a timer for each first row of a partial match that this batch has begun."""
        if self.timers is None:
            return
        entries = work.entries[: work.numbers[m.ENTRIES]]
        roots = np.unique(entries[entries[:, m.LIVE] == 1, m.ROOT])
        roots = roots[roots > len(batch.entries)]
        rows = batch.rows[entries[roots, m.ROW]]
        assert self.operator.within_us is not None
        self.timers.add(rows[TIME].to_numpy() + self.operator.within_us, rows[HASH].to_numpy())

    def _rows(self, batch: KeyedBatch, work: m.Work) -> pl.DataFrame | None:
        """Return the rows of matches, in the order in which they were decided."""
        count = int(work.numbers[m.MATCHES])
        if not count:
            return None
        operator, rows = self.operator, batch.rows
        found = matched_rows(work)
        table = operator.measures.of(operator.by, rows, found, count)
        entry, time_us, decided = work.matches[:count].T
        first = work.entries[work.entries[entry, m.ROOT], m.ROW]
        tie = rows[TIE][np.where(decided < 0, first, decided)]
        times = pl.Series(TIME, time_us)
        made = table.hstack([times, times.alias(RELEASED), tie.alias(RELEASED_TIE)])
        return made.sort(RELEASED, RELEASED_TIE, maintain_order=True)


def _value_arrays(
    compiled: CompiledConditions, rows: pl.DataFrame
) -> tuple[m.Places, Float64s, m.Bytes]:
    """Return the values of rows as whole numbers, as floats, and where they are null. Texts are ranks."""
    count = len(compiled.values)
    whole = np.zeros((count, rows.height), np.int64)
    floating = np.zeros((count, rows.height))
    null = np.zeros((count, rows.height), np.uint8)
    texts = [at for at, value in enumerate(compiled.values) if value.kind == "text"]
    for at, value in enumerate(compiled.values):
        column = rows[_value(at)]
        null[at] = column.is_null().to_numpy()
        if value.kind == "float":
            floating[at] = column.fill_null(0.0).to_numpy()
        elif value.kind != "text":
            whole[at] = column.fill_null(0).to_numpy()
    if texts:
        every = pl.concat([rows[_value(at)].alias("text") for at in texts])
        ranks = every.rank("dense").fill_null(0).cast(pl.Int64).to_numpy()
        whole[texts] = ranks.reshape(len(texts), rows.height)
    return whole, floating, null
