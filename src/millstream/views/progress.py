"""What a running job tells: a Progress after every batch, a Report at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal


@dataclass(frozen=True)
class Progress:
    """One committed batch. Counts are events; ``lag`` is unread records by ``topic/partition``."""

    app: str
    batch_id: int
    at: datetime
    duration_ms: float
    read: int
    emitted: int
    held: int
    late: int
    filtered: int
    dead: int
    watermark: datetime | None
    lag: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Give plain values, for JSON."""
        values = asdict(self)
        values["at"] = self.at.isoformat()
        values["watermark"] = self.watermark.isoformat() if self.watermark else None
        return values


Until = Literal["stopped", "caught-up"] | Callable[[Progress], bool]
"""How long a run goes on: see :meth:`millstream.App.run`."""


@dataclass(frozen=True)
class Report:
    """What a run did. ``reason`` says why it ended: caught-up, timeout, stopped.

    Counts are events over the whole run; ``seconds`` is from the call of run to its return;
    ``alarms`` is what the app's alarm over late events said.
    """

    app: str
    reason: str
    batches: int
    seconds: float
    read: int
    late: int
    filtered: int
    dead: int
    watermark: datetime | None
    lag: Mapping[str, int]
    alarms: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Give plain values, for JSON."""
        values = asdict(self)
        values["watermark"] = self.watermark.isoformat() if self.watermark else None
        return values

    def __str__(self) -> str:
        rate = self.read / self.seconds if self.seconds else 0.0
        lag = sum(self.lag.values())
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        lines = [
            f"{self.app}: {self.reason} after {batches} in {self.seconds:.1f} s",
            f"  read {self.read:,} events ({rate:,.0f} a second), {lag:,} unread",
            f"  late {self.late:,}, dead {self.dead:,}, filtered {self.filtered:,}",
            f"  watermark {self.watermark.isoformat() if self.watermark else 'not yet set'}",
            *(f"  late alarm: {words}" for words in self.alarms),
        ]
        return "\n".join(lines)
