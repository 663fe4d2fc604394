"""A new SQLite file is opened by many at once."""

import sqlite3
import threading

import pytest

from millstream.sqlite_mode import write_ahead


def opened(path):
    return sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)


def test_connections_that_open_a_new_file_at_the_same_moment_all_get_it(tmp_path):
    for number in range(50):
        path, together, errors = tmp_path / f"{number}.db", threading.Barrier(4), []

        def work(path=path, together=together, errors=errors):
            together.wait()
            db = opened(path)
            try:
                write_ahead(db)
            except sqlite3.Error as error:
                errors.append(error)
            finally:
                db.close()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors


def test_who_holds_a_file_longer_is_an_error(tmp_path):
    holder, other = opened(tmp_path / "a.db"), opened(tmp_path / "a.db")
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        write_ahead(other, timeout_s=0.05)
    holder.execute("COMMIT")
    write_ahead(other)
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    holder.close()
    other.close()


def test_another_error_is_raised_at_once(tmp_path):
    (tmp_path / "a.db").write_bytes(b"no database" * 100)
    db = opened(tmp_path / "a.db")
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        write_ahead(db)
    db.close()
