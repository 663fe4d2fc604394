"""The binary log's bytes, decoded to events. It opens nothing: bytes in, events out.

An event that is not known stops the decoding with an error; none is skipped, except those listed in
``_WITHOUT_CHANGES``, which change no row. Layouts: MySQL's "Replication Protocol" and MariaDB's
"Replication Protocol" pages; of MySQL's GTIDs ``Gtid_event`` in its ``control_events.h``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias
from uuid import UUID

from millstream.capture.mysql.buffer import BinlogBuffer
from millstream.capture.mysql.charsets import statement_text
from millstream.capture.mysql.row_images import RowChange, read_row_changes
from millstream.capture.mysql.table_map import TableMap, read_table_map
from millstream.errors import ConfigError, CorruptionError

_HEADER_SIZE = 19
_CHECKSUM_SIZE = 4
_DESCRIBED_MAX = 1000  # descriptions of tables that are kept, as each statement has one

_QUERY, _ROTATE, _FORMAT_DESCRIPTION, _XID, _TABLE_MAP = 2, 4, 15, 16, 19
_XA_PREPARE, _GTID, _QUERY_COMPRESSED = 38, 162, 165
_MYSQL_GTID, _ANONYMOUS_GTID = 33, 34
_INCIDENT = 26
# What the status of a statement has before the character set, and its size in bytes: flags, the mode of SQL, increments.
_STATUS_SIZES = {0: 4, 1: 8, 3: 4}
_STATUS_CHARSET, _STATUS_CATALOG = 4, 6

_Op: TypeAlias = Literal["c", "u", "d"]
# Type of a row event: what it does, its version, and whether its rows are compressed.
_ROWS: dict[int, tuple[_Op, int, bool]] = {
    23: ("c", 1, False),
    24: ("u", 1, False),
    25: ("d", 1, False),
    30: ("c", 2, False),
    31: ("u", 2, False),
    32: ("d", 2, False),
    166: ("c", 1, True),
    167: ("u", 1, True),
    168: ("d", 1, True),
    169: ("c", 2, True),
    170: ("u", 2, True),
    171: ("d", 2, True),
}
# Stop, intvar, rand and user variable (the statement that they belong to is an event of its own), heartbeat,
# rows query, previous gtids, annotate rows, binlog checkpoint, gtid list, start encryption.
_WITHOUT_CHANGES = frozenset((3, 5, 13, 14, 27, 29, 35, 160, 161, 163, 164))
_REFUSED = {
    36: "of group replication",
    37: "of group replication",
    39: "a row with parts of a JSON document: set binlog_row_value_options to '' in the server and in its sessions",
    40: "a compressed transaction: set binlog_transaction_compression to OFF in the server and in its sessions",
    42: "a transaction whose GTID has a tag: use GTIDs without tags",
}
_HEARTBEATS = frozenset((27,))

FL_STANDALONE, FL_DDL, FL_PREPARED_XA, FL_COMPLETED_XA = 1, 32, 64, 128


@dataclass(frozen=True, slots=True)
class EventHeader:
    """What each event begins with. ``next_position`` is where the one after it begins, in bytes of its file."""

    timestamp_s: int
    type: int
    server_id: int
    next_position: int


@dataclass(frozen=True, slots=True)
class FormatDescription:
    """The first event of a file, from which its ``timestamp_s`` tells it from another file of its name."""

    server_version: str


@dataclass(frozen=True, slots=True)
class Rotation:
    """The log goes on in another file."""

    file: str
    position: int


@dataclass(frozen=True, slots=True)
class GlobalTransactionId:
    """A transaction begins, or a statement that is one of its own (``FL_STANDALONE``)."""

    domain: int
    server_id: int
    sequence: int
    flags: int

    def __str__(self) -> str:
        return f"{self.domain}-{self.server_id}-{self.sequence}"


@dataclass(frozen=True, slots=True)
class MySqlTransactionId:
    """A transaction of MySQL begins, or a statement that is one of its own: the first event after it says which.

    ``source``: the UUID of the server that it was first committed on; empty while GTIDs are off.
    """

    source: str
    number: int

    def __str__(self) -> str:
        return f"{self.source}:{self.number}"


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement that is logged as text: DDL, the ends of some transactions, or DML that is not logged by row."""

    database: str
    text: str


@dataclass(frozen=True, slots=True)
class Commit:
    """A transaction ends, and is committed."""


@dataclass(frozen=True, slots=True)
class XaPrepared:
    """A transaction of XA is prepared: whether it is committed is told by a later event."""


