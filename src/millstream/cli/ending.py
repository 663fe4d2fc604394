"""Waiting for Ctrl-C, or for SIGTERM, which a service manager sends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def until_told() -> Iterator[Callable[[], None]]:
    """Take the signals from here on; give a function that waits for the first of them.

    The handler writes to a pipe. It could not set an event: it runs in the thread that waits, at any
    point, also where that thread holds the event's own lock.
    """
    reader, writer = os.pipe()
    before = {
        number: signal.signal(number, lambda *_: os.write(writer, b"."))
        for number in (signal.SIGINT, signal.SIGTERM)
    }

    def wait() -> None:
        os.read(reader, 1)

    try:
        yield wait
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
