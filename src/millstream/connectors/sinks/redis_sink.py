"""RedisSink: hashes of Redis, one for each key, or entries of a stream.

A batch, and the note of it, are one transaction of the server (MULTI), which nobody else has come between (WATCH). So a batch
that is written again changes nothing; what a crash of the server takes back, it takes back with the note.

====================================  ==================================================================
what is found in the note             what follows
====================================  ==================================================================
another token                         a later run was opened: FencedError
this batch                            it was written: its refused records are returned again
====================================  ==================================================================

Source: Redis, "Transactions" (WATCH, MULTI, EXEC).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import OutOfMemoryError, RedisError, ResponseError, WatchError

from millstream.connectors.sinks.connector import (
    RecordsToWrite,
    RefusedRecord,
    SinkGuarantee,
    SinkOpening,
    SinkRecord,
    WrittenBatch,
)
from millstream.connectors.sinks.json_text import json_text
from millstream.connectors.sinks.sink_note import BatchNote
from millstream.connectors.sinks.sink_password import SINK_PASSWORD_VARIABLE, sink_password
from millstream.errors import ConfigError, FencedError, RetriableError
from millstream.redis_client import open_redis, shown_redis_address, translated_redis_errors

_TOO_DEEP = "its lists and objects are nested too deeply"


@dataclass(frozen=True)
class RedisSink:
    """A sink connector, made by :func:`millstream.connectors.sinks.to_redis.to_redis`. One of ``hashes`` and ``stream`` is given."""

    url: str = field(repr=False)  # it may have a password
    hashes: str | None
    stream: str | None
    length: int | None = None
    records_max: int = 5_000
    bytes_max: int = 4 << 20
    kind: str = "redis"
    guarantee: SinkGuarantee = "transaction"

    @property
    def origin(self) -> str:
        """The address, without its password, and what is written there."""
        what = f"stream {self.stream!r}" if self.hashes is None else f"hashes {self.hashes!r}"
        return f"{self.shown}, {what}"

    @property
    def shown(self) -> str:
        """The address, without its password."""
        return shown_redis_address(self.url)

    def open(self, opening: SinkOpening) -> RedisWriter:
        """Return what writes; see :class:`~millstream.connectors.sinks.connector.SinkConnector`."""
        return RedisWriter(self, opening)


class RedisWriter:
    """Writes batches; see :class:`~millstream.connectors.sinks.connector.SinkWriter`."""

    def __init__(self, sink: RedisSink, opening: SinkOpening) -> None:
        self._sink = sink
        self._name = opening.name
        self._token = opening.token
        self._note_key = f"_millstream:sink:{opening.name}:{opening.life}"
        with self._translated():
            self._client = open_redis(sink.url, sink_password(sink.url))
            # From here on, a run that was opened before finds another token.
            self._client.hset(self._note_key, "token", self._token)
            noted = self._client.hgetall(self._note_key)
        self._note = BatchNote.from_json(noted.get(b"note"))

    @property
    def last(self) -> WrittenBatch | None:
        """The last batch that the server has noted."""
        return None if self._note is None else self._note.batch

    def write(self, batch: RecordsToWrite) -> Sequence[RefusedRecord]:
        """Write a batch in one transaction; see the protocol."""
        with self._translated():
            while True:
                with suppress(WatchError):  # another run has written to the note meanwhile
                    return self._write(batch)

    def _write(self, batch: RecordsToWrite) -> Sequence[RefusedRecord]:
        stream = self._sink.stream
        with self._client.pipeline(transaction=True) as pipe:
            _watch(pipe, self._note_key)
            noted = pipe.hgetall(self._note_key)
            if noted.get(b"token") != self._token.encode():
                raise FencedError(
                    f"another sink {self._name!r} has begun. This one ends; run one of a name at a time."
                )
            note = BatchNote.from_json(noted.get(b"note"))
            if note is not None and note.batch.number == batch.number:
                return note.refused
            if stream is not None and pipe.type(stream) not in (b"none", b"stream"):
                raise ConfigError(
                    f"{stream!r} of {self._sink.shown} is no stream. Give another name, or remove it."
                )
            pipe.multi()
            add = self._add_hash if stream is None else self._add_entry
            refused = [reason for record in batch.records if (reason := add(pipe, record))]
            pipe.hset(self._note_key, "note", BatchNote.of(batch, refused).to_json())
            self._execute(pipe, noted.get(b"note"))
        return refused

    def _execute(self, pipe: Any, noted: Any) -> None:
        """Execute a transaction. Redis takes nothing back of one in which a command fails, so the note is taken back here.

        Only what the name of the stream holds can have changed since it was looked at: then no entry was added.
        """
        try:
            pipe.execute()
        except ResponseError:
            if noted is None:
                self._client.hdel(self._note_key, "note")
            else:
                self._client.hset(self._note_key, "note", noted)
            raise

    def close(self) -> None:
        """End the connection."""
        with suppress(RedisError):
            self._client.close()

    # ── records ─────────────────────────────────────────────────────────────────────────────

    def _add_hash(self, pipe: Any, record: SinkRecord) -> RefusedRecord | None:
        """Replace or delete the hash of a record's key; return why, if that cannot be."""
        if record.key is None:
            return _refused(record, "it has no key, and a hash is named by the key")
        name = f"{self._sink.hashes}".encode() + record.key
        if name == self._note_key.encode():
            return _refused(
                record, "its hash would have the name of the sink's own. Give other hashes="
            )
        try:
            fields = None if record.row is None else _fields(record.row)
        except RecursionError:
            return _refused(record, _TOO_DEEP)
        if fields == {}:
            return _refused(
                record, "it has no field that is not null, and Redis keeps no empty hash"
            )
        pipe.delete(name)
        if fields is not None:
            pipe.hset(name, mapping=fields)
        return None

    def _add_entry(self, pipe: Any, record: SinkRecord) -> RefusedRecord | None:
        """Add an entry to the stream; return why, if that cannot be."""
        if record.row is None:
            return _refused(record, "it is a tombstone, and a stream has nothing to delete")
        try:
            fields = _fields(record.row)
        except RecursionError:
            return _refused(record, _TOO_DEEP)
        if not fields:
            return _refused(
                record, "it has no field that is not null, and Redis takes no empty entry"
            )
        pipe.xadd(self._sink.stream, fields, maxlen=self._sink.length, approximate=True)
        return None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        shown = self._sink.shown
        with translated_redis_errors(
            shown,
            who="the sink",
            password_variable=SINK_PASSWORD_VARIABLE,
            refused="refused to be written to: {error}. Correct that.",
        ):
            try:
                yield
            except OutOfMemoryError:
                raise RetriableError(
                    f"{shown} has no memory left (maxmemory). It is tried again: give it more, or remove something."
                ) from None


def _watch(pipe: Any, key: str) -> None:
    pipe.watch(key)


def _refused(record: SinkRecord, reason: str) -> RefusedRecord:
    return RefusedRecord(record.partition, record.offset, reason)


def _fields(row: Any) -> dict[bytes, bytes]:
    """Return the fields of a row: text as it is, other values as JSON, and no null."""
    return {
        _bytes(name): _bytes(value if isinstance(value, str) else json_text(value))
        for name, value in row.items()
        if value is not None
    }


def _bytes(text: str) -> bytes:
    """Return text in UTF-8; half of a surrogate pair, which JSON may have, is written as JSON writes it."""
    return text.encode("utf-8", "backslashreplace")
