"""Patterns and matches that Apache Flink published for its own library, in its documentation and tests.

Sources: docs/content/docs/libs/cep.md; of flink-libraries/flink-cep/src/test/java/org/apache/flink/cep/nfa:
AfterMatchSkipITCase, GreedyITCase, NotPatternITCase, UntilConditionITCase. Of four, Flink's answer differs from the rule
here, or from its own documentation; they are at the end, each with the reason.
"""

import random

import polars as pl
import pytest
from pattern_run import SECOND, kernel_of, run

import millstream as ms

HOUR = "1 hour"


def is_(*letters):
    """Return the condition that a row's name contains one of some letters."""
    return pl.col("v").str.contains("|".join(letters))


A, B, C, D = (is_(letter) for letter in "abcd")


def rows(names):
    """Return rows a second apart; ``a2:5`` has the number 5."""
    split = [name.partition(":") for name in names.split()]
    return [
        {"at": at, "v": name, "n": int(number or 0)} for at, (name, _, number) in enumerate(split)
    ]


def found(sequence, names, batches=3):
    """Return the matches as texts, in the order of their first rows, then of the others."""
    given = rows(names)
    matches = run(kernel_of(sequence), {"x": given}, batches, random.Random(len(names)))
    taken = sorted([place for _, place in match] for _, match in matches)
    return [" ".join(given[place]["v"] for place in match) for match in taken]


def begin(condition=A):
    return ms.sequence("start", condition).within(HOUR)


LOOPS = "a b1 d1 b2 d2 b3 c"
COMBINED = "c d a1 a2 a3 d a4 b"
AFTER = "a1 c1 b1 c2 d"
NOT_BY = "a b1 b2 b3 c b4 b5 b6 d"


def looped(**change):
    sequence = ms.sequence("a", A).followed_by_any("b", B).one_or_more().within(HOUR)
    if change.get("inner"):
        sequence = getattr(sequence, change["inner"])()
    return sequence.next("c", C) if change.get("strict") else sequence.followed_by("c", C)


def combined(inner=None):
    sequence = ms.sequence("c", C).followed_by("a", A).one_or_more().within(HOUR)
    sequence = getattr(sequence, inner)() if inner else sequence
    return sequence.followed_by("b", B)


def any_combination(last):
    """Return C, any choice of the rows A1 to A4, and B."""
    chosen = [[a for bit, a in enumerate(last) if number >> bit & 1] for number in range(1, 16)]
    return [" ".join(["c", *one, "b"]) for one in chosen]


CONTIGUITY = {
    "next": (ms.sequence("a", A).next("b", B), "a c b1 b2", []),
    "followed by": (begin().followed_by("b", B), "a c b1 b2", ["a b1"]),
    "followed by any": (begin().followed_by_any("b", B), "a c b1 b2", ["a b1", "a b2"]),
    "a loop, strict": (looped(inner="consecutive", strict=True), LOOPS, ["a b3 c"]),
    "a loop, relaxed": (
        looped(),
        LOOPS,
        ["a b1 b2 b3 c", "a b1 b2 c", "a b1 c", "a b2 b3 c", "a b2 c", "a b3 c"],
    ),
    "a loop, any": (
        looped(inner="allow_combinations"),
        LOOPS,
        ["a b1 b2 b3 c", "a b1 b2 c", "a b1 b3 c", "a b1 c", "a b2 b3 c", "a b2 c", "a b3 c"],
    ),
    "consecutive": (
        combined("consecutive"),
        COMBINED,
        ["c a1 a2 a3 b", "c a1 a2 b", "c a1 b"],
    ),
    "not consecutive": (
        combined(),
        COMBINED,
        ["c a1 a2 a3 a4 b", "c a1 a2 a3 b", "c a1 a2 b", "c a1 b"],
    ),
}

