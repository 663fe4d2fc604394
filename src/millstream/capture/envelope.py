"""The records that captured units become: Debezium's envelope in topics of tables, and what goes with it.

=====================================  ==================================================================
``<prefix>.<database>.<table>``        the changes of a table: key, envelope; a deletion is followed by a
                                       tombstone. A change of the key is a deletion and a creation.
``<prefix>.transaction``               BEGIN and END of each unit, with the number of its records by table
``<prefix>``                           tables defined, altered and dropped
``__debezium-heartbeat.<prefix>``      progress without a change
``<prefix>-signal``                    what is asked of the capture (``signals.py``); it only reads this one
``outbox.event.<type>``                events of an outbox (``outbox.py``), which belong to no table's changes
=====================================  ==================================================================

A chunk of a snapshot is a transaction, too: so those who apply whole transactions apply it at its place among
them. A transaction has one id in BEGIN, END and its records. Beyond Debezium's fields a record has its place:
``source.position``, that of the transaction in the source, and ``source.seq``, its number in it; together they
identify it. Columns that the source did not give are left out, and named in ``unavailable``.

Source: Debezium 3.6, "Data change events", "Transaction metadata", "Schema change topic".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from millstream.capture.json_columns import counted, joined
from millstream.capture.outbox import OutboxRouter, RoutedEvent
from millstream.capture.units import (
    CaptureUnit,
    LoggedMessage,
    Operation,
    RowBlock,
    TableChange,
    TableDefinition,
)
from millstream.errors import ConfigError

VERSION = version("millstream")
_NOT_IN_TOPICS = re.compile(r"[^a-zA-Z0-9._-]")
_NEW_KEY, _OLD_KEY = "__debezium.newkey", "__debezium.oldkey"
Row = dict[str, Any]


class CapturedRecord(NamedTuple):
    """A record for a topic. ``table``: it is a change of a table, whose topic may have to be created.

    ``truncate``: it goes to each partition; it has no key, and a topic that keeps the last record of each key may give it
    one. ``partition``: by the key if not given. ``routed``: it is an
    event of an outbox, of which the topic may have to be created, and keeps all.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: tuple[tuple[str, bytes], ...] = ()
    table: bool = False
    truncate: bool = False
    routed: bool = False
    partition: int | None = None

    @property
    def events(self) -> int:
        """How many changes of tables, or events of an outbox, it says."""
        return int(self.routed or (self.table and self.value is not None))


class CapturedRecords(NamedTuple):
    """Many records for the topic of a table, as columns of bytes; without ``keys`` none has one."""

    topic: str
    keys: pa.Array | None
    values: pa.Array
    timestamp_ms: int
    events: int
    table: bool = True


@dataclass
class CaptureTopics:
    """The names of a capture's topics, and which table each is of, in this run or another.

    Raises:
        ConfigError: two tables would have one topic.
    """

    prefix: str
    tables: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def transaction(self) -> str:
        return f"{self.prefix}.transaction"

    @property
    def schema(self) -> str:
        return self.prefix

    @property
    def heartbeat(self) -> str:
        return f"__debezium-heartbeat.{self.prefix}"

    @property
    def progress(self) -> str:
        return f"{self.prefix}.progress"

    @property
    def signal(self) -> str:
        return f"{self.prefix}-signal"

    @property
    def outbox_dead(self) -> str:
        return f"{self.prefix}.outbox.dead"

    def of_table(self, database: str, table: str) -> str:
        """Return the topic of a table: characters that topics may not have are underscores."""
        fault = self.clash(database, table)
        if fault is not None:
            raise ConfigError(fault)
        return self._of_table(database, table)

    def _of_table(self, database: str, table: str) -> str:
        return f"{self.prefix}.{_NOT_IN_TOPICS.sub('_', f'{database}.{table}')}"

    def clash(self, database: str, table: str) -> str | None:
        """Take note of a table; return what is wrong if its topic is that of something else."""
        topic = self._of_table(database, table)
        owner = self.tables.setdefault(topic, (database, table))
        own = (self.transaction, self.progress, self.outbox_dead)
        if owner == (database, table) and topic not in own:
            return None
        return (
            f"the table {database}.{table} would have the topic {topic!r}, which "
            f"{'.'.join(owner) if owner != (database, table) else 'the capture'} has. Capture it under "
            "another name, with a capture of its own."
        )


