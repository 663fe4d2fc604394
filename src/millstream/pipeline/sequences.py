"""Sequences: ``ms.sequence(…)``, the pattern of events that ``stream.match(…)`` finds, and what it may look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

import polars as pl

from millstream.choices import choose
from millstream.durations import Duration, format_us
from millstream.errors import ConfigError
from millstream.kernels.patterns.automaton import SkipMode, SkipStrategy
from millstream.kernels.patterns.conditions import Matched
from millstream.kernels.patterns.nfa import UNLIMITED, Contiguity
from millstream.pipeline.checks import positive_us, require_text, whole_number
from millstream.pipeline.expressions import Column, as_expression

_TIMES_MAX = 1_000_000
_NO_SKIP = SkipStrategy("none")


@dataclass(frozen=True)
class DeclaredStep:
    """A step as it is declared; the fields are those of the kernel's step, with expressions."""

    name: str
    condition: pl.Expr
    contiguity: Contiguity
    least: int = 1
    most: int = 1
    inner: Contiguity = "relaxed"
    optional: bool = False
    greedy: bool = False
    until: pl.Expr | None = None

    @property
    def repeats(self) -> bool:
        return self.most > 1


@dataclass(frozen=True)
class DeclaredAbsence:
    """Something that must not be there, as it is declared."""

    name: str
    condition: pl.Expr
    next_only: bool


@dataclass(frozen=True)
class Either:
    """Sequences of which one is taken, as :func:`either` gives them."""

    sequences: tuple[PatternSequence, ...]
    contiguity: Contiguity = "relaxed"
    optional: bool = False


DeclaredElement = DeclaredStep | DeclaredAbsence | Either


