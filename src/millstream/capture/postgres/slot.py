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
another system, or WAL that is shorter than     refused: the server is another one, or was set back
the progress
a timeline that left the captured one at or     the stream begins at the progress, which is of the server's
after the progress; the slot was copied to      timeline from now on
that standby, is valid and not temporary
another timeline in any other case, or one of   refused: the log may have what the server has not
the same number that began at another place
the slot is used by another process             tried again
==============================================  ====================================================
"""

from __future__ import annotations

from millstream.capture.postgres.messages import lsn_text, parse_lsn
from millstream.capture.postgres.stream import (
    Session,
    create_slot,
    open_session,
)
from millstream.capture.postgres.timelines import ServerBranch, identify, refuse_other_server
from millstream.capture.units import Progress
from millstream.errors import ConflictError, RetriableError
from millstream.views.address import PostgresAddress

_AGAIN = (
    "Capture under a new name (--name), which begins with a new snapshot; then remove what is left of the old "
    "one: SELECT pg_drop_replication_slot('{slot}');"
)


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
) -> Progress:
    """Return the progress, on the server's timeline, if the slot and its server have what follows it.

    Raises:
        ConflictError: they have not.
        RetriableError: another process reads the slot, or the address leads to several servers.
    """
    found = identify(address)
    timeline = found.identity.timeline
    refuse_other_server(session, address, timeline)
    promoted = timeline != progress["timeline"]
    reason = (
        unlike_server(address, progress, found)
        or _missing_publication(session, address, publication)
        or _unlike_slot(session, address, progress, promoted=promoted)
    )
    if reason:
        raise ConflictError(f"{reason} {_AGAIN.format(slot=progress['slot'])}")
    _refuse_used(session, address, progress["slot"])
    return {**progress, "timeline": timeline, "timeline_began": found.began}


def unlike_server(address: PostgresAddress, progress: Progress, branch: ServerBranch) -> str:
    """Say why the server's WAL is not the continuation of what was captured; empty if it is."""
    lsn, timeline, now = progress["lsn"], progress["timeline"], branch.identity
    if now.system != progress["system"]:
        return (
            f"{address.shown} is another server than the one that was captured: its system identifier is "
            f"{now.system}, and was {progress['system']}."
        )
    found = (
        f"{address.shown} was set back, or a standby was promoted: it is at {lsn_text(now.wal_end)} of timeline "
        f"{now.timeline}, and was captured up to {lsn_text(lsn)} of timeline {timeline}"
    )
    if now.timeline == timeline:
        began = progress.get("timeline_began", branch.began)  # captures of before have no such
        if began != branch.began:
            return (
                f"{found}. That began at {lsn_text(began)}, and the server's at {lsn_text(branch.began)}: two standbys were "
                "promoted, and the log may have changes that this one has not."
            )
        missing = now.wal_end < lsn
        return f"{found}. The log may have changes that the server has not." if missing else ""
    left = branch.history.get(timeline)
    if left is None:
        return (
            f"{found}, which its history does not have. The log may have changes that the server has not: let the "
            "address lead to the server whose changes are to be captured."
        )
    if left < lsn:
        return (
            f"{found}, which its own left at {lsn_text(left)}: what was captured after that had not reached it, and the "
            "log may have changes that the server has not. The server's synchronized_standby_slots prevents that."
        )
    return ""


def _missing_publication(session: Session, address: PostgresAddress, publication: str) -> str:
    there = session.execute("SELECT 1 FROM pg_publication WHERE pubname = %s", (publication,))
    if there.fetchone() is not None:
        return ""
    return (
        f"the publication {publication} of {address.shown} is gone: changes cannot be decoded that were made "
        "before it is made again."
    )


def _unlike_slot(
    session: Session, address: PostgresAddress, progress: Progress, *, promoted: bool
) -> str:
    """Say why the slot has not what follows the progress; empty if it has."""
    slot, lsn = f"the replication slot {progress['slot']} of {address.shown}", progress["lsn"]
    found = session.execute(
        "SELECT wal_status, confirmed_flush_lsn::text, temporary, to_jsonb(s) ->> 'synced', "
        "to_jsonb(s) ->> 'invalidation_reason' FROM pg_replication_slots s "
        "WHERE slot_name = %s AND database = current_database()",
        (progress["slot"],),
    ).fetchone()
    if found is None:
        why = "; it was not copied to this standby in time" if promoted else ""
        return f"{slot} is gone, and with it the changes since {lsn_text(lsn)}{why}."
    wal_status, confirmed, temporary, synced, invalid = found
    if promoted and (synced != "true" or temporary):
        return (
            f"{slot} was not copied from the primary that was captured, and the timeline is another one: a standby was "
            f"promoted, or a backup restored. What the slot has of the changes since {lsn_text(lsn)} is not known."
        )
    if invalid and invalid != "wal_removed":
        return f"{slot} was made invalid by the server ({invalid}): the changes since {lsn_text(lsn)} are gone."
    if wal_status == "lost" or confirmed is None:
        return (
            f"{slot} kept more WAL than max_slot_wal_keep_size allows: the changes since {lsn_text(lsn)} "
            "are gone."
        )
    if parse_lsn(confirmed) > lsn:
        return (
            f"{slot} was moved, or made anew: it is at {confirmed}, and the log has the changes up to "
            f"{lsn_text(lsn)} only."
        )
    return ""


def _refuse_used(session: Session, address: PostgresAddress, slot: str) -> None:
    row = session.execute(
        "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", (slot,)
    ).fetchone()
    if row is not None and row[0] is not None:
        raise RetriableError(
            f"the replication slot {slot} of {address.shown} is used by the server's process {row[0]}. It is tried "
            "again; if that is no older run of this capture, stop what uses it."
        )
