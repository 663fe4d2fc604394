"""The parameters and headers of a request.

=========================  ========================================================================
``POST /topics/NAME``
``Content-Type``           the format of the body: see ``request_body.BODY_FORMATS``
``key=``                   the key of every event; also the header ``Millstream-Key``
``key_field=``             the field of each JSON event that is its key
``timestamp_field=``       the field that is its time; or the header ``Millstream-Timestamp``
``partition=``             append to this partition
``bad=refuse|skip``        one bad line: nothing is appended, or the other lines are
``Millstream-Header``      ``NAME=VALUE``, a header of every record; may be repeated
``Idempotency-Key``        append once, however often this is sent
``GET …/events``
``from=``                  ``earliest``, ``latest``, an offset, a time, or an event's id
``partition=``             read this partition; may be repeated
``Last-Event-ID``          continue after this event; takes precedence over ``from=``
=========================  ========================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from millstream.choices import choose
from millstream.client.json_fields import timestamp_ms_of
from millstream.client.reader import Reader
from millstream.edge.http.request_body import BODY_FORMATS, AppendParams, BodyFormat
from millstream.errors import ConfigError, OffsetOutOfRangeError
from millstream.log.topics import check_topic_id
from millstream.record import to_timestamp_ms

KEY_LENGTH_MAX = 200
_APPEND_PARAMS = ("key", "key_field", "timestamp_field", "partition", "bad")
_STREAM_PARAMS = ("from", "partition")
_ID = re.compile(r"(\d{1,9}:\d{1,19}(?:,\d{1,9}:\d{1,19})*)(?:@([0-9a-f]{32}))?", re.ASCII)

ParamPairs = Iterable[tuple[str, str]]


def parse_content_type(content_type: str) -> BodyFormat | None:
    """Return the format of a body of this type; None for a type that is not accepted."""
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name == "charset" and value.strip('"') not in ("utf-8", "utf8", "us-ascii"):
            return None
    return BODY_FORMATS.get(kind)


def parse_append_params(
    form: BodyFormat, parameters: ParamPairs, headers: Sequence[tuple[str, str]]
) -> AppendParams:
    """Return the parameters of a request to append.

    Args:
        headers: Names in lower case; values as HTTP has them, in Latin-1.

    Raises:
        ConfigError: a parameter is unknown or invalid, or two exclude each other.
    """
    values = _single_values(parameters, _APPEND_PARAMS)
    by_name = dict(headers)
    key_header = by_name.get("millstream-key")
    key = None if key_header is None else key_header.encode("latin-1")
    if "key" in values:
        key = values["key"].encode("utf-8", "surrogateescape")
    given = [
        name
        for name, is_there in (
            ("the header Millstream-Key", key_header is not None),
            ("key=", "key" in values),
            ("key_field=", "key_field" in values),
        )
        if is_there
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} were given; give one of them")
    time_header = by_name.get("millstream-timestamp")
    if time_header is not None and "timestamp_field" in values:
        raise ConfigError(
            "the header Millstream-Timestamp and timestamp_field= were given; give one of them"
        )
    for name in ("key_field", "timestamp_field"):
        if name in values and form == "raw":
            raise ConfigError(
                f"{name}= needs events in JSON; send them as application/json or "
                "application/x-ndjson, or leave it out"
            )
    bad = choose("bad=", values.get("bad", "refuse"), ("refuse", "skip"))
    return AppendParams(
        format=form,
        key=key,
        key_field=values.get("key_field"),
        timestamp_ms=None if time_header is None else _time(time_header),
        timestamp_field=values.get("timestamp_field"),
        headers=tuple(_header(value) for name, value in headers if name == "millstream-header"),
        partition=None if "partition" not in values else _partition(values["partition"]),
        skip_bad=bad == "skip",
    )


def parse_idempotency_key(headers: Mapping[str, str]) -> str | None:
    """Return the key under which a request is appended once, if it has one.

    Raises:
        ConfigError: it is empty, too long, or not plain ASCII.
    """
    key = headers.get("idempotency-key")
    if key is None:
        return None
    if not 0 < len(key) <= KEY_LENGTH_MAX or not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"the Idempotency-Key is {key[:KEY_LENGTH_MAX]!r}; give 1 to {KEY_LENGTH_MAX} printable "
            "characters of ASCII, such as a random UUID"
        )
    return key


def _single_values(parameters: ParamPairs, known: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, value in parameters:
        _check_known(name, known)
        if name in values:
            raise ConfigError(f"{name}= was given twice; give it once")
        values[name] = value
    return values


def _check_known(name: str, known: Sequence[str]) -> None:
    choose("a parameter", name, known)


def _partition(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(f"partition= is {text!r}; give a number, such as 0")
    return int(text)


def _time(text: str) -> int:
    found = timestamp_ms_of(int(text) if text.isascii() and text.isdigit() else text)
    if found is None:
        raise ConfigError(
            f"the header Millstream-Timestamp is {text!r}; give milliseconds since 1970, or ISO 8601 "
            "such as 2026-11-21T10:00:00Z"
        )
    return found


def _header(text: str) -> tuple[str, bytes]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"a header Millstream-Header is {text!r}; give NAME=VALUE")
    return name, value.encode("latin-1")


# -- the start of a stream --------------------------------------------------------------------


def event_id(positions: Mapping[int, int], topic_id: str) -> str:
    """Return the id of an event: the next offset of each partition after it, and the topic's id."""
    return f"{_format_positions(positions)}@{topic_id}"


