"""Many rows of one table at once: where their texts are in messages of pgoutput and in lines of COPY.

A row by itself is decoded by ``messages`` and ``values``; here are the same rules for many rows, by column. What
is not plain (a value that was not sent, a message that is cut short) is left to them: :func:`message_cells` gives None.

Source: PostgreSQL 15, "Logical Replication Message Formats", and COPY, "Text Format".
"""

from __future__ import annotations

import json
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.capture.json_columns import (
    Cells,
    ColumnEncoder,
    Fragments,
    as_booleans,
    as_cells,
    as_texts,
    as_they_are,
    by_value,
    data_of,
    joined,
    with_byte,
    with_nulls,
)
from millstream.capture.postgres.messages import RUN_TAG
from millstream.capture.postgres.values import (
    ValueOf,
    read_boolean,
    read_bytes,
    read_float,
    read_timestamp,
    unescape,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

Int64s: TypeAlias = "NDArray[np.int64]"

_TAIL = bytes(8)  # so that a word can be read at every place of a message
_TEXT, _NULL = ord("t"), ord("n")
_DATE_BYTES = len("2026-01-02")
_TIMESTAMP_BYTES_MIN = len("2026-01-02 03:04:05")
_NOT_FINITE = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}
# Of letters in numbers: none of a digit, one of a point, many of all else.
_OTHER_MARK = 1 << 32
_NUMBER_MARKS = np.full(256, _OTHER_MARK, np.int64)
_NUMBER_MARKS[ord("0") : ord("9") + 1] = 0
_NUMBER_MARKS[ord(".")] = 1
_WHOLE_BYTES_MAX = len("-999999999999999")  # from there on PostgreSQL writes exponents
_TAB, _NEWLINE, _BACKSLASH = ord("\t"), ord("\n"), ord("\\")


def message_cells(messages: Sequence[bytes]) -> list[Cells] | None:
    """Return the columns of messages that begin with equal ``RUN_TAG``; None where each is to be decoded by itself."""
    data = b"".join([*messages, _TAIL])
    buffer = np.frombuffer(data, np.uint8)
    words = np.ndarray(len(data) - 3, ">u4", data, strides=(1,))
    sizes = np.fromiter(map(len, messages), np.int64, len(messages))
    ends = np.cumsum(sizes)
    places = ends - sizes + RUN_TAG.stop
    columns = []
    for _ in range(int.from_bytes(messages[0][RUN_TAG.stop - 2 : RUN_TAG.stop], "big")):
        if (places >= ends).any():
            return None
        kinds = buffer[places]
        is_text = kinds == _TEXT
        if is_text.all():
            lengths = words[places + 1].astype(np.int64)
            starts = places + 5
            places = starts + lengths
        else:
            if not (is_text | (kinds == _NULL)).all():
                return None
            lengths = np.where(is_text, words[places + 1].astype(np.int64), -1)
            starts = places + np.where(is_text, 5, 1)
            places = starts + np.maximum(lengths, 0)
        columns.append(Cells(buffer, starts, lengths))
    return None if (places > ends).any() else columns


def copy_cells(lines: Sequence[bytes], count: int) -> list[Cells]:
    """Return ``count`` columns of lines of COPY, each with its end of line."""
    if not count:
        return []
    data = b"".join(lines)
    buffer = np.frombuffer(data, np.uint8)
    # Within a value both are escapes.
    ends = np.flatnonzero((buffer == _TAB) | (buffer == _NEWLINE)).reshape(len(lines), count)
    starts = np.empty_like(ends)
    starts.ravel()[0] = 0
    starts.ravel()[1:] = ends.ravel()[:-1] + 1
    lengths = ends - starts
    if b"\\" not in data:
        return [Cells(buffer, starts[:, at], lengths[:, at]) for at in range(count)]
    null = (lengths == 2) & (buffer[starts] == _BACKSLASH)
    null &= buffer[np.minimum(starts + 1, len(buffer) - 1)] == ord("N")
    lengths[null] = -1
    marks = np.concatenate([[0], np.cumsum(buffer == _BACKSLASH)])
    escaped = (marks[starts + np.maximum(lengths, 0)] > marks[starts]).any(axis=0).tolist()
    columns = (Cells(buffer, starts[:, at], lengths[:, at]) for at in range(count))
    return [
        _unescaped(cells) if found else cells for cells, found in zip(columns, escaped, strict=True)
    ]


