"""From rows that may be taken back to a table: of each key the latest row that is there.

The latest row is the one with the greatest event time. What an operator has made has no place in the log, so of
equal times a digest of the row decides. When the latest row is taken back, the one before it counts again. So all rows of a key are kept, and a batch reads those of the keys that it touches. Where rows
stay, one row of each key is enough: :mod:`millstream.kernels.tables.upserts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.changes import (
    consolidate,
    group_numbers,
    total_weight,
    with_diff,
    with_weight,
)
from millstream.kernels.columns import constant
from millstream.kernels.errors.user_code import UnusableRowError
from millstream.kernels.frames import HASH, TIME, WEIGHT
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.queryable import KeyColumns, QueryKeys, columns_at, held_with_weights
from millstream.kernels.state.arrangement import Arrangement, nothing_owed
from millstream.kernels.state.hash_order import differs_from_previous, sorted_distinct
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.row_digest import digest_rows
from millstream.kernels.untimed_operator import UntimedOperator


@dataclass(frozen=True)
class LatestRows(UntimedOperator):
    """The operator that emits how the latest row of each key changes.

    Inside, columns are named by their places: "0", "1", …; ``by``, the key, are such names. ``columns`` are all columns
    with their types.
    """

    name: str
    columns: tuple[tuple[str, pl.DataType], ...]
    by: tuple[str, ...]

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Take the columns, the time and the sign.

        Raises:
            UnusableRowError: the key of a row is null.
        """
        own = [rows[name].alias(str(place)) for place, (name, _) in enumerate(self.columns)]
        for place in self.by:
            if own[int(place)].null_count():
                raise UnusableRowError(f"the key {self.columns[int(place)][0]!r} is null")
        weighted = with_weight(rows)
        return Prepared(pl.DataFrame([*own, weighted[TIME], weighted[WEIGHT]]))

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Return how the table changes with the batch; keep all rows.

        Raises:
            CorruptionError: a row was taken back that never came.
        """
        result = OperatorResult(counts=Counter())
        tables = inputs.get(0, ())
        if not tables:
            return result
        came = pl.concat(tables)
        result.counts["held"] = came.height
        came = consolidate(
            came.hstack([pl.Series(HASH, hash_columns(came, self.by, context.seed))])
        )
        kept = Arrangement(state, "rows")
        ledger = StateLedger(self.name, (kept.runs,), total_weight(came))
        found = kept.look_up(sorted_distinct(came[HASH].to_numpy()))
        held = came.clear() if found is None else found[came.columns]
        every = nothing_owed(consolidate(pl.concat([held, came])))
        back = self._latest(held).with_columns(-pl.col(WEIGHT))
        changed = consolidate(pl.concat([back, self._latest(every)]))
        kept.add(came)
        ledger.check()
        result.rows = self._named(changed) if changed.height else None
        return result

    @property
    def query_key(self) -> KeyColumns | None:
        return columns_at(self.columns, self.by)

    def current_rows(
        self,
        state: OperatorState,
        keys: QueryKeys | None,
        watermark_us: int,  # noqa: ARG002 - rows have no end in time
    ) -> pl.DataFrame:
        """Return the latest row of each key."""
        held = held_with_weights(Arrangement(state, "rows"), keys, self.by)
        if held is None:
            return pl.DataFrame(schema=dict(self.columns))
        return self._named(self._latest(held))

    @property
    def row_key(self) -> tuple[str, ...]:
        return tuple(self.columns[int(place)][0] for place in self.by)

    @property
    def rows_family(self) -> str:
        return "rows"

    def given_out(self, state: OperatorState, rows_max: int) -> Iterator[pl.DataFrame]:
        """Yield the latest row of each key in one bucket."""
        for held in Arrangement(state, "rows").parts(rows_max):
            yield self._named(self._latest(held))

    def _latest(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the latest row of each key, once."""
        keys = group_numbers(rows, self.by)
        order: Int64s = np.lexsort((self._ties(rows), rows[TIME].to_numpy(), keys))
        last = differs_from_previous(keys[order][::-1])[::-1]
        latest: pl.DataFrame = rows[order[last]]
        return latest.with_columns(pl.lit(1, pl.Int64).alias(WEIGHT))

    def _ties(self, rows: pl.DataFrame) -> Int64s:
        """Return what orders rows of one time, as upserts order rows without a place in the log."""
        by_name = sorted(range(len(self.columns)), key=lambda place: self.columns[place][0])
        not_deleted = constant(False, rows.height, pl.Boolean)
        return digest_rows([*(rows[str(place)] for place in by_name), not_deleted])

    def _named(self, changes: pl.DataFrame) -> pl.DataFrame:
        named = [changes[str(place)].alias(name) for place, (name, _) in enumerate(self.columns)]
        return with_diff(pl.DataFrame([*named, changes[TIME], changes[WEIGHT]]))
