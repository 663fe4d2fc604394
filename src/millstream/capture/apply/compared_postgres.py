"""A snapshot of PostgreSQL, tied to a place in the WAL, to compare a target with.

It is held while the tables are read, as `pg_dump` holds one. How it is tied: ``capture/postgres/snapshot.py``.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from millstream.capture.apply.applied_table import AppliedTable, Row
from millstream.capture.apply.change_stream import SourceTransaction
from millstream.capture.postgres.catalog import find_tables, read_types
from millstream.capture.postgres.messages import lsn_text, parse_lsn
from millstream.capture.postgres.slot import unlike_server
from millstream.capture.postgres.snapshot import PgSnapshot, ReadTable
from millstream.capture.postgres.stream import open_session, translated
from millstream.capture.postgres.timelines import identify, refuse_other_server
from millstream.capture.table_patterns import TablePatterns
from millstream.capture.units import Progress
from millstream.errors import ConfigError, RetriableError
from millstream.views.address import PostgresAddress


class ComparedPostgres:
    """See :class:`millstream.capture.apply.compared_source.ComparedSource`."""

    wait_s = 30.0  # an idle capture says where it is every 10 s

    def __init__(self, address: PostgresAddress, wanted: TablePatterns) -> None:
        self.shown = address.shown
        self._address = address
        timeline = identify(address).identity.timeline
        with open_session(address) as session, translated(address):
            refuse_other_server(session, address, timeline)
            self._types = read_types(session)
            self._tables = {(one.schema, one.table): one for one in find_tables(session, wanted)}
        slot = f"millstream_reconcile_{secrets.token_hex(4)}"
        self._snapshot = PgSnapshot(address, slot, timeline)
        self._snapshot.__enter__()
        self._read: dict[str, ReadTable] = {}
        self.position = lsn_text(self._snapshot.lsn)

    def close(self) -> None:
        self._snapshot.__exit__()

    def tables(self, progress: Progress) -> dict[tuple[str, str], bool]:
        entries = progress["tables"].values()
        return {(one["schema"], one["table"]): one["state"] == "done" for one in entries}

    def refuse_other(self, progress: Progress) -> None:
        """Return by what a capture that goes on asks: system, timeline, and the end of the WAL."""
        branch = identify(self._address)
        reason = unlike_server(self._address, progress, branch)
        if reason:
            raise ConfigError(
                f"{reason} It cannot be compared. Give the address that the capture has; if it is that one, capture it under a "
                "new name, and apply that to a new target."
            )
        if branch.identity.timeline != progress["timeline"]:
            raise RetriableError(
                f"{self.shown} was promoted, and the capture has not gone on with it yet. Start the capture, and run this again."
            )

    def has(self, position: str) -> bool:
        """Say so by the place: a snapshot has what committed before it; a chunk at the same place has the same."""
        place, of_chunk, _ = position.partition("+")
        lsn = parse_lsn(place)
        return lsn < self._snapshot.lsn or bool(of_chunk and lsn == self._snapshot.lsn)

    def _locked(self, table: AppliedTable) -> ReadTable | None:
        found = self._tables.get((table.database, table.table))
        if found is None:
            return None
        if table.collection not in self._read:
            with translated(self._address):
                read = self._snapshot.lock(found)
            if read is None:
                raise RetriableError(
                    f"{table.collection} was altered while {self.shown} was compared. Run it again."
                )
            self._read[table.collection] = read
        return self._read[table.collection]

    def columns(self, table: AppliedTable) -> tuple[str, ...]:
        read = self._locked(table)
        return () if read is None else tuple(one.name for one in read.columns)

    def rows(self, table: AppliedTable) -> Iterator[Row]:
        read = self._locked(table)
        assert read is not None
        readers = [(one.name, self._types.reader(one.type_oid)) for one in read.columns]
        with translated(self._address):
            for values in self._snapshot.rows(read, None):
                yield {
                    name: None if value is None else convert(value)
                    for (name, convert), value in zip(readers, values, strict=True)
                }

    def is_covered(self, progress: Progress) -> bool:
        return bool(progress["lsn"] >= self._snapshot.lsn)

    def is_after(self, transaction: SourceTransaction) -> bool:
        return not self.has(transaction.position)

    def is_at(self, position: str) -> bool:  # noqa: ARG002 - the call of all sources
        return True  # each transaction is one in the log
