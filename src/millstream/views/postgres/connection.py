"""A connection to a PostgreSQL view store: sessions in UTC, one transaction at a time, our errors.

Every error of the driver passes :func:`translate_errors`, which leaves out user and password.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from millstream.errors import (
    ConfigError,
    CorruptionError,
    EnvironmentProblem,
    MillstreamError,
    RetriableError,
)
from millstream.views.address import PostgresAddress

if TYPE_CHECKING:
    import psycopg

    Session = psycopg.Connection[tuple[Any, ...]]

SERVER_VERSION_MIN = 150000
_CONNECT_TIMEOUT_S = 10
_REFUSED = re.compile(r"authentication|does not exist|pg_hba|permission|SSL|certificate|translate")
_RETRIABLE_CODES = (
    "08",
    "40",
    "53",
    "55",
    "57",
    "58",
)  # classes of SQLSTATE: connection, conflict, resources
# data, credentials, database, privileges, limits
_CALLER_ERROR_CODES = ("22", "28", "3D", "42501", "54")


def _driver() -> Any:
    try:
        import psycopg  # noqa: PLC0415 - an extra: only those who use PostgreSQL have it
    except ImportError as error:
        raise EnvironmentProblem(
            "A view is kept in PostgreSQL, and its driver is not installed. Install it with "
            'pip install "millstream[postgres]".'
        ) from error
    return psycopg


@contextmanager
def translate_errors(address: PostgresAddress) -> Iterator[None]:
    """Turn what psycopg raises into the errors of this package.

    Raises:
        RetriableError: the server is away, full or busy. Nothing of the transaction was committed, except
            perhaps if the connection broke during the commit.
        ConfigError: a value does not fit, or a right or a database is missing.
        CorruptionError: the server says that its data are damaged.
    """
    psycopg = _driver()
    try:
        yield
    except psycopg.Error as error:
        state = error.sqlstate or ("08" if isinstance(error, psycopg.OperationalError) else "")
        detail = f"PostgreSQL says: {_first_line(address, error)}."
        # From None: the driver's error can contain the password.
        if state.startswith("XX"):
            raise CorruptionError(f"{address.shown} is damaged. {detail}") from None
        if state.startswith(_RETRIABLE_CODES):
            raise RetriableError(
                f"{address.shown} could not do what was asked. Try again later. {detail}"
            ) from None
        if state.startswith(_CALLER_ERROR_CODES):
            raise ConfigError(
                f"{address.shown} refused what was asked. Correct the value or the rights. {detail}"
            ) from None
        raise MillstreamError(
            f"{address.shown} could not be used as a view store. {detail}"
        ) from None


def _first_line(address: PostgresAddress, error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return address.redacted(lines[0]).rstrip(".")


class PostgresConnection:
    """One session with the server, opened at its first use, for one transaction at a time.

    Thread-safe: calls wait for one another.
    """

    def __init__(self, address: PostgresAddress, *, readonly: bool) -> None:
        self.address = address
        self._readonly = readonly
        self._lock = threading.RLock()
        self._session: Session | None = None
        self._closed = False

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Run one transaction; anything raised inside undoes all of it.

        A reader sees one state of the database in it, whatever is committed meanwhile.

        Raises:
            RetriableError, ConfigError: see :func:`translate_errors`.
        """
        with self._lock, translate_errors(self.address):
            if self._closed:
                raise ConfigError(
                    f"The connection to {self.address.shown} is closed. Open it again."
                )
            if self._session is None or self._session.closed:
                self._session = self._open()
            with self._session.transaction():
                yield self._session

    def _open(self) -> Session:
        psycopg = _driver()
        try:
            session: Session = psycopg.connect(
                self.address.url,
                autocommit=True,
                prepare_threshold=None,  # a connection pooler may not keep prepared statements
                application_name="millstream",
                connect_timeout=_CONNECT_TIMEOUT_S,
            )
        except psycopg.Error as error:
            detail = _first_line(self.address, error)
            kind = ConfigError if _REFUSED.search(detail) else RetriableError
            raise kind(
                f"{self.address.shown} cannot be reached. Check the address and that the server "
                f"runs. PostgreSQL says: {detail}."
            ) from None
        try:
            self._set_up(session)
        except BaseException:
            session.close()
            raise
        return session

    def _set_up(self, session: Session) -> None:
        psycopg = _driver()
        version = session.info.server_version
        if version < SERVER_VERSION_MIN:
            raise ConfigError(
                f"{self.address.shown} is PostgreSQL {version // 10000}; views need "
                f"{SERVER_VERSION_MIN // 10000} or newer. Upgrade the server, or use another one."
            )
        encoding = session.info.parameter_status("server_encoding")
        if encoding != "UTF8":
            raise ConfigError(
                f"{self.address.shown} keeps text as {encoding}; views need a database in UTF8. "
                "Make one with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0."
            )
        session.execute("SET TIME ZONE 'UTC'")
        session.execute("SET client_min_messages = warning")
        session.read_only = self._readonly
        if self._readonly:
            session.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the session if the block fails, where nobody could close it afterwards."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the session. Closing twice is allowed."""
        with self._lock:
            self._closed = True
            session, self._session = self._session, None
        if session is not None:
            session.close()
