"""BatchRows: records and dead letters on their way to a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millstream.connectors.connector import (
    BYTES_MAX,
    RECORDS_MAX,
    DeadInput,
    Position,
    SourceBatch,
)
from millstream.connectors.record_fields import RecordFields


@dataclass
class BatchRows:
    """What a batch will have; ``take`` gives the batch, and begins another one."""

    fields: RecordFields = field(default_factory=RecordFields)
    records_max: int = RECORDS_MAX
    _values: list[bytes | None] = field(default_factory=list)
    _keys: list[bytes | None] = field(default_factory=list)
    _times: list[int] = field(default_factory=list)
    _dead: list[DeadInput] = field(default_factory=list)
    _bytes: int = 0

    @property
    def is_full(self) -> bool:
        """Whether the batch is large enough."""
        return self.count >= self.records_max or self.value_bytes >= BYTES_MAX

    @property
    def value_bytes(self) -> int:
        """How many bytes they have in their values."""
        return self._bytes

    @property
    def count(self) -> int:
        """How many records and dead letters there are."""
        return len(self._values) + len(self._dead)

    def add(
        self, value: bytes, event: Mapping[str, Any], *, timestamp_ms: int | None = None
    ) -> None:
        """Take a record: its value, and the event in it, which has its key, and its time if that is not given.

        Raises:
            ValueError: they are missing there.
        """
        key = self.fields.key_of(event)
        time_ms = self.fields.timestamp_ms_of(event) if timestamp_ms is None else timestamp_ms
        self._values.append(value)
        self._keys.append(key)
        if time_ms is not None:
            self._times.append(time_ms)
        self._bytes += len(value)

    def add_many(
        self, values: list[bytes | None], keys: list[bytes | None], times: list[int]
    ) -> None:
        """Take records whose keys and times are known; with a field of times, all have one, and else none has."""
        self._values += values
        self._keys += keys
        self._times += times
        self._bytes += sum(len(value or b"") for value in values)

    def add_dead(self, value: bytes, where: str, reason: str) -> None:
        """Take what is no record."""
        self._dead.append(DeadInput(value, where, reason))
        self._bytes += len(value)

    def take(self, positions: dict[str, Position], ready_ms: int | None = None) -> SourceBatch:
        """Return the batch, with the positions after it."""
        found = SourceBatch(
            self._values,
            self._keys if self.fields.key is not None else None,
            self._times or None,
            positions=positions,
            dead=self._dead,
            ready_ms=ready_ms,
        )
        self._values, self._keys, self._times, self._dead = [], [], [], []
        self._bytes = 0
        return found
