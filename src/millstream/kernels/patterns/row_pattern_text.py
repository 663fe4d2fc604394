"""Reads a row pattern as SQL writes it: ``A B+ (C | D)*? {- E -} PERMUTE(F, G) $``.

Names of variables are as they are written: upper and lower case differ, as everywhere in Python. ``()`` is the empty
pattern. A quantifier is ``*``, ``+``, ``?``, ``{n}``, ``{n,}``, ``{,m}`` or ``{n,m}``; with a ``?`` after it, it is reluctant.

Source: ISO/IEC 9075-2, "row pattern" (the grammar).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from millstream.errors import ConfigError
from millstream.kernels.patterns.row_pattern import (
    Alternation,
    Anchor,
    Concatenation,
    Exclusion,
    PatternNode,
    Permutation,
    Quantified,
    Variable,
)

_TOKEN = re.compile(r"\s*(?:(?P<name>[^\W\d]\w*)|(?P<number>\d+)|(?P<sign>\{-|-\}|[(){}|*+?,^$]))")
_TIMES_MAX = 1_000
_DEPTH_MAX = 100
_END = "the end"
_QUANTIFIERS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@dataclass(frozen=True)
class _Token:
    text: str
    at: int
    kind: str


def parse_row_pattern(text: object) -> PatternNode:
    """Return the tree of a pattern.

    Raises:
        ConfigError: it is none; the message shows where, and what is expected there.
    """
    if not isinstance(text, str):
        raise ConfigError(f'The pattern is {text!r}. Give it as SQL writes it, such as "A B+ C?".')
    parser = _Parser(text, _tokens(text))
    node = parser.alternation(0)
    if parser.next.kind != _END:
        raise parser.error("a variable, a quantifier or the end")
    return node


def _tokens(text: str) -> list[_Token]:
    found = []
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            raise _error(text, at, repr(text[at]), "a variable, a quantifier, ( ) | {- -} ^ or $")
        kind = str(match.lastgroup)
        found.append(_Token(match[kind], match.start(kind), kind))
        at = match.end()
    return [*found, _Token("", len(text), _END)]


def _error(text: str, at: int, found: str, expected: str) -> ConfigError:
    return ConfigError(
        f"The pattern has {found} at place {at + 1}, where {expected} is expected:\n  {text}\n  {' ' * at}^"
    )


@dataclass
class _Parser:
    text: str
    tokens: list[_Token]
    at: int = 0

    @property
    def next(self) -> _Token:
        return self.tokens[self.at]

    def error(self, expected: str) -> ConfigError:
        found = _END if self.next.kind == _END else repr(self.next.text)
        return _error(self.text, self.next.at, found, expected)

    def take(self, *texts: str) -> str | None:
        """Take the next token if it is one of these."""
        if self.next.kind == _END or self.next.text not in texts:
            return None
        self.at += 1
        return self.tokens[self.at - 1].text

    def require(self, text: str) -> None:
        if self.take(text) is None:
            raise self.error(f"'{text}'")

    def alternation(self, depth: int) -> PatternNode:
        if depth > _DEPTH_MAX:
            raise self.error(f"at most {_DEPTH_MAX} levels of parentheses")
        parts = [self._concatenation(depth)]
        while self.take("|"):
            parts.append(self._concatenation(depth))
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def _concatenation(self, depth: int) -> PatternNode:
        parts: list[PatternNode] = []
        while self.next.kind == "name" or self.next.text in ("(", "{-", "^", "$"):
            parts.append(self._quantified(self._primary(depth)))
        if not parts:
            raise self.error("a variable, ( {- ^ $ or PERMUTE (the empty pattern is ())")
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _primary(self, depth: int) -> PatternNode:
        if self.take("("):
            if self.take(")"):
                return Concatenation(())
            node = self.alternation(depth + 1)
            self.require(")")
            return node
        if self.take("{-"):
            node = Exclusion(self.alternation(depth + 1))
            self.require("-}")
            return node
        sign = self.take("^", "$")
        if sign is not None:
            return Anchor("^" if sign == "^" else "$")
        name = self.next.text
        self.at += 1
        if name.upper() == "PERMUTE" and self.take("("):
            return self._permutation(depth)
        return Variable(name)

    def _permutation(self, depth: int) -> PatternNode:
        parts = [self.alternation(depth + 1)]
        while self.take(","):
            parts.append(self.alternation(depth + 1))
        self.require(")")
        return Permutation(tuple(parts))

    def _quantified(self, part: PatternNode) -> PatternNode:
        """Take the quantifier of a part, if it has one."""
        sign = self.take("*", "+", "?", "{")
        if sign is None:
            return part
        least, most = self._range() if sign == "{" else _QUANTIFIERS[sign]
        return Quantified(part, least, most, self.take("?") is not None)

    def _range(self) -> tuple[int, int | None]:
        begins = self.at
        least = self._number()
        if self.take(",") is None:
            if least is None:
                raise self.error("a number or a comma")
            self.require("}")
            return least, least
        most = self._number()
        self.require("}")
        if most is not None and most < (least or 0):
            self.at = begins
            raise self.error("a number that is not above the second one")
        return least or 0, most

    def _number(self) -> int | None:
        if self.next.kind != "number":
            return None
        number = int(self.next.text) if len(self.next.text) < 9 else _TIMES_MAX + 1
        if number > _TIMES_MAX:
            raise self.error(f"a number up to {_TIMES_MAX:,}")
        self.at += 1
        return number
