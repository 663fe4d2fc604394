"""The exact test of candidates: whether a row matches a query, for many pairs of both at once.

Each condition of a kind is looked at for all pairs together; then the conditions are combined for all pairs of
one shape together. What must be found in text for one condition (phrases, beginnings, expressions) or is of
another length for each (polygons) is found once for each distinct condition, in all rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.search.conditions import (
    EXISTS,
    INSIDE,
    NEAR,
    PATTERN,
    PHRASE,
    PREFIX,
    RANGE,
    SEPARATOR,
    TERM,
)
from millstream.kernels.search.documents import Documents, term_keys
from millstream.kernels.search.geography import inside, may_be_near, near
from millstream.kernels.search.language import whole_word
from millstream.kernels.search.necessary_terms import term_key
from millstream.kernels.search.stored_conditions import StoredConditions

_NO_TERM, _NOT_LOOKED_UP = -1, -2
_COSTS = np.zeros(8, np.int64)  # by kind: what to test first
_COSTS[[RANGE, EXISTS, NEAR, TERM]] = 0, 0, 1, 2
_COSTS[[INSIDE, PHRASE, PREFIX, PATTERN]] = 3
_TRUTHS_MAX = 2_000_000  # of conditions, and of what combines them, at a time: some 150 MB


@dataclass(frozen=True)
class QueryVerifier:
    """Tests pairs of the documents of a batch and some queries."""

    documents: Documents
    conditions: StoredConditions

    def matches(self, doc: Int64s, query: Int64s) -> Bools:
        """Return which pairs match: numbers of documents and of queries."""
        found = self._shape_is_all[self.conditions.shape_of[query]]
        every = np.flatnonzero(found)
        found[every] = self._have_all(doc[every], query[every])
        others = np.ones(len(doc), np.bool_)
        others[every] = False
        rest = np.flatnonzero(others)
        # By query: what is found once for each condition is then wanted in one part, or two.
        order = rest[np.lexsort((query[rest], self.conditions.shape_of[query[rest]]))]
        sizes = self._shape_sizes[self.conditions.shape_of[query[order]]]
        for first, end in parts_of(sizes, _TRUTHS_MAX):
            at = order[first:end]
            found[at] = self._matches(doc[at], query[at])
        return found

    def _have_all(self, doc: Int64s, query: Int64s) -> Bools:
        """Return which pairs match, of queries all of whose conditions must be true: the cheapest first, of what is left then."""
        left = np.arange(len(doc))
        starts, counts = self.conditions.starts, np.diff(self.conditions.starts)
        number = 0
        found = np.zeros(len(doc), np.bool_)
        while len(left):
            is_over = counts[query[left]] == number
            found[left[is_over]] = True
            left = left[~is_over]
            condition = self._by_cost[starts[query[left]] + number]
            left = left[self.truth(doc[left], condition)]
            number += 1
        return found

    @cached_property
    def _by_cost(self) -> Int64s:
        """The conditions, those of each query in the order of what it costs to test them."""
        of_query = np.repeat(
            np.arange(len(self.conditions.shape_of)), np.diff(self.conditions.starts)
        )
        return np.lexsort((_COSTS[self.conditions.kinds], of_query))

    def _matches(self, doc: Int64s, query: Int64s) -> Bools:
        found = np.zeros(len(doc), np.bool_)
        of_query = self.conditions.shape_of[query]
        order = np.argsort(of_query, kind="stable")
        bounds = np.searchsorted(of_query[order], np.arange(len(self.conditions.shapes) + 1))
        truths = self._truths(doc[order], query[order])
        at = 0
        for number, shape in enumerate(self.conditions.shapes):
            mine = order[bounds[number] : bounds[number + 1]]
            if not len(mine):
                continue
            words = shape.split()
            width = words.count("c")
            rows = truths[at : at + width * len(mine)].reshape(len(mine), width)
            at += width * len(mine)
            found[mine] = _combined(words, rows)
        return found

    @cached_property
    def _shape_is_all(self) -> Bools:
        """Of which shapes all conditions must be true."""
        shapes = [shape.split() for shape in self.conditions.shapes]
        return np.array([bool(one) and all(word[0] in "c*&" for word in one) for one in shapes])

    @cached_property
    def _shape_sizes(self) -> Int64s:
        return np.array([len(shape.split()) for shape in self.conditions.shapes], np.int64)

    def _truths(self, doc: Int64s, query: Int64s) -> Bools:
        """Return whether each condition of each pair is true, pair by pair."""
        starts = self.conditions.starts
        counts = starts[query + 1] - starts[query]
        ends = np.cumsum(counts)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
        return self.truth(np.repeat(doc, counts), np.repeat(starts[query], counts) + within)

    def truth(self, doc: Int64s, condition: Int64s) -> Bools:
        """Return for each pair of a document and a condition, by its number, whether it is true."""
        truth = np.zeros(len(doc), np.bool_)
        kinds, tests = self.conditions.kinds[condition], self._tests
        for kind in np.flatnonzero(np.bincount(kinds)).tolist():
            at = np.flatnonzero(kinds == kind)
            truth[at] = tests[kind](doc[at], condition[at])
        return truth

    @property
    def _tests(self) -> dict[int, Callable[[Int64s, Int64s], Bools]]:
        # Not kept: what refers to itself, and to all of a batch, stays in memory until Python looks for such circles.
        return {
            TERM: self._have_term,
            PHRASE: self._have_tokens,
            PREFIX: self._have_tokens,
            PATTERN: self._have_tokens,
            RANGE: self._in_range,
            EXISTS: lambda doc, at: self.documents.present[self.conditions.fields[at], doc],
            NEAR: self._near,
            INSIDE: self._inside,
        }

    # ── kinds of conditions that are looked at together ─────────────────────────────────────

    def _have_term(self, doc: Int64s, condition: Int64s) -> Bools:
        terms = self._terms_of(condition)
        wanted = doc * max(1, len(self.documents.terms.texts)) + terms
        there = self.documents.doc_terms
        if not len(there):
            return np.zeros(len(doc), np.bool_)
        at = np.minimum(np.searchsorted(there, wanted), len(there) - 1)
        found: Bools = (there[at] == wanted) & (terms != _NO_TERM)
        return found

    def _terms_of(self, condition: Int64s) -> Int64s:
        """Return the numbers of the terms of conditions of one term; what is looked up once is remembered."""
        new = np.flatnonzero(np.bincount(condition[self._terms[condition] == _NOT_LOOKED_UP]))
        if len(new):
            table = pl.DataFrame(
                [pl.Series("field", self.conditions.fields[new]), self.conditions.texts(new)]
            )
            self._terms[new] = self.documents.terms.numbers_of(term_keys(table, "text"))
        return self._terms[condition]

    @cached_property
    def _terms(self) -> Int64s:
        return np.full(len(self.conditions.kinds), _NOT_LOOKED_UP, np.int64)

    def _in_range(self, doc: Int64s, condition: Int64s) -> Bools:
        low, high = self.conditions.low[condition], self.conditions.high[condition]
        field = self.conditions.fields[condition]
        values = self.documents.values[field, doc]
        found: Bools = self.documents.comparable[field, doc] & (low <= values) & (values <= high)
        return found

    def _near(self, doc: Int64s, condition: Int64s) -> Bools:
        found = np.zeros(len(doc), np.bool_)
        field = self.conditions.fields[condition]
        first = self.conditions.number_starts[condition]
        numbers = self.conditions.numbers
        for number in np.flatnonzero(np.bincount(field)).tolist():
            at = np.flatnonzero((field == number) & self.documents.present[field, doc])
            latitudes, longitudes = self.documents.points[number]
            # What is too far to the north or south is known without its distance.
            may_be = may_be_near(latitudes[doc[at]], numbers[first[at]], numbers[first[at] + 2])
            at = at[may_be]
            circles = numbers[first[at][:, None] + np.arange(3)]
            found[at] = near(latitudes[doc[at]], longitudes[doc[at]], circles)
        return found

    # ── kinds that are looked at one by one ─────────────────────────────────────────────────

    def _inside(self, doc: Int64s, condition: Int64s) -> Bools:
        found = np.zeros(len(doc), np.bool_)
        for number, at in _groups(condition):
            field = int(self.conditions.fields[number])
            mine = at[self.documents.present[field, doc[at]]]
            latitudes, longitudes = self.documents.points[field]
            polygon = self.conditions.numbers_of(number)
            found[mine] = inside(latitudes[doc[mine]], longitudes[doc[mine]], polygon)
        return found

    def _have_tokens(self, doc: Int64s, condition: Int64s) -> Bools:
        found = np.zeros(len(doc), np.bool_)
        for number, at in _groups(condition):
            has = np.zeros(self.documents.rows.height, np.bool_)
            has[self.documents.token_docs[self.tokens(number)]] = True
            found[at] = has[doc[at]]
        return found

    def tokens(self, condition: int) -> Int64s:
        """Return the tokens of all documents for which a condition on text is true; of a phrase, where it begins."""
        kind, field = int(self.conditions.kinds[condition]), int(self.conditions.fields[condition])
        text = self.conditions.text(condition)
        if kind == PREFIX:
            return self._with_prefix(field, text)
        if kind == PATTERN:
            return self._with_pattern(field, text)
        terms = [text] if kind == TERM else text.split(SEPARATOR)
        return phrase_starts(self.documents, field, terms)

    def _with_prefix(self, field: int, text: str) -> Int64s:
        words = self.documents.words
        return words.tokens(*words.beginning_with(term_key(field, text)))

    def _with_pattern(self, field: int, text: str) -> Int64s:
        expression, begin = text.rsplit(SEPARATOR, 1)
        words, own = self.documents.words, term_key(field, "")
        first, end = words.beginning_with(own + begin)
        texts = words.texts[first:end].str.slice(len(own))
        matching = np.flatnonzero(texts.str.contains(whole_word(expression)).to_numpy()) + first
        tokens = [words.tokens(number, number + 1) for number in matching.tolist()]
        return np.concatenate([np.empty(0, np.int64), *tokens])


def phrase_starts(documents: Documents, field: int, terms: list[str]) -> Int64s:
    """Return the tokens of a field at which some terms stand one behind the other."""
    numbers = documents.terms.numbers_of(pl.Series([term_key(field, term) for term in terms]))
    if (numbers == _NO_TERM).any():
        return np.empty(0, np.int64)
    of_token = documents.terms.of_token
    counts = [len(documents.terms.tokens(int(one), int(one) + 1)) for one in numbers]
    rarest = int(np.argmin(counts))
    starts = documents.terms.tokens(int(numbers[rarest]), int(numbers[rarest]) + 1) - rarest
    starts = starts[(starts >= 0) & (starts + len(terms) <= len(of_token))]
    for offset, number in enumerate(numbers.tolist()):
        starts = starts[of_token[starts + offset] == number]
    last = starts + len(terms) - 1
    # Terms are those of the field, so these are the words of one row if its number is the same.
    found: Int64s = starts[documents.token_docs[starts] == documents.token_docs[last]]
    return found


def parts_of(weights: Int64s, most: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of parts that weigh at most so much; what weighs more alone is one part."""
    ends = np.cumsum(weights)
    first = 0
    while first < len(ends):
        limit = most + (int(ends[first - 1]) if first else 0)
        end = max(first + 1, int(np.searchsorted(ends, limit, side="right")))
        yield first, end
        first = end


def _groups(numbers: Int64s) -> Iterator[tuple[int, Int64s]]:
    """Yield each number that occurs, and where."""
    order = np.argsort(numbers, kind="stable")
    there, starts = np.unique(numbers[order], return_index=True)
    yield from zip(there.tolist(), np.split(order, starts[1:]), strict=True)


def _combined(shape: list[str], truths: Bools) -> Bools:
    """Return what a shape makes of the truth of its conditions: a row for each pair."""
    stack: list[Bools] = []
    used = 0
    for word in shape:
        if word == "c":
            stack.append(truths[:, used])
            used += 1
        elif word == "*":
            stack.append(np.ones(len(truths), np.bool_))
        elif word == "!":
            stack.append(~stack.pop())
        else:
            stack.append(_joined(word, stack))
    return stack[0]


def _joined(word: str, stack: list[Bools]) -> Bools:
    """Take the parts of a combination from the stack, and return what it gives."""
    count = int(word.lstrip("&").rsplit("/", 1)[-1])
    least = count if word[0] == "&" else int(word.split("/", 1)[0])
    parts = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    found: Bools = np.sum(parts, axis=0) >= least
    return found
