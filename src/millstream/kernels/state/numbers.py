"""Numbers for the rows of an operator: no two rows of a family have the same, also not in different buckets.

At first each bucket counts by itself, from 0. The first rescale raises the numbers of each bucket above those of the
buckets before it, once; from then on each of ``n`` buckets gives out every n-th number from a common start, and no rescale
changes a number any more. So what was divided and is put together again is what it was, and the numbers do not outgrow
the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from millstream.kernels.arrays import Int64s


def take_numbers(values: dict[str, Any], counter: str, count: int) -> Int64s:
    """Return so many new numbers, rising; ``values`` are those of the operator's state, where ``counter`` is kept."""
    first: int = values.get(counter, 0)
    step: int = values.get(step_of(counter), 1)
    values[counter] = first + step * count
    return first + step * np.arange(count)


def step_of(counter: str) -> str:
    """Return the name of the value that says by how much numbers rise; without it, other buckets have the same ones."""
    return f"{counter}.step"


def end_of_numbers(values: Mapping[str, Any], counter: str) -> int:
    """Return a number above all that a bucket has given out.

    Of those that count in common, the highest such number of all is no more than one above the highest that was given out.
    """
    following: int = values.get(counter, 0)
    step: int = values.get(step_of(counter), 1)
    return following - step + 1


@dataclass(frozen=True)
class Numbering:
    """How a rescale makes the numbers of a family differ: by how much it raises those of each bucket, and where new ones begin."""

    raised: Mapping[int, int]
    end: int
    was_common: bool  # no two buckets had the same number before

    @classmethod
    def of(cls, ends: Iterable[tuple[int, int]], *, common: bool) -> Numbering:
        """Return it, given of each bucket the number above all of its own."""
        raised: dict[int, int] = {}
        total = highest = 0
        for bucket, end in sorted(ends):
            raised[bucket] = 0 if common else total
            total, highest = total + end, max(highest, end)
        return cls(raised, highest if common else total, common)
