"""Random queries and rows for stored searches: see percolate_model."""

from __future__ import annotations

from hypothesis import strategies as st
from percolate_model import WORDS

words = st.sampled_from(WORDS)
texts = st.none() | st.lists(st.sampled_from([*WORDS, "-", "AB", "!"]), max_size=6).map(" ".join)
fields = st.sampled_from(["title", "body", ""])
whole = st.integers(-3, 3)
degrees = st.integers(-8, 8)
halves = st.integers(-6, 6).map(lambda n: n / 2)
half_degrees = st.integers(-16, 16).map(lambda n: n / 2)


def ranges(field, values):
    bound = st.none() | values
    return st.tuples(st.just("range"), st.just(field), bound, st.booleans(), bound, st.booleans())


def corners():
    return st.lists(st.tuples(degrees, degrees), min_size=3, max_size=5, unique=True)


conditions = st.one_of(
    st.tuples(st.just("term"), fields, words),
    st.tuples(st.just("phrase"), fields, st.lists(words, min_size=1, max_size=3)),
    st.tuples(
        st.just("wild"), fields, st.sampled_from(["ab*", "abc*", "a?c", "*b*", "cab?n", "abc?*"])
    ),
    st.tuples(
        st.just("regex"), fields, st.sampled_from(["ab.", "(ab|ca).*", "[0-9]+", "abc?d?e?"])
    ),
    ranges("count", whole),
    ranges("price", halves),
    st.tuples(st.just("exists"), st.sampled_from(["title", "body", "count", "price"])),
    st.tuples(
        st.just("near"),
        st.just("place"),
        degrees,
        degrees,
        st.sampled_from([1, 60_001, 300_001, 1_500_001]),
    ),
    st.tuples(st.just("inside"), st.just("place"), corners()),
    st.just(("all",)),
)


def combined(parts):
    several = st.lists(parts, min_size=2, max_size=4)
    return st.one_of(
        parts.map(lambda part: ("not", part)),
        several.map(lambda many: ("and", len(many), many)),
        several.map(lambda many: ("or", 1, many)),
        several.flatmap(
            lambda many: st.integers(1, len(many)).map(lambda count: ("least", count, many))
        ),
    )


queries = st.recursive(conditions, combined, max_leaves=8)
rows = st.fixed_dictionaries(
    {
        "title": texts,
        "body": texts,
        "count": st.none() | whole,
        "price": st.none() | halves,
        "lat": st.none() | half_degrees,
        "lon": st.none() | half_degrees,
    }
)
