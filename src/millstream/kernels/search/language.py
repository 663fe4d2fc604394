"""The text of a query, and the conditions that it says.

::

    query      = conjunction { "OR" conjunction }
    conjunction = part { ["AND"] part }                     two parts side by side: both
    part       = ("NOT" | "-") part | "+" part | "(" query ")" | at least | [field ":"] condition
    at least   = "AT LEAST" number "OF" "(" query { "," query } ")"
    condition  = word | "phrase" | begin* | wi?d*card | /expression/ | range | "(" query ")" | "*"
               | "near(" latitude longitude distance ")" | "inside(" latitude longitude "," … ")"
    range      = "[" or "{" bound "TO" bound "]" or "}" | (">" | ">=" | "<" | "<=") bound

``*:*`` is every row. A backslash takes the character behind it as it is. A condition without a field is about the
default fields: true if it is of one of them.

Source: the syntax is that of Lucene's classic query parser, where two parts side by side are both meant ("AND" as
the default operator), and ``AT LEAST``, ``near`` and ``inside`` are new.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import polars as pl

from millstream.choices import did_you_mean
from millstream.kernels.search.analyzers import folded, one_spelling
from millstream.kernels.search.conditions import (
    EXISTS,
    INSIDE,
    NEAR,
    PATTERN,
    PREFIX,
    RANGE,
    SEPARATOR,
    WORDS,
    AllOf,
    AnyOf,
    Condition,
    Everything,
    Not,
    QueryNode,
)
from millstream.kernels.search.fields import INT64_MAX, INT64_MIN, Interval, SearchField

CONDITIONS_MAX = 1024  # as Lucene's clauses
_DEPTH_MAX = 50
_CHARS_MAX = 100_000
_SPECIAL = set('()",')
_WORD_OPERATORS = ("AND", "OR", "NOT", "AT LEAST", "TO")
_OPERATOR_INITIALS = {operator[0] for operator in _WORD_OPERATORS}
_METRES = {"m": 1.0, "km": 1000.0, "mi": 1609.344}
_HALF_AROUND_M = 20_100_000.0
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)"
_NEAR = re.compile(rf"({_NUMBER})[\s,]+({_NUMBER})[\s,]+({_NUMBER})\s*(m|km|mi)")
_BLANKS = re.compile(r"\s*")
_PLAIN_WORD = re.compile(
    r"[^\s()\",\\*?]+(?=[\s()\",]|\Z)"
)  # one without wildcards and backslashes
_PLAIN_VALUE = re.compile(r"[^\s()\",\\]+(?=[\s()\",]|\Z)")
_PLAIN_BOUND = re.compile(r"[^\s()\",\\\]}]+(?=[\s()\",\]}]|\Z)")
_CORNER = re.compile(rf"({_NUMBER})\s+({_NUMBER})")

Bare = list[tuple[str, bool]]
"""The characters of a word, each with whether a backslash was before it."""


class QueryError(Exception):
    """A text is no query; ``position`` is the character, from 0, at which that shows."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


def parse(text: str, fields: Sequence[SearchField], defaults: Sequence[int]) -> QueryNode:
    """Return what a query says; ``defaults`` are the numbers of the default fields.

    Words are not analyzed yet: see :func:`~millstream.kernels.search.compiled_queries.compile_queries`.

    Raises:
        QueryError: the text is no query.
    """
    if len(text) > _CHARS_MAX:
        raise QueryError(
            f"it has {len(text)} characters, and at most {_CHARS_MAX} are allowed", _CHARS_MAX
        )
    return _Parser(text, fields, tuple(defaults)).query()


