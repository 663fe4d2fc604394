"""Messages of pgoutput, protocol version 1: bytes in, tuples out.

Source: PostgreSQL 15, "Logical Replication Message Formats".
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import Enum
from typing import Final, Literal, NamedTuple, TypeAlias

from millstream.errors import CorruptionError

WAL_HEADER_BYTES = 25  # before a message in the stream: w, its place, the end of the WAL, a time
# Of an insertion, an update without old values and a deletion: kind, oid, kind of tuple, number of columns.
RUN_TAG = slice(WAL_HEADER_BYTES, WAL_HEADER_BYTES + 8)
_EPOCH_US = (
    946_684_800_000_000  # 2000-01-01, from which PostgreSQL counts, in microseconds since 1970
)


class Unchanged(Enum):
    """What stands for a large value that an update did not change, and that the server does not send."""

    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED
PgTuple: TypeAlias = list[str | Literal[Unchanged.UNCHANGED] | None]


class PgColumn(NamedTuple):
    """A column of a table, and whether it is of the replica identity."""

    name: str
    type_oid: int
    type_modifier: int
    in_identity: bool


class PgBegin(NamedTuple):
    """``final_lsn`` is the place of the commit: it identifies the transaction."""

    final_lsn: int
    timestamp_us: int
    xid: int


class PgCommit(NamedTuple):
    """The end of a transaction; the WAL before ``end_lsn`` has all of it."""

    commit_lsn: int
    end_lsn: int


class PgRelation(NamedTuple):
    """``identity`` is that of pg_class: d(efault), n(othing), f(ull), i(ndex)."""

    oid: int
    schema: str
    table: str
    identity: str
    columns: tuple[PgColumn, ...]


class PgChange(NamedTuple):
    """``old_kind`` is "K" if ``old`` has the identity's columns alone, "O" if all."""

    op: Literal["c", "u", "d"]
    oid: int
    old_kind: str
    old: PgTuple | None
    new: PgTuple | None


class PgTruncate(NamedTuple):
    """Tables are emptied by one statement."""

    oids: tuple[int, ...]


class PgLogicalMessage(NamedTuple):
    """What an application gave to pg_logical_emit_message; not ``transactional``: whatever became of its transaction."""

    transactional: bool
    prefix: str
    data: bytes


PgMessage: TypeAlias = PgBegin | PgCommit | PgRelation | PgChange | PgTruncate | PgLogicalMessage


def decode_message(data: bytes) -> PgMessage | None:
    """Return a message; None for those that concern no row: types and origins.

    Raises:
        CorruptionError: it is cut short, or of a kind that this protocol version does not have.
    """
    try:
        return _decode(data)
    except (struct.error, IndexError, ValueError) as error:
        raise CorruptionError(
            f"a message of PostgreSQL's replication stream cannot be read ({error}): {data[:20].hex()}… "
            "Run the capture again; if it stays so, report it."
        ) from error


def _decode(data: bytes) -> PgMessage | None:
    kind = data[:1]
    if kind in (b"Y", b"O"):
        return None
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise CorruptionError(
            f"PostgreSQL's replication stream has a message of kind {kind!r}, which protocol version 1 does not know. "
            "Capture with a later version of Millstream."
        )
    return decoder(data)


def _insert(data: bytes) -> PgChange:
    (oid,) = struct.unpack_from(">I", data, 1)
    return PgChange("c", oid, "", None, _tuple(data, 6)[0])


def _delete(data: bytes) -> PgChange:
    (oid,) = struct.unpack_from(">I", data, 1)
    return PgChange("d", oid, chr(data[5]), _tuple(data, 6)[0], None)


def _begin(data: bytes) -> PgBegin:
    final, at, xid = struct.unpack_from(">QqI", data, 1)
    return PgBegin(final, at + _EPOCH_US, xid)


def _commit(data: bytes) -> PgCommit:
    return PgCommit(*struct.unpack_from(">QQ", data, 2))


def _truncate(data: bytes) -> PgTruncate:
    (count,) = struct.unpack_from(">I", data, 1)
    return PgTruncate(struct.unpack_from(f">{count}I", data, 6))


def _logical(data: bytes) -> PgLogicalMessage:
    prefix, at = _text(data, 10)
    (length,) = struct.unpack_from(">I", data, at)
    if at + 4 + length > len(data):
        raise IndexError("it is cut short")
    return PgLogicalMessage(bool(data[1] & 1), prefix, data[at + 4 : at + 4 + length])


def _update(data: bytes) -> PgChange:
    (oid,) = struct.unpack_from(">I", data, 1)
    kind, at, old = chr(data[5]), 6, None
    if kind != "N":
        old, at = _tuple(data, 6)
        at += 1
    return PgChange("u", oid, "" if kind == "N" else kind, old, _tuple(data, at)[0])


def _tuple(data: bytes, at: int) -> tuple[PgTuple, int]:
    (count,) = struct.unpack_from(">H", data, at)
    at += 2
    values: PgTuple = []
    for _ in range(count):
        kind = data[at]
        at += 1
        if kind == 0x74:  # t
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            if end > len(data):
                raise IndexError("it is cut short")
            values.append(data[at + 4 : end].decode())
            at = end
        elif kind == 0x6E:  # n
            values.append(None)
        elif kind == 0x75:  # u
            values.append(UNCHANGED)
        else:
            raise IndexError(f"a column is of kind {kind}")
    return values, at


def _relation(data: bytes) -> PgRelation:
    (oid,) = struct.unpack_from(">I", data, 1)
    schema, at = _text(data, 5)
    table, at = _text(data, at)
    identity = chr(data[at])
    (count,) = struct.unpack_from(">H", data, at + 1)
    at += 3
    columns = []
    for _ in range(count):
        flags = data[at]
        name, at = _text(data, at + 1)
        type_oid, modifier = struct.unpack_from(">Ii", data, at)
        at += 8
        columns.append(PgColumn(name, type_oid, modifier, bool(flags & 1)))
    return PgRelation(oid, schema or "pg_catalog", table, identity, tuple(columns))


def _text(data: bytes, at: int) -> tuple[str, int]:
    end = data.index(0, at)
    return data[at:end].decode(), end + 1


_DECODERS: dict[bytes, Callable[[bytes], PgMessage]] = {
    b"I": _insert,
    b"U": _update,
    b"D": _delete,
    b"B": _begin,
    b"C": _commit,
    b"R": _relation,
    b"T": _truncate,
    b"M": _logical,
}


def is_change(data: bytes) -> bool:
    """Return whether a message, behind its header, is of a row."""
    return data[WAL_HEADER_BYTES] in b"IUD"


def lsn_text(lsn: int) -> str:
    """Return a place in the WAL as PostgreSQL writes it: ``0/16B3748``."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """Return the number of a place in the WAL."""
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) | int(low, 16)
