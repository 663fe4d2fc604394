"""Checks that outputs do not depend on batches, partitions and crashes.

:func:`replay` runs a pipeline over the same input many times and compares the views. Outputs that may differ
from run to run, such as the early rows of a window, are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from millstream.pipeline.app import App
from millstream.testing.inputs import Inputs
from millstream.testing.run import Result, run

BATCHES_MAX = 9


def replay(
    app: App,
    inputs: Inputs,
    *,
    batchings: int = 20,
    partitions: Sequence[int] = (1, 4, 7),
    crash: int = 1,
    seed: int = 0,
) -> Result:
    """Run the app many times, with random batches and crashes, and check that the views are the same.

    Args:
        inputs: As for :func:`millstream.testing.run`.
        batchings: How many times, each cut into batches in another way.
        partitions: Numbers of partitions, used in turn. Whether an event is late depends on its
            partition, so inputs with late events may have other results with other numbers.
        crash: How many times each run crashes.
        seed: The first of the seeds; a failure names its own.

    Returns:
        The result of the first run: one batch, nothing lost.

    Raises:
        AssertionError: a view, or the number of late or dead events, differs; the message says
            which, for which cuts, and shows rows that are in one and not in the other.
    """
    first = run(app, inputs, partitions=partitions[0], seed=seed)
    for number in range(batchings):
        batches = 1 + (seed + number) % BATCHES_MAX
        count = partitions[number % len(partitions)]
        own = seed + number
        other = run(app, inputs, batches=batches, partitions=count, seed=own, crash=crash)
        options = f"batches={batches}, partitions={count}, seed={own}, crash={crash}"
        _compare(first, other, f"testing.run(app, inputs, {options})")
    return first


def _compare(first: Result, other: Result, call: str) -> None:
    for name in first.views:
        lost, gained = _difference(first[name], other[name])
        if lost.height or gained.height:
            raise AssertionError(
                f"The view {name!r} is another one after {call} than after one batch.\n"
                f"Only after one batch ({lost.height} rows): {lost.head(5)}\n"
                f"Only now ({gained.height} rows): {gained.head(5)}"
            )
    for what, before, now in (
        ("late", first.late, other.late),
        ("dead", first.dead.height, other.dead.height),
    ):
        if before != now:
            raise AssertionError(f"{call} has {now} {what} events, and one batch has {before}.")


def _difference(one: pl.DataFrame, other: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the rows that only the first has, and those that only the second has."""
    numbers = [
        str(n) for n in range(one.width)
    ]  # polars takes a name such as "^a.*$" for a pattern
    ours, theirs = (
        frame.rename(dict(zip(one.columns, numbers, strict=True))) for frame in (one, other)
    )
    lost = ours.join(theirs, on=numbers, how="anti", nulls_equal=True)
    gained = theirs.join(ours, on=numbers, how="anti", nulls_equal=True)
    names = dict(zip(numbers, one.columns, strict=True))
    return lost.rename(names), gained.rename(names)
