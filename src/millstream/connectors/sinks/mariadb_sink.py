"""MariaDbSink: rows of a table of MariaDB or MySQL. A batch, and the note of it, are one transaction.

The note is a row of the table ``_millstream_sinks`` in the same database, which is locked while a batch is written.

====================================  ==================================================================
what is found in the note             what follows
====================================  ==================================================================
another token                         a later run was opened: FencedError
this batch                            it was written: its refused records are returned again
====================================  ==================================================================

With a key, the rows that are there are found first, and locked. So an INSERT never meets one that a collation takes for the same (``a``
and ``A``), nor one that has another key and equals it in a unique index, without the server's saying so: it would replace that one.

Source: MariaDB, "START TRANSACTION", "INSERT ON DUPLICATE KEY UPDATE", "SELECT ... FOR UPDATE"; MySQL 8.4, the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from millstream.capture.mysql.address import MariaDbAddress
from millstream.connectors.sinks.connector import (
    RecordsToWrite,
    RefusedRecord,
    SinkGuarantee,
    SinkOpening,
    WrittenBatch,
)
from millstream.connectors.sinks.mariadb_session import SinkSession
from millstream.connectors.sinks.mariadb_table import key_reader, quoted, read_table
from millstream.connectors.sinks.sink_note import BatchNote
from millstream.connectors.sinks.table_changes import (
    DEFAULT,
    RowKey,
    RowsRefusedError,
    SinkChange,
    last_changes,
    refuse_other_table,
    table_changes,
    write_divided,
)
from millstream.connectors.sinks.table_choice import TableChoice
from millstream.errors import ConfigError, FencedError, MillstreamError

NOTE_TABLE = "_millstream_sinks"
_IDLE_S = 60.0  # after which the server, or what is between, may have closed the session
_STATEMENT_BYTES = 1 << 20
_STATEMENT_KEYS = 1000
_CREATE_NOTES = (
    f"CREATE TABLE IF NOT EXISTS {NOTE_TABLE} (name VARCHAR(100) CHARACTER SET ascii COLLATE ascii_bin NOT NULL, "
    "life VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL, token VARCHAR(64) NOT NULL, "
    "note LONGTEXT CHARACTER SET utf8mb4, PRIMARY KEY (name, life)) ENGINE = InnoDB"
)


@dataclass(frozen=True)
class MariaDbSink:
    """A sink connector, made by :func:`millstream.connectors.sinks.to_mariadb.to_mariadb`."""

    address: MariaDbAddress = field(repr=False)
    choice: TableChoice
    records_max: int = 5_000
    bytes_max: int = 4 << 20
    guarantee: SinkGuarantee = "transaction"

    @property
    def kind(self) -> str:
        """What the address begins with: "mariadb" or "mysql"."""
        return self.address.scheme

    @property
    def origin(self) -> str:
        """The address, without user and password, and the table."""
        return f"{self.address.shown}, table {self.choice.table!r}"

    def open(self, opening: SinkOpening) -> MariaDbWriter:
        """Return what writes; see :class:`~millstream.connectors.sinks.connector.SinkConnector`."""
        return MariaDbWriter(self, opening)


class MariaDbWriter:
    """Writes batches; see :class:`~millstream.connectors.sinks.connector.SinkWriter`."""

    _session: SinkSession
    _used_s: float  # when the session was last used

    def __init__(self, sink: MariaDbSink, opening: SinkOpening) -> None:
        self._sink = sink
        self._opening = opening
        self._connect()
        name, life, token = map(self._session.literal, (opening.name, opening.life, opening.token))
        self._where = f"WHERE name = {name} AND life = {life}"
        try:
            self._table = read_table(self._session, sink.origin, sink.choice)
            self._writer = _TableWriter(self)
            self._create_notes()
            # From here on, a run that was opened before finds another token.
            self._session.rows(
                f"INSERT INTO {NOTE_TABLE} (name, life, token) VALUES ({name}, {life}, {token}) "  # noqa: S608
                "ON DUPLICATE KEY UPDATE token = VALUES(token)"
            )
            self._note = self._read_note()
        except BaseException:
            self.close()
            raise

    @property
    def session(self) -> SinkSession:
        return self._session

    @property
    def last(self) -> WrittenBatch | None:
        """The last batch that the database has noted."""
        return None if self._note is None else self._note.batch

    def write(self, batch: RecordsToWrite) -> Sequence[RefusedRecord]:
        """Write a batch in one transaction; see the protocol."""
        if time.monotonic() - self._used_s > _IDLE_S:
            self._session.close()
            self._connect()
        self._session.rows("BEGIN")
        try:
            refused = self._write(batch)
        except BaseException:
            with suppress(MillstreamError):
                self._session.rows("ROLLBACK")
            raise
        self._session.rows("COMMIT")
        self._used_s = time.monotonic()
        return refused

    def close(self) -> None:
        """End the session."""
        self._session.close()

    def _write(self, batch: RecordsToWrite) -> Sequence[RefusedRecord]:
        self._note = self._read_note(lock=True)
        if self._note is not None and self._note.batch.number == batch.number:
            return self._note.refused
        found = table_changes(self._table, batch.records)
        if self._note is None:
            refuse_other_table(self._table, found)
        refused = [*found.refused, *write_divided(found.changes, self._writer.write)]
        note = self._session.literal(BatchNote.of(batch, refused).to_json())
        self._session.rows(f"UPDATE {NOTE_TABLE} SET note = {note} {self._where}")  # noqa: S608
        return refused

    def _connect(self) -> None:
        self._session = SinkSession(self._sink.address)
        self._used_s = time.monotonic()

    def _create_notes(self) -> None:
        """Make the table of notes, unless it is there: who may not make tables may find it made."""
        there = self._session.rows(
            f"SELECT 1 FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = '{NOTE_TABLE}'"  # noqa: S608
        )
        if there:
            return
        try:
            self._session.rows(_CREATE_NOTES)
        except ConfigError as error:
            raise ConfigError(
                f"{error} The sink keeps there which batch was written last. Or have it made: {_CREATE_NOTES};"
            ) from None

    def _read_note(self, *, lock: bool = False) -> BatchNote | None:
        """Return the note of the last batch.

        Raises:
            FencedError: a later run was opened.
        """
        found = self._session.rows(
            f"SELECT token, note FROM {NOTE_TABLE} {self._where}{' FOR UPDATE' if lock else ''}"  # noqa: S608
        )
        if not found or found[0][0] != self._opening.token:
            raise FencedError(
                f"another sink {self._opening.name!r} has begun. This one ends; run one of a name at a time."
            )
        return BatchNote.from_json(found[0][1])


class _TableWriter:
    """Writes changes to the table of a sink, in the transaction that its session has open."""

    def __init__(self, of: MariaDbWriter) -> None:
        self._of = of
        self._table = of._table  # noqa: SLF001 - of this module
        self._name = quoted(of._sink.choice.table)  # noqa: SLF001 - as above
        self._columns = ", ".join(map(quoted, self._table.names))
        self._key = ", ".join(map(quoted, self._table.key))
        self._defaults = [column.default or "NULL" for column in self._table.columns.values()]
        self._read_key = key_reader(self._table)
        packet = int(of.session.rows("SELECT @@max_allowed_packet")[0][0])
        self._packet = packet - 1024  # what the protocol adds to a statement
        self._statement_bytes = min(_STATEMENT_BYTES, self._packet)

    def write(self, changes: Sequence[SinkChange]) -> None:
        """Write all of some changes, or none.

        Raises:
            RowsRefusedError: one of them is against the rules of the table, and none was written.
        """
        rows = self._of.session.rows
        rows("SAVEPOINT changes")
        try:
            self._write(last_changes(changes))
        except RowsRefusedError:
            rows("ROLLBACK TO SAVEPOINT changes")
            raise

    def _write(self, changes: Sequence[SinkChange]) -> None:
        there = self._keys_there(changes) if self._key else set()
        gone = [change.key for change in changes if change.values is None and change.key in there]
        for keys in _slices(gone, _STATEMENT_KEYS):
            self._of.session.rows(f"DELETE FROM {self._name} WHERE {self._is_one_of(keys)}")  # noqa: S608
        written = [change for change in changes if change.values is not None]
        replaced = (change for change in written if change.key in there)
        names = map(quoted, self._table.names)
        updates = ", ".join(f"{name} = VALUES({name})" for name in names)
        self._insert(replaced, f" ON DUPLICATE KEY UPDATE {updates}")
        self._insert((change for change in written if change.key not in there), "")

    def _keys_there(self, changes: Sequence[SinkChange]) -> set[RowKey]:
        """Return which of the keys have a row, and lock those rows."""
        found: set[RowKey] = set()
        for keys in _slices([change.key for change in changes], _STATEMENT_KEYS):
            rows = self._of.session.rows(
                f"SELECT {self._key} FROM {self._name} WHERE {self._is_one_of(keys)} FOR UPDATE"  # noqa: S608
            )
            found.update(map(self._read_key, rows))
        return found

    def _is_one_of(self, keys: Sequence[RowKey]) -> str:
        literal = self._of.session.literal
        listed = ", ".join(f"({', '.join(map(literal, key))})" for key in keys)
        return f"({self._key}) IN ({listed})"

    def _insert(self, changes: Iterable[SinkChange], ending: str) -> None:
        begin = f"INSERT INTO {self._name} ({self._columns}) VALUES "  # noqa: S608 - quoted
        room = self._statement_bytes - len(begin) - len(ending)
        for rows in self._in_statements(map(self._row_text, changes), room):
            statement = f"{begin}{', '.join(rows)}{ending}"
            if len(rows) == 1 and len(statement.encode()) > self._packet:
                raise RowsRefusedError(
                    f"it takes {len(statement.encode()):,} bytes in a statement, and the server's max_allowed_packet is "
                    f"{self._packet + 1024:,}"
                )
            self._of.session.rows(statement)

    def _row_text(self, change: SinkChange) -> str:
        assert change.values is not None, "it is no deletion"
        literal = self._of.session.literal
        texts = (
            default if value is DEFAULT else literal(value)
            for value, default in zip(change.values, self._defaults, strict=True)
        )
        return f"({', '.join(texts)})"

    def _in_statements(self, rows: Iterable[str], room: int) -> Iterator[list[str]]:
        """Divide rows so that a statement has room for those of each part; one may have more."""
        part: list[str] = []
        size = 0
        for row in rows:
            length = len(row) if row.isascii() else len(row.encode())
            if part and size + length > room:
                yield part
                part, size = [], 0
            part.append(row)
            size += length + 2
        if part:
            yield part


def _slices(keys: Sequence[RowKey], size: int) -> Iterator[Sequence[RowKey]]:
    return (keys[first : first + size] for first in range(0, len(keys), size))
