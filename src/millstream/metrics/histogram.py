"""DurationHistogram: how often something took how long, counted where it happens."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

# From a cache that acknowledges at once to a disk that hangs.
BOUNDS_S = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 10.0)


class DurationHistogram:
    """Counts durations by upper bounds. One thread adds at a time; any thread reads."""

    def __init__(self, bounds_s: Sequence[float] = BOUNDS_S) -> None:
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration; one equal to a bound is within it."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return how many durations were within each bound, as Prometheus has it: with all below."""
        names = [*(str(bound) for bound in self._bounds_s), "+Inf"]
        return list(zip(names, map(float, accumulate(list(self._counts))), strict=True))


class SyncTimes(DurationHistogram):
    """How long syncs of logs took, of all logs that this process writes. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self.writes = False

    def begin(self) -> None:
        """Say that this process writes a log: from now on there are figures, also before its first sync."""
        self.writes = True

    def add(self, seconds: float) -> None:
        with self._lock:
            super().add(seconds)


SYNC_TIMES = SyncTimes()
"""Those of this process: a broker, an edge, a capture or an app that owns the folder of its log."""
