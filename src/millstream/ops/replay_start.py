"""From where a rebuild reads the log: from its start, from a time, or from offsets (``--from``).

What comes before is left out on purpose, so no consent is asked for it, and what is rebuilt reports since when it is
written, as where the log has lost records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from millstream.client.reader import Reader
from millstream.errors import ConfigError
from millstream.record import to_timestamp_ms

Starts = Mapping[str, tuple[int, ...]]
"""The first offset to read, by topic and partition."""


@dataclass(frozen=True)
class ReplayStart:
    """Where to begin: at ``offsets``, by topic and partition; in other partitions at ``time_ms``, or at the start."""

    offsets: Mapping[tuple[str, int], int]
    time_ms: int | None = None

    @classmethod
    def parse(cls, texts: Iterable[str]) -> ReplayStart | None:
        """Return what some texts say: a time, or ``topic/partition/offset`` of each partition; None of none.

        Raises:
            ConfigError: a text is neither, or a time or a partition is given twice.
        """
        offsets: dict[tuple[str, int], int] = {}
        time_ms: int | None = None
        for text in texts:
            found = _parse(text)
            if isinstance(found, datetime):
                if time_ms is not None:
                    raise ConfigError(f"--from has two times, the second is {text}: give one.")
                # Records have whole milliseconds: the first one of a time between two is at the second.
                time_ms = to_timestamp_ms(found) + bool(found.microsecond % 1000)
                continue
            at, offset = found
            if at in offsets:
                raise ConfigError(f"--from names {at[0]}/{at[1]} twice: give one offset for it.")
            offsets[at] = offset
        return cls(offsets, time_ms) if offsets or time_ms is not None else None

    def starts(self, log: Reader, topics: Iterable[str], read: Mapping[str, Any]) -> Starts:
        """Return where to begin in each partition of some topics, at the latest where the app has ``read`` up to.

        Raises:
            ConfigError: an offset is of none of their partitions, or is not between the start of the log and the
                app's position.
        """
        ranges = {
            (topic, partition): (start, max(start, int(read.get(topic, {}).get(str(partition), 0))))
            for topic in sorted(topics)
            for partition, (start, _) in enumerate(log.offsets(topic))
        }
        for (topic, partition), offset in self.offsets.items():
            self._check(topic, partition, offset, ranges)
        found: dict[str, tuple[int, ...]] = {}
        for (topic, partition), (start, end) in ranges.items():
            offset = self._offset(log, topic, partition, start)
            found[topic] = (*found.get(topic, ()), min(max(start, offset), end))
        return found

    def _offset(self, log: Reader, topic: str, partition: int, start: int) -> int:
        named = self.offsets.get((topic, partition))
        if named is not None:
            return named
        if self.time_ms is None:
            return start
        return log.offset_for_time(topic, partition, self.time_ms)

    def _check(
        self,
        topic: str,
        partition: int,
        offset: int,
        ranges: Mapping[tuple[str, int], tuple[int, int]],
    ) -> None:
        if (topic, partition) not in ranges:
            known = ", ".join(f"{name}/{number}" for name, number in ranges) or "nothing"
            raise ConfigError(
                f"--from {topic}/{partition}/{offset} is of no partition that is read again; that is {known}."
            )
        start, end = ranges[topic, partition]
        if not start <= offset <= end:
            raise ConfigError(
                f"--from {topic}/{partition}/{offset}: the log begins at {start} there, and the app has read up to {end}. "
                "Give an offset between them."
            )


def _parse(text: str) -> datetime | tuple[tuple[str, int], int]:
    topic, slash, rest = text.partition("/")
    partition, _, offset = rest.partition("/")
    if slash and topic and _is_number(partition) and _is_number(offset):
        return (topic, int(partition)), int(offset)
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--from is {text!r}: give a time such as 2026-11-21T10:00 (UTC, unless it says otherwise), or a partition "
            "and an offset, such as clicks/0/1700."
        ) from None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
