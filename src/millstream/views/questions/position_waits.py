"""Questions that wait until the job has committed a position: one thread looks for all of them.

The threads that answer are few, and a position may be far: so a question that has to wait leaves its thread, and is worked
on again when its position is reached, or its deadline has passed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from millstream.views.position import is_reached
from millstream.views.questions.deadline import Deadline

_POLL_S = 0.02


class PositionNotReachedError(Exception):
    """Raised by a question about itself, inside its thread: the newest commit has not reached its position."""


@dataclass(frozen=True)
class _Waiting:
    wanted: Mapping[str, Any]
    deadline: Deadline
    resume: Callable[[], None]


class PositionWaits:
    """Resumes questions when the position that ``look`` returns has reached theirs. Thread-safe."""

    def __init__(self, look: Callable[[], Mapping[str, Any]]) -> None:
        self._look = look
        self._waiting: list[_Waiting] = []
        self._thread: threading.Thread | None = None
        self._changing = threading.Lock()
        self._closing = threading.Event()

    def add(
        self, wanted: Mapping[str, Any], deadline: Deadline, resume: Callable[[], None]
    ) -> None:
        """Call ``resume`` once: when the position is reached, the deadline has passed, or looking fails."""
        with self._changing:
            if not self._closing.is_set():
                self._waiting.append(_Waiting(wanted, deadline, resume))
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="millstream questions: positions", daemon=True
                    )
                    self._thread.start()
                return
        resume()

    def close(self) -> None:
        """Resume all, and those that come later at once."""
        with self._changing:
            self._closing.set()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while waiting := self._taken():
            position, left = self._position(), list[_Waiting]()
            for one in waiting:
                if position is not None and _waits(one, position):
                    left.append(one)
                else:
                    one.resume()
            with self._changing:
                self._waiting += left
            self._closing.wait(_POLL_S)

    def _taken(self) -> list[_Waiting]:
        with self._changing:
            taken, self._waiting = self._waiting, []
            if not taken:
                self._thread = None
            return taken

    def _position(self) -> Mapping[str, Any] | None:
        """Return where the job is; None, if all are to be resumed: they meet the error themselves."""
        if self._closing.is_set():
            return None
        try:
            return self._look()
        except Exception:  # noqa: BLE001 - whatever it is, whoever waits has it, too
            return None


def _waits(one: _Waiting, position: Mapping[str, Any]) -> bool:
    return one.deadline.left_s > 0 and not is_reached(position, one.wanted)
