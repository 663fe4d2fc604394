"""DuckDbSink: rows of a table in a file of DuckDB. A batch, and the note of it, are one transaction.

One process alone can have the file open. So it is open while a batch is written, and closed between batches: then others read it, and a
sink that finds it open in another process waits. The note is a row of the table ``_millstream_sinks``, as with MariaDB.

====================================  ==================================================================
what is found in the note             what follows
====================================  ==================================================================
another token                         a later run was opened: FencedError
this batch                            it was written: its refused records are returned again
====================================  ==================================================================

A row that is against the rules of the table ends the whole transaction. What was accepted of the batch is then written again, and the rest of
it in parts.

Source: DuckDB, "Concurrency", "Transaction Management", "INSERT: ON CONFLICT".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from millstream.connectors.sinks.connector import (
    RecordsToWrite,
    RefusedRecord,
    SinkGuarantee,
    SinkOpening,
    WrittenBatch,
)
from millstream.connectors.sinks.duckdb_table import quoted, read_table
from millstream.connectors.sinks.sink_note import BatchNote
from millstream.connectors.sinks.table_changes import (
    DEFAULT,
    RowsRefusedError,
    SinkChange,
    SinkColumn,
    SinkTable,
    last_changes,
    refuse_other_table,
    table_changes,
    write_divided,
)
from millstream.connectors.sinks.table_choice import TableChoice
from millstream.errors import ConfigError, FencedError, RetriableError

NOTE_TABLE = "_millstream_sinks"
_NO_DATABASE = "not a valid DuckDB database file"
_OF_ROWS = (duckdb.ConstraintException, duckdb.DataError)


@dataclass(frozen=True)
class DuckDbSink:
    """A sink connector, made by :func:`millstream.connectors.sinks.to_duckdb.to_duckdb`."""

    path: Path
    choice: TableChoice
    records_max: int = 20_000
    bytes_max: int = 16 << 20
    kind: str = "duckdb"
    guarantee: SinkGuarantee = "transaction"

    @property
    def origin(self) -> str:
        """The file and the table."""
        return f"{self.path}, table {self.choice.table!r}"

    def open(self, opening: SinkOpening) -> DuckDbWriter:
        """Return what writes; see :class:`~millstream.connectors.sinks.connector.SinkConnector`."""
        return DuckDbWriter(self, opening)


class DuckDbWriter:
    """Writes batches; see :class:`~millstream.connectors.sinks.connector.SinkWriter`."""

    def __init__(self, sink: DuckDbSink, opening: SinkOpening) -> None:
        self._sink = sink
        self._opening = opening
        self._who = [opening.name, opening.life]
        with self._session() as session:
            self._table = self._read_table(session)
            session.execute(
                f"CREATE TABLE IF NOT EXISTS {NOTE_TABLE} (name VARCHAR, life VARCHAR, token VARCHAR NOT NULL, note VARCHAR, "
                "PRIMARY KEY (name, life))"
            )
            # From here on, a run that was opened before finds another token.
            session.execute(
                f"INSERT INTO {NOTE_TABLE} (name, life, token) VALUES ($1, $2, $3) "  # noqa: S608 - our name
                "ON CONFLICT DO UPDATE SET token = EXCLUDED.token",
                [*self._who, opening.token],
            )
            self._note = self._read_note(session)

    @property
    def last(self) -> WrittenBatch | None:
        """The last batch that the file has noted."""
        return None if self._note is None else self._note.batch

    def write(self, batch: RecordsToWrite) -> Sequence[RefusedRecord]:
        """Write a batch in one transaction; see the protocol."""
        with self._session() as session:
            note = self._read_note(session)
            if note is not None and note.batch.number == batch.number:
                return note.refused
            self._table = self._read_table(session)  # it may be another one, as the file was closed
            found = table_changes(self._table, batch.records)
            if note is None:
                refuse_other_table(self._table, found)
            writer = _TableWriter(session, self._table, quoted(self._sink.choice.table))
            writer.begin()
            refused = [*found.refused, *write_divided(found.changes, writer.write)]
            session.execute(
                f"UPDATE {NOTE_TABLE} SET note = $3 WHERE name = $1 AND life = $2",  # noqa: S608 - our name
                [*self._who, BatchNote.of(batch, refused).to_json()],
            )
            session.execute("COMMIT")
            return refused

    def close(self) -> None:
        """Do nothing: the file is closed after each batch."""

    def _read_table(self, session: duckdb.DuckDBPyConnection) -> SinkTable:
        return read_table(session, self._sink.origin, self._sink.choice)

    def _read_note(self, session: duckdb.DuckDBPyConnection) -> BatchNote | None:
        """Return the note of the last batch.

        Raises:
            FencedError: a later run was opened.
        """
        found = session.execute(
            f"SELECT token, note FROM {NOTE_TABLE} WHERE name = $1 AND life = $2",  # noqa: S608 - our name
            self._who,
        ).fetchone()
        if found is None or found[0] != self._opening.token:
            raise FencedError(
                f"another sink {self._opening.name!r} has begun. This one ends; run one of a name at a time."
            )
        return BatchNote.from_json(found[1])

    @contextmanager
    def _session(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Have the file open; what is not committed at the end is taken back."""
        path = self._sink.path
        if not path.is_file():
            raise ConfigError(
                f"there is no file {path}. Correct the path, or make the file and the table {self._sink.choice.table!r} with DuckDB first."
            )
        try:
            with closing(duckdb.connect(str(path))) as session:
                session.execute("SET TimeZone = 'UTC'")
                yield session
        except (
            duckdb.IOException,
            duckdb.TransactionException,
            duckdb.OutOfMemoryException,
        ) as error:
            if _NO_DATABASE in str(
                error
            ):  # of the same class as a file that another process has open
                raise ConfigError(
                    f"{path} is no file of DuckDB, or one of a later version. Correct the path."
                ) from None
            raise RetriableError(f"{path}: {_said(error)}. It is tried again.") from None
        except duckdb.Error as error:
            raise ConfigError(
                f"{self._sink.origin} cannot be written to: {_said(error)}. Correct that, and start the sink again."
            ) from None


