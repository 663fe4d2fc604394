"""Sequences as they are declared: what is refused and why, what is drawn, what matches hold, and late rows."""

import json
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError

SCHEMA = {"at": datetime, "k": str, "v": str, "n": int, "x": float, "tags": list[str]}
START = datetime(2026, 1, 1, tzinfo=UTC)
A, B = pl.col("v") == "a", pl.col("v") == "b"
AB = ms.sequence("a", A).followed_by("b", B).within("1 minute")


def events(**options):
    topic = ms.App("p", log="unused", buckets=2).topic("t", SCHEMA, key="k")
    return topic.stream(time="at", watermark=ms.watermark("0 seconds", idle=None), **options)


def row(seconds, v, n=0, k="x"):
    at = START + timedelta(seconds=seconds)
    return {"at": at, "k": k, "v": v, "n": n, "x": n / 2, "tags": []}


REFUSED = {
    "without a condition": (lambda: ms.sequence("a", A).next("b"), "without a condition"),
    "a name with a colon": (lambda: ms.sequence("a:b", A), "without a colon"),
    "greedy of one row": (lambda: ms.sequence("a", A).greedy(), "takes one row"),
    "a quantifier of an absence": (
        lambda: ms.sequence("a", A).not_next("b", B).times(2),
        "put it right after one",
    ),
    "skip to no step": (lambda: AB.skip("to_first"), "Name a step"),
    "within zero": (lambda: AB.within("0 seconds"), "above zero"),
    "either of nothing": (ms.either, "Give sequences"),
    "either with within": (lambda: ms.either(AB), "about whole patterns"),
    "an aggregate of whole rows": (lambda: ms.matched("a").sum(), "not of which column"),
    "no sequence": (lambda: events().match("a b", by="k"), "Give a sequence"),
    "a name twice": (lambda: matched(AB.next("a", B)), "Two steps"),
    "no end": (lambda: matched(ms.sequence("a", A).followed_by("b", B)), "has no within"),
    "a loop without end": (
        lambda: matched(ms.sequence("a", A).one_or_more().consecutive().next("b", B)),
        "has no within",
    ),
    "an absence without within": (
        lambda: matched(ms.sequence("a", A).not_followed_by("b", B), unbounded=True),
        "until when",
    ),
    "not_next at the end": (lambda: matched(AB.not_next("c", A)), "may never come"),
    "all optional": (
        lambda: matched(ms.sequence("a", A).optional().within("1 hour")),
        "nothing at all",
    ),
    "greedy at the end": (lambda: matched(AB.one_or_more().greedy()), "no step need follow"),
    "absent after an optional step": (
        lambda: matched(AB.optional().not_followed_by("c", A).followed_by("d", A)),
        "since when",
    ),
    "skip to another step": (lambda: matched(AB.skip("to_last", "bb")), "The steps that take rows"),
    "a condition that is none": (
        lambda: matched(ms.sequence("a", pl.col("n"))),
        "Give a condition",
    ),
    "a condition over rows": (
        lambda: matched(ms.sequence("a", pl.col("n") > pl.col("n").max())),
        "more than one row",
    ),
    "matched rows of no step": (
        lambda: matched(ms.sequence("a", pl.col("n") > ms.matched("aa", "n").last())),
        "looks at rows of 'aa'",
    ),
    "matched rows without the column": (
        lambda: matched(ms.sequence("a", pl.col("n") > ms.matched("a", "m").last())),
        "The columns there are",
    ),
    "the sum of texts": (
        lambda: matched(ms.sequence("a", pl.col("n") > ms.matched("a", "v").sum())),
        "Give a column of numbers",
    ),
    "a function of matched rows": (
        lambda: matched(AB.next("c", ms.matched("a", "v").last().str.starts_with("x"))),
        "with matched rows a condition may",
    ),
    "a list in a condition": (
        lambda: matched(AB.next("c", ms.matched("a", "n").list().is_null())),
        "can only be a measure",
    ),
    "a text and a number": (
        lambda: matched(AB.next("c", ms.matched("a", "n").last().is_null() == pl.col("n"))),
        "cast one of them",
    ),
    "a measure of a bare column": (
        lambda: matched(AB, measures={"n": pl.col("n")}),
        "a match has several rows",
    ),
    "a measure with a name that is there": (
        lambda: matched(AB, measures={"match_end": ms.matched("a").count()}),
        "match_end",
    ),
}


