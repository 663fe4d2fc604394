"""A naive model of SQL's row patterns, from the rule as it is documented: paths are tried one after the other, by preference.

A pattern is nested tuples: ``("var", name)``, ``("seq", parts)``, ``("alt", parts)``, ``("permute", parts)``, ``("out", part)``,
``("anchor", "^")`` and ``("times", part, least, most, reluctant)``. Rows are dicts with ``at`` (seconds), ``v`` (a letter) and ``n`` (a
number, or None), in their order. Nothing here knows programs or stacks; what a row is for a match (there, or not) is
asked of its time alone.
"""

import itertools
from dataclasses import dataclass

import polars as pl
from pattern_draws import RowDraw

import millstream as ms

TRIES_MAX = 30_000


class TooManyTriesError(Exception):
    """The pattern has too many ways for trying them all."""


# ── references ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Ref:
    """What is said of matched rows: ``kind`` is first, last, or an aggregate; ``of`` a variable, a subset or None."""

    kind: str
    of: str | None = None
    column: str | None = "n"
    final: bool = False
    logical: int = 0
    physical: int = 0

    @property
    def expression(self):
        rows = ms.variable(self.of)
        rows = rows.final if self.final else rows
        if self.kind in ("first", "last"):
            row = getattr(rows, self.kind)(self.logical)
            row = row.prev(-self.physical) if self.physical < 0 else row.next(self.physical)
            return row.classifier() if self.column is None else row[self.column]
        return getattr(rows, self.kind)(*[self.column] if self.column else [])

    def value(self, attempt, labels, current):
        """Its value at the current row, which is the last of the first ``current`` labels."""
        seen = labels if self.final else labels[:current]
        places = [
            p
            for p, (name, _) in enumerate(seen)
            if self.of is None or name in attempt.members(self.of)
        ]
        if self.kind in ("first", "last"):
            places = places if self.kind == "first" else places[::-1]
            if self.logical >= len(places):
                return None
            place = places[self.logical] + self.physical
            if self.column is None:
                return labels[place][0] if 0 <= place < len(labels) else None
            row = attempt.row(attempt.start + place)
            return None if row is None else row[self.column]
        values = [attempt.row(attempt.start + p)[self.column] if self.column else 1 for p in places]
        return aggregate(self.kind, [value for value in values if value is not None])


def aggregate(kind, values):
    if kind == "count":
        return len(values)
    if not values:
        return None
    return {"sum": sum, "min": min, "max": max, "mean": lambda v: sum(v) / len(v)}[kind](values)


# A word: what is asked of the row's n and a reference's value, in Python and in polars.
N = pl.col("n")
ASK = {
    "below": (lambda n, x: n is not None and x is not None and n < x, lambda x: x > N),
    "not below": (lambda n, x: n is not None and x is not None and n >= x, lambda x: ~(x > N)),
    "null": (lambda _, x: x is None, lambda x: x.is_null()),
    "small": (lambda n, x: x is not None and n is not None and x + n < 8, lambda x: x + N < 8),
    "is A": (lambda _, x: x == "A", lambda x: x == "A"),
    "not A": (lambda _, x: x is not None and x != "A", lambda x: x != pl.lit("A")),
}


@dataclass(frozen=True)
class Condition:
    letters: str
    ask: str | None = None
    ref: Ref | None = None

    def holds(self, attempt, labels):
        row = attempt.row(attempt.start + len(labels) - 1)
        if row["v"] is None or row["v"] not in self.letters:
            return False
        if self.ask is None:
            return True
        return ASK[self.ask][0](row["n"], self.ref.value(attempt, labels, len(labels)))

    @property
    def expression(self):
        letters = pl.col("v").is_in(list(self.letters))
        if self.ask is None:
            return letters
        return letters & ASK[self.ask][1](self.ref.expression)


@dataclass(frozen=True)
class Pattern:
    node: tuple
    define: dict
    subset: dict
    within: int
    skip: str
    rows: str
    measures: dict


# ── one attempt ─────────────────────────────────────────────────────────────────────────────


