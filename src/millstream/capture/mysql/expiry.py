"""The binary log of a server that is not captured yet, and when the server purges it.

MariaDB keeps a file of the binary log for ``binlog_expire_logs_seconds`` after its last event, and asks no reader. So the
oldest file that there is, is the next to go.
"""

from __future__ import annotations

from millstream.capture.lag import SourceLag
from millstream.capture.mysql.session import MariaDbSession
from millstream.capture.units import Progress


def binlog_lag(session: MariaDbSession, progress: Progress) -> SourceLag:
    """Measure what lies between the stored place and the end of the log, and say if that is soon purged."""
    files = [(str(row[0]), int(row[1])) for row in session.rows("SHOW BINARY LOGS")]
    names = [name for name, _ in files]
    at = progress["file"]
    expected = _rows_expected(session, progress)
    if at not in names:
        return SourceLag(
            rows_expected=expected,
            alarm=f"the server has purged {at}, which the capture has not read to its end: changes are missing",
        )
    place = names.index(at)
    behind = sum(size for _, size in files[place:]) - int(progress["position"])
    alarm = ""
    expiry_s = _expiry_s(session)
    if expiry_s and place == 0 and len(files) > 1:
        alarm = (
            f"the capture reads {at}, the oldest file of the binary log, with {len(files) - 1} after it; the server purges "
            f"it {expiry_s:,.0f} s after its last event (binlog_expire_logs_seconds). Find out why the capture is slow or "
            "its log accepts nothing, or have the server keep more"
        )
    return SourceLag(bytes_behind=max(behind, 0), rows_expected=expected, alarm=alarm)


def _expiry_s(session: MariaDbSession) -> float:
    """Return for how long files are kept; 0 is for ever."""
    rows = session.rows(
        "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('binlog_expire_logs_seconds', 'expire_logs_days')"
    )
    found = {str(name): float(value) for name, value in rows}
    seconds = found.get("binlog_expire_logs_seconds", 0.0)
    return seconds or found.get("expire_logs_days", 0.0) * 86_400


def _rows_expected(session: MariaDbSession, progress: Progress) -> int | None:
    """Return about how many rows the tables have that are not read to their end."""
    names = [name for name, state in progress["tables"].items() if not state.get("read")]
    if not names:
        return None
    rows = session.rows(
        "SELECT CONCAT(TABLE_SCHEMA, '/', TABLE_NAME), TABLE_ROWS FROM information_schema.TABLES "
        "WHERE TABLE_TYPE = 'BASE TABLE'"
    )
    sizes = {name: int(count or 0) for name, count in rows}
    return sum(sizes.get(name, 0) for name in names)
