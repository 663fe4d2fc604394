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
from millstream.client.start_position import LogStart, first_ms
from millstream.errors import ConfigError

Starts = Mapping[str, tuple[int, ...]]
"""The first offset to read, by topic and partition."""


@dataclass(frozen=True)
class ReplayStart:
    """Where to begin: at ``offsets``, by topic and partition; in other partitions at ``time_ms``, or at the start."""

    offsets: Mapping[tuple[str, int], int]
    time_ms: int | None = None

    @classmethod
    def parse(cls, texts: Iterable[str]) -> ReplayStart | None:
        """Return what some texts say: a time, ``earliest``, or ``topic/partition/offset`` of each partition; None of none.

        Raises:
            ConfigError: a text is none of these, or two are of the same partitions.
        """
        found = LogStart.parse(texts, "--from", words=("earliest",))
        if found is None:
            return None
        time_ms = first_ms(found.elsewhere) if isinstance(found.elsewhere, datetime) else None
        return cls(found.offsets, time_ms)

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
