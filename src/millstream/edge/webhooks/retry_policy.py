"""Decides by a response whether and when to retry. Pure: random numbers and time are passed in.

==================================  ============================================================
response                            meaning
==================================  ============================================================
2xx                                 delivered
408, 425, 429, 5xx                  retry, not before ``Retry-After``
none: no connection, too slow       retry
any other, also redirects           undeliverable at once: it will never be accepted
==================================  ============================================================
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

_RETRIABLE = frozenset({408, 425, 429})


class RetryDecision(enum.Enum):
    """What to do with a record after an attempt."""

    ACCEPTED = "accepted"
    RETRY = "retry"
    GIVE_UP = "give up"


def retry_decision(status: int | None) -> RetryDecision:
    """Return what a response means; None: there was none."""
    if status is None or status in _RETRIABLE or status >= 500:
        return RetryDecision.RETRY
    return RetryDecision.ACCEPTED if 200 <= status < 300 else RetryDecision.GIVE_UP


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
class RetryPolicy:
    """How often an attempt is made, and how long the next one waits.

    The wait doubles, and is randomly between half of that and all of it, so that records that failed
    together are not retried together.

    Args:
        attempts_max: After so many attempts a record is undeliverable.
        initial_s: The wait after the first attempt.
        max_s: The longest wait, unless the endpoint asks for more.
        retry_after_max_s: The longest wait that the endpoint may ask for.
    """

    attempts_max: int = 10
    initial_s: float = 1.0
    max_s: float = 300.0
    retry_after_max_s: float = 3600.0

    def wait_s(
        self, attempt: int, asked_s: float | None, random_unit: Callable[[], float]
    ) -> float:
        """Return how long to wait after the attempt of this number, counted from 1.

        Args:
            asked_s: What ``Retry-After`` asks for.
            random_unit: Returns a number in [0, 1).
        """
        doubled_s = min(self.initial_s * 2.0 ** min(attempt - 1, 60), self.max_s)
        wait_s = doubled_s * (0.5 + 0.5 * random_unit())
        return wait_s if asked_s is None else max(wait_s, min(asked_s, self.retry_after_max_s))
