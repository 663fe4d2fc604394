"""Waiting for Ctrl-C, or for SIGTERM, which a service manager sends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def wait_for_stop_signal() -> Iterator[Callable[[], None]]:
    """Handle the signals from here on; yield a function that waits for the first of them.

    Python itself writes a byte to a pipe when a signal comes. A handler could not set an event: it runs in
    the waiting thread, perhaps while that holds the event's lock, and not at all if the signal comes
    just before the thread sleeps.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    woken_before = signal.set_wakeup_fd(writer)

    def wait() -> None:
        os.read(reader, 1)

    try:
        yield wait
    finally:
        signal.set_wakeup_fd(woken_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