@dataclass(frozen=True, slots=True)
class RowsEvent:
    """Changes of the rows of one table; ``changes`` decodes them one by one."""

    table: TableMap
    body: bytes = field(repr=False)
    op: _Op
    version: int
    compressed: bool

    def changes(self) -> Iterator[RowChange]:
        """Yield each row's change, in the order in which the server made them."""
        return read_row_changes(self.table, self._reader(), self.op)

    def whole_images(self) -> bytes | None:
        """Return the bytes of the rows' images; None if they lack columns, or are not of the table's width."""
        reader, width = self._reader(), len(self.table.columns)
        if reader.packed() != width:
            return None
        size = (width + 7) // 8
        present = [reader.little(size) for _ in range(2 if self.op == "u" else 1)]
        full = (1 << width) - 1
        return reader.rest() if all(bits & full == full for bits in present) else None

    def _reader(self) -> BinlogBuffer:
        """Return a reader that stands at the number of columns."""
        reader = BinlogBuffer(self.body, 8)
        if self.version == 2:
            reader.take(reader.little(2) - 2)
        if self.compressed:
            reader = _decompressed_rows(reader, images=2 if self.op == "u" else 1)
        return reader


@dataclass(frozen=True, slots=True)
class Skipped:
    """An event that changes no row, or none of a table that is wanted."""

    heartbeat: bool = False


BinlogContent: TypeAlias = (
    FormatDescription
    | Rotation
    | GlobalTransactionId
    | MySqlTransactionId
    | Statement
    | Commit
    | XaPrepared
    | TableMap
    | RowsEvent
    | Skipped
)


class BinlogDecoder:
    """Decodes events one after another, as a server sends them.

    Args:
        charsets: The character set of each of the server's collations, by its number.
        wanted: Says of a database and a table whether its rows are decoded.
        checksum: Whether events end with a checksum, until a format description says so itself.

    Guarantees: for one thread; nothing is read or written.
    """

    def __init__(
        self, charsets: Mapping[int, str], wanted: Callable[[str, str], bool], *, checksum: bool
    ) -> None:
        self._charsets = charsets
        self._wanted = wanted
        self._checksum = checksum
        self._of_mysql = False  # until a format description says so
        self._tables: dict[int, TableMap | None] = {}
        self._described: dict[bytes, TableMap | None] = {}

    def decode(self, event: bytes) -> tuple[EventHeader, BinlogContent]:
        """Return an event's header and its content.

        Raises:
            CorruptionError: the checksum differs, the event ends too early, or the log has a gap.
            ConfigError: the event cannot be decoded; the message says what to change.
        """
        reader = BinlogBuffer(event)
        header = EventHeader(
            reader.little(4), reader.little(1), reader.little(4), _after_size(reader)
        )
        reader.take(2)
        if header.type == _FORMAT_DESCRIPTION:
            return header, self._format_description(event)
        body = self._body(event)
        try:
            return header, self._content(header, body)
        except CorruptionError as error:
            raise CorruptionError(f"{_where(header)}: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{_where(header)}: {error}") from error

    def _format_description(self, event: bytes) -> FormatDescription:
        # A byte with the algorithm (0 none, 1 CRC-32) and four of a checksum, which this event always has.
        algorithm = event[-_CHECKSUM_SIZE - 1]
        if algorithm not in (0, 1):
            raise ConfigError(
                f"the binary log has checksums of algorithm {algorithm}; allowed are NONE and CRC32: "
                "SET GLOBAL binlog_checksum = 'CRC32'."
            )
        self._checksum = algorithm == 1
        self._tables.clear()
        if self._checksum:
            self._body(event)
        version = (
            event[_HEADER_SIZE + 2 : _HEADER_SIZE + 52].rstrip(b"\0").decode("ascii", "replace")
        )
        self._of_mysql = "mariadb" not in version.lower()
        return FormatDescription(version)

    def _body(self, event: bytes) -> bytes:
        if not self._checksum:
            return event[_HEADER_SIZE:]
        content, sum_sent = event[:-_CHECKSUM_SIZE], event[-_CHECKSUM_SIZE:]
        if zlib.crc32(content) != int.from_bytes(sum_sent, "little"):
            raise CorruptionError(
                f"an event of the binary log ({len(event)} bytes, type {event[4]}) does not have its "
                "checksum. The connection or the log is damaged: start the capture again; if it stops here "
                "again, check the log with mariadb-binlog --verify-binlog-checksum."
            )
        return content[_HEADER_SIZE:]

    def _content(self, header: EventHeader, body: bytes) -> BinlogContent:
        if header.type in _ROWS:
            return self._rows(body, *_ROWS[header.type])
        if header.type in _WITHOUT_CHANGES:
            return Skipped(heartbeat=header.type in _HEARTBEATS)
        simple: dict[int, Callable[[bytes], BinlogContent]] = {
            _TABLE_MAP: self._table_map,
            _QUERY: self._statement,
            _QUERY_COMPRESSED: lambda body: self._statement(body, compressed=True),
            _ROTATE: _rotation,
            _XID: lambda _: Commit(),
            _XA_PREPARE: _xa_prepare,
            _MYSQL_GTID: _mysql_gtid,
            _ANONYMOUS_GTID: lambda _: MySqlTransactionId("", 0),
        }
        if header.type == _GTID:
            return _gtid(header, body)
        if header.type in simple:
            return simple[header.type](body)
        if header.type == _INCIDENT:
            raise CorruptionError(
                "the server says that its binary log lacks changes (an incident). Take a new snapshot."
            )
        what = _REFUSED.get(header.type, "which capture does not know, and skips none")
        raise ConfigError(
            f"the binary log has an event of type {header.type}, {what}. Capture into a new prefix, from a new snapshot."
        )

    def _table_map(self, body: bytes) -> BinlogContent:
        about = body[6:]  # behind the number, which is another one in each file
        if about not in self._described:
            if len(self._described) >= _DESCRIBED_MAX:
                self._described.clear()
            self._described[about] = read_table_map(
                body, self._charsets, self._wanted, of_mysql=self._of_mysql
            )
        table = self._described[about]
        self._tables[int.from_bytes(body[:6], "little")] = table
        return Skipped() if table is None else table

    def _rows(self, body: bytes, op: _Op, version: int, compressed: bool) -> BinlogContent:  # noqa: FBT001 - a row of the table above
        number = int.from_bytes(body[:6], "little")
        if number not in self._tables:
            if number == 0xFFFFFF:  # ends a statement that changed no row of a table that is logged
                return Skipped()
            raise CorruptionError(
                f"a row event is of table number {number}, which no event before it describes. Take a new "
                "snapshot, or start from the beginning of a transaction."
            )
        table = self._tables[number]
        return Skipped() if table is None else RowsEvent(table, body, op, version, compressed)

    def _statement(self, body: bytes, *, compressed: bool = False) -> Statement:
        reader = BinlogBuffer(body)
        reader.take(8)
        database_size = reader.little(1)
        reader.take(2)
        charset = self._charsets.get(_session_charset(reader.take(reader.little(2))), "utf8mb4")
        database = reader.take(database_size).decode("utf-8", "replace")
        reader.take(1)
        text = decompress(reader.rest()) if compressed else reader.rest()
        return Statement(database, statement_text(text, charset))


