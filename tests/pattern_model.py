"""A naive model of patterns, from the rule as it is documented: every choice of rows is tried, and checked.

A pattern is first written out into *plans*: which alternatives are taken, and what is left out. A plan and a number of
rows for each of its steps give a list of links, one for each row; a link says what the documentation says of the way from
one row to the next. Nothing here knows automata.

Rows are dicts with ``at`` (seconds), ``v`` (a letter) and ``n`` (a number, or None), in their order. A condition is a
:class:`Fits`: the letters that fit, and maybe something about the rows matched before.
"""

import itertools
import math
from dataclasses import dataclass, field

import polars as pl
from pattern_draws import RowDraw

import millstream as ms

# ── conditions ──────────────────────────────────────────────────────────────────────────────


def values(chain, step):
    return [row["n"] for name, row in chain if name == step]


def present(chain, step):
    return [n for n in values(chain, step) if n is not None]


def last(chain, step):
    found = values(chain, step)
    return found[-1] if found else None


def first(chain, step):
    found = values(chain, step)
    return found[0] if found else None


def both(a, b, compare):
    return a is not None and b is not None and compare(a, b)


def letter_of_last(chain, step):
    found = [row["v"] for name, row in chain if name == step]
    return found[-1] if found else None


def mean(numbers):
    return sum(numbers) / len(numbers) if numbers else None


# A word: what it is in Python, of a row and the rows before it, and what it is in polars.
N = pl.col("n")
MORE = {
    "above last": (
        lambda row, chain, s: both(row["n"], last(chain, s), lambda a, b: a > b),
        lambda s: ms.matched(s, "n").last() < N,
    ),
    "not above first": (
        lambda row, chain, s: both(row["n"], first(chain, s), lambda a, b: a <= b),
        lambda s: ~(ms.matched(s, "n").first() < N),
    ),
    "sum small": (
        lambda row, chain, s: both(row["n"], sum(present(chain, s)), lambda a, b: a + b < 7),
        lambda s: N + ms.matched(s, "n").sum() < 7,
    ),
    "few": (
        lambda row, chain, s: len(values(chain, s)) < 2,
        lambda s: ms.matched(s).count() < 2,
    ),
    "near mean": (
        lambda row, chain, s: both(row["n"], mean(present(chain, s)), lambda a, b: abs(a - b) <= 1),
        lambda s: (N - ms.matched(s, "n").mean()).abs() <= 1.0,
    ),
    "outside": (
        lambda row, chain, s: bool(
            both(row["n"], max(present(chain, s), default=None), lambda a, b: a > b)
            or both(row["n"], min(present(chain, s), default=None), lambda a, b: a < b)
        ),
        lambda s: (ms.matched(s, "n").max() < N) | (ms.matched(s, "n").min() > N),
    ),
    "other letter": (
        lambda row, chain, s: both(row["v"], letter_of_last(chain, s), lambda a, b: a != b),
        lambda s: pl.col("v") != ms.matched(s, "v").last(),
    ),
    "none yet": (
        lambda row, chain, s: last(chain, s) is None,
        lambda s: ms.matched(s, "n").last().is_null(),
    ),
    "twice first is whole": (
        # Whatever a null is compared with: or is true where one side is.
        lambda row, chain, s: (
            first(chain, s) == 0
            or both(row["n"], first(chain, s), lambda a, b: a / b >= 2 or a == b)
        ),
        lambda s: (
            (N / ms.matched(s, "n").first() >= 2)
            | (ms.matched(s, "n").first() == 0)
            | (ms.matched(s, "n").first() == N)
        ),
    ),
}


@dataclass(frozen=True)
class Fits:
    letters: str
    more: str | None = None
    step: str | None = None

    def __call__(self, row, chain):
        if row["v"] is None or row["v"] not in self.letters:
            return False
        return self.more is None or MORE[self.more][0](row, chain, self.step)

    @property
    def expression(self):
        letters = pl.col("v").is_in(list(self.letters))
        return letters if self.more is None else letters & MORE[self.more][1](self.step)


