"""Connections to a server of MariaDB or MySQL: sessions that ask, and the stream of its binary log.

PyMySQL carries the bytes. Its errors become ours here: what passes by itself is a RetriableError, what somebody
has to change a ConfigError. The session's settings are those under which values are compared and written.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from millstream.capture.mysql.address import MariaDbAddress
from millstream.errors import (
    ConfigError,
    ConflictError,
    EnvironmentProblem,
    MillstreamError,
    RetriableError,
)

if TYPE_CHECKING:
    import pymysql

CONNECT_TIMEOUT_S = 10
HEARTBEAT_S = 1.0
_SILENCE_S = 30  # many heartbeats: a server that sends none is gone
_QUERY_TIMEOUT_S = 600
WAIT_TIMEOUT_S = 31_536_000  # a session may have nothing to ask for long

_COM_BINLOG_DUMP = 0x12
_ER_MASTER_FATAL = 1236
# A warning: what a function gives is longer than max_allowed_packet, and null in its place.
_ER_CUT = 1301
LOCK_WAIT_TIMEOUT = 1205
NO_SUCH_TABLE = 1146
_DENIED = frozenset((1044, 1045, 1142, 1143, 1227, 1698))
_SETTINGS = (
    "SET SESSION sql_mode = ''",  # CHAR without padding; quoted text and zero dates as they are
    "SET SESSION time_zone = '+00:00'",
    "SET SESSION lock_wait_timeout = 1",
    f"SET SESSION wait_timeout = {WAIT_TIMEOUT_S}",
    # What a server may have otherwise for all sessions: names without quotes, lists cut short, transactions that go on.
    "SET SESSION sql_quote_show_create = ON, sql_select_limit = 18446744073709551615, completion_type = 0",
    "SET SESSION max_error_count = 65535",  # warnings that are kept, of which some are looked for
    "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
)


def _driver() -> Any:
    try:
        import pymysql  # noqa: PLC0415 - an extra
    except ImportError:
        raise EnvironmentProblem(
            "Capture from MariaDB and MySQL needs PyMySQL. Install it: pip install 'millstream[mysql]'."
        ) from None
    return pymysql


class TableAlteredError(RetriableError):
    """A table was altered while a snapshot read it. Read the chunk again.

    ``code`` is the server's number of the error; 0 if it is none of the server's.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class TableInUseError(TableAlteredError):
    """A transaction that has written a table goes on, so that the table cannot be locked. Try again after a while."""


@contextmanager
def mariadb_errors(address: MariaDbAddress) -> Iterator[None]:
    """Turn what the driver raises into errors of ours, which never hold the password."""
    driver = _driver()
    try:
        yield
    except MillstreamError:
        raise
    except driver.err.MySQLError as error:
        code = error.args[0] if error.args else 0
        text = address.redacted(str(error.args[1] if len(error.args) > 1 else error))
        raise _translated(code, text, address) from None
    except RuntimeError as error:
        if "cryptography" not in str(error):
            raise
        raise EnvironmentProblem(
            f"{address.shown} takes passwords by caching_sha2_password, for which PyMySQL needs cryptography. Install it: "
            "pip install 'millstream[mysql]'."
        ) from None
    except (OSError, struct.error) as error:
        raise RetriableError(
            f"the connection to {address.shown} broke: {error}. It is tried again."
        ) from None


def _translated(code: Any, text: str, address: MariaDbAddress) -> MillstreamError:
    if code == _ER_MASTER_FATAL:
        return ConflictError(
            f"{address.shown} does not have the place in its binary log that capture stopped at: {text}. "
            "It was purged, or lost with a crash of the server, or the server is another one. Changes "
            "are missing: capture into a new prefix, from a new snapshot."
        )
    if code in _DENIED:
        return ConfigError(
            f"{address.shown} refuses: {text}. Correct the user, password or privileges."
        )
    # Altered, a column or the table is gone, an ALTER or a transaction goes on.
    if code in (1412, 1054, NO_SUCH_TABLE, LOCK_WAIT_TIMEOUT):
        return TableAlteredError(f"{address.shown}: {text}. The table is read again.", code)
    return RetriableError(f"{address.shown}: {text} (error {code}). It is tried again.")


