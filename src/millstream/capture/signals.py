"""Signals to a capture: records of the topic ``<name>-signal`` that ask for tables to be read again.

=============================================  =============================================================
``{"type": "execute-snapshot", "data": …}``    the tables ``data-collections`` are read again, in chunks
                                               among the changes; of ``additional-conditions`` only those rows
other types                                    are passed over
=============================================  =============================================================

The source stores with its progress behind which signal it has begun, so each is followed once, whatever is killed.

Source: Debezium 3.6, "Sending signals to a Debezium connector", the Kafka channel: topic, key and value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from millstream.client.log import EventLog
from millstream.errors import ConfigError

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class RereadRequest:
    """A table is to be read again, whole or the rows for which ``where`` is true, an expression of the database's SQL.

    ``next_offset`` is the offset behind its signal. ``last``: no other table of the signal is still to follow.
    """

    database: str
    table: str
    where: str
    next_offset: int
    last: bool = True

    @property
    def begun(self) -> int:
        """The offset behind the signals that are begun with this one: a crash must not lose those that follow."""
        return self.next_offset if self.last else self.next_offset - 1


def condition(reading: bool, before: str, where: str) -> str:  # noqa: FBT001 - what a table's state says
    """Return of which rows a table is to be read, where ``where`` is asked for; empty for all.

    Args:
        reading: Whether it is not read to its end yet: what was asked for ``before`` is still owed, by all rows
            where that is empty.
    """
    if not reading or before == where:
        return where
    return f"({before}) OR ({where})" if before else ""


def signal_of(tables: list[str], where: str | None) -> bytes:
    """Return the value of a signal that asks for tables to be read again."""
    data: dict[str, Any] = {"data-collections": tables, "type": "INCREMENTAL"}
    if where is not None:
        data["additional-conditions"] = [
            {"data-collection": table, "filter": where} for table in tables
        ]
    return json.dumps({"type": "execute-snapshot", "data": data}).encode()


@dataclass
class SignalReader:
    """Reads signals, from the offset ``position`` on; for one thread.

    ``split`` divides the name of a table.
    """

    log: EventLog
    topic: str
    name: str
    position: int
    split: Callable[[str], tuple[str, str]]
    monotonic_s: Callable[[], float]
    _looked_s: float = float("-inf")

    def requests(self) -> Iterator[list[RereadRequest] | ConfigError]:
        """Yield what each signal since the last time asks for, or what is wrong with it; looks once a second."""
        now_s = self.monotonic_s()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        start, end = self.log.offsets(self.topic)[0]
        first = max(self.position, start)
        if end <= first:
            return
        found = self.log.read(self.topic, 0, first, end, columns=("offset", "key", "value"))
        self.position = end
        for record in found.to_pylist():
            if record["key"] == self.name.encode():
                yield from self._parsed(record["value"], record["offset"] + 1)

    def _parsed(
        self, value: bytes | None, next_offset: int
    ) -> Iterator[list[RereadRequest] | ConfigError]:
        try:
            signal = json.loads(value or b"")
            if signal["type"] != "execute-snapshot":
                return
            data = signal["data"]
            conditions = {
                one["data-collection"]: str(one["filter"])
                for one in data.get("additional-conditions") or ()
            }
            requests = [
                RereadRequest(*self.split(table), conditions.get(table, ""), next_offset)
                for table in data["data-collections"]
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            yield ConfigError(
                f"the signal at offset {next_offset - 1} of {self.topic!r} cannot be read ({error!r}) and is passed over. "
                'Send {"type": "execute-snapshot", "data": {"data-collections": ["schema.table"]}}.'
            )
            return
        yield requests
