"""Row patterns that others have published, with their answers: of Trino's tests and of Flink's documentation and tests.

Source: Trino, ``TestRowPatternMatching.java``; Apache Flink, "Pattern Recognition" (the documentation of ``MATCH_RECOGNIZE``)
and ``MatchRecognizeITCase.scala``. Rows have the numbers 1, 2, …, as seconds; ``within`` is long enough for all of them.
"""

import random
from dataclasses import replace

import polars as pl
import pytest
from row_pattern_run import kernel_of, run

import millstream as ms
from millstream.errors import ConfigError, UserCodeError

N, V = pl.col("n"), pl.col("v")
ROW = ms.variable()
LAST = ROW.last()["n"]
A, B, C, D, X = (ms.variable(name) for name in "ABCDX")
NUMBER, LABEL = ms.match_number(), ms.classifier()
FALLS, RISES = B.prev()["n"] > N, C.prev()["n"] < N
NOT_RISES = B.prev()["n"] >= N
FOUR = [90, 80, 70, 70]
EIGHT = [90, 80, 70, 80, 90, 50, 40, 60]


def found(pattern, values, measures, rows="all", *, names=None, **options):
    """Return what is emitted: (number of the row, measures …), or the measures alone where a match is one row."""
    if isinstance(values, dict):
        given = {key: numbered(own, None) for key, own in values.items()}
    else:
        given = {"x": numbered(values, names)}
    made = ms.row_pattern(pattern, within="1 hour", **options)
    kernel = kernel_of(made, measures, rows)
    several = run(kernel, given, 4, random.Random(7))
    assert run(kernel, given, 1, random.Random(1)) == several
    own = [] if rows == "one" else ["row"]
    return [
        tuple(row[name] + (name == "row") for name in own) + tuple(row[name] for name in measures)
        for row in several
    ]


def numbered(values, names):
    return [
        {"at": at, "v": names[at - 1] if names else "a", "n": value}
        for at, value in enumerate(values, 1)
    ]


TRIO = {"match": NUMBER, "val": LAST, "label": LABEL}
EMPTY_ALL = [(row, row, None, None) for row in (1, 2, 3, 4)]


def test_a_fall_and_a_rise():
    assert found("A B+ C+", EIGHT, TRIO, define={"B": FALLS, "C": RISES}) == [
        (1, 1, 90, "A"),
        (2, 1, 80, "B"),
        (3, 1, 70, "B"),
        (4, 1, 80, "C"),
        (5, 1, 90, "C"),
        (6, 2, 50, "A"),
        (7, 2, 40, "B"),
        (8, 2, 60, "C"),
    ]


@pytest.mark.parametrize(
    ("pattern", "define", "expected"),
    [
        ("() | A", {}, EMPTY_ALL),
        ("^A", {}, [(1, 1, 90, "A")]),
        ("A^", {}, []),
        ("^A^", {}, []),
        ("A$", {}, [(4, 1, 70, "A")]),
        ("$A", {}, []),
        ("$A$", {}, []),
        (
            "A B C",
            {"B": FALLS, "C": C.prev()["n"] == N},
            [(2, 1, 80, "A"), (3, 1, 70, "B"), (4, 1, 70, "C")],
        ),
        (
            "B | C | A",
            {"B": FALLS, "C": C.prev()["n"] >= N},
            [(1, 1, 90, "A"), (2, 2, 80, "B"), (3, 3, 70, "B"), (4, 4, 70, "C")],
        ),
        (
            "PERMUTE(B, C)",
            {"B": FALLS, "C": C.prev()["n"] > N},
            [(2, 1, 80, "B"), (3, 1, 70, "C")],
        ),
        (
            "((A) (B (C)))",
            {"B": FALLS, "C": C.prev()["n"] == N},
            [(2, 1, 80, "A"), (3, 1, 70, "B"), (4, 1, 70, "C")],
        ),
    ],
)
def test_parts_of_a_pattern(pattern, define, expected):
    assert found(pattern, FOUR, TRIO, define=define) == expected


