"""Where in a topic: the first record, the end, an offset, or a time, as the command line says it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from millstream.client.reader import Reader
from millstream.errors import ConfigError
from millstream.record import to_timestamp_ms

TopicPosition = str | int | datetime


def parse_position(option: str, text: str, words: Sequence[str]) -> TopicPosition:
    """Return one of ``words``, an offset, or a time.

    Raises:
        ConfigError: it is none of these.
    """
    if text in words:
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{option} is {text!r}; give {', '.join(words)}, an offset such as 17, or a time such "
            "as 2026-11-21T10:00"
        ) from None


def check_partitions(reader: Reader, topic: str, partitions: Sequence[int]) -> list[int]:
    """Return the partitions that were named, or all of the topic if none was.

    Raises:
        UnknownTopicError, ConfigError: there is no such topic or partition.
    """
    count = len(reader.offsets(topic))
    for number in partitions:
        if number >= count:
            raise ConfigError(
                f"topic {topic!r} has no partition {number}; choose one of 0 to {count - 1}"
            )
    return sorted(set(partitions)) or list(range(count))


def offsets_at(
    reader: Reader, topic: str, partitions: Sequence[int], position: TopicPosition, *, option: str
) -> dict[int, int]:
    """Return the offset of a position in each of these partitions.

    Raises:
        ConfigError: an offset is not among those that a partition holds.
    """
    found = {}
    for number in partitions:
        start, end = reader.bounds(topic, number)
        if position == "earliest":
            found[number] = start
        elif isinstance(position, str):
            found[number] = end
        elif isinstance(position, int):
            if not start <= position <= end:
                raise ConfigError(
                    f"{option} is {position}, but {topic}/{number} holds offsets [{start}, {end}); "
                    "give one of these, earliest or latest, or choose partitions with --partition"
                )
            found[number] = position
        else:
            found[number] = reader.offset_for_time(topic, number, to_timestamp_ms(position))
    return found
