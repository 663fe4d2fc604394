"""Which server answers, and whether its WAL is the continuation of what was captured.

A promotion begins a new timeline: a branch of the WAL of before. Places of two branches can be the same number and
different changes, so a place means something together with its timeline only. The history that a server has of its
timeline says where each one before ended:

=======================================  =================================================
the timeline captured, and the server's  the WAL up to the captured place
=======================================  =================================================
the same, and began at the same place    is the server's, if its WAL is as long
the same, and began at another place     is of another branch: two standbys were promoted
not in the server's history              is of another branch
in it, and ended before the place        is in part of another branch: the log has more
in it, and ended at the place or after   is the server's
=======================================  =================================================

Sources: PostgreSQL 18, "Streaming Replication Protocol" (IDENTIFY_SYSTEM, TIMELINE_HISTORY), and "Timelines" of its
chapter on continuous archiving. A line of the history is a timeline, the place where it was left, and a reason.
"""

from __future__ import annotations

from typing import NamedTuple

from psycopg import errors

from millstream.capture.postgres.messages import parse_lsn
from millstream.capture.postgres.stream import (
    Session,
    SystemIdentity,
    identity_of,
    open_session,
    refuse_other_timeline,
    run_command,
)
from millstream.views.address import PostgresAddress


class ServerBranch(NamedTuple):
    """Who a server is, and the place where each timeline before its own was left."""

    identity: SystemIdentity
    history: dict[int, int]

    @property
    def began(self) -> int:
        """Return the place where its timeline left the one before; 0 of the first."""
        return self.history[max(self.history)] if self.history else 0


def identify(address: PostgresAddress) -> ServerBranch:
    """Ask a server who it is."""
    with open_session(address, replication=True) as session:
        identity = identity_of(session)
        try:
            found = run_command(session.pgconn, f"TIMELINE_HISTORY {identity.timeline}")
        except errors.UndefinedFile:  # of the first timeline there is none
            return ServerBranch(identity, {})
        return ServerBranch(identity, parse_history((found.get_value(0, 1) or b"").decode()))


def parse_history(text: str) -> dict[int, int]:
    """Return the timelines of a history file, and the place where each was left."""
    lines = (line.partition("#")[0].split(maxsplit=2) for line in text.splitlines())
    return {int(line[0]): parse_lsn(line[1]) for line in lines if line}


def refuse_other_server(session: Session, address: PostgresAddress, timeline: int) -> None:
    """Return if a session of SQL is one of the server that was asked who it is.

    Raises:
        RetriableError: it is on another timeline. An address may lead to several servers, or to a new one meanwhile.
    """
    row = session.execute("SELECT pg_walfile_name(pg_current_wal_insert_lsn())").fetchone()
    assert row is not None
    refuse_other_timeline(address, int(row[0][:8], 16), timeline)
