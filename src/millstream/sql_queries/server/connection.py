"""One connection: who it is, what it asks, and the answers, message by message.

A client that breaks off, or sends what is no message of the protocol, ends its own connection and nothing else. An error in
a statement is told to the client, which goes on.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from millstream.errors import DeadlineError, MillstreamError, RetriableError, SqlError
from millstream.sql_queries.server.catalog_rewrite import names_catalog, rewrite
from millstream.sql_queries.server.messages import (
    MessageBody,
    Wire,
    data_row,
    error_fields,
    parameter_status,
    zero_ended,
)
from millstream.sql_queries.server.parameters import (
    literal,
    null_literal,
    parameter_count,
    with_literals,
)
from millstream.sql_queries.server.pg_types import PgType, encode, pg_type
from millstream.sql_queries.server.session_commands import (
    POSITION,
    SessionCommand,
    SessionSettings,
    parse_command,
)
from millstream.sql_queries.session import SqlRows, SqlSession
from millstream.sql_queries.sql_table import Snapshot
from millstream.sql_queries.tokens import (
    NamesInText,
    SqlToken,
    split_statements,
    to_text,
)

_log = logging.getLogger(__name__)
_ROWS_AT_ONCE = 2_000
_NO_ROWS = Snapshot((), {})


@dataclass(frozen=True)
class PreparedStatement:
    """A statement of a client, and the types of its parameters as far as the client gave them; no tokens: it is empty."""

    tokens: Sequence[SqlToken]
    command: SessionCommand | None = None
    oids: tuple[int, ...] = ()


@dataclass
class Portal:
    """A statement with its values, and its rows as far as they were sent. It runs when rows or their types are asked for."""

    statement: PreparedStatement
    literals: Sequence[str] = ()
    formats: Sequence[int] = ()
    tag: str = ""
    rows: SqlRows | None = None
    types: Sequence[PgType] = ()
    ran: bool = False
    sent: int = 0
    holds: bool = False  # beyond its transaction

    def binary(self, column: int) -> bool:
        """Say whether the client wants a column in binary form."""
        if len(self.formats) == 1:
            return self.formats[0] == 1
        return column < len(self.formats) and self.formats[column] == 1


@dataclass
class StatementLoop:
    """Answers the messages of a client that has logged in, until it leaves."""

    wire: Wire
    session: SqlSession
    settings: SessionSettings
    _statements: dict[str, PreparedStatement] = field(default_factory=dict)
    _portals: dict[str, Portal] = field(default_factory=dict)
    _status: bytes = b"I"  # none, within, or failed: a transaction
    _skips: bool = False  # after an error, until the client says Sync
    _notes: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Answer until the client says that it leaves."""
        self._ready()
        handlers: dict[str, Callable[[MessageBody], None]] = {
            "Q": self._simple,
            "P": self._parse,
            "B": self._bind,
            "D": self._describe,
            "E": self._execute,
            "C": self._close,
            "H": lambda _: self.wire.flush(),
        }
        while True:
            kind, body = self.wire.read()
            if kind == "X":
                return
            if kind == "S":
                self._skips = False
                self._drop_portals_outside()
                self._ready()
            elif kind in "dcf" or (self._skips and kind != "Q"):
                continue  # data of a copy that was refused; what follows an error
            elif kind not in handlers:
                self._fail(
                    SqlError(f"A message of the kind {kind!r} is not known.", sqlstate="08P01")
                )
            else:
                self._attempt(handlers[kind], body, simple=kind == "Q")

    def _attempt(
        self, handle: Callable[[MessageBody], None], body: MessageBody, *, simple: bool
    ) -> None:
        try:
            handle(body)
        except MillstreamError as error:
            self._fail(error)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - a defect of ours must not end what others do
            _log.exception("a statement failed in an unforeseen way")
            said = f"The server failed on this statement ({type(error).__name__}: {error})."
            self._fail(SqlError(said, sqlstate="XX000"))
        if simple:
            self._skips = False
            self._drop_portals_outside()
            self._ready()

    def _ready(self) -> None:
        self.wire.write(b"Z", self._status)
        self.wire.flush()

    def _fail(self, error: MillstreamError) -> None:
        self.wire.write(b"E", error_fields(str(error), sqlstate_of(error)))
        self.wire.flush()  # a client may wait for it before it says Sync
        self._skips = True
        if self._status == b"T":
            self._status = b"E"

    def _drop_portals_outside(self) -> None:
        """Outside of a transaction, what is not held ends with its statement."""
        if self._status == b"I":
            self._portals = {name: one for name, one in self._portals.items() if one.holds}

    # The two ways to ask.

    def _simple(self, body: MessageBody) -> None:
        self._portals.pop("", None)
        statements = split_statements(body.text())
        if not statements:
            self.wire.write(b"I")
        for tokens in statements:
            portal = Portal(self._prepared(tokens))
            self._open(portal)
            if portal.rows is not None:
                self.wire.write(b"T", _row_description(portal))
            self._send_rows(portal, None)

    def _parse(self, body: MessageBody) -> None:
        name, text = body.text(), body.text()
        oids = [body.oid() for _ in range(body.count(4))]
        statements = split_statements(text)
        if len(statements) > 1:
            raise SqlError(
                f"{len(statements)} statements were given where one is prepared.", sqlstate="42601"
            )
        if name and name in self._statements:
            raise SqlError(f"There is a prepared statement {name!r} already.", sqlstate="42P05")
        prepared = PreparedStatement(())
        if statements:
            prepared = self._prepared(statements[0], oids)
        self._statements[name] = prepared
        self.wire.write(b"1")

    def _prepared(self, tokens: Sequence[SqlToken], oids: Sequence[int] = ()) -> PreparedStatement:
        count = max(parameter_count(tokens), len(oids))
        every = (*oids, *([0] * (count - len(oids))))
        return PreparedStatement(tokens, parse_command(tokens), every)

    def _bind(self, body: MessageBody) -> None:
        name, source = body.text(), body.text()
        statement = self._statement(source)
        formats = [body.int16() for _ in range(body.count(2))]
        sizes = body.count(4)
        if sizes != len(statement.oids):
            raise SqlError(
                f"The statement has {len(statement.oids)} parameters, and {sizes} values were sent.",
                sqlstate="08P01",
            )
        literals = []
        for number, oid in enumerate(statement.oids):
            size = body.int32()
            value = None if size < 0 else body.take(size)
            binary = bool(formats) and formats[number if len(formats) > 1 else 0] == 1
            literals.append(literal(value, oid, binary=binary))
        wanted = [body.int16() for _ in range(body.count(2))]
        if name and name in self._portals:
            raise SqlError(f"There is a portal {name!r} already.", sqlstate="42P03")
        self._portals[name] = Portal(statement, literals, wanted)
        self.wire.write(b"2")

    def _describe(self, body: MessageBody) -> None:
        kind, name = body.take(1), body.text()
        if kind == b"S":
            self._describe_statement(self._statement(name))
            return
        portal = self._portal(name)
        self._open(portal)
        self._write_description(portal)

    def _describe_statement(self, statement: PreparedStatement) -> None:
        shown = [oid or 25 for oid in statement.oids]  # what is open is given as text
        self.wire.write(b"t", struct.pack(f"!H{len(shown)}I", len(shown), *shown))
        portal = Portal(statement)
        command = statement.command
        if command is not None and command.kind == "show":
            portal.rows, portal.types = _text_rows(command.name, ""), [pg_type("VARCHAR")]
        elif command is not None and command.kind == "fetch":
            portal = self._portal(command.name)
        elif command is None and statement.tokens:
            text, _ = self._to_engine(statement, [null_literal(oid) for oid in statement.oids])
            names, kinds = self.session.describe(text)
            portal.rows = SqlRows(names, kinds, pa.table({}), _NO_ROWS)
            portal.types = [pg_type(kind) for kind in kinds]
        self._write_description(portal)

    def _write_description(self, portal: Portal) -> None:
        if portal.rows is None:
            self.wire.write(b"n")
        else:
            self.wire.write(b"T", _row_description(portal))

    def _execute(self, body: MessageBody) -> None:
        portal = self._portal(body.text())
        rows_max = body.int32()
        if not portal.statement.tokens:
            self.wire.write(b"I")
            return
        self._open(portal)
        self._send_rows(portal, rows_max if rows_max > 0 else None)

    def _close(self, body: MessageBody) -> None:
        kind, name = body.take(1), body.text()
        (self._statements if kind == b"S" else self._portals).pop(name, None)
        self.wire.write(b"3")

    def _statement(self, name: str) -> PreparedStatement:
        if name not in self._statements:
            raise SqlError(f"There is no prepared statement {name!r}.", sqlstate="26000")
        return self._statements[name]

    def _portal(self, name: str) -> Portal:
        if name not in self._portals:
            raise SqlError(f"There is no cursor or portal {name!r}.", sqlstate="34000")
        return self._portals[name]

    # Running.

    def _open(self, portal: Portal) -> None:
        """Run the statement of a portal, unless that was done."""
        if portal.ran or not portal.statement.tokens:
            return
        command = portal.statement.command
        ends = command is not None and command.kind in ("commit", "rollback")
        if self._status == b"E" and not ends:
            raise SqlError(
                "The transaction has failed; what follows is not done. Say ROLLBACK.",
                sqlstate="25P02",
            )
        if command is None:
            self._ask(portal)
        else:
            self._obey(portal, command)
        portal.ran = True

    def _ask(self, portal: Portal) -> None:
        text, wanted = self._to_engine(portal.statement, portal.literals)
        portal.rows = self.session.run(
            text, self.settings.at_least or None, wanted, self.settings.timeout_s
        )
        portal.types = [pg_type(kind) for kind in portal.rows.types]
        self._tell(portal.rows.snapshot)

    def _to_engine(
        self, statement: PreparedStatement, literals: Sequence[str]
    ) -> tuple[str, NamesInText]:
        tokens = with_literals(statement.tokens, literals)
        of_catalog = names_catalog(tokens)
        return to_text(rewrite(tokens)), NamesInText(tokens, strings=not of_catalog)

    def _tell(self, snapshot: Snapshot) -> None:
        """Tell the client the position that its rows reflect, and once what they lack."""
        position = json.dumps(snapshot.position, ensure_ascii=False)
        if position != self.settings.get(POSITION):
            self.settings.keep(POSITION, position)
            self.wire.write(b"S", parameter_status(POSITION, position))
        for note in snapshot.notes:
            if note not in self._notes:
                self._notes.add(note)
                self.wire.write(b"N", error_fields(note, "01000", "WARNING"))

    def _obey(self, portal: Portal, command: SessionCommand) -> None:
        portal.tag = command.tag
        handlers: dict[str, Callable[[Portal, SessionCommand], None]] = {
            "begin": self._begin,
            "commit": self._end,
            "rollback": self._end,
            "savepoint": self._savepoint,
            "set": lambda _, said: self.settings.set(said.name, said.value),
            "set local": self._set_local,
            "show": self._show,
            "declare": self._declare,
            "fetch": self._fetch,
            "close": lambda _, said: self._close_cursors(said.name),
            "deallocate": lambda _, said: self._deallocate(said.name),
            "discard": self._discard,
            "nothing": lambda _portal, _said: None,
        }
        handlers[command.kind](portal, command)

    def _begin(self, _portal: Portal, _command: SessionCommand) -> None:
        self._status = b"T"

    def _end(self, portal: Portal, command: SessionCommand) -> None:
        portal.tag = "ROLLBACK" if self._status == b"E" else command.tag
        self._status = b"I"
        self.settings.end_transaction()
        self._portals = {
            name: one for name, one in self._portals.items() if one.holds or one is portal
        }

    def _savepoint(self, _portal: Portal, command: SessionCommand) -> None:
        if self._status == b"I":
            raise SqlError(f"{command.tag} is for transactions. Say BEGIN first.", sqlstate="25P01")

    def _set_local(self, _portal: Portal, command: SessionCommand) -> None:
        if self._status == b"I":
            said = "SET LOCAL is for transactions, and nothing was set. Say BEGIN first, or SET."
            self.wire.write(b"N", error_fields(said, "25P01", "WARNING"))
            return
        self.settings.set_local(command.name, command.value)

    def _show(self, portal: Portal, command: SessionCommand) -> None:
        value = self.settings.get(command.name)
        portal.rows, portal.types = _text_rows(command.name, value), [pg_type("VARCHAR")]

    def _discard(self, _portal: Portal, _command: SessionCommand) -> None:
        self._deallocate("")
        self._close_cursors("")
        self.settings.set("", "")

    def _declare(self, portal: Portal, command: SessionCommand) -> None:
        if command.name in self._portals:
            raise SqlError(f"There is a cursor {command.name!r} already.", sqlstate="42P03")
        if self._status == b"I" and not command.value:
            raise SqlError(
                "A cursor lives in a transaction. Say BEGIN first, or DECLARE … WITH HOLD.",
                sqlstate="25P01",
            )
        if parse_command(command.tokens) is not None:
            raise SqlError("A cursor is over a statement that asks.", sqlstate="42601")
        cursor = Portal(
            PreparedStatement(command.tokens), portal.literals, holds=bool(command.value)
        )
        self._open(cursor)
        self._portals[command.name] = cursor

    def _fetch(self, portal: Portal, command: SessionCommand) -> None:
        cursor = self._portal(command.name)
        if cursor.rows is None:
            raise SqlError(f"The cursor {command.name!r} has no rows.", sqlstate="24000")
        rows = cursor.rows.rows.slice(cursor.sent, command.count)
        cursor.sent += rows.num_rows
        if command.tag == "MOVE":
            portal.tag = f"MOVE {rows.num_rows}"
            return
        portal.rows = SqlRows(cursor.rows.names, cursor.rows.types, rows, cursor.rows.snapshot)
        portal.types = cursor.types

    def _close_cursors(self, name: str) -> None:
        if not name:
            self._portals.clear()
            return
        self._portal(name)
        del self._portals[name]

    def _deallocate(self, name: str) -> None:
        if not name:
            self._statements.clear()
            return
        self._statement(name)
        del self._statements[name]

    # Answers.

    def _send_rows(self, portal: Portal, rows_max: int | None) -> None:
        if portal.rows is None:
            self.wire.write(b"C", zero_ended(portal.tag))
            return
        rows = portal.rows.rows
        stop = rows.num_rows if rows_max is None else min(portal.sent + rows_max, rows.num_rows)
        started = portal.sent
        for start in range(started, stop, _ROWS_AT_ONCE):
            part = rows.slice(start, min(_ROWS_AT_ONCE, stop - start))
            columns = [
                encode(part.column(number), kind, binary=portal.binary(number))
                for number, kind in enumerate(portal.types)
            ]
            for values in zip(*columns, strict=True):
                self.wire.write(b"D", data_row(values))
        portal.sent = stop
        if stop < rows.num_rows:
            self.wire.write(b"s")
            return
        word = portal.tag or "SELECT"
        count = "" if word == "SHOW" else f" {stop - started}"
        self.wire.write(b"C", zero_ended(f"{word}{count}"))


def sqlstate_of(error: MillstreamError) -> str:
    """Return PostgreSQL's code for an error."""
    if isinstance(error, SqlError):
        return error.sqlstate
    if isinstance(error, DeadlineError):
        return "57014"
    return "58000" if isinstance(error, RetriableError) else "55000"


def _row_description(portal: Portal) -> bytes:
    assert portal.rows is not None, "it has rows"
    parts = [struct.pack("!H", len(portal.types))]
    for number, (name, kind) in enumerate(zip(portal.rows.names, portal.types, strict=True)):
        parts.append(zero_ended(name))
        parts.append(
            struct.pack(
                "!IhIhih", 0, 0, kind.oid, kind.size, kind.modifier, int(portal.binary(number))
            )
        )
    return b"".join(parts)


def _text_rows(name: str, value: str) -> SqlRows:
    return SqlRows((name,), ("VARCHAR",), pa.table({name: [value]}), _NO_ROWS)
