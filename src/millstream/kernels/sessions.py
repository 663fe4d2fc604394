"""The session kernel: aggregates per session and key, merged in whatever order events come.

What belongs together is decided in :mod:`millstream.kernels.session_spans`, and what is said of it,
and when, in :mod:`millstream.kernels.session_panes`. Here is the state between batches, by key:

===========  ==========================================================================
open         a session that has not expired: its span, partials, and what it has told
waiting      an event that came late for its own lane, which is ahead of the others:
             whether it is too late shows when the watermark has come as far as the lane
closed       where expired sessions were, for as long as an event may still overlap them
===========  ==========================================================================

An event that is too late on its own account is in time if an open session holds all between its end
and what its lane had reached. That session can only be made of events read before it, or on lanes
that were behind; so once W has reached ``r`` the verdict is final, and it is the same in any batch.

Events go through the shuffle one by one. To join them before it would be to join events of which one
may be too late by what earlier batches had shown, which only the state knows; and the answer would
depend on where batches begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from millstream.kernels.aggregates.order import with_order
from millstream.kernels.aggregation import Aggregation
from millstream.kernels.frames import HASH, LANE, ORDER, REACHED, TIME, UNPLACED
from millstream.kernels.keyhash import hash_columns
from millstream.kernels.operator import Moment, OperatorState, Outcome, Prepared
from millstream.kernels.session_batch import RAW, TIMER, SessionBatch
from millstream.kernels.session_panes import SessionPanes
from millstream.kernels.session_spans import BELOW, END, SPAN, TILL, WAITS, Session
from millstream.kernels.watermarks import UNSEEN, held_back

_SLOTS_PER_GAP = 4


@dataclass(frozen=True)
class SessionAggregate:
    """One operator of session windows. Durations in microseconds.

    ``row_schema`` gives the types of the columns that come in, for rows that go aside as they came.
    """

    name: str
    session: Session
    panes: SessionPanes
    row_schema: tuple[tuple[str, pl.DataType], ...] = ()

    @property
    def aggregation(self) -> Aggregation:
        return self.panes.aggregation

    @property
    def by(self) -> tuple[str, ...]:
        return self.aggregation.by

    @property
    def lateness_us(self) -> int:
        return self.panes.lateness_us

    @property
    def aside(self) -> bool:
        """Whether events that are too late go aside as they came."""
        return self.panes.emission.late_policy == "side"

    @property
    def transparent(self) -> bool:
        return False

    @property
    def heartbeat_ms(self) -> int | None:
        return self.panes.emission.heartbeat_ms

    @property
    def ordered(self) -> bool:
        return self.panes.counted or self.aggregation.ordered

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - it has one input
        aside = {name for name, _ in self.row_schema} if self.aside else set()
        return self.aggregation.columns_read | self.session.columns_read | aside

    def holds_back(self, watermark_us: int) -> int:
        """Give the watermark of what it emits, but for what panes take back of merged sessions."""
        return held_back(watermark_us, self.lateness_us + self.session.joins_after_end_us)

    @property
    def state_schema(self) -> dict[str, pl.DataType]:
        """The columns of state beside the key's own."""
        raw = {**dict(self.row_schema), ORDER: pl.Int64()}
        aside = {RAW: pl.Struct(raw)} if self.aside else {}
        return {
            HASH: pl.UInt64(),
            WAITS: pl.Boolean(),
            **dict.fromkeys(SPAN, pl.Int64()),
            REACHED: pl.Int64(),
            TIMER: pl.Int64(),
            BELOW: pl.Int64(),
            **dict(self.aggregation.schema),
            **self.panes.schema,
            **({ORDER: pl.Int64()} if self.panes.counted else {}),
            **aside,
        }

    @property
    def slot_us(self) -> int:
        """The width of the slots of time that timers and closed sessions are divided into."""
        return max(1, (self.session.gap_us + self.lateness_us) // _SLOTS_PER_GAP)

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Add the end of the session that each event makes; leave behind what is not needed."""
        rows = self.session.with_end(with_order(rows) if self.ordered else rows)
        if self.aside:
            return Prepared(rows)
        own = [TIME, LANE, REACHED, ORDER, END, TILL]
        wanted = [*sorted(self.aggregation.columns_read), *own]
        return Prepared(rows.select(name for name in wanted if name in rows.columns))

    def pack(self, tables: Sequence[pl.DataFrame], number: int = 0) -> pl.DataFrame:  # noqa: ARG002
        """Put tables one after another."""
        return pl.concat(tables)

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self, state: OperatorState, arrived: Mapping[int, Sequence[pl.DataFrame]], moment: Moment
    ) -> Outcome:
        """Take the batch's events into sessions; give the rows to emit."""
        batch = SessionBatch(self, state, moment)
        batch.run([self._placed(rows, moment) for rows in arrived.get(0, ())])
        return batch.outcome()

    def _placed(self, rows: pl.DataFrame, moment: Moment) -> pl.DataFrame:
        """Say of each event how far it reaches, and where its key is kept."""
        reached = pl.Series(REACHED, moment.reached(rows))
        if self.panes.counted:
            unplaced = pl.lit(UNSEEN) if LANE in rows.columns else pl.col(TIME)
            rows = rows.with_columns(unplaced.alias(UNPLACED))
        # Anew, so that it is the same column of rows that had it and of such as had not.
        rows = rows.drop(LANE, REACHED, strict=False).hstack([reached])
        rows = rows.with_columns(pl.Series(HASH, hash_columns(rows, self.by, moment.seed)))
        rows = self.session.with_reach(rows, self.lateness_us)
        return rows.select(sorted(rows.columns))  # some come from sources, others from operators