def _unescaped(cells: Cells) -> Cells:
    return as_cells([None if text is None else unescape(text) for text in cells.texts()])


# ── values ──────────────────────────────────────────────────────────────────────────────────


def encode_columns(
    columns: Iterable[tuple[Cells, tuple[str, ValueOf]]],
) -> dict[str, Fragments]:
    """Return the JSON of columns, by their names.

    Raises:
        ValueError: a text is not UTF-8, or not of its type.
    """
    return {name: _encoder_of(read)(cells) for cells, (name, read) in columns}


def _encoder_of(read: ValueOf) -> ColumnEncoder:
    """Return what makes JSON of a column whose texts ``read`` makes values of."""
    return _ENCODERS.get(read) or by_value(_json_of(read))


def _json_of(read: ValueOf) -> Callable[[str], bytes]:
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
    return lambda text: encode(read(text)).encode()


def _timestamps(cells: Cells) -> Fragments:
    """``2026-01-02 03:04:05.6``, with ``+00`` if it has a zone, by column; others by themselves."""
    there = cells.lengths >= 0
    starts, lengths = cells.starts[there], cells.lengths[there]
    if (lengths < _TIMESTAMP_BYTES_MIN).any():
        return _timestamps_by_value(cells)
    letters = [cells.buffer[starts + lengths + place] for place in (-3, -2, -1)]
    zoned = (letters[0] == ord("+")) & (letters[1] == ord("0")) & (letters[2] == ord("0"))
    plain = (cells.buffer[starts + _DATE_BYTES] == ord(" ")) & (letters[2] <= ord("9"))
    if not plain.all() or zoned.any() != zoned.all():
        return _timestamps_by_value(cells)
    cut = 3 if zoned.any() else 0
    shorter = Cells(cells.buffer, cells.starts, np.where(there, cells.lengths - cut, -1))
    column = with_byte(shorter.gathered(), _DATE_BYTES, ord("T"))
    quote = b'"'
    if cut:
        column = joined([quote, column, b'Z"'])
        quote = b""
    return with_nulls(cells, Fragments(column, quote))


def _floats(cells: Cells) -> Fragments:
    """Numbers with the digits that Python writes; NaN and the infinities are texts.

    PostgreSQL and Python write the fewest digits that are the same number. Without an exponent they differ in whole
    numbers alone, which have ".0" in Python; the few others are read one by one.
    """
    column = cells.gathered()
    whole, plain = _number_kinds(column, cells)
    written = joined([column, pc.if_else(pa.array(whole), pa.scalar(b".0"), pa.scalar(b""))])
    if not plain.all():
        others = pa.array(~plain)
        read = [_float_json(float(text)).encode() for text in column.filter(others).to_pylist()]
        written = pc.replace_with_mask(written, others, pa.array(read, pa.binary()))
    return with_nulls(cells, Fragments(written))


def _number_kinds(column: pa.Array, cells: Cells) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Say which texts are digits alone, behind a sign if any, and which are that or have one point among them."""
    data, lengths = data_of(column), np.maximum(cells.lengths, 0)
    ends = np.cumsum(lengths)
    counts = np.concatenate([[0], np.cumsum(_NUMBER_MARKS[data])])
    found = counts[ends] - counts[ends - lengths]
    if len(data):
        firsts = data[np.minimum(ends - lengths, len(data) - 1)]
        found -= np.where((firsts == ord("-")) & (lengths > 0), _OTHER_MARK, 0)
    whole = (found == 0) & (lengths <= _WHOLE_BYTES_MAX)
    return whole, (whole | (found == 1)) & (cells.lengths != 0)


def _float_json(value: float) -> str:
    text = repr(value)
    return text if text[-1].isdigit() else _NOT_FINITE[text]


def _bytes_json(text: str) -> bytes:
    return b'"' + b2a_base64(bytes.fromhex(text[2:]), newline=False) + b'"'


_timestamps_by_value = by_value(_json_of(read_timestamp))
_ENCODERS: dict[ValueOf, ColumnEncoder] = {
    int: as_they_are,
    str: as_texts,
    read_boolean: as_booleans,
    read_timestamp: _timestamps,
    read_float: _floats,
    read_bytes: by_value(_bytes_json),
}
