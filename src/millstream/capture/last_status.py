"""LastStatus: what a capture or an apply said last, for whoever asks how it is: ``/metrics`` and ``/readyz``.

Both say at least once in a few seconds that they had nothing to do. So one that has said nothing for minutes is
stuck, as with a database that neither answers nor refuses, although its last status was a good one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

STALLED_S = 300.0


class RunStatus(Protocol):
    """How far something is that follows a log or a database."""

    @property
    def state(self) -> str: ...
    @property
    def lag_s(self) -> float | None: ...
    @property
    def problem(self) -> str: ...


S = TypeVar("S", bound=RunStatus)


@dataclass(frozen=True)
class ReportedStatus(Generic[S]):
    """What was said last.

    ``status`` is the last one that says what is durable, None before the first; ``durable_s`` is when it was said, in
    Unix time. ``problem`` is why something is tried again since; empty if it is not.
    """

    status: S | None
    durable_s: float
    problem: str = ""

    @property
    def lag_s(self) -> float | None:
        """How old the last change was when it was durable; 0 when there was nothing more, None where not known."""
        if self.status is None:
            return None
        return 0.0 if self.status.state == "idle" else self.status.lag_s


class LastStatus(Generic[S]):
    """Takes statuses as they come, in one thread; any thread asks. Until the first, it is durable as of its start."""

    def __init__(self, clock_s: Callable[[], float] = time.time) -> None:
        self._clock_s = clock_s
        self._last: ReportedStatus[S] = ReportedStatus(None, clock_s())

    def add(self, status: S) -> None:
        """Take a status. What one says that is tried again is of before, or of nothing, and not taken for a number."""
        if status.state == "retrying":
            found = replace(self._last, problem=status.problem or "something does not respond")
        else:
            found = ReportedStatus(status, self._clock_s())
        self._last = found  # one assignment: all of it, or none, is seen

    def read(self) -> ReportedStatus[S]:
        """Return what was said last."""
        return self._last

    def why_not_ready(self) -> str | None:
        """Return a sentence while it has not begun, tries again, or is stuck; else None."""
        last = self._last
        if last.problem:
            return f"It tries again: {last.problem}"
        if last.status is None:
            return "It has not begun: nothing has been read yet."
        silent_s = self._clock_s() - last.durable_s
        if silent_s > STALLED_S:
            return f"Nothing has become durable for {silent_s:,.0f} s, not even that there is nothing to do."
        return None
