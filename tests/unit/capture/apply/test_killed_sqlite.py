"""A copy in SQLite, whose applier is killed again and again."""

import sqlite3
from contextlib import closing

import pytest
from killed_applier import Writer, finish, killed_applier, schema


def look(path):
    if not path.exists():
        return None
    with closing(sqlite3.connect(path, timeout=60)) as session:
        session.execute("BEGIN")
        if not session.execute("SELECT 1 FROM sqlite_master WHERE name = 'b'").fetchone():
            return None
        return [session.execute(f"SELECT * FROM {table} ORDER BY id").fetchall() for table in "ab"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.long)])
def test_a_copy_in_sqlite_is_whole_at_every_moment(tmp_path, kills):
    path, copy = tmp_path / "shop.db", tmp_path / "copy.db"
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=60)
    database.execute("PRAGMA journal_mode = WAL")
    for statement in schema():
        database.execute(statement)
    source, target, folder = f"sqlite:///{path}", f"sqlite:///{copy}", tmp_path / "log"
    with Writer(database.execute, kills, "BEGIN IMMEDIATE") as writer:
        killed_applier(source, target, folder, lambda: look(copy), kills=kills, seed=kills)
    assert writer.count > 10
    finish(source, target, folder)
    assert look(copy) == look(path)
    database.close()
