"""The WAL that a server keeps for a capture: how much it is, what is too much, and how it is given up.

A slot keeps WAL until the log has what is in it. Of the limit, which is ``max_slot_wal_keep_size`` of the server or
the ``wal_bytes_max`` of the capture, whichever is less:

=====================  ============================================================================
more than a quarter    an alarm
more than a half       a snapshot pauses after its chunk, until the changes of meanwhile are stored
all of it              of the server: it takes the WAL away, and the capture refuses to go on.
                       Of the capture: an alarm (policy ``keep``), or the slot is dropped (``release``)
=====================  ============================================================================

A slot that is given up is dropped, and so is the publication's use: the next run refuses to go on, as changes are
missing. The server's disk is never filled by a capture with ``release``; no change is ever lost with ``keep``, but by
what the server itself was told to remove.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from millstream.capture.lag import SourceLag
from millstream.capture.postgres.messages import lsn_text
from millstream.capture.postgres.stream import Session
from millstream.capture.units import Progress
from millstream.errors import RetriableError

_MIB = 1 << 20
UNLIMITED_ALARM_BYTES = (
    8 << 30
)  # where there is no limit: a disk of today has that, and not much more to spare
_ROWS = """
SELECT sum(greatest(reltuples, 0))::int8 FROM pg_class WHERE relkind = 'r' AND oid IN (
  SELECT relid FROM unnest(%s::oid[]) t(oid), LATERAL pg_partition_tree(t.oid)
  UNION ALL SELECT unnest(%s::oid[]))
"""


@dataclass(frozen=True, slots=True)
class KeptWal:
    """What a slot keeps, in bytes, and the least limit of it, with the name of what sets it; None is no limit."""

    kept: int
    behind: int
    limit: int | None
    limited_by: str

    @property
    def pauses(self) -> bool:
        """Whether rows should no longer be read before changes are."""
        return self.limit is not None and self.kept > self.limit // 2

    def alarm(self, slot: str) -> str:
        """Say what somebody should do something about."""
        if self.limit is None:
            if self.kept <= UNLIMITED_ALARM_BYTES:
                return ""
            return (
                f"the server keeps {_mib(self.kept)} MiB of WAL for the slot {slot}, and nothing limits it: let the "
                "capture run, or remove it (--remove); and set max_slot_wal_keep_size, or --wal-max"
            )
        if self.kept <= self.limit // 4:
            return ""
        return (
            f"the server keeps {_mib(self.kept)} MiB of WAL for the slot {slot}, of {_mib(self.limit)} MiB that "
            f"{self.limited_by} allows: find out why the capture is slow or its log accepts nothing, or allow more"
        )


def measure_kept(session: Session, progress: Progress, wal_bytes_max: int | None) -> KeptWal | None:
    """Measure what the slot of a capture keeps; None if there is no slot."""
    row = session.execute(
        "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::int8, "
        "pg_wal_lsn_diff(pg_current_wal_lsn(), %s::pg_lsn)::int8, "
        "(SELECT setting::int8 FROM pg_settings WHERE name = 'max_slot_wal_keep_size') "
        "FROM pg_replication_slots WHERE slot_name = %s AND restart_lsn IS NOT NULL",
        (lsn_text(progress["lsn"]), progress["slot"]),
    ).fetchone()
    if row is None:
        return None
    kept, behind, setting_mib = row
    limits = [] if wal_bytes_max is None else [(wal_bytes_max, "--wal-max")]
    if setting_mib is not None and setting_mib >= 0:
        limits.append((setting_mib * _MIB, "max_slot_wal_keep_size"))
    limit, by = min(limits, default=(None, ""))
    return KeptWal(kept, max(behind, 0), limit, by)


def source_lag(
    session: Session, progress: Progress, found: KeptWal | None, wal_bytes_max: int | None
) -> SourceLag:
    """Return what was measured as the capture shows it."""
    oids = [int(oid) for oid, entry in progress["tables"].items() if entry["state"] != "done"]
    rows = session.execute(_ROWS, (oids, oids)).fetchone() if oids else None
    expected = None if rows is None else rows[0]
    if found is None:
        return SourceLag(rows_expected=expected)
    exceeded = wal_bytes_max is not None and found.kept > wal_bytes_max
    return SourceLag(found.behind, found.kept, expected, found.alarm(progress["slot"]), exceeded)


def drop_slots(
    session: Session, slots: list[str], wait_s: float, sleep: Callable[[float], None] = time.sleep
) -> list[str]:
    """Drop slots, each once nothing uses it any more; return those that were there.

    Raises:
        RetriableError: one is still used after ``wait_s``.
    """
    dropped = []
    for slot in slots:
        end_s = time.monotonic() + wait_s
        while (state := _active(session, slot)) is not None:
            if state == 0:
                session.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
                dropped.append(slot)
                break
            if time.monotonic() > end_s:
                raise RetriableError(
                    f"the replication slot {slot} is used by the server's process {state}. Stop the capture that uses "
                    "it, and try again."
                )
            sleep(0.1)
    return dropped


def _active(session: Session, slot: str) -> int | None:
    """Return the process that uses a slot, 0 if none does; None if there is no such slot."""
    row = session.execute(
        "SELECT coalesce(active_pid, 0) FROM pg_replication_slots WHERE slot_name = %s", (slot,)
    ).fetchone()
    return None if row is None else int(row[0])


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f}"
