"""The two clocks of the log: what the wall shows, which may jump, and the time that passes."""

from __future__ import annotations

import time


def wall_clock_ms() -> int:
    """Return milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def running_time_ms() -> int:
    """Return milliseconds since some moment; they pass however the clock is set."""
    return time.monotonic_ns() // 1_000_000
