"""Limits the log lines about closed connections: each of the first few a minute, then a count.

A misconfigured client reconnects at once, and for days: its lines would fill a disk and hide those of
others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LINES_MAX = 20
PERIOD_S = 60.0
_log = logging.getLogger(__name__)


class ConnectionLogLimiter:
    """Logs at most ``LINES_MAX`` lines in each period, then their count. Belongs to one event loop.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._lines = 0
        self._suppressed = 0
        self._last = ""

    def log_closed(self, text: str, *, fault: Exception | None = None) -> None:
        """Log that a connection was closed; ``fault`` is a defect of the broker, logged with its traceback."""
        self.log_suppressed()
        self._lines += 1
        if self._lines > LINES_MAX:
            self._suppressed += 1
            self._last = text
        elif fault is None:
            _log.warning("%s", text)
        else:
            _log.error("%s", text, exc_info=fault)

    def log_suppressed(self, *, at_end: bool = False) -> None:
        """Log the count of suppressed lines when their period is over."""
        now_s = self._clock()
        if now_s - self._began_s < PERIOD_S and not at_end:
            return
        if self._suppressed:
            _log.warning(
                "closed %d more connections in %.0f s; the last: %s",
                self._suppressed,
                now_s - self._began_s,
                self._last,
            )
        self._began_s, self._lines, self._suppressed = now_s, 0, 0