AAA = "a1 a2 a3 a4 a5 a6"
AB7 = "ab1 ab2 ab3 ab4 ab5 ab6 ab7"
TWICE = ms.sequence("start", A).times(2).next("end", B).times(2).within(HOUR)
AB = ms.sequence("a", A).next("b", B).one_or_more().consecutive().within(HOUR)
ABS = "a1 b1 a2 b2 b3 a3 b4"
AAB = ms.sequence("a", A).one_or_more().consecutive().greedy().next("b", B).within(HOUR)
TAIL = ms.sequence("start", A).next("end", B).one_or_more().within(HOUR)
XBC = ms.sequence("x", is_("x")).one_or_more().optional().next("b", B).next("c", C).within(HOUR)
MISSED = ms.sequence("a", A).next("b", B).one_or_more().optional().consecutive().next("c", C)
DISCARDING = (
    ms.sequence("a or c", is_("a", "c"))
    .followed_by("b or c", is_("b", "c"))
    .followed_by("c*", C)
    .one_or_more()
    .greedy()
    .followed_by("d", D)
    .within(HOUR)
)
SAME_PRICE = (
    ms.sequence("a", A)
    .followed_by("c", C)
    .followed_by("b", B & (pl.col("n") == ms.matched("a", "n").first()))
    .within(HOUR)
)
SKIPS = {
    "no skip": (
        begin().times(3),
        AAA,
        ["a1 a2 a3", "a2 a3 a4", "a3 a4 a5", "a4 a5 a6"],
    ),
    "past last": (begin().times(3).skip("past_last"), AAA, ["a1 a2 a3", "a4 a5 a6"]),
    "no skip, any": (begin().followed_by_any("b", B), "a1 b1 a2 b2", ["a1 b1", "a1 b2", "a2 b2"]),
    "to next, any": (
        begin().followed_by_any("b", B).skip("to_next"),
        "a1 b1 a2 b2",
        ["a1 b1", "a2 b2"],
    ),
    "no skip, a loop at the end": (TAIL, "a1 b1 b2 b3", ["a1 b1", "a1 b1 b2", "a1 b1 b2 b3"]),
    "to next, a loop at the end": (TAIL.skip("to_next"), "a1 b1 b2 b3", ["a1 b1"]),
    "to first": (
        TWICE.skip("to_first", "end"),
        "ab1 ab2 ab3 ab4 ab5 ab6",
        ["ab1 ab2 ab3 ab4", "ab3 ab4 ab5 ab6"],
    ),
    "to last": (TWICE.skip("to_last", "end"), AB7, ["ab1 ab2 ab3 ab4", "ab4 ab5 ab6 ab7"]),
    "past last, the first of many": (
        ms.sequence("a", A)
        .followed_by_any("b", B)
        .followed_by_any("c", C)
        .followed_by("d", D)
        .within(HOUR)
        .skip("past_last"),
        "a1 a2 b1 b2 c1 c2 d1 d2",
        ["a1 b1 c1 d1"],
    ),
    "past last, after one that failed": (
        ms.sequence("a", A).next("b", B).skip("past_last"),
        "a1 c a2 b2",
        ["a2 b2"],
    ),
    "to first, after what is left out": (
        XBC.skip("to_first", "b"),
        "ab1 c1 ab2 c2",
        ["ab1 c1", "ab2 c2"],
    ),
    "to first, at the start": (
        ms.sequence("b", B).next("c", C).skip("to_first", "b"),
        "ab1 c1 ab2 c2",
        ["ab1 c1", "ab2 c2"],
    ),
    "to first of a loop": (AB.skip("to_first", "b"), ABS, ["a1 b1", "a2 b2", "a3 b4"]),
    "to last of a loop": (AB.skip("to_last", "b"), ABS, ["a1 b1", "a2 b2", "a3 b4"]),
    "to first of none": (MISSED.within(HOUR).skip("to_first", "b"), "a c", ["a c"]),
    "to last of none": (MISSED.within(HOUR).skip("to_last", "b"), "a c", ["a c"]),
    "a loop at the beginning, no skip": (
        AAB,
        "a1 a2 a3 b1",
        ["a1 a2 a3 b1", "a2 a3 b1", "a3 b1"],
    ),
    "a loop at the beginning, to next": (
        AAB.skip("to_next"),
        "a1 a2 a3 b1",
        ["a1 a2 a3 b1", "a2 a3 b1", "a3 b1"],
    ),
    "a loop at the beginning, past last": (AAB.skip("past_last"), "a1 a2 a3 b1", ["a1 a2 a3 b1"]),
    "a loop at the beginning, to first": (
        AAB.skip("to_first", "a"),
        "a1 a2 a3 b1",
        ["a1 a2 a3 b1", "a2 a3 b1", "a3 b1"],
    ),
    "a loop at the beginning, to last": (
        AAB.skip("to_last", "a"),
        "a1 a2 a3 b1",
        ["a1 a2 a3 b1", "a3 b1"],
    ),
    "discarding, no skip": (
        DISCARDING,
        "a b c1 c2 c3 d",
        ["a b c1 c2 c3 d", "c1 c2 c3 d"],
    ),
    "discarding, to first": (
        DISCARDING.skip("to_first", "c*"),
        "a b c1 c2 c3 d",
        ["a b c1 c2 c3 d", "c1 c2 c3 d"],
    ),
    "before another that is complete": (
        SAME_PRICE.skip("to_first", "c"),
        "a1:0 c1 a2:1 c2 b1:1 b2:0",
        ["a1 c1 b2", "a2 c2 b1"],
    ),
}


