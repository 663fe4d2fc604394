"""The declaration of a session operator, and the columns of its state."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from millstream.kernels.aggregation import Aggregation
from millstream.kernels.frames import HASH, ORDER, WATERMARK_SEEN
from millstream.kernels.sessions.panes import SessionPanes
from millstream.kernels.sessions.spans import DEFERRED, EXPIRED_END, SPAN, SessionWindow
from millstream.kernels.state.layout import StateLayout
from millstream.kernels.time.watermarks import delayed_watermark

TIMER = "__timer"  # Int64, nullable: the earliest timer that is set for it
ORIGINAL = "__original"  # Struct: an event as it came, for the side output
_SLOTS_PER_GAP = 4


@dataclass(frozen=True)
class SessionConfig:
    """One declared operator of session windows. Durations in microseconds.

    ``row_schema`` gives the types of the columns that come in, for rows that go to the side output as they
    came.
    """

    name: str
    session: SessionWindow
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
    def side_output(self) -> bool:
        """Whether events that are too late go to the side output as they came."""
        return self.panes.emission.late_policy == "side"

    @property
    def layout(self) -> StateLayout:
        return StateLayout()

    @property
    def transparent(self) -> bool:
        return False

    @property
    def heartbeat_ms(self) -> int | None:
        return self.panes.emission.heartbeat_ms

    @property
    def ordered(self) -> bool:
        return self.panes.fires_by_count or self.aggregation.ordered

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - it has one input
        original = {name for name, _ in self.row_schema} if self.side_output else set()
        return self.aggregation.columns_read | self.session.columns_read | original

    def output_watermark(self, watermark_us: int) -> int:
        """Return the watermark of its output, except for retractions of merged sessions."""
        return delayed_watermark(watermark_us, self.lateness_us + self.session.joins_after_end_us)

    @property
    def state_schema(self) -> dict[str, pl.DataType]:
        """The columns of state besides the key's own."""
        raw = {**dict(self.row_schema), ORDER: pl.Int64()}
        original = {ORIGINAL: pl.Struct(raw)} if self.side_output else {}
        return {
            HASH: pl.UInt64(),
            DEFERRED: pl.Boolean(),
            **dict.fromkeys(SPAN, pl.Int64()),
            WATERMARK_SEEN: pl.Int64(),
            TIMER: pl.Int64(),
            EXPIRED_END: pl.Int64(),
            **dict(self.aggregation.schema),
            **self.panes.schema,
            **({ORDER: pl.Int64()} if self.panes.fires_by_count else {}),
            **original,
        }

    @property
    def slot_us(self) -> int:
        """The width of the slots of time that timers and closed sessions are divided into."""
        return max(1, (self.session.gap_us + self.lateness_us) // _SLOTS_PER_GAP)
