"""The keys of subjects: personal fields are sealed with them, and unreadable once they are destroyed.

A subject is a person, by an id that is not itself personal. Each has a key of AES-256-GCM, made with the first
personal field and kept here, in one SQLite file, and nowhere else: not in the log, nor in what is made from it.
To forget a subject is to destroy the key. What was sealed with it is then noise wherever it was copied to: the
log, archives, backups. A subject who comes back gets another key.

A forgotten key leaves its number behind. So a number that is not here at all means that this is the wrong file,
or an old copy of it, which is an error and is never taken for forgetting. Numbers are random: those of an old copy
that is used on would be those of other keys if they were counted, and to forget one subject would take another along.

To destroy a key: 1. its bytes are overwritten in the file (``secure_delete``), in a synced transaction. A crash
before the commit leaves the key, and forgetting is to be repeated; a crash after it leaves no key. 2. The
write-ahead log, which may have an old page, is emptied. A crash before leaves it to the next opening, which
empties it first.
"""

from __future__ import annotations

import base64
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millstream.errors import ConfigError, CorruptionError, EnvironmentProblem
from millstream.sqlite_mode import write_ahead

SEALED = "$sealed"
_NONCE_BYTES = 12
_KEY_BYTES = 32
_NUMBER_BYTES = 7
_SCHEMA = """
CREATE TABLE IF NOT EXISTS subject_keys (
    number INTEGER PRIMARY KEY AUTOINCREMENT, subject TEXT NOT NULL, secret BLOB);
CREATE INDEX IF NOT EXISTS keys_by_subject ON subject_keys (subject);
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
"""


