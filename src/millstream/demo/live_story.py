"""What the live part of the demo tells at its end: its figures, in a few lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from millstream.demo.ads_run import DemoComparison


@dataclass(frozen=True)
class LiveStory:
    """The figures of a run.

    ``ages`` has, for each append, how long it took until all views had it, and of how many records it was.
    ``recovered_s`` has, for each kill, how long it took until all was in the views that had arrived before;
    ``caught_s``, for each bot that was caught, how long after its first event.
    """

    seconds: float
    event_time: timedelta
    records: int
    left_out: Mapping[str, int]
    batches: int
    ages: Sequence[tuple[float, int]]
    recovered_s: Sequence[float]
    alarms: int
    caught_s: Sequence[float]
    comparison: DemoComparison
    interrupted: bool = False

    def freshness_s(self, share: float) -> float:
        """Return the time within which this share of the records was in all views."""
        wanted = share * sum(rows for _, rows in self.ages)
        reached = 0
        for age_s, rows in sorted(self.ages):
            reached += rows
            if reached >= wanted:
                return age_s
        return 0.0

    def __str__(self) -> str:
        compared = self.comparison
        hours = self.event_time.total_seconds() / 3600
        lines = {
            "events": f"{self.records:,} records in {self.seconds:.0f} s, {hours:.1f} hours of event time",
            "left out": ", ".join(f"{count:,} {name}" for name, count in self.left_out.items()),
            "batches": f"{self.batches:,}",
            "kills": self._kills(),
            "bots": self._bots(),
            "freshness": f"p50 {self.freshness_s(0.5):.2f} s, p99 {self.freshness_s(0.99):.2f} s",
            "results": f"{compared.rows:,} rows of {compared.outputs} views and topics: {compared.too_many} too many, "
            f"{compared.missing} missing",
        }
        return "\n".join(
            ["The live part in figures:", *(f"  {n:<10} {t}" for n, t in lines.items())]
        )

    def _kills(self) -> str:
        if not self.recovered_s:
            return "0"
        took = ", ".join(f"{seconds:.1f}" for seconds in self.recovered_s)
        return f"{len(self.recovered_s)}; all was in the views again after {took} s"

    def _bots(self) -> str:
        if not self.caught_s:
            return f"{self.alarms} alarms"
        took = ", ".join(f"{seconds:.1f}" for seconds in self.caught_s)
        return f"caught after {took} s; {self.alarms} alarms"
