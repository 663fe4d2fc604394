"""The binary log as transactions: events of one group, whole, with the place after it.

A transaction is held until its end is seen, so that one that the server did not finish (it was killed while it
wrote) is dropped and not given. Beyond ``HELD_BYTES`` it is given while it is read: the memory stays bounded, and an
end that never comes is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from millstream.capture.mysql.decoder import (
    FL_DDL,
    FL_PREPARED_XA,
    FL_STANDALONE,
    BinlogContent,
    BinlogDecoder,
    Commit,
    EventHeader,
    FormatDescription,
    GlobalTransactionId,
    MySqlTransactionId,
    Rotation,
    RowsEvent,
    Skipped,
    Statement,
    XaPrepared,
)
from millstream.capture.mysql.snapshot import BinlogPosition
from millstream.capture.mysql.statements import changes_no_row_unsaid
from millstream.capture.mysql.table_map import TableMap
from millstream.errors import ConfigError, ConflictError, CorruptionError

HELD_BYTES = 64 << 20
_GOES_ON = ("BEGIN", "RELEASE SAVEPOINT", "XA END", "XA START")
_MADE_WITH_ROWS = re.compile(r"CREATE TABLE\b.*\bSTART TRANSACTION\s*$", re.DOTALL)
_ENDS = ("COMMIT", "XA COMMIT", "XA ROLLBACK", "XA PREPARE")


TransactionId: TypeAlias = GlobalTransactionId | MySqlTransactionId


@dataclass(slots=True)
class BinlogTransaction:
    """A transaction's tables, rows and statements, read once and to their end."""

    gtid: TransactionId
    timestamp_s: int
    events: Iterator[TableMap | RowsEvent | Statement]


@dataclass(slots=True)
class _Group:
    """What has been read of a transaction."""

    held: list[TableMap | RowsEvent | Statement] = field(default_factory=list)
    size: int = 0
    ended: bool = False
    begun: bool = False
    """Of MySQL: its first event was a BEGIN, or what stands for one, so that it has an end."""
    given: bool = False
    """Its beginning was given on: what is rolled back cannot be taken back."""
    savepoints: dict[str, int] = field(default_factory=dict)
    table: TableMap | None = None
    """One whose rows it changes."""


