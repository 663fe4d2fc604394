"""Bodies of requests as events; of lines that are not events, the line number and the reason.

Pure: nothing here knows HTTP or a log. A body is checked as a whole before any of it is appended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

from millstream.client.json_fields import key_in, timestamp_ms_in
from millstream.record import Headers

BodyFormat = Literal["json", "lines", "raw"]

BODY_FORMATS: dict[str, BodyFormat] = {
    "application/json": "json",
    "application/x-ndjson": "lines",
    "application/ndjson": "lines",
    "application/jsonl": "lines",
    "application/octet-stream": "raw",
    "text/plain": "raw",
}
"""The format of a body by its Content-Type: one JSON event, one per line, or one of any bytes."""

_SHOWN = 80


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request.

    A line costs some hundred bytes more than its length, so the number of lines is limited, too.
    """

    event_bytes_max: int = 1 << 20
    body_bytes_max: int = 16 << 20
    lines_max: int = 100_000


@dataclass(frozen=True, slots=True)
class AppendParams:
    """The parameters of a request to append."""

    format: BodyFormat = "json"
    key: bytes | None = None
    key_field: str | None = None
    timestamp_ms: int | None = None
    timestamp_field: str | None = None
    headers: Headers = ()
    partition: int | None = None
    skip_bad: bool = False


class Event(NamedTuple):
    """One event, ready to be sent. ``line`` counts from 1."""

    line: int
    value: bytes
    key: bytes | str | int | None
    timestamp_ms: int | None


class BadLine(NamedTuple):
    """One line that is not an event, and why."""

    line: int
    reason: str
    shown: str

    def to_json(self) -> dict[str, Any]:
        """Return it as the response has it."""
        return {"line": self.line, "reason": self.reason, "begins": self.shown}


@dataclass(slots=True)
class RequestBody:
    """The content of a body. ``too_many``: it has more lines than are accepted."""

    events: list[Event] = field(default_factory=list)
    bad_lines: list[BadLine] = field(default_factory=list)
    too_many: bool = False


def read_body(body: bytes, params: AppendParams, limits: RequestLimits) -> RequestBody:
    """Return the events in a body, and its lines that are not events.

    Empty lines are skipped, but count in line numbers.
    """
    found = RequestBody()
    for number, line in _lines(body, params.format):
        if len(found.events) + len(found.bad_lines) == limits.lines_max:
            found.too_many = True
            break
        read = _event(number, line, params, limits)
        if isinstance(read, Event):
            found.events.append(read)
        else:
            found.bad_lines.append(read)
    return found


def _lines(body: bytes, form: BodyFormat) -> Iterator[tuple[int, bytes]]:
    if form == "raw":
        yield 1, body
    elif form == "json":
        yield 1, body.strip()
    else:
        for number, line in enumerate(body.split(b"\n"), start=1):
            stripped = line.strip()
            if stripped:
                yield number, stripped


class _BadLineError(Exception):
    """A line is not an event; the message says why."""


def _event(
    number: int, line: bytes, params: AppendParams, limits: RequestLimits
) -> Event | BadLine:
    try:
        _check_size(line, limits)
        if params.format == "raw":
            return Event(number, line, params.key, params.timestamp_ms)
        decoded = _decoded(line)
        return Event(number, line, _key(decoded, params), _timestamp_ms(decoded, params))
    except _BadLineError as bad:
        return BadLine(number, str(bad), line[:_SHOWN].decode(errors="replace"))


def _check_size(line: bytes, limits: RequestLimits) -> None:
    if len(line) > limits.event_bytes_max:
        raise _BadLineError(
            f"has {len(line):,} bytes, and an event may have {limits.event_bytes_max:,}"
        )


def _decoded(line: bytes) -> Any:
    try:
        return _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        raise _BadLineError(f"is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise _BadLineError("is not readable JSON (it is nested too deeply)") from None
    except ValueError as error:
        raise _BadLineError(f"is not JSON ({error})") from None


def _key(decoded: Any, params: AppendParams) -> bytes | str | int | None:
    if params.key_field is None:
        return params.key
    key = key_in(decoded, params.key_field)
    if key is None or (isinstance(key, str) and _has_lone_surrogate(key)):
        raise _BadLineError(f"has no text or whole number in the field {params.key_field!r}")
    return key


def _timestamp_ms(decoded: Any, params: AppendParams) -> int | None:
    if params.timestamp_field is None:
        return params.timestamp_ms
    found = timestamp_ms_in(decoded, params.timestamp_field)
    if found is None:
        raise _BadLineError(
            f"has no time in the field {params.timestamp_field!r}, as ISO 8601 or as milliseconds since "
            "1970"
        )
    return found


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _has_lone_surrogate(text: str) -> bool:
    """Return whether a text has half a surrogate pair, which JSON can express and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
