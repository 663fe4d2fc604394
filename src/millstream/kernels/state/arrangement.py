"""An arrangement: the rows of a table in state, found by the hash of a key.

What is stored are signed changes, in sorted runs: a batch adds its own, and reads nothing for it. The rows of
a key are the sum of its changes in all runs. A fold adds up the weights of equal rows, so a row that was
taken back leaves the state with it; rows that are only added are never compared.

Source: McSherry et al., "Shared Arrangements: practical inter-query sharing for streaming dataflows",
PVLDB 13(10), 2020 (a multiversioned index over a log-structured merge tree of changes).

Whenever all changes of a key are seen, in a look-up or in a fold of all runs, no row may be owed: one that was
taken back without having been added shows that a change was lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from millstream.errors import CorruptionError
from millstream.kernels.changes import concat_present, consolidate
from millstream.kernels.frames import HASH, WEIGHT
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.hash_parts import parts_by_hash
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import SortedRuns

_SLOT = 0


@dataclass
class Arrangement:
    """The rows of one family of an operator's state, with ``__hash``, ``__weight`` and fixed columns."""

    state: OperatorState
    family: str

    @property
    def runs(self) -> SortedRuns:
        """The runs that hold the changes, counted by their weights."""
        return self.state.runs(self.family, WEIGHT, signed=True)

    def look_up(self, hashes: Hashes) -> pl.DataFrame | None:
        """Return the rows with these hashes (in any order); None if there are none.

        Rows of other keys with the same hash come along: compare the keys.
        """
        if not len(hashes) or not self.runs.slots.get(_SLOT):
            return None
        found = concat_present(list(self.runs.look_up(_SLOT, sorted_distinct(hashes))))
        if found is None:
            return None
        held = nothing_owed(consolidate(found))
        return held if held.height else None

    def add(self, changes: pl.DataFrame) -> None:
        """Add changes: rows with ``__hash`` and ``__weight``."""
        if changes.height:
            self.runs.add(_SLOT, changes, self._folded)

    def _folded(self, rows: pl.DataFrame) -> pl.DataFrame:
        held = consolidate(rows)
        return held if self.runs.slots.get(_SLOT) else nothing_owed(held)  # no run is older

    def scan(self) -> pl.DataFrame | None:
        """Return all rows. It costs all that is held: for tests and for looking at state."""
        held = concat_present(list(self.runs.scan(_SLOT)))
        return None if held is None else consolidate(held.sort(HASH, maintain_order=True))

    def parts(self, rows_max: int) -> Iterator[pl.DataFrame]:
        """Yield all rows in parts, each made of about ``rows_max`` stored changes: those of a range of hashes."""
        for pieces in parts_by_hash(self.runs, _SLOT, rows_max):
            rows = nothing_owed(consolidate(pl.concat(pieces)))
            if rows.height:
                yield rows


def nothing_owed(held: pl.DataFrame) -> pl.DataFrame:
    """Return the sum of all changes of some keys, in which no row is there less than not at all.

    Raises:
        CorruptionError: a row was taken back more often than it was added.
    """
    if not held.height or int(held[WEIGHT].min()) > 0:  # type: ignore[arg-type]
        return held
    raise CorruptionError(
        "The ledger of the state does not balance: a row of a table was taken back that is not in it. "
        "Nothing of this batch was committed. A function or expression above that does not give the same "
        "for the same row (by chance, or by the clock) would do that; if there is none, please report this. "
        "The log still holds every event."
    )
