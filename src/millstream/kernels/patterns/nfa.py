"""A pattern as a nondeterministic finite automaton (NFA): its states, and the transitions between them.

A state is a step of the pattern, and a *partial match* is in the state of the step that took its last row. A
match takes rows p₁ < p₂ < … of one key, in the order of their time, and of their places in the log where
times are equal. It is a path of transitions; a transition from row p, of state s, to row q, of state t, exists if

1.  q satisfies the condition of t, and not its ``until``;
2.  the contiguity holds: ``strict``: q is the row right after p; ``relaxed``: no row between p and q satisfies 1;
    ``any``: whatever is between them;
3.  none of its absences is broken: a ``next_only`` one by the row right after p, another by any row in (p, q].
    What must not be there after a step must not be between its own rows, either;
4.  s took as many rows as it must before leaving, and no more than it may before staying (s = t);
5.  if it stays in s, no row in (p, q] satisfies the ``until`` of s;
6.  no row in (p, q] could have been taken from p by a transition that ``goes_first``: those into a greedy step
    go before those that leave the step, or leave it out;
7.  the last row is at most ``within`` after the first.

Conditions see the row, and the rows that the partial match has at p. A path that ends in an accepting state is a
match with its last row. One from which ``END`` is reached is a match when ``within`` is over since its first row, if
no row until then has broken an absence (3) or would have been taken first (6). A match is known by its steps and
rows: two ways to the same ones are one match.

Source: Agrawal et al., "Efficient Pattern Matching over Event Streams", SIGMOD 2008 (NFA with a buffer of shared
versions); Apache Flink, "FlinkCEP - Complex event processing for Flink" (contiguity, quantifiers, skip strategies).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from millstream.errors import ConfigError

Contiguity = Literal["strict", "relaxed", "any"]

START = -1
UNLIMITED = 2**31 - 1
STATES_MAX = 60
WAYS_MAX = 62  # transitions from a state: a mask of them is one number of 64 bits
NO_CONDITION = -1


@dataclass(frozen=True)
class Absence:
    """A condition, by its number, that no row in a gap satisfies; ``next_only``: only the first row counts."""

    name: str
    condition: int
    next_only: bool


@dataclass(frozen=True)
class PatternStep:
    """One step: its condition by number, how many rows it takes (``[least, most]``), and how it repeats.

    ``contiguity`` is that towards the row before its first, ``inner`` that between its own. ``until`` is a condition
    that ends it, or ``NO_CONDITION``. ``optional``: it may be left out as a whole.
    """

    name: str
    condition: int
    contiguity: Contiguity
    least: int = 1
    most: int = 1
    inner: Contiguity = "relaxed"
    optional: bool = False
    greedy: bool = False
    until: int = NO_CONDITION


@dataclass(frozen=True)
class Alternatives:
    """Sequences of which one is taken; ``contiguity`` is that towards the row before its first."""

    sequences: tuple[tuple[PatternElement, ...], ...]
    contiguity: Contiguity
    optional: bool = False


PatternElement = PatternStep | Absence | Alternatives


@dataclass(frozen=True)
class Transition:
    """From a state, or ``START``, to another, or to the end (a target of ``len(steps)``)."""

    source: int
    target: int
    contiguity: Contiguity
    absences: tuple[Absence, ...] = ()
    goes_after: tuple[int, ...] = ()  # targets of transitions from the same state that go first


@dataclass(frozen=True)
class _Exit:
    """A state that what follows can be reached from, and what the gap after it must not have."""

    state: int
    absences: tuple[Absence, ...] = ()
    goes_after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Nfa:
    """The automaton of a pattern. ``accepting`` are the states that a match may end in at once."""

    steps: tuple[PatternStep, ...]
    transitions: tuple[Transition, ...]
    accepting: tuple[int, ...]

    @property
    def end(self) -> int:
        """The target of transitions that wait until nothing can come any more."""
        return len(self.steps)

    @property
    def ends_by_time(self) -> bool:
        return any(one.target == self.end for one in self.transitions)

    @property
    def is_bounded(self) -> bool:
        """Whether a partial match ends after so many rows, whatever they are."""
        return all(
            one.contiguity == "strict"
            and (one.source != one.target or self.steps[one.target].most < UNLIMITED)
            for one in self.transitions
            if one.source != START
        )

    @property
    def looks_at_all_rows(self) -> bool:
        """Whether it matters that a row is there which satisfies no condition."""
        return any(
            one.source != START
            and (one.contiguity == "strict" or any(absent.next_only for absent in one.absences))
            for one in self.transitions
        )

    def leaving(self, state: int) -> tuple[Transition, ...]:
        """Return the transitions from a state, in their order."""
        return tuple(one for one in self.transitions if one.source == state)


class _Builder:
    def __init__(self) -> None:
        self.steps: list[PatternStep] = []
        self.transitions: dict[Transition, None] = {}

    def sequence(
        self, elements: Iterable[PatternElement], exits: list[_Exit], first: Contiguity | None
    ) -> list[_Exit]:
        """Append elements behind exits; ``first`` is the contiguity of the first element, if not its own."""
        for element in elements:
            if isinstance(element, Absence):
                exits = [self._without(element, one) for one in exits]
                continue
            found = element if first is None else replace(element, contiguity=first)
            first = None
            exits = self._behind(found, exits)
        return exits

    def _without(self, absence: Absence, one: _Exit) -> _Exit:
        """Forbid something after a step, between its own rows, too."""
        for staying in [t for t in self.transitions if t.source == t.target == one.state]:
            del self.transitions[staying]
            self.transitions[replace(staying, absences=(*staying.absences, absence))] = None
        return replace(one, absences=(*one.absences, absence))

    def _behind(self, element: PatternStep | Alternatives, exits: list[_Exit]) -> list[_Exit]:
        if isinstance(element, PatternStep):
            return self._step(element, exits)
        made = [
            one
            for sequence in element.sequences
            for one in self.sequence(sequence, exits, element.contiguity)
        ]
        # By two alternatives that are left out, it is one way on.
        return list(dict.fromkeys([*made, *exits] if element.optional else made))

    def _step(self, step: PatternStep, exits: list[_Exit]) -> list[_Exit]:
        state = len(self.steps)
        self.steps.append(step)
        for one in exits:
            self._add(one, state, step.contiguity)
        if step.most > 1:
            self._add(_Exit(state), state, step.inner)
        first = (state,) if step.greedy else ()
        left_out = [replace(one, goes_after=(*one.goes_after, *first)) for one in exits]
        return [_Exit(state, (), first), *(left_out if step.optional else [])]

    def _add(self, one: _Exit, target: int, contiguity: Contiguity) -> None:
        made = Transition(one.state, target, contiguity, one.absences, one.goes_after)
        self.transitions[made] = None
        if sum(one.source == made.source for one in self.transitions) > WAYS_MAX:
            raise ConfigError(
                f"The pattern has more than {WAYS_MAX} ways on from one step, as several either(…) in a row may be left "
                "out. Make fewer of their steps optional, or not greedy."
            )


def build_nfa(elements: Sequence[PatternElement]) -> Nfa:
    """Build the automaton of a sequence."""
    builder = _Builder()
    exits = builder.sequence(elements, [_Exit(START)], None)
    end = len(builder.steps)
    accepting = [one.state for one in exits if not one.absences]
    for one in exits:
        if one.state not in accepting:
            builder._add(one, end, "any")  # noqa: SLF001 - this function is the rest of the builder
    return Nfa(
        tuple(builder.steps), tuple(builder.transitions), tuple(sorted(dict.fromkeys(accepting)))
    )


def steps_of(elements: Iterable[PatternElement]) -> Iterator[PatternStep | Absence]:
    """Yield all steps and absences of a sequence, in the order of their declaration."""
    for element in elements:
        if isinstance(element, Alternatives):
            for sequence in element.sequences:
                yield from steps_of(sequence)
        else:
            yield element
