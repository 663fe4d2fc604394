"""Steps whose state says what they have given out: the sum of all signed changes so far.

Such a step can be read instead of its input. A table with a key has the latest row of each key, a group its aggregates, so their rows are
what all that they have given out comes to. A window has partials of which some were not given out, and none of those that it has closed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import polars as pl

from millstream.kernels.changes import with_diff
from millstream.kernels.frames import TIME, WEIGHT, visible
from millstream.kernels.state.operator_state import OperatorState


@runtime_checkable
class HeldTable(Protocol):
    """An operator whose state is what it has given out."""

    @property
    def name(self) -> str: ...

    @property
    def row_key(self) -> tuple[str, ...]:
        """The columns that identify a row of those given out; none if that is not known."""
        ...

    @property
    def rows_family(self) -> str:
        """The family of runs of state that its rows are in."""
        ...

    def given_out(self, state: OperatorState, rows_max: int) -> Iterator[pl.DataFrame]:
        """Yield the rows of one bucket that hold, as they were given out: with time and ``__diff``.

        About ``rows_max`` rows of state are in memory at once. Equal rows come as often as they hold.
        """
        ...


def as_given_out(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows that hold, with ``__weight``, as an operator gives signed changes out."""
    return with_diff(rows[[*visible(rows.columns), TIME, WEIGHT]])
