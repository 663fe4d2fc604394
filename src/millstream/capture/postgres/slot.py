"""The replication slot of a capture: made once, and compared with the progress in the log on every start.

The log, and not the slot, says how far a capture is: a slot may fall back when its server crashes, and anyone may
move it forward. The name is stored before the slot is made, so that a slot is never left behind unknown.

==============================================  ====================================================
found on start                                  what follows
==============================================  ====================================================
no progress                                     a name is chosen, and stored
a name, not yet made; no slot                   the slot is made
a name, not yet made; the slot is there         it is used: a crash came before its place was stored
made; the slot is at or before the progress     the stream begins at the progress
made; the slot is behind the progress           refused: changes are lost
made; no slot, or it lost its WAL               refused: changes are lost
made; no publication                            refused: what it decodes cannot be known
another system or timeline, or WAL that is      refused: the server is another one, or was set back
shorter than the progress
the slot is used by another process             tried again
==============================================  ====================================================
"""

from __future__ import annotations

from typing import NamedTuple

from millstream.capture.postgres.messages import lsn_text, parse_lsn
from millstream.capture.postgres.stream import Session, create_slot, open_session, run_command
from millstream.capture.units import Progress
from millstream.errors import ConflictError, RetriableError
from millstream.views.address import PostgresAddress

_AGAIN = (
    "Capture under a new name (--name), which begins with a new snapshot; then remove what is left of the old "
    "one: SELECT pg_drop_replication_slot('{slot}');"
)


class SystemIdentity(NamedTuple):
    """Which server it is, on which timeline, and where its WAL ends."""

    system: str
    timeline: int
    wal_end: int


def identify(address: PostgresAddress) -> SystemIdentity:
    """Ask a server who it is."""
    with open_session(address, replication=True) as session:
        found = run_command(session.pgconn, "IDENTIFY_SYSTEM")
    system, timeline, end = (found.get_value(0, place) or b"" for place in range(3))
    return SystemIdentity(system.decode(), int(timeline), parse_lsn(end.decode()))


def make_slot(session: Session, address: PostgresAddress, slot: str) -> int:
    """Make the slot if it is not there, and return the place it begins at."""
    found = session.execute(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", (slot,)
    ).fetchone()
    if found is not None:
        return parse_lsn(found[0])
    with open_session(address, replication=True) as maker:
        return create_slot(maker, slot, temporary=False)[0]


def check_slot(
    session: Session, address: PostgresAddress, progress: Progress, publication: str
) -> None:
    """Return if the slot, and its server, have what follows the progress.

    Raises:
        ConflictError: they have not.
        RetriableError: another process reads the slot.
    """
    slot, lsn = progress["slot"], progress["lsn"]
    again = _AGAIN.format(slot=slot)
    now = identify(address)
    if now.system != progress["system"]:
        raise ConflictError(
            f"{address.shown} is another server than the one that was captured: its system identifier is "
            f"{now.system}, and was {progress['system']}. {again}"
        )
    if now.timeline != progress["timeline"] or now.wal_end < lsn:
        raise ConflictError(
            f"{address.shown} was set back, or a standby was promoted: it is at {lsn_text(now.wal_end)} of timeline "
            f"{now.timeline}, and was captured up to {lsn_text(lsn)} of timeline {progress['timeline']}. The log may "
            f"have changes that the server has not. {again}"
        )
    there = session.execute("SELECT 1 FROM pg_publication WHERE pubname = %s", (publication,))
    if there.fetchone() is None:
        raise ConflictError(
            f"the publication {publication} of {address.shown} is gone: changes cannot be decoded that were made "
            f"before it is made again. {again}"
        )
    found = session.execute(
        "SELECT active_pid, wal_status, confirmed_flush_lsn::text, plugin FROM pg_replication_slots "
        "WHERE slot_name = %s AND database = current_database()",
        (slot,),
    ).fetchone()
    if found is None:
        raise ConflictError(
            f"the replication slot {slot} of {address.shown} is gone, and with it the changes since "
            f"{lsn_text(lsn)}. {again}"
        )
    if found[1] == "lost" or found[2] is None:
        raise ConflictError(
            f"the replication slot {slot} of {address.shown} kept more WAL than max_slot_wal_keep_size allows: the "
            f"changes since {lsn_text(lsn)} are gone. {again}"
        )
    if parse_lsn(found[2]) > lsn:
        raise ConflictError(
            f"the replication slot {slot} of {address.shown} was moved, or made anew: it is at {found[2]}, and the "
            f"log has the changes up to {lsn_text(lsn)} only. {again}"
        )
    if found[0] is not None:
        raise RetriableError(
            f"the replication slot {slot} of {address.shown} is used by the server's process {found[0]}. It is tried "
            "again; if that is no older run of this capture, stop what uses it."
        )
