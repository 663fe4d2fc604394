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
all of several parts           those of one part; or, where one is an area, each of those of another part
                               together with each cell that covers it
at least m of n parts          those of any n - m + 1 parts, together: of the others there are only
                               m - 1; where one of these has none, none
=============================  ==================================================================

Where there is a choice, the rarest are taken: those that the fewest queries of the batch have, of equal ones longer
words before shorter ones. A word that many queries have leads to all of them; so together with an area it is indexed as
pairs of the word and a cell, of which a row has one for each of its words and each level of the grid. Which terms are
taken changes what is tried, and never what matches.

Source: the term extraction of Lucene's Monitor and of Elasticsearch's percolator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
from millstream.kernels.search.geography import CELLS_MAX, PAIR_LEVELS, cells_inside, cells_near

BEGINNING_CHARS = 3
TERM_KIND, BEGINNING_KIND, VALUE_KIND, CELL_KIND = "tbvc"  # behind the number of the field
EVERY_ROW = ""
"""The term that every row has."""

_PAIR_CELLS_MAX = (
    4  # an area is covered by two cells in each direction, of a level that is not much larger
)
_PAIR_TERMS_MAX = 4
# Of terms that fewer queries of a batch have, each row finds few, and several postings for each would cost more.
_FREQUENT_PER_QUERY = 1e-4
_PAIRED_SHARE = 1 / 16  # about what part of the rows with a term is in some cells, too

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
    cells = _cells(condition, CELLS_MAX)
    return [cells] if cells else []


def _cells(condition: Condition, most: int) -> tuple[str, ...]:
    """Return at most so many cells that cover the area of a condition, as they are indexed; empty: there is none."""
    cells: list[str] | None = None
    if condition.kind == NEAR:
        latitude, longitude, radius_m = condition.numbers
        cells = cells_near(latitude, longitude, radius_m, most)
    elif condition.kind == INSIDE:
        cells = cells_inside(condition.numbers, most)
    return tuple(cell_key(condition.field, cell) for cell in cells or ())


def pair_key(cell: str, term: str) -> str:
    """Return a cell and a term that a row has both of, as they are indexed together."""
    return f"{cell}{SEPARATOR}{term}"


PAIR_PATTERN = rf"^\d+{CELL_KIND}[^{SEPARATOR}]*{SEPARATOR}"
"""The regular expression of pairs among all that is indexed."""


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


@dataclass(frozen=True)
class QueryTerms:
    """Chooses the necessary terms of queries of a batch: which queries have a term is counted, and how many there are."""

    sets: TermSets
    queries_with: Mapping[str, int]
    queries: int

    def of(self, node: QueryNode) -> tuple[str, ...]:
        """Return the rarest necessary terms of a query; ``(EVERY_ROW,)`` if none are known."""
        found = self._rarest(node)
        return (EVERY_ROW,) if found is None else tuple(dict.fromkeys(found[1]))

    def _rarest(self, node: QueryNode) -> Terms | None:
        if isinstance(node, Condition):
            known_sets = [(self._share(terms), terms) for terms in self.sets.of(node)]
            return min(known_sets, default=None)
        if isinstance(node, AllOf):
            there = [found for part in node.parts if (found := self._rarest(part))]
            rarest = min(there, default=None)
            if rarest is None or rarest[0] <= self.queries * _FREQUENT_PER_QUERY:
                return rarest
            return self._paired(node, there) or rarest
        if isinstance(node, AnyOf):
            return self._rarest_of_any(node)
        return None

    def _rarest_of_any(self, node: AnyOf) -> Terms | None:
        parts = [self._rarest(part) for part in node.parts]
        known = sorted(part for part in parts if part is not None)
        needed = len(parts) - node.count + 1
        if len(known) < needed:
            return None
        taken = known[:needed]
        return sum(share for share, _ in taken), tuple(term for _, terms in taken for term in terms)

    def _paired(self, node: AllOf, there: list[Terms]) -> Terms | None:
        """Return pairs of the rarest terms and the cells of an area, where all of both must be true."""
        areas = [cells for part in node.parts if (cells := _pair_cells(part))]
        fit = [found for found in there if _fit_pairs(found[1])]
        if not areas or not fit:
            return None
        share, terms = min(fit)
        pairs = (pair_key(cell, term) for term in terms for cell in min(areas, key=len))
        return share * _PAIRED_SHARE, tuple(pairs)

    def _share(self, terms: tuple[str, ...]) -> float:
        return sum(
            self.queries_with.get(term, 0) + _COMMON[_kind(term)] / len(term) for term in terms
        )


def _pair_cells(node: QueryNode) -> tuple[str, ...]:
    """Return the cells of an area that terms are paired with; empty where it is none, or too large to leave out much."""
    cells = _cells(node, _PAIR_CELLS_MAX) if isinstance(node, Condition) else ()
    level = int(cells[0].split(CELL_KIND, 1)[1].split("/", 1)[0]) if cells else 0
    return cells if level in PAIR_LEVELS else ()


def _fit_pairs(terms: tuple[str, ...]) -> bool:
    return len(terms) <= _PAIR_TERMS_MAX and {*map(_kind, terms)} <= {TERM_KIND, VALUE_KIND}


# Of terms that equally many queries have: values are more common than words, and few letters than cells.
_COMMON = {TERM_KIND: 1.0, BEGINNING_KIND: 4.0, VALUE_KIND: 8.0, CELL_KIND: 2.0}


def _kind(term: str) -> str:
    return term.lstrip("0123456789")[0]
