"""What the log says of connections that the broker has closed: each while they are few, then how many.

A client that is wrong comes again at once, and goes on for days: its lines would fill a disk and hide
those of others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LINES_MAX = 20
PERIOD_S = 60.0
_log = logging.getLogger(__name__)


class Closings:
    """Says so much in each period, and counts the rest. Belongs to one event loop.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._lines = 0
        self._unsaid = 0
        self._last = ""

    def tell(self, text: str, *, fault: Exception | None = None) -> None:
        """Say that a connection was closed; ``fault`` is one of ours, which is shown with its place."""
        self.sum_up()
        self._lines += 1
        if self._lines > LINES_MAX:
            self._unsaid += 1
            self._last = text
        elif fault is None:
            _log.warning("%s", text)
        else:
            _log.error("%s", text, exc_info=fault)

    def sum_up(self, *, at_end: bool = False) -> None:
        """Say how many were not told of, when their period is over."""
        now_s = self._clock()
        if now_s - self._began_s < PERIOD_S and not at_end:
            return
        if self._unsaid:
            _log.warning(
                "closed %d more connections in %.0f s; the last: %s",
                self._unsaid,
                now_s - self._began_s,
                self._last,
            )
        self._began_s, self._lines, self._unsaid = now_s, 0, 0
