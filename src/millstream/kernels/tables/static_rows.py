"""A table whose rows are given with the program, and replaced as a whole when the program gives others.

The rows are compared with those that the state holds in the first batch of a run. What differs comes out as
signed changes of that one batch, so what is derived from the table sees the old rows or the new ones, and
nothing between. The program's definition has the columns and the key, and not the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import polars as pl

from millstream.kernels.changes import consolidate, total_weight, with_diff
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import HASH, TIME, WEIGHT, rows_digest
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.operator_base import OperatorBase
from millstream.kernels.queryable import KeyColumns, QueryKeys, held_with_weights
from millstream.kernels.state.arrangement import Arrangement
from millstream.kernels.state.keyhash import buckets_of, hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState

_DIGEST = "digest"


@dataclass(frozen=True)
class StaticRows(OperatorBase):
    """An operator without inputs. ``by`` is the key, which is different in all of ``rows``.

    The rows are in the order of the key, so that it does not matter in which order they were given.
    """

    name: str
    by: tuple[str, ...]
    rows: pl.DataFrame

    @cached_property
    def digest(self) -> str:
        """A text that says which rows these are: computed once, as they may be many."""
        return rows_digest(self.rows)

    def columns_read(self, number: int) -> set[str]:
        raise NotImplementedError(f"{self.name} has no input {number}")

    def prepare(self, rows: pl.DataFrame, number: int) -> Prepared:
        raise NotImplementedError(f"{self.name} has no input {number}, and got {rows.height} rows")

    def pack(self, tables: Sequence[pl.DataFrame], number: int = 0) -> pl.DataFrame:
        raise NotImplementedError(f"{self.name} has no input {number}, and got {len(tables)}")

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Return how the rows differ from those that the state holds; hold these."""
        assert not inputs, "nothing leads to it"
        result = OperatorResult()
        if state.values.get(_DIGEST) == self.digest:
            return result
        kept = Arrangement(state, "rows")
        ledger = StateLedger(self.name, (kept.runs,))
        rows = self._of_bucket(context)
        held = kept.scan()
        if held is not None:
            taken_back = held.with_columns(-pl.col(WEIGHT))[rows.columns]
            rows = consolidate(pl.concat([taken_back, rows]))
        if rows.height:
            result.rows = with_diff(rows.drop(HASH))
        ledger.events_in = total_weight(rows)
        kept.add(rows)
        ledger.check()
        state.values[_DIGEST] = self.digest
        return result

    @property
    def query_key(self) -> KeyColumns | None:
        return tuple((name, self.rows.schema[name]) for name in self.by)

    def current_rows(
        self,
        state: OperatorState,
        keys: QueryKeys | None,
        watermark_us: int,  # noqa: ARG002 - rows have no end in time
    ) -> pl.DataFrame:
        """Return the rows of the table."""
        held = held_with_weights(Arrangement(state, "rows"), keys, self.by)
        return self.rows.clear() if held is None else held[self.rows.columns]

    def _of_bucket(self, context: BatchContext) -> pl.DataFrame:
        """Return the rows whose keys are in the bucket."""
        hashes = hash_columns(self.rows, self.by, context.seed)
        rows = self.rows.with_columns(
            pl.lit(0, pl.Int64).alias(TIME),
            pl.lit(1, pl.Int64).alias(WEIGHT),
            pl.Series(HASH, hashes),
        )
        return filter_rows(rows, buckets_of(hashes, context.bucket_count) == context.bucket)
