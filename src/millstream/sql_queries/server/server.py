"""The server: a listener, a thread for each connection, and the sessions that can be cancelled.

A connection has a session of its own, with its own engine in memory; the rows of views are read once for all. A client that
does not read, or says nothing while it logs in, is cut off, and delays nobody else.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from millstream.access.tls import Certificate
from millstream.access.tokens import Tokens
from millstream.errors import ConfigError, SqlError
from millstream.listen_address import bind, is_loopback, parse_listen_address
from millstream.sql_queries.app_tables import AppTables, SqlScope
from millstream.sql_queries.server.catalog import fill_catalog, preparation
from millstream.sql_queries.server.connection import StatementLoop
from millstream.sql_queries.server.login import LoginRules, check_scram_keys, log_in
from millstream.sql_queries.server.messages import (
    ConnectionEndedError,
    Wire,
    error_fields,
    parameter_status,
)
from millstream.sql_queries.server.scram import ScramVerifier
from millstream.sql_queries.server.session_commands import REPORTED, SessionSettings
from millstream.sql_queries.session import SqlLimits, SqlSession, load_engine

LISTEN_DEFAULT = "127.0.0.1:5433"
CONNECTIONS_MAX = 64
PASSWORD_VARIABLE = "MILLSTREAM_SQL_PASSWORD"  # noqa: S105 - the name of a variable
_PASSWORD_LENGTH_MIN = 8
_LOGIN_S = 30.0
_LOGINS_FACTOR = 4  # so many connections there may be, with those that have not logged in
_SEND_S = 60
_NO_APP = "millstream"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SqlServerAddress:
    """Where a server listens. ``url`` is what clients connect to."""

    host: str
    port: int
    database: str

    @property
    def url(self) -> str:
        """The address without user and password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"postgresql://{host}:{self.port}/{self.database}"


@contextmanager
def serve_sql(
    scope: SqlScope,
    listen: str = LISTEN_DEFAULT,
    *,
    limits: SqlLimits = SqlLimits(),  # noqa: B008 - it cannot be changed
    password: str | None = None,
    tokens: Tokens | None = None,
    certificate: Certificate | None = None,
    connections_max: int = CONNECTIONS_MAX,
) -> Iterator[SqlServerAddress]:
    """Speak PostgreSQL's protocol until the block ends.

    With ``tokens`` a client's user is the name of one, and its password the token; either role allows to read, and nothing else can
    be done. With ``password`` any user has that.

    Raises:
        ConfigError: the address cannot be listened on, or other machines reach it and there is no password.
        EnvironmentProblem: the extra ``sql`` is not installed.
    """
    load_engine()
    host, port = parse_listen_address(listen, LISTEN_DEFAULT)
    if tokens is not None:
        check_scram_keys(tokens)
    if password is None and tokens is None and not is_loopback(host):
        raise ConfigError(
            f"{listen} can be reached from other machines, and no password is set. Give one (--password-file, or the variable "
            f"{PASSWORD_VARIABLE}) or tokens (--token-file), or listen on {LISTEN_DEFAULT}."
        )
    listener = bind(host, port, "SQL server")
    database = scope.app or _NO_APP
    verifier = None if password is None else ScramVerifier.of(password)
    with closing(AppTables(scope)) as tables:
        server = _SqlServer(
            listener,
            tables,
            limits,
            LoginRules(database, verifier, certificate, tokens),
            connections_max,
        )
        server.start()
        try:
            yield SqlServerAddress(host, listener.getsockname()[1], database)
        finally:
            server.stop()


def read_password(file: Path | None) -> str | None:
    """Return the password of a file, or of the environment; None if there is none.

    Raises:
        ConfigError: the file cannot be read, or the password is too short.
    """
    password = os.environ.get(PASSWORD_VARIABLE)
    place = f"the variable {PASSWORD_VARIABLE}"
    if file is not None:
        place = str(file)
        try:
            password = file.read_text().removesuffix("\n")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The password cannot be read from {file} ({error}). Give a file with one line."
            ) from error
    if password is not None and (len(password) < _PASSWORD_LENGTH_MIN or "\n" in password):
        raise ConfigError(
            f"The password in {place} has {len(password)} characters. Give one line of {_PASSWORD_LENGTH_MIN} or more, such as "
            "`openssl rand -hex 16` makes."
        )
    return password


