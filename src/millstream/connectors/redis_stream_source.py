"""RedisStreamSource: the entries of streams of Redis, each once and in order.

The position in a stream is the id of the last entry, with how many were read. A stream may be trimmed (``MAXLEN``), also of
entries that were not read. Redis counts what was ever added, so they are noticed: with each read, in one transaction of
the server, what was added is compared with what is there and what was read.

====================================  ===================================================================
what is found                         what follows
====================================  ===================================================================
more entries are gone than were read  ``lost``: the source stops; or goes on, with an alarm
the last id is before the position    another stream, or one that was restored: the source stops
fewer were added, or are gone, than   the same
were read
an entry without the field of values  a dead letter
====================================  ===================================================================

Source: Redis, "XREAD", "XINFO STREAM" (entries-added, since Redis 7).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from dataclasses import field as _field
from typing import Any, Literal, TypeAlias, cast

from redis.exceptions import RedisError

from millstream.connectors.batch_rows import BatchRows
from millstream.connectors.connector import (
    BYTES_MAX,
    RECORDS_MAX,
    Guarantee,
    Position,
    SourceBatch,
)
from millstream.connectors.record_fields import RecordFields
from millstream.connectors.source_password import PASSWORD_VARIABLE, source_password
from millstream.errors import ConfigError, ConflictError
from millstream.redis_client import open_redis, shown_redis_address, translated_redis_errors

Lost = Literal["stop", "skip"]
_EntryId: TypeAlias = tuple[int, int]
_LAST_MS = 253_402_300_799_999  # of the year 9999
_ENTRIES = 5_000  # read at once, of each stream
_ENTRIES_FIRST = 100  # as long as it is not known how large they are: Redis bounds an answer only by their number
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class RedisStreamSource:
    """A source connector, made by :func:`millstream.connectors.redis_stream.redis_stream`."""

    url: str = _field(repr=False)  # it may have a password
    streams: tuple[str, ...]
    field: str | None
    fields: RecordFields
    lost: Lost = "stop"
    entries: int = _ENTRIES
    records_max: int = RECORDS_MAX
    kind: str = "redis-stream"
    guarantee: Guarantee = "each once"

    @property
    def origin(self) -> str:
        """The address, without its password."""
        return shown_redis_address(self.url)

    def open(self, positions: Mapping[str, Position]) -> RedisStreamReader:
        """Return what reads on; see :class:`~millstream.connectors.connector.SourceConnector`."""
        return RedisStreamReader(self, positions)


@dataclass(slots=True)
class _Stream:
    """How far a stream was read. ``gone`` entries of it are gone without having been read, as is known and consented to.

    ``entry_bytes`` is what an entry had, on average, when some were last read.
    """

    last: _EntryId = (0, 0)
    read: int = 0
    gone: int | None = None
    entry_bytes: int = BYTES_MAX // _ENTRIES_FIRST

    @property
    def id(self) -> str:
        return f"{self.last[0]}-{self.last[1]}"


class RedisStreamReader:
    """Reads entries; see :class:`~millstream.connectors.connector.SourceReader`."""

    def __init__(self, source: RedisStreamSource, positions: Mapping[str, Position]) -> None:
        self.alarm = ""
        self._source = source
        self._streams = {name: _Stream() for name in source.streams}
        self._turns = deque(self._streams)
        for name, position in positions.items():
            if name not in self._streams:  # it was read once, and is not asked for now
                continue
            try:
                last, read, gone = position["id"], position["read"], position["gone"]
                self._streams[name] = _Stream(_parsed(last), read, gone)
            except (TypeError, KeyError, ValueError) as error:
                raise ConflictError(
                    f"the position of {name!r} is {position!r}, which is none in a stream of Redis. Give the source another name."
                ) from error
        with self._translated():
            self._client = open_redis(source.url, source_password(source.url))

    def read(self, wait_s: float) -> SourceBatch | None:
        """Return the next entries of all streams, stream by stream; see the protocol."""
        with self._translated():
            batch = self._read()
            if batch is None and wait_s > 0:
                places = {name: stream.id for name, stream in self._streams.items()}
                # This only waits: what there is, is read together with how much is gone.
                self._client.xread(cast("Any", places), count=1, block=max(1, int(wait_s * 1000)))
                batch = self._read()
        return batch

    def stored(self, batch: SourceBatch) -> None:
        """Do nothing: positions are in the log."""

    def close(self) -> None:
        """End the connection."""
        with suppress(RedisError):
            self._client.close()

    # ── one read ────────────────────────────────────────────────────────────────────────────

    def _read(self) -> SourceBatch | None:
        rows = BatchRows(self._source.fields, self._source.records_max)
        positions: dict[str, Position] = {}
        ready_ms: int | None = None
        for _ in self._streams:
            if rows.is_full:  # the streams that are left begin the next batch
                break
            name = self._turns[0]
            self._turns.rotate(-1)
            stream = self._streams[name]
            before = (stream.read, stream.gone)
            if self._read_stream(name, stream, rows):
                ready_ms = max(stream.last[0], ready_ms or 0)
            if (stream.read, stream.gone) != before:
                positions[name] = {"id": stream.id, "read": stream.read, "gone": stream.gone}
        return rows.take(positions, ready_ms) if positions else None

    def _read_stream(self, name: str, stream: _Stream, rows: BatchRows) -> int:
        """Add the next entries of a stream until the batch is full; return how many."""
        room = max(1, (BYTES_MAX - rows.value_bytes) // max(1, stream.entry_bytes))
        wanted = min(self._source.entries, self._source.records_max - rows.count, room)
        info, entries = self._look(name, stream, wanted)
        if info is None:
            if stream.last > (0, 0):
                raise self._another(name, "it is gone")
            return 0
        self._compare(name, stream, info)
        taken = 0
        for entry_id, fields in entries:
            if rows.is_full:
                break
            self._add(rows, name, entry_id, fields)
            taken += 1
        if taken:
            stream.last = _parsed(entries[taken - 1][0].decode())
            stream.read += taken
            stream.entry_bytes = sum(map(_size, entries)) // len(entries)
        return taken

    def _look(
        self, name: str, stream: _Stream, wanted: int
    ) -> tuple[Mapping[str, Any] | None, Sequence[tuple[bytes, Mapping[bytes, bytes]]]]:
        """Return what the server says of a stream, and the next entries, at one moment; None of one that is not there."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.exists(name)
            pipe.xinfo_stream(name)
            pipe.xrange(name, f"({stream.id}", "+", count=wanted)
            exists, info, entries = pipe.execute(raise_on_error=False)
        if not exists:
            return None, ()
        for answer in (info, entries):
            if isinstance(answer, Exception):
                raise answer
        if "entries-added" not in info:
            raise ConfigError(
                f"{self._source.origin} does not count the entries that were added to a stream. Give a server of Redis 7 or later."
            )
        return info, entries

    def _compare(self, name: str, stream: _Stream, info: Mapping[str, Any]) -> None:
        """Note what is gone unread.

        Raises:
            ConflictError: more is gone than when it was read last; or it is another stream.
        """
        if _parsed(info["last-generated-id"].decode()) < stream.last:
            raise self._another(name, f"its last id is {info['last-generated-id'].decode()}")
        if info["entries-added"] < (stream.gone or 0) + stream.read:  # its ids go on with the clock
            raise self._another(name, f"only {info['entries-added']:,} entries were ever added")
        gone = info["entries-added"] - info["length"]
        if stream.gone is None:  # read for the first time: what was trimmed before is nobody's loss
            stream.gone = gone
            return
        first = info["first-entry"]
        if first is not None and _parsed(first[0].decode()) <= stream.last:
            return  # what was trimmed had been read
        lost = gone - stream.gone - stream.read
        if lost < 0:  # none of those that were read are there, and fewer than they are gone
            raise self._another(name, f"of {info['entries-added']:,} entries {gone:,} are gone")
        if not lost:
            return
        text = f"{lost:,} entries of the stream {name!r} were trimmed before they were read, behind {stream.id}"
        if self._source.lost == "stop":
            raise ConflictError(
                f"{text}. Give lost='skip', to go on without them; and the stream a larger MAXLEN, or none."
            )
        self.alarm = text
        stream.gone += lost

    def _another(self, name: str, found: str) -> ConflictError:
        return ConflictError(
            f"{name!r} of {self._source.origin} is not the stream that was read: {found}, and {self._streams[name].id} was read. "
            "It was made anew, or restored. Give the source another name: it reads the stream from its beginning."
        )

    def _add(
        self, rows: BatchRows, name: str, entry_id: bytes, fields: Mapping[bytes, bytes]
    ) -> None:
        try:
            value, event = self._value(fields)
            time_ms = None if rows.fields.time is not None else _time_ms(entry_id)
            rows.add(value, event, timestamp_ms=time_ms)
        except (ValueError, RecursionError) as error:
            reason = str(error)
            if isinstance(error, UnicodeDecodeError):
                reason = "it is no UTF-8: give field=, for values that are bytes"
            raw = b"".join(b"%s: %s\n" % pair for pair in fields.items())
            rows.add_dead(raw, f"{name}, entry {entry_id.decode()}", reason)

    def _value(self, fields: Mapping[bytes, bytes]) -> tuple[bytes, Mapping[str, Any]]:
        """Return the value of an entry, and the event in which its key and time are."""
        if self._source.field is None:
            event = {name.decode(): value.decode() for name, value in fields.items()}
            return _ENCODE(event).encode(), event
        found = fields.get(self._source.field.encode())
        if found is None:
            names = ", ".join(name.decode(errors="replace") for name in fields)
            raise ValueError(f"it has no field {self._source.field!r}, but {names}")
        if self._source.fields == RecordFields():
            return found, {}
        decoded = json.loads(found)
        return found, decoded if isinstance(decoded, dict) else {}

    def _translated(self) -> AbstractContextManager[None]:
        return translated_redis_errors(
            self._source.origin,
            who="the source",
            password_variable=PASSWORD_VARIABLE,
            refused="refused to be read: {error}. Correct that.",
        )


def _parsed(text: str) -> _EntryId:
    time_ms, _, number = text.partition("-")
    return int(time_ms), int(number)


def _time_ms(entry_id: bytes) -> int:
    """Return the time in an id; who adds an entry may give any number."""
    return min(_parsed(entry_id.decode())[0], _LAST_MS)


def _size(entry: tuple[bytes, Mapping[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) for name, value in entry[1].items())
