"""The index file where a flush fails: what is not in the file stays in memory, and the error says why."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from millstream.sourcing.stream_index import EventRun, StreamIndex


def test_a_full_disk_is_named_and_what_was_not_written_is_written_later(tmp_path: Path) -> None:
    index = StreamIndex(tmp_path / "0.db", "id", 1)
    (pages,) = index._db.execute("PRAGMA page_count").fetchone()
    index._db.execute(f"PRAGMA max_page_count = {pages + 1}")
    names = [f"{at}".zfill(3000) for at in range(10)]
    for at, name in enumerate(names):
        index.add(name, EventRun(1, 1, at, name), "")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        index.flush()
    assert [index.version(name) for name in names] == [1] * 10
    index._db.execute("PRAGMA max_page_count = 100000")
    assert index.stream_ids() == names
    index.close()
    again = StreamIndex(tmp_path / "0.db", "id", 1)
    assert (again.position, again.stream_ids()) == (10, names)
    again.close()
