"""The alarm for late events: raised once when their share is too large, and again only after it fell.

A few late events are expected. A share that stays large means that the watermark's delay or the lateness
is too short, or that a producer's clock is wrong.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from millstream.errors import ConfigError
from millstream.views.runs.progress import Progress

BATCHES_WATCHED = 20
_log = logging.getLogger(__name__)


def check_late_share(share: float | None) -> None:
    """Make sure that a number is a share, or None.

    Raises:
        ConfigError: it is not above 0 and at most 1.
    """
    if share is not None and not 0 < share <= 1:
        raise ConfigError(
            f"late_alarm is {share!r}. Give the share of late events that is too large, above 0 and "
            "at most 1, such as 0.01, or None."
        )


@dataclass
class LateAlarm:
    """Watches the batches of a run; ``on_alarm`` is called with the message.

    The share is that of late events, each counted once, among the events that the last ``BATCHES_WATCHED``
    batches read.
    """

    share: float
    on_alarm: Callable[[str], None] | None = None
    messages: list[str] = field(default_factory=list)
    _counts: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=BATCHES_WATCHED))
    _active: bool = False

    def observe(self, progress: Progress) -> None:
        """Add a batch's counts; raise the alarm if they bring the share above the limit."""
        self._counts.append((progress.late, progress.read))
        late, read = (sum(column) for column in zip(*self._counts, strict=True))
        too_many = late > self.share * read
        if too_many and not self._active:
            self._raise_alarm(
                f"{late:,} of the {read:,} events of the last {len(self._counts)} batches came too "
                f"late, more than {self.share:.2%}, at {progress.at:%Y-%m-%d %H:%M:%S} (batch "
                f"{progress.batch_id}). A longer watermark delay or lateness would include them."
            )
        self._active = too_many

    def _raise_alarm(self, message: str) -> None:
        self.messages.append(message)
        _log.warning("%s", message)
        if self.on_alarm is not None:
            self.on_alarm(message)

    def wrap(self, on_progress: Callable[[Progress], None] | None) -> Callable[[Progress], None]:
        """Return a callback that observes each Progress and then calls ``on_progress``."""

        def both(progress: Progress) -> None:
            self.observe(progress)
            if on_progress is not None:
                on_progress(progress)

        return both
