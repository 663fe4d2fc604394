"""What an answer means, and when to try again. Pure: chance and time are passed in.

==================================  ============================================================
answer                              meaning
==================================  ============================================================
2xx                                 taken
408, 425, 429, 5xx                  try again, not before ``Retry-After``
none: no connection, too slow       try again
any other, redirects among them     it will never be taken: given up at once
==================================  ============================================================
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

_AGAIN = frozenset({408, 425, 429})


class Verdict(enum.Enum):
    """What becomes of a record after an attempt."""

    TAKEN = "taken"
    AGAIN = "again"
    NEVER = "never"


def verdict_of(status: int | None) -> Verdict:
    """Return what an answer means; None: there was none."""
    if status is None or status in _AGAIN or status >= 500:
        return Verdict.AGAIN
    return Verdict.TAKEN if 200 <= status < 300 else Verdict.NEVER


def retry_after_s(text: str | None, now_s: float) -> float | None:
    """Return how long ``Retry-After`` asks to wait, in seconds or until a date; None: it does not.

    Args:
        now_s: Seconds since 1970.
    """
    if text is None:
        return None
    stripped = text.strip()
    if stripped.isascii() and stripped.isdigit() and len(stripped) < 10:
        return float(stripped)
    try:
        return max(parsedate_to_datetime(stripped).timestamp() - now_s, 0.0)
    except (ValueError, TypeError, OverflowError):
        return None


@dataclass(frozen=True, slots=True)
class Backoff:
    """How often an attempt is made, and how long the next one waits.

    The wait doubles, and lies by chance between half of that and all of it, so that what failed
    together does not come back together.

    Args:
        attempts_max: After so many a record is given up.
        first_s: After the first.
        most_s: At most, unless the endpoint asks for more.
        asked_most_s: However long the endpoint asks for.
    """

    attempts_max: int = 10
    first_s: float = 1.0
    most_s: float = 300.0
    asked_most_s: float = 3600.0

    def wait_s(self, attempt: int, asked_s: float | None, chance: Callable[[], float]) -> float:
        """Return how long to wait after the attempt of this number, counted from 1.

        Args:
            asked_s: What ``Retry-After`` said.
            chance: Gives a number in [0, 1).
        """
        doubled_s = min(self.first_s * 2.0 ** min(attempt - 1, 60), self.most_s)
        wait_s = doubled_s * (0.5 + 0.5 * chance())
        return wait_s if asked_s is None else max(wait_s, min(asked_s, self.asked_most_s))