@dataclass
class _SqlServer:
    listener: socket.socket
    tables: AppTables
    limits: SqlLimits
    rules: LoginRules
    connections_max: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sockets: set[socket.socket] = field(default_factory=set)
    _threads: set[threading.Thread] = field(default_factory=set)
    _sessions: dict[int, tuple[int, SqlSession]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    _taken: int = 0  # connections that have logged in
    _stopping: bool = False

    def start(self) -> None:
        self.listener.listen(128)
        self._acceptor = threading.Thread(target=self._accept, name="sql-accept", daemon=True)
        self._acceptor.start()

    def stop(self) -> None:
        """End every connection, and return when their threads have ended."""
        with self._lock:
            self._stopping = True
            sockets, sessions = list(self._sockets), list(self._sessions.values())
            threads = list(self._threads)
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for _, session in sessions:
            session.interrupt()
        for one in sockets:
            _shut_down(one)
        self._acceptor.join()
        for thread in threads:
            thread.join(_LOGIN_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                if self._stopping:
                    return
                continue  # that client is gone
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="sql-connection", daemon=True
            )
            with self._lock:
                if self._stopping:
                    connection.close()
                    return
                full = len(self._threads) >= self.connections_max * _LOGINS_FACTOR
                if not full:
                    self._sockets.add(connection)
                    self._threads.add(thread)
            if full:
                connection.close()
            else:
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            _set_up(connection)
            self._converse(connection)
        except (ConnectionEndedError, OSError, struct.error) as error:
            _log.debug("a connection ended: %s", error)
        except SqlError as error:  # of its first message: nobody reads the answer
            _log.debug("a connection could not be understood: %s", error)
        except Exception:  # noqa: BLE001 - a defect of ours must not end the server
            _log.exception("a connection failed in an unforeseen way")
        finally:
            connection.close()
            with self._lock:
                self._sockets.discard(connection)
                self._threads.discard(threading.current_thread())

    def _converse(self, connection: socket.socket) -> None:
        connection.settimeout(_LOGIN_S)
        logged_in = log_in(connection, self.rules, self._cancel, _LOGIN_S)
        if logged_in is None:
            return
        wire, parameters = logged_in
        with closing(wire.connection), self._stoppable(wire.connection):
            if not self._take_place():
                said = f"All {self.connections_max} connections are taken. Close one, or try again later."
                wire.write(b"E", error_fields(said, "53300", "FATAL"))
                wire.flush()
                return
            try:
                wire.connection.settimeout(None)
                self._answer(wire, parameters)
            finally:
                with self._lock:
                    self._taken -= 1

    def _take_place(self) -> bool:
        with self._lock:
            free = self._taken < self.connections_max
            self._taken += free
        return free

    def _answer(self, wire: Wire, parameters: Mapping[str, str]) -> None:
        session = SqlSession(
            self.tables, self.limits, preparation(self.rules.database), fill_catalog
        )
        with closing(session), self._registered(session) as (number, secret):
            settings = SessionSettings()
            settings.keep("application_name", parameters.get("application_name", ""))
            for name, value in REPORTED.items():
                wire.write(b"S", parameter_status(name, value))
            wire.write(b"K", struct.pack("!iI", number, secret))
            StatementLoop(wire, session, settings).run()

    @contextmanager
    def _stoppable(self, connection: socket.socket) -> Iterator[None]:
        """Have a connection ended with the server: encryption has made another socket of the accepted one."""
        with self._lock:
            self._sockets.add(connection)
            stopping = self._stopping
        if stopping:
            _shut_down(connection)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(connection)

    @contextmanager
    def _registered(self, session: SqlSession) -> Iterator[tuple[int, int]]:
        number, secret = next(self._numbers), secrets.randbits(32)
        with self._lock:
            self._sessions[number] = (secret, session)
        try:
            yield number, secret
        finally:
            with self._lock:
                del self._sessions[number]

    def _cancel(self, number: int, secret: int) -> None:
        with self._lock:
            found = self._sessions.get(number)
            if found is None:
                return
            known, session = found
            given = struct.pack("!i", secret)
            if hmac.compare_digest(given, struct.pack("!I", known)):
                session.interrupt()  # under the lock, so that it is not closed meanwhile


def _shut_down(connection: socket.socket) -> None:
    """End a connection that another thread may be waiting on; without the farewell of encryption, which is that thread's."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _set_up(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # A client that does not read what it asked for; the time to receive stays without end.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
