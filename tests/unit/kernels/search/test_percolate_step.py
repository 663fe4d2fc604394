"""Stored searches in a pipeline: published cases, and histories of queries against plain Python.

A query is in force from its event time until the next row of its key, in event time; of equal times the one that is
later in the log. One that its partition's watermark had passed counts from that watermark on.
"""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from weakref import ref

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from percolate_model import matches, text_of
from percolate_strategies import queries as random_queries
from percolate_strategies import rows as random_rows

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, UserCodeError
from millstream.kernels.search import operator, verify
from millstream.kernels.search.verify import QueryVerifier
from millstream.testing import Watermark

START = datetime(2026, 1, 1, tzinfo=UTC)
END = START + timedelta(days=1)


@dataclass
class Document:
    id: int
    title: str | None
    body: str | None
    count: int | None
    price: float | None
    lat: float | None
    lon: float | None
    at: datetime


@dataclass
class Query:
    key: str
    query: str
    since: datetime
    gone: bool = False


def at(seconds):
    return START + timedelta(seconds=seconds)


def document(number, seconds=1, **values):
    none = dict.fromkeys(["title", "body", "count", "price", "lat", "lon"])
    return Document(number, **{**none, **values}, at=at(seconds))


def app_with(delay=0, *, late="drop", **options):
    app = ms.App("searches", log="unused")
    documents = app.topic("documents", Document, key="id").stream(
        time="at", watermark=ms.watermark("1 hour", idle=None), late=late
    )
    stored = app.topic("queries", Query, key="key").table(
        time="since",
        watermark=ms.watermark(f"{delay} seconds", idle=None),
        deleted=pl.col("gone"),
    )
    named = {"points": {"place": ("lat", "lon")}, **options}
    found = documents.percolate(stored.drop("gone"), "query", **named)
    found.view("out", key=("id", "key"))
    return app


def inputs_of(documents, queries):
    return {
        "documents": [*documents, Watermark("documents", at=END)],
        "queries": [*queries, Watermark("queries", at=END)],
    }


def found(documents, queries, **ways):
    options = ways.pop("options", {})
    out = testing.run(app_with(**options), inputs_of(documents, queries), **ways)
    return out["out"].select("id", "key").sort("id", "key").rows(), out


