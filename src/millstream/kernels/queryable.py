"""Queryable state: the rows that an operator holds of some keys, as they are between two batches.

An operator that can be asked says by which columns its rows are found, and computes from its state what the rows of
these keys are now: of a window that is open its value so far, of a table its row. It reads the runs that hold the
keys, and changes nothing.

Source: Flink's queryable state, and the interactive queries of Kafka Streams (KIP-67), which answer from the store of a
running operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import polars as pl

from millstream.kernels.changes import with_diff
from millstream.kernels.frames import DIFF, HASH
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import SortedRuns

KeyColumns = tuple[tuple[str, pl.DataType], ...]
"""The columns of a key, with their types, in the order in which they are hashed."""


@dataclass(frozen=True)
class QueryKeys:
    """Keys to be looked up in one bucket: a row each, under the names of the query's key, with ``__hash``."""

    rows: pl.DataFrame

    @property
    def hashes(self) -> Hashes:
        """The hashes of the keys, sorted and distinct."""
        return sorted_distinct(self.rows[HASH].to_numpy())

    def matching(self, held: pl.DataFrame, names: tuple[str, ...]) -> pl.DataFrame:
        """Return the held rows of exactly these keys; ``names`` are the key's columns there.

        Other keys may have the same hash. It is compared, too, as polars does not find NaN in one column of floats.
        """
        own = [name for name in self.rows.columns if name != HASH]
        wanted = pl.DataFrame(
            [self.rows[name].alias(inner) for name, inner in zip(own, names, strict=True)]
        ).hstack([self.rows[HASH]])
        return held.join(
            wanted, on=[*names, HASH], how="semi", nulls_equal=True, maintain_order="left"
        )


@runtime_checkable
class QueryableOperator(Protocol):
    """An operator whose state can be asked for rows."""

    @property
    def name(self) -> str: ...

    @property
    def by(self) -> tuple[str, ...]:
        """The columns that choose the bucket: those of the key, under the operator's names for them; or none."""
        ...

    @property
    def query_key(self) -> KeyColumns | None:
        """The columns by which rows are found; None: this one cannot be asked."""
        ...

    @property
    def queried_as_emitted(self) -> bool:
        """Whether its current rows have the columns of those that it emits; else it has other things to show."""
        ...

    def current_rows(
        self, state: OperatorState, keys: QueryKeys | None, watermark_us: int
    ) -> pl.DataFrame:
        """Return the rows of some keys (None: of all) in one bucket, with the columns that they have, or would have, below.

        Columns that begin with ``__`` may come along. No rows have the right columns, too. ``watermark_us`` is the
        operator's after the last batch.
        """
        ...


def held_in_runs(
    runs: SortedRuns, keys: QueryKeys | None, names: tuple[str, ...]
) -> list[pl.DataFrame]:
    """Return what runs hold of keys, slot by slot and oldest first."""
    found: list[pl.DataFrame] = []
    for slot in sorted(runs.slots):
        if keys is None:
            found += runs.scan(slot)
        else:
            found += (keys.matching(rows, names) for rows in runs.look_up(slot, keys.hashes))
    return found


def held_by_key(
    rows: KeyedRows, keys: QueryKeys | None, names: tuple[str, ...]
) -> pl.DataFrame | None:
    """Return the rows that are held of keys; None if there are none."""
    if keys is None:
        return rows.scan()
    found = rows.get(keys.hashes)
    return None if found is None else keys.matching(found, names)


class KeptRows(Protocol):
    """Rows with weights that are found by the hash of a key."""

    def look_up(self, hashes: Hashes) -> pl.DataFrame | None: ...
    def scan(self) -> pl.DataFrame | None: ...


def held_with_weights(
    kept: KeptRows, keys: QueryKeys | None, names: tuple[str, ...]
) -> pl.DataFrame | None:
    """Return the rows that are held of keys, with their weights; None if there are none."""
    if keys is None:
        return kept.scan()
    found = kept.look_up(keys.hashes)
    return None if found is None else keys.matching(found, names)


def as_often_as_weighed(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows as many times as they weigh, without the weight."""
    return with_diff(rows).drop(DIFF)


def columns_at(columns: tuple[tuple[str, pl.DataType], ...], places: tuple[str, ...]) -> KeyColumns:
    """Return the columns at some places, of operators that name them by these inside."""
    return tuple(columns[int(place)] for place in places)
