"""RetryWait: how long to wait before something outside is tried again."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

_FIRST_S, _MAX_S = 0.5, 30.0


@dataclass
class RetryWait:
    """Waits twice as long each time, until something has succeeded; ``stop`` ends a wait at once."""

    stop: threading.Event
    _next_s: float = field(default_factory=lambda: _FIRST_S)

    def succeeded(self) -> None:
        """Begin with a short wait again."""
        self._next_s = _FIRST_S

    def wait(self) -> None:
        """Wait."""
        self.stop.wait(self._next_s)
        self._next_s = min(2 * self._next_s, _MAX_S)
