"""Patterns over a stream: checked where they are declared, and built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from millstream.choices import did_you_mean
from millstream.errors import ConfigError
from millstream.kernels.errors.user_code import OnError, UserCode
from millstream.kernels.patterns.conditions import Matched, matched_in
from millstream.kernels.patterns.measures import MATCH_END, MATCH_START, Measures
from millstream.kernels.patterns.nfa import (
    NO_CONDITION,
    START,
    STATES_MAX,
    Absence,
    Alternatives,
    Nfa,
    PatternElement,
    PatternStep,
    build_nfa,
)
from millstream.kernels.patterns.operator import PatternMatch
from millstream.pipeline.checks import declared_at, require_free, require_unreserved, type_of
from millstream.pipeline.expressions import Column, as_expression
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.sequences import (
    DeclaredAbsence,
    DeclaredElement,
    DeclaredStep,
    Either,
    PatternSequence,
    matched,
)
from millstream.pipeline.shape import StreamShape, check_events, late_columns_of


def build_match(
    shape: StreamShape,
    pattern: PatternSequence,
    by: tuple[str, ...],
    *,
    measures: Mapping[str, Column] | None,
    unbounded: bool,
    name: str | None,
    on_error: OnError,
) -> tuple[PatternMatch, StreamShape]:
    """Check what is declared; return the operator, and the shape of its rows."""
    if not isinstance(pattern, PatternSequence):
        raise ConfigError(
            f'match is given {pattern!r}. Give a sequence: ms.sequence("cart", …).followed_by(…).'
        )
    check_events(shape, "match")
    declared = _Declared(shape.columns)
    elements = declared.elements(pattern.elements)
    nfa = build_nfa(elements)
    _check_names(declared.steps, declared.absences)
    _check_ends(pattern, nfa, elements)
    _check_bounded(pattern, nfa, unbounded=unbounded)
    declared.check_conditions()
    step = pattern.skip_strategy.step
    if step is not None and step not in declared.steps:
        raise ConfigError(f"skip names the step {step!r}. {_steps_there(step, declared.steps)}")
    made, types = _measures(shape.columns, by, measures, declared.steps)
    late_columns = late_columns_of(shape, "match")
    name = shape.names.unique(name or f"match({', '.join(declared.steps)})")
    kernel = PatternMatch(
        name,
        by,
        nfa,
        tuple(declared.conditions),
        pattern.within_us,
        pattern.skip_strategy,
        made,
        tuple(shape.columns.items()),
        shape.lateness_us,
        late_columns is not None,
        UserCode(name, declared_at(), on_error),
    )
    _ = kernel.compiled  # says what cannot be compiled
    # Matches are events that are never taken back, and that nothing is known to identify.
    return kernel, StreamShape(columns=types, late_columns=late_columns, names=shape.names)


@dataclass
class _Declared:
    """What is declared, with conditions by number."""

    columns: ColumnTypes
    conditions: list[tuple[str, pl.Expr]] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    absences: list[str] = field(default_factory=list)

    def elements(self, elements: Sequence[DeclaredElement]) -> tuple[PatternElement, ...]:
        return tuple(self._element(one) for one in elements)

    def _element(self, element: DeclaredElement) -> PatternElement:
        if isinstance(element, Either):
            sequences = tuple(self.elements(one.elements) for one in element.sequences)
            return Alternatives(sequences, element.contiguity, element.optional)
        if isinstance(element, DeclaredAbsence):
            self.absences.append(element.name)
            number = self._condition(f"The condition of {element.name!r}", element.condition)
            return Absence(element.name, number, element.next_only)
        return self._step(element)

    def _step(self, step: DeclaredStep) -> PatternStep:
        self.steps.append(step.name)
        condition = self._condition(f"The condition of {step.name!r}", step.condition)
        until = NO_CONDITION
        if step.until is not None:
            until = self._condition(f"until of {step.name!r}", step.until)
        return PatternStep(
            step.name,
            condition,
            step.contiguity,
            step.least,
            step.most,
            step.inner,
            step.optional,
            step.greedy,
            until,
        )

    def _condition(self, what: str, condition: pl.Expr) -> int:
        self.conditions.append((what, condition))
        return len(self.conditions) - 1

    def check_conditions(self) -> None:
        for what, condition in self.conditions:
            hidden = hidden_columns(what, [condition], self.columns, self.steps)
            types = {**self.columns, **hidden}
            require_condition(what, condition, types, 'pl.col("type") == "pay"')


def require_condition(what: str, expression: pl.Expr, columns: ColumnTypes, example: str) -> None:
    """Make sure that an expression is one column of truths."""
    dtype = type_of(expression, columns, what)
    made = pl.DataFrame(schema=columns).select(expression).width
    if made != 1:
        raise ConfigError(
            f"{what} is {expression}, which is {made} columns. Make one of them: pl.all_horizontal(…) or pl.any_horizontal(…)."
        )
    if dtype != pl.Boolean:
        raise ConfigError(f"{what} is of type {dtype}. Give a condition, such as {example}.")


def hidden_columns(
    what: str, expressions: Sequence[pl.Expr], columns: ColumnTypes, steps: Sequence[str]
) -> ColumnTypes:
    """Return the types of what expressions use of matched rows.

    Raises:
        ConfigError: there is no such step or column.
    """
    found: ColumnTypes = {}
    for name, one in matched_in(expressions).items():
        if one.step not in steps:
            raise ConfigError(
                f"{what} looks at rows of {one.step!r}. {_steps_there(one.step, steps)}"
            )
        if one.column is not None and one.column not in columns:
            raise ConfigError(
                f"{what} looks at the column {one.column!r} of the rows of {one.step!r}. The columns there are "
                f"{', '.join(columns)}.{did_you_mean(one.column, columns)}"
            )
        found[name] = one.dtype(columns)
    return found


def _steps_there(name: str, steps: Sequence[str]) -> str:
    return f"The steps that take rows are {', '.join(steps)}.{did_you_mean(name, steps)}"


def _check_names(steps: Sequence[str], absences: Sequence[str]) -> None:
    every = [*steps, *absences]
    twice = next((name for name in every if every.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"Two steps of the pattern are called {twice!r}. Give one another name.")
    if len(every) > STATES_MAX:
        raise ConfigError(
            f"The pattern has {len(every)} steps; at most {STATES_MAX} are allowed. Divide it: match(…) the matches "
            "of a first pattern by a second one."
        )


def _check_ends(pattern: PatternSequence, nfa: Nfa, elements: Sequence[PatternElement]) -> None:
    """Make sure that a match has rows, and that it is known when it is complete."""
    if START in nfa.accepting or any(one.target == nfa.end for one in nfa.leaving(START)):
        raise ConfigError(
            "All steps of the pattern are optional, so that nothing at all would be a match. Make one that is not."
        )
    at_end = [one for one in nfa.transitions if one.target == nfa.end]
    next_only = next((a for one in at_end for a in one.absences if a.next_only), None)
    if next_only is not None:
        raise ConfigError(
            f"The pattern ends with not_next({next_only.name!r}), and a next row may never come. End it with "
            'not_followed_by(…) and within("10 minutes").'
        )
    if at_end and pattern.within_us is None:
        raise ConfigError(
            f"The pattern ends with not_followed_by({at_end[0].absences[0].name!r}), and does not say until when. Say "
            'how long after the first row: within("10 minutes").'
        )
    absence = next(_after_optional(elements), None)
    if absence is not None:
        raise ConfigError(
            f"{absence.name!r} must not be there after a step that may be left out: then it is not clear since when. "
            "Put it after a step that is not optional."
        )
    greedy = next((step for step in _last_steps(elements) if step.greedy), None)
    if greedy is not None and not at_end:
        raise ConfigError(
            f"The step {greedy.name!r} is greedy, and no step need follow: each row that it takes completes a match. "
            "Add a step, or not_followed_by(…), that ends it; or leave greedy out."
        )


def _last_steps(elements: Sequence[PatternElement]) -> Iterator[PatternStep]:
    """Yield the steps that a match may end in."""
    for element in reversed(elements):
        if isinstance(element, Alternatives):
            for one in element.sequences:
                yield from _last_steps(one)
        elif isinstance(element, PatternStep):
            yield element
        if not getattr(element, "optional", True):
            return


def _after_optional(elements: Sequence[PatternElement]) -> Iterator[Absence]:
    """Yield the absences that come after something that may be left out."""
    for number, element in enumerate(elements):
        if isinstance(element, Alternatives):
            for one in element.sequences:
                yield from _after_optional(one)
        if isinstance(element, Absence) and any(
            step.optional for step in _last_elements(elements[:number])
        ):
            yield element


def _last_elements(elements: Sequence[PatternElement]) -> Iterator[PatternStep | Alternatives]:
    """Yield what may be the last thing before a place: a step, and alternatives with what they end in."""
    for element in reversed(elements):
        if isinstance(element, Absence):
            continue
        yield element
        if isinstance(element, Alternatives):
            for one in element.sequences:
                yield from _last_elements(one)
        return


def _check_bounded(pattern: PatternSequence, nfa: Nfa, *, unbounded: bool) -> None:
    if pattern.within_us is not None or nfa.is_bounded or unbounded:
        return
    raise ConfigError(
        "The pattern has no within, so that a row that began a match, and what followed it, is kept for as long as "
        'no later row ends it: for ever, where none comes. Say how long a match may take: within("10 minutes"). Where '
        "state may grow with the keys that ever were, say so: match(…, unbounded=True)."
    )


def _measures(
    columns: ColumnTypes,
    by: tuple[str, ...],
    measures: Mapping[str, Column] | None,
    steps: Sequence[str],
) -> tuple[Measures, ColumnTypes]:
    """Return the measures, and the columns of matches with their types."""
    if measures is None:
        measures = {step: matched(step).list() for step in steps}
    own: ColumnTypes = {name: columns[name] for name in by}
    times = pl.Datetime("us", "UTC")
    require_free((MATCH_START, MATCH_END), own, "match gives its rows")
    types: ColumnTypes = {**own, MATCH_START: times, MATCH_END: times}
    expressions = []
    for name, given in measures.items():
        require_unreserved(name, "match")
        require_free((name,), types, "match gives its rows")
        what = f"The measure {name!r}"
        expression = as_expression(given, what=what)
        hidden = hidden_columns(what, [expression], columns, steps)
        own_types = {**own, MATCH_START: times, MATCH_END: times, **hidden}
        _check_measure(what, expression, own_types, columns)
        types[name] = type_of(expression, own_types, what)
        expressions.append((name, expression))
    return Measures(tuple(expressions), tuple(columns.items()), tuple(steps)), types


def _check_measure(what: str, expression: pl.Expr, own: ColumnTypes, columns: ColumnTypes) -> None:
    if expression.meta.has_multiple_outputs():
        raise ConfigError(
            f"{what} is {expression}, which names columns by a pattern. Name each: ms.matched(…) rows, the by columns, "
            f"{MATCH_START!r} and {MATCH_END!r}."
        )
    for name in expression.meta.root_names():
        if name in columns and name not in own and Matched.of(name) is None:
            raise ConfigError(
                f"{what} uses the column {name!r}, and a match has several rows. Say which of them: "
                f'ms.matched("…", {name!r}).last().'
            )
