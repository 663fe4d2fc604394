"""Redis as a target: a hash for each row, written with the state in one transaction of the server.

A row of ``public.orders`` with the key ``{"id":7}`` is the hash ``<name>:public.orders:{"id":7}``, with the columns as
fields; a column that is null has no field. ``<name>:public.orders`` is the set of the table's keys. The state is
``<name>:_millstream_apply``.

A batch is gathered here, and sent as one ``MULTI … EXEC``, which Redis runs as a whole or not at all. The state's key is
watched meanwhile: if another one has taken it over, nothing runs. What a crash of the *server* keeps is up to its
settings: with ``appendonly yes`` and ``appendfsync always`` all that was committed; else it may go back a moment, with
the state, and what is missing is applied again.

Source: Redis, "Transactions", "Optimistic locking using check-and-set", "Redis persistence".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from redis.exceptions import RedisError, WatchError

from millstream.capture.apply.applied_table import AppliedTable, Row, RowBatch
from millstream.capture.apply.captured_types import CapturedType, text_of
from millstream.capture.apply.target import PASSWORD_VARIABLE
from millstream.capture.envelope import to_json
from millstream.errors import ConfigError, FencedError, RetriableError
from millstream.redis_client import open_redis, shown_redis_address, translated_redis_errors

_SCANNED = 1000
_STATE = "_millstream_apply"


class RedisTarget:
    """Applies to a database of Redis; see :class:`millstream.capture.apply.target.ApplyTarget` for the methods."""

    batch_s = 0.0

    def __init__(self, url: str, password: str | None) -> None:
        self.shown = shown_redis_address(url)
        with self._translated():
            self._client = open_redis(url, password)
        self._pending: dict[str, dict[bytes, Row | None]] = {}
        self._truncated: set[str] = set()
        self._tables: dict[str, AppliedTable] = {}

    def close(self) -> None:
        with suppress(RedisError):
            self._client.close()

    # ── the state ───────────────────────────────────────────────────────────────────────────

    @property
    def _state_key(self) -> str:
        return f"{self._name}:{_STATE}"

    def acquire(self, name: str, token: str, *, again: bool) -> str | None:
        self._name, self._token = name, token
        with self._translated(), self._client.pipeline() as pipe:
            _watch(pipe, self._state_key)
            found: Any = pipe.hgetall(self._state_key)
            if again and found.get(b"token") != token.encode():
                raise self._fenced()
            pipe.multi()
            pipe.hset(self._state_key, "token", token)
            pipe.execute()
        state = found.get(b"state")
        return None if state is None else state.decode()

    def _check_token(self, client: Any) -> None:
        if client.hget(self._state_key, "token") != self._token.encode():
            raise self._fenced()

    def _fenced(self) -> FencedError:
        return FencedError(
            f"another `millstream apply` or `millstream reconcile` of {self._name!r} has begun to write to "
            f"{self.shown}. This one ends; run one at a time."
        )

    # ── a batch ─────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        self.rollback()
        with self._translated():
            self._check_token(self._client)

    def rollback(self) -> None:
        self._pending.clear()
        self._truncated.clear()

    def commit(self, state: str) -> None:
        with self._translated(), self._client.pipeline() as pipe:
            _watch(pipe, self._state_key)
            self._check_token(pipe)
            gone = {name: _members(pipe, self._set(name)) for name in self._truncated}
            pipe.multi()
            for name, keys in gone.items():
                self._delete(pipe, name, keys)
            for name, rows in self._pending.items():
                self._put(pipe, name, rows)
            pipe.hset(self._state_key, "state", state)
            pipe.execute()
        self.rollback()

    def _put(self, pipe: Any, name: str, rows: dict[bytes, Row | None]) -> None:
        table = self._tables[name]
        self._delete(pipe, name, [key for key, row in rows.items() if row is None])
        kept = [(key, row) for key, row in rows.items() if row is not None]
        for key, row in kept:
            fields = {column: _field(value) for column, value in row.items() if value is not None}
            nulls = [column for column in table.types if row.get(column) is None]
            if nulls:
                pipe.hdel(self._row(name, key), *nulls)
            pipe.hset(self._row(name, key), mapping=fields)
        if kept:
            pipe.sadd(self._set(name), *[key for key, _ in kept])

    def _delete(self, pipe: Any, name: str, keys: Sequence[bytes]) -> None:
        for first in range(0, len(keys), _SCANNED):
            part = keys[first : first + _SCANNED]
            pipe.delete(*[self._row(name, key) for key in part])
            pipe.srem(self._set(name), *part)

    def _set(self, name: str) -> str:
        return f"{self._name}:{name}"

    def _row(self, name: str, key: bytes) -> bytes:
        return f"{self._name}:{name}:".encode() + key

    def define(self, table: AppliedTable, before: AppliedTable | None) -> None:
        with self._translated():
            if before is None and self._client.exists(self._set(table.collection)):
                raise ConfigError(
                    f"{self.shown} has the key {self._set(table.collection)!r}, which `millstream apply` has not written. "
                    "Apply into another database (redis://host:6379/1), or delete it."
                )
        self._tables[table.collection] = table

    def truncate(self, table: AppliedTable) -> None:
        self._tables.setdefault(table.collection, table)
        self._pending.pop(table.collection, None)
        self._truncated.add(table.collection)

    def write(self, batch: RowBatch) -> None:
        self._tables[batch.table.collection] = batch.table
        rows = self._pending.setdefault(batch.table.collection, {})
        for key in batch.deletes:
            rows[self._key(batch.table, key)] = None
        for row in batch.upserts:
            rows[self._key(batch.table, row)] = row

    def _key(self, table: AppliedTable, row: Row) -> bytes:
        return to_json({name: row[name] for name in table.key})

    def rows(self, table: AppliedTable, keys: Sequence[Row]) -> Iterator[Row]:
        pending = self._pending.get(table.collection, {})
        stored = []
        for row in keys:
            key = self._key(table, row)
            if key not in pending:
                stored.append(key)
            elif (found := pending[key]) is not None:
                yield found
        if stored and table.collection not in self._truncated:
            yield from self._stored(table, stored)

    def _stored(self, table: AppliedTable, keys: Sequence[bytes]) -> Iterator[Row]:
        with self._translated(), self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hgetall(self._row(table.collection, key))
            for fields in pipe.execute():
                if fields:
                    yield _row_of(table, fields)

    def scan(self, table: AppliedTable) -> Iterator[Row]:
        with self._translated():
            keys: list[bytes] = []
            for key in self._client.sscan_iter(self._set(table.collection), count=_SCANNED):
                keys.append(key)
                if len(keys) >= _SCANNED:
                    yield from self._stored(table, keys)
                    keys = []
            yield from self._stored(table, keys)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        with translated_redis_errors(
            self.shown,
            who="what is applied",
            password_variable=PASSWORD_VARIABLE,
            refused="refused what was applied: {error}. Correct that, and apply again.",
        ):
            try:
                yield
            except WatchError as error:
                # The library's words for a connection that broke.
                if "occurred while watching" not in str(error):
                    raise self._fenced() from None
                raise RetriableError(
                    f"{self.shown} does not respond as it should: {error}. It is tried again."
                ) from None


def _members(pipe: Any, key: str) -> list[bytes]:
    """Return the keys of a table; the pipeline watches, so it asks at once."""
    return sorted(pipe.smembers(key))


def _watch(pipe: Any, key: str) -> None:
    pipe.watch(key)


def _field(value: Any) -> str:
    """Return a value as a field has it: text as it is, anything else as JSON."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return text_of(value)


def _row_of(table: AppliedTable, fields: dict[bytes, bytes]) -> Row:
    row = {}
    for name, kind in table.columns:
        found = fields.get(name.encode())
        row[name] = None if found is None else _value(kind, found.decode())
    return row


def _value(kind: CapturedType, text: str) -> Any:
    """Return the captured value of a field."""
    if kind.kind in ("int16", "int32", "int64", "uint64", "boolean", "array"):
        return json.loads(text)
    if kind.kind in ("float32", "float64"):
        return text if text[-1:] in "yN" else float(text)
    return text
