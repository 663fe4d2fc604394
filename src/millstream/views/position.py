"""Positions: what of the log a view reflects, as nested mappings and lists of numbers.

The engine names only what a batch has read, so a position is merged into the one before. A reader names
only what it waits for, so a position is reached when each of its numbers is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from millstream.choices import did_you_mean
from millstream.errors import ConfigError

TOPIC_IDS = "topic_ids"
"""The description under which a state store keeps the ids of the topics of its positions, by name."""

LOG_BROKERS = "log_brokers"
"""The description of the brokers whose log an app reads: ``address``, without its options. Empty: the log is a folder."""

FIRST_OFFSETS = "first_offsets"
"""The description of where an app began to read its topics, of those that it did not read from their first record."""

SOURCE_OFFSET = "source_offset"
"""Where the status of a run without Spark has the source offset after the last batch."""


def merge_positions(before: Any, after: Any) -> Any:
    """Return ``after``, with the entries that only ``before`` has, mapping by mapping."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return after
    return {
        **before,
        **{key: merge_positions(before.get(key), value) for key, value in after.items()},
    }


def checked_position(given: Mapping[str, Any] | None) -> dict[str, dict[str, int]] | None:
    """Return a position that an answer must reflect, with partitions as texts, as positions have them.

    Raises:
        ConfigError: it is no position.
    """
    if given is None:
        return None
    found: dict[str, dict[str, int]] = {}
    for topic, offsets in given.items() if isinstance(given, Mapping) else [("", given)]:
        partitions = offsets.items() if isinstance(offsets, Mapping) else [("", offsets)]
        found[topic] = {str(partition): offset for partition, offset in partitions}
        for partition, offset in found[topic].items():
            if not partition.isdecimal() or isinstance(offset, bool) or not isinstance(offset, int):
                raise ConfigError(
                    f"The position at_least is {given!r}. Give topic → partition → offset of the next record, such as "
                    '{"clicks": {"0": 17}}.'
                )
    return found


def check_topics(at_least: Mapping[str, Any], app: str, topics_read: Iterable[str]) -> None:
    """Make sure that the topics of a position are read by an app, so that it can be reached.

    Raises:
        ConfigError: one is not.
    """
    read = sorted(topics_read)
    unknown = [topic for topic in at_least if topic not in read]
    if unknown:
        raise ConfigError(
            f"The position at_least has the topic {unknown[0]!r}, which {app} does not read. It reads "
            f"{', '.join(map(repr, read))}. Correct it.{did_you_mean(unknown[0], read)}"
        )


def check_partitions(
    at_least: Mapping[str, Mapping[str, int]],
    position: Mapping[str, Any],
    count_of: Callable[[str], int | None],
) -> None:
    """Make sure that the topics of a position have its partitions, so that it can be reached.

    ``count_of`` returns how many a topic has, or None if that cannot be seen. It is asked where ``position``, of an app, lacks
    one of them.

    Raises:
        ConfigError: one does not exist.
    """
    for topic, offsets in at_least.items():
        if offsets.keys() <= position.get(topic, {}).keys():
            continue
        count = count_of(topic)
        if count is None:
            continue
        missing = [partition for partition in offsets if partition not in map(str, range(count))]
        if missing:
            raise ConfigError(
                f"The position at_least has the partition {missing[0]!r} of the topic {topic!r}, which has {count}: "
                f"{'0' if count == 1 else f'0 to {count - 1}'}. Correct it."
            )


def is_reached(position: Any, wanted: Any) -> bool:
    """Return whether each number in ``wanted`` is at most the corresponding one in ``position``."""
    if isinstance(wanted, Mapping):
        return isinstance(position, Mapping) and all(
            key in position and is_reached(position[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return (
            isinstance(position, list)
            and len(position) >= len(wanted)
            and all(map(is_reached, position, wanted))
        )
    return bool(position is not None and position >= wanted)


def wait_until(
    look: Callable[[], tuple[int | None, Any]],
    batch_id: int | None,
    position: Mapping[str, Any] | None,
    *,
    pause_s: float,
    timeout_s: float,
) -> bool:
    """Wait until the last batch and the position that ``look`` returns reach those given.

    False after the timeout. ``look`` is called every ``pause_s``.
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
