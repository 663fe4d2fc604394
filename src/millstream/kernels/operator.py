"""What a stateful step is to those that run it: rows in, rows out, state in one bucket of keys.

An operator is a frozen value that travels with the plan. It is called twice in a batch, and is a
pure function both times: ``prepare`` before the shuffle, once for each table of rows on the way to
it, and ``process`` after the shuffle, once for each bucket, with what came in and the state of that
bucket. Nothing here knows of Spark; what runs operators is :mod:`millstream.kernels.stage`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from millstream.kernels.frames import LANE, REACHED
from millstream.kernels.sorted_runs import RunStore, SortedRuns


@dataclass(frozen=True)
class Prepared:
    """What of a table of rows goes through the shuffle, and how many of its rows were late.

    ``counts`` are what else is to be entered in the books: further exits, and notes.
    ``late_by_us`` is the most by which one of them missed, where that is known.
    """

    table: pl.DataFrame
    late: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    late_by_us: int = 0


@dataclass(frozen=True)
class Moment:
    """When a batch is, for one operator in one bucket. Event time in microseconds.

    ``before_us`` and ``watermark_us`` are the operator's watermark before and after the batch;
    ``baselines`` gives the watermark that was in force in each lane before its first row, and
    ``clock_ms`` is the running time of the job, and ``seed`` that of its hashes of keys.
    """

    before_us: int
    watermark_us: int
    baselines: Mapping[int, int] = field(default_factory=dict)
    clock_ms: int = 0
    seed: int = 0

    def reached(self, rows: pl.DataFrame) -> npt.NDArray[np.int64]:
        """Give, for each row, the watermark that was in force in its lane before the row.

        That is what earlier batches had shown, or what this batch read before it (``__reached``),
        whichever is later. Rows without a lane came from another operator: for them it is the
        operator's own.
        """
        if LANE in rows.columns:
            earlier = self._baselines(rows[LANE].to_numpy())
        else:
            earlier = np.full(rows.height, self.before_us, np.int64)
        return np.maximum(earlier, rows[REACHED].to_numpy()) if REACHED in rows.columns else earlier

    def _baselines(self, lanes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if len(lanes) and lanes.min() == lanes.max():  # the rows of one task
            return np.full(len(lanes), self.baselines.get(int(lanes[0]), self.before_us))
        there, at = np.unique(lanes, return_inverse=True)
        known = [self.baselines.get(int(lane), self.before_us) for lane in there]
        return np.array(known, np.int64)[at]


@dataclass
class Outcome:
    """What an operator gives for one batch of one bucket.

    ``rows`` go down its edges and ``late`` down the edges of its side output; ``counts`` say by
    which exit the events that came in left (see ``LEDGER_EXITS``), and must add up to them.
    ``facts`` are numbers to report beside the books, of which the largest over all buckets stands;
    ``late_by_us`` is the most by which a late event missed, where that is known.
    """

    rows: pl.DataFrame | None = None
    late: pl.DataFrame | None = None
    counts: Counter[str] = field(default_factory=Counter)
    facts: dict[str, float] = field(default_factory=dict)
    late_by_us: int = 0


@dataclass
class OperatorState:
    """An operator's state in one bucket: families of sorted runs, and small values of JSON kinds.

    Both are in the manifest, which is read and written with every batch: keep the values few.
    """

    store: RunStore
    families: dict[str, SortedRuns] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def runs(self, family: str, counted: str | None = None, *, signed: bool = False) -> SortedRuns:
        """Give the runs of a family; the operator names its families as it likes.

        ``counted`` and ``signed`` are as in :class:`SortedRuns`, and the same whenever the family is
        asked for.
        """
        runs = self.families.setdefault(family, SortedRuns(self.store))
        runs.counted, runs.signed = counted, signed
        return runs

    @property
    def size_bytes(self) -> int:
        return sum(runs.size_bytes for runs in self.families.values())

    def to_message(self) -> dict[str, Any]:
        """Give what the manifest keeps."""
        runs = {name: found.to_message() for name, found in sorted(self.families.items())}
        spent = {
            name: {str(slot): events for slot, events in sorted(found.spent.items())}
            for name, found in sorted(self.families.items())
        }
        return {
            "runs": {name: found for name, found in runs.items() if found},
            "spent": {name: slots for name, slots in spent.items() if slots},
            "values": self.values,
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any] | None, store: RunStore) -> OperatorState:
        if message is None:
            return cls(store)
        families = {
            name: SortedRuns.from_message(found, store, message["spent"].get(name, {}))
            for name, found in message["runs"].items()
        }
        return cls(store, families, message["values"])


def run_names(message: Mapping[str, Any] | None) -> set[str]:
    """Name the runs that an operator's part of a manifest holds on to."""
    return {entry[0] for found in (message or {"runs": {}})["runs"].values() for entry in found}


class Operator(Protocol):
    """One stateful step. Its inputs are numbered from 0."""

    @property
    def name(self) -> str: ...

    @property
    def by(self) -> tuple[str, ...]:
        """The columns whose values choose the bucket; what :meth:`prepare` gives has them."""
        ...

    @property
    def transparent(self) -> bool:
        """Whether it emits, in the batch of their arrival, only rows that came in, as they were.

        Such rows keep their lane and the watermark that was in force before them, so the next
        operator judges them as if they came straight from the source.
        """
        ...

    @property
    def ordered(self) -> bool:
        """Whether it reads ``__order``, the place of a row in its partition."""
        ...

    @property
    def heartbeat_ms(self) -> int | None:
        """How often it wants a batch, in running time, even without input; None: never."""
        ...

    def columns_read(self, number: int) -> set[str]:
        """Name the columns of an input that it reads itself."""
        ...

    def prepare(self, rows: pl.DataFrame, number: int) -> Prepared:
        """Take rows of an input before the shuffle: leave out what is late, reduce what can be.

        The rows have ``__time``, and if they come straight from a source ``__lane`` and
        ``__reached``, the watermark that their partition had reached before them.
        """
        ...

    def pack(self, tables: Sequence[pl.DataFrame], number: int) -> pl.DataFrame:
        """Put what :meth:`prepare` gave for several tables together."""
        ...

    def process(
        self, state: OperatorState, arrived: Mapping[int, Sequence[pl.DataFrame]], moment: Moment
    ) -> Outcome:
        """Take in what came through the shuffle, by input; give what comes out, and move the state."""
        ...

    def holds_back(self, watermark_us: int) -> int:
        """Give the watermark of what it emits, given that of what it takes in."""
        ...
