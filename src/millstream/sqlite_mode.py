"""Puts a SQLite database into WAL mode, also while another process does."""

from __future__ import annotations

import sqlite3
import time

_AGAIN_S = 0.01
_CODE = 0xFF  # what is above these bits of an error's code is a detail


def write_ahead(db: sqlite3.Connection, timeout_s: float = 60.0) -> None:
    """Have a database write ahead: readers see the last commit, and do not wait for who writes.

    The mode changes under a lock for which SQLite does not wait, whatever the connection's timeout
    (https://www.sqlite.org/pragma.html#pragma_journal_mode; ``sqlite3_busy_timeout`` says where it gives up at once). So of
    connections that open a new file at the same moment some are refused, and ask again here.

    Raises:
        sqlite3.OperationalError: the database was locked for ``timeout_s`` seconds, or cannot be written.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & _CODE != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(_AGAIN_S)
        else:
            return