def starred(*, until=None, middle=None):
    """Return c a* d: any number of a, as many as can be."""
    sequence = ms.sequence("c", is_("c")).followed_by("a", A).one_or_more().optional()
    sequence = sequence.greedy() if until is None else sequence.until(until).greedy()
    sequence = sequence.within(HOUR)
    if middle:
        sequence = sequence.followed_by("d", D).optional()
        return sequence.followed_by("e", is_("e"))
    return sequence.followed_by("d", D)


OVER = pl.col("n") > 3
GREEDY = {
    "zero or more": (starred(), "c a1 a2 a3 d", ["c a1 a2 a3 d"]),
    "in between": (starred(), "c x a1 x a2 x a3 d", ["c a1 a2 a3 d"]),
    "others after": (starred(), "c a1 a2 x d", ["c a1 a2 d"]),
    "others before": (starred(), "c x d", ["c d"]),
    "before an optional step": (starred(middle=True), "c a1 a2 x e", ["c a1 a2 e"]),
    "before an optional step that is there": (
        starred(middle=True),
        "c a1 a2 d e",
        ["c a1 a2 d e", "c a1 a2 e"],
    ),
    "until": (
        starred(until=OVER),
        "c a1:2 a2:3 a3:3 a4:4 d:3",
        ["c a1 a2 a3 d"],
    ),
    "until, before": (starred(until=OVER), "c a4:4 a1:2 a2:3 a3:3 d:3", ["c a1 a2 a3 d"]),
}

FIVE = pl.col("n") == 5
UNTIL = "c:1 a1:2 a2:3 a3:5 a4:6"
UNTIL_3 = "c:1 a1:2 a2:3 a3:4 a4:5 a5:6"


def until(*, optional=False, inner=None):
    sequence = ms.sequence("start", C).followed_by("middle", A).one_or_more()
    sequence = getattr(sequence, inner)() if inner else sequence
    sequence = sequence.until(FIVE).within(HOUR)
    sequence = sequence.optional() if optional else sequence
    return sequence.followed_by("end", FIVE)


