"""The session kernel: aggregates per session and key, merged in any order of arrival.

:mod:`millstream.kernels.sessions.spans` decides which events belong together,
:mod:`millstream.kernels.sessions.panes` what is emitted, and when. The state between batches, by key:

===========  ==========================================================================
open         a session that has not expired: its span, partials, and the rows that it has emitted
waiting      an event that is late for its own split, which is ahead of the others:
             whether it is late is decided when the watermark has advanced as far as the split
closed       where expired sessions were, for as long as an event may still overlap them
===========  ==========================================================================

An event that is late by itself is in time if an open session covers the time from its end
to the watermark of its split. Only events read before it, or on splits that were behind, can make
that session. So once W has reached ``r`` the decision is final, and it is the same in any batch.

Events go through the shuffle one by one. If they were joined before it, one of them might be late by
the watermark of earlier batches, which only the state knows; and the result would depend on batch
boundaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl

from millstream.kernels.aggregates.event_order import with_order
from millstream.kernels.frames import HASH, ORDER, ROWS, SPLIT, TIME, UNPLACED, WATERMARK_SEEN
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.queryable import KeyColumns, QueryKeys, held_by_key
from millstream.kernels.sessions.batch import SessionBatch
from millstream.kernels.sessions.config import SessionConfig
from millstream.kernels.sessions.panes import NEW_EVENTS
from millstream.kernels.sessions.spans import DEFERRED, END, START, TILL
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.time.watermarks import NO_WATERMARK


@dataclass(frozen=True)
class SessionOperator(SessionConfig):
    """One operator of session windows."""

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Add the end of the session that each event makes; drop columns that are not needed."""
        rows = self.session.with_end(with_order(rows) if self.ordered else rows)
        if self.side_output:
            return Prepared(rows)
        own = [TIME, SPLIT, WATERMARK_SEEN, ORDER, END, TILL]
        wanted = [*sorted(self.aggregation.columns_read), *own]
        return Prepared(rows.select(name for name in wanted if name in rows.columns))

    def pack(self, tables: Sequence[pl.DataFrame], number: int = 0) -> pl.DataFrame:  # noqa: ARG002
        """Concatenate tables."""
        return pl.concat(tables)

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Take the batch's events into sessions; give the rows to emit."""
        batch = SessionBatch(self, state, context)
        batch.run([self._placed(rows, context) for rows in inputs.get(0, ())])
        return batch.result()

    # ── what is held between batches ────────────────────────────────────────────────────────

    @property
    def query_key(self) -> KeyColumns | None:
        return self.aggregation.keys

    @property
    def queried_as_emitted(self) -> bool:
        return True

    def current_rows(
        self, state: OperatorState, keys: QueryKeys | None, watermark_us: int
    ) -> pl.DataFrame:
        """Return the open sessions with all that is decided to be in them; of parts, what no pane has given."""
        types = {**dict(self.aggregation.keys), **self.state_schema}
        held = held_by_key(KeyedRows(state, "sessions", ROWS), keys, self.by)
        sessions = pl.DataFrame(schema=types) if held is None else held
        opened = sessions.filter(~pl.col(DEFERRED))
        if self.panes.emits_parts:
            opened = opened.filter(pl.col(NEW_EVENTS) > 0)
        plain = replace(self.panes, emission=replace(self.panes.emission, panes=False))
        return plain.result_rows(opened.sort(START, END, HASH), pl.lit(watermark_us, pl.Int64))

    def _placed(self, rows: pl.DataFrame, context: BatchContext) -> pl.DataFrame:
        """Return for each event how far it reaches, and where its key is kept."""
        reached = pl.Series(WATERMARK_SEEN, context.watermarks_seen(rows))
        if self.panes.fires_by_count:
            unplaced = pl.lit(NO_WATERMARK) if SPLIT in rows.columns else pl.col(TIME)
            rows = rows.with_columns(unplaced.alias(UNPLACED))
        # Replaced, so that the column is the same for rows that had it and rows without it.
        rows = rows.drop(SPLIT, WATERMARK_SEEN, strict=False).hstack([reached])
        rows = rows.with_columns(pl.Series(HASH, hash_columns(rows, self.by, context.seed)))
        rows = self.session.with_reach(rows, self.lateness_us)
        return rows.select(sorted(rows.columns))  # some come from sources, others from operators
