"""Comparing a target with its source, at one known position, and repairing it.

A snapshot of the source is taken, at a position P. Transactions are applied up to P, and none behind it. Then the
target must be what the snapshot is. Before that it is asked whether the source is the one that was captured, and has all
that the target has; and of each table:

=============================================  =============================================================
the capture, before the snapshot and after P   the table
=============================================  =============================================================
does not have it any more                      is left as it is: it was left out, or dropped
reads it still, or reads it again              ends the comparison: what the log lacks of it is not known
has read it, and the snapshot shows it         is compared
has read it, and the snapshot does not         ends the comparison: it is not known to be empty
=============================================  =============================================================

1. Both are read once. Rows are divided into chunks by a hash of their key, and each chunk has a number and a
   checksum: the sum of the hashes of its rows, which does not depend on their order.
2. Rows of chunks that differ are read again, and compared.
3. If asked to, the target is given the source's rows, in batches of its own, with the state that it has: it is at P.

While it runs it is the one that applies: `millstream apply` of the same target ends with FencedError, and goes on from
P when it is started again. It is the only way to see what no log has: changes that a database does not log, and what
others wrote to the target.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from millstream.capture.apply.applied_table import AppliedTable, Row, RowBatch
from millstream.capture.apply.batch_writer import comparable_key, key_hash
from millstream.capture.apply.captured_types import comparable
from millstream.capture.apply.change_stream import SourceTransaction
from millstream.capture.apply.compared_source import ComparedSource, TakeSnapshot
from millstream.capture.apply.run import Apply, ApplySession
from millstream.capture.apply.run import apply as apply_of
from millstream.capture.envelope import CaptureTopics, to_json
from millstream.capture.units import Progress
from millstream.client.open import open_reader
from millstream.errors import ConfigError, CorruptionError, RetriableError

CHUNKS = 4096
ROWS_IN_MEMORY = 100_000
_PAUSE_S = 0.05
_REPAIR_ROWS = 10_000
_ATTEMPTS, _LOOK_AGAIN_S = 3, 1.0


@dataclass(frozen=True)
class TableComparison:
    """How a table of the target differs from the source.

    Attributes:
        rows: Rows in the source.
        missing: Keys that only the source has.
        differing: Keys whose rows are not the same.
        surplus: Keys that only the target has.
        not_compared: Columns of the source that were not applied yet: no row has changed since they were made.
        left_out: Whether the capture does not read the table any more, so that nothing of it was compared.
    """

    table: str
    rows: int
    missing: tuple[Row, ...] = ()
    differing: tuple[Row, ...] = ()
    surplus: tuple[Row, ...] = ()
    not_compared: tuple[str, ...] = ()
    left_out: bool = False

    @property
    def faults(self) -> int:
        """The number of keys that are wrong."""
        return len(self.missing) + len(self.differing) + len(self.surplus)


@dataclass(frozen=True)
class Reconciliation:
    """What was compared, at which position of the source, and whether it was repaired."""

    position: str
    tables: tuple[TableComparison, ...]
    is_repaired: bool

    @property
    def faults(self) -> int:
        """The number of keys that were wrong, in all tables."""
        return sum(one.faults for one in self.tables)


@dataclass
class Reconciler:
    """Compares a target with its source: made by :func:`reconcile`."""

    applying: Apply
    source: TakeSnapshot
    monotonic_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    rows_in_memory: int = ROWS_IN_MEMORY
    path: Path | None = None
    """Where the target is, if it is a file or a folder."""
    _source: ComparedSource = field(init=False, repr=False)
    _before: Progress = field(init=False, repr=False)
    """How far the capture was before the snapshot was taken."""
    _attempts: int = field(default=0, init=False, repr=False)

    def run(
        self,
        *,
        repair: bool = False,
        on_table: Callable[[TableComparison], None] = lambda _: None,
    ) -> Reconciliation:
        """Compare all tables that are applied, and with ``repair`` correct the target.

        Raises:
            RetriableError: the capture does not run, still reads a table, or source or target do not respond.
            FencedError: `millstream apply` was started meanwhile.
            ConfigError: the target is no copy of this capture, or a row of the source does not fit it. The source is not the
                one that was captured, lacks what the target has, or does not show a table.
        """
        self._refuse_new_target()
        self.applying.run(until="caught-up")  # before the source is asked to hold anything
        with ApplySession(self.applying, self._is_in_snapshot) as session:
            self._take_snapshot(session)
            try:
                captured = self._captured(session)
                found = []
                for table in self._tables(session):
                    if _name_of(table) in captured:
                        there = session.there(table)
                        comparer = _TableComparer(self, session, self._source, there)
                        found.append(comparer.compare(repair=repair))
                    else:
                        found.append(TableComparison(table.collection, 0, left_out=True))
                    on_table(found[-1])
                return Reconciliation(self._source.position, tuple(found), repair)
            finally:
                self._source.close()

    def _refuse_new_target(self) -> None:
        """Return if something was applied to the target before: a copy that is made now differs from nothing.

        Raises:
            ConfigError: nothing was.
        """
        if self.path is None or self.path.exists():
            with ApplySession(self.applying) as session:
                if session.state.end_offset >= 0:
                    return
                shown = session.target.shown
        else:
            shown = str(self.path)
        raise ConfigError(
            f"{shown} is no copy of the capture {self.applying.name!r}: nothing of it was ever applied to it. Give the target "
            f"as it was given to `millstream apply`; or make a copy there first: millstream apply {self.applying.name} …"
        )

    def _tables(self, session: ApplySession) -> list[AppliedTable]:
        """Return the tables that are compared, as they are where the target is."""
        known = session.stream.versions.current()
        return [one for one in known if self.applying.wanted(one.database, one.table)]

    def _names(self, session: ApplySession) -> list[tuple[str, str]]:
        return [_name_of(one) for one in self._tables(session)]

    def _is_in_snapshot(self, transaction: SourceTransaction) -> bool:
        return not self._source.is_after(transaction)

    def _take_snapshot(self, session: ApplySession) -> None:
        """Take a snapshot, and apply all that is in it, and nothing else."""
        given_up_s: float | None = None
        while True:
            names = self._names(session)
            self._before = self._progress()
            self._source = self.source(names)
            try:
                given_up_s = given_up_s or self.monotonic_s() + self._source.wait_s
                self._source.refuse_other(self._before)  # later changes may not be in the snapshot
                if self._has_target(session):
                    last = self._apply_up_to(session, given_up_s)
                    # A table that was made meanwhile may not be at the snapshot's position.
                    if self._source.is_at(last) and self._names(session) == names:
                        return
            except BaseException:
                self._source.close()
                raise
            self._source.close()

    def _progress(self) -> Progress:
        return captured_progress(self.applying.log, self.applying.name)

    def _has_target(self, session: ApplySession) -> bool:
        """Say whether the snapshot has all that the target has; a server may log a transaction a moment before it shows it.

        Raises:
            ConfigError: it did not have it several times.
        """
        position = session.state.position
        if self._source.has(position):
            return True
        self._attempts += 1
        if self._attempts > _ATTEMPTS:
            raise ConfigError(
                f"{self._source.shown} lacks changes that {session.target.shown} has: it is at {self._source.position}, and the "
                f"copy has {position}. Another server answers, or a backup was restored. Give the address that the capture "
                "has; if it is that one, capture it under a new name, and apply that to a new target."
            )
        self.sleep(_LOOK_AGAIN_S)
        return False

    def _captured(self, session: ApplySession) -> set[tuple[str, str]]:
        """Return the tables that the capture has read, and reads on; each is in the snapshot.

        Raises:
            RetriableError: it has not read one to its end.
            ConfigError: the snapshot does not show one.
        """
        before, after = self._source.tables(self._before), self._source.tables(self._progress())
        unread = [
            name
            for name, is_read in after.items()
            if self.applying.wanted(*name) and not (is_read and before.get(name))
        ]
        if unread:
            raise RetriableError(
                f"the capture {self.applying.name!r} has not read {_listed(unread)} to the end, or reads it again. Run this "
                "again when it has."
            )
        known = [one for one in self._tables(session) if _name_of(one) in after]
        unseen = [_name_of(one) for one in known if not self._source.columns(one)]
        if unseen:
            raise ConfigError(
                f"{self._source.shown} does not show {_listed(unseen)}: the user may not read it, or it was dropped, and the "
                "capture has not seen that. Nothing was compared. GRANT SELECT on it; if it was dropped, run this again when the "
                "capture has come to that; if the log does not have that, leave the table out of --tables of the capture."
            )
        return set(after)

    def _apply_up_to(self, session: ApplySession, given_up_s: float) -> str:
        """Apply what is in the snapshot; return the position of its last transaction."""
        while True:
            source = self._source
            covered = source.is_covered(self._progress())
            while session.step().state != "idle":
                pass
            if session.ended or covered:
                return session.passed
            if self.monotonic_s() > given_up_s:
                raise RetriableError(
                    f"the capture {self.applying.name!r} has not come to {source.position}, where {source.shown} was "
                    f"read, in {source.wait_s:.0f} s. Start it (millstream capture …), and run this again."
                )
            self.sleep(_PAUSE_S)


def captured_progress(log: Path | str, name: str) -> Progress:
    """Return how far a capture has read its source, by its topic of progress.

    Raises:
        CorruptionError: there is no progress.
    """
    topic = CaptureTopics(name).progress
    reader = open_reader(log)
    try:
        start, end = reader.offsets(topic)[0]
        size = 256
        while True:
            first = max(start, end - size)
            batches = reader.read(topic, 0, first, end, columns=("value",))
            values = [value for batch in batches for value in batch.column("value").to_pylist()]
            if values:
                found: Progress = json.loads(values[-1])["source"]
                return found
            if first == start:
                raise CorruptionError(
                    f"{topic!r} has no progress. Give the name of a capture that has run."
                )
            size *= 8
    finally:
        reader.close()


def _name_of(table: AppliedTable) -> tuple[str, str]:
    return table.database, table.table


def _listed(names: list[tuple[str, str]]) -> str:
    return ", ".join(".".join(name) for name in sorted(names))


# ── one table ─────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Checksums:
    """By chunk, the number of rows and the sum of their hashes."""

    counts: list[int] = field(default_factory=lambda: [0] * CHUNKS)
    sums: list[int] = field(default_factory=lambda: [0] * CHUNKS)

    def add(self, chunk: int, row: bytes) -> None:
        self.counts[chunk] += 1
        digest = int.from_bytes(blake2b(row, digest_size=16).digest(), "big")
        self.sums[chunk] = (self.sums[chunk] + digest) % (1 << 128)


def chunk_of(key: bytes) -> int:
    """Return the chunk of a key."""
    return key_hash(key) % CHUNKS


@dataclass
class _TableComparer:
    """The comparison of one table that the source shows, by the columns that both sides have."""

    reconciler: Reconciler
    session: ApplySession
    source: ComparedSource
    table: AppliedTable

    def compare(self, *, repair: bool) -> TableComparison:
        there = self.source.columns(self.table)
        self._names = [name for name in self.table.types if name in there]
        ours = self._checksums(self._target_rows())
        theirs = self._checksums(self.source.rows(self.table))
        wrong = [
            chunk
            for chunk in range(CHUNKS)
            if (ours.counts[chunk], ours.sums[chunk]) != (theirs.counts[chunk], theirs.sums[chunk])
        ]
        faults: tuple[list[Row], list[Row], list[Row]] = ([], [], [])
        for chunks in self._groups(wrong, ours, theirs):
            self._compare_chunks(chunks, faults, repair=repair)
        unknown = tuple(name for name in there if name not in self.table.types)
        missing, differing, surplus = map(tuple, faults)
        return TableComparison(
            self.table.collection, sum(theirs.counts), missing, differing, surplus, unknown
        )

    def _target_rows(self) -> Iterator[Row]:
        return self.session.target.scan(self.table)

    def _key(self, row: Row) -> bytes:
        return comparable_key(self.table, row)

    def _compared(self, row: Row) -> bytes:
        return to_json([comparable(self.table.types[name], row[name]) for name in self._names])

    def _checksums(self, rows: Iterable[Row]) -> _Checksums:
        found = _Checksums()
        for row in rows:
            found.add(chunk_of(self._key(row)), self._compared(row))
        return found

    def _groups(
        self, chunks: Sequence[int], ours: _Checksums, theirs: _Checksums
    ) -> Iterator[frozenset[int]]:
        """Yield the chunks in groups whose rows fit into memory."""
        group: set[int] = set()
        size = 0
        for chunk in chunks:
            group.add(chunk)
            size += ours.counts[chunk] + theirs.counts[chunk]
            if size >= self.reconciler.rows_in_memory:
                yield frozenset(group)
                group, size = set(), 0
        if group:
            yield frozenset(group)

    def _compare_chunks(
        self,
        chunks: frozenset[int],
        faults: tuple[list[Row], list[Row], list[Row]],
        *,
        repair: bool,
    ) -> None:
        missing, differing, surplus = faults
        theirs = self._rows_in(self.source.rows(self.table), chunks)
        upserts: list[Row] = []
        deletes: list[Row] = []
        for key, row in self._rows_in(self._target_rows(), chunks).items():
            other = theirs.pop(key, None)
            if other is None:
                deletes.append(row)
                surplus.append(self._key_row(row))
            elif self._compared(row) != self._compared(other):
                upserts.append({**row, **self._applied(other)})
                differing.append(self._key_row(row))
        missing += [self._key_row(row) for row in theirs.values()]
        nulls = dict.fromkeys(self.table.types)
        upserts += [{**nulls, **self._applied(row)} for row in theirs.values()]
        if repair:
            self._repair(upserts, [self._key_row(row) for row in deletes])

    def _rows_in(self, rows: Iterable[Row], chunks: frozenset[int]) -> dict[bytes, Row]:
        found = {}
        for row in rows:
            key = self._key(row)
            if chunk_of(key) in chunks:
                found[key] = row
        return found

    def _applied(self, row: Row) -> Row:
        """Return the columns of a row of the source that are applied."""
        return {name: row[name] for name in self._names}

    def _key_row(self, row: Row) -> Row:
        return {name: row[name] for name in self.table.key}

    def _repair(self, upserts: list[Row], deletes: list[Row]) -> None:
        """Write rows as the source has them, with the state that the target has.

        A crash leaves what was committed before it; what is left is found by the next comparison.
        """
        for first in range(0, max(len(upserts), len(deletes)), _REPAIR_ROWS):
            part = slice(first, first + _REPAIR_ROWS)
            self.session.correct(RowBatch(self.table, upserts[part], deletes[part]))


def reconcile(
    name: str,
    source: str,
    to: Path | str,
    *,
    tables: str | Sequence[str] = "*",
    log: Path | str = "./data",
) -> Reconciler:
    """Compare a target with the database that it is a copy of. Call :meth:`Reconciler.run` on the result.

    ::

        found = ms.reconcile("shop", "sqlite:///shop.db", "sqlite:///copy.db").run(repair=True)

    The capture must run, or have run since the last change; `millstream apply` of the target ends, and is to be started
    again afterwards.

    Args:
        name: The name of the capture.
        source: The database, as it was given to `millstream capture`; its password may be in
            MILLSTREAM_CAPTURE_PASSWORD.
        to: The target, as it was given to `millstream apply`.
        tables: As they were given to `millstream apply`.
        log: The log that the capture writes to.

    Raises:
        ConfigError: one of them cannot be used.
    """
    from millstream.capture.apply.compared_sources import compared_source_of  # noqa: PLC0415 - drivers are extras
    from millstream.capture.apply.targets import target_path  # noqa: PLC0415 - the same

    applying = apply_of(name, to, tables=tables, log=log)
    return Reconciler(
        applying, compared_source_of(source, applying.wanted), path=target_path(str(to))
    )