@dataclass(frozen=True)
class PatternSequence:
    """A pattern: steps one after the other. Each method returns a new one.

    ``next``, ``followed_by`` and ``followed_by_any`` add a step; ``not_next`` and ``not_followed_by`` say what must
    not be there; ``times``, ``one_or_more``, ``optional``, ``greedy``, ``until``, ``consecutive`` and
    ``allow_combinations`` are about the step before them; ``within`` and ``skip`` about the whole.
    """

    elements: tuple[DeclaredElement, ...]
    within_us: int | None = None
    skip_strategy: SkipStrategy = _NO_SKIP

    # ── steps ───────────────────────────────────────────────────────────────────────────────

    def next(self, step: str | Either, condition: Column | None = None) -> PatternSequence:
        """Add a step whose row is the very next one of the key (strict contiguity)."""
        return self._then(step, condition, "strict", "next")

    def followed_by(self, step: str | Either, condition: Column | None = None) -> PatternSequence:
        """Add a step whose row is the next one that fits; others may be in between (relaxed contiguity)."""
        return self._then(step, condition, "relaxed", "followed_by")

    def followed_by_any(
        self, step: str | Either, condition: Column | None = None
    ) -> PatternSequence:
        """Add a step whose row is any later one that fits: each gives a match of its own."""
        return self._then(step, condition, "any", "followed_by_any")

    def not_next(self, name: str, condition: Column) -> PatternSequence:
        """Say what the very next row must not be. It cannot be the end of a pattern."""
        return self._absent(name, condition, next_only=True)

    def not_followed_by(self, name: str, condition: Column) -> PatternSequence:
        """Say what must not come before the next step.

        At the end of a pattern: what must not come until ``within`` is over since the first row. The match is
        then emitted when the watermark has passed that.
        """
        return self._absent(name, condition, next_only=False)

    # ── about the last step ─────────────────────────────────────────────────────────────────

    def times(self, least: int, most: int | None = None) -> PatternSequence:
        """Let the last step take so many rows: exactly ``least``, or from ``least`` to ``most``."""
        whole_number(least, 1, _TIMES_MAX, "times")
        whole_number(least if most is None else most, least, _TIMES_MAX, "times' most")
        return self._of_last("times", least=least, most=least if most is None else most)

    def times_or_more(self, least: int) -> PatternSequence:
        """Let the last step take so many rows, or more."""
        whole_number(least, 1, _TIMES_MAX, "times_or_more")
        return self._of_last("times_or_more", least=least, most=UNLIMITED)

    def one_or_more(self) -> PatternSequence:
        """Let the last step take one row, or more."""
        return self._of_last("one_or_more", most=UNLIMITED)

    def optional(self) -> PatternSequence:
        """Let the last step, or what ``either`` stands for, be left out."""
        last = self.elements[-1]
        if isinstance(last, Either):
            return replace(self, elements=(*self.elements[:-1], replace(last, optional=True)))
        return self._of_last("optional", optional=True)

    def greedy(self) -> PatternSequence:
        """Let the last step take each row that it can take, before a later step does.

        Without it each number of rows is a match of its own: of ``a b+ c`` and the rows a b1 b2 c, these are
        a b1 c and a b1 b2 c, and with it the second alone.
        """
        self._require_repeated("greedy", or_optional=True)
        return self._of_last("greedy", greedy=True)

    def consecutive(self) -> PatternSequence:
        """Let the rows of the last step be one right after the other. By default others may be in between."""
        self._require_repeated("consecutive")
        return self._of_last("consecutive", inner="strict")

    def allow_combinations(self) -> PatternSequence:
        """Let the last step leave out rows that it could take: each choice of rows is a match of its own."""
        self._require_repeated("allow_combinations")
        return self._of_last("allow_combinations", inner="any")

    def until(self, condition: Column) -> PatternSequence:
        """End the last step with a row that satisfies the condition: neither it nor a later one is taken."""
        self._require_repeated("until")
        name = self._last_step("until").name
        return self._of_last("until", until=as_expression(condition, what=f"until of {name!r}"))

    # ── about the whole ─────────────────────────────────────────────────────────────────────

    def within(self, duration: Duration) -> PatternSequence:
        """Let the last row be at most so long after the first, in event time; just as long is within."""
        return replace(self, within_us=positive_us(duration, "within"))

    def skip(self, mode: SkipMode, step: str | None = None) -> PatternSequence:
        """Say what a match leaves out of those that overlap with it.

        Args:
            mode: ``"none"``, the default: nothing, each match counts. ``"to_next"``: others that begin with the same row.
                ``"past_last"``: others that begin before the match ends, or with its last row. ``"to_first"``,
                ``"to_last"``: others that begin before the first, or the last, row of a step of the match; nothing if it
                has no such row.
            step: That step.
        """
        choose("skip's mode", mode, get_args(SkipMode))
        needs = mode in ("to_first", "to_last")
        if needs != (step is not None):
            raise ConfigError(
                f'skip is "{mode}" and its step {step!r}. '
                + (f'Name a step: skip("{mode}", "pay").' if needs else "Leave the step out.")
            )
        return replace(self, skip_strategy=SkipStrategy(mode, step))

    # ── drawing ─────────────────────────────────────────────────────────────────────────────

    def explain(self) -> str:
        """Draw the pattern as text: its steps, how each follows the one before, and what is around them."""
        lines = ["", *_drawn(self.elements, "")]
        within = "without end" if self.within_us is None else format_us(self.within_us)
        mode, step = self.skip_strategy
        lines += [f"within: {within}", f"skip: {mode}" + (f" {step}" if step else "")]
        return "\n".join(lines[1:])

    # ── how ─────────────────────────────────────────────────────────────────────────────────

    def _then(
        self, step: str | Either, condition: Column | None, contiguity: Contiguity, what: str
    ) -> PatternSequence:
        if isinstance(step, Either):
            if condition is not None:
                raise ConfigError(f"{what} has a condition and either(…), whose steps have theirs.")
            return self._with(replace(step, contiguity=contiguity))
        if condition is None:
            raise ConfigError(
                f"{what} has the step {step!r} without a condition. Give one: "
                f'{what}("pay", pl.col("type") == "pay").'
            )
        return self._with(declared_step(step, condition, contiguity))

    def _absent(self, name: str, condition: Column, *, next_only: bool) -> PatternSequence:
        _require_name(name)
        found = as_expression(condition, what=f"The condition of {name!r}")
        return self._with(DeclaredAbsence(name, found, next_only))

    def _with(self, element: DeclaredElement) -> PatternSequence:
        return replace(self, elements=(*self.elements, element))

    def _last_step(self, what: str) -> DeclaredStep:
        last = self.elements[-1]
        if not isinstance(last, DeclaredStep):
            raise ConfigError(
                f"{what} comes after {_said(last)}. It is about a step: put it right after one."
            )
        return last

    def _of_last(self, what: str, **changed: object) -> PatternSequence:
        made: DeclaredStep = replace(self._last_step(what), **changed)  # type: ignore[arg-type]
        return replace(self, elements=(*self.elements[:-1], made))

    def _require_repeated(self, what: str, *, or_optional: bool = False) -> None:
        last = self._last_step(what)
        if not last.repeats and not (or_optional and last.optional):
            raise ConfigError(
                f"{what} comes after the step {last.name!r}, which takes one row. Say before it how often it "
                "repeats: one_or_more(), times(…) or times_or_more(…)."
            )


def sequence(step: str, condition: Column) -> PatternSequence:
    """Begin a pattern with a step: its name, and the condition of its row.

    ::

        gone = (
            ms.sequence("cart", pl.col("type") == "cart")
            .not_followed_by("pay", pl.col("type") == "pay")
            .within("30 minutes")
        )
        events.match(gone, by="user").to("reminders")

    A condition is an expression of polars over the row. It may also look at the rows that the match has so far:
    see :func:`matched`. Null counts as false.
    """
    return PatternSequence((declared_step(step, condition, "any"),))


