"""Connections that this process keeps open between two calls, whichever lookup made them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Hashable
from contextlib import suppress
from typing import Protocol, TypeVar, cast

_KEPT_MAX = 32  # for each peer
_KEPT_S = 30.0  # after which a peer, or what is between, is likely to have closed it


class Closable(Protocol):
    """What can be kept."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class IdleConnections:
    """Connections by peer; the last one that was used is the first to be taken. Thread-safe.

    A process that was forked does not use its parent's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, Hashable], list[tuple[float, Closable]]] = {}

    def take(self, peer: Hashable, _kind: type[C]) -> C | None:
        """Take a connection out; None if there is none."""
        with self._lock:
            kept = self._kept.get((os.getpid(), peer), [])
            found = kept.pop() if kept else None
            if found is None:
                return None
            since_s, connection = found
            if time.monotonic() - since_s < _KEPT_S:
                return cast("C", connection)
            old, kept[:] = [connection, *(each for _, each in kept)], []
        _close(old)
        return None

    def give(self, peer: Hashable, connection: Closable) -> None:
        """Keep a connection for the next call."""
        with self._lock:
            kept = self._kept.setdefault((os.getpid(), peer), [])
            kept.append((time.monotonic(), connection))
            old = [each for _, each in kept[:-_KEPT_MAX]]
            del kept[:-_KEPT_MAX]
        _close(old)

    def close(self) -> None:
        """Close all that are kept."""
        with self._lock:
            kept, self._kept = self._kept, {}
        own = [connections for owner, connections in kept.items() if owner[0] == os.getpid()]
        for connections in own:
            _close([each for _, each in connections])


def _close(connections: list[Closable]) -> None:
    for connection in connections:
        with suppress(Exception):
            connection.close()


IDLE = IdleConnections()
"""Those of this process."""