class TransactionReader:
    """Reads transactions from a place in the binary log on.

    ``position`` is the end of the last transaction, or of what came after it and changes nothing; ``created`` is
    when its file was made, in seconds, which tells it from another file of its name.

    Args:
        next_event: Gives the next event's bytes, and waits for it.
        created: What ``created`` was when the place was stored; 0 if it was not known.

    Guarantees: for one thread.
    """

    def __init__(
        self,
        decoder: BinlogDecoder,
        next_event: Callable[[], bytes],
        position: BinlogPosition,
        created: int = 0,
    ) -> None:
        self._decoder = decoder
        self._next_event = next_event
        self.position = position
        self.created = created
        self._resumed_in = position.file if created else ""
        self._in_group = False

    def open(self) -> None:
        """Read what the log begins with: of which file it is.

        Raises:
            ConflictError: the file is not the one that the place was in, or is gone.
        """
        while not isinstance(self._event()[1], FormatDescription):
            pass

    def read(self, until: BinlogPosition | None = None) -> Iterator[BinlogTransaction | None]:
        """Yield transactions, until the log is read to a place; None where there are none at the moment.

        Transactions without a captured table have no events.

        Raises:
            ConflictError: the file is not the one that the place was in.
            ConfigError: a change cannot be captured; the message says why.
            CorruptionError: the log is damaged, or ends within a large transaction.
        """
        while until is None or self.position < until:
            header, content = self._event()
            if isinstance(content, TransactionId):
                yield from self._transaction(self._named(content, header), header)
            elif isinstance(content, Skipped):
                if content.heartbeat:
                    yield None
            elif not isinstance(content, Rotation | FormatDescription):
                raise CorruptionError(
                    f"at {self.position} the binary log goes on in the middle of a transaction. Capture "
                    "into a new prefix, from a new snapshot."
                )

    def _event(self) -> tuple[EventHeader, BinlogContent]:
        """Read an event; the place moves with those that are outside of transactions."""
        header, content = self._decoder.decode(self._next_event())
        if isinstance(content, Rotation):
            if content.file != self.position.file:
                self.position = BinlogPosition.of(content.file, 4)
        elif isinstance(content, FormatDescription):
            self._check_file(header.timestamp_s)
            self._move(header)
        elif isinstance(content, Skipped) and not content.heartbeat and not self._in_group:
            self._move(header)
        return header, content

    def _move(self, header: EventHeader) -> None:
        if header.next_position > self.position.position:
            self.position = BinlogPosition.of(self.position.file, header.next_position)

    def _check_file(self, created: int) -> None:
        if self.position.file == self._resumed_in and created != self.created:
            raise ConflictError(
                f"the server's file {self.position.file} was made anew since capture read it (RESET MASTER, a "
                "restored backup, or another server). Changes may be missing: capture into a new prefix, "
                "from a new snapshot."
            )
        self.created = created

    def _named(self, gtid: TransactionId, header: EventHeader) -> TransactionId:
        """Return what a transaction is called: by its place, where the server gives it no number."""
        if isinstance(gtid, MySqlTransactionId) and not gtid.source:
            return MySqlTransactionId(self.position.file, header.next_position)
        return gtid

    def _transaction(self, gtid: TransactionId, header: EventHeader) -> Iterator[BinlogTransaction]:
        self._in_group = True
        group = _Group()
        while not group.ended and group.size < HELD_BYTES:
            if not self._read_into(group, gtid):
                self._in_group = False
                return  # unfinished: the server was killed while it wrote, and has rolled it back
        yield BinlogTransaction(gtid, header.timestamp_s, self._contents(group, gtid))
        while not group.ended:
            self._read_on(group, gtid)
        self._in_group = False

    def _contents(
        self, group: _Group, gtid: TransactionId
    ) -> Iterator[TableMap | RowsEvent | Statement]:
        yield from group.held
        while not group.ended:
            self._read_on(group, gtid)
            yield from group.held

    def _read_on(self, group: _Group, gtid: TransactionId) -> None:
        group.held.clear()
        group.savepoints.clear()
        group.given = True
        if not self._read_into(group, gtid):
            raise CorruptionError(
                f"the binary log ends in the middle of the large transaction {gtid}: the server was killed while it "
                "wrote. Capture into a new prefix, from a new snapshot."
            )

    def _read_into(self, group: _Group, gtid: TransactionId) -> bool:
        """Read one event of a group; False if the log goes on in another file before its end."""
        header, content = self._event()
        if isinstance(content, Rotation | FormatDescription):
            return False
        if isinstance(content, TableMap | RowsEvent):
            if isinstance(content, RowsEvent):
                if isinstance(gtid, GlobalTransactionId) and gtid.flags & FL_PREPARED_XA:
                    self._refuse_xa(content.table, gtid)
                group.table = content.table
                group.size += len(content.body)
            group.held.append(content)
        elif isinstance(content, Statement):
            self._statement(group, gtid, content)
        elif isinstance(content, Commit | XaPrepared):
            if isinstance(content, XaPrepared) and group.table is not None:
                self._refuse_xa(group.table, gtid)
            group.ended = True
        if group.ended:
            self._move(header)
        return True

    def _statement(self, group: _Group, gtid: TransactionId, statement: Statement) -> None:
        text = statement.text.lstrip().upper()
        if isinstance(gtid, MySqlTransactionId):
            if self._is_mysql_ddl(group, text):
                group.held.append(statement)
            if not group.begun:
                group.ended = True
                return
        elif gtid.flags & FL_DDL or (
            gtid.flags & FL_STANDALONE and changes_no_row_unsaid(statement.text)
        ):
            group.held.append(statement)
            group.ended = bool(gtid.flags & FL_STANDALONE)
            return
        if text.startswith("SAVEPOINT "):
            group.savepoints[text.split(None, 1)[1]] = len(group.held)
        elif text.startswith("ROLLBACK"):
            self._roll_back(group, gtid, text.split(None, 2)[1:])  # their names know no case
        elif text.startswith(_ENDS):
            group.ended = True
        elif not text.startswith(_GOES_ON) and not _MADE_WITH_ROWS.match(text):
            raise ConfigError(
                f"the transaction {gtid} has a change that is logged as a statement ({text.split()[0][:20]} …), not by "
                f"row, at {self.position}: a session had set binlog_format to STATEMENT or MIXED. Whether it "
                "concerns a captured table cannot be known. Have sessions leave binlog_format as ROW, and "
                "capture into a new prefix, from a new snapshot."
            )

    def _is_mysql_ddl(self, group: _Group, text: str) -> bool:
        """Say whether a statement of MySQL's log is DDL, by where it stands; note if it begins a transaction.

        A statement that follows its GTID at once is DDL, or administration, and all that there is. After a BEGIN only that
        of CREATE TABLE … SELECT is, which newer servers log with the rows (WL#13355).
        """
        if _MADE_WITH_ROWS.match(text):
            group.begun = True
            return True
        if group.begun:
            return False
        group.begun = text.startswith(("BEGIN", "XA START"))
        return not group.begun and not text.startswith("XA ")

    def _roll_back(self, group: _Group, gtid: TransactionId, to_savepoint: list[str]) -> None:
        """Take back what a transaction did: it is logged where something of it cannot be undone, such as a
        table of an engine without transactions.
        """
        kept = group.savepoints.get(to_savepoint[-1]) if to_savepoint else 0
        if group.given or kept is None:
            raise ConfigError(
                f"the large transaction {gtid} was rolled back, in part or whole, at {self.position}, after its beginning "
                "was given on. Leave tables without transactions and temporary tables out of transactions that are so "
                "large, and capture into a new prefix, from a new snapshot."
            )
        del group.held[kept:]
        group.ended = not to_savepoint

    def _refuse_xa(self, table: TableMap, gtid: TransactionId) -> None:
        raise ConfigError(
            f"the transaction {gtid} changes {table.database}.{table.table} and is of XA: it is logged when "
            "it is prepared, before it is known whether it is committed. Capture does not support this. "
            "Have its program use plain transactions, and capture into a new prefix, from a new snapshot."
        )