# ── patterns ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Step:
    name: str
    fits: Fits
    contiguity: str = "relaxed"
    least: int = 1
    most: float = 1
    inner: str = "relaxed"
    optional: bool = False
    greedy: bool = False
    until: Fits | None = None


@dataclass(frozen=True)
class Not:
    name: str
    fits: Fits
    next_only: bool = False


@dataclass(frozen=True)
class Either:
    sequences: tuple
    contiguity: str = "relaxed"
    optional: bool = False


@dataclass(frozen=True)
class Pattern:
    elements: tuple
    within: int | None = None
    skip: tuple = ("none", None)

    @property
    def ends_by_time(self):
        return isinstance(self.elements[-1], Not)


def declared(pattern):
    """Return the pattern as it is declared with Millstream."""
    sequence = _declared(pattern.elements)
    if pattern.within is not None:
        sequence = sequence.within(f"{pattern.within} seconds")
    return sequence.skip(*pattern.skip)


ADD = {"strict": "next", "relaxed": "followed_by", "any": "followed_by_any"}


def _declared(elements):
    sequence = None
    for element in elements:
        if isinstance(element, Not):
            add = sequence.not_next if element.next_only else sequence.not_followed_by
            sequence = add(element.name, element.fits.expression)
        elif isinstance(element, Either):
            made = ms.either(*(_declared(one) for one in element.sequences))
            sequence = getattr(sequence, ADD[element.contiguity])(made)
            sequence = sequence.optional() if element.optional else sequence
        else:
            add = ms.sequence if sequence is None else getattr(sequence, ADD[element.contiguity])
            sequence = quantified(add(element.name, element.fits.expression), element)
    return sequence


def quantified(sequence, step):
    if step.most == math.inf:
        sequence = sequence.times_or_more(step.least)
    elif (step.least, step.most) != (1, 1):
        sequence = sequence.times(step.least, step.most)
    if step.most > 1:
        change = {"strict": "consecutive", "any": "allow_combinations"}.get(step.inner)
        sequence = getattr(sequence, change)() if change else sequence
    if step.until is not None:
        sequence = sequence.until(step.until.expression)
    if step.optional:
        sequence = sequence.optional()
    return sequence.greedy() if step.greedy else sequence


# ── plans ───────────────────────────────────────────────────────────────────────────────────


def plans(elements, contiguity=None):
    """Write a pattern out: yield lists of (step, whether it is left out) and of what must not be there."""
    if not elements:
        yield []
        return
    head, *tail = elements
    for one in _choices(head, contiguity):
        for rest in plans(tail):
            yield [*one, *rest]


def _choices(element, contiguity):
    if isinstance(element, Not):
        yield [element]
    elif isinstance(element, Step):
        step = element if contiguity is None else with_contiguity(element, contiguity)
        yield [(step, False)]
        if step.optional:
            yield [(step, True)]
    else:
        for sequence in element.sequences:
            yield from plans(sequence, contiguity or element.contiguity)
        if element.optional:
            yield []


def with_contiguity(step, contiguity):
    return Step(**{**vars(step), "contiguity": contiguity})


@dataclass(frozen=True)
class Link:
    """The way to a row of a step from the row before it, or to the end (no step)."""

    step: Step | None
    contiguity: str
    absent: tuple = ()
    stays: bool = False
    goes_first: tuple = ()


def links(plan, counts):
    """Return the links of a plan, of which each step that is not left out takes so many rows; the last may be the end."""
    made, absent, goes_first = [], (), ()
    counts = iter(counts)
    for place, token in enumerate(plan):
        if isinstance(token, Not):
            absent = (*absent, token)
            continue
        step, left_out = token
        enters = Link(step, step.contiguity, absent, goes_first=goes_first)
        if left_out:
            goes_first = (*goes_first, enters) if step.greedy else goes_first
            continue
        count = next(counts)
        after = tuple(itertools.takewhile(lambda t: isinstance(t, Not), plan[place + 1 :]))
        stays = Link(step, step.inner, after, stays=True)
        made += [enters, *[stays] * (count - 1)]
        absent = ()
        goes_first = (stays,) if step.greedy and count < step.most else ()
    if absent:
        made.append(Link(None, "any", absent, goes_first=goes_first))
    return made