@dataclass
class Attempt:
    """The search for a match that begins with one row."""

    pattern: Pattern
    rows: list
    start: int
    tries: int = 0

    def row(self, place):
        """The row at a place, if it is there: within so much of the first row."""
        if not 0 <= place < len(self.rows):
            return None
        row = self.rows[place]
        return row if abs(row["at"] - self.rows[self.start]["at"]) <= self.pattern.within else None

    def members(self, name):
        return self.pattern.subset.get(name, [name])

    def first(self):
        """The labels of the first match by preference; None if there is none."""
        return next(self.paths(self.pattern.node, (), False), None)

    def paths(self, node, labels, out):
        """Yield the labels after a part of the pattern, in the order of preference."""
        self.tries += 1
        if self.tries > TRIES_MAX:
            raise TooManyTriesError
        yield from getattr(self, node[0])(node, labels, out)

    def var(self, node, labels, out):
        if self.row(self.start + len(labels)) is not None:
            longer = (*labels, (node[1], out))
            condition = self.pattern.define.get(node[1])
            if condition is None or condition.holds(self, longer):
                yield longer

    def seq(self, node, labels, out):
        yield from self.in_order(node[1], labels, out)

    def alt(self, node, labels, out):
        for part in node[1]:
            yield from self.paths(part, labels, out)

    def permute(self, node, labels, out):
        for parts in itertools.permutations(node[1]):
            yield from self.in_order(parts, labels, out)

    def out(self, node, labels, _):
        yield from self.paths(node[1], labels, True)

    def anchor(self, node, labels, _):
        place = self.start + len(labels) - (node[1] == "^")
        if self.row(place) is None and not (node[1] == "^" and labels):
            yield labels

    def times(self, node, labels, out):
        yield from self.repeated(node, labels, out, 0)

    def in_order(self, parts, labels, out):
        if not parts:
            yield labels
            return
        for longer in self.paths(parts[0], labels, out):
            yield from self.in_order(parts[1:], longer, out)

    def repeated(self, node, labels, out, done):
        _, part, least, most, reluctant = node
        if done >= least and reluctant:
            yield labels
        if most is None or done < most:
            for longer in self.paths(part, labels, out):
                if most is None and done >= least and longer == labels:
                    yield longer  # a repetition without a row is the last one
                else:
                    yield from self.repeated(node, longer, out, done + 1)
        if done >= least and not reluctant:
            yield labels


# ── all matches of a key ────────────────────────────────────────────────────────────────────


class CannotSkipError(Exception):
    """A match has no row of what is skipped to, or begins with it."""


def model(pattern, rows, given_up=None):
    """Return what is emitted of a key's rows, in its order: the row, the match's end, and the measures.

    ``given_up`` takes the matches that cannot be skipped: their first and last row.
    """
    emitted, number, start, matched = [], 0, 0, 0
    while start < len(rows):
        attempt = Attempt(pattern, rows, start)
        labels = attempt.first()
        if labels is None:
            if pattern.rows == "all_with_unmatched" and start >= matched:
                emitted.append((start, None, tuple(None for _ in pattern.measures)))
            start += 1
            continue
        try:
            follows = following(pattern, attempt, start, labels)
        except CannotSkipError:
            if given_up is not None:
                given_up.append((start, start + len(labels) - 1))
            start += len(labels)
            continue
        number += 1
        emitted += shown(attempt, labels, number)
        if labels:
            matched = max(matched, start + len(labels))
        start = follows
    return emitted


def following(pattern, attempt, start, labels):
    if not labels or pattern.skip == "to next row":
        return start + 1
    if pattern.skip == "past last row":
        return start + len(labels)
    _, which, name = pattern.skip.split()
    places = [p for p, (label, _) in enumerate(labels) if label in attempt.members(name)]
    place = (places or [0])[0 if which == "first" else -1]
    if not place:
        raise CannotSkipError
    return start + place


def shown(attempt, labels, number):
    pattern = attempt.pattern
    if pattern.rows == "one":
        ended = attempt.start + len(labels) - 1 if labels else None
        return [(attempt.start, ended, measured(attempt, labels, len(labels), number))]
    if not labels:
        if pattern.rows == "all_omit_empty":
            return []
        return [(attempt.start, None, measured(attempt, labels, 0, number))]
    return [
        (attempt.start + place, None, measured(attempt, labels, place + 1, number))
        for place, (_, out) in enumerate(labels)
        if not out
    ]


def measured(attempt, labels, current, number):
    return tuple(
        number if ref == "number" else ref.value(attempt, labels, current)
        for ref in attempt.pattern.measures.values()
    )


# ── random patterns and rows ────────────────────────────────────────────────────────────────

