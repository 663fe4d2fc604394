"""Ctrl-C and SIGTERM, which let the batch in hand be finished."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Interrupts:
    """How many there were."""

    count: int = 0


@contextmanager
def count_interrupts(*, second_raises: bool = False) -> Iterator[Interrupts]:
    """Count Ctrl-C and SIGTERM instead of ending the process; outside the main thread, count nothing.

    A counter, not an event: the handler runs in the thread that would wait for the event, and may interrupt
    it while it holds the event's lock. With ``second_raises`` the second one interrupts what the main thread does.
    """
    seen = Interrupts()

    def note(_number: int, _frame: Any) -> None:
        seen.count += 1
        if second_raises and seen.count > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