ALL_B = [(1, 1, None, None), (2, 2, 80, "B"), (3, 2, 70, "B"), (4, 2, 70, "B")]
EACH_B = [(1, 1, None, None), (2, 2, 80, "B"), (3, 3, 70, "B"), (4, 4, 70, "B")]
SOME_B = [(2, 1, 80, "B"), (3, 1, 70, "B"), (4, 1, 70, "B")]
SINGLE_B = [(2, 1, 80, "B"), (3, 2, 70, "B"), (4, 3, 70, "B")]
TWO_B = [(2, 1, 80, "B"), (3, 1, 70, "B")]
UP_TO_TWO = [(1, 1, None, None), (2, 2, 80, "B"), (3, 2, 70, "B"), (4, 3, 70, "B")]


@pytest.mark.parametrize(
    ("quantifier", "expected"),
    [
        ("*", ALL_B),
        ("*?", EMPTY_ALL),
        ("+", SOME_B),
        ("+?", SINGLE_B),
        ("?", EACH_B),
        ("??", EMPTY_ALL),
        ("{,}", ALL_B),
        ("{,}?", EMPTY_ALL),
        ("{1,}", SOME_B),
        ("{1,}?", SINGLE_B),
        ("{2,}", SOME_B),
        ("{2,}?", TWO_B),
        ("{5,}", []),
        ("{5,}?", []),
        ("{,1}", EACH_B),
        ("{,1}?", EMPTY_ALL),
        ("{,2}", UP_TO_TWO),
        ("{,2}?", EMPTY_ALL),
        ("{,5}", ALL_B),
        ("{,5}?", EMPTY_ALL),
        ("{1,1}", SINGLE_B),
        ("{1,1}?", SINGLE_B),
        ("{1,5}", SOME_B),
        ("{1,5}?", SINGLE_B),
        ("{5,7}", []),
        ("{5,7}?", []),
        ("{1}", SINGLE_B),
        ("{1}?", SINGLE_B),
        ("{2}", TWO_B),
        ("{2}?", TWO_B),
        ("{5}", []),
        ("{5}?", []),
    ],
)
def test_quantifiers(quantifier, expected):
    assert found(f"B{quantifier}", FOUR, TRIO, define={"B": NOT_RISES}) == expected


@pytest.mark.parametrize(
    ("pattern", "rows"),
    [
        ("A {- B+ -} C+", [1, 4, 5, 6, 8]),
        ("{- A -} {- B+ -} C+", [4, 5, 8]),
        ("A {- {- B+ -} C+ -}", [1, 6]),
        ("{- A B+ C+ -}", []),
        ("A B+ {- ()* -} C+", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("A {- B -}+ {- C -}+", [1, 6]),
        ("A {- B -}* {- C -}*", [1, 6]),
        ("A {- B -}{1,2} {- C -}{1,2}", [1, 6]),
        ("A {- C -}{2,3} {- B -}{2,3}", [3]),
    ],
)
def test_exclusion(pattern, rows):
    made = found(pattern, EIGHT, TRIO, define={"B": FALLS, "C": RISES})
    assert [row for row, *_ in made] == rows


def test_conditions_look_back_at_what_was_matched():
    either = "(A | B)* X"
    assert found(either, [1, 1], {"l": LABEL}, define={"X": A["n"] == N}) == [(1, "A"), (2, "X")]
    assert found(either, [1, 1], {"l": LABEL}, define={"X": B["n"] == N}) == [(1, "B"), (2, "X")]
    sums = A.last().prev(3)["n"] + A.first()["n"] + B.last().prev(2)["n"]
    assert found(either, [1, 2, 3, 4, 5, 6], {"l": LABEL, "s": sums}, define={"X": sums == N}) == [
        (1, "B", None),
        (2, "A", None),
        (3, "A", None),
        (4, "A", None),
        (5, "B", 6),
        (6, "X", 6),
    ]
    u = ms.variable("U")
    labels = (
        (u.last().prev(1).classifier() == "A")
        & (ROW.last(3).classifier() == "B")
        & (u.first().classifier() == "B")
    )
    made = found(
        "(A | B)* X $",
        [1, 2, 3, 4, 5],
        {"l": LABEL, "s": labels},
        subset={"U": ["A", "B"]},
        define={"X": labels},
    )
    assert made == [
        (1, "B", None),
        (2, "B", False),
        (3, "A", False),
        (4, "A", True),
        (5, "X", True),
    ]


B_OR_EMPTY = [(1, 1, None, None), (2, 2, 80, "B"), (3, 3, 70, "B"), (4, 4, None, None)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("()* | B", EMPTY_ALL),
        ("()+ | B", EMPTY_ALL),
        ("(){5,} | B", EMPTY_ALL),
        ("B | ()*", B_OR_EMPTY),
        ("(B ()*)*", [(1, 1, None, None), (2, 2, 80, "B"), (3, 2, 70, "B"), (4, 3, None, None)]),
        ("(B ()*)*?", EMPTY_ALL),
        ("^* | B", EMPTY_ALL),
        ("^+ | B", [(1, 1, None, None), (2, 2, 80, "B"), (3, 3, 70, "B")]),
        ("^* A B", [(1, 1, 90, "A"), (2, 1, 80, "B")]),
        ("$* | B", EMPTY_ALL),
        ("$+ | B", [(2, 1, 80, "B"), (3, 2, 70, "B")]),
        ("B A $+", [(3, 1, 70, "B"), (4, 1, 70, "A")]),
    ],
)
def test_repetitions_without_rows(pattern, expected):
    assert found(pattern, FOUR, TRIO, define={"B": FALLS}) == expected