class _TableWriter:
    """Writes changes to the table of a sink, in a transaction that it begins anew where a row has ended it."""

    def __init__(self, session: duckdb.DuckDBPyConnection, table: SinkTable, name: str) -> None:
        self._session = session
        self._table = table
        self._name = name
        self._accepted: list[SinkChange] = []

    def begin(self) -> None:
        self._session.execute("BEGIN")

    def write(self, changes: Sequence[SinkChange]) -> None:
        """Write all of some changes; or, with what was accepted before, begin anew without them.

        Raises:
            RowsRefusedError: one of them is against the rules of the table.
        """
        try:
            self._write(last_changes([*changes]))
        except _OF_ROWS as error:
            reason = _said(error)
            with suppress(duckdb.Error):  # it is over already
                self._session.execute("ROLLBACK")
            self.begin()
            self._write(last_changes(self._accepted))
            raise RowsRefusedError(reason) from None
        self._accepted += changes

    def _write(self, changes: Sequence[SinkChange]) -> None:
        gone = [change.key for change in changes if change.values is None]
        written = [change.values for change in changes if change.values is not None]
        if gone:
            self._delete(gone)
        if written:
            self._upsert(written)

    def _delete(self, keys: Sequence[Any]) -> None:
        table = self._table
        self._register(table.key, [list(values) for values in zip(*keys, strict=True)])
        same = " AND ".join(
            f"t.{quoted(name)} = {_cast(table.columns[name], f'r.c{number}')}"
            for number, name in enumerate(table.key)
        )
        self._session.execute(f"DELETE FROM {self._name} t USING _millstream_rows r WHERE {same}")  # noqa: S608 - quoted

    def _upsert(self, rows: Sequence[Sequence[Any]]) -> None:
        table = self._table
        columns = [list(values) for values in zip(*rows, strict=True)]
        lacking = self._register(table.names, columns)
        values = [
            _cast(column, f"r.c{number}", f"r.d{number}" if number in lacking else None)
            for number, column in enumerate(table.columns.values())
        ]
        listed = ", ".join(map(quoted, table.names))
        self._session.execute(
            f"INSERT INTO {self._name} ({listed}) SELECT {', '.join(values)} FROM _millstream_rows r {self._on_conflict()}"  # noqa: S608
        )

    def _on_conflict(self) -> str:
        table = self._table
        if not table.key:
            return ""
        key = ", ".join(map(quoted, table.key))
        updates = ", ".join(
            f"{quoted(name)} = EXCLUDED.{quoted(name)}"
            for name in table.names
            if name not in table.key
        )
        return f"ON CONFLICT ({key}) DO {f'UPDATE SET {updates}' if updates else 'NOTHING'}"

    def _register(self, names: Sequence[str], columns: Sequence[list[Any]]) -> set[int]:
        """Give values to the session, as text and bytes; return the numbers of columns that rows lack and that have a default."""
        arrays: dict[str, pa.Array] = {}
        lacking: set[int] = set()
        for number, (name, values) in enumerate(zip(names, columns, strict=True)):
            column = self._table.columns[name]
            if column.default is not None and DEFAULT in values:
                lacking.add(number)
                arrays[f"d{number}"] = pa.array([value is DEFAULT for value in values])
            given = [None if value is DEFAULT else value for value in values]
            arrays[f"c{number}"] = _array(column, given)
        self._session.register("_millstream_rows", pa.table(arrays))
        return lacking


def _array(column: SinkColumn, values: Sequence[Any]) -> pa.Array:
    if column.type == "BLOB":
        return pa.array(values, pa.binary())
    if column.type == "BOOLEAN":
        return pa.array(values, pa.bool_())
    if column.type in ("TINYINT", "SMALLINT", "INTEGER", "BIGINT"):
        return pa.array(values, pa.int64())
    texts = [None if value is None else str(value) for value in values]
    return pa.array(texts, pa.string())


def _cast(column: SinkColumn, value: str, lacks: str | None = None) -> str:
    made = f"CAST({value} AS {column.type})"
    return made if lacks is None else f"CASE WHEN {lacks} THEN {column.default} ELSE {made} END"


def _said(error: duckdb.Error) -> str:
    """Return the first line of a message of DuckDB."""
    return str(error).strip().split("\n", 1)[0].rstrip(".")[:500]
