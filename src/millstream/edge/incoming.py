"""Bodies of requests as events: what is taken, and of what is not, which line and why.

Pure: nothing here knows HTTP or a log. A body is judged as a whole before any of it is appended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

from millstream.client.json_fields import key_in, timestamp_ms_in
from millstream.log.encoding import Headers

Form = Literal["json", "lines", "raw"]

FORMS: dict[str, Form] = {
    "application/json": "json",
    "application/x-ndjson": "lines",
    "application/ndjson": "lines",
    "application/jsonl": "lines",
    "application/octet-stream": "raw",
    "text/plain": "raw",
}
"""What a body is, by its Content-Type: one JSON event, one a line, or one of any bytes."""

_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one request may bring.

    A line costs some hundred bytes more than it has; so their number is limited, too.
    """

    event_bytes_max: int = 1 << 20
    body_bytes_max: int = 16 << 20
    lines_max: int = 100_000


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says of its events beside its body."""

    form: Form = "json"
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


class Fault(NamedTuple):
    """One line that is no event, and why."""

    line: int
    reason: str
    shown: str

    def told(self) -> dict[str, Any]:
        """Return it as an answer tells of it."""
        return {"line": self.line, "reason": self.reason, "begins": self.shown}


@dataclass(slots=True)
class Body:
    """What a body holds. ``too_many``: it has more lines than are taken."""

    events: list[Event] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    too_many: bool = False


def read_body(body: bytes, asked: Asked, limits: Limits) -> Body:
    """Return the events in a body, and the lines of it that are none.

    Empty lines are passed over, and counted where lines are numbered.
    """
    found = Body()
    for number, line in _lines(body, asked.form):
        if len(found.events) + len(found.faults) == limits.lines_max:
            found.too_many = True
            break
        read = _event(number, line, asked, limits)
        if isinstance(read, Event):
            found.events.append(read)
        else:
            found.faults.append(read)
    return found


def _lines(body: bytes, form: Form) -> Iterator[tuple[int, bytes]]:
    if form == "raw":
        yield 1, body
    elif form == "json":
        yield 1, body.strip()
    else:
        for number, line in enumerate(body.split(b"\n"), start=1):
            stripped = line.strip()
            if stripped:
                yield number, stripped


class _Bad(Exception):
    """A line is no event; the message says why."""


def _event(number: int, line: bytes, asked: Asked, limits: Limits) -> Event | Fault:
    try:
        _check_size(line, limits)
        if asked.form == "raw":
            return Event(number, line, asked.key, asked.timestamp_ms)
        decoded = _decoded(line)
        return Event(number, line, _key(decoded, asked), _timestamp_ms(decoded, asked))
    except _Bad as bad:
        return Fault(number, str(bad), line[:_SHOWN].decode(errors="replace"))


def _check_size(line: bytes, limits: Limits) -> None:
    if len(line) > limits.event_bytes_max:
        raise _Bad(f"has {len(line):,} bytes, and an event may have {limits.event_bytes_max:,}")


def _decoded(line: bytes) -> Any:
    try:
        return _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        raise _Bad(f"is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise _Bad("is not JSON that is read here (it is nested too deeply)") from None
    except ValueError as error:
        raise _Bad(f"is not JSON ({error})") from None


def _key(decoded: Any, asked: Asked) -> bytes | str | int | None:
    if asked.key_field is None:
        return asked.key
    key = key_in(decoded, asked.key_field)
    if key is None or (isinstance(key, str) and _is_half(key)):
        raise _Bad(f"has no text or whole number in the field {asked.key_field!r}")
    return key


def _timestamp_ms(decoded: Any, asked: Asked) -> int | None:
    if asked.timestamp_field is None:
        return asked.timestamp_ms
    found = timestamp_ms_in(decoded, asked.timestamp_field)
    if found is None:
        raise _Bad(
            f"has no time in the field {asked.timestamp_field!r}, as ISO 8601 or as milliseconds since "
            "1970"
        )
    return found


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _is_half(text: str) -> bool:
    """Return whether a text has half a surrogate pair, which JSON can name and UTF-8 cannot say."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