def _format_positions(positions: Mapping[int, int]) -> str:
    return ",".join(f"{number}:{offset}" for number, offset in sorted(positions.items()))


def parse_last_event_id(header: str | None) -> str | None:
    """Return the last event id of a client that resumes.

    Raises:
        ConfigError: it is not the id of an event.
    """
    if not header:
        return None
    found = _ID.fullmatch(header)
    if found is None or found[2] is None:
        raise ConfigError(
            f"the Last-Event-ID is {header[:KEY_LENGTH_MAX]!r}, which is not the id of an event here; leave it "
            "out, and give the start with from="
        )
    return header


def parse_stream_params(parameters: ParamPairs) -> tuple[str, list[int]]:
    """Return the start of a requested stream, and its partitions.

    Raises:
        ConfigError: a parameter is unknown or invalid.
    """
    start = "latest"
    partitions = []
    for name, value in parameters:
        _check_known(name, _STREAM_PARAMS)
        if name == "partition":
            partitions.append(_partition(value))
        else:
            start = value
    return start, partitions


def resolve_positions(
    reader: Reader, topic: str, start: str, partitions: Sequence[int]
) -> dict[int, int]:
    """Return the offset of each partition at which a stream starts.

    Partitions that were added to the topic after the event of an id are read from their start.

    Raises:
        UnknownTopicError, ConfigError: there is no such topic, partition or position.
        OffsetOutOfRangeError: the offset is no longer, or not yet, there.
        TopicRecreatedError: the id is of a topic that was deleted and created again.
    """
    bounds = reader.offsets(topic)
    for number in partitions:
        if number >= len(bounds):
            raise ConfigError(
                f"topic {topic!r} has no partition {number}; choose one of 0 to {len(bounds) - 1}"
            )
    chosen = sorted(set(partitions)) or list(range(len(bounds)))
    if start == "earliest":
        return {number: bounds[number][0] for number in chosen}
    if start == "latest":
        return {number: bounds[number][1] for number in chosen}
    if given := _ID.fullmatch(start):
        check_topic_id(topic, given[2], reader.topic_id(topic))
        pairs = (pair.partition(":") for pair in given[1].split(","))
        values = {int(name): int(at) for name, _, at in pairs}
        found = {number: values.get(number, bounds[number][0]) for number in chosen}
    elif start.isascii() and start.isdigit() and len(start) < 20:
        if len(chosen) > 1:
            raise ConfigError(
                f"from={start} is one offset, and topic {topic!r} has {len(chosen)} partitions; choose one "
                f"with partition=, or give one for each: from={_format_positions(dict.fromkeys(chosen, 0))}"
            )
        found = {chosen[0]: int(start)}
    else:
        time_ms = _parse_time_ms(start)
        return {number: reader.offset_for_time(topic, number, time_ms) for number in chosen}
    for number, offset in found.items():
        low, end = bounds[number]
        if not low <= offset <= end:
            raise OffsetOutOfRangeError(
                f"offset {offset} of {topic}/{number} was requested, which holds [{low}, {end}); start "
                "within these, or with from=earliest",
                start=low,
                end=end,
            )
    return found


def _parse_time_ms(text: str) -> int:
    try:
        return to_timestamp_ms(datetime.fromisoformat(text))
    except ValueError:
        raise ConfigError(
            f"from= is {text!r}; give earliest, latest, an offset such as 17, an event's id such as "
            "0:17,1:4, or a time such as 2026-11-21T10:00"
        ) from None
