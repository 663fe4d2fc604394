"""The time by which a question is to be answered."""

from __future__ import annotations

import time
from dataclasses import dataclass

from millstream.errors import DeadlineError


@dataclass(frozen=True)
class Deadline:
    """Until when a question is to be answered, on the clock of time.monotonic()."""

    seconds: float
    ends: float

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