# ── matches ─────────────────────────────────────────────────────────────────────────────────


@dataclass
class Key:
    """The rows of one key, and what is asked of them."""

    rows: list
    pattern: Pattern
    found: set = field(default_factory=set)

    def takes(self, step, row, chain):
        if not step.fits(self.rows[row], chain):
            return False
        return step.until is None or not step.until(self.rows[row], chain)

    def exists(self, link, before, row, chain):
        """Return whether a link leads from a row (None: from nothing) to another, which the step takes."""
        after = range(row, row + 1) if before is None else range(before + 1, row + 1)
        if link.step is not None:
            if not self.takes(link.step, row, chain) or not self.in_time(chain, row):
                return False
            between = [] if before is None else after[:-1]
            if before is not None and link.contiguity == "strict" and len(between):
                return False
            if link.contiguity == "relaxed" and any(
                self.takes(link.step, one, chain) for one in between
            ):
                return False
            until = link.step.until if link.stays else None
            if until is not None and any(until(self.rows[one], chain) for one in after):
                return False
        for absent in link.absent:
            asked = after[:1] if absent.next_only else after
            if any(absent.fits(self.rows[one], chain) for one in asked):
                return False
        return not any(
            self.exists(one, before, each, chain) for one in link.goes_first for each in after
        )

    def in_time(self, chain, row):
        within = self.pattern.within
        return not chain or within is None or self.rows[row]["at"] - chain[0][1]["at"] <= within

    def matches(self):
        """Return all matches, as tuples of (step, place of the row)."""
        for plan in plans(self.pattern.elements):
            taken = [token[0] for token in plan if not isinstance(token, Not) and not token[1]]
            ranges = [range(s.least, int(min(s.most, len(self.rows))) + 1) for s in taken]
            for counts in itertools.product(*ranges):
                if sum(counts) <= len(self.rows):
                    self._extend(links(plan, counts), [])
        return self.found

    def _extend(self, rest, taken):
        chain = [(step, self.rows[row]) for step, row in taken]
        before = taken[-1][1] if taken else None
        if not rest:
            self.found.add((tuple(taken), False))
            return
        link, *others = rest
        if link.step is None:
            until = chain[0][1]["at"] + self.pattern.within
            inside = [r for r in range(len(self.rows)) if self.rows[r]["at"] <= until]
            if self.exists(link, before, max(inside), chain):
                self.found.add((tuple(taken), True))
            return
        for row in range(0 if before is None else before + 1, len(self.rows)):
            if self.exists(link, before, row, chain):
                self._extend(others, [*taken, (link.step.name, row)])


def counted(matches, skip, order):
    """Return the matches that count: those that nothing skips which goes before them."""
    mode, step = skip

    def rank(match):
        taken, by_time = match
        rows = [row for _, row in taken]
        complete = math.inf if by_time else rows[-1]
        steps = [order.index(name) for name, _ in taken]
        # At the first difference: the earlier row; the end is later than any row.
        return rows[0], complete, [*zip(rows, steps, strict=True), (math.inf, 0)]

    skipped, kept = [], []
    for match in sorted(matches, key=rank):
        rows = [row for _, row in match[0]]
        if any(low <= rows[0] < high for low, high in skipped):
            continue
        kept.append(match)
        mine = [row for name, row in match[0] if name == step]
        until = {
            "none": rows[0],
            "to_next": rows[0] + 1,
            "past_last": rows[-1] + 1,
            "to_first": mine[0] if mine else rows[0],
            "to_last": mine[-1] if mine else rows[0],
        }[mode]
        skipped.append((rows[0], until))
    return kept