@pytest.mark.parametrize(
    ("rows", "pattern", "expected"),
    [
        ("one", "B*", [(1, None, None), (2, 70, "B"), (3, None, None)]),
        ("one", "B+", [(1, 70, "B")]),
        ("all", "B*", [(1, None, None), (2, 80, "B"), (2, 70, "B"), (3, None, None)]),
        ("all", "B+", [(1, 80, "B"), (1, 70, "B")]),
        ("all_omit_empty", "B*", [(2, 80, "B"), (2, 70, "B")]),
        ("all_omit_empty", "B+", [(1, 80, "B"), (1, 70, "B")]),
        (
            "all_with_unmatched",
            "B+",
            [(None, None, None), (1, 80, "B"), (1, 70, "B"), (None, None, None)],
        ),
    ],
)
def test_what_is_emitted(rows, pattern, expected):
    made = found(pattern, FOUR, TRIO, rows, define={"B": FALLS})
    assert [row[-3:] for row in made] == expected


FIRST_MATCH = [(1, 1, 90, "A"), (2, 1, 80, "B"), (3, 1, 70, "B"), (4, 1, 80, "C")]
AT_4_THIRD = [(4, 3, 80, "A"), (5, 3, 70, "B"), (6, 3, 80, "C")]
AT_4 = [(4, 2, 80, "A"), (5, 2, 70, "B"), (6, 2, 80, "C")]


@pytest.mark.parametrize(
    ("skip", "more"),
    [
        ("past last row", []),
        (
            "to next row",
            [(2, 2, 80, "A"), (3, 2, 70, "B"), (4, 2, 80, "C"), *AT_4_THIRD],
        ),
        ("to first C", AT_4),
        ("to last B", AT_4),
        ("to B", AT_4),
        ("TO U", AT_4),
    ],
)
def test_where_the_next_match_begins(skip, more):
    assert falling_and_rising(skip) == FIRST_MATCH + more


TO_D = {"B": FALLS, "C": RISES, "D": pl.lit(value=False)}


def falling_and_rising(skip):
    return found(
        "A B+ C+ D?",
        [90, 80, 70, 80, 70, 80],
        TRIO,
        subset={"U": ["C", "D"]},
        after_match=skip,
        define=TO_D,
    )


def test_what_cannot_be_skipped_to_is_an_error():
    with pytest.raises(ConfigError, match="first row of each match"):
        falling_and_rising("to A")
    assert falling_and_rising("to D") == []


