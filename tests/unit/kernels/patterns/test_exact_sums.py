"""Counts, sums and means of whole numbers of matched rows, for any size of numbers, beside Python's own."""

import random

import polars as pl
import pytest
from row_pattern_run import kernel_of, run

import millstream as ms
from millstream.kernels.patterns import row_measures

A = ms.variable("A")
PATTERN = ms.row_pattern("A+ B", define={"A": pl.col("v") == "a", "B": pl.col("v") == "b"})
MEASURES = {
    "count": A.count("n"),
    "sum": A.sum("n"),
    "mean": A.mean("n"),
}


def expected(rows):
    """Return counts, sums and means of each run of rows "a" that a "b" ends."""
    found, run_of_a = [], []
    for row in rows:
        if row["v"] == "a":
            run_of_a.append(row["n"])
            continue
        if row["v"] == "b" and run_of_a:
            numbers = [number for number in run_of_a if number is not None]
            total = sum(numbers) if numbers else None
            found.append((len(numbers), total, total / len(numbers) if numbers else None))
        run_of_a = []
    return found


@pytest.mark.parametrize("size", [5, 2**40, 2**50, 2**53, 2**57])
def test_they_are_those_of_python(size, monkeypatch):
    taken = []
    exact = row_measures._Members.exact
    monkeypatch.setattr(
        row_measures._Members,
        "exact",
        lambda *given: (taken.append(made := exact(*given)), made)[1],
    )
    dice = random.Random(size)
    rows = [
        {"at": at, "v": dice.choice("aaaabc"), "n": dice.choice([None, dice.randint(-size, size)])}
        for at in range(200)
    ]
    for batches in (1, 7):
        made = run(kernel_of(PATTERN, MEASURES), {"x": rows}, batches, random.Random(batches))
        found = [(row["count"], row["sum"], row["mean"]) for row in made]
        meant = expected(rows)
        assert [one[:2] for one in found] == [one[:2] for one in meant]
        means = [one[2] for one in meant]
        close = [mean if mean is None else pytest.approx(mean, rel=1e-12) for mean in means]
        assert [one[2] for one in found] == close
    were_exact = {one is not None for one in taken}
    assert were_exact == {5: {True}, 2**40: {True}, 2**57: {False}}.get(size, {True, False})
