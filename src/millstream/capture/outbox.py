"""Events that an application writes into an outbox, routed to topics of their own.

An outbox is a table that the application inserts an event into, in the transaction that the event is about:

=================  =====================================================================
``id``             identifies the event; becomes the header ``id``
``aggregatetype``  chooses the topic: ``outbox.event.<aggregatetype>``
``aggregateid``    becomes the record's key
``type``           the kind of event; becomes the header ``eventType``
``payload``        becomes the record's value, as it is; null is a null
=================  =====================================================================

The application may delete its rows at once: deletions and truncates say nothing. Other columns are left out. Where
PostgreSQL is told to, a message that the application emits does the same without a table:
``pg_logical_emit_message(true, 'outbox:<aggregatetype>:<aggregateid>', payload)``.

An event is in its topic once. But where the outbox itself is altered or made anew, the rows that it has then are read
again, and their events come again, with the same ids: which of them are known cannot be told.

What cannot be routed (an update, a row without a type, or with one that no topic can be named after) goes with its
whole envelope to ``<capture>.outbox.dead``: nothing is lost, and nothing stops for it.

Source: Debezium 3.6, "Outbox Event Router": its columns, topic and header.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.capture.units import LoggedMessage, RowBlock, TableChange, TableDefinition
from millstream.errors import ConfigError

COLUMNS = ("id", "aggregatetype", "aggregateid", "type", "payload")
MESSAGE_PREFIX = "outbox:"
_PREFIX = "outbox.event."
_TYPE = re.compile(r"[a-zA-Z0-9._-]{1,200}")


@dataclass(frozen=True, slots=True)
class RoutedEvent:
    """An event and the topic that it goes to."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


@dataclass
class OutboxRouter:
    """Makes events of what concerns an outbox.

    Args:
        table: (schema or database, table); None where only messages are routed.
    """

    table: tuple[str, str] | None

    def takes(self, content: TableChange | RowBlock) -> bool:
        """Say whether changes are of the outbox."""
        return (content.database, content.table) == self.table

    def check(self, found: TableDefinition) -> None:
        """Return if a definition is of another table, or of one that can be an outbox.

        Raises:
            ConfigError: it lacks a column.
        """
        if (found.database, found.table) != self.table or found.dropped:
            return
        missing = set(COLUMNS) - {column["name"] for column in found.columns}
        if missing:
            raise ConfigError(
                f"the outbox {found.database}.{found.table} has no column {', '.join(sorted(missing))}. An outbox has the "
                f"columns {', '.join(COLUMNS)}: add what is missing, or name another table."
            )

    def event(self, change: TableChange) -> RoutedEvent | None:
        """Return the event of a change; None where it says nothing.

        Raises:
            ValueError: it cannot be routed; the text says why.
        """
        if change.op in "dt":
            return None
        if change.op == "u":
            raise ValueError("the row of an event was updated")
        row = change.after or {}
        kind = row.get("aggregatetype")
        headers = [("id", _bytes(row.get("id")) or b"")]
        if row.get("type") is not None:
            headers.append(("eventType", _bytes(row["type"]) or b""))
        key, value = _bytes(row.get("aggregateid")), _bytes(row.get("payload"))
        return RoutedEvent(topic_of(kind), key, value, tuple(headers))

    def of_message(self, message: LoggedMessage, identity: str) -> RoutedEvent:
        """Return the event of a message, which has no id of its own: ``identity`` is it.

        Raises:
            ValueError: it cannot be routed.
        """
        kind, colon, key = message.prefix.removeprefix(MESSAGE_PREFIX).partition(":")
        named = key.encode() if colon else None
        return RoutedEvent(topic_of(kind), named, message.data, (("id", identity.encode()),))


def topic_of(kind: Any) -> str:
    """Return the topic of an aggregate type.

    Raises:
        ValueError: none can be named after it.
    """
    if not isinstance(kind, str) or not _TYPE.fullmatch(kind):
        raise ValueError(f"no topic can be named after the aggregatetype {kind!r}")
    return _PREFIX + kind


def _bytes(value: Any) -> bytes | None:
    """Return a value as a record has it: text as it is, what else there is as JSON."""
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode(errors="surrogatepass")
    if isinstance(value, Mapping | Sequence):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return json.dumps(value).encode()