def test_a_match_that_cannot_be_skipped_is_a_dead_letter():
    kernel = kernel_of(
        ms.row_pattern("A B+ C+ D?", after_match="to D", within="1 hour", define=TO_D), TRIO
    )
    failed = []
    values = [90, 80, 70, 80, 70, 80]
    rows = {"x": [{"at": at, "v": "a", "n": n} for at, n in enumerate(values)]}
    assert run(kernel, rows, 1, random.Random(1), failed=failed) == []
    seconds = [(one["match_start"].second, one["match_end"].second) for one in failed]
    assert seconds == [(0, 3)]
    stops = replace(kernel, code=replace(kernel.code, on_error="stop"))
    with pytest.raises(UserCodeError, match=r"of the key k='x', has no row of 'D'.*in 4 rows"):
        run(stops, rows, 1, random.Random(1))


def test_rows_without_a_match():
    made = found(
        "A B{2}",
        [100, 100, 90, 80, 70, 100],
        {"match": NUMBER, "label": LABEL},
        "all_with_unmatched",
        after_match="to next row",
        define={"B": FALLS},
    )
    first = [(1, None, None), (2, 1, "A"), (3, 1, "B"), (4, 1, "B")]
    assert made == [*first, (3, 2, "A"), (4, 2, "B"), (5, 2, "B"), (6, None, None)]


def test_subsets():
    made = found(
        "(L | H) A",
        [90, 80, 70, 80],
        {
            "match": NUMBER,
            "val": LAST,
            "u": ms.variable("U").classifier(),
            "w": ms.variable("W").classifier(),
        },
        subset={"U": ["L", "H"], "W": ["A", "L", "H"]},
        define={"A": N == 80, "L": N < 80, "H": N > 80},
    )
    assert made == [
        (1, 1, 90, "H", "H"),
        (2, 1, 80, "H", "A"),
        (3, 2, 70, "L", "L"),
        (4, 2, 80, "L", "A"),
    ]


@pytest.mark.parametrize(
    ("measure", "values"),
    [
        (N, [10, 20, 30]),
        (ROW["n"], [10, 20, 30]),
        (ROW.final.last()["n"], [30, 30, 30]),
        (ROW.first()["n"], [10, 10, 10]),
        (ROW.final.first()["n"], [10, 10, 10]),
        (ROW.final.last(2)["n"], [10, 10, 10]),
        # Trino's tests have 30 three times: FIRST with an offset sees rows behind the current one there. The
        # standard, and this, see those up to the current row.
        (ROW.final.first(2)["n"], [30, 30, 30]),
        (ROW.first(2)["n"], [None, None, 30]),
        (ROW.last(10)["n"], [None, None, None]),
        (ROW.first(10)["n"], [None, None, None]),
        (ROW.prev()["n"], [None, 10, 20]),
        (ROW.next()["n"], [20, 30, None]),
        (ROW.first().next(2)["n"], [30, 30, 30]),
        (ROW.first().next(10)["n"], [None, None, None]),
        (ROW.first().prev(10)["n"], [None, None, None]),
        (ROW.first(10).prev(2)["n"], [None, None, None]),
        (ROW.last(10).prev(2)["n"], [None, None, None]),
    ],
)
def test_navigation(measure, values):
    made = found("A+", [10, 20, 30], {"m": measure})
    assert made == list(enumerate(values, 1))


@pytest.mark.parametrize(
    ("measure", "value"),
    [
        (B.prev(4)["n"], None),
        (B.prev(3)["n"], 10),
        (B.prev(2)["n"], 20),
        (B.next(1)["n"], 40),
        (B.next(2)["n"], None),
    ],
)
def test_navigation_to_rows_that_are_not_matched(measure, value):
    made = found(
        "A B", [10, 20, 30, 30, 40], {"m": measure}, "one", define={"B": B.prev()["n"] == N}
    )
    assert made == [(value,)]