def _after_size(reader: BinlogBuffer) -> int:
    reader.take(4)
    return reader.little(4)


def _where(header: EventHeader) -> str:
    return f"in the event of the binary log that ends at byte {header.next_position}"


def _rotation(body: bytes) -> Rotation:
    return Rotation(body[8:].rstrip(b"\0").decode(), int.from_bytes(body[:8], "little"))


def _gtid(header: EventHeader, body: bytes) -> GlobalTransactionId:
    reader = BinlogBuffer(body)
    sequence, domain, flags = reader.little(8), reader.little(4), reader.little(1)
    return GlobalTransactionId(domain, header.server_id, sequence, flags)


def _mysql_gtid(body: bytes) -> MySqlTransactionId:
    reader = BinlogBuffer(body, 1)
    return MySqlTransactionId(str(UUID(bytes=reader.take(16))), reader.little(8))


def _xa_prepare(body: bytes) -> Commit | XaPrepared:
    # A transaction of XA that is committed in one phase ends with this event, too.
    return Commit() if body[:1] == b"\1" else XaPrepared()


def _session_charset(status: bytes) -> int:
    """Return the collation of the session that a statement is from, which its status says among other things; 0 if not."""
    reader = BinlogBuffer(status)
    while not reader.at_end:
        kind = reader.little(1)
        if kind == _STATUS_CHARSET:
            return reader.little(2)
        if kind == _STATUS_CATALOG:
            reader.take(reader.little(1))
        elif kind in _STATUS_SIZES:
            reader.take(_STATUS_SIZES[kind])
        else:
            break
    return 0


def _decompressed_rows(reader: BinlogBuffer, images: int) -> BinlogBuffer:
    """Return a reader of the same event as it is without compression: the rows alone are compressed."""
    start = reader.position
    columns = reader.packed()
    reader.take(images * ((columns + 7) // 8))
    plain = reader.data[start : reader.position]
    return BinlogBuffer(plain + decompress(reader.rest()))


def decompress(data: bytes) -> bytes:
    """Return what MariaDB compressed: a byte of algorithm and length's size, the length, zlib.

    Raises:
        CorruptionError: it is not compressed so, or does not have its length.
    """
    reader = BinlogBuffer(data)
    first = reader.little(1)
    if first & 0xF0 != 0x80:
        raise CorruptionError(
            f"an event is compressed with algorithm {first >> 4 & 7}; capture knows zlib, 0. Set log_bin_compress=OFF."
        )
    size = reader.big(first & 7)
    try:
        plain = zlib.decompress(reader.rest())
    except zlib.error as error:
        raise CorruptionError(
            f"a compressed event is damaged: {error}. Start the capture again."
        ) from error
    if len(plain) != size:
        raise CorruptionError(
            f"a compressed event has {len(plain)} bytes, and says {size}. Start the capture again."
        )
    return plain
