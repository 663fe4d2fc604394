"""The compiled matcher gives what the one in Python gives: the same matches, in the same order, and the same state."""

import random

import pytest
import row_pattern_model
from pattern_model import Draw, declared
from pattern_run import NothingToDeclareError, kernel_of, run
from row_pattern_run import kernel_of_drawn
from row_pattern_run import run as run_rows

from millstream.kernels import jit
from millstream.kernels.patterns import compiled


@pytest.mark.thorough  # compiling takes some 15 CPU seconds
def test_the_compiled_matcher_gives_the_same(monkeypatch):
    assert jit.is_available()
    seen = 0
    for seed in range(5000, 5040):
        draw = Draw(seed)
        pattern, rows = draw.pattern(), {key: draw.rows(12) for key in "vwxyz"}
        try:
            kernel = kernel_of(declared(pattern))
        except NothingToDeclareError:
            continue
        in_python = run(kernel, rows, 3, random.Random(seed))
        monkeypatch.setattr(compiled, "COMPILED_ROWS_MIN", 0)
        assert run(kernel, rows, 3, random.Random(seed)) == in_python, seed
        monkeypatch.undo()
        seen += len(in_python)
    assert seen > 100


@pytest.mark.thorough  # compiling takes some 20 CPU seconds
def test_the_compiled_matcher_of_row_patterns_gives_the_same(monkeypatch):
    seen = 0
    for seed in range(9000, 9040):
        draw = row_pattern_model.Draw(seed)
        pattern, rows = draw.pattern(), {key: draw.rows(12) for key in "vwxyz"}
        try:
            kernel = kernel_of_drawn(pattern)
        except NothingToDeclareError:
            continue
        failed = [], []
        in_python = run_rows(kernel, rows, 3, random.Random(seed), failed=failed[0])
        monkeypatch.setattr(compiled, "COMPILED_ROWS_MIN", 0)
        found = run_rows(kernel, rows, 3, random.Random(seed), failed=failed[1])
        assert (found, failed[1]) == (in_python, failed[0]), seed
        monkeypatch.undo()
        seen += len(in_python)
    assert seen > 100
