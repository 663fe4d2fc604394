"""One event as the log has it: a JSON object, whose key is the id of its stream.

::

    {"type": "item-added", "schema": 1, "stream": "cart-1", "version": 3, "command": "...",
     "nonce": "...", "cause": "...", "correlation": "...", "who": "...", "why": "...", "data": {...}}

What was not given is left out. ``version`` counts the events of the stream from 1, without gaps. ``nonce`` is a random
text beside an id that was given: a log that was restored may be sent the same commands again, and what rests on the
events of before must see that these are others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, cast

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
    """An event whose fields are still JSON values.

    ``about`` has what is known of its cause, under the names of the module.
    """

    offset: int
    timestamp_ms: int
    stream_id: str
    version: int
    type: str
    schema: int
    fields: Any
    command_id: str
    about: Mapping[str, Any]

    @property
    def recorded_at(self) -> datetime:
        """When it was appended."""
        return _UNIX_ERA + timedelta(milliseconds=self.timestamp_ms)

    @property
    def nonce(self) -> str:
        """What tells it from an event of another log that has the same command; empty if its id does."""
        return str(self.about.get("nonce", ""))

    @property
    def identity(self) -> str:
        """What no other event has, even in a log that was restored and went on otherwise."""
        return "/".join((self.nonce, self.command_id, str(self.version), self.stream_id))

    @property
    def metadata(self) -> Metadata:
        """Why it is there."""
        found = self.about
        given = {name: found[short] for short, name in _OPTIONAL if short in found}
        return Metadata(self.command_id, **given)


_OPTIONAL = (
    ("cause", "causation_id"),
    ("correlation", "correlation_id"),
    ("who", "who"),
    ("why", "why"),
)
_value_at = json.JSONDecoder().raw_decode
"""Returns the JSON value at a place of a text, and the place behind it."""


def about_of(metadata: Metadata, nonce: str = "") -> dict[str, str]:
    """Return what was given of a cause, and the nonce if there is one, under the names of the module."""
    about = {"nonce": nonce} if nonce else {}
    for short, name in _OPTIONAL:
        given = getattr(metadata, name)
        if given is not None:
            about[short] = given
    return about


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
        "command": event.command_id,
        **event.about,
        "data": event.fields,
    }
    try:
        written = ENCODER.encode(value).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"an event {event.type!r} has text that is not Unicode (half of a surrogate pair), which cannot be "
            "stored; decode it with the encoding that it has"
        ) from error
    return SimpleRecord(event.timestamp_ms, event.stream_id.encode(), written)


def decode_events(
    topic: str,
    partition: int,
    offsets: Sequence[int],
    times_ms: Sequence[int],
    values: Sequence[bytes | None],
) -> Iterator[RawEvent]:
    """Yield the events of records.

    Raises:
        CorruptionError: one of them is no event: something else was written to the topic.
    """
    for offset, time_ms, found, value in zip(
        offsets, times_ms, _parsed(values), values, strict=True
    ):
        try:
            yield RawEvent(
                offset,
                time_ms,
                found["stream"],
                found["version"],
                found["type"],
                found["schema"],
                found["data"],
                found["command"],
                found,
            )
        except (KeyError, TypeError):
            yield decode_event(topic, partition, offset, time_ms, value)


def _parsed(values: Sequence[bytes | None]) -> Iterable[Any]:
    """Return the JSON values of records; None for those that have none.

    They are read as one text, a line each, as an event has no line break in it. Where that is not what is there,
    each is read by itself.
    """
    try:
        text = b"\n".join(cast("Sequence[bytes]", values)).decode()  # a None is an error
        if text.count("\n") == len(values) - 1:
            found = _lines(text)
            if len(found) == len(values):  # the last one may be empty
                return found
    except (TypeError, ValueError):
        pass
    return map(_value_of, values)


def _lines(text: str) -> list[Any]:
    """Return the JSON value of each line.

    Raises:
        ValueError: a line is something else.
    """
    found, at, size = [], 0, len(text)
    while at < size:
        value, at = _value_at(text, at)
        found.append(value)
        if at < size and text[at] != "\n":
            raise ValueError("a line has more than one value")
        at += 1
    return found


def _value_of(value: bytes | None) -> Any:
    try:
        return json.loads(value or b"")
    except ValueError:
        return None


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
            found["command"],
            found,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptionError(
            f"the record at offset {offset} of {topic}/{partition} is no event of a store ({error!r}): "
            "something else wrote to the topic. Keep it; copy the events to a topic of their own, which "
            "only ms.EventStore writes to"
        ) from error
