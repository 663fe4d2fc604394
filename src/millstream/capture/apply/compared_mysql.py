"""A snapshot of a database of MariaDB or MySQL, tied to a place in the binary log, to compare a target with.

It is one transaction, which is held while the tables are read: nobody waits for it but an ALTER of a table that was read.
How it is tied: ``capture/mysql/snapshot.py``. Whether a transaction of the log is in it is told by its GTID:

=======================================  ================================================================
a GTID of MariaDB                        in it, if it is not behind that of the place in its domain
one of MySQL that was executed           in it
one of MySQL, behind all of its server   not in it
one of MySQL, between others             not known: it was not executed then. Another snapshot is taken
MySQL without GTIDs                      by its place in the log
=======================================  ================================================================

What the capture has read, and the copy has, must be the server's: else the copy would be repaired to an older state, or to that
of another server. The log is asked for that as a capture that goes on asks (``capture/mysql/log_identity.py``).

MySQL is asked for the GTIDs while its tables are locked, so that the table holds for transactions that have one of them;
of others it may be wrong, and they change nothing that is compared.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from millstream.capture.apply.applied_table import AppliedTable, Row
from millstream.capture.apply.change_stream import SourceTransaction
from millstream.capture.mysql.address import MariaDbAddress
from millstream.capture.mysql.gtid_sets import GtidSet
from millstream.capture.mysql.log_identity import refuse_other_log
from millstream.capture.mysql.preflight import (
    lock_faults,
    privilege_faults,
    refuse_faults,
    scheme_faults,
    table_names,
)
from millstream.capture.mysql.session import MariaDbSession, TableAlteredError, TableInUseError
from millstream.capture.mysql.snapshot import (
    BinlogPosition,
    begin_locked,
    begin_snapshot,
    current_end,
    next_chunk,
)
from millstream.capture.mysql.table_schema import read_schema
from millstream.capture.units import Progress
from millstream.errors import ConfigError, ConflictError, RetriableError

CHUNK_ROWS = 10_000
LOCK_PAUSE_S = 10.0  # as of a capture: writers wait for a second, and not again before this
_LOCK_ATTEMPTS = 3
_MYSQL_GTID = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}):(\d+)")


class _ComparedBinlog(ABC):
    """See :class:`millstream.capture.apply.compared_source.ComparedSource`."""

    wait_s = 30.0  # an idle capture says where it is with each heartbeat of the server

    def __init__(self, address: MariaDbAddress, chunk_rows: int = CHUNK_ROWS) -> None:
        self.shown = address.shown
        self._chunk_rows = chunk_rows
        self._session = MariaDbSession(address)
        try:
            faults = [*scheme_faults(self._session)] or [*privilege_faults(self._session)]
            refuse_faults(faults, self.shown, "compared")
            self._place = self._begin()
        except BaseException:
            self._session.close()
            raise
        self.position = str(self._place)

    @abstractmethod
    def _begin(self) -> BinlogPosition:
        """Begin the snapshot, and return its place."""

    @abstractmethod
    def _refuse_other_server(self, progress: Progress) -> None:
        """Return if the server does not tell itself to be another one than a capture's.

        Raises:
            ConfigError: it does.
        """

    @abstractmethod
    def _is_committed_after(self, position: str) -> bool:
        """Say whether the transaction at a position is not in the snapshot."""

    def close(self) -> None:
        self._session.close()

    def columns(self, table: AppliedTable) -> tuple[str, ...]:
        found = read_schema(self._session, table.database, table.table)
        return tuple(column.name for column in found.columns)

    def rows(self, table: AppliedTable) -> Iterator[Row]:
        after: list[str] | None = None
        while True:
            chunk = next_chunk(
                self._session, self._place, (table.database, table.table), after, self._chunk_rows
            )
            yield from chunk.rows()
            after = chunk.last_key
            if after is None:
                return

    def tables(self, progress: Progress) -> dict[tuple[str, str], bool]:
        found = ((name.partition("/"), state) for name, state in progress["tables"].items())
        return {(database, table): "read" in state for (database, _, table), state in found}

    def refuse_other(self, progress: Progress) -> None:
        self._refuse_other_server(progress)
        try:
            refuse_other_log(self._session.address, progress)
        except ConflictError as error:
            raise ConfigError(
                f"{self.shown} does not have what the capture has read from it: another server answers, its log was made anew, or "
                f"a backup was restored. Give the address that the capture has; if it is that one, nothing of before can be "
                f"compared with it: capture it under a new name, and apply that to a new target. ({error})"
            ) from None

    def is_covered(self, progress: Progress) -> bool:
        return BinlogPosition.of(progress["file"], progress["position"]) >= self._place

    def is_after(self, transaction: SourceTransaction) -> bool:
        return not self.has(transaction.position)

    def has(self, position: str) -> bool:
        """Say so of a transaction by its GTID, of a chunk by its place: one at the same place has the same rows."""
        place, of_chunk, _ = position.partition("/")
        if of_chunk:
            return _place_of(place) <= self._place
        return not self._is_committed_after(position)

    def is_at(self, position: str) -> bool:  # noqa: ARG002 - the call of all sources
        return True  # each transaction is one in the log


class ComparedMariaDb(_ComparedBinlog):
    """A snapshot of MariaDB, which tells its place."""

    def _begin(self) -> BinlogPosition:
        place = begin_snapshot(self._session, [])
        given = self._session.value(f"SELECT BINLOG_GTID_POS(%s, {place.position})", (place.file,))
        if given is None:
            raise RetriableError(
                f"{self.shown} has purged {place.file} already, where it was read. Run it again."
            )
        gtids = (gtid.split("-") for gtid in _text(given).split(",") if gtid)
        self._last = {int(domain): int(sequence) for domain, _, sequence in gtids}
        return place

    def _refuse_other_server(self, progress: Progress) -> None:
        """Return: a server of MariaDB has nothing that tells it from others and stays."""

    def _is_committed_after(self, position: str) -> bool:
        domain, _, sequence = map(int, position.split("-"))
        return sequence > self._last.get(domain, -1)


class ComparedMySql(_ComparedBinlog):
    """A snapshot of MySQL, whose tables were locked for the moment in which it was taken.

    Args:
        tables: Those that are compared, by database and name; of which the server may have lost some.

    Raises:
        RetriableError: a transaction that has written one of the tables did not end; the message says where to look.
        ConfigError: the user may not lock the tables.
    """

    def __init__(
        self,
        address: MariaDbAddress,
        tables: Sequence[tuple[str, str]],
        chunk_rows: int = CHUNK_ROWS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._tables = frozenset(tables)
        self._sleep = sleep
        self._has_gap = False
        super().__init__(address, chunk_rows)

    def _begin(self) -> BinlogPosition:
        self._server = str(self._session.value("SELECT @@global.server_uuid"))
        for left in reversed(range(_LOCK_ATTEMPTS)):
            try:
                return self._lock_and_begin()
            except TableInUseError:
                if not left:
                    raise
                self._sleep(LOCK_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    def _lock_and_begin(self) -> BinlogPosition:
        there = table_names(self._session, lambda *name: name in self._tables)
        faults = [
            fault
            for database in sorted({database for database, _ in there})
            for fault in lock_faults(self._session, database)
        ]
        refuse_faults(faults, self.shown, "compared")
        try:
            end = begin_locked(self._session, there, current_end)
        except TableInUseError:
            raise
        except TableAlteredError as error:
            raise RetriableError(
                f"a table was altered while {self.shown} was compared: {error} Run it again."
            ) from error
        self._executed = GtidSet.parse(end.gtids)
        return end.position

    def _refuse_other_server(self, progress: Progress) -> None:
        captured = progress.get("server", self._server)
        if captured != self._server:
            raise ConfigError(
                f"{self.shown} is the server {self._server}, and the capture reads {captured}. Give the address that the "
                "capture has."
            )

    def _is_committed_after(self, position: str) -> bool:
        found = _MYSQL_GTID.fullmatch(position)
        if found is None:
            return _place_of(position) > self._place
        source, number = found[1], int(found[2])
        if (source, number) in self._executed:
            return False
        # Executed out of its order, by a replica with several workers: it may be on either side of the place.
        self._has_gap |= number < self._executed.end(source)
        return True

    def is_at(self, position: str) -> bool:  # noqa: ARG002 - the call of all sources
        return not self._has_gap


def _place_of(position: str) -> BinlogPosition:
    file, _, place = position.rpartition(":")
    return BinlogPosition.of(file, int(place))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