class MariaDbSession:
    """A session that asks the server; use it in ``with``.

    Raises:
        RetriableError: the server does not respond.
        ConfigError: it refuses the user.
        EnvironmentProblem: PyMySQL, the extra ``mysql``, is not installed.
    """

    def __init__(self, address: MariaDbAddress) -> None:
        self.address = address
        self._second: MariaDbSession | None = None
        driver = _driver()
        with mariadb_errors(address):
            self._connection: pymysql.Connection[Any] = driver.connect(
                host=address.host,
                port=address.port,
                user=address.user,
                password=address.password.encode(),  # which the driver would take for Latin-1
                charset="utf8mb4",
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=_QUERY_TIMEOUT_S,
                write_timeout=_QUERY_TIMEOUT_S,
                conv={},  # text, as the server writes it
            )
        for statement in _SETTINGS:
            self.rows(statement)

    @cached_property
    def version(self) -> str:
        """The server's version as it tells it."""
        return str(self.value("SELECT VERSION()"))

    @cached_property
    def names_are_lower(self) -> bool:
        """Whether the server has names of tables in small letters, however a statement writes them."""
        return bool(self.value("SELECT @@global.lower_case_table_names") == "1")

    @property
    def is_mysql(self) -> bool:
        """Whether the server is Oracle's MySQL, and not MariaDB."""
        return "mariadb" not in self.version.lower()

    @property
    def release(self) -> tuple[int, ...]:
        """The numbers of the version: (8, 0, 15)."""
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:3])

    @property
    def second(self) -> MariaDbSession:
        """A second session at the same server, which is closed with this one."""
        if self._second is None:
            self._second = MariaDbSession(self.address)
        return self._second

    def rows(self, statement: str, values: Sequence[str] = ()) -> list[tuple[Any, ...]]:
        """Run a statement; return its rows, whose values are text, bytes (of binary columns) or None.

        Raises:
            MillstreamError: the server refuses it, or is gone.
        """
        with mariadb_errors(self.address), self._connection.cursor() as cursor:
            escaped = tuple(f"_utf8mb4 X'{value.encode().hex()}'" for value in values)
            cursor.execute(statement % escaped if escaped else statement)
            return list(cursor.fetchall() or ())

    def whole_rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Return a statement's rows.

        Raises:
            ConfigError: the server has null in place of a value that is longer than ``max_allowed_packet``.
            MillstreamError: as :meth:`rows`.
        """
        with mariadb_errors(self.address), self._connection.cursor() as cursor:
            cursor.execute(statement)
            found = list(cursor.fetchall())
            warned = cursor.warning_count
        if warned and any(row[1] == str(_ER_CUT) for row in self.rows("SHOW WARNINGS")):
            size = self.value("SELECT @@max_allowed_packet")
            raise ConfigError(
                f"{self.address.shown} has a value that is longer than its max_allowed_packet, {size} bytes, and gives null in "
                "its place. SET GLOBAL max_allowed_packet = 1073741824; and the same in its configuration, and start the "
                "capture again."
            )
        return found

    def value(self, statement: str, values: Sequence[str] = ()) -> Any:
        """Return the first value of the first row; None if there is no row."""
        rows = self.rows(statement, values)
        return rows[0][0] if rows else None

    def close(self) -> None:
        """Close the session; safe to call twice."""
        if self._second is not None:
            self._second.close()
        with suppress(Exception):
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BinlogStream:
    """The binary log of a server from a place on, as bytes; use it in ``with``.

    Args:
        replica_id: The number that this reader has among the server's replicas. Of two with one number the
            server ends the older.
        heartbeat_s: After how many seconds without an event the server sends a heartbeat.

    Guarantees: for one thread. The server writes nothing for it, and keeps nothing for it.
    """

    def __init__(
        self,
        address: MariaDbAddress,
        file: str,
        position: int,
        *,
        replica_id: int,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._session = MariaDbSession(address)
        self._address = address
        self.checksum = self._session.value("SELECT @@global.binlog_checksum") != "NONE"
        heartbeat_ns = int(heartbeat_s * 1e9)
        self._session.rows(
            "SET @mariadb_slave_capability = 4, @master_binlog_checksum = @@global.binlog_checksum, "
            "@source_binlog_checksum = @@global.binlog_checksum, "  # as newer servers call it
            f"@master_heartbeat_period = {heartbeat_ns}, @source_heartbeat_period = {heartbeat_ns}"
        )
        self._connection: Any = self._session._connection  # noqa: SLF001 - of this module
        payload = struct.pack("<IHI", position, 0, replica_id) + file.encode()
        with mariadb_errors(address):
            self._connection._read_timeout = _SILENCE_S  # noqa: SLF001 - PyMySQL has no call for the log
            self._connection._execute_command(_COM_BINLOG_DUMP, payload)  # noqa: SLF001 - as above

    def event(self) -> bytes:
        """Return the next event; waits for it, and gets heartbeats meanwhile.

        Raises:
            ConflictError: the place is not in the server's log.
            RetriableError: the server is gone, or sends nothing any more.
        """
        with mariadb_errors(self._address):
            packet = self._connection._read_packet()  # noqa: SLF001 - as above
            data: bytes = packet.get_all_data()
        if data[0] == 0xFE:
            raise RetriableError(
                f"{self._address.shown} ended the stream of its binary log. It is tried again."
            )
        return data[1:]

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