UNTILS = {
    "one or more": (until(), UNTIL, ["c a1 a2 a3", "c a1 a3"]),
    "one or more, combinations": (
        until(inner="allow_combinations"),
        UNTIL_3,
        ["c a1 a2 a3 a4", "c a1 a2 a4", "c a1 a3 a4", "c a1 a4"],
    ),
    "one or more, consecutive": (until(inner="consecutive"), UNTIL, ["c a1 a2 a3", "c a1 a3"]),
    "zero or more": (until(optional=True), UNTIL, ["c a1 a2 a3", "c a1 a3", "c a3"]),
    "zero or more, combinations": (
        until(optional=True, inner="allow_combinations"),
        UNTIL_3,
        ["c a1 a2 a3 a4", "c a1 a2 a4", "c a1 a3 a4", "c a1 a4", "c a4"],
    ),
    "zero or more, consecutive": (
        until(optional=True, inner="consecutive"),
        UNTIL,
        ["c a1 a2 a3", "c a1 a3", "c a3"],
    ),
    "followed by any": (
        ms.sequence("start", C).followed_by_any("middle", A).one_or_more().until(FIVE).within(HOUR),
        UNTIL,
        ["c a1", "c a1 a2", "c a2", "c a4"],
    ),
}

NOT_B = begin().not_followed_by("not", B)


def not_by(*, any_, all_):
    add = begin().followed_by_any if any_ else begin().followed_by
    sequence = add("b", B).one_or_more()
    sequence = sequence.allow_combinations() if all_ else sequence
    return sequence.not_followed_by("not", C).followed_by("d", D)


def not_before(*, any_, all_):
    sequence = begin().not_followed_by("not", C)
    sequence = (sequence.followed_by_any if any_ else sequence.followed_by)("b", B).one_or_more()
    sequence = sequence.allow_combinations() if all_ else sequence
    return sequence.followed_by("d", D)


RUNS = ["a b1 b4 b5 b6 d", "a b1 b4 b5 d", "a b1 b4 d", "a b1 d"]
CHOICES = [
    "a b1 b4 b5 b6 d",
    "a b1 b4 b5 d",
    "a b1 b4 b6 d",
    "a b1 b4 d",
    "a b1 b5 b6 d",
    "a b1 b5 d",
    "a b1 b6 d",
    "a b1 d",
]
BEFORE = "a b1 c b4 b5 b6 d"
NOTS = {
    "not next": (
        begin().not_next("not", B).followed_by_any("c", C).followed_by("d", D),
        AFTER,
        ["a1 c1 d", "a1 c2 d"],
    ),
    "not next, no match": (
        begin().not_next("not", B).followed_by("c", C).followed_by("d", D),
        "a1 b1 c1 c2 d",
        [],
    ),
    "not followed by": (
        NOT_B.followed_by_any("c", C).followed_by("d", D),
        AFTER,
        ["a1 c1 d"],
    ),
    "before an optional step": (
        NOT_B.followed_by_any("c", C).optional().followed_by("d", D),
        AFTER,
        ["a1 c1 d"],
    ),
    "after a step that repeats": (
        begin().followed_by_any("b", B).times(2).not_followed_by("not", C).followed_by("d", D),
        "a1 b1 c b2 d",
        [],
    ),
    "before an optional step that repeats": (
        NOT_B.followed_by_any("c", C).times(2).optional().followed_by("d", D),
        "a1 d1 e b1 c1 c2 d2",
        ["a1 d1"],
    ),
    "after a step that repeats, twice": (
        begin().followed_by_any("b", B).times(2).not_followed_by("not", C).followed_by("d", D),
        "a1 d1 e b1 b2 c1 d2",
        [],
    ),
    "branching at the start": (
        NOT_B.followed_by("c", C).followed_by("d", D),
        "a1 b1 c1 a2 c2 d",
        ["a2 c2 d"],
    ),
    "not next after a loop": (
        begin().followed_by("b", B).one_or_more().not_next("not", C).followed_by("d", D),
        "a1 b1 c1 b2 d1",
        [],
    ),
    "not next after a loop, any": (
        begin().followed_by_any("b", B).one_or_more().not_next("not", C).followed_by("d", D),
        "a1 b1 c1 b2 d1",
        ["a1 b2 d1"],
    ),
    "after a loop": (not_by(any_=False, all_=False), NOT_BY, []),
    "after a loop, any": (
        not_by(any_=True, all_=False),
        NOT_BY,
        ["a b4 b5 b6 d", "a b4 b5 d", "a b4 d", "a b5 b6 d", "a b5 d", "a b6 d"],
    ),
    "after combinations": (not_by(any_=False, all_=True), NOT_BY, []),
    "after combinations, any": (
        not_by(any_=True, all_=True),
        NOT_BY,
        ["a b4 b5 b6 d", "a b4 b5 d", "a b4 b6 d", "a b4 d", "a b5 b6 d", "a b5 d", "a b6 d"],
    ),
    "before a loop": (not_before(any_=False, all_=False), BEFORE, RUNS),
    "before a loop, any": (not_before(any_=True, all_=False), BEFORE, RUNS),
    "before combinations": (not_before(any_=False, all_=True), BEFORE, CHOICES),
    "before combinations, any": (not_before(any_=True, all_=True), BEFORE, CHOICES),
}

