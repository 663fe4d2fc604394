"""S: sequences. The rows and matches are those of Apache Flink's documentation and tests, with times of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import polars as pl
from cases.case import LONG, Answer, Case, Event, Reach, event

import millstream as ms


def is_(letter: str) -> pl.Expr:
    return pl.col("id").str.starts_with(letter)


A, B, C, D = (is_(letter) for letter in "abcd")


def events(names: str, key: str = "a") -> list[Event]:
    return [event(at, at, key, id=name) for at, name in enumerate(names.split())]


def matching(
    **sequences: tuple[ms.PatternSequence, str],
) -> Callable[[ms.Stream, str], Mapping[str, ms.Stream]]:
    """Match each pattern; the steps whose rows are its text are named beside it."""

    def build(stream: ms.Stream, name: str) -> Mapping[str, ms.Stream]:
        return {
            output: stream.match(
                sequence,
                by="key",
                measures={"match": text(*steps.split())},
                name=f"{name}/{output}",
            )
            for output, (sequence, steps) in sequences.items()
        }

    return build


def text(*steps: str) -> pl.Expr:
    return pl.concat_list(*(ms.matched(step, "id").list() for step in steps)).list.join(" ")


def answer(*matches: str, columns: str = "match") -> Answer:
    return Answer(columns, [(match,) for match in matches], key=("key", "match"))


AB = ms.sequence("a", A)
HOUR = "1 hour"
LOOP = ms.sequence("a", A).followed_by_any("b", B).one_or_more()
RUN = ms.sequence("b", B).one_or_more().consecutive().greedy().next("c", C).within(HOUR)
UNPAID = ms.sequence("a", A).not_followed_by("no", B).within("10 seconds")
FALL = (
    ms.sequence("a", A)
    .followed_by("b", pl.col("n") < ms.matched("a", "n").last())
    .followed_by("c", pl.col("n") > ms.matched("b", "n").last())
    .within(HOUR)
)

CASES = [
    Case(
        "S1",
        "next, followed by, followed by any",
        [*events("a c b1 b2"), Reach(LONG)],
        matching(
            next=(AB.next("b", B), "a b"),
            followed=(AB.followed_by("b", B).within(HOUR), "a b"),
            every=(AB.followed_by_any("b", B).within(HOUR), "a b"),
        ),
        {"next": answer(), "followed": answer("a b1"), "every": answer("a b1", "a b2")},
    ),
    Case(
        "S2",
        "a step that repeats",
        [*events("a b1 d1 b2 d2 b3 c"), Reach(LONG)],
        matching(
            strict=(LOOP.consecutive().next("c", C).within(HOUR), "a b c"),
            relaxed=(LOOP.followed_by("c", C).within(HOUR), "a b c"),
            every=(LOOP.allow_combinations().followed_by("c", C).within(HOUR), "a b c"),
        ),
        {
            "strict": answer("a b3 c"),
            "relaxed": answer(
                "a b1 c", "a b1 b2 c", "a b1 b2 b3 c", "a b2 c", "a b2 b3 c", "a b3 c"
            ),
            "every": answer(
                "a b1 c", "a b1 b2 c", "a b1 b3 c", "a b1 b2 b3 c", "a b2 c", "a b2 b3 c", "a b3 c"
            ),
        },
    ),
    Case(
        "S3",
        "what a match skips",
        [*events("b1 b2 b3 c"), Reach(LONG)],
        matching(
            none=(RUN, "b c"),
            past=(RUN.skip("past_last"), "b c"),
            last=(RUN.skip("to_last", "b"), "b c"),
        ),
        {
            "none": answer("b1 b2 b3 c", "b2 b3 c", "b3 c"),
            "past": answer("b1 b2 b3 c"),
            "last": answer("b1 b2 b3 c", "b3 c"),
        },
    ),
    Case(
        "S4",
        "what must not come until within is over",
        [
            event(0, id="a1"),
            event(10, id="b1"),
            event(20, id="a2"),
            event(30.000001, id="b2"),
            event(40, key="b", id="a3"),
            Reach(LONG),
        ],
        matching(unpaid=(UNPAID, "a")),
        {
            "unpaid": Answer(
                "key match match_start match_end",
                [("a", "a2", 20.0, 20.0), ("b", "a3", 40.0, 40.0)],
                key=("key", "match"),
            )
        },
    ),
    Case(
        "S5",
        "conditions over matched rows, in the order of time",
        [
            event(3, 7, id="c1"),
            event(0, 5, id="a1"),
            event(1, 6, id="x1"),
            event(2, 3, id="b1"),
            event(4, 1, id="c2"),
            Reach(LONG),
        ],
        matching(fall=(FALL, "a b c")),
        {"fall": answer("a1 b1 c1")},
        delay=10,
    ),
]
