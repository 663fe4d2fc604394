"""The plain values that every part of Millstream passes around: no I/O, no heavy imports.

A record is one event at one offset of one partition of one topic; offsets count from 0, rise, and
are never used twice. Their format on disk is in ``docs/log-format.md``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeAlias

VALUE_OMITTED = "value-omitted"
"""The header of a record that replaces one too large for its topic, without its value."""

Headers: TypeAlias = tuple[tuple[str, bytes | None], ...]
"""The names and values of a record's headers, in the order in which they were sent."""

_UNIX_ERA = datetime(1970, 1, 1, tzinfo=UTC)


class TopicPartition(NamedTuple):
    """One partition of one topic; as text ``topic/3``."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


class RecordMetadata(NamedTuple):
    """Partition and offset of a record, as in Kafka."""

    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """The properties of a topic that need no record to be read.

    ``topic_id`` is 32 hexadecimal digits; a topic that is deleted and created again has another
    one, so that offsets kept for the old topic are never applied to the new.
    """

    name: str
    topic_id: str
    partitions: int


@dataclass(frozen=True, slots=True)
class Record:
    """One event as a consumer sees it. ``value`` is None for a tombstone.

    ``headers`` are names with values in the order in which they were sent; a name may come twice.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()

    @property
    def timestamp(self) -> datetime:
        """When the event happened, as an aware datetime in UTC with millisecond precision."""
        return _UNIX_ERA + timedelta(milliseconds=self.timestamp_ms)

    def json(self) -> Any:
        """Return the value decoded from JSON; None for a tombstone.

        Raises:
            ValueError: the value is not JSON; ``value`` still has the bytes.
        """
        return None if self.value is None else json.loads(self.value)


def to_timestamp_ms(moment: datetime) -> int:
    """Return whole milliseconds since 1970 in UTC; a datetime without a zone means UTC."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (aware - _UNIX_ERA) // timedelta(milliseconds=1)


def omitted_value_header(value: bytes | None, name: str = VALUE_OMITTED) -> tuple[str, bytes]:
    """Return the header that says how large a value is which was omitted."""
    return name, b"%d bytes" % len(value or b"")