def either(*sequences: PatternSequence) -> Either:
    """Give alternatives for ``next``, ``followed_by`` and ``followed_by_any``: one of the sequences is taken.

    ::

        ms.sequence("order", ordered).followed_by(
            ms.either(ms.sequence("paid", paid), ms.sequence("card", card).next("approved", approved))
        )

    All that can be taken is: each is a match of its own.
    """
    for one in sequences:
        if not isinstance(one, PatternSequence):
            raise ConfigError(f"either is given {one!r}. Give sequences: ms.sequence(…).")
        if one.within_us is not None or one.skip_strategy.mode != "none":
            raise ConfigError(
                "either is given a sequence with within or skip, which are about whole patterns. Say them of the "
                "sequence that has either."
            )
    if not sequences:
        raise ConfigError("either is given nothing. Give sequences: ms.sequence(…).")
    return Either(sequences)


@dataclass(frozen=True)
class MatchedRows:
    """The rows that a step of a match has so far, as :func:`matched` gives them."""

    step: str
    column: str | None

    def first(self) -> pl.Expr:
        """Return the value of the first one; null if there is none."""
        return self._of("first")

    def last(self) -> pl.Expr:
        """Return the value of the last one; null if there is none."""
        return self._of("last")

    def sum(self) -> pl.Expr:
        """Return the sum of the values, as Int64 or Float64; 0 if there is none."""
        return self._of("sum")

    def mean(self) -> pl.Expr:
        """Return the mean of the values, as Float64; null if there is none."""
        return self._of("mean")

    def min(self) -> pl.Expr:
        """Return the least value; null if there is none."""
        return self._of("min")

    def max(self) -> pl.Expr:
        """Return the greatest value; null if there is none."""
        return self._of("max")

    def count(self) -> pl.Expr:
        """Return how many rows there are."""
        return pl.col(Matched("count", self.step, None).name)

    def list(self) -> pl.Expr:
        """Return the values as a list; without a column, whole rows. Only as a measure."""
        return pl.col(Matched("list", self.step, self.column).name)

    def _of(self, aggregate: str) -> pl.Expr:
        if self.column is None:
            raise ConfigError(
                f"{aggregate} of the rows of {self.step!r} is asked for, and not of which column. Name it: "
                f'ms.matched({self.step!r}, "price").{aggregate}().'
            )
        return pl.col(Matched(aggregate, self.step, self.column).name)


def matched(step: str, column: str | None = None) -> MatchedRows:
    """Look at the rows that a step has taken, in conditions and measures: an aggregate of a column, or their number.

    ::

        ms.sequence("low", pl.col("price") < 10).followed_by(
            "high", pl.col("price") > 2 * ms.matched("low", "price").last()
        )

    The row that a condition is asked about is not among them yet. Aggregates leave nulls out, but for ``first``
    and ``last``.
    """
    _require_name(step)
    if column is not None:
        require_text(column, "matched's column", "price")
    return MatchedRows(step, column)


def declared_step(step: str, condition: Column, contiguity: Contiguity) -> DeclaredStep:
    """Check a step's name and condition."""
    _require_name(step)
    return DeclaredStep(
        step, as_expression(condition, what=f"The condition of {step!r}"), contiguity
    )


def _require_name(name: object) -> None:
    require_text(name, "A step's name", "pay")
    if ":" in str(name) or str(name).startswith("__"):
        raise ConfigError(
            f"A step's name is {name!r}. Give one without a colon that does not begin with two underscores."
        )


def _said(element: DeclaredElement) -> str:
    if isinstance(element, Either):
        return "either(…)"
    return repr(element.name)


_WORDS = {"strict": "next", "relaxed": "followed by", "any": "followed by any"}


def _drawn(elements: tuple[DeclaredElement, ...], indent: str) -> Iterator[str]:
    for number, element in enumerate(elements):
        if isinstance(element, DeclaredAbsence):
            word = "not next" if element.next_only else "not followed by"
            yield f"{indent}│ {word} {element.name}: {element.condition}"
            continue
        if number:
            yield f"{indent}│ {_WORDS[element.contiguity]}"
        if isinstance(element, Either):
            yield f"{indent}either{' (optional)' if element.optional else ''}"
            for place, one in enumerate(element.sequences):
                yield from [f"{indent}  or"] if place else []
                yield from _drawn(one.elements, indent + "    ")
            continue
        yield f"{indent}{element.name}{_quantifier(element)}: {element.condition}"


def _quantifier(step: DeclaredStep) -> str:
    most = "" if step.most == UNLIMITED else str(step.most)
    words = []
    if (step.least, step.most) != (1, 1):
        count = str(step.least) if step.least == step.most else f"{step.least} to {most or 'any'}"
        words.append(f"{count} rows")
        words.append({"strict": "consecutive", "relaxed": "", "any": "in combinations"}[step.inner])
    words += ["greedy"] * step.greedy + ["optional"] * step.optional
    if step.until is not None:
        words.append(f"until {step.until}")
    said = ", ".join(word for word in words if word)
    return f" ({said})" if said else ""
