"""SinkSession: a session at MariaDB or MySQL that writes. What the driver raises becomes an error of ours.

==============================================  ====================================================================
the server says                                 then
==============================================  ====================================================================
a value or a row is against the table's rules   RowsRefusedError: the statement has changed nothing
who asks may not, or the statement is wrong     ConfigError: the sink ends
a table or a column is not there any more       RetriableError: the table is read again, and found not to fit
anything else, or nothing                       RetriableError: the transaction is rolled back, and made again
==============================================  ====================================================================

Source: MariaDB, "Error Codes", "SQL_MODE"; MySQL 8.4, "Server Error Message Reference", "Server SQL Modes".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pymysql
from pymysql import err

from millstream.capture.mysql.address import MariaDbAddress
from millstream.connectors.sinks.column_values import ColumnValue
from millstream.connectors.sinks.sink_password import SINK_PASSWORD_VARIABLE
from millstream.connectors.sinks.table_changes import RowsRefusedError
from millstream.errors import ConfigError, EnvironmentProblem, MillstreamError, RetriableError

NO_SUCH_TABLE = 1146
_NO_SUCH_COLUMN = 1054
_CONNECT_S = 10
_STATEMENT_S = 600
_DENIED = frozenset((1044, 1045, 1142, 1143, 1227, 1698))
# Of the driver's classes of errors, DataError and IntegrityError are of rows. These are, too: no default, a wrong value, a value that
# is cut, a check of MariaDB, one of MySQL, a trigger's SIGNAL, no JSON, no partition for a row.
_OF_ROWS = frozenset((1364, 1366, 1265, 1292, 1411, 4025, 3819, 1644, 3140, 1526))
# Errors in place of values that were made to fit; 0 is 0 in a column that counts, and a backslash is itself.
_SQL_MODE = (
    "STRICT_ALL_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION,"
    "NO_AUTO_VALUE_ON_ZERO,NO_BACKSLASH_ESCAPES"
)
_SETTINGS = (
    f"SET SESSION sql_mode = '{_SQL_MODE}'",
    "SET SESSION time_zone = '+00:00'",
    "SET SESSION wait_timeout = 600, innodb_lock_wait_timeout = 30, foreign_key_checks = 1, unique_checks = 1",
    "SET SESSION sql_safe_updates = 0, sql_select_limit = 18446744073709551615, completion_type = 0",
)


class SinkSession:
    """A session; for one thread.

    Raises:
        RetriableError: the server does not respond.
        ConfigError: it refuses the user.
    """

    def __init__(self, address: MariaDbAddress) -> None:
        self._address = address
        with self._translated():
            self._connection: Any = pymysql.connect(
                host=address.host,
                port=address.port,
                user=address.user,
                password=address.password.encode(),  # which the driver would take for Latin-1
                database=address.database,
                charset="utf8mb4",
                autocommit=True,
                connect_timeout=_CONNECT_S,
                read_timeout=_STATEMENT_S,
                write_timeout=_STATEMENT_S,
                conv={},  # text, as the server writes it
            )
        for statement in _SETTINGS:
            self.rows(statement)
        if "mariadb" in str(self.rows("SELECT VERSION()")[0][0]).lower():
            # One that hangs in the middle of a batch keeps a later sink waiting for no longer than that.
            self.rows("SET SESSION idle_transaction_timeout = 60")

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement; return its rows, whose values are text, bytes (of binary columns) or None.

        Raises:
            RowsRefusedError: a row is against the rules of the table.
            MillstreamError: see the module.
        """
        with self._translated(), self._connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall() or ())

    def literal(self, value: ColumnValue | None) -> str:
        """Return a value as a statement has it."""
        if isinstance(value, str):
            return "'" + value.replace("'", "''") + "'"
        if value is None:
            return "NULL"
        if isinstance(value, bytes):
            return f"X'{value.hex()}'"
        return str(int(value))

    def close(self) -> None:
        """Close the session; safe to call twice."""
        with suppress(Exception):
            self._connection.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        shown = self._address.shown
        try:
            yield
        except err.MySQLError as error:
            code = error.args[0] if error.args else 0
            said = str(error.args[1] if len(error.args) > 1 else error)
            text = self._address.redacted(said)
            raise _translation(error, code, text, shown) from None
        except RuntimeError as error:
            if "cryptography" not in str(error):
                raise
            raise EnvironmentProblem(
                f"{shown} takes passwords by caching_sha2_password, for which PyMySQL needs cryptography. Install it: "
                "pip install 'millstream[mysql]'."
            ) from None
        except (OSError, struct.error) as error:
            raise RetriableError(
                f"the connection to {shown} broke: {error}. It is tried again."
            ) from None


def _translation(
    error: err.MySQLError, code: Any, text: str, shown: str
) -> MillstreamError | RowsRefusedError:
    if code in _DENIED:
        return ConfigError(
            f"{shown} refuses: {text}. Correct the user, the password (${SINK_PASSWORD_VARIABLE}) or the privileges: the sink "
            "needs SELECT, INSERT, UPDATE and DELETE on the table and on _millstream_sinks."
        )
    if code in (NO_SUCH_TABLE, _NO_SUCH_COLUMN):
        return RetriableError(f"{shown}: {text}. The table is read again.")
    if isinstance(error, (err.DataError, err.IntegrityError)) or code in _OF_ROWS:
        return RowsRefusedError(text)
    if isinstance(error, (err.ProgrammingError, err.NotSupportedError)):
        return ConfigError(f"{shown} refuses: {text} (error {code}). Correct that.")
    return RetriableError(f"{shown}: {text} (error {code}). It is tried again.")