def matched(sequence, **options):
    return events().match(sequence, by="k", **options)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_what_to_do(name):
    declare, said = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        declare()
    assert said.lower() in str(refused.value).lower()


def test_patterns_that_end_by_themselves_need_no_within():
    matched(ms.sequence("a", A).next("b", B).times(2).consecutive())
    matched(ms.sequence("a", A).followed_by("b", B), unbounded=True)


def test_a_pattern_is_drawn():
    pattern = (
        ms.sequence("a", A)
        .one_or_more()
        .greedy()
        .not_followed_by("c", B)
        .followed_by_any(ms.either(ms.sequence("d", A), ms.sequence("e", B).next("f", A)))
        .within("1 minute")
        .skip("to_last", "a")
    )
    v = '[(col("v")) == ("{}")]'
    a, b = v.format("a"), v.format("b")
    assert pattern.explain().splitlines() == [
        f"a (1 to any rows, greedy): {a}",
        f"│ not followed by c: {b}",
        "│ followed by any",
        "either",
        f"    d: {a}",
        "  or",
        f"    e: {b}",
        "    │ next",
        f"    f: {a}",
        "within: 1 minute",
        "skip: to_last a",
    ]


def test_a_match_has_its_rows_and_a_window_counts_it():
    app = ms.App("p", log="unused", buckets=2)
    topic = app.topic("t", SCHEMA, key="k", partitions=1)
    found = topic.stream(time="at", watermark=ms.watermark("0 seconds", idle=None)).match(
        AB, by="k"
    )
    found.view("found", key=["k", "match_start"])
    found.window(ms.tumbling("10 seconds"), by="k").agg(n=ms.count()).view("counts")
    rows = [row(0, "a", 1), row(3, "b", 2), row(9, "a", 3), row(12, "b", 4), row(99, "z")]
    out = testing.run(app, {"t": rows}, batches=3, seed=1)
    made = [
        (
            one["match_start"],
            one["match_end"],
            [each["n"] for s in "ab" for each in json.loads(one[s])],
        )
        for one in out["found"].to_dicts()
    ]
    seconds = [START + timedelta(seconds=s) for s in (0, 3, 9, 12)]
    assert made == [(seconds[0], seconds[1], [1, 2]), (seconds[2], seconds[3], [3, 4])]
    assert out["counts"]["n"].to_list() == [1, 1]


def test_late_rows_are_counted_and_go_to_the_side_output():
    app = ms.App("p", log="unused", buckets=2)
    topic = app.topic("t", SCHEMA, key="k", partitions=1)
    stream = topic.stream(
        time="at",
        watermark=ms.watermark("0 seconds", idle=None),
        lateness="5 seconds",
        late="side",
    )
    found = stream.match(AB, by="k", measures={"n": ms.matched("b", "n").last()})
    found.view("found", key=["k", "match_start"])
    found.late.view("late", key="n")
    rows = [row(10, "a"), row(20, "z"), row(16, "b", 7), row(14, "b", 8), row(99, "z")]
    for batches in (1, 4):
        out = testing.run(app, {"t": rows}, batches=batches)
        assert out["found"]["n"].to_list() == [7]
        assert out["late"]["n"].to_list() == [8]
        assert out.late == 1


def test_texts_times_and_truths_of_matched_rows_are_compared_across_batches():
    app = ms.App("p", log="unused", buckets=2)
    topic = app.topic("t", SCHEMA, key="k", partitions=1)
    later = pl.col("at") - ms.matched("a", "at").last() >= timedelta(seconds=2)
    pattern = (
        ms.sequence("a", pl.col("n") == 1)
        .followed_by("b", (pl.col("v") == ms.matched("a", "v").last()) & later)
        .within("1 minute")
    )
    stream = topic.stream(time="at", watermark=ms.watermark("0 seconds", idle=None))
    measures = {"n": ms.matched("b", "n").last()}
    stream.match(pattern, by="k", measures=measures).view("out", key=["k", "match_start"])
    rows = [row(0, "q", 1), row(1, "q", 2), row(2, "r", 3), row(3, "q", 4), row(99, "z", 0)]
    for batches in (1, 5):
        assert testing.run(app, {"t": rows}, batches=batches)["out"]["n"].to_list() == [4]
