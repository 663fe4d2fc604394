"""What a query is made of: conditions on fields, and how they are combined.

A condition is true of a row, or not; where its field is null, it is not.

==========  ====================================================  =========================
kind        true if                                               has
==========  ====================================================  =========================
TERM        the field has the term                                the term
PHRASE      it has the terms, one behind the other                the terms
PREFIX      it has a word that begins so                          the beginning
PATTERN     it has a word that the regular expression matches     the expression, and what
            as a whole                                            its words begin with
RANGE       its value is in the interval                          two numbers, both included
EXISTS      it is not null (of text: it has a word)
NEAR        its point is at most so far away                      latitude, longitude, metres
INSIDE      its point is inside of the polygon                    its corners
==========  ====================================================  =========================

Terms are what an analyzer makes of words; PREFIX and PATTERN are about the words themselves, in lower case where
the analyzer compares so.
"""

from __future__ import annotations

from dataclasses import dataclass

TERM, PHRASE, PREFIX, PATTERN, RANGE, EXISTS, NEAR, INSIDE = range(8)
WORDS = 8  # words that were not analyzed yet: TERM or PHRASE
SEPARATOR = "\n"  # between the terms of a phrase, and before what the words of an expression begin with; in no word


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on the field of a number; ``position`` is where the query says it, from 0."""

    kind: int
    field: int
    text: str = ""
    low: int = 0
    high: int = 0
    numbers: tuple[float, ...] = ()
    position: int = 0


@dataclass(frozen=True, slots=True)
class Everything:
    """True of every row."""


@dataclass(frozen=True, slots=True)
class Not:
    """True where its part is not."""

    part: QueryNode


@dataclass(frozen=True, slots=True)
class AllOf:
    """True where all parts are."""

    parts: tuple[QueryNode, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """True where at least ``count`` parts are."""

    count: int
    parts: tuple[QueryNode, ...]


QueryNode = Condition | Everything | Not | AllOf | AnyOf
