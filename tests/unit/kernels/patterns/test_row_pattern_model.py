"""Random row patterns over random rows give what the naive model says, however they are divided among batches."""

import os
import random

import pytest
from row_pattern_model import CannotSkipError, Draw, TooManyTriesError, declared, model
from row_pattern_run import kernel_of, run

import millstream as ms
from millstream.errors import ConfigError, UserCodeError

PATTERNS = int(os.environ.get("MILLSTREAM_TEST_PATTERNS", "40"))
FIRST = int(os.environ.get("MILLSTREAM_TEST_FIRST_PATTERN", "0"))
CHUNK = 20


@pytest.mark.parametrize("start", range(FIRST, FIRST + PATTERNS, CHUNK))
def test_random_row_patterns_give_what_the_model_says(start):
    problems = [text for seed in range(start, start + CHUNK) for text in differences(seed)]
    assert not problems, "\n".join(problems[:5])


def differences(seed):
    draw = Draw(seed)
    pattern = draw.pattern()
    rows = {key: draw.rows(draw.dice.choice([3, 5, 8])) for key in "uvwxyz"}
    several = draw.dice.choice([2, 4, 9])
    try:
        kernel = kernel_of(
            declared(pattern),
            {name: measure(ref) for name, ref in pattern.measures.items()},
            pattern.rows,
        )
        meant = {key: meant_of(pattern, own) for key, own in rows.items()}
    except ConfigError as error:
        assert "{- -}" in str(error) or "first row of each match" in str(error), error
        return
    except TooManyTriesError:
        return
    except CannotSkipError:
        meant = None
    outputs = [result(kernel, rows, batches, seed) for batches in (1, several)]
    found = outputs[0] and {key: emitted(pattern, outputs[0], key) for key in rows}
    if found != meant and (outputs[0] or meant is None or any(meant.values())):
        yield f"seed {seed}: {declared(pattern).explain()}\n{pattern}\nrows {rows}\nmeant {meant}\nfound {found}"
    if outputs[0] != outputs[1]:
        yield f"seed {seed}: {pattern}\nrows {rows}\nin one batch {outputs[0]}\nin {several} {outputs[1]}"


def result(kernel, rows, batches, seed):
    """Return what is emitted; None, where a match cannot be skipped from."""
    try:
        return run(kernel, rows, batches, random.Random(seed))
    except UserCodeError as error:
        assert "after_match" in str(error), error
        return None


def meant_of(pattern, rows):
    meant = model(pattern, rows)
    return [in_time(rows, one) for one in meant] if pattern.rows == "one" else meant


def measure(ref):
    return ms.match_number() if ref == "number" else ref.expression


def emitted(pattern, made, key):
    rows = [row for row in made if row["k"] == key]
    names = list(pattern.measures)
    if pattern.rows != "one":
        return [(row["row"], None, tuple(row[name] for name in names)) for row in rows]
    return [
        (at(row["match_start"]), at(row["match_end"]), tuple(row[name] for name in names))
        for row in rows
    ]


def in_time(rows, one):
    start, end, measures = one
    return rows[start]["at"], None if end is None else rows[end]["at"], measures


def at(time):
    return None if time is None else time.timestamp()
