"""Captured changes that wait: for the end of their transaction, or for the records before them.

What :mod:`millstream.kernels.tables.transactions` says comes as rows of two kinds. ``transaction`` with ``commit``:
all its rows are due, with that commit; with no commit, it was applied before, and they are dropped. ``partition``
with ``floor``, ``commit`` and ``total``: its rows outside of transactions below that offset are due, with the
version of the last record before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.changes import concat_present
from millstream.kernels.decode.captured import TOTAL, TRANSACTION
from millstream.kernels.frames import HASH, ORDER, WEIGHT
from millstream.kernels.state.arrangement import Arrangement
from millstream.kernels.state.keyhash import Hashes, hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.time.log_order import offset_in, partition_in

COMMIT = "__commit"  # Int64: the place of the transaction's END
PLACE = "__place_in_commit"  # Int64: the place of the record in the transaction
NEW = "__new"  # Boolean: the row came with this batch
_PARTITION = "__partition"  # Int64: of a row outside of transactions; -1 of others
_FAMILY = "waiting"
_BY = (TRANSACTION, _PARTITION)


@dataclass
class WaitingChanges:
    """The rows in state that wait."""

    state: OperatorState
    step: str
    duplicates: int = 0  # rows that came, and were applied before

    def __post_init__(self) -> None:
        self._kept = Arrangement(self.state, _FAMILY)

    @property
    def rows(self) -> int:
        """How many rows wait."""
        return self._kept.runs.events

    def take(self, came: pl.DataFrame | None, decided: pl.DataFrame | None) -> pl.DataFrame | None:
        """Return the rows that are due, of those that came and those that wait; let the others wait."""
        ledger = StateLedger(self.step, (self._kept.runs,))
        decisions = _Decisions.of(decided)
        new = None if came is None else _placed(came)
        held = self._kept.look_up(decisions.hashes)
        if held is not None:
            held = held.drop(WEIGHT, HASH)
        due_held, _ = decisions.divide(held)
        due_new, stay = decisions.divide(new)
        for rows, weight in ((stay, 1), (due_held, -1)):
            if rows is not None and rows.height:
                self._kept.add(_weighed(rows.drop(COMMIT, PLACE), weight))
                ledger.events_in += rows.height if weight > 0 else 0
                ledger.events_out += rows.height if weight < 0 else 0
        ledger.check()
        due = concat_present([_marked(due_held, new=False), _marked(due_new, new=True)])
        if due is None:
            return None
        # All rows of a transaction are due at once, so of one that was sent again the first is here.
        first = due.select(pl.col(ORDER).min().over(TRANSACTION, COMMIT, PLACE)).to_series()
        again = due[TRANSACTION].is_not_null() & (due[ORDER] != first)
        dropped = (due[COMMIT] == _DROPPED) | again
        self.duplicates = int((dropped & due[NEW]).sum())
        applied = due.filter(~dropped).drop(*_BY, TOTAL)
        return applied if applied.height else None


_DROPPED = -3  # instead of a commit: the row was applied before


@dataclass(frozen=True)
class _Decisions:
    """What is said: the commit of each transaction, and of each partition floors with versions."""

    commits: Mapping[str, int]
    floors: Mapping[int, list[tuple[int, int, int]]]

    @classmethod
    def of(cls, decided: pl.DataFrame | None) -> _Decisions:
        commits: dict[str, int] = {}
        floors: dict[int, list[tuple[int, int, int]]] = {}
        for row in [] if decided is None else decided.to_dicts():
            if row["transaction"] is not None:
                commits[row["transaction"]] = _DROPPED if row["commit"] is None else row["commit"]
            else:
                floor = (row["floor"], row["commit"], row["total"])
                floors.setdefault(row["partition"], []).append(floor)
        for found in floors.values():
            found.sort()
        return cls(commits, floors)

    @property
    def hashes(self) -> Hashes:
        named = [(name, -1) for name in self.commits]
        named += [(None, partition) for partition in self.floors]  # type: ignore[misc]
        frame = pl.DataFrame(
            named, schema={TRANSACTION: pl.String, _PARTITION: pl.Int64}, orient="row"
        )
        return hash_columns(frame, _BY)

    def divide(self, rows: pl.DataFrame | None) -> tuple[pl.DataFrame | None, pl.DataFrame | None]:
        """Divide rows into those that are due, with their versions, and the others."""
        if rows is None:
            return None, None
        named = rows[TRANSACTION].replace_strict(
            list(self.commits), list(self.commits.values()), default=None, return_dtype=pl.Int64
        )
        places = rows[TOTAL].zip_with(named.is_not_null(), pl.Series([None], dtype=pl.Int64))
        commits, places = self._of_floors(rows, named, places)
        versioned = rows.with_columns(commits.alias(COMMIT), places.alias(PLACE))
        due = versioned[COMMIT].is_not_null()
        return versioned.filter(due), versioned.filter(~due)

    def _of_floors(
        self, rows: pl.DataFrame, commits: pl.Series, places: pl.Series
    ) -> tuple[pl.Series, pl.Series]:
        """Add the versions of rows outside of transactions."""
        alone = rows[TRANSACTION].is_null().arg_true().to_list()
        if not alone:
            return commits, places
        offsets = offset_in(rows[ORDER].to_numpy())
        found, values = [], []
        for at in alone:
            floors = self.floors.get(rows[_PARTITION][at], ())
            above = next((one for one in floors if one[0] > offsets[at]), None)
            if above is not None:
                found.append(at)
                values.append(above[1:])
        commits = commits.scatter(found, [commit for commit, _ in values])
        return commits, places.scatter(found, [place for _, place in values])


def _marked(rows: pl.DataFrame | None, *, new: bool) -> pl.DataFrame | None:
    return None if rows is None else rows.with_columns(pl.lit(new).alias(NEW))


def _placed(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows with the partition of those that are outside of transactions."""
    partitions = pl.Series(_PARTITION, partition_in(rows[ORDER].to_numpy()))
    alone = rows[TRANSACTION].is_null()
    others = pl.Series(np.full(rows.height, -1, np.int64))
    return rows.hstack([partitions.zip_with(alone, others)])


def _weighed(rows: pl.DataFrame, weight: int) -> pl.DataFrame:
    return rows.with_columns(
        pl.Series(HASH, hash_columns(rows, _BY)), pl.lit(weight, pl.Int64).alias(WEIGHT)
    )
