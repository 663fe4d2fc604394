"""Connections to a server: sessions of SQL, and the stream of its WAL.

Feedback, which tells the server what is durable here, comes from a thread of its own: a log that does not keep up
makes no server give the connection up. The server may remove WAL up to what feedback says, and never before.
"""

from __future__ import annotations

import contextlib
import select
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import psycopg
from psycopg import pq

from millstream.capture.postgres.messages import lsn_text, parse_lsn
from millstream.errors import ConfigError, ConflictError, RetriableError
from millstream.views.address import PostgresAddress, is_refused_login

_EPOCH_S = 946_684_800
_FEEDBACK_S = 1.0
_BATCH_BYTES = 1 << 20  # what one look at the connection takes at most
SLOT_WAIT_S = 30.0
KEEPALIVE = b"k"  # what a message begins with that says how far the server has read
_CONNECT_S = 10
_OPTIONS = (
    "-c datestyle=ISO -c intervalstyle=iso_8601 -c timezone=UTC -c bytea_output=hex -c extra_float_digits=3 "
    "-c client_encoding=UTF8 -c row_security=off -c statement_timeout=0 -c idle_in_transaction_session_timeout=0"
)
Session = psycopg.Connection[tuple[Any, ...]]
FAILOVER_SINCE = 170_000  # the version from which on a slot may be copied to standbys


def keepalive_end(data: bytes) -> int | None:
    """Return how far the server has read, if this is a keepalive; None of a message behind its header."""
    return int.from_bytes(data[1:9], "big") if data[:1] == KEEPALIVE else None


@contextlib.contextmanager
def translated(address: PostgresAddress) -> Iterator[None]:
    """Raise a server's errors as ours, without secrets."""
    try:
        yield
    except (psycopg.errors.ObjectInUse, psycopg.OperationalError) as error:
        if is_refused_login(str(error)):
            raise ConfigError(
                f"{address.shown} refuses: {address.redacted(str(error)).strip()}. Correct the user, the password (it may be in "
                "MILLSTREAM_CAPTURE_PASSWORD), the database, or the server's pg_hba.conf."
            ) from None
        raise RetriableError(
            f"{address.shown} does not respond as it should: {address.redacted(str(error)).strip()}. It is tried again."
        ) from None
    except psycopg.errors.UndefinedObject as error:
        raise ConflictError(
            f"{address.shown}: {address.redacted(str(error)).strip()}, at the place that the capture goes on from; "
            "changes of that time cannot be decoded. Capture under a new name (--name), which begins with a new snapshot."
        ) from None
    except psycopg.Error as error:
        raise ConflictError(
            f"{address.shown} refused a statement of the capture: {address.redacted(str(error)).strip()}. "
            "Mend that, and run the capture again."
        ) from None


def open_session(address: PostgresAddress, *, replication: bool = False) -> Session:
    """Return a session whose texts do not depend on the server's settings."""
    more: dict[str, Any] = {"replication": "database"} if replication else {}
    with translated(address):
        return psycopg.connect(
            address.url,
            autocommit=True,
            options=_OPTIONS,
            application_name="millstream capture",
            connect_timeout=_CONNECT_S,
            keepalives_idle=30,
            **more,
        )


def run_command(connection: pq.abc.PGconn, command: str) -> pq.abc.PGresult:
    """Run a command that takes no parameters; one that copies has begun when this returns."""
    found = connection.exec_(command.encode())
    if found.status not in (
        pq.ExecStatus.TUPLES_OK,
        pq.ExecStatus.COMMAND_OK,
        pq.ExecStatus.COPY_BOTH,
        pq.ExecStatus.COPY_OUT,
    ):
        raise psycopg.errors.error_from_result(found)
    return found


class SystemIdentity(NamedTuple):
    """Which server it is, on which timeline, and where its WAL ends."""

    system: str
    timeline: int
    wal_end: int


def identity_of(session: Session) -> SystemIdentity:
    """Ask the server of a replication session who it is."""
    found = run_command(session.pgconn, "IDENTIFY_SYSTEM")
    system, timeline, end = (found.get_value(0, place) or b"" for place in range(3))
    return SystemIdentity(system.decode(), int(timeline), parse_lsn(end.decode()))


def refuse_other_timeline(address: PostgresAddress, found: int, timeline: int | None) -> None:
    """Return if the timeline that was found is the one that the rest of a run is on.

    Raises:
        RetriableError: it is another. An address may lead to several servers, or to a new one meanwhile.
    """
    if timeline not in (None, found):
        raise RetriableError(
            f"connections to {address.shown} lead to servers of two timelines, {found} and {timeline}. They are made "
            "anew; if that comes again, see to it that the address leads to the new primary only."
        )


def check_end(connection: pq.abc.PGconn) -> None:
    """Return if what was copied ended well.

    Raises:
        psycopg.Error: it did not.
    """
    while (found := connection.get_result()) is not None:
        if found.status == pq.ExecStatus.FATAL_ERROR:
            raise psycopg.errors.error_from_result(found)


