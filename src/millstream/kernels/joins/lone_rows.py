"""Full joins: rows whose keys are null, of which one of each input may have one primary key.

Null is equal to nothing, so such rows have no partner, and come out by themselves. The columns that are
compared are one column of the result. So a row of the left input and one of the right may look alike in all
columns of the primary key, if the others of these are null as well; and what keeps rows by that key would keep one
of the two. The keys of such rows are held, and a second one is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from millstream.errors import UserCodeError
from millstream.kernels.changes import consolidate
from millstream.kernels.frames import HASH, WEIGHT
from millstream.kernels.state.arrangement import Arrangement
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import SortedRuns

_FAMILIES = ("lone left", "lone right")


@dataclass(frozen=True)
class LoneRows:
    """The keys of the rows of both inputs that would be identified by them alone.

    ``others`` are, of each input, the columns of the primary key that are not compared.
    """

    step: str
    keys: tuple[str, ...]
    others: tuple[tuple[str, ...], tuple[str, ...]]
    state: OperatorState

    @property
    def runs(self) -> tuple[SortedRuns, ...]:
        return tuple(Arrangement(self.state, family).runs for family in _FAMILIES)

    def take(self, rows: pl.DataFrame, number: int) -> int:
        """Keep the keys of an input's changes that have a null in them; return their weight."""
        for name in self.others[number]:
            rows = rows.filter(rows[name].is_null())
        kept = consolidate(rows[[*self.keys, HASH, WEIGHT]])
        Arrangement(self.state, _FAMILIES[number]).add(kept)
        return int(kept[WEIGHT].sum())

    def check(self, hashes: pl.Series) -> None:
        """Make sure that no key is held of both inputs; ``hashes`` are those of the keys that changed.

        Raises:
            UserCodeError: one is.
        """
        left, right = (
            Arrangement(self.state, family).look_up(hashes.to_numpy()) for family in _FAMILIES
        )
        if left is None or right is None:
            return
        if left.join(right, on=[*self.keys, HASH], nulls_equal=True).height:
            raise UserCodeError(
                f"step {self.step!r} has a row of each table whose key is null. Null is equal to "
                "nothing, so they are two rows of the result, which nothing distinguishes: a view would "
                "keep one of them. Leave such rows out first, with "
                "filter(pl.col(…).is_not_null()), or say nulls_equal=True.",
                step=self.step,
            )
