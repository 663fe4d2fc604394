"""Where the events of each stream are: an index of one partition, in SQLite, beside the log.

A row is the run of events that one command appended: they lie together. The index also knows each command by
its id, and keeps aggregate snapshots. None of it is the truth: it is made from the log, is behind it at times
(what is not flushed is read again from ``position`` on), and is made anew when it does not fit the log: the
topic is another one, or the last event that it knows is not where it should be.

Several processes use one file. What they add is the same, as it comes from the same log: whoever flushes
second adds only what is missing.
"""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from millstream.errors import ConfigError
from millstream.sqlite_mode import write_ahead

FLUSH_RUNS = 5000  # read again at most, after a crash: some tens of milliseconds
_FORMAT = 3
_OWNER = "log"  # the file that names the log
_SCHEMA = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS runs (
    stream TEXT, first_version INTEGER, count INTEGER, first_offset INTEGER, command TEXT,
    PRIMARY KEY (stream, first_version)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS runs_by_command ON runs (command);
CREATE TABLE IF NOT EXISTS snapshots (
    stream TEXT PRIMARY KEY, version INTEGER, timestamp_ms INTEGER, code TEXT, state BLOB) WITHOUT ROWID;
"""


def index_folder(folder: Path, log_identity: str, topic_id: str) -> Path:
    """Return the folder of a topic's index, made if it is missing; it says which log the topic is of."""
    found = folder / topic_id
    found.mkdir(parents=True, exist_ok=True)
    (found / _OWNER).write_text(log_identity)
    return found


def remove_deleted(
    folder: Path, log_identity: str, topic_id: str, topic_ids: Callable[[], Collection[str]]
) -> list[str]:
    """Remove the indexes of topics that a log has no more: they hold aggregate snapshots. Return their ids.

    Args:
        topic_id: Of a topic that the log has.
        topic_ids: Returns the ids of all; called only if there are other indexes.
    """
    others = [
        path.parent.name
        for path in folder.glob(f"*/{_OWNER}")
        if path.parent.name != topic_id and path.read_text() == log_identity
    ]
    # After the look: a topic is there before its index is.
    there = topic_ids() if others else ()
    gone = [one for one in others if one not in there]
    for one in gone:
        shutil.rmtree(folder / one, ignore_errors=True)
    return gone


class EventRun(NamedTuple):
    """Consecutive events of one stream at consecutive offsets, appended by one command."""

    first_version: int
    length: int
    first_offset: int
    command_id: str

    @property
    def last_version(self) -> int:
        """The version of its last event."""
        return self.first_version + self.length - 1


class StoredSnapshot(NamedTuple):
    """The state of a stream at a version, as ``code`` had it: bytes of JSON."""

    version: int
    timestamp_ms: int
    code: str
    state: bytes


class LastEvent(NamedTuple):
    """The last event that an index knows, by which it is compared with the log.

    A log that was restored and went on otherwise has another command here, or the same one with another nonce: all
    else may be the same, and what lies before it is not.
    """

    offset: int
    stream_id: str
    version: int
    command_id: str
    nonce: str


class StreamIndex:
    """The index of one partition. Thread-safe.

    Args:
        path: The file; made if it is missing.
        topic_id: Of the topic; the index of another one is dropped.
        partitions: Of the topic.

    Raises:
        ConfigError: the topic had another number of partitions, or the file cannot be opened.
    """

    def __init__(self, path: Path, topic_id: str, partitions: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._runs: dict[str, list[EventRun]] = {}
        self._snapshots: dict[str, StoredSnapshot] = {}
        self._unflushed = 0
        self.last: LastEvent | None = None
        try:
            self._db = self._open(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise ConfigError(
                    f"the index {path} cannot be opened: {error}; check its folder"
                ) from error
            for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
                name.unlink(missing_ok=True)  # it is damaged: the log has everything
            self._db = self._open(path)
        about = self._about()
        if (about.get("topic_id"), about.get("format")) != (topic_id, _FORMAT):
            self._db.execute("BEGIN IMMEDIATE")
            self._empty()
            rows = (("topic_id", topic_id), ("format", _FORMAT), ("partitions", partitions))
            self._db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", rows)
            self._db.execute("COMMIT")
        elif about.get("partitions") != partitions:
            self._db.close()
            raise ConfigError(
                f"the event topic had {about.get('partitions')} partitions and has {partitions}: streams would "
                "continue in other partitions than they began in. Copy the events to a new topic, with a store "
                "of its own, and use that"
            )
        self._load_position()

    @staticmethod
    def _open(path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
        # NORMAL: a loss of power takes the last flushes, and never leaves half of one.
        write_ahead(db)
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA secure_delete = ON")  # a snapshot may hold what is to be forgotten
        db.executescript(_SCHEMA)
        return db

    def _about(self) -> dict[str, object]:
        return dict(self._db.execute("SELECT name, value FROM about"))

    def _load_position(self) -> None:
        about = self._about()
        self.position = int(str(about.get("position", 0)))
        if "last_stream" in about:
            self.last = LastEvent(
                int(str(about["last_offset"])),
                str(about["last_stream"]),
                int(str(about["last_version"])),
                str(about["last_command"]),
                str(about["last_nonce"]),
            )

    # -- looking up ---------------------------------------------------------------------------

    def version(self, stream_id: str) -> int:
        """Return the version of a stream; 0 if it has no events."""
        with self._lock:
            recent = self._runs.get(stream_id)
            if recent:
                return recent[-1].last_version
            row = self._db.execute(
                "SELECT first_version + count - 1 FROM runs WHERE stream = ? "
                "ORDER BY first_version DESC LIMIT 1",
                (stream_id,),
            ).fetchone()
            return row[0] if row else 0

    def runs(self, stream_id: str, after: int = 0) -> list[EventRun]:
        """Return the runs with events of versions above ``after``, in their order."""
        with self._lock:
            rows = self._db.execute(
                "SELECT first_version, count, first_offset, command FROM runs "
                "WHERE stream = :stream AND first_version >= ifnull((SELECT max(first_version) FROM runs "
                "WHERE stream = :stream AND first_version <= :next), 0) ORDER BY first_version",
                {"stream": stream_id, "next": after + 1},
            )
            runs = map(EventRun._make, rows)
            found = {run.first_version: run for run in runs if run.last_version > after}
            recent = self._runs.get(stream_id, ())
            found |= {run.first_version: run for run in recent if run.last_version > after}
            return list(found.values())

    def run_of_command(self, stream_id: str, command_id: str) -> EventRun | None:
        """Return what a command has appended to a stream; None if it is not known."""
        with self._lock:
            for run in self._runs.get(stream_id, ()):
                if run.command_id == command_id:
                    return run
            row = self._db.execute(
                "SELECT first_version, count, first_offset, command FROM runs "
                "WHERE command = ? AND stream = ?",
                (command_id, stream_id),
            ).fetchone()
            return EventRun(*row) if row else None

    def stream_ids(self) -> list[str]:
        """Return the ids of all streams, sorted."""
        self.flush()
        with self._lock:
            return [
                row[0]
                for row in self._db.execute("SELECT DISTINCT stream FROM runs ORDER BY stream")
            ]

    def snapshot(self, stream_id: str) -> StoredSnapshot | None:
        """Return the aggregate snapshot of a stream."""
        with self._lock:
            recent = self._snapshots.get(stream_id)
            if recent is not None:
                return recent
            row = self._db.execute(
                "SELECT version, timestamp_ms, code, state FROM snapshots WHERE stream = ?",
                (stream_id,),
            ).fetchone()
            return StoredSnapshot(*row) if row else None

    # -- changing -----------------------------------------------------------------------------

    def add(self, stream_id: str, run: EventRun, nonce: str) -> None:
        """Add a run that follows all others of its stream, and of the partition.

        Args:
            nonce: Of its events.
        """
        with self._lock:
            self._runs.setdefault(stream_id, []).append(run)
            self._unflushed += 1
            last_offset = run.first_offset + run.length - 1
            self.last = LastEvent(last_offset, stream_id, run.last_version, run.command_id, nonce)
            self.position = last_offset + 1

    def put_snapshot(self, stream_id: str, snapshot: StoredSnapshot) -> None:
        """Keep the aggregate snapshot of a stream, in place of the one before."""
        with self._lock:
            self._snapshots[stream_id] = snapshot
            self._unflushed += 1

    def flush_if_due(self) -> None:
        """Write what was added to the file, once it is much."""
        if self._unflushed >= FLUSH_RUNS:
            self.flush()

    def flush(self) -> None:
        """Write what was added to the file."""
        with self._lock:
            if not self._unflushed:
                return
            runs = [(stream, *run) for stream, added in self._runs.items() for run in added]
            snapshots = [(stream, *one) for stream, one in self._snapshots.items()]
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany("INSERT OR IGNORE INTO runs VALUES (?, ?, ?, ?, ?)", runs)
                self._db.executemany(
                    "INSERT INTO snapshots VALUES (?, ?, ?, ?, ?) ON CONFLICT (stream) DO UPDATE SET "
                    "version = excluded.version, timestamp_ms = excluded.timestamp_ms, "
                    "code = excluded.code, state = excluded.state",
                    snapshots,
                )
                self._move_position()
                self._db.execute("COMMIT")
            except BaseException:
                self._db.rollback()  # nothing, if SQLite has done so by itself: where the disk is full
                raise
            self._runs, self._snapshots, self._unflushed = {}, {}, 0

    def _move_position(self) -> None:
        """Move the position in the file to ours, unless another process was quicker."""
        if self.position <= int(str(self._about().get("position", 0))) or self.last is None:
            return
        rows = (
            ("position", self.position),
            ("last_offset", self.last.offset),
            ("last_stream", self.last.stream_id),
            ("last_version", self.last.version),
            ("last_command", self.last.command_id),
            ("last_nonce", self.last.nonce),
        )
        self._db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", rows)

    def clear(self) -> None:
        """Drop everything: the caller reads the log from its start."""
        with self._lock:
            self._runs, self._snapshots, self._unflushed = {}, {}, 0
            self._db.execute("BEGIN IMMEDIATE")
            self._empty()
            self._db.execute("COMMIT")
            self.position, self.last = 0, None

    def _empty(self) -> None:
        for table in ("runs", "snapshots"):
            self._db.execute(f"DELETE FROM {table}")  # noqa: S608 - one of two names
        self._db.execute("DELETE FROM about WHERE name LIKE 'last%' OR name = 'position'")

    def drop_snapshots(self) -> int:
        """Delete all aggregate snapshots, and their bytes in the file; return how many there were."""
        with self._lock:
            self._snapshots = {}  # never written
            count = self._db.execute("DELETE FROM snapshots").rowcount
            with closing(self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")) as done:
                done.fetchall()
            return count

    def close(self) -> None:
        """Flush, and close the file."""
        self.flush()
        with self._lock:
            self._db.close()
