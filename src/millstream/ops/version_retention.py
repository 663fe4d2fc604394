"""How long a switch of programs keeps the version that it replaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from millstream.durations import Duration, to_us
from millstream.errors import ConfigError

_KEEP_MAX = timedelta(days=36525)


def utc_now() -> datetime:
    """Return the present time."""
    return datetime.now(UTC)


@dataclass(frozen=True)
class Keeping:
    """How long a switch keeps the version that it replaces, from the time of a ``clock`` on.

    ``by_run``: a run switches, to fill what is new.
    """

    duration: timedelta
    clock: Callable[[], datetime] = utc_now
    by_run: bool = False

    @classmethod
    def of(cls, keep: Duration, clock: Callable[[], datetime], *, by_run: bool = False) -> Keeping:
        """Return what was asked for.

        Raises:
            ConfigError: ``keep`` is no duration, or longer than a calendar is.
        """
        duration = timedelta(microseconds=to_us(keep, what="keep"))
        if duration > _KEEP_MAX:
            raise ConfigError(f"keep={keep!r} is longer than 100 years, the most there is.")
        return cls(duration, clock, by_run)

    def until(self) -> datetime:
        return self.clock() + self.duration


KEEPS_NOTHING = Keeping(timedelta(0))
