"""A record as JSON: as ``millstream consume --json`` prints it, and as HTTP responses have it."""

from __future__ import annotations

import base64
import json

from millstream.record import Record

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def record_as_json(record: Record) -> bytes:
    """Return a record as JSON, on one line.

    A value that is JSON is written as such, other text as text; bytes that are not text have a name with
    ``_base64``.
    """
    line: dict[str, object] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": _iso(record),
        "timestamp_ms": record.timestamp_ms,
    }
    line |= _text("key", record.key)
    try:
        line["value"] = record.json()
    except (ValueError, RecursionError):
        line |= _text("value", record.value)
    line["headers"] = [{"name": name} | _text("value", value) for name, value in record.headers]
    try:
        return _JSON.encode(line).encode()
    except (ValueError, RecursionError):  # NaN; half a surrogate pair; nested too deeply
        del line["value"]
        return _JSON.encode(line | _text("value", record.value)).encode()


def _iso(record: Record) -> str | None:
    try:
        return record.timestamp.isoformat(timespec="milliseconds")
    except (
        OverflowError
    ):  # any 64 bits are a timestamp; beyond the year 9999 there is no ISO 8601 form
        return None


def _text(name: str, content: bytes | None) -> dict[str, object]:
    try:
        return {name: None if content is None else content.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(content or b"").decode()}
