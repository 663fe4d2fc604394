"""How many examples are drawn: what a test asks for, or the share of it that a run asks for."""

import itertools
import os
import random
from collections.abc import Iterator

PERCENT = int(os.environ.get("MILLSTREAM_TEST_EXAMPLES_PERCENT", "100"))


def some(count: int) -> int:
    """Return the share of ``count`` that this run draws; each run draws others."""
    return max(5, count * PERCENT // 100)


def steps_to_die_at(*, slow: bool = False) -> Iterator[int]:
    """Yield the numbers of the steps at which a process dies, from 1: all, or this run's share, evenly spaced.

    A third of that share, where each is slow.
    """
    stride = max(1, 100 // PERCENT) * (3 if slow and PERCENT < 100 else 1)
    return itertools.count(random.randint(1, stride), stride)


def histories(count: int) -> int:
    """Return how many histories of a join are drawn: ``MILLSTREAM_JOIN_HISTORIES``, or as :func:`some` says."""
    return int(os.environ.get("MILLSTREAM_JOIN_HISTORIES", some(count)))