def create_slot(
    session: Session, name: str, *, temporary: bool, wait_s: float = SLOT_WAIT_S
) -> tuple[int, str]:
    """Create a slot, and return the place it begins at and, of a temporary one, the name of the snapshot there.

    One that stays may be copied to standbys, where the server has that: nothing waits for a standby unless the server's
    ``synchronized_standby_slots`` says so.
    The server waits for every transaction that writes. After ``wait_s`` the wait is cancelled, which leaves no slot.

    Raises:
        psycopg.OperationalError: it was cancelled, or there are no slots left.
    """
    kind = "TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT"
    if not temporary:
        kind = "LOGICAL pgoutput NOEXPORT_SNAPSHOT"
        if session.info.server_version >= FAILOVER_SINCE:
            kind = "LOGICAL pgoutput (SNAPSHOT 'nothing', FAILOVER true)"
    watch = threading.Timer(wait_s, session.cancel)
    watch.start()
    try:
        found = run_command(session.pgconn, f'CREATE_REPLICATION_SLOT "{name}" {kind}')
    finally:
        watch.cancel()
    point, snapshot = found.get_value(0, 1), found.get_value(0, 2)
    assert point is not None
    return parse_lsn(point.decode()), (snapshot or b"").decode()


@dataclass
class WalStream:
    """The stream of a slot from ``start`` of a timeline on; use it in ``with``.

    ``acknowledge`` may be called from any thread, the rest from one. ``messages``: those of pg_logical_emit_message are
    streamed, too.
    """

    address: PostgresAddress
    slot: str
    publication: str
    start: int
    timeline: int
    messages: bool = False
    _acknowledged: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: threading.Event = field(default_factory=threading.Event)
    _ended: bool = False

    def __enter__(self) -> Self:
        self._acknowledged = self.start
        self._session = open_session(self.address, replication=True)
        self._connection = self._session.pgconn
        try:
            with translated(self.address):
                found = identity_of(self._session).timeline
                refuse_other_timeline(self.address, found, self.timeline)
                messages = ", messages 'true'" if self.messages else ""
                run_command(
                    self._connection,
                    f'START_REPLICATION SLOT "{self.slot}" LOGICAL {lsn_text(self.start)} '
                    f"(proto_version '1', publication_names '\"{self.publication}\"'{messages})",
                )
        except BaseException:
            self._session.close()
            raise
        self._connection.nonblocking = 1
        self._thread = threading.Thread(target=self._feed, name="capture feedback", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        # A run that is shorter than the time between two would never let the server remove WAL.
        with contextlib.suppress(psycopg.Error):
            self._feedback()
        self._session.close()

    def acknowledge(self, lsn: int) -> None:
        """Let the server forget what is before a place: it is durable here. Told within a second, and at the end."""
        self._acknowledged = max(self._acknowledged, lsn)

    def ask(self) -> None:
        """Ask the server for a keepalive."""
        self._feedback(ask=True)

    def receive(self, timeout_s: float) -> list[bytes]:
        """Return the messages that are there, after waiting for the first one for so long at most.

        Each has its header; some are keepalives.

        Raises:
            RetriableError: the connection is gone.
            ConflictError: the server no longer has the WAL, or not the publication.
        """
        with translated(self.address):
            found = self._take()
            if not found and not self._ended:
                select.select([self._connection.socket], [], [], timeout_s)
                found = self._take()
        return found

    def _take(self) -> list[bytes]:
        """Return all that has come, without waiting.

        What libpq takes from the socket at a time is a hundred rows, and each wait for the socket gives other threads
        a turn, which may be long.
        """
        messages: list[bytes] = []
        taken, looked = 0, False
        connection, add = self._connection, messages.append
        get = connection.get_copy_data
        with self._lock:
            if self._ended:
                raise self._end()
            while taken < _BATCH_BYTES:
                size, data = get(1)
                if size > 0:
                    add(bytes(data))
                    taken += size
                    looked = False
                    continue
                if size < 0:
                    self._ended = True
                if size < 0 or looked:
                    break
                connection.consume_input()
                looked = True
        return messages

    def _end(self) -> psycopg.Error:
        """Return why the server ended the stream."""
        try:
            check_end(self._connection)
        except psycopg.Error as error:
            return error
        return psycopg.OperationalError("the server ended the stream")

    def _feed(self) -> None:
        while not self._closed.wait(_FEEDBACK_S):
            try:
                self._feedback()
            except psycopg.Error:
                return  # receive() tells it

    def _feedback(self, *, ask: bool = False) -> None:
        lsn = self._acknowledged
        now_us = int((time.time() - _EPOCH_S) * 1_000_000)
        with self._lock:
            self._connection.put_copy_data(struct.pack(">cQQQqB", b"r", lsn, lsn, lsn, now_us, ask))
            self._connection.flush()
