"""The time by which a question is to be answered."""

from __future__ import annotations

import time
from dataclasses import dataclass

from millstream.durations import Duration, to_us
from millstream.errors import ConfigError, DeadlineError

_LONGEST = "1 hour"  # a question holds a thread, or a place among those that wait


@dataclass(frozen=True)
class Deadline:
    """Until when a question is to be answered, on the clock of time.monotonic()."""

    seconds: float
    ends: float

    @classmethod
    def given(cls, duration: Duration, what: str) -> Deadline:
        """Return the deadline that a caller gives, from now on; ``what`` names it in the error.

        Raises:
            ConfigError: it is no duration, or is longer than a question may take.
        """
        return cls.of(deadline_us(duration, what) / 1e6)

    @classmethod
    def of(cls, seconds: float) -> Deadline:
        return cls(seconds, time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        return self.ends - time.monotonic()

    def check(self, doing: str) -> None:
        """Make sure that it has not passed.

        Raises:
            DeadlineError: it has.
        """
        if self.left_s <= 0:
            raise DeadlineError(
                f"The question was not answered within {self.seconds:g} s: {doing}. Ask again, or give it longer (deadline=)."
            )


def deadline_us(duration: Duration, what: str) -> int:
    """Return how long a question may take, in microseconds.

    Raises:
        ConfigError: it is no duration, or too long.
    """
    given_us = to_us(duration, what=what)
    if given_us > to_us(_LONGEST, what=what):
        raise ConfigError(
            f"{what} is {duration}, and may be {_LONGEST} at most. Give a shorter one."
        )
    return given_us