LETTERS = "abc"
NAMES = "ABCD"


def text(node):
    kind = node[0]
    if kind in ("var", "anchor"):
        return node[1]
    if kind == "seq":
        return " ".join(map(text, node[1])) if node[1] else "()"
    if kind == "alt":
        return "(" + " | ".join(map(text, node[1])) + ")"
    if kind == "permute":
        return "PERMUTE(" + ", ".join(map(text, node[1])) + ")"
    if kind == "out":
        return "{- " + text(node[1]) + " -}"
    _, part, least, most, reluctant = node
    sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    if sign is None:
        sign = f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"
    inner = text(part)
    if part[0] in ("seq", "times"):
        inner = f"({inner})"
    return inner + sign + "?" * reluctant


class Draw(RowDraw):
    """Draws a pattern, and rows."""

    letters = LETTERS

    def node(self, depth):
        roll = self.dice.random()
        if depth == 0 or roll < 0.3:
            if self.chance(0.04):
                return ("anchor", self.dice.choice("^$"))
            if self.chance(0.04):
                return ("seq", ())
            name = self.dice.choice(NAMES)
            self.names += [name] if name not in self.names else []
            return ("var", name)
        if roll < 0.55:
            return ("seq", tuple(self.node(depth - 1) for _ in range(self.dice.choice([2, 2, 3]))))
        if roll < 0.68:
            return ("alt", tuple(self.node(depth - 1) for _ in range(self.dice.choice([2, 2, 3]))))
        if roll < 0.73:
            return ("permute", tuple(self.node(depth - 1) for _ in range(self.dice.choice([2, 3]))))
        if roll < 0.78:
            return ("out", self.node(depth - 1))
        least = self.dice.choice([0, 0, 1, 1, 2])
        most = self.dice.choice([None, None, least, least + 1, max(1, least + 2)])
        return ("times", self.node(depth - 1), least, most, self.chance(0.35))

    def of(self):
        return self.dice.choice([None, None, *self.names, "U"])

    def navigation(self, *, final=False):
        column = None if self.chance(0.15) else "n"
        kind = self.dice.choice(["first", "last", "last"])
        logical = self.dice.choice([0, 0, 0, 1, 2])
        physical = self.dice.choice([0, 0, -1, -1, -2, 1, 2])
        return Ref(kind, self.of(), column, final, logical, physical)

    def aggregate(self, *, final=False):
        kind = self.dice.choice(["count", "sum", "mean", "min", "max"])
        column = None if kind == "count" and self.chance(0.5) else "n"
        return Ref(kind, self.of(), column, final)

    def condition(self):
        letters = "".join(self.dice.sample(LETTERS, self.dice.choice([1, 2, 2, 3])))
        if self.chance(0.45):
            return Condition(letters)
        ref = self.navigation() if self.chance(0.7) else self.aggregate()
        if ref.column is None and ref.kind in ("first", "last"):
            return Condition(letters, self.dice.choice(["is A", "not A", "null"]), ref)
        return Condition(letters, self.dice.choice(["below", "not below", "null", "small"]), ref)

    def pattern(self):
        node = self.node(self.dice.choice([1, 2, 2, 3]))
        if not self.names:
            node = ("alt", (node, ("var", "A")))
            self.names.append("A")
        subset = {"U": self.dice.sample(self.names, self.dice.randint(1, len(self.names)))}
        define = {name: self.condition() for name in self.names if self.chance(0.85)}
        skip = self.dice.choice(
            ["past last row"] * 3
            + ["to next row"] * 3
            + ["to first U", "to last U", f"to last {self.names[-1]}"]
        )
        rows = self.dice.choice(
            ["one", "one", "all", "all", "all_omit_empty", "all_with_unmatched"]
        )
        return Pattern(
            node, define, subset, self.dice.choice([2, 4, 9, 30]), skip, rows, self.measures()
        )

    def measures(self):
        made = {"m0": "number"} if self.chance(0.7) else {}
        for number in range(1, 5):
            ref = self.navigation if self.chance(0.6) else self.aggregate
            made[f"m{number}"] = ref(final=self.chance(0.4))
        return made


def declared(pattern):
    return ms.row_pattern(
        text(pattern.node),
        define={name: condition.expression for name, condition in pattern.define.items()},
        subset=pattern.subset,
        after_match=pattern.skip,
        within=f"{pattern.within} seconds",
    )
