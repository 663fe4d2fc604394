"""Positions: what of the log a view reflects, as nested mappings and lists of numbers.

The engine names only what a batch moved on, so a position is laid over the one before; a reader
names only what it waits for, so a position covers another when each of its numbers is reached.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

TOPIC_IDS = "topic_ids"
"""The description under which a state_store keeps whose positions these are: the ids of topics, by name."""


def merge_positions(before: Any, after: Any) -> Any:
    """Return ``after``, with what only ``before`` has, mapping by mapping."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return after
    return {
        **before,
        **{key: merge_positions(before.get(key), value) for key, value in after.items()},
    }


def is_reached(reached: Any, asked: Any) -> bool:
    """Whether each number in ``asked`` is at most the one in its place in ``reached``."""
    if isinstance(asked, Mapping):
        return isinstance(reached, Mapping) and all(
            key in reached and is_reached(reached[key], value) for key, value in asked.items()
        )
    if isinstance(asked, list | tuple):
        return (
            isinstance(reached, list)
            and len(reached) >= len(asked)
            and all(map(is_reached, reached, asked))
        )
    return bool(reached is not None and reached >= asked)


def wait_until(
    look: Callable[[], tuple[int | None, Any]],
    batch_id: int | None,
    position: Mapping[str, Any] | None,
    *,
    pause_s: float,
    timeout_s: float,
) -> bool:
    """Look until the last batch and the position that are seen reach those asked for.

    False after the timeout. ``pause_s`` lies between two looks.
    """
    end = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        last, reached = look()
        if last is not None and last >= (batch_id or 0) and is_reached(reached, position or {}):
            return True
        left = end - time.monotonic()
        if left <= 0:
            return False
        pause.wait(min(pause_s, left))