@dataclass
class _Parser:
    text: str
    fields: Sequence[SearchField]
    scope: tuple[int, ...]  # the fields that a condition without one is about
    at: int = 0
    depth: int = 0
    conditions: int = 0

    def query(self) -> QueryNode:
        self._blanks()
        if self.at == len(self.text):
            raise self._error("it is empty; *:* is every row")
        found = self._any()
        if self.at < len(self.text):
            raise self._error(f"{self.text[self.at]!r} has nothing before it that it belongs to")
        return found

    # ── how parts are combined ──────────────────────────────────────────────────────────────

    def _any(self) -> QueryNode:
        parts = [self._all()]
        while self._keyword("OR"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else AnyOf(1, tuple(parts))

    def _all(self) -> QueryNode:
        parts = [self._part()]
        while self._keyword("AND") or not self._ends():
            parts.append(self._part())
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _ends(self) -> bool:
        self._blanks()
        return self.at == len(self.text) or self.text[self.at] in "),]}" or self._sees("OR")

    def _part(self) -> QueryNode:
        self.depth += 1
        if self.depth > _DEPTH_MAX:
            raise self._error(f"it is nested more than {_DEPTH_MAX} deep")
        self._blanks()
        if self._keyword("NOT") or self._sign("-"):
            found: QueryNode = Not(self._part())
        elif self._sign("+"):
            found = self._part()
        elif self._takes("("):
            found = self._group()
        elif self._keyword("AT LEAST"):
            found = self._at_least()
        else:
            found = self._condition()
        self.depth -= 1
        return found

    def _group(self) -> QueryNode:
        found = self._any()
        self._expect(")")
        return found

    def _at_least(self) -> QueryNode:
        at = self.at
        number = self._matches(r"\s*(\d{1,6})\s+OF\s*\(")
        if number is None:
            raise QueryError(
                "AT LEAST is followed by a number, OF, and parts: AT LEAST 2 OF (a, b, c)", at
            )
        parts = [self._any()]
        while self._takes(","):
            parts.append(self._any())
        self._expect(")")
        count = int(number.group(1))
        if not 1 <= count <= len(parts):
            raise QueryError(f"AT LEAST {count} of {len(parts)} parts: write 1 to {len(parts)}", at)
        return AllOf(tuple(parts)) if count == len(parts) else AnyOf(count, tuple(parts))

    # ── conditions ──────────────────────────────────────────────────────────────────────────

    def _condition(self) -> QueryNode:
        self._blanks()
        start = self.at
        if start == len(self.text):
            raise self._error("it ends where a word or condition is expected")
        if self.text[start] in _OPERATOR_INITIALS:
            self._require_no_operator()
        if self.text.startswith("*:*", start) and self._is_end(start + 3):
            self.at += 3
            self._count(1, start)
            return Everything()
        name = self._field_name()
        if name is None:
            return self._value(self.scope, start, scoped=False)
        field = self._field(name, start)
        if self._takes("(", blanks=False):
            before, self.scope = self.scope, (field,)
            found = self._group()
            self.scope = before
            return found
        return self._value((field,), self.at, scoped=True)

    def _require_no_operator(self) -> None:
        for operator in _WORD_OPERATORS:
            if self._sees(operator):
                raise self._error(
                    f"{operator} has nothing before it; quote it if the word is meant"
                )

    def _field_name(self) -> str | None:
        found = self._matches(r"((?:[^\s()\",:\\/\[\]{}<>*?]|\\.)+):")
        return None if found is None else re.sub(r"\\(.)", r"\1", found.group(1))

    def _field(self, name: str, at: int) -> int:
        for number, field in enumerate(self.fields):
            if field.name == name:
                return number
        names = [field.name for field in self.fields]
        raise QueryError(
            f"there is no field {name!r}; the fields are {', '.join(names)}{did_you_mean(name, names)}",
            at,
        )

    def _value(self, numbers: tuple[int, ...], at: int, *, scoped: bool) -> QueryNode:
        """Return the condition that stands here, of one field, or of any of the default ones."""
        if not numbers:
            raise QueryError("it names no field, and none is the default: write field:word", at)
        fields = [self.fields[number] for number in numbers]
        make = self._text_condition if fields[0].kind == "text" else self._other_condition
        made: list[QueryNode] = []
        for number in numbers:
            self.at = at
            made.append(make(number, self.fields[number], at, scoped=scoped))
        self._count(len(made), at)
        return made[0] if len(made) == 1 else AnyOf(1, tuple(made))

    def _count(self, conditions: int, at: int) -> None:
        self.conditions += conditions
        if self.conditions > CONDITIONS_MAX:
            raise QueryError(f"it has more than {CONDITIONS_MAX} conditions", at)

    def _text_condition(
        self, number: int, field: SearchField, at: int, *, scoped: bool
    ) -> QueryNode:
        first = self.text[at : at + 1]
        if first == '"':
            return Condition(WORDS, number, self._quoted(), position=at)
        if first == "/":
            return self._expression(number, field, at)
        if scoped and first and first in "[{<>":
            raise QueryError(
                f"{field.name!r} is text, which has no ranges; quote the value if it is meant", at
            )
        plain = self._found(_PLAIN_WORD)
        if plain:
            return Condition(WORDS, number, plain, position=at)
        bare = self._bare()
        if bare == [("*", False)]:
            if scoped:
                return Condition(EXISTS, number, position=at)
            raise QueryError(
                "* stands alone: write *:* for every row, or field:* for those with a value", at
            )
        if any(char in "*?" and not escaped for char, escaped in bare):
            return _wildcard(number, field, bare, at)
        return Condition(WORDS, number, "".join(char for char, _ in bare), position=at)

    def _expression(self, number: int, field: SearchField, at: int) -> QueryNode:
        found = self._matches(r"/((?:[^/\\]|\\.)*)/")
        if found is None:
            raise QueryError("the regular expression has no / at its end", at)
        expression = one_spelling(found.group(1).replace("\\/", "/"), field.analyzer)
        problem = _problem_of(expression)
        if problem:
            raise QueryError(f"the regular expression is wrong: {problem}", at)
        return Condition(PATTERN, number, expression + SEPARATOR, position=at)

    def _other_condition(
        self, number: int, field: SearchField, at: int, *, scoped: bool
    ) -> QueryNode:
        del scoped  # only text is a default field
        if self._matches(r"\*(?=[\s),]|$)"):
            return Condition(EXISTS, number, position=at)
        if field.kind == "point":
            return self._area(number, field, at)
        interval = self._interval(field).stored()
        return Condition(RANGE, number, low=interval.low, high=interval.high, position=at)

    def _interval(self, field: SearchField) -> Interval:
        opening = self.text[self.at : self.at + 1]
        if opening and opening in "[{":
            self.at += 1
            low = self._bound(field, "[")
            if not self._keyword("TO"):
                raise self._error("a range is written [900 TO 1200], with * for an open bound")
            high = self._bound(field, "]")
            closing = self.text[self.at : self.at + 1]
            if not closing or closing not in "]}":
                raise self._error("the range has no ] or } at its end")
            self.at += 1
            return _between(low, high, opening + closing)
        comparison = self._matches(r"(>=|<=|>|<)\s*")
        if comparison is None:
            found = self._bound(field, "=")
            if found is None:
                raise self._error(f"{field.name!r} has no such value")
            return found
        sign, bound = comparison.group(1), self._bound(field, "=")
        if bound is None:
            raise self._error("a comparison needs a value: <900")
        if sign[0] == ">":
            return _between(bound, None, "[" if sign == ">=" else "")
        return _between(None, bound, "]" if sign == "<=" else "")

    def _bound(self, field: SearchField, place: str) -> Interval | None:
        """Return the values of a bound; None: it is open."""
        self._blanks()
        at = self.at
        if self.text[at : at + 1] == '"':
            text = self._quoted()
        else:
            text = self._found(_PLAIN_VALUE if place == "=" else _PLAIN_BOUND)
            text = text or "".join(char for char, _ in self._bare("" if place == "=" else "]}"))
        if text == "*" and place != "=":
            return None
        try:
            return field.interval(text)
        except ValueError as error:
            raise QueryError(f"{field.name}: {error}", at) from None

    def _area(self, number: int, field: SearchField, at: int) -> QueryNode:
        found = self._matches(r"(near|inside)\(([^()]*)\)")
        if found is None:
            raise QueryError(
                f"{field.name!r} is a point: write {field.name}:near(52.5 13.4 3km), or "
                f"{field.name}:inside(52.4 13.3, 52.6 13.3, 52.5 13.5)",
                at,
            )
        make = _circle if found.group(1) == "near" else _polygon
        numbers = make(found.group(2).strip(), at)
        kind = NEAR if found.group(1) == "near" else INSIDE
        return Condition(kind, number, numbers=numbers, position=at)

    # ── characters ──────────────────────────────────────────────────────────────────────────

    def _quoted(self) -> str:
        at = self.at
        found = self._matches(r'"((?:[^"\\]|\\.)*)"')
        if found is None:
            raise QueryError('the phrase has no " at its end', at)
        return re.sub(r"(?s)\\(.)", r"\1", found.group(1))

    def _bare(self, also: str = "") -> Bare:
        """Return the characters up to the end of a word; ``also`` are others that end it."""
        found: Bare = []
        start = self.at
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                if self.at + 1 == len(self.text):
                    raise self._error("a backslash has nothing behind it")
                found.append((self.text[self.at + 1], True))
                self.at += 2
                continue
            if char.isspace() or char in _SPECIAL or char in also:
                break
            found.append((char, False))
            self.at += 1
        if not found:
            what = repr(self.text[start]) if start < len(self.text) else "the end"
            raise self._error(f"{what} stands where a word or value is expected")
        return found

    def _found(self, pattern: re.Pattern[str]) -> str:
        """Return the text that an expression takes here; "" if it takes none."""
        found = pattern.match(self.text, self.at)
        if found is None:
            return ""
        self.at = found.end()
        return found.group()

    def _matches(self, pattern: str) -> re.Match[str] | None:
        found = _compiled(pattern).match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def _sees(self, word: str) -> bool:
        end = self.at + len(word)
        return self.text.startswith(word, self.at) and self._is_end(end)

    def _is_end(self, at: int) -> bool:
        return at >= len(self.text) or self.text[at].isspace() or self.text[at] in _SPECIAL

    def _keyword(self, word: str) -> bool:
        self._blanks()
        if not self._sees(word):
            return False
        self.at += len(word)
        return True

    def _sign(self, sign: str) -> bool:
        if self.text.startswith(sign, self.at) and not self._is_end(self.at + 1):
            self.at += 1
            return True
        if self.text.startswith(f"{sign}(", self.at) or self.text.startswith(f'{sign}"', self.at):
            self.at += 1
            return True
        return False

    def _takes(self, char: str, *, blanks: bool = True) -> bool:
        if blanks:
            self._blanks()
        if not self.text.startswith(char, self.at):
            return False
        self.at += len(char)
        return True

    def _expect(self, char: str) -> None:
        if not self._takes(char):
            what = repr(self.text[self.at]) if self.at < len(self.text) else "the end"
            raise self._error(f"{char!r} is missing before {what}")

    def _blanks(self) -> None:
        if self.at < len(self.text) and not self.text[self.at].isspace():
            return
        found = _BLANKS.match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def _error(self, message: str) -> QueryError:
        return QueryError(message, self.at)


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def _between(low: Interval | None, high: Interval | None, included: str) -> Interval:
    """Return what is between two bounds, each of which may be a whole day, or open.

    ``included`` has ``[`` where the low bound is in it, and ``]`` where the high one is.
    """
    first, last = INT64_MIN, INT64_MAX
    if low is not None:
        first = low.low if "[" in included else low.high + 1
    if high is not None:
        last = high.high if "]" in included else high.low - 1
    return Interval(first, last)


def _wildcard(number: int, field: SearchField, bare: Bare, at: int) -> Condition:
    """Return the condition of a word with ``*`` for any characters, and ``?`` for one."""
    wild = [place for place, (char, escaped) in enumerate(bare) if char in "*?" and not escaped]
    begin = _folded("".join(char for char, _ in bare[: wild[0]]), field)
    if wild == [len(bare) - 1] and bare[-1][0] == "*":
        return Condition(PREFIX, number, begin, position=at)
    parts: list[str] = []
    literal = ""
    for char, escaped in [*bare, ("", False)]:
        if char and (escaped or char not in "*?"):
            literal += char
            continue
        parts.append(re.escape(_folded(literal, field)))
        parts.append({"*": "(?s:.*)", "?": "(?s:.)", "": ""}[char])
        literal = ""
    expression = "".join(parts)
    problem = _problem_of(expression)
    if problem:  # here, so that it does not stop the stream where rows are tried
        raise QueryError(f"the word with * or ? is too long: {problem}", at)
    return Condition(
        PATTERN, number, expression + SEPARATOR + begin.split(SEPARATOR)[0], position=at
    )


def _folded(text: str, field: SearchField) -> str:
    return str(folded(pl.Series([text]), field.analyzer)[0]) if text else ""


def whole_word(expression: str) -> str:
    """Return the expression that matches a word as a whole."""
    return rf"\A(?:{expression})\z"


@lru_cache(maxsize=256)  # of texts that may be long
def _problem_of(expression: str) -> str:
    """Return what is wrong with a regular expression, alone or as one for a whole word; "" if nothing is."""
    try:
        for text in (expression, whole_word(expression)):
            pl.Series([""]).str.contains(text)
    except pl.exceptions.ComputeError as error:
        said = str(error).partition("\n\nThis error occurred")[
            0
        ]  # behind that is the whole expression
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        last = lines[-1].removeprefix("regex error:").strip() if lines else ""
        return last.removeprefix("error: ") or "it cannot be compiled"
    return ""


def _degrees(text: str, most: float, what: str, at: int) -> float:
    found = float(text)
    if not -most <= found <= most:
        raise QueryError(f"the {what} {text} is not between -{most:g} and {most:g}", at)
    return found


def _circle(text: str, at: int) -> tuple[float, ...]:
    found = _NEAR.fullmatch(text)
    if found is None:
        raise QueryError(
            "near has a latitude, a longitude and a distance in m, km or mi: near(52.5 13.4 3km)",
            at,
        )
    distance_m = float(found.group(3)) * _METRES[found.group(4)]
    if not 0 <= distance_m <= _HALF_AROUND_M:
        raise QueryError(
            f"the distance {found.group(3)}{found.group(4)} is not between 0 and 20100km", at
        )
    latitude = _degrees(found.group(1), 90, "latitude", at)
    return latitude, _degrees(found.group(2), 180, "longitude", at), distance_m


def _polygon(text: str, at: int) -> tuple[float, ...]:
    corners: list[float] = []
    for corner in text.split(","):
        found = _CORNER.fullmatch(corner.strip())
        if found is None:
            raise QueryError(
                f"inside has corners, each a latitude and a longitude, and {corner.strip()!r} is none: "
                "inside(52.4 13.3, 52.6 13.3, 52.5 13.5)",
                at,
            )
        corners.append(_degrees(found.group(1), 90, "latitude", at))
        corners.append(_degrees(found.group(2), 180, "longitude", at))
    if len(corners) < 6:
        raise QueryError(f"inside has at least 3 corners, and these are {len(corners) // 2}", at)
    lons = corners[1::2]
    if any(math.fabs(lon - lons[place - 1]) > 180 for place, lon in enumerate(lons)):
        raise QueryError("an edge is wider than 180°: divide the polygon at the 180th meridian", at)
    return tuple(corners)
