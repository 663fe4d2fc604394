"""Which rows queries match, and which are tried, against every query on every row in plain Python."""

from __future__ import annotations

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from percolate_model import matches, text_of
from percolate_strategies import queries, rows

from millstream.kernels.search.compiled_queries import (
    NECESSARY,
    QUERY_ERROR,
    QueryLanguage,
    compile_queries,
)
from millstream.kernels.search.documents import Documents, hash_terms
from millstream.kernels.search.fields import SearchField
from millstream.kernels.search.verify import QueryVerifier, StoredConditions

COLUMNS = {
    "title": pl.String(),
    "body": pl.String(),
    "count": pl.Int64(),
    "price": pl.Float64(),
    "lat": pl.Float64(),
    "lon": pl.Float64(),
}
LANGUAGE = QueryLanguage(
    (
        SearchField("title", ("title",), "text", pl.String(), "standard"),
        SearchField("body", ("body",), "text", pl.String(), "standard"),
        SearchField("count", ("count",), "number", pl.Int64()),
        SearchField("price", ("price",), "number", pl.Float64()),
        SearchField("place", ("lat", "lon"), "point", pl.Float64()),
    ),
    (0, 1),
)


def run(found_rows, texts):
    """Return the pairs that match, and those that are tried."""
    compiled = compile_queries(pl.Series(texts, dtype=pl.String), LANGUAGE)
    assert compiled[QUERY_ERROR].null_count() == len(texts), compiled[QUERY_ERROR].to_list()
    documents = Documents(pl.DataFrame(found_rows, schema=COLUMNS), LANGUAGE.fields)
    pairs = [(doc, query) for doc in range(len(found_rows)) for query in range(len(texts))]
    doc, query = (pl.Series([pair[n] for pair in pairs]).to_numpy() for n in (0, 1))
    verified = QueryVerifier(documents, StoredConditions.of(compiled)).matches(doc, query)
    has = {
        pair
        for docs, terms in documents.index_terms(7)
        for pair in zip(docs.tolist(), terms.tolist(), strict=True)
    }
    wanted = [set(hash_terms(pl.Series(terms), 7).tolist()) for terms in compiled[NECESSARY]]
    tried = {(d, q) for d, q in pairs if any((d, term) in has for term in wanted[q])}
    return {pair for pair, true in zip(pairs, verified.tolist(), strict=True) if true}, tried


@settings(max_examples=some(150), deadline=None)
@given(st.lists(rows, min_size=1, max_size=5), st.lists(queries, min_size=1, max_size=8))
def test_rows_match_as_by_trying_every_query_and_all_matches_are_tried(found_rows, trees):
    matching, tried = run(found_rows, [text_of(tree) for tree in trees])
    assert matching == {
        (doc, query)
        for doc, row in enumerate(found_rows)
        for query, tree in enumerate(trees)
        if matches(tree, row)
    }
    assert matching <= tried


NONE = dict.fromkeys(COLUMNS)
HERE, NEARBY, FAR = (
    {**NONE, "title": "abc cab", "count": 7, "lat": lat, "lon": 13.4} for lat in (52.5, 52.51, 53.5)
)


@pytest.mark.parametrize(
    ("text", "tried_far"),
    [
        ("title:abc place:near(52.5 13.4 2km)", False),
        ("count:7 place:inside(52.4 13.3, 52.6 13.3, 52.5 13.5)", False),
        ("title:(abc OR nothing) place:near(52.5 13.4 2km)", False),
        ("(title:abc place:near(52.5 13.4 2km)) OR title:nothing", False),
        ("title:abc place:near(52.5 13.4 9000km)", True),  # no few cells cover it
        ("title:abc*", True),
        ("title:abc NOT place:near(52.5 13.4 2km)", True),
    ],
)
def test_of_rows_with_a_word_only_those_in_the_area_are_tried(text, tried_far):
    matching, tried = run([HERE, NEARBY, FAR], [text])
    assert ((2, 0) in tried) == tried_far
    assert matching <= tried
    assert {(0, 0), (1, 0)} <= tried
