"""Reads the key or the timestamp of a record from a field of its JSON event."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from millstream.record import to_timestamp_ms


def key_in(decoded: Any, field: str) -> str | int | None:
    """Return the text or whole number in a field; None where there is none."""
    found = _field(decoded, field)
    if isinstance(found, str) or (isinstance(found, int) and not isinstance(found, bool)):
        return found
    return None


def timestamp_ms_in(decoded: Any, field: str) -> int | None:
    """Return the time in a field, as ISO 8601 or milliseconds since 1970; None where there is none."""
    return timestamp_ms_of(_field(decoded, field))


def timestamp_ms_of(found: Any) -> int | None:
    """Return a value as a time, in milliseconds since 1970; None if it is no time."""
    if isinstance(found, int) and not isinstance(found, bool) and _is_a_time(found):
        return found
    try:
        return to_timestamp_ms(datetime.fromisoformat(found))
    except (TypeError, ValueError):
        return None


def _is_a_time(timestamp_ms: int) -> bool:
    """Return whether it is in the years 1 to 9999; microseconds since 1970 do not."""
    first, last = datetime.min, datetime.max  # noqa: DTZ901 - without a zone they mean UTC
    return to_timestamp_ms(first) <= timestamp_ms <= to_timestamp_ms(last)


def _field(decoded: Any, name: str) -> Any:
    return decoded.get(name) if isinstance(decoded, dict) else None
