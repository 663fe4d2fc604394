"""A connection to a PostgreSQL view store: sessions in UTC, one transaction at a time, our errors.

Every error of the driver passes :func:`translate_errors`, which leaves out user and password.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
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
_KEEPALIVE = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
_SET_DURABLE = (
    "SELECT set_config('synchronous_commit', 'on', true) "
    "WHERE current_setting('synchronous_commit') = 'off'"
)
_REFUSED = re.compile(
    r"authentication|password|not permitted|does not exist|pg_hba|permission|SSL|certificate|translate"
)
_RETRIABLE_CODES = (
    "08",
    "40",
    "53",
    "55",
    "57",
    "58",
    "25006",
    "25P03",
    "25P04",
)  # classes of SQLSTATE: connection, conflict, resources; read only after a failover; too long
# data, credentials, database, privileges, limits
_CALLER_ERROR_CODES = ("22", "28", "3D", "42501", "54")


def _driver() -> Any:
    try:
        import psycopg  # noqa: PLC0415 - an extra: only those who use PostgreSQL have it
    except ImportError as error:
        raise EnvironmentProblem(
            "Views or state are kept in PostgreSQL, and its driver is not installed. Install it with "
            'pip install "millstream[postgres]".'
        ) from error
    return psycopg


def check_url(address: PostgresAddress, *, what: str) -> None:
    """Make sure that the driver understands a URL, without connecting.

    Raises:
        ConfigError: it does not, such as for an option that there is not.
    """
    psycopg = _driver()
    try:
        psycopg.conninfo.conninfo_to_dict(address.url)
    except psycopg.Error as error:
        raise ConfigError(
            f"{what} is at {address.shown}, with something that cannot be read: "
            f"{_first_line(address, error)}. Allowed after ? are schema, wait (seconds), and the driver's "
            "own options, such as sslmode=require."
        ) from None


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


@contextmanager
def pipelined(session: Session) -> Iterator[None]:
    """Send the statements of the block in one round trip, if the driver's libpq can.

    Nothing may be fetched in the block, or copied. The first statement that fails raises, at its end at the latest.
    """
    if not _driver().Pipeline.is_supported():
        yield
        return
    with session.pipeline():
        yield


def missing_table() -> type[Exception]:
    """Return what the driver raises for a table that is not there. It ends the transaction."""
    missing: type[Exception] = _driver().errors.UndefinedTable
    return missing


def _first_line(address: PostgresAddress, error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return address.redacted(lines[0]).rstrip(".")


class PostgresConnection:
    """One session with the server, opened at its first use, for one transaction at a time.

    Thread-safe: calls wait for one another. With ``settings``, these are set in every transaction and none
    for the session, as a connection pooler may give each transaction another one. With ``durable``, transactions are
    as durable as the server is, whatever it has set for others.
    """

    def __init__(
        self,
        address: PostgresAddress,
        *,
        readonly: bool,
        settings: Mapping[str, str] | None = None,
        durable: bool = False,
    ) -> None:
        self.address = address
        self._readonly = readonly
        self._settings = settings
        self._durable = durable
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
                if self._settings is not None:
                    self._set_local(self._session, self._settings)
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
                # A server that is cut off is noticed; what the address says holds all the same.
                **{k: v for k, v in _KEEPALIVE.items() if f"{k}=" not in self.address.url},
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
        if self._settings is None:
            session.execute("SET TIME ZONE 'UTC'")
            session.execute("SET client_min_messages = warning")
        session.read_only = self._readonly
        if self._readonly:
            session.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ

    def _set_local(self, session: Session, settings: Mapping[str, str]) -> None:
        """Set what holds until the transaction ends."""
        calls = ", ".join(["set_config(%s, %s, true)"] * len(settings))
        if self._durable:
            calls += f", ({_SET_DURABLE})"
        session.execute(
            f"SELECT {calls}",
            [text for setting in settings.items() for text in setting],
        )

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
