"""Columns of texts into a column of JSON objects, without a Python object for each value.

A source that has many rows of one table has their texts in one buffer: :class:`Cells` says where those of a column
are. Each column becomes one of fragments of JSON, and :func:`objects_of` joins those of a row. The result is, byte
for byte, what :func:`~millstream.capture.envelope.to_json` makes of the row as a mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from numpy.typing import NDArray

Int64s: TypeAlias = "NDArray[np.int64]"

_NOTHING = pa.scalar(b"")
_SMALL_END = 1 << 15
# What JSON has as an escape in a text.
_ESCAPED = np.zeros(256, np.bool_)
_ESCAPED[:32] = True
_ESCAPED[[ord('"'), ord("\\")]] = True


@dataclass(frozen=True)
class Cells:
    """A column's texts in UTF-8: ``buffer[start : start + length]`` of each row; a length of -1 is null.

    Starts never decrease, and texts do not overlap. They are within 2 GiB.
    """

    buffer: NDArray[np.uint8]
    starts: Int64s
    lengths: Int64s

    @property
    def nulls(self) -> NDArray[np.bool_] | None:
        """Which rows are null; None if none is."""
        absent = self.lengths < 0
        return absent if absent.any() else None

    def gathered(self) -> pa.Array:
        """Return the texts one after another; those of nulls are empty."""
        count = len(self.starts)
        bounds = np.empty(2 * count, np.int32)
        bounds[::2] = self.starts
        bounds[1::2] = self.starts + np.maximum(self.lengths, 0)
        data = pa.py_buffer(self.buffer)
        pieces = pa.Array.from_buffers(
            pa.binary(), max(2 * count - 1, 0), [None, pa.py_buffer(bounds), data]
        )
        return pieces.take(pa.array(np.arange(0, 2 * count, 2)))

    def texts(self) -> list[str | None]:
        """Return the texts as Python has them: for what has no shorter way.

        Raises:
            ValueError: one is not UTF-8.
        """
        found = [cell.decode() for cell in self.gathered().to_pylist()]
        nulls = self.nulls
        if nulls is None:
            return list(found)
        return [
            None if absent else cell for cell, absent in zip(found, nulls.tolist(), strict=True)
        ]


def as_cells(texts: Sequence[str | None]) -> Cells:
    """Return texts as a column's cells."""
    return cells_of(
        pa.array([None if text is None else text.encode() for text in texts], pa.binary())
    )


def cells_of(column: pa.Array) -> Cells:
    """Return the bytes of an array that begins at 0 as a column's cells."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[: len(column) + 1].astype(np.int64)
    lengths = np.diff(offsets)
    if column.null_count:
        lengths[np.asarray(column.is_null())] = -1
    data = column.buffers()[2]
    buffer = np.frombuffer(data if data is not None else b"", np.uint8)
    return Cells(buffer, offsets[:-1], lengths)


class Fragments(NamedTuple):
    """A column of JSON: each text of ``column`` between two ``quote``."""

    column: pa.Array
    quote: bytes = b""


ColumnEncoder: TypeAlias = Callable[[Cells], Fragments]


def objects_of(columns: Mapping[str, Fragments], names: Sequence[str], count: int) -> pa.Array:
    """Return ``count`` JSON objects, whose members are these columns, in this order."""
    if not names:
        return pa.array([b"{}"] * count, pa.binary())
    pieces: list[Any] = []
    before = b"{"
    for name in names:
        column, quote = columns[name]
        pieces += (before + encode_basestring(name).encode() + b":" + quote, column)
        before = quote + b","
    pieces.append(before[:-1] + b"}")
    return joined(pieces)


def joined(pieces: Sequence[Any]) -> pa.Array:
    """Return, for each row, the bytes of columns and constants one after another."""
    columns = (pa.scalar(piece) if isinstance(piece, bytes) else piece for piece in pieces)
    return pc.binary_join_element_wise(*columns, _NOTHING)


def numbers(values: Int64s) -> pa.Array:
    """Return whole numbers as texts."""
    return pa.array(values).cast(pa.string()).cast(pa.binary())


def counted(first: int, end: int) -> pa.Array:
    """Return the numbers of [first, end) as texts."""
    return _small_numbers()[first:end] if end <= _SMALL_END else numbers(np.arange(first, end))


@cache
def _small_numbers() -> pa.Array:
    """Return those below ``_SMALL_END``, to which transactions count again and again."""
    return numbers(np.arange(_SMALL_END))


# ── encoders ────────────────────────────────────────────────────────────────────────────────


def as_they_are(cells: Cells) -> Fragments:
    """Texts that are JSON: whole numbers."""
    return with_nulls(cells, Fragments(cells.gathered()))


def as_booleans(cells: Cells) -> Fragments:
    """``t`` is true, and everything else false."""
    firsts = cells.buffer[np.minimum(cells.starts, len(cells.buffer) - 1)]
    true = pa.array(firsts == ord("t"))
    column = pc.if_else(true, pa.scalar(b"true"), pa.scalar(b"false"))
    return with_nulls(cells, Fragments(column))


def as_texts(cells: Cells) -> Fragments:
    """Texts of any letters.

    Raises:
        ValueError: one is not UTF-8.
    """
    column = cells.gathered()
    data = data_of(column)
    if len(data) and data.max() >= 128:
        column.cast(pa.string())  # which looks whether it is UTF-8
    if not len(data) or not _ESCAPED[data].any():
        return with_nulls(cells, Fragments(column, b'"'))
    if (data < 32).any():
        quoted = [encode_basestring(cell.decode()).encode() for cell in column.to_pylist()]
        return with_nulls(cells, Fragments(pa.array(quoted, pa.binary())))
    for letter in (b"\\", b'"'):
        column = pc.replace_substring(column, letter, b"\\" + letter)
    return with_nulls(cells, Fragments(column, b'"'))


def by_value(encode: Callable[[str], bytes]) -> ColumnEncoder:
    """Return the encoder that makes the JSON of each text by itself."""

    def encoder(cells: Cells) -> Fragments:
        found = [b"null" if text is None else encode(text) for text in cells.texts()]
        return Fragments(pa.array(found, pa.binary()))

    return encoder


def data_of(column: pa.Array) -> NDArray[np.uint8]:
    """Return the bytes of all texts of a column, one after another."""
    _, places, data = column.buffers()
    offsets = np.frombuffer(places, np.int32)[column.offset : column.offset + len(column) + 1]
    if data is None:
        return np.empty(0, np.uint8)
    return np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]


def with_byte(column: pa.Array, place: int, byte: int) -> pa.Array:
    """Return texts with another byte at a place; those that are empty stay so."""
    _, places, _ = column.buffers()
    offsets = np.frombuffer(places, np.int32)[column.offset : column.offset + len(column) + 1]
    data = data_of(column).copy()
    first = offsets[:-1][np.diff(offsets) > 0] - offsets[0]
    data[first + place] = byte
    buffers = [None, pa.py_buffer(offsets - offsets[0]), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(column), buffers)


def with_nulls(cells: Cells, fragments: Fragments) -> Fragments:
    """Return the fragments with ``null`` where the cells are null."""
    nulls = cells.nulls
    if nulls is None:
        return fragments
    column = fragments.column
    if fragments.quote:
        column = joined([fragments.quote, column, fragments.quote])
    return Fragments(pc.if_else(pa.array(nulls), pa.scalar(b"null"), column))
