"""Queries as columns: what is stored of each, so that many are verified at once.

A query is its *shape*, how conditions are combined, and its conditions in their order. Queries that differ only in
words and numbers have one shape. A shape is a program for a stack, in the order of the conditions:

======  =========================================
word    puts on the stack
======  =========================================
``c``   whether the next condition is true
``*``   true
``!``   the opposite of the last
``&n``  whether the last n are all true
``m/n`` whether m or more of the last n are true
======  =========================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import polars as pl
import pyarrow as pa

from millstream.kernels.search.analyzers import folded, normalized, raw_words, terms_of
from millstream.kernels.search.conditions import (
    PHRASE,
    SEPARATOR,
    TERM,
    WORDS,
    AllOf,
    AnyOf,
    Condition,
    Everything,
    Not,
    QueryNode,
)
from millstream.kernels.search.fields import SearchField
from millstream.kernels.search.language import QueryError, parse
from millstream.kernels.search.necessary_terms import QueryTerms, TermSets, all_terms

QUERY_ERROR = "__query_error"  # String: why a text is no query; else null
SHAPE = "__shape"  # String
CONDITIONS = "__conditions"  # List(Struct): see CONDITION_TYPE
NECESSARY = "__necessary"  # List(String): the terms by which it is indexed

CONDITION_TYPE = pl.Struct(
    {
        "kind": pl.UInt8(),
        "field": pl.UInt16(),
        "text": pl.String(),
        "low": pl.Int64(),
        "high": pl.Int64(),
        "numbers": pl.List(pl.Float64()),
    }
)
STORED: Mapping[str, pl.DataType] = {SHAPE: pl.String(), CONDITIONS: pl.List(CONDITION_TYPE)}
_COMPILED: Mapping[str, pl.DataType] = {
    QUERY_ERROR: pl.String(),
    **STORED,
    NECESSARY: pl.List(pl.String()),
}
_SHOWN = 30  # characters of a query around an error
_SAID_MAX = 1000  # characters of what is wrong


@dataclass(frozen=True)
class QueryLanguage:
    """The fields that queries may name, and the numbers of those that are meant where none is named."""

    fields: tuple[SearchField, ...]
    defaults: tuple[int, ...]


def compile_queries(texts: pl.Series, language: QueryLanguage) -> pl.DataFrame:
    """Return the columns of queries, a row for each text; one that is no query has an error. Null is one."""
    parsed: list[QueryNode | QueryError] = [_parsed(text, language) for text in texts.to_list()]
    analyze = _Analysis.of((one for one in parsed if not isinstance(one, QueryError)), language)
    queries: list[QueryNode | QueryError] = [_analyzed(one, analyze) for one in parsed]
    sets = TermSets()
    queries_with: Counter[str] = Counter()
    for query in queries:
        if not isinstance(query, QueryError):
            queries_with.update(set(all_terms(query, sets)))
    terms = QueryTerms(sets, queries_with, len(queries))
    made = _Columns()
    for query, text in zip(queries, texts.to_list(), strict=True):
        if isinstance(query, QueryError):
            made.add_error(_reason(query, text or ""))
        else:
            made.add(query, terms.of(query))
    return made.frame()


def _parsed(text: str | None, language: QueryLanguage) -> QueryNode | QueryError:
    if text is None:
        return QueryError("it is null; *:* is every row", 0)
    try:
        return parse(text, language.fields, language.defaults)
    except QueryError as error:
        return error


def _analyzed(query: QueryNode | QueryError, analysis: _Analysis) -> QueryNode | QueryError:
    if isinstance(query, QueryError):
        return query
    try:
        return analysis.applied(query)
    except QueryError as error:
        return error


@dataclass
class _Columns:
    """The columns of queries while they are made: of lists all values, and where those of each query end."""

    errors: list[str | None] = field(default_factory=list)
    shapes: list[str | None] = field(default_factory=list)
    terms: list[str] = field(default_factory=list)
    term_ends: list[int] = field(default_factory=lambda: [0])
    conditions: list[Condition] = field(default_factory=list)
    condition_ends: list[int] = field(default_factory=lambda: [0])

    def add_error(self, reason: str) -> None:
        """Add a text that is no query."""
        self._add(reason, None)

    def add(self, query: QueryNode, terms: Sequence[str]) -> None:
        """Add a query, and the terms by which it is indexed."""
        self.conditions += conditions_of(query)
        self.terms += terms
        self._add(None, " ".join(_program(query)))

    def _add(self, error: str | None, shape: str | None) -> None:
        self.errors.append(error)
        self.shapes.append(shape)
        self.term_ends.append(len(self.terms))
        self.condition_ends.append(len(self.conditions))

    def frame(self) -> pl.DataFrame:
        """Return the columns."""
        wrong = pa.array([one is not None for one in self.errors], pa.bool_())
        terms = _lists(self.term_ends, pa.array(self.terms, pa.large_string()), wrong)
        conditions = _lists(self.condition_ends, self._structs(), wrong)
        columns: Mapping[str, pl.Series] = {
            QUERY_ERROR: pl.Series(self.errors, dtype=pl.String),
            SHAPE: pl.Series(self.shapes, dtype=pl.String),
            CONDITIONS: pl.Series(conditions),
            NECESSARY: pl.Series(terms),
        }
        return pl.DataFrame([columns[name].alias(name).cast(of) for name, of in _COMPILED.items()])

    def _structs(self) -> pa.Array:
        every = self.conditions
        ends = list(accumulate((len(one.numbers) for one in every), initial=0))
        numbers = pa.array([number for one in every for number in one.numbers], pa.float64())
        parts = {
            "kind": pa.array([one.kind for one in every], pa.uint8()),
            "field": pa.array([one.field for one in every], pa.uint16()),
            "text": pa.array([one.text for one in every], pa.large_string()),
            "low": pa.array([one.low for one in every], pa.int64()),
            "high": pa.array([one.high for one in every], pa.int64()),
            "numbers": _lists(ends, numbers),
        }
        return pa.StructArray.from_arrays([*parts.values()], [*parts])


def _lists(ends: Sequence[int], values: pa.Array, missing: pa.Array | None = None) -> pa.Array:
    """Return lists that stand one behind the other in an array of values."""
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), values, mask=missing)


def _reason(error: QueryError, text: str) -> str:
    at = error.position
    near = text[max(0, at - _SHOWN // 2) : at + _SHOWN // 2]
    where = f", near {near!r}" if near else ""
    said = str(error)  # in which may be a value of any length
    said = said if len(said) <= _SAID_MAX else f"{said[:_SAID_MAX]}…"
    return f"the query is wrong at character {at + 1}{where}: {said}"


# ── words become terms ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Analysis:
    """The terms of all words of some queries: by analyzer and text, found in one go."""

    language: QueryLanguage
    terms: Mapping[tuple[str, str], list[str]]

    @classmethod
    def of(cls, queries: Iterator[QueryNode], language: QueryLanguage) -> _Analysis:
        texts: dict[str, dict[str, None]] = {}
        for query in queries:
            for one in conditions_of(query):
                if one.kind == WORDS:
                    analyzer = language.fields[one.field].analyzer
                    texts.setdefault(analyzer, {})[one.text] = None
        found = {
            (analyzer, text): terms
            for analyzer, wanted in texts.items()
            for text, terms in zip(wanted, _terms(list(wanted), analyzer), strict=True)
        }
        return cls(language, found)

    def applied(self, node: QueryNode) -> QueryNode:
        """Return a query with terms and phrases.

        Raises:
            QueryError: a text has no word.
        """
        if isinstance(node, Condition):
            return self._condition(node)
        if isinstance(node, Not):
            return Not(self.applied(node.part))
        if isinstance(node, AllOf):
            return AllOf(tuple(map(self.applied, node.parts)))
        if isinstance(node, AnyOf):
            return AnyOf(node.count, tuple(map(self.applied, node.parts)))
        return node

    def _condition(self, one: Condition) -> Condition:
        if one.kind != WORDS:
            return one
        terms = self.terms[self.language.fields[one.field].analyzer, one.text]
        if not terms:
            raise QueryError(f"{one.text!r} has no word that could be found", one.position)
        kind = TERM if len(terms) == 1 else PHRASE
        return replace(one, kind=kind, text=SEPARATOR.join(terms))


def _terms(texts: list[str], analyzer: str) -> list[list[str]]:
    """Return the terms of each text."""
    given = pl.Series(texts, dtype=pl.String)
    words = raw_words(normalized(given, analyzer), analyzer)
    flat = pl.DataFrame({"text": range(len(texts)), "word": words}).explode("word").drop_nulls()
    terms = terms_of(folded(flat["word"], analyzer), analyzer)
    found: list[list[str]] = [[] for _ in texts]
    for text, term in zip(flat["text"].to_list(), terms.to_list(), strict=True):
        found[text].append(term)
    return found


# ── shapes ──────────────────────────────────────────────────────────────────────────────────────


def conditions_of(node: QueryNode) -> Iterator[Condition]:
    """Yield the conditions of a query, in the order of its shape."""
    if isinstance(node, Condition):
        yield node
    elif isinstance(node, Not):
        yield from conditions_of(node.part)
    elif isinstance(node, (AllOf, AnyOf)):
        for part in node.parts:
            yield from conditions_of(part)


def _program(node: QueryNode) -> Iterator[str]:
    if isinstance(node, Condition):
        yield "c"
    elif isinstance(node, Everything):
        yield "*"
    elif isinstance(node, Not):
        yield from _program(node.part)
        yield "!"
    else:
        for part in node.parts:
            yield from _program(part)
        count = len(node.parts)
        yield f"&{count}" if isinstance(node, AllOf) else f"{node.count}/{count}"


def positive_conditions(shape: Sequence[str]) -> list[bool]:
    """Return for each condition of a shape whether it is not under an odd number of NOTs."""
    stack: list[list[bool]] = []
    for word in shape:
        if word == "c":
            stack.append([True])
        elif word == "*":
            stack.append([])
        elif word == "!":
            stack.append([not positive for positive in stack.pop()])
        else:
            count = int(word.lstrip("&").rsplit("/", 1)[-1])
            parts = stack[len(stack) - count :]
            del stack[len(stack) - count :]
            stack.append([positive for part in parts for positive in part])
    return stack[0]
