"""A row pattern of SQL as a tree, and as the program that a matcher runs.

The tree has a node for each part of a pattern as SQL writes it: a variable, a concatenation, an alternation, a
permutation, a quantified part, an exclusion, an anchor. The program has the instructions of a backtracking machine:
*take* a row as a variable, *split* into two ways of which the first is preferred, *jump*, ask for an anchor, and *done*.
A path through the program that is followed by preference is the preference order of the standard:

1.  of an alternation, an earlier part is preferred to a later one;
2.  of a permutation, the orders are preferred as they come in the dictionary, if the parts are its letters;
3.  a greedy quantifier prefers one more repetition to none, a reluctant one none to one more;
4.  in a concatenation, what is earlier decides before what is later.

A repetition that takes no row is the last one: at one row, with the same rows matched before it, no split is taken twice.

Source: ISO/IEC TR 19075-5:2016, "Row pattern recognition in SQL" (preferment, quantifiers, anchors, exclusion);
Russ Cox, "Regular Expression Matching: the Virtual Machine Approach" (the machine); Trino's documentation of
``MATCH_RECOGNIZE`` (repetitions without rows).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from millstream.errors import ConfigError

VARIABLES_MAX = 60  # a set of them is one number of 64 bits
INSTRUCTIONS_MAX = 5_000
TAKE, SPLIT, JUMP, AT_START, AT_END, DONE = range(6)
_UNLIMITED = 2**31


@dataclass(frozen=True)
class Variable:
    """One row, by the name of what it is matched to."""

    name: str


@dataclass(frozen=True)
class Concatenation:
    """Parts one after the other; without parts it is the empty pattern."""

    parts: tuple[PatternNode, ...]


@dataclass(frozen=True)
class Alternation:
    """Parts of which one is matched, an earlier one rather than a later one."""

    parts: tuple[PatternNode, ...]


@dataclass(frozen=True)
class Permutation:
    """Parts that are matched one after the other, in any order."""

    parts: tuple[PatternNode, ...]


@dataclass(frozen=True)
class Quantified:
    """A part ``least`` times or more, up to ``most`` (None: without limit); ``reluctant``: rather fewer times."""

    part: PatternNode
    least: int
    most: int | None
    reluctant: bool


@dataclass(frozen=True)
class Exclusion:
    """A part whose rows are matched, and are not among those that are emitted."""

    part: PatternNode


@dataclass(frozen=True)
class Anchor:
    """The place before the first row (``^``) or after the last one (``$``)."""

    at: Literal["^", "$"]


PatternNode = Variable | Concatenation | Alternation | Permutation | Quantified | Exclusion | Anchor


def children(node: PatternNode) -> tuple[PatternNode, ...]:
    """Return the parts of a node."""
    if isinstance(node, (Concatenation, Alternation, Permutation)):
        return node.parts
    return (node.part,) if isinstance(node, (Quantified, Exclusion)) else ()


def nodes(node: PatternNode) -> Iterator[PatternNode]:
    """Yield a node and all below it, in the order of the text."""
    yield node
    for part in children(node):
        yield from nodes(part)


def variables_of(node: PatternNode) -> tuple[str, ...]:
    """Return the variables of a pattern, each once, in the order of the text."""
    return tuple(dict.fromkeys(one.name for one in nodes(node) if isinstance(one, Variable)))


def rows_least(node: PatternNode) -> int:
    """Return how many rows a pattern takes at least."""
    if isinstance(node, Variable):
        return 1
    counts = [rows_least(part) for part in children(node)]
    if isinstance(node, Alternation):
        return min(counts)
    return sum(counts) * (node.least if isinstance(node, Quantified) else 1)


def rows_most(node: PatternNode) -> int | None:
    """Return how many rows a pattern takes at most; None if there is no limit."""
    if isinstance(node, Variable):
        return 1
    counts = [rows_most(part) for part in children(node)]
    if isinstance(node, Quantified) and node.most is None:
        return None if counts[0] != 0 else 0
    if None in counts:
        return 0 if isinstance(node, Quantified) and node.most == 0 else None
    known = [count for count in counts if count is not None]
    if isinstance(node, Alternation):
        return max(known)
    times = node.most if isinstance(node, Quantified) else 1
    assert times is not None
    return sum(known) * times


def rows_before(node: PatternNode) -> dict[str, int]:
    """Return for each variable how many rows of a match are before a row of it at least."""
    if isinstance(node, Variable):
        return {node.name: 0}
    found: dict[str, int] = {}
    before = 0
    for part in children(node):
        for name, rows in rows_before(part).items():
            found[name] = min(found.get(name, _UNLIMITED), before + rows)
        if isinstance(node, Concatenation):
            before += rows_least(part)
    return found


def first_variables(node: PatternNode) -> frozenset[str]:
    """Return the variables that the first row of a match may be matched to."""
    if isinstance(node, Variable):
        return frozenset([node.name])
    found: set[str] = set()
    for part in children(node):
        found |= first_variables(part)
        if isinstance(node, Concatenation) and rows_least(part):
            break
    return frozenset(found)


def later_variables(node: PatternNode, *, is_first: bool = True) -> frozenset[str]:
    """Return the variables that a row other than the first of a match may be matched to."""
    if isinstance(node, Variable):
        return frozenset() if is_first else frozenset([node.name])
    found: set[str] = set()
    for part in children(node):
        found |= later_variables(part, is_first=is_first)
        if isinstance(node, Concatenation):
            is_first = is_first and rows_most(part) == 0
    repeats = isinstance(node, Quantified) and (node.most is None or node.most > 1)
    if repeats or isinstance(node, Permutation):
        found |= set(variables_of(node))
    return frozenset(found)


def sets_of(
    variables: Sequence[str], subsets: Iterable[tuple[str, tuple[str, ...]]]
) -> dict[str, int]:
    """Return the sets that names of variables and subsets stand for, as bits."""
    sets = {name: 1 << number for number, name in enumerate(variables)}
    return sets | {name: sum(sets[one] for one in members) for name, members in subsets}


@dataclass(frozen=True)
class Instruction:
    """An instruction. ``first`` and ``second``: of *take* the variable, and whether it is excluded; else where to go on.

    ``place`` numbers the splits.
    """

    code: int
    first: int = 0
    second: int = 0
    place: int = 0


@dataclass
class _Compiler:
    variables: tuple[str, ...]
    program: list[Instruction | None] = field(default_factory=list)
    splits: int = 0

    def add(self, node: PatternNode, *, excluded: bool) -> None:
        if len(self.program) > INSTRUCTIONS_MAX:
            raise ConfigError(
                f"The pattern is longer than {INSTRUCTIONS_MAX:,} steps when its quantifiers and PERMUTE are written "
                "out. Give smaller numbers in {…}, or fewer parts to PERMUTE."
            )
        match node:
            case Variable():
                self._emit(Instruction(TAKE, self.variables.index(node.name), int(excluded)))
            case Concatenation():
                for part in node.parts:
                    self.add(part, excluded=excluded)
            case Alternation():
                self._either([(part,) for part in node.parts], excluded=excluded)
            case Permutation():
                self._either(itertools.permutations(node.parts), excluded=excluded)
            case Quantified():
                self._quantified(node, excluded=excluded)
            case Exclusion():
                self.add(node.part, excluded=True)
            case Anchor():
                self._emit(Instruction(AT_START if node.at == "^" else AT_END))

    def _either(
        self,
        ways: Iterator[Sequence[PatternNode]] | list[tuple[PatternNode, ...]],
        *,
        excluded: bool,
    ) -> None:
        jumps = []
        rest = iter(ways)
        way = next(rest)
        for following in rest:
            split = self._reserve()
            self._all(way, excluded=excluded)
            jumps.append(self._reserve())
            self._split(split, split + 1, len(self.program))
            way = following
        self._all(way, excluded=excluded)
        for jump in jumps:
            self.program[jump] = Instruction(JUMP, len(self.program))

    def _all(self, parts: Sequence[PatternNode], *, excluded: bool) -> None:
        for part in parts:
            self.add(part, excluded=excluded)

    def _quantified(self, node: Quantified, *, excluded: bool) -> None:
        splits = []
        if node.most is None:
            splits += [self._reserve()] if not node.least else []
            for _ in range(max(node.least, 1)):
                again = len(self.program)
                self.add(node.part, excluded=excluded)
            # It is asked behind the part: one that takes no row comes back here, and goes on.
            split = self._reserve()
            ways = (split + 1, again) if node.reluctant else (again, split + 1)
            self._split(split, *ways)
        else:
            for number in range(node.most):
                splits += [self._reserve()] if number >= node.least else []
                self.add(node.part, excluded=excluded)
        for split in splits:
            self._choose(split, len(self.program), reluctant=node.reluctant)

    def _choose(self, split: int, past: int, *, reluctant: bool) -> None:
        """Let a split go into what is behind it, or past it."""
        ways = (past, split + 1) if reluctant else (split + 1, past)
        self._split(split, *ways)

    def _split(self, split: int, first: int, second: int) -> None:
        self.program[split] = Instruction(SPLIT, first, second, self.splits)
        self.splits += 1

    def _reserve(self) -> int:
        self.program.append(None)
        return len(self.program) - 1

    def _emit(self, instruction: Instruction) -> None:
        self.program.append(instruction)


def compile_pattern(node: PatternNode, variables: tuple[str, ...]) -> tuple[Instruction, ...]:
    """Return the program of a pattern; it names variables by their places.

    Raises:
        ConfigError: it would be too long.
    """
    compiler = _Compiler(variables)
    compiler.add(node, excluded=False)
    made = [one for one in compiler.program if one is not None]
    assert len(made) == len(compiler.program)
    return (*made, Instruction(DONE))


class TakeFollowers(NamedTuple):
    """Which *take* instructions a match may come to next, without regard to rows: a program without its other instructions.

    ``takes`` are their places in the program. ``after`` has of each the numbers of those that may follow it, and ``ends``
    whether the match may end behind it; the last entries of both are about the beginning.
    """

    takes: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]
    ends: tuple[bool, ...]


def followers_of(program: Sequence[Instruction], count_max: int) -> TakeFollowers | None:
    """Return what may follow each row; None where an anchor decides about it, or where it is more than so many in all."""
    if any(one.code in (AT_START, AT_END) for one in program):
        return None
    takes = tuple(place for place, one in enumerate(program) if one.code == TAKE)
    numbers = {place: number for number, place in enumerate(takes)}
    after, ends, count = [], [], 0
    for begin in (*(place + 1 for place in takes), 0):
        reached = _without_rows(program, begin)
        after.append(tuple(numbers[place] for place in reached if place in numbers))
        ends.append(any(program[place].code == DONE for place in reached))
        count += 1 + len(after[-1])
        if count > count_max:
            return None
    return TakeFollowers(takes, tuple(after), tuple(ends))


def _without_rows(program: Sequence[Instruction], begin: int) -> list[int]:
    """Return the instructions that are come to from one without taking a row, and that one."""
    reached, ways = dict[int, None](), [begin]
    while ways:
        place = ways.pop()
        if place in reached:
            continue
        reached[place] = None
        one = program[place]
        if one.code in (SPLIT, JUMP):
            ways += [one.second, one.first] if one.code == SPLIT else [one.first]
    return sorted(reached)
