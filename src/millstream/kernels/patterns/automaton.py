"""An automaton and its conditions as the arrays that the matcher reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from millstream.kernels.arrays import Int64s
from millstream.kernels.patterns import tables as m
from millstream.kernels.patterns.conditions import CompiledConditions
from millstream.kernels.patterns.nfa import START, Nfa, Transition

SkipMode = Literal["none", "to_next", "past_last", "to_first", "to_last"]
_SKIPS: dict[SkipMode, int] = {
    "none": m.SKIP_NONE,
    "to_next": m.SKIP_TO_NEXT,
    "past_last": m.SKIP_PAST_LAST,
    "to_first": m.SKIP_TO_FIRST,
    "to_last": m.SKIP_TO_LAST,
}
_CONTIGUITIES = {"strict": m.STRICT, "relaxed": m.RELAXED, "any": m.ANY}


class SkipStrategy(NamedTuple):
    """What a match that counts skips; ``step`` is the one that is skipped to."""

    mode: SkipMode
    step: str | None = None


def tables_of(
    nfa: Nfa, compiled: CompiledConditions, within_us: int | None, skip: SkipStrategy
) -> m.Tables:
    """Return the arrays. Transitions from the start are those of the state after the last step."""
    states = [*range(len(nfa.steps)), START]
    leaving = [nfa.leaving(state) for state in states]
    transitions = [one for of_state in leaving for one in of_state]
    absences = [absence for one in transitions for absence in one.absences]
    programs = compiled.programs
    steps = nfa.steps
    return m.Tables(
        transitions_of=_starts(len(of_state) for of_state in leaving),
        target=_whole(one.target for one in transitions),
        contiguity=_whole(_CONTIGUITIES[one.contiguity] for one in transitions),
        goes_after=_whole(_mask(one, of_state) for of_state in leaving for one in of_state),
        absences_of=_starts(len(one.absences) for one in transitions),
        absence_condition=_whole(absence.condition for absence in absences),
        absence_next_only=_whole(absence.next_only for absence in absences),
        condition=_whole(step.condition for step in steps),
        until=_whole(step.until for step in steps),
        least=_whole(step.least for step in steps),
        most=_whole(step.most for step in steps),
        accepting=_whole(state in nfa.accepting for state in range(len(steps))),
        program_of=_starts(len(program) for program in programs),
        operation=_whole(operation for program in programs for operation, _ in program),
        argument=_whole(argument for program in programs for _, argument in program),
        aggregate=_whole(one.aggregate for one in compiled.registers),
        aggregate_state=_whole(one.state for one in compiled.registers),
        aggregate_value=_whole(one.value for one in compiled.registers),
        aggregate_float=_whole(one.is_float for one in compiled.registers),
        within_us=-1 if within_us is None else within_us,
        skip=_SKIPS[skip.mode],
        skip_state=next(
            (state for state, step in enumerate(steps) if step.name == skip.step), len(steps)
        ),
    )


def new_work(tables: m.Tables, entries: int) -> m.Work:
    """Return room for so many entries, of which entry 0 is there: it has no rows."""
    registers, stack = len(tables.aggregate), len(tables.operation) + 1
    work = m.Work(
        entries=np.zeros((entries, m.ENTRY_WIDTH), np.int64),
        whole=np.zeros((entries, registers), np.int64),
        floating=np.zeros((entries, registers), np.float64),
        null=np.zeros((entries, registers), np.uint8),
        live=np.zeros(entries, np.int64),
        held=np.zeros(entries, np.int64),
        matches=np.zeros((entries, 3), np.int64),
        numbers=np.zeros(6, np.int64),
        stack_whole=np.zeros(stack, np.int64),
        stack_float=np.zeros(stack, np.float64),
        stack_null=np.zeros(stack, np.uint8),
    )
    start = len(tables.least)
    count = tables.transitions_of[start + 1] - tables.transitions_of[start]
    work.entries[0, m.STATE] = start
    work.entries[0, m.MASK] = (1 << int(count)) - 1
    work.numbers[m.ENTRIES] = 1
    for register, aggregate in enumerate(tables.aggregate):
        work.null[0, register] = aggregate not in (m.ROWS, m.VALUES, m.SUM)
    return work


def _mask(transition: Transition, of_state: Sequence[Transition]) -> int:
    """Return the transitions of the same state that go before one, as bits."""
    return sum(
        1 << number
        for number, other in enumerate(of_state)
        if other.target in transition.goes_after
    )


def _whole(values: Iterable[int]) -> Int64s:
    return np.fromiter(values, np.int64)


def _starts(lengths: Iterable[int]) -> Int64s:
    return np.cumsum([0, *lengths], dtype=np.int64)
