"""Random patterns over random rows give what the naive model says, however they are divided among batches."""

import os
import random

import pytest
from pattern_model import Draw, declared, model
from pattern_run import NothingToDeclareError, kernel_of, run

PATTERNS = int(os.environ.get("MILLSTREAM_TEST_PATTERNS", "40"))
FIRST = int(os.environ.get("MILLSTREAM_TEST_FIRST_PATTERN", "0"))
CHUNK = 20


@pytest.mark.parametrize("start", range(FIRST, FIRST + PATTERNS, CHUNK))
def test_random_patterns_give_what_the_model_says(start):
    problems = [text for seed in range(start, start + CHUNK) for text in differences(seed)]
    assert not problems, "\n".join(problems[:5])


def differences(seed):
    draw = Draw(seed)
    pattern = draw.pattern()
    rows = {key: draw.rows(draw.dice.choice([3, 5, 7])) for key in "uvwxyz"}
    try:
        kernel = kernel_of(declared(pattern))
    except NothingToDeclareError:
        return
    meant = {(key, match) for key, own in rows.items() for match in model(pattern, own)}
    for batches in (1, draw.dice.choice([2, 4, 9])):
        found = run(kernel, rows, batches, random.Random(seed))
        if len(set(found)) != len(found):
            yield f"seed {seed}, batches {batches}: a match came twice: {found}"
        if set(found) != meant:
            yield (
                f"seed {seed}, batches {batches}: {pattern}\nrows {rows}\n"
                f"missing {sorted(meant - set(found))}\nadded {sorted(set(found) - meant)}"
            )
            return
