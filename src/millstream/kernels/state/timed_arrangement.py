"""An arrangement whose rows leave by their time: signed changes by the hash of a key, in slots of event time.

It is :class:`~millstream.kernels.state.arrangement.Arrangement`, divided by ``__time``. A look-up reads the slots
from a time on; what the watermark has passed goes slot by slot, without being read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import polars as pl

from millstream.kernels.changes import concat_present, consolidate, total_weight
from millstream.kernels.frames import TIME, WEIGHT
from millstream.kernels.state.arrangement import nothing_owed
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import SortedRuns

_SLOT = "__slot"


@dataclass
class TimedArrangement:
    """The rows of one family of an operator's state, with ``__hash``, ``__time``, ``__weight`` and fixed columns."""

    state: OperatorState
    family: str
    slot_us: int

    @property
    def runs(self) -> SortedRuns:
        """The runs that hold the changes, counted by their weights."""
        return self.state.runs(self.family, WEIGHT, signed=True)

    def look_up(self, hashes: Hashes, since_us: int) -> pl.DataFrame | None:
        """Return the rows with these hashes (sorted, distinct) from a time on; None if there are none.

        Rows of other keys with the same hash come along: compare the keys.
        """
        runs = self.runs
        slots = [slot for slot in sorted(runs.slots) if slot >= since_us // self.slot_us]
        found = concat_present([rows for slot in slots for rows in runs.look_up(slot, hashes)])
        if found is None:
            return None
        held = nothing_owed(consolidate(found)).filter(pl.col(TIME) >= since_us)
        return held if held.height else None

    def advance(self, changes: pl.DataFrame | None, before_us: int) -> int:
        """Add changes, those of one slot in the order in which they stand; forget the slots that end by a time.

        Return the weight of what is forgotten, of the changes and of what was held.
        """
        passed = [slot for slot in self.runs.slots if self._is_passed(slot, before_us)]
        forgotten = sum(self.runs.drop_slot(slot) for slot in passed)
        for slot, part in self._by_slot(changes) if changes is not None else ():
            if self._is_passed(slot, before_us):
                forgotten += total_weight(part)
            else:
                self.runs.add(slot, part, partial(self._folded, slot))
        return forgotten

    def _is_passed(self, slot: int, time_us: int) -> bool:
        return (slot + 1) * self.slot_us <= time_us

    def _by_slot(self, rows: pl.DataFrame) -> Iterator[tuple[int, pl.DataFrame]]:
        slots = rows.with_columns((pl.col(TIME) // self.slot_us).alias(_SLOT))
        parts = slots.partition_by(_SLOT, as_dict=True, include_key=False, maintain_order=True)
        for (slot,), part in sorted(parts.items()):
            yield int(slot), part

    def _folded(self, slot: int, rows: pl.DataFrame) -> pl.DataFrame:
        held = consolidate(rows)
        return held if self.runs.slots.get(slot) else nothing_owed(held)  # no run is older