def model(pattern, rows):
    """Return the matches of one key that count, as tuples of (step, place of the row), sorted."""
    found = Key(rows, pattern).matches()
    return sorted(taken for taken, _ in counted(found, pattern.skip, step_names(pattern.elements)))


def step_names(elements):
    names = []
    for element in elements:
        if isinstance(element, Either):
            names += [name for one in element.sequences for name in step_names(one)]
        elif isinstance(element, Step):
            names.append(element.name)
    return names


# ── random patterns and rows ────────────────────────────────────────────────────────────────

LETTERS = "abcd"


class Draw(RowDraw):
    """Draws a pattern, and rows."""

    letters = LETTERS

    def fits(self, *, alone=0.75):
        letters = "".join(self.dice.sample(LETTERS, self.dice.choice([1, 1, 1, 2, 3])))
        if self.chance(alone) or not self.names:
            return Fits(letters)
        return Fits(letters, self.dice.choice(list(MORE)), self.dice.choice(self.names))

    def step(self, contiguity):
        name = f"s{len(self.names)}"
        if self.chance(0.5):
            self.names.append(name)  # a condition may look at the step's own rows
        fits = self.fits()
        if name not in self.names:
            self.names.append(name)
        step = {"name": name, "fits": fits, "contiguity": contiguity}
        if self.chance(0.45):
            least = self.dice.choice([1, 1, 1, 2, 3])
            most = self.dice.choice([math.inf, math.inf, least, least + 1])
            inner = self.dice.choice(["strict", "relaxed", "any"])
            step |= {"least": least, "most": most, "inner": inner if most > 1 else "relaxed"}
            if most > 1 and self.chance(0.3):
                step["until"] = self.fits()
        step["optional"] = self.chance(0.25)
        if step.get("most", 1) > 1 or step["optional"]:
            step["greedy"] = self.chance(0.35)
        return Step(**step)

    def contiguity(self):
        return self.dice.choice(["strict", "relaxed", "relaxed", "any"])

    def sequence(self, count, *, nested=False):
        elements = [self.step("any" if not nested else "relaxed")]
        for _ in range(count - 1):
            last = elements[-1]
            roll = self.dice.random()
            if roll < 0.2 and not getattr(last, "optional", False) and not ends_open(last):
                name = f"n{self.dice.randrange(10**9)}"
                elements.append(Not(name, self.fits(), self.chance(0.3)))
            elif roll < 0.35 and not nested:
                ways = tuple(
                    self.sequence(self.dice.choice([1, 1, 2]), nested=True) for _ in range(2)
                )
                elements.append(Either(ways, self.contiguity(), self.chance(0.2)))
            else:
                elements.append(self.step(self.contiguity()))
        if nested and isinstance(elements[-1], Not):
            elements.append(self.step(self.contiguity()))
        return tuple(elements)

    def pattern(self):
        elements = self.sequence(self.dice.choice([1, 2, 2, 3, 3, 4]))
        elements = with_an_end(elements)
        mode = self.dice.choice(["none", "none", "to_next", "past_last", "to_first", "to_last"])
        step = self.dice.choice(step_names(elements)) if mode in ("to_first", "to_last") else None
        return Pattern(elements, self.dice.choice([2, 4, 6, 30]), (mode, step))


def with_an_end(elements):
    """Let no step be greedy at the end, where a next row may never come."""
    last = elements[-1]
    if isinstance(last, Step):
        return (*elements[:-1], Step(**{**vars(last), "greedy": False}))
    if isinstance(last, Either):
        ways = tuple(with_an_end(one) for one in last.sequences)
        return (*elements[:-1], Either(ways, last.contiguity, last.optional))
    return elements


def ends_open(element):
    """Return whether alternatives may end with a step that is left out."""
    return isinstance(element, Either) and any(one[-1].optional for one in element.sequences)
