"""The two clocks of the log: the wall clock, which may jump, and the monotonic one."""

from __future__ import annotations

import time


def wall_clock_ms() -> int:
    """Return milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def running_time_ms() -> int:
    """Return monotonic milliseconds since an arbitrary moment."""
    return time.monotonic_ns() // 1_000_000
