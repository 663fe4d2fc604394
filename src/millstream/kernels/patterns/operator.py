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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import or_

import numpy as np
import polars as pl

from millstream.errors import UserCodeError
from millstream.kernels.columns import constant
from millstream.kernels.errors.user_code import UserCode
from millstream.kernels.frames import HASH, RELEASED, RELEASED_TIE, TIME, WEIGHT
from millstream.kernels.joins.versions import TIE
from millstream.kernels.operator import NOT_DEFINING, BatchContext, OperatorResult
from millstream.kernels.patterns import tables as m
from millstream.kernels.patterns.automaton import SkipStrategy, new_work, tables_of
from millstream.kernels.patterns.compiled import match_keys
from millstream.kernels.patterns.conditions import CompiledConditions
from millstream.kernels.patterns.keyed_matches import KeyedBatch, Known
from millstream.kernels.patterns.matcher import mark_kept, matched_rows
from millstream.kernels.patterns.measures import Measures
from millstream.kernels.patterns.nfa import START, Nfa
from millstream.kernels.patterns.partial_matches import PartialMatch, ShownRows, to_end
from millstream.kernels.patterns.pattern_operator import (
    PatternBatch,
    PatternOperator,
    gate_arrays,
    gate_column,
    value_arrays,
)
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.operator_state import OperatorState

ENTRIES_MAX = 50_000_000  # of a bucket in one batch, at some 100 bytes each
_ENTRIES_FIRST = 1024


@dataclass(frozen=True)
class PatternMatch(PatternOperator):
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
    side_output: bool
    code: UserCode = field(metadata=NOT_DEFINING)

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

    @property
    def measured_columns(self) -> Sequence[str]:
        return self.measures.columns_read

    @property
    def needs_all_rows(self) -> bool:
        return self.nfa.looks_at_all_rows

    def batch(self, state: OperatorState, context: BatchContext) -> PatternBatch:
        return _SequenceBatch(self, state, context)

    def partial_matches_of(self, known: Known, until_us: int) -> Iterator[PartialMatch]:  # noqa: ARG002
        assert known.rows is not None
        batch = KeyedBatch.of(known, _no_rows(known.rows), self.by)
        shown = ShownRows.of(batch.rows, self.by, [name for name, _ in self.columns])
        for number, entry in enumerate(batch.entries, start=1):
            if entry[m.LIVE] or entry[m.COMPLETE]:
                yield self._partial_match(batch.entries, number, shown)

    def _partial_match(self, entries: m.Places, number: int, shown: ShownRows) -> PartialMatch:
        last, taken = entries[number - 1], []
        while number:
            entry = entries[number - 1]
            taken.append((int(entry[m.ROW]), self.nfa.steps[entry[m.STATE]].name))
            number = int(entry[m.PARENT])
        rows = tuple(shown.bound(*one) for one in reversed(taken))
        waits = _waits_for(self.nfa, int(last[m.STATE]), int(last[m.MASK])) if last[m.LIVE] else ()
        if last[m.COMPLETE]:
            waits = (*waits, "the end of partial matches that began before it")
        first = taken[-1][0]
        return PartialMatch(
            self.name,
            shown.key(first),
            rows[0].time,
            rows,
            tuple(waits),
            to_end(shown.time_us(first), self.within_us),
            bool(last[m.COMPLETE]),
        )

    def may_begin(self, rows: pl.DataFrame) -> pl.Series:
        """Return which rows may be the first of a match, by what they say alone."""
        starts = {self.nfa.steps[one.target].condition for one in self.nfa.leaving(START)}
        gates = [
            rows[gate_column(at)] for at in sorted(starts) if self.compiled.gates[at] is not None
        ]
        if len(gates) < len(starts):
            return constant(True, rows.height, pl.Boolean)
        return reduce(or_, gates)


@dataclass
class _SequenceBatch(PatternBatch):
    operator: PatternMatch

    def match(
        self, new: pl.DataFrame | None, known: Known, touched: Hashes, result: OperatorResult
    ) -> None:
        if new is None:
            assert known.rows is not None
            new = _no_rows(known.rows)
        else:
            new = new.with_columns(pl.lit(1, pl.Int64).alias(WEIGHT))
        batch = KeyedBatch.of(known, new, self.operator.by)
        work = self._run(batch)
        kept = batch.kept(work, mark_kept(work))
        self.matches.write(touched, known, kept)
        assert int(batch.were_held().sum()) == (0 if known.rows is None else known.rows.height)
        self.count(kept, known)
        self._set_timers(batch, work)
        result.rows = self._rows(batch, work, result)

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
        gates = gate_arrays(compiled, rows)
        values = value_arrays(compiled, rows)
        return m.MatcherRows(
            rows[TIME].to_numpy(),
            gates,
            gates.max(axis=0, initial=0),
            *values,
            batch.rows_of,
            batch.new_from,
            batch.entries_of,
        )

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

    def _rows(self, batch: KeyedBatch, work: m.Work, result: OperatorResult) -> pl.DataFrame | None:
        """Return the rows of matches, in the order in which they were decided."""
        count = int(work.numbers[m.MATCHES])
        if not count:
            return None
        operator, rows = self.operator, batch.rows
        found = matched_rows(work)
        made = operator.measures.of(operator.by, rows, found, count, operator.code)
        result.failed = made.failed
        if not len(made.places):
            return None
        entry, time_us, decided = work.matches[:count][made.places].T
        first = work.entries[work.entries[entry, m.ROOT], m.ROW]
        tie = rows[TIE][np.where(decided < 0, first, decided)]
        times = pl.Series(TIME, time_us)
        table = made.table.hstack([times, times.alias(RELEASED), tie.alias(RELEASED_TIE)])
        return table.sort(RELEASED, RELEASED_TIE, maintain_order=True)


def _no_rows(known: pl.DataFrame) -> pl.DataFrame:
    """Return no new rows, beside those that are known."""
    return known.clear().drop("__number")


_WORDS = {"strict": "next", "relaxed": "followed by", "any": "followed by any"}


def _waits_for(nfa: Nfa, state: int, mask: int) -> Iterator[str]:
    """Yield in words each transition of a state that a mask leaves."""
    for bit, one in enumerate(nfa.leaving(state)):
        if not mask >> bit & 1:
            continue
        absent = " and ".join(repr(absence.name) for absence in one.absences)
        if one.target == nfa.end:
            yield f"the end of within, without {absent}"
            continue
        name = repr(nfa.steps[one.target].name)
        another = "another " if one.target == state else ""
        before = f", without {absent} before it" if absent else ""
        yield f"{_WORDS[one.contiguity]} {another}{name}{before}"
