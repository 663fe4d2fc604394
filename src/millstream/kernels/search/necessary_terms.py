"""Necessary terms: every row that a query matches has at least one of them, so only these rows are tried.

Of a part of a query there is a set of such terms, or none is known, and then every row is tried:

=============================  ==================================================================
part                           necessary terms
=============================  ==================================================================
TERM                           the term
PHRASE                         any one of its terms
PREFIX, PATTERN                the first three letters that a word has, if they are known
RANGE of one value             the value
NEAR, INSIDE                   the cells that cover the area, if they are few
NOT, RANGE, EXISTS, every row  none
all of several parts           those of one part
at least m of n parts          those of any n - m + 1 parts, together: of the others there are only
                               m - 1; where one of these has none, none
=============================  ==================================================================

Where there is a choice, the rarest are taken: those that the fewest queries of the batch have, of equal ones longer
words before shorter ones. Which are taken changes what is tried, and never what matches.

Source: the term extraction of Lucene's Monitor and of Elasticsearch's percolator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from millstream.kernels.search.conditions import (
    INSIDE,
    NEAR,
    PATTERN,
    PHRASE,
    PREFIX,
    RANGE,
    SEPARATOR,
    TERM,
    AllOf,
    AnyOf,
    Condition,
    QueryNode,
)
from millstream.kernels.search.geography import cells_inside, cells_near

BEGINNING_CHARS = 3
TERM_KIND, BEGINNING_KIND, VALUE_KIND, CELL_KIND = "tbvc"  # behind the number of the field
EVERY_ROW = ""
"""The term that every row has."""

Terms = tuple[float, tuple[str, ...]]
"""About what part of the rows has one of some terms, as a number to be compared, and the terms."""


def term_key(field: int, term: str) -> str:
    """Return a term of text as it is indexed."""
    return f"{field}{TERM_KIND}{term}"


def beginning_key(field: int, word: str) -> str:
    """Return the beginning of a word as it is indexed; the word is as long or longer."""
    return f"{field}{BEGINNING_KIND}{word[:BEGINNING_CHARS]}"


def value_key(field: int, value: int) -> str:
    """Return a value as it is indexed."""
    return f"{field}{VALUE_KIND}{value}"


def cell_key(field: int, cell: str) -> str:
    """Return a cell of the grid as it is indexed."""
    return f"{field}{CELL_KIND}{cell}"


def alternatives(condition: Condition) -> list[tuple[str, ...]]:
    """Return the sets of necessary terms of a condition, of which one is enough; empty: there is none."""
    kind, field = condition.kind, condition.field
    if kind == TERM:
        return [(term_key(field, condition.text),)]
    if kind == PHRASE:
        return [(term_key(field, term),) for term in condition.text.split(SEPARATOR)]
    if kind in (PREFIX, PATTERN):
        begin = condition.text if kind == PREFIX else condition.text.rsplit(SEPARATOR, 1)[-1]
        return [(beginning_key(field, begin),)] if len(begin) >= BEGINNING_CHARS else []
    if kind == RANGE and condition.low == condition.high:
        return [(value_key(field, condition.low),)]
    cells: list[str] | None = None
    if kind == NEAR:
        cells = cells_near(*condition.numbers)
    elif kind == INSIDE:
        cells = cells_inside(condition.numbers)
    return [tuple(cell_key(field, cell) for cell in cells)] if cells else []


class TermSets:
    """The sets of necessary terms of conditions, each worked out once: the cells of an area take longer than all else."""

    def __init__(self) -> None:
        self._sets: dict[int, tuple[Condition, list[tuple[str, ...]]]] = {}

    def of(self, condition: Condition) -> list[tuple[str, ...]]:
        """Return what :func:`alternatives` says of a condition."""
        known = self._sets.get(id(condition))
        if known is None:
            # The condition is kept, so that no other one gets its id.
            known = self._sets[id(condition)] = condition, alternatives(condition)
        return known[1]


def all_terms(node: QueryNode, sets: TermSets) -> Iterator[str]:
    """Yield the terms that a query might be indexed by."""
    if isinstance(node, Condition):
        for terms in sets.of(node):
            yield from terms
    elif isinstance(node, (AllOf, AnyOf)):
        for part in node.parts:
            yield from all_terms(part, sets)


def necessary_terms(
    node: QueryNode, queries_with: Mapping[str, int], sets: TermSets
) -> tuple[str, ...]:
    """Return the rarest necessary terms of a query; ``(EVERY_ROW,)`` if none are known."""
    found = _rarest(node, queries_with, sets)
    return (EVERY_ROW,) if found is None else tuple(dict.fromkeys(found[1]))


def _rarest(node: QueryNode, queries_with: Mapping[str, int], sets: TermSets) -> Terms | None:
    if isinstance(node, Condition):
        known_sets = [(_share(terms, queries_with), terms) for terms in sets.of(node)]
        return min(known_sets, default=None)
    if isinstance(node, AllOf):
        there = [found for part in node.parts if (found := _rarest(part, queries_with, sets))]
        return min(there, default=None)
    if isinstance(node, AnyOf):
        parts = [_rarest(part, queries_with, sets) for part in node.parts]
        known = sorted(part for part in parts if part is not None)
        needed = len(parts) - node.count + 1
        if len(known) < needed:
            return None
        taken = known[:needed]
        return sum(share for share, _ in taken), tuple(term for _, terms in taken for term in terms)
    return None


def _share(terms: tuple[str, ...], queries_with: Mapping[str, int]) -> float:
    return sum(queries_with.get(term, 0) + _COMMON[_kind(term)] / len(term) for term in terms)


# Of terms that equally many queries have: values are more common than words, and few letters than cells.
_COMMON = {TERM_KIND: 1.0, BEGINNING_KIND: 4.0, VALUE_KIND: 8.0, CELL_KIND: 2.0}


def _kind(term: str) -> str:
    return term.lstrip("0123456789")[0]
