"""One event as the log has it: a JSON object, whose key is the id of its stream.

::

    {"type": "item-added", "schema": 1, "stream": "cart-1", "version": 3, "command": "...",
     "cause": "...", "correlation": "...", "who": "...", "why": "...", "data": {...}}

What was not given is left out. ``version`` counts the events of the stream from 1, without gaps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from millstream.errors import ConfigError, CorruptionError
from millstream.log.encoding import SimpleRecord
from millstream.sourcing.json_form import ENCODER

_UNIX_ERA = datetime(1970, 1, 1, tzinfo=UTC)


class LogPosition(NamedTuple):
    """A place in the event topic: everything of ``partition`` below ``offset``."""

    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """Why an event is there. Each is free text; none is required.

    ``command_id`` makes a command idempotent; ``causation_id`` names what caused the command,
    ``correlation_id`` the whole story it belongs to; ``who`` acted, and ``why``.
    """

    command_id: str
    causation_id: str | None = None
    correlation_id: str | None = None
    who: str | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class SourcedEvent:
    """An event of a stream, with what is known about it.

    ``version`` is its place in its stream, from 1; ``position`` its place in the topic; ``recorded_at`` when
    it was appended, which never goes back within a stream, even if the clock does.
    """

    stream_id: str
    version: int
    type: str
    data: Any
    position: LogPosition
    recorded_at: datetime
    metadata: Metadata


class RawEvent(NamedTuple):
    """An event whose fields are still JSON values."""

    offset: int
    timestamp_ms: int
    stream_id: str
    version: int
    type: str
    schema: int
    fields: Any
    metadata: Metadata

    @property
    def recorded_at(self) -> datetime:
        """When it was appended."""
        return _UNIX_ERA + timedelta(milliseconds=self.timestamp_ms)


_OPTIONAL = (
    ("cause", "causation_id"),
    ("correlation", "correlation_id"),
    ("who", "who"),
    ("why", "why"),
)


def encode_event(event: RawEvent) -> SimpleRecord:
    """Return the record of an event.

    Raises:
        ConfigError: a text in it is not Unicode.
    """
    value: dict[str, Any] = {
        "type": event.type,
        "schema": event.schema,
        "stream": event.stream_id,
        "version": event.version,
        "command": event.metadata.command_id,
    }
    for short, name in _OPTIONAL:
        given = getattr(event.metadata, name)
        if given is not None:
            value[short] = given
    value["data"] = event.fields
    try:
        written = ENCODER.encode(value).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"an event {event.type!r} has text that is not Unicode (half of a surrogate pair), which cannot be "
            "stored; decode it with the encoding that it has"
        ) from error
    return SimpleRecord(event.timestamp_ms, event.stream_id.encode(), written)


def decode_event(
    topic: str, partition: int, offset: int, timestamp_ms: int, value: bytes | None
) -> RawEvent:
    """Return the event of a record.

    Raises:
        CorruptionError: it is no event: something else was written to the topic.
    """
    try:
        found = json.loads(value or b"")
        return RawEvent(
            offset,
            timestamp_ms,
            found["stream"],
            found["version"],
            found["type"],
            found["schema"],
            found["data"],
            Metadata(
                found["command"],
                found.get("cause"),
                found.get("correlation"),
                found.get("who"),
                found.get("why"),
            ),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptionError(
            f"the record at offset {offset} of {topic}/{partition} is no event of a store ({error!r}): "
            "something else wrote to the topic. Keep it; copy the events to a topic of their own, which "
            "only ms.EventStore writes to"
        ) from error
