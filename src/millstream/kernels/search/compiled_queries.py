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
from dataclasses import dataclass, replace

import polars as pl

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
from millstream.kernels.search.necessary_terms import all_terms, necessary_terms

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
    queries_with: Counter[str] = Counter()
    for query in queries:
        if not isinstance(query, QueryError):
            queries_with.update(set(all_terms(query)))
    rows = [
        _row(query, text, queries_with)
        for query, text in zip(queries, texts.to_list(), strict=True)
    ]
    return pl.DataFrame(rows, schema=_COMPILED, orient="row")


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


def _row(
    query: QueryNode | QueryError, text: str | None, queries_with: Mapping[str, int]
) -> tuple[object, ...]:
    if isinstance(query, QueryError):
        return _reason(query, text or ""), None, None, None
    conditions = [
        (one.kind, one.field, one.text, one.low, one.high, list(one.numbers))
        for one in conditions_of(query)
    ]
    named = [dict(zip(CONDITION_TYPE.to_schema(), one, strict=True)) for one in conditions]
    shape = " ".join(_program(query))
    return None, shape, named, list(necessary_terms(query, queries_with))


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
