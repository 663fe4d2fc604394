"""Row patterns as they are declared: what is refused and why, what is drawn, and rows that are late or of many kinds."""

import json
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, UserCodeError
from millstream.kernels.patterns.row_pattern import VARIABLES_MAX

SCHEMA = {"at": datetime, "k": str, "v": str, "n": int, "x": float, "tags": list[str]}
START = datetime(2026, 1, 1, tzinfo=UTC)
N = pl.col("n")
A, B = ms.variable("A"), ms.variable("B")
HOUR = {"within": "1 hour"}
FALLS = ms.row_pattern("A B+", define={"B": B.prev()["n"] > N}, **HOUR)


def events(**options):
    topic = ms.App("p", log="unused", buckets=2).topic("t", SCHEMA, key="k")
    return topic.stream(time="at", watermark=ms.watermark("0 seconds", idle=None), **options)


def recognized(pattern, **options):
    return events().match_recognize(pattern, partition_by="k", **options)


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("", 1, "a variable, ("),
        ("A |", 4, "a variable, ("),
        ("A )", 3, "the end"),
        ("(A B", 5, "')'"),
        ("A & B", 3, "( ) | {- -}"),
        ("A{", 3, "a number or a comma"),
        ("A{x}", 3, "a number or a comma"),
        ("A{1", 4, "'}'"),
        ("A{3,2}", 3, "not above the second"),
        ("A{1001}", 3, "up to 1,000"),
        ("A{99999999999999999999}", 3, "up to 1,000"),
        ("A++", 3, "the end"),
        ("* A", 1, "a variable, ("),
        ("{- A", 5, "'-}'"),
        ("{- -}", 4, "a variable, ("),
        ("PERMUTE(A", 10, "')'"),
        ("PERMUTE(A,)", 11, "a variable, ("),
        ("A 1B", 3, "the end"),
        ("(" * 150 + "A" + ")" * 150, 102, "levels of parentheses"),
    ],
)
def test_a_text_that_is_no_pattern_is_shown_with_the_place(text, place, expected):
    with pytest.raises(ConfigError) as caught:
        ms.row_pattern(text)
    shown = str(caught.value)
    assert f"at place {place}," in shown
    assert expected in shown
    assert shown.splitlines()[-1] == " " * (place + 1) + "^"


