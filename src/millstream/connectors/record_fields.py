"""The key and the time of a record, from fields of its event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from millstream.client.json_fields import key_in, timestamp_ms_in
from millstream.record import to_timestamp_ms


@dataclass(frozen=True, slots=True)
class RecordFields:
    """Which fields of an event are the record's key and its time; None: it has no key, its time is now."""

    key: str | None = None
    time: str | None = None

    def key_of(self, event: Mapping[str, Any]) -> bytes | None:
        """Return the key of an event.

        Raises:
            ValueError: the field has none.
        """
        if self.key is None:
            return None
        found = key_in(event, self.key)
        if found is None:
            raise ValueError(
                f"the key is the field {self.key!r}, and it is {event.get(self.key)!r:.100}: give text or a whole number"
            )
        return str(found).encode()

    def timestamp_ms_of(self, event: Mapping[str, Any]) -> int | None:
        """Return the time of an event, in milliseconds since 1970.

        Raises:
            ValueError: the field has none.
        """
        if self.time is None:
            return None
        given = event.get(self.time)
        if isinstance(given, datetime):  # of an event that a function made
            return to_timestamp_ms(given)
        found = timestamp_ms_in(event, self.time)
        if found is None:
            raise ValueError(
                f"the time is the field {self.time!r}, and it is {given!r:.100}: give ISO 8601, or "
                "milliseconds since 1970"
            )
        return found