ALL = {
    f"{group}: {name}": case
    for group, cases in {
        "contiguity": CONTIGUITY,
        "skip": SKIPS,
        "greedy": GREEDY,
        "until": UNTILS,
        "not": NOTS,
    }.items()
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", ALL)
def test_a_pattern_has_the_matches_that_were_published(name):
    sequence, names, matches = ALL[name]
    assert found(sequence, names) == sorted(matches, key=lambda text: order_of(names, text))


def order_of(names, text):
    every = [name.partition(":")[0] for name in names.split()]
    return [every.index(name) for name in text.split()]


def test_the_list_of_combinations_is_that_of_followed_by_any():
    """Flink's documentation gives 15 matches for followedBy, of which its automaton gives the 8 that begin with A1."""
    every = any_combination(["a1", "a2", "a3", "a4"])
    begin_with_a1 = [text for text in every if text.startswith("c a1")]
    assert sorted(found(combined("allow_combinations"), COMBINED)) == sorted(begin_with_a1)
    free = ms.sequence("c", C).followed_by_any("a", A).one_or_more().allow_combinations()
    sequence = free.within(HOUR).followed_by("b", B)
    assert sorted(found(sequence, COMBINED)) == sorted(every)


def test_within_includes_a_span_of_just_as_long():
    """Flink's NFA leaves such a match out, and its documentation of SQL has it. Here it is within."""
    sequence = ms.sequence("a", A).followed_by("b", B).within("3600 seconds")
    for microseconds, matches in ((-1000, 1), (0, 1), (1000, 0)):
        given = [
            {"at": 0, "v": "a", "n": 0},
            {"at": 3600 + microseconds / SECOND, "v": "b", "n": 0},
        ]
        assert len(run(kernel_of(sequence), {"x": given}, 1, random.Random(0))) == matches


def test_a_pattern_that_ends_with_what_must_not_come_is_a_match_when_within_is_over():
    """Flink has none without within, and with it calls for a later event; here the watermark is enough."""
    sequence = ms.sequence("a", A).not_followed_by("not", B).within("2 seconds")
    assert found(sequence, "a1 x a2 b1 a3 x x b2") == ["a1", "a3"]
    assert found(sequence, "a1") == ["a1"]


def test_what_may_follow_or_not_is_not_decided_before_within_is_over():
    """Flink gives a1 at once, without within, though b may follow it. Here a1 waits, and b1 comes."""
    sequence = begin().not_followed_by("not", B).followed_by_any("end", C).optional()
    assert found(sequence, "a1 c1 b1 c2") == ["a1 c1"]
