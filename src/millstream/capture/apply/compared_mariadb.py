"""A snapshot of a MariaDB database, tied to a place in the binary log, to compare a target with.

It is one transaction, which is held while the tables are read: nobody waits for it but an ALTER of a table that was read.
How it is tied: ``capture/mysql/snapshot.py``. A transaction of the log is in it if its GTID is not behind that of the
place in its domain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millstream.capture.apply.applied_table import AppliedTable, Row
from millstream.capture.apply.change_stream import SourceTransaction
from millstream.capture.mysql.address import MariaDbAddress
from millstream.capture.mysql.session import MariaDbSession
from millstream.capture.mysql.snapshot import (
    BinlogPosition,
    begin_snapshot,
    next_chunk,
)
from millstream.capture.mysql.table_schema import read_schema
from millstream.errors import RetriableError

CHUNK_ROWS = 10_000


class ComparedMariaDb:
    """See :class:`millstream.capture.apply.compared_source.ComparedSource`."""

    wait_s = 30.0  # an idle capture says where it is with each heartbeat of the server

    def __init__(self, address: MariaDbAddress, chunk_rows: int = CHUNK_ROWS) -> None:
        self.shown = address.shown
        self._chunk_rows = chunk_rows
        self._session = MariaDbSession(address)
        try:
            self._place = begin_snapshot(self._session, [])
            self._last = self._sequences()
        except BaseException:
            self._session.close()
            raise
        self.position = str(self._place)

    def _sequences(self) -> dict[int, int]:
        """Return the number of the last transaction of each domain that is in the snapshot."""
        given = self._session.value(
            f"SELECT BINLOG_GTID_POS(%s, {self._place.position})", (self._place.file,)
        )
        if given is None:
            raise RetriableError(
                f"{self.shown} has purged {self._place.file} already, where it was read. Run it again."
            )
        gtids = (gtid.split("-") for gtid in _text(given).split(",") if gtid)
        return {int(domain): int(sequence) for domain, _, sequence in gtids}

    def close(self) -> None:
        self._session.close()

    def columns(self, table: AppliedTable) -> tuple[str, ...]:
        found = read_schema(self._session, table.database, table.table)
        return tuple(column.name for column in found.columns)

    def rows(self, table: AppliedTable) -> Iterator[Row]:
        if not self.columns(table):
            return
        after: list[str] | None = None
        while True:
            chunk = next_chunk(
                self._session, self._place, (table.database, table.table), after, self._chunk_rows
            )
            yield from chunk.rows()
            after = chunk.last_key
            if after is None:
                return

    def is_covered(self, progress: dict[str, Any]) -> bool:
        return BinlogPosition.of(progress["file"], progress["position"]) >= self._place

    def is_after(self, transaction: SourceTransaction) -> bool:
        """Say so of a transaction by its GTID, of a chunk by its place: one at the same place has the same rows."""
        kind, _, position = transaction.id.partition(":")
        if kind == "transaction":
            domain, _, sequence = map(int, position.split("-"))
            return sequence > self._last.get(domain, -1)
        file, _, place = position.partition("/")[0].rpartition(":")
        return BinlogPosition.of(file, int(place)) > self._place

    def is_at(self, position: str) -> bool:  # noqa: ARG002 - the call of all sources
        return True  # each transaction is one in the log


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