WHITESPACE = {"analyzers": {"title": "whitespace"}, "default": "title"}
# Lucene, lucene/monitor/src/test: TestTermPresearcher and PresearcherTestBase: the queries, the texts, and what matches.
PUBLISHED = {
    "terms, and a phrase": (
        {"1": "furble", "2": "document", "3": '"a document"'},
        ["this is a test document"],
        [(0, "2")],
    ),
    "a term that must not be there": (
        {"1": "document -test"},
        ["this is a test document", "weeble sclup test"],
        [],
    ),
    "a regular expression": ({"1": "/hell./"}, ["hello"], [(0, "1")]),
    "every row": ({"1": "*:*"}, ["wibble"], [(0, "1")]),
    "every row but": ({"1": "*:* -foo"}, ["bar", "foo"], [(0, "1")]),
    "another field": ({"1": "body:test"}, ["test"], []),
    "no queries": ({}, ["test"], []),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_cases_match_what_they_say(case):
    texts, titles, meant = PUBLISHED[case]
    documents = [document(number, title=title) for number, title in enumerate(titles)]
    queries = [Query(key, text, at(0)) for key, text in texts.items()]
    assert found(documents, queries, options=WHITESPACE)[0] == meant


def test_a_row_that_lacks_a_field_is_in_no_range_of_it_and_passes_not():
    queries = [Query("range", "count:<5", at(0)), Query("not", "NOT count:<5", at(0))]
    assert found([document(0)], queries)[0] == [(0, "not")]


def test_a_query_is_in_force_from_its_time_until_it_is_changed_or_removed():
    queries = [
        Query("q", "old", at(10)),
        Query("q", "new", at(20)),
        Query("q", "", at(30), gone=True),
    ]
    documents = [document(n, n, title="old new") for n in (9, 10, 29, 30)]
    documents += [document(n, n, title="old") for n in (19, 20)]
    assert [number for number, _ in found(documents, queries)[0]] == [10, 19, 29]


def test_what_is_no_query_is_a_dead_letter_with_its_place_and_the_query_before_it_stays():
    queries = [Query("q", "good", at(0)), Query("q", "title:(good OR", at(5))]
    many = [Query(f"bad {n}", "(", at(0)) for n in range(150)]  # all of a table may be wrong
    rows, out = found([document(1, 9, title="good")], [*many, *queries], partitions=1)
    assert (rows, out.dead.height) == ([(1, "q")], 151)
    letter = out.dead.filter(pl.col("offset") == 151).row(0, named=True)
    assert letter["topic"] == "queries"
    assert letter["reason"] == (
        "the query is wrong at character 15, near 'title:(good OR': it ends where a word or condition is expected"
    )


def test_what_is_no_query_stops_the_job_if_that_is_said():
    with pytest.raises(UserCodeError, match="wrong at character 2, near"):
        found([document(1)], [Query("q", "(", at(0))], options={"on_error": "stop"})


def test_the_fragment_shows_the_words_that_matched_and_not_those_under_not():
    title = f"{'x ' * 90}Cats and dogs, never a cat nor a bird{' y' * 90}"
    queries = [Query("q", 'cat* OR "a bird" OR NOT dogs OR NOT NOT nor', at(0))]
    _, out = found([document(1, title=title)], queries, options={"highlight": "shown"})
    shown = out["out"]["shown"][0]
    marked = "<em>Cats</em> and dogs, never a <em>cat</em> <em>nor</em> <em>a</em> <em>bird</em>"
    assert marked in shown
    plain = shown.replace("<em>", "").replace("</em>", "")
    assert plain in title
    assert len(plain) <= 150


SPELLINGS = {
    "a sigma at the end of a beginning": ("ΟΔΟΣ*", ["ΟΔΟΣ", "ΟΔΟΣΗΜΑ", "οδός"], [0, 1]),
    "a sigma before a wildcard": ("ΟΔΟΣ?Δ", ["ΟΔΟΣΗΔ", "ΟΔΟΣ"], [0]),
    "a sigma in an expression": ("/οδος/", ["ΟΔΟΣ", "οδοσ", "οδοσημα"], [0, 1]),
    "an apostrophe in an expression": ("/l\u2019eau/", ["l'eau", "L\u2019EAU", "leau"], [0, 1]),
    "a bound of more than 28 digits": (f"count:<1.{'0' * 40}1", [1, 2], [0]),
    "a nought with an exponent": ("count:0e50", [0, -1], [0]),
    "the edges of the type": (
        "count:[-9223372036854775808 TO 9223372036854775807}",
        [-(2**63), 2**63 - 1],
        [0],
    ),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_a_query_matches_whatever_way_it_and_the_value_are_written(case):
    text, values, meant = SPELLINGS[case]
    column = "count" if isinstance(values[0], int) else "title"
    documents = [document(number, **{column: value}) for number, value in enumerate(values)]
    rows, out = found(documents, [Query("q", text, at(0))])
    assert out.dead.is_empty()
    assert [number for number, _ in rows] == meant


def test_a_beginning_is_that_of_a_word_with_the_last_character_behind_it():
    exact = {"analyzers": {"title": "keyword"}}
    rows, _ = found(
        [document(1, title="ab\U0010ffffc")], [Query("q", "title:ab*", at(0))], options=exact
    )
    assert rows == [(1, "q")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("?" * 20_000, "the word with * or ? is too long: Compiled regex exceeds size limit"),
        ("/a{1000}{1000}{1000}/", "the regular expression is wrong: Compiled regex exceeds"),
        ("/a(?=b)/", "the regular expression is wrong: look-around"),
        ("at:20260131", "'20260131' is not a time, to the microsecond. Write it as"),
        ("at:>2026-01-31T12:00:00.1234567Z", "is not a time, to the microsecond"),
        (
            "*:* " * 1025,
            "wrong at character 4097, near ':* *:* *:* *:* *:* ': it has more than 1024",
        ),
        (f"{'x' * 50_000}:y", "there is no field 'xxx"),
    ],
)
def test_what_could_not_be_tried_is_refused_shortly_before_it_is_stored(text, said):
    rows, out = found([document(1, title="a")], [Query("q", text, at(0)), Query("r", "a", at(0))])
    assert rows == [(1, "r")]
    reason = out.dead["reason"][0]
    assert said in reason
    assert len(reason) < 1200
    assert "This error occurred" not in reason


def test_rows_pairs_and_conditions_are_looked_at_a_few_at_a_time(monkeypatch):
    texts = ["NOT x", "*:*", "AT LEAST 2 OF (a, b, c)", "a b", "b* OR /c./ OR count:[1 TO 3]"]
    queries = [Query(str(number), text, at(0)) for number, text in enumerate(texts)]
    documents = [document(n, n, title="a b cc x"[: 2 * n], count=n) for n in range(6)]
    meant, _ = found(documents, queries)
    tried = []
    matches = QueryVerifier.matches
    monkeypatch.setattr(operator, "_TEXT_BYTES_MAX", 320)  # three rows
    monkeypatch.setattr(operator, "_PAIRS_MAX", 5)
    monkeypatch.setattr(verify, "_TRUTHS_MAX", 3)
    monkeypatch.setattr(
        QueryVerifier, "matches", lambda *given: tried.append(len(given[1])) or matches(*given)
    )
    rows, _ = found(documents, queries, partitions=1, batches=1)
    assert rows == meant
    assert len(rows) > 12
    assert len(tried) > 3
    assert max(tried) <= 5


def test_what_a_batch_is_tried_with_leaves_memory_with_the_batch(monkeypatch):
    """A circle of references would keep it until Python looks for circles, which it rarely does where numbers are in arrays."""
    tried = []
    matches = QueryVerifier.matches
    monkeypatch.setattr(
        QueryVerifier,
        "matches",
        lambda one, *given: tried.append(ref(one)) or matches(one, *given),
    )
    gc.collect()
    gc.disable()
    try:
        found([document(1, title="a b")], [Query("q", "a OR NOT b", at(0))])
        assert [one() for one in tried] == [None]
    finally:
        gc.enable()


def test_terms_of_a_language_are_its_stems():
    queries = [
        Query("stem", "run", at(0)),
        Query("word", "run*", at(0)),
        Query("other", "runs*", at(0)),
    ]
    documents = [document(1, title="Running"), document(2, title="runs")]
    english = {"analyzers": {"title": "english"}}
    assert found(documents, queries, options=english)[0] == [
        (1, "stem"),
        (1, "word"),
        (2, "other"),
        (2, "stem"),
        (2, "word"),
    ]


def test_late_rows_are_in_the_side_output_once():
    app = app_with(late="side", shards=4)
    rows = [document(1, 7200), Watermark("documents", at=at(7000)), document(2, 1)]
    out = testing.run(app, inputs_of(rows, [Query("q", "*:*", at(0))]))
    assert (out["out"]["id"].to_list(), out.late) == ([1], 1)


# ── histories ───────────────────────────────────────────────────────────────────────────────────

times = st.integers(0, 20)
histories = st.lists(
    st.tuples(times, st.sampled_from("abcde"), st.booleans(), random_queries), max_size=10
)


def in_force(history, delay):
    """Return of each version from which time on it counts. One partition."""
    since, watermark = [], None
    for time, *_ in history:
        is_late = watermark is not None and watermark > time
        since.append(watermark if is_late else time)
        watermark = time - delay if watermark is None else max(watermark, time - delay)
    return since


def expected(documents, history, delay):
    since = in_force(history, delay)
    for number, (time, row) in enumerate(documents):
        for key in "abcde":
            versions = [
                (version[0], n)
                for n, version in enumerate(history)
                if version[1] == key and since[n] <= time
            ]
            if versions:
                _, _, gone, tree = history[max(versions)[1]]
                if not gone and matches(tree, row):
                    yield number, key


@settings(max_examples=some(20), deadline=None)
@given(
    st.lists(st.tuples(times, random_rows), max_size=5),
    histories,
    st.sampled_from([0, 5]),
    st.sampled_from([1, 4, 7]),
    st.integers(0, 99),
)
def test_histories_of_queries_match_the_same_however_they_are_divided(
    given_rows, history, delay, shards, seed
):
    documents = [document(n, time, **row) for n, (time, row) in enumerate(given_rows)]
    queries = [Query(key, text_of(tree), at(time), gone) for time, key, gone, tree in history]
    rows, out = found(
        documents,
        queries,
        options={"delay": delay, "shards": shards},
        batches=1 + seed % 9,
        partitions=1,
        seed=seed,
        crash=seed % 3,
    )
    assert Counter(rows) == Counter(expected(given_rows, history, delay))
    assert out.dead.is_empty()


@settings(max_examples=some(20), deadline=None)
@given(
    st.lists(st.tuples(times, random_rows), max_size=6),
    st.lists(
        st.tuples(st.just(0), st.sampled_from("abcde"), st.just(False), random_queries), max_size=8
    ),
    st.sampled_from([1, 4, 7]),
    st.integers(0, 99),
)
def test_queries_in_several_partitions_match_the_same(given_rows, history, partitions, seed):
    documents = [document(n, time, **row) for n, (time, row) in enumerate(given_rows)]
    queries = [Query(key, text_of(tree), at(time)) for time, key, _, tree in history]
    rows, _ = found(
        documents,
        queries,
        options={"shards": 3},
        batches=1 + seed % 5,
        partitions=partitions,
        seed=seed,
        crash=seed % 2,
    )
    assert rows == sorted(expected(given_rows, history, 0))


# ── declarations ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"query": "key2"}, "key2"),
        ({"query": "since"}, "Name the column with the text"),
        ({"analyzers": {"count": "standard"}}, "Only text is analyzed"),
        ({"analyzers": {"titel": "standard"}}, "titel"),
        ({"points": {"title": ("lat", "lon")}}, "which is a column of the stream"),
        ({"points": {"place": ("lat", "title")}}, "Give degrees, as numbers"),
        ({"points": {"place": "lat"}}, "latitude and longitude"),
        ({"default": "count"}, "no column of text"),
        ({"highlight": "title"}, "title"),
        ({"shards": 0}, "shards"),
    ],
)
def test_a_declaration_that_does_not_fit_says_what_would(options, said):
    app = ms.App("searches", log="unused")
    documents = app.topic("documents", Document, key="id").stream(time="at")
    stored = app.table("queries", Query, key="key", time="since")
    with pytest.raises(ConfigError, match=said):
        documents.percolate(stored, options.pop("query", "query"), **options)


def test_only_a_table_whose_versions_are_known_has_queries():
    app = ms.App("searches", log="unused")
    documents = app.topic("documents", Document, key="id").stream(time="at")
    topic = app.topic("queries", Query, key="key")
    with pytest.raises(ConfigError, match="Make a table of it"):
        documents.percolate(topic.stream(time="since"), "query")
    counted = topic.table(time="since").group_by("query").agg(n=ms.count())
    with pytest.raises(ConfigError, match="versions are not known"):
        documents.percolate(counted, "query")