def _cipher(secret: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import (  # noqa: PLC0415 - an extra
            AESGCM,
        )
    except ImportError as error:
        raise EnvironmentProblem(
            "events have personal fields, and the library that seals them is not installed. Install it with "
            'pip install "millstream[crypto]"'
        ) from error
    return AESGCM(secret)


def _make_private(path: Path) -> None:
    """Make the file if it is missing, for its owner only: SQLite gives what it makes beside it the same rights."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        if name.exists():
            name.chmod(0o600)


class SubjectKeys:
    """The key store. Thread-safe; several processes may use one file.

    Args:
        path: The file. Back it up apart from the log, and delete old backups of it: a backup of a key brings
            back what was forgotten.
        random_bytes: Makes keys and nonces; only tests give another source.
    """

    def __init__(
        self, path: str | Path, *, random_bytes: Callable[[int], bytes] = os.urandom
    ) -> None:
        self.path = Path(path)
        self._random_bytes = random_bytes
        self._lock = threading.Lock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _make_private(self.path)
            self._db = sqlite3.connect(
                self.path, timeout=60, isolation_level=None, check_same_thread=False
            )
            write_ahead(self._db)
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA secure_delete = ON")
            self._db.executescript(_SCHEMA)
            self._empty_wal()
            self.store_id = self._store_id()
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(
                f"the key store {self.path} cannot be opened: {error}. Nothing else is lost: events without "
                "personal fields can be read without it; restore it from its backup"
            ) from error

    def _store_id(self) -> str:
        fresh = self._random_bytes(8).hex()
        self._db.execute("INSERT OR IGNORE INTO about VALUES ('store_id', ?)", (fresh,))
        self._db.execute("INSERT OR IGNORE INTO about VALUES ('forgets', '0')")
        found = self._db.execute("SELECT value FROM about WHERE name = 'store_id'").fetchone()[0]
        return str(found)

    def forgets(self) -> str:
        """Name this key store and how often it forgot, in any process: with another name, what was decoded before
        is out of date.
        """
        with self._lock:
            row = self._db.execute("SELECT value FROM about WHERE name = 'forgets'").fetchone()
            return f"{self.store_id}:{row[0]}"

    def seal(self, subject: str, value: Any, place: str) -> dict[str, str]:
        """Return a JSON value as nobody can read it without the key of a subject.

        Args:
            place: What the value is; it can be opened as nothing else.
        """
        number, cipher = self._key_for(subject)
        nonce = self._random_bytes(_NONCE_BYTES)
        sealed = cipher.encrypt(nonce, json.dumps(value).encode(), place.encode())
        text = base64.b64encode(nonce + sealed).decode()
        return {SEALED: f"{self.store_id}:{number}:{text}"}

    def open(self, sealed: str, place: str, forgotten: Any) -> Any:
        """Return what was sealed; ``forgotten`` if its key was destroyed.

        Raises:
            ConfigError: the key is not here, and was not destroyed here: the key store is another one.
            CorruptionError: it was changed, or sealed as something else.
        """
        store_id, _, rest = sealed.partition(":")
        number, _, text = rest.partition(":")
        if not text:
            return forgotten  # its bytes were removed; see ``excision``
        if store_id != self.store_id:
            raise self._lost(f"is sealed with a key of the key store {store_id}")
        row = self._db_row(int(number))
        if row is None:
            raise self._lost(f"is sealed with key {number}, which it never had")
        if row[0] is None:
            return forgotten
        data = base64.b64decode(text)
        try:
            found = _cipher(row[0]).decrypt(
                data[:_NONCE_BYTES], data[_NONCE_BYTES:], place.encode()
            )
        except Exception as error:
            raise CorruptionError(
                f"{place} cannot be opened with key {number}: its bytes were changed"
            ) from error
        return json.loads(found)

    def _lost(self, what: str) -> ConfigError:
        return ConfigError(
            f"a personal field {what}, and {self.path} is the key store {self.store_id}: it is another one, or "
            "an older copy. Nothing else is lost; restore the key store from its backup"
        )

    def destroy(self, subject: str) -> int:
        """Destroy the keys of a subject, for good; return how many there were. Durable on return."""
        with self._lock:
            with self._transaction():
                count = self._db.execute(
                    "UPDATE subject_keys SET secret = NULL WHERE subject = ? AND secret IS NOT NULL",
                    (subject,),
                ).rowcount
                self._announce()
            self._empty_wal()
            return count

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit what is done within; after an error or an interrupt nothing was done, and none is left open."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self._db.rollback()
            raise

    def destroyed(self, subject: str) -> list[int]:
        """Return the numbers of the keys of a subject that were destroyed."""
        with self._lock:
            rows = self._db.execute(
                "SELECT number FROM subject_keys WHERE subject = ? AND secret IS NULL", (subject,)
            )
            return [row[0] for row in rows]

    def announce(self) -> None:
        """Have everybody drop what they have decoded."""
        with self._lock:
            self._announce()

    def _announce(self) -> None:
        self._db.execute("UPDATE about SET value = value + 1 WHERE name = 'forgets'")

    def _empty_wal(self) -> None:
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def _db_row(self, number: int) -> tuple[bytes | None] | None:
        with self._lock:
            found: tuple[bytes | None] | None = self._db.execute(
                "SELECT secret FROM subject_keys WHERE number = ?", (number,)
            ).fetchone()
            return found

    def _fresh_number(self) -> int:
        """Return a number that no copy of this file gives to another key: it is a random one."""
        return 1 << 56 | int.from_bytes(self._random_bytes(_NUMBER_BYTES))

    def _key_for(self, subject: str) -> tuple[int, Any]:
        """Return the key of a subject, made if there is none."""
        with self._lock, self._transaction():
            row = self._db.execute(
                "SELECT number, secret FROM subject_keys WHERE subject = ? AND secret IS NOT NULL",
                (subject,),
            ).fetchone()
            if row is None:
                secret = self._random_bytes(_KEY_BYTES)
                row = self._fresh_number(), secret
                self._db.execute(
                    "INSERT INTO subject_keys VALUES (?, ?, ?)", (row[0], subject, secret)
                )
        return row[0], _cipher(row[1])