REFUSED = {
    "no text": (lambda: ms.row_pattern(3), "as SQL writes it"),
    "without a variable": (lambda: ms.row_pattern("()"), "no variable"),
    "too many variables": (
        lambda: ms.row_pattern(" ".join(f"A{n}" for n in range(VARIABLES_MAX + 1))),
        "at most 60",
    ),
    "define of another variable": (lambda: ms.row_pattern("A", define={"B": N > 1}), "'B'"),
    "a subset of another variable": (lambda: ms.row_pattern("A", subset={"U": ["B"]}), "'B'"),
    "a subset called like a variable": (lambda: ms.row_pattern("A", subset={"A": ["A"]}), "'A'"),
    "an empty subset": (lambda: ms.row_pattern("A", subset={"U": []}), "no variable"),
    "another after_match": (lambda: ms.row_pattern("A", after_match="past first"), "past last row"),
    "after_match of another variable": (lambda: ms.row_pattern("A", after_match="to B"), "of A"),
    "within zero": (lambda: ms.row_pattern("A", within="0 seconds"), "above zero"),
    "an offset below zero": (lambda: A.last(-1), "from 0"),
    "prev twice": (lambda: A.last().prev(1).prev(1), "one already"),
    "a sequence": (lambda: recognized(ms.sequence("a", N > 1)), "Give a row pattern"),
    "a condition that is none": (
        lambda: recognized(ms.row_pattern("A", define={"A": N + 1})),
        "Give a condition",
    ),
    "a condition of another column": (
        lambda: recognized(ms.row_pattern("A", define={"A": A.prev()["m"] > N}, **HOUR)),
        "'m'",
    ),
    "a condition of another name": (
        lambda: recognized(ms.row_pattern("A", define={"A": ms.variable("C")["n"] > N})),
        "'C'",
    ),
    "a condition of the whole match": (
        lambda: recognized(ms.row_pattern("A", define={"A": A.final["n"] > N})),
        "Leave final out",
    ),
    "a condition over several rows": (
        lambda: recognized(ms.row_pattern("A", define={"A": N.mean() < N})),
        "more than one row",
    ),
    "a condition of a sequence's rows": (
        lambda: recognized(ms.row_pattern("A", define={"A": ms.matched("A", "n").sum() > N})),
        "ms.variable",
    ),
    "a function of matched rows": (
        lambda: recognized(ms.row_pattern("A", define={"A": A.prev()["n"].sqrt() > N}, **HOUR)),
        "may calculate",
    ),
    "a list in a condition": (
        lambda: recognized(
            ms.row_pattern("A", define={"A": A.prev()["tags"] == A["tags"]}, **HOUR)
        ),
        "tags",
    ),
    "the sum of texts": (lambda: recognized(FALLS, measures={"s": A.sum("v")}), "numbers"),
    "a measure over several rows": (
        lambda: recognized(FALLS, measures={"s": B["n"].sum()}),
        "more than one row",
    ),
    "a list that grows": (
        lambda: recognized(FALLS, measures={"s": B.list("n")}, rows_per_match="all"),
        "final.list",
    ),
    "a measure called like a column": (
        lambda: recognized(FALLS, measures={"n": B["n"]}, rows_per_match="all"),
        "'n'",
    ),
    "no within and any number of rows": (lambda: recognized(ms.row_pattern("A+ B")), "no within"),
    "no within and a row before": (
        lambda: recognized(ms.row_pattern("A", define={"A": A.prev()["n"] > N})),
        "no within",
    ),
    "$ without within": (lambda: recognized(ms.row_pattern("A $"), unbounded=True), "last row"),
    "numbers of matches": (
        lambda: recognized(FALLS, measures={"m": ms.match_number()}),
        "unbounded",
    ),
    "exclusion with unmatched rows": (
        lambda: recognized(ms.row_pattern("A {- B -}"), rows_per_match="all_with_unmatched"),
        "{- -}",
    ),
    "skipping to the first row": (
        lambda: recognized(ms.row_pattern("A B", after_match="to A")),
        "first row of each match",
    ),
    "a pattern that is too long": (
        lambda: recognized(ms.row_pattern("((A{100}){100}){100}")),
        "longer than 5,000",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_declared_is_refused_with_a_remedy(name):
    declare, message = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        declare()
    assert message in str(caught.value)


def test_a_pattern_of_so_many_rows_needs_no_within():
    made = recognized(ms.row_pattern("A B{2} (C | D)?"))
    assert made.node.kernel.rows_behind == 0


def test_it_is_drawn():
    pattern = ms.row_pattern(
        "^ (A | {- B+? -}) PERMUTE(C, D)",
        define={"B": B.prev()["n"] > N, "D": ms.variable("U").sum("n") < 3},
        subset={"U": ["A", "B"]},
        after_match="to first C",
        within="1 hour",
    )
    assert pattern.explain().splitlines() == [
        "pattern: ^ (A | {- B+? -}) PERMUTE(C, D)",
        "  before the first row",
        "  either",
        "    A: any row",
        "  or",
        "    not emitted",
        '      B (1 to any number times, as few as possible): [(B.prev(1)["n"]) > (col("n"))]',
        "  in any order",
        "    C: any row",
        '    D: [(U.sum("n")) < (dyn int: 3)]',
        "subset U: A, B",
        "within: 1 hour",
        "after match: skip to first C",
    ]


# ── through an app ──────────────────────────────────────────────────────────────────────────


def row(seconds, n, k="x", v="a"):
    at = START + timedelta(seconds=seconds)
    return {"at": at, "k": k, "v": v, "n": n, "x": n / 2, "tags": [v]}


END = testing.Watermark("t", at=START + timedelta(days=1))
ROWS = [row(1, 9), row(2, 7, v="b"), row(3, 8), row(4, 5, v="c"), row(5, 3, v="d"), END]


def through_an_app(
    pattern,
    given=ROWS,
    *,
    side=None,
    partitions=4,
    key="match_start",
    on_error="dead-letter",
    **options,
):
    app = ms.App("p", log="unused", buckets=2, on_error=on_error)
    topic = app.topic("t", SCHEMA, key="k", partitions=partitions)
    stream = topic.stream(time="at", watermark=ms.watermark("0 seconds", idle=None), **side or {})
    made = stream.match_recognize(pattern, partition_by="k", **options)
    made.view("out", key=["k", key])
    if side is not None:
        made.late.view("late", key="n")
    return testing.run(app, {"t": given}, batches=3, crash=1)


def test_rows_go_through_an_app_and_its_crash():
    out = through_an_app(
        FALLS,
        measures={
            "last": N,
            "lists": B.list("n"),
            "rows": ms.variable().list(),
            "smallest": B.min("v"),
            "mean": B.mean("x"),
            "none": ms.variable("B").last(5)["tags"],
        },
    )["out"]
    assert out.select(pl.exclude("rows")).sort("match_start").to_dicts() == [
        {
            "k": "x",
            "match_start": START + timedelta(seconds=began),
            "match_end": START + timedelta(seconds=ended),
            "last": lists[-1],
            "lists": str(lists).replace(" ", ""),  # a view has lists as text
            "smallest": v,
            "mean": sum(lists) / len(lists) / 2,
            "none": None,
        }
        for began, ended, lists, v in ((1, 2, [7], "b"), (3, 5, [5, 3], "c"))
    ]
    found = [[one["n"] for one in json.loads(rows)] for rows in out.sort("match_start")["rows"]]
    assert found == [[9, 7], [8, 5, 3]]


def test_late_rows_go_to_the_side_output():
    given = [row(1, 9), row(100, 8), row(101, 7), row(3, 1), END]
    side = {"late": "side", "lateness": "5 seconds"}
    out = through_an_app(FALLS, given, side=side, partitions=1, measures={"last": N})
    assert out["out"]["last"].to_list() == [7]
    assert out["late"]["n"].to_list() == [1]


def test_a_match_is_within_as_long_as_it_says():
    pattern = ms.row_pattern("A B", define={"A": N == 1, "B": N == 2}, within="1 hour")
    for seconds, matches in ((3599.999, 1), (3600, 1), (3600.001, 0)):
        assert through_an_app(pattern, [row(0, 1), row(seconds, 2), END])["out"].height == matches


NUMBER = B["v"].cast(pl.Int64)  # fails where v is no number
NUMBERS = [row(1, 1, v="1"), row(2, 2, v="2"), row(3, 1, v="3"), row(4, 2, v="x"), END]


@pytest.mark.parametrize("rows_per_match", ["one", "all"])
def test_a_match_on_which_a_measure_fails_is_a_dead_letter_and_the_others_are_there(rows_per_match):
    pattern = ms.row_pattern("A B", define={"A": N == 1, "B": N == 2}, **HOUR)
    key = "match_start" if rows_per_match == "one" else "at"
    out = through_an_app(
        pattern, NUMBERS, measures={"v2": NUMBER}, rows_per_match=rows_per_match, key=key
    )
    assert out["out"]["v2"].drop_nulls().to_list() == [2]
    (dead,) = out.dead.to_dicts()
    assert dead["step"] == "match_recognize(A B)"
    assert "'x'" in dead["reason"].replace('"', "'")
    with pytest.raises(UserCodeError, match=r"step 'match_recognize\(A B\)' failed: .*declared at"):
        through_an_app(pattern, NUMBERS, measures={"v2": NUMBER}, on_error="stop")


def test_of_a_row_that_no_match_has_measures_are_null_whatever_they_say():
    out = through_an_app(
        ms.row_pattern("A B", define={"A": N == 9}, **HOUR),
        rows_per_match="all_with_unmatched",
        key="n",
        measures={
            "list": A.final.list("n"),
            "one": pl.lit(1),
            "count": A.count().fill_null(7),
            "key": pl.col("k"),
        },
    )["out"].sort("n")
    assert out["n"].to_list() == [3, 5, 7, 8, 9]
    for name, matched in (("list", "[9]"), ("one", 1), ("count", 1), ("key", "x")):
        assert out[name].to_list() == [None, None, matched, None, matched], name


def test_a_measure_sees_when_a_match_without_rows_began():
    pattern = ms.row_pattern("A*", define={"A": N == 7}, **HOUR)
    out = through_an_app(pattern, measures={"began": pl.col("match_start")})["out"]
    assert out.height == 5
    assert out["began"].to_list() == out["match_start"].to_list()
