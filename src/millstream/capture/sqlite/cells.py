"""Many rows of one table at once: the texts that triggers wrote, by column.

A row by itself is read by ``encoding.py``; here are the same rules for many, without a Python object for a value of a
plain column: one whose values, besides null, are all of one type. What no trigger writes is left to the reader of
single rows, which says what it is: :func:`row_block` gives None.
"""

from __future__ import annotations

import json
from binascii import b2a_base64
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.capture.json_columns import (
    Cells,
    Fragments,
    as_texts,
    as_they_are,
    data_of,
    joined,
    objects_of,
    with_nulls,
)
from millstream.capture.sqlite.encoding import decoded_value, json_value
from millstream.capture.sqlite.table_info import SqliteTable
from millstream.capture.units import RowBlock
from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_ROWS_MIN = 24  # measured: fewer rows are read quicker one by one
_NULL, _COMMA = ord("n"), ord(",")
_NO_DIGIT = 255
_HEXADECIMAL = np.full(256, _NO_DIGIT, np.uint8)
_HEXADECIMAL[np.frombuffer(b"0123456789ABCDEF", np.uint8)] = np.arange(16)
_OF_INTEGERS = np.zeros(256, np.bool_)
_OF_INTEGERS[np.frombuffer(b"-0123456789", np.uint8)] = True


def row_block(
    database: str,
    table: SqliteTable,
    op: Literal["c", "u", "d", "r"],
    rows: Sequence[str],
    before: Sequence[str] | None = None,
) -> RowBlock | None:
    """Return rows of a table as a block; None where they are to be read one by one.

    Args:
        rows: As they are after the change, of ``d`` before it.
        before: Of ``u``, as they were before it.
    """
    if len(rows) < BLOCK_ROWS_MIN:
        return None
    try:
        shown, keys = _objects(table, rows)
        if before is None:
            old = None
        else:
            old, old_keys = _objects(table, before)
            if not pc.all(pc.equal(old_keys, keys)).as_py():
                return None
    except (ValueError, MillstreamError, pa.ArrowException):
        return None  # one by one it is seen which
    return RowBlock(database, table.name, op, frozenset(table.column_names), shown, keys, old)


def _objects(table: SqliteTable, rows: Sequence[str]) -> tuple[pa.Array, pa.Array]:
    """Return rows, and their keys, as JSON."""
    encoded = {
        name: _encoded(kinds, cells, table, name)
        for name, (kinds, cells) in zip(
            table.column_names, _columns(rows, len(table.columns)), strict=True
        )
    }
    keys = objects_of(encoded, table.key, len(rows))
    return objects_of(encoded, table.column_names, len(rows)), keys


def _columns(rows: Sequence[str], width: int) -> Iterator[tuple[NDArray[np.uint8], Cells]]:
    """Yield of each column the letters that its values begin with, and what follows them."""
    data = ",".join([*rows, ""]).encode()
    buffer = np.frombuffer(data, np.uint8)
    commas = np.flatnonzero(buffer == _COMMA)
    if len(commas) != len(rows) * width:
        raise ValueError("a row has not as many values as the table has columns")
    ends = commas.reshape(len(rows), width)
    row_ends = np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)) + 1) - 1
    if (ends[:, -1] != row_ends).any():
        raise ValueError("a row has not as many values as the table has columns")
    starts = np.empty_like(ends)
    starts.ravel()[0] = 0
    starts.ravel()[1:] = ends.ravel()[:-1] + 1
    for at in range(width):
        kinds, lengths = buffer[starts[:, at]], ends[:, at] - starts[:, at] - 1
        null = kinds == _NULL
        if (lengths < 0).any() or lengths[null].any():
            raise ValueError("a value is no letter and its text")
        yield kinds, Cells(buffer, starts[:, at] + 1, np.where(null, -1, lengths))


def _encoded(kinds: NDArray[np.uint8], cells: Cells, table: SqliteTable, name: str) -> Fragments:
    nulls, is_blob = cells.nulls, table.is_blob(name)
    if nulls is not None and name in table.key:
        raise ValueError("a key has a null")
    letters = np.unique(kinds if nulls is None else kinds[~nulls])
    kind = chr(letters[0]) if len(letters) == 1 else ""
    if kind == "i":
        return _integers(cells)
    if kind == "t":
        return _texts(_unhexed(cells), is_blob=is_blob)
    if kind == "b":
        return _bytes(_unhexed(cells), is_blob=is_blob)
    return _any(kinds, cells, table.name, is_blob=is_blob)


def _integers(cells: Cells) -> Fragments:
    if not (cells.lengths != 0).all():
        raise ValueError("a number has no digits")
    if not _OF_INTEGERS[data_of(cells.gathered())].all():
        raise ValueError("a number has a letter")
    return as_they_are(cells)


def _unhexed(cells: Cells) -> Cells:
    """Return the bytes of which the cells have the hexadecimal digits."""
    lengths = np.maximum(cells.lengths, 0)
    digits = _HEXADECIMAL[data_of(cells.gathered())]
    if (lengths % 2).any() or (digits == _NO_DIGIT).any():
        raise ValueError("bytes are not hexadecimal digits")
    data: NDArray[np.uint8] = (digits[::2] << 4 | digits[1::2]).astype(np.uint8)
    ends = np.cumsum(lengths // 2)
    halved = np.where(cells.lengths < 0, -1, lengths // 2)
    return Cells(data, ends - lengths // 2, halved)


def _texts(cells: Cells, *, is_blob: bool) -> Fragments:
    found = as_texts(cells)
    if not is_blob:
        return found
    plain = joined([b'{"text":' + found.quote, found.column, found.quote + b"}"])
    return with_nulls(cells, Fragments(plain))


def _bytes(cells: Cells, *, is_blob: bool) -> Fragments:
    shown = [b2a_base64(data, newline=False) for data in cells.gathered().to_pylist()]
    column = pa.array(shown, pa.binary())
    if not is_blob:
        column = joined([b'{"blob":"', column, b'"}'])
    return with_nulls(cells, Fragments(column, b'"' if is_blob else b""))


def _any(kinds: NDArray[np.uint8], cells: Cells, table: str, *, is_blob: bool) -> Fragments:
    """Values of several types, and numbers with a fraction, one by one."""
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
    shown: list[Any] = []
    for kind, text in zip(kinds.tolist(), cells.texts(), strict=True):
        value = decoded_value(chr(kind) + (text or ""), table)
        shown.append(encode(json_value(value, is_blob=is_blob)).encode())
    return Fragments(pa.array(shown, pa.binary()))