def test_what_the_next_row_is_matched_to():
    made = found(
        "A B+ C+",
        [90, 80, 70, 80],
        {"label": LABEL, "next": ROW.next().classifier()},
        define={"B": FALLS, "C": RISES},
    )
    assert made == [(1, "A", "B"), (2, "B", "B"), (3, "B", "C"), (4, "C", None)]
    assert found("A+", [90, 80], {"l": LABEL}, define={"A": A.next().classifier() == "A"}) == []


def test_names_differ_by_case():
    b = ms.variable("b")
    made = found(
        "A b+ C+", [90, 80, 70, 80], {"l": LABEL}, define={"b": b.prev()["n"] > N, "C": RISES}
    )
    assert [label for _, label in made] == ["A", "b", "b", "C"]


def test_functions():
    label = pl.concat_str(ROW.last().classifier().str.to_lowercase(), pl.lit("_label"))
    falls = B["n"] + 10 < B.prev()["n"].abs()
    made = found("A B+", [90, 80, 60], {"label": label}, define={"B": falls})
    assert made == [(2, "a_label"), (3, "b_label")]


def test_running_and_final():
    measures = {
        "label": LABEL,
        "last label": ROW.final.classifier(),
        "value": ROW["n"],
        "last value": ROW.final["n"],
    }
    for name in "ABC":
        rows = ms.variable(name)
        measures |= {name: rows["n"], f"last {name}": rows.final["n"]}
    made = found("A B+ C+", [90, 80, 70, 100, 200], measures, define={"B": FALLS, "C": RISES})
    assert made == [
        (1, "A", "C", 90, 200, 90, 90, None, 70, None, 200),
        (2, "B", "C", 80, 200, 90, 90, 80, 70, None, 200),
        (3, "B", "C", 70, 200, 90, 90, 70, 70, None, 200),
        (4, "C", "C", 100, 200, 90, 90, 70, 70, 100, 200),
        (5, "C", "C", 200, 200, 90, 90, 70, 70, 200, 200),
    ]


def test_keys_are_matched_each_by_itself():
    values = {"p1": [90, 80, 70, 80, 90, 80], "p2": [20, 20, 10], "p3": [50, 60, 70]}
    measures = {"match": NUMBER, "val": ROW.prev()["n"]}
    made = found("B+", values, measures, define={"B": FALLS})
    assert sorted(made) == [(2, 1, 90), (3, 1, 20), (3, 1, 80), (6, 2, 90)]


def test_greedy_and_reluctant_of_flinks_documentation():
    prices = [10, 11, 12, 13, 14, 16]
    define = {"A": N > 10, "B": N < 15, "C": N > 12}
    assert found("A B* C", prices, {"last": C["n"]}, "one", define=define) == [(16,)]
    assert found("A B*? C", prices, {"last": C["n"]}, "one", define=define) == [(13,), (16,)]


@pytest.mark.parametrize(
    ("skip", "sums"),
    [
        ("past last row", [(26, 4), (17, 3)]),
        # The last one is that of the end of the partition, which Flink's open stream does not have.
        ("to next row", [(26, 4), (24, 4), (25, 4), (22, 4), (17, 3), (7, 2)]),
    ],
)
def test_sums_of_flinks_documentation(skip, sums):
    made = found(
        "A+ C",
        [7, 9, 10, 5, 10, 7, 14],
        {"sum": A.sum("n"), "rows": ROW.count()},
        "one",
        define={"A": A.sum("n") < 30},
        after_match=skip,
    )
    assert made == sums


def test_aggregates_leave_nulls_out():
    values = [10, 10, None, None, 3, 3, 3, 3, 2]
    made = found(
        "A+ C",
        values,
        {
            "sum": A.sum("n"),
            "ids": A.count("v"),
            "prices": A.count("n"),
            "all": ROW.count(),
            "all prices": ROW.count("n"),
            "last": (ms.variable("C").last()["at"].dt.epoch("s")),
        },
        "one",
        names="azbcdcccc",
        define={"A": A.sum("n") < 30, "C": V == "c"},
    )
    assert made == [(29, 7, 5, 8, 6, 8)]