@dataclass
class UnitRecords:
    """Makes the records of units. ``columns`` has the columns of each table, from its last definition."""

    topics: CaptureTopics
    connector: str
    clock_ms: Callable[[], int]
    columns: dict[str, list[str]] = field(default_factory=dict)
    outbox: OutboxRouter | None = None

    def records(self, unit: CaptureUnit) -> Iterator[CapturedRecord | CapturedRecords]:
        """Yield the records of a unit, while its contents are read."""
        if unit.kind == "progress":
            yield self._heartbeat()
            return
        made = _Unit(self, unit)
        yield from made.records()

    def _heartbeat(self) -> CapturedRecord:
        now = self.clock_ms()
        key = to_json({"serverName": self.topics.prefix})
        return CapturedRecord(self.topics.heartbeat, key, to_json({"ts_ms": now}), now)


@dataclass
class _UnitTable:
    """A table in a unit: how many of its changes there were, and the JSON that all of them have.

    ``source`` is up to the value of its ``seq``, ``transaction`` from behind that to the value of ``total_order``.
    """

    name: str
    topic: str
    source: bytes
    transaction: bytes
    count: int = 0


@dataclass
class _Unit:
    """One unit on its way into records."""

    maker: UnitRecords
    unit: CaptureUnit
    tables: dict[tuple[str, str], _UnitTable] = field(default_factory=dict)
    total: int = 0
    routed: int = 0  # contents that concern an outbox

    @property
    def id(self) -> str:
        return f"{self.unit.kind}:{self.unit.position}"

    @cached_property
    def time_ms(self) -> int:
        """One time for all records of the unit, whose changes were made at once."""
        return self.unit.timestamp_ms or self.maker.clock_ms()

    def records(self) -> Iterator[CapturedRecord | CapturedRecords]:
        begun = False
        for content in self.unit.contents:
            if isinstance(content, TableDefinition):
                # The END gives it its place among the transactions, also where no row goes with it: rows of a table
                # that was made anew, empty, may have the columns of the one before.
                if content.placed and not begun:
                    yield self._border("BEGIN")
                    begun = True
                yield self._definition(content)
                continue
            if isinstance(content, LoggedMessage):
                yield from self._message(content)
                continue
            if self.maker.outbox is not None and self.maker.outbox.takes(content):
                changes = content.changes() if isinstance(content, RowBlock) else (content,)
                for change in changes:
                    yield from self._outbox(self.maker.outbox, change)
                continue
            if not begun:
                yield self._border("BEGIN")
                begun = True
            if isinstance(content, RowBlock):
                yield self._block(content)
            else:
                yield from self._change(content)
        if begun:
            yield self._border("END")

    def _border(self, status: str) -> CapturedRecord:
        counted = None
        if status == "END":
            counted = [
                {"data_collection": table.name, "event_count": table.count}
                for table in self.tables.values()
            ]
        value = {
            "status": status,
            "id": self.id,
            "event_count": self.total if status == "END" else None,
            "data_collections": counted,
            "ts_ms": self.time_ms,
        }
        key = to_json({"id": self.id})
        return CapturedRecord(self.maker.topics.transaction, key, to_json(value), self.time_ms)

    # ── the outbox ──────────────────────────────────────────────────────────────────────────

    def _outbox(self, router: OutboxRouter, change: TableChange) -> Iterator[CapturedRecord]:
        self.routed += 1
        try:
            event = router.event(change)
        except ValueError as error:
            source, details = self._source(change.database, change.table)
            value = {
                "before": change.before,
                "after": change.after,
                "source": {**source, "seq": self.total, **details},
                "op": change.op,
                "reason": str(error),
            }
            yield self._dead(to_json(value))
            return
        if event is not None:
            yield self._event(event)

    def _message(self, message: LoggedMessage) -> Iterator[CapturedRecord]:
        if self.maker.outbox is None:
            return
        self.routed += 1
        try:
            event = self.maker.outbox.of_message(message, f"{self.unit.position}/{self.routed}")
        except ValueError as error:
            text = message.data.decode(errors="replace")
            yield self._dead(
                to_json({"prefix": message.prefix, "message": text, "reason": str(error)})
            )
            return
        yield self._event(event)

    def _event(self, event: RoutedEvent) -> CapturedRecord:
        return CapturedRecord(
            event.topic, event.key, event.value, self.time_ms, event.headers, routed=True
        )

    def _dead(self, value: bytes) -> CapturedRecord:
        return CapturedRecord(self.maker.topics.outbox_dead, None, value, self.time_ms, routed=True)

    # ── changes ─────────────────────────────────────────────────────────────────────────────

    def _change(self, change: TableChange) -> Iterator[CapturedRecord]:
        if change.op == "t":
            yield self._record(change, "t", None, None, None)
            return
        before, after = change.before, change.after
        old = None if before is None else _key_of(change, before)
        new = None if after is None else _key_of(change, after)
        moved = change.op == "u" and old is not None and new is not None
        # 0.0 and -0.0 are equal, and two keys
        if moved and to_json(old or {}) != to_json(new or {}):
            assert old is not None
            assert new is not None
            yield self._record(change, "d", old, before, None, header=(_NEW_KEY, new))
            yield self._tombstone(change, old)
            yield self._record(change, "c", new, None, after, header=(_OLD_KEY, old), carry=old)
            return
        key = new if new is not None else old
        yield self._record(change, change.op, key, before, after)
        if change.op == "d" and key is not None:
            yield self._tombstone(change, key)

    def _record(
        self,
        change: TableChange,
        op: Operation,
        key: Row | None,
        before: Row | None,
        after: Row | None,
        *,
        header: tuple[str, Row] | None = None,
        carry: Row | None = None,
    ) -> CapturedRecord:
        table = self._table(change.database, change.table)
        self.total += 1
        table.count += 1
        more = b""
        if after is not None and (missing := self._missing(table.name, after)):
            more = b',"unavailable":' + to_json(missing)
            if carry is not None:
                more += b',"carry_from":' + to_json(carry)
        total = b"%d" % self.total
        value = (
            b'{"before":%b,"after":%b,"source":%b%b%b%b,"data_collection_order":%d},"op":"%b",%b%b}'
        ) % (
            b"null" if before is None else to_json(before),
            b"null" if after is None else to_json(after),
            table.source,
            total,
            table.transaction,
            total,
            table.count,
            op.encode(),
            _times_json(self.maker.clock_ms()),
            more,
        )
        return CapturedRecord(
            table.topic,
            None if key is None else to_json(key),
            value,
            self.time_ms,
            () if header is None else ((header[0], to_json(header[1])),),
            table=True,
            truncate=op == "t",
        )

    def _block(self, block: RowBlock) -> CapturedRecords:
        """Return the records of many rows: each as :meth:`_record` makes it, and a tombstone after each deletion."""
        table, count = self._table(block.database, block.table), len(block.rows)
        totals = counted(self.total + 1, self.total + count + 1)
        orders = counted(table.count + 1, table.count + count + 1)
        self.total += count
        table.count += count
        rows: tuple[Any, ...] = (b'{"before":null,"after":', block.rows)
        then, more = b',"source":', b""
        if block.op == "d":
            rows, then = (b'{"before":', block.rows), b',"after":null,"source":'
        elif missing := self._missing(table.name, block.columns):
            more = b',"unavailable":' + to_json(missing)
        if block.before is not None:
            rows = (b'{"before":', block.before, b',"after":', block.rows)
        last = b'},"op":"%b",%b%b}' % (block.op.encode(), _times_json(self.maker.clock_ms()), more)
        pieces = (*rows, then + table.source, totals, table.transaction, totals)
        ending = (b',"data_collection_order":', orders, last)
        values = joined([*pieces, *ending])
        keys = block.keys
        if block.op == "d" and keys is not None:
            keys, values = _with_tombstones(keys, values)
        return CapturedRecords(table.topic, keys, values, self.time_ms, events=count)

    def _tombstone(self, change: TableChange, key: Row) -> CapturedRecord:
        topic = self._table(change.database, change.table).topic
        return CapturedRecord(topic, to_json(key), None, self.time_ms, table=True)

    def _missing(self, table: str, given: Container[str]) -> list[str]:
        """Return the columns that the source did not give."""
        return [name for name in self.maker.columns.get(table, ()) if name not in given]

    def _table(self, database: str, table: str) -> _UnitTable:
        found = self.tables.get((database, table))
        if found is None:
            found = self.tables[database, table] = self._new_table(database, table)
        return found

    def _source(self, database: str, table: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the members of ``source`` before ``seq``, and those behind it."""
        details = dict(self.unit.details)
        source = {
            "version": VERSION,
            "connector": self.maker.connector,
            "name": self.maker.topics.prefix,
            **times("ts", self.time_ms),
            "snapshot": "true" if self.unit.kind == "snapshot" else "false",
            "db": details.pop("db", database),
            **({"schema": database} if "db" in self.unit.details else {}),
            "table": table,
            "position": self.unit.position,
        }
        return source, details

    def _new_table(self, database: str, table: str) -> _UnitTable:
        source, details = self._source(database, table)
        rest = b"," + to_json(details)[1:] if details else b"}"
        transaction = b'%b,"transaction":{"id":%b,"total_order":' % (rest, to_json(self.id))
        return _UnitTable(
            name=f"{database}.{table}",
            topic=self.maker.topics.of_table(database, table),
            source=to_json(source)[:-1] + b',"seq":',
            transaction=transaction,
        )

    # ── definitions ─────────────────────────────────────────────────────────────────────────

    def _definition(self, found: TableDefinition) -> CapturedRecord:
        table = f"{found.database}.{found.table}"
        kind = "DROP" if found.dropped else "ALTER" if table in self.maker.columns else "CREATE"
        if self.maker.outbox is not None:
            self.maker.outbox.check(found)
        if found.dropped:
            self.maker.columns.pop(table, None)
        else:
            self.maker.columns[table] = [column["name"] for column in found.columns]
        described = {"primaryKeyColumnNames": list(found.key), "columns": list(found.columns)}
        value = {
            "source": {
                "version": VERSION,
                "connector": self.maker.connector,
                "name": self.maker.topics.prefix,
                "position": self.unit.position,
            },
            "ts_ms": self.time_ms,
            "databaseName": found.database,
            "ddl": found.statement or None,
            "tableChanges": [
                {
                    "type": kind,
                    "id": f'"{found.database}"."{found.table}"',
                    "table": None if found.dropped else described,
                }
            ],
        }
        key = to_json({"databaseName": found.database})
        return CapturedRecord(self.maker.topics.schema, key, to_json(value), self.time_ms)


def _key_of(change: TableChange, row: Row) -> Row | None:
    """Return the columns of a row that are its key; None of a table without one."""
    if not change.key:
        return None
    return {name: row[name] for name in change.key}


def _with_tombstones(keys: pa.Array, values: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return each key twice, and each value with a null after it."""
    count = len(keys)
    twice = np.repeat(np.arange(count), 2)
    absent = np.tile([False, True], count)
    return keys.take(pa.array(twice)), values.take(pa.array(twice, mask=absent))


def times(name: str, ms: int) -> dict[str, int]:
    """Return a time as Debezium has it: in milli-, micro- and nanoseconds."""
    return {f"{name}_ms": ms, f"{name}_us": ms * 1000, f"{name}_ns": ms * 1_000_000}


def _times_json(ms: int) -> bytes:
    return b'"ts_ms":%d,"ts_us":%d,"ts_ns":%d' % (ms, ms * 1000, ms * 1_000_000)


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def to_json(value: dict[str, Any] | Sequence[Any] | str) -> bytes:
    """Return JSON in UTF-8. NaN and infinity are text by now: JSON has no such numbers."""
    try:
        return _encode(value).encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which JSON has as an escape alone
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
