"""Random row patterns over random rows give what the naive model says, however they are divided among batches."""

import os
import random

import numpy as np
import polars as pl
import pytest
from pattern_run import NothingToDeclareError
from row_pattern_model import Draw, TooManyTriesError, declared, model
from row_pattern_run import kernel_of, kernel_of_drawn, run

import millstream as ms
from millstream.kernels.patterns import row_matcher, row_operator

PATTERNS = int(os.environ.get("MILLSTREAM_TEST_PATTERNS", "40"))
FIRST = int(os.environ.get("MILLSTREAM_TEST_FIRST_PATTERN", "0"))
CHUNK = 20


@pytest.mark.parametrize("start", range(FIRST, FIRST + PATTERNS, CHUNK))
def test_random_row_patterns_give_what_the_model_says(start):
    emitted_rows = 0
    for seed in range(start, start + CHUNK):
        problems, rows = compared(seed)
        assert not problems, "\n".join(problems)
        emitted_rows += rows
    assert emitted_rows


def test_rows_that_begin_no_match_are_left_out_as_if_each_was_searched_from(monkeypatch):
    monkeypatch.setattr(row_matcher, "AHEAD_COST", 0)
    left_out, local = [], []
    begins_none, truths = row_matcher._begins_none, row_operator.truths
    monkeypatch.setattr(
        row_matcher,
        "_begins_none",
        lambda *given: (left_out.append(found := begins_none(*given)), found)[1],
    )
    monkeypatch.setattr(row_operator, "truths", lambda *given: (local.append(1), truths(*given))[1])
    seeds = [seed for seed in range(6000, 6200) if is_local(seed)]
    for seed in seeds:
        problems, _ = compared(seed)
        assert not problems, "\n".join(problems)
    assert len(seeds) > 20
    assert sum(left_out) > 50
    assert local


def is_local(seed):
    """Return whether no condition of a drawn pattern depends on where a match begins."""
    try:
        return len(kernel_of_drawn(Draw(seed).pattern()).tables.variable_of) > 0
    except NothingToDeclareError:
        return False


B, C = ms.variable("B"), ms.variable("C")
NEVER_ENDED = [
    ("A+ B", {"A": pl.col("v") == "a", "B": pl.col("v") == "b"}),
    ("A B+ C", {"B": pl.col("n") < B.prev()["n"], "C": pl.col("n") > C.prev()["n"]}),
]


@pytest.mark.parametrize(("text", "define"), NEVER_ENDED)
def test_rows_that_begin_no_match_take_steps_in_proportion_to_them(text, define, monkeypatch):
    steps = []
    step, reached = row_matcher._step, row_matcher._reached
    monkeypatch.setattr(row_matcher, "_step", lambda *given: (steps.append(1), step(*given))[1])
    monkeypatch.setattr(
        row_matcher, "_reached", lambda *given: (steps.append(1), reached(*given))[1]
    )
    taken = []
    for count in (200, 800):
        pattern = ms.row_pattern(text, define=define, within=f"{count // 2} seconds")
        rows = [{"at": at, "v": "a", "n": -at} for at in range(count)]
        steps.clear()
        kernel = kernel_of(pattern, {"n": ms.match_number()})
        assert run(kernel, {"x": rows}, 1, random.Random(1)) == []
        taken.append(len(steps))
    assert taken[1] < 5 * taken[0]


def test_rows_that_come_in_another_order_give_the_same_in_any_batches():
    emitted_rows = 0
    for seed in range(4000, 4008):
        draw = Draw(seed)
        pattern, rows = draw.pattern(), {key: draw.rows(10) for key in "vwxyz"}
        try:
            kernel = kernel_of_drawn(pattern)
            one, many = (
                run(kernel, rows, batches, random.Random(seed), delay=6) for batches in (1, 12)
            )
        except NothingToDeclareError:
            continue
        assert [ordered(row) for row in one] == [ordered(row) for row in many], seed
        emitted_rows += len(one)
    assert emitted_rows > 50


def ordered(row):
    return {name: value for name, value in row.items() if name != "__released"}


def test_a_matcher_that_has_too_little_room_begins_again_with_more(monkeypatch):
    made = row_operator._new_work
    rooms = []

    def small(tables, keys, depth, taken):
        rooms.append((depth, taken))
        work = made(tables, keys, depth, taken // 2000 + 1)
        return work._replace(stack=np.zeros((depth + 1, 2), np.int64))

    monkeypatch.setattr(row_operator, "_DEPTH_FIRST", 1)
    monkeypatch.setattr(row_operator, "_new_work", small)
    for seed in range(2000, 2010):
        problems, _ = compared(seed)
        assert not problems, "\n".join(problems)
    assert {depth > 1 for depth, _ in rooms} == {False, True}
    assert max(taken for _, taken in rooms) > 4000


def compared(seed):
    """Return the differences for a seed, and how many rows are emitted."""
    draw = Draw(seed)
    pattern = draw.pattern()
    rows = {key: draw.rows(draw.dice.choice([3, 5, 8])) for key in "uvwxyz"}
    several = draw.dice.choice([2, 4, 9])
    given_up = {key: [] for key in rows}
    try:
        kernel = kernel_of_drawn(pattern)
        meant = {key: meant_of(pattern, own, given_up[key]) for key, own in rows.items()}
    except (NothingToDeclareError, TooManyTriesError):
        return [], 0
    failed = [], []
    one, more = (
        run(kernel, rows, batches, random.Random(seed), failed=own)
        for batches, own in zip((1, several), failed, strict=True)
    )
    problems = []
    found = {key: emitted(pattern, one, key) for key in rows}
    dead = {
        key: [
            (at(row["match_start"]), at(row["match_end"])) for row in failed[0] if row["k"] == key
        ]
        for key in rows
    }
    lost = {
        key: [(rows[key][first]["at"], rows[key][last]["at"]) for first, last in own]
        for key, own in given_up.items()
    }
    if (found, dead) != (meant, lost):
        drawn = declared(pattern).explain()
        problems = [
            f"seed {seed}: {drawn}\n{pattern}\nrows {rows}\nmeant {meant}, {lost}\nfound {found}, {dead}"
        ]
    if one != more or sorted(map(str, failed[0])) != sorted(map(str, failed[1])):
        problems.append(
            f"seed {seed}: {pattern}\nrows {rows}\nin one batch {one}\nin {several} {more}\nfailed {failed}"
        )
    return problems, len(one)


def meant_of(pattern, rows, given_up):
    meant = model(pattern, rows, given_up)
    return [in_time(rows, one) for one in meant] if pattern.rows == "one" else meant


def in_time(rows, one):
    start, end, measures = one
    return rows[start]["at"], None if end is None else rows[end]["at"], measures


def emitted(pattern, made, key):
    rows = [row for row in made if row["k"] == key]
    names = list(pattern.measures)
    if pattern.rows != "one":
        return [(row["row"], None, tuple(row[name] for name in names)) for row in rows]
    return [
        (at(row["match_start"]), at(row["match_end"]), tuple(row[name] for name in names))
        for row in rows
    ]


def at(time):
    return None if time is None else time.timestamp()
