"""Column values of many rows at once: for each column type, what makes JSON of the bytes of all its values.

The layouts and the JSON are those of ``values.py``, which reads one value; here nothing is a Python object where a
rule can be computed for a whole column. A column that has a value which no server writes is refused with a
ValueError: read one by one, it is seen which.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.capture.json_columns import (
    Cells,
    ColumnEncoder,
    Fragments,
    as_texts,
    joined,
    numbers,
    with_byte,
    with_nulls,
)
from millstream.capture.mysql.buffer import BinlogBuffer
from millstream.capture.mysql.charsets import TextDecoder
from millstream.capture.mysql.values import ValueReader, decimal_groups, shortest_float

if TYPE_CHECKING:
    from numpy.typing import NDArray

Int64s: TypeAlias = "NDArray[np.int64]"

TAIL = bytes(
    40
)  # behind the last row, so that words can be read of every value, and where a null is
_WORD_BYTES = 8
_INT64_DIGITS = 18
_YEAR_MAX = 9999
_PAIRS = np.array([[ord("0") + at // 10, ord("0") + at % 10] for at in range(100)], np.uint8)
_QUOTE = b'"'


@dataclass(frozen=True, slots=True)
class ColumnFormat:
    """How a column's values lie in a row, and what reads one of them, or all.

    A value has ``size`` bytes; where that is 0, as many as the ``length_size`` bytes before it say.
    """

    read: ValueReader
    encode: ColumnEncoder
    size: int = 0
    length_size: int = 0
    fixed_width: int = 0
    """Of a BINARY column: its width in bytes; 0 for all others."""


def words_at(buffer: NDArray[np.uint8], places: Int64s, order: str) -> NDArray[np.uint64]:
    """Return the eight bytes at each place, as numbers in an order of bytes: ``<`` or ``>``."""
    words: NDArray[np.uint64] = np.ndarray(
        len(buffer) - _WORD_BYTES + 1, f"{order}u8", buffer.data, strides=(1,)
    )
    return words[places].astype(np.uint64)


def lowest_first(buffer: NDArray[np.uint8], places: Int64s, size: int) -> NDArray[np.uint64]:
    """Return numbers without sign of so many bytes, the lowest first."""
    mask = np.uint64((1 << 8 * size) - 1)
    return words_at(buffer, places, "<") & mask


def _highest_first(cells: Cells, size: int, offset: int = 0) -> NDArray[np.uint64]:
    """Return numbers without sign of so many bytes, the highest first; 0 where the cells are null."""
    found = words_at(cells.buffer, cells.starts + offset, ">") >> np.uint64(8 * (8 - size))
    return _zeroed(cells, found)


def _zeroed(cells: Cells, found: NDArray[np.uint64]) -> NDArray[np.uint64]:
    nulls = cells.nulls
    return found if nulls is None else np.where(nulls, np.uint64(0), found)


def _signed(cells: Cells, size: int, offset: int = 0) -> Int64s:
    """Return numbers of so many bytes, the highest first, as signed ones."""
    return _highest_first(cells, size, offset).astype(np.int64)


# ── numbers ─────────────────────────────────────────────────────────────────────────────────


def integers(size: int, *, unsigned: bool) -> ColumnEncoder:
    """Numbers of ``size`` bytes, the lowest first."""

    def encode(cells: Cells) -> Fragments:
        found = lowest_first(cells.buffer, cells.starts, size)
        if unsigned:
            return with_nulls(cells, Fragments(_decimal_texts(found)))
        shift = 64 - 8 * size
        signed = (found << np.uint64(shift)).view(np.int64) >> shift
        return with_nulls(cells, Fragments(numbers(signed)))

    return encode


def _decimal_texts(found: NDArray[np.uint64]) -> pa.Array:
    return pa.array(found).cast(pa.string()).cast(pa.binary())


def years(cells: Cells) -> Fragments:
    """Years from 1900 on; 0 is the server's zero."""
    found = cells.buffer[cells.starts].astype(np.int64)
    return with_nulls(cells, Fragments(numbers(np.where(found == 0, 0, found + 1900))))


def floats(cells: Cells) -> Fragments:
    """Numbers of four bytes, with the fewest digits that give the same bytes."""
    return _floats(cells, lowest_first(cells.buffer, cells.starts, 4).astype("<u4"), shortest_float)


def doubles(cells: Cells) -> Fragments:
    """Numbers of eight bytes."""
    return _floats(cells, lowest_first(cells.buffer, cells.starts, 8), float)


def _floats(cells: Cells, bits: NDArray[Any], shown: Callable[[float], float]) -> Fragments:
    found = bits.view(f"<f{bits.itemsize}")
    there = cells.lengths >= 0
    if not np.isfinite(found[there]).all():
        raise ValueError("a number is not finite, and JSON has no such")
    texts = [repr(shown(value)).encode() for value in np.where(there, found, 0).tolist()]
    return with_nulls(cells, Fragments(pa.array(texts, pa.binary())))


def decimals(precision: int, scale: int) -> ColumnEncoder:
    """Decimal numbers as texts with all decimal places; beyond 18 digits on a side one by one."""
    whole, after = decimal_groups(precision, scale)

    def encode(cells: Cells) -> Fragments:
        negative = _zeroed(cells, words_at(cells.buffer, cells.starts, ">")) < np.uint64(1 << 63)
        if (nulls := cells.nulls) is not None:
            negative &= ~nulls
        first, at = _grouped(cells, whole, negative, 0)
        second, _ = _grouped(cells, after, negative, at)
        pieces: list[Any] = [numbers(first)]
        if negative.any():
            pieces.insert(0, pc.if_else(pa.array(negative), pa.scalar(b"-"), pa.scalar(b"")))
        if scale:
            pieces.append(with_byte(numbers(second + 10**scale), 0, ord(".")))
        column = joined(pieces) if len(pieces) > 1 else pieces[0]
        return with_nulls(cells, Fragments(column, _QUOTE))

    return encode


def decimal_encoder(precision: int, scale: int, read: ValueReader) -> ColumnEncoder:
    """Return the quickest encoder of a decimal type that there is."""
    if scale <= _INT64_DIGITS and precision - scale <= _INT64_DIGITS:
        return decimals(precision, scale)
    return one_by_one(read)


def _grouped(
    cells: Cells, groups: Sequence[tuple[int, int]], negative: NDArray[np.bool_], at: int
) -> tuple[Int64s, int]:
    """Return the number that groups of (digits, bytes) from a place on are, and the place behind them."""
    total = np.zeros(len(cells.starts), np.int64)
    for digits, size in groups:
        found = _signed(cells, size, at)
        if at == 0:
            found ^= 0x80 << 8 * (size - 1)
        found = np.where(negative, found ^ ((1 << 8 * size) - 1), found)
        if (nulls := cells.nulls) is not None:
            found[nulls] = 0
        if (found >= 10**digits).any():
            raise ValueError("a group of digits is too large")
        total = total * 10**digits + found
        at += size
    return total, at


def bits(count: int) -> ColumnEncoder:
    """Bits as texts of 0 and 1."""
    size = (count + 7) // 8

    def encode(cells: Cells) -> Fragments:
        found = _highest_first(cells, size).astype(">u8").view(np.uint8).reshape(-1, _WORD_BYTES)
        unpacked = np.unpackbits(found, axis=1)
        if unpacked[:, : 64 - count].any():
            raise ValueError("a value has more bits than its column")
        return with_nulls(cells, Fragments(_fixed(unpacked[:, 64 - count :] + ord("0")), _QUOTE))

    return encode


# ── times ───────────────────────────────────────────────────────────────────────────────────


def _fixed(letters: NDArray[np.uint8]) -> pa.Array:
    """Return texts of one width: the rows of ``letters``."""
    count, width = letters.shape
    offsets = np.arange(count + 1, dtype=np.int32) * width
    data = np.ascontiguousarray(letters)
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def _letters(count: int, parts: Sequence[bytes | Int64s]) -> NDArray[np.uint8]:
    """Return texts of one width: of constants, and of numbers of two digits."""
    widths = [len(part) if isinstance(part, bytes) else 2 for part in parts]
    letters = np.empty((count, sum(widths)), np.uint8)
    at = 0
    for part, width in zip(parts, widths, strict=True):
        shown = np.frombuffer(part, np.uint8) if isinstance(part, bytes) else _PAIRS[part]
        letters[:, at : at + width] = shown
        at += width
    return letters


def _date_parts(year: Int64s, month: Int64s, day: Int64s) -> list[bytes | Int64s]:
    if len(year) and (year.max() > _YEAR_MAX or year.min() < 0):
        raise ValueError("a year has more than four digits")
    return [year // 100, year % 100, b"-", month, b"-", day]


def _clock_parts(hour: Int64s, minute: Int64s, second: Int64s) -> list[bytes | Int64s]:
    return [hour, b":", minute, b":", second]


def _moments(
    cells: Cells, parts: list[bytes | Int64s], micros: Int64s, places: int, end: bytes
) -> Fragments:
    """Return dates with times, of which so many decimal places are shown."""
    if places:
        parts = [*parts, b".", micros // 10_000, micros // 100 % 100, micros % 100]
    letters = _letters(len(cells.starts), parts)
    if places:
        letters = letters[:, : letters.shape[1] - 6 + places]
    if end:
        column = np.broadcast_to(np.frombuffer(end, np.uint8), (len(letters), len(end)))
        letters = np.hstack([letters, column])
    return with_nulls(cells, Fragments(_fixed(letters), _QUOTE))


def _micros(cells: Cells, at: int, places: int) -> Int64s:
    size = (places + 1) // 2
    if not size:
        return np.zeros(len(cells.starts), np.int64)
    found = _signed(cells, size, at) * (1, 100, 10_000, 1_000_000)[3 - size]
    if (found >= 1_000_000).any():
        raise ValueError("a fraction is a second or more")
    return found


def dates(cells: Cells) -> Fragments:
    """Dates; zero dates and days that no month has stay what they are."""
    found = _zeroed(cells, lowest_first(cells.buffer, cells.starts, 3)).astype(np.int64)
    letters = _letters(len(found), _date_parts(found >> 9, found >> 5 & 15, found & 31))
    return with_nulls(cells, Fragments(_fixed(letters), _QUOTE))


def datetimes(places: int) -> ColumnEncoder:
    """Dates with a time of day, of no time zone."""

    def encode(cells: Cells) -> Fragments:
        found = _signed(cells, 5) - 0x8000000000
        if (nulls := cells.nulls) is not None:
            found[nulls] = 0
        year, month = np.divmod(found >> 22, 13)
        date = _date_parts(year, month, found >> 17 & 31)
        clock = _clock_parts(found >> 12 & 31, found >> 6 & 63, found & 63)
        return _moments(cells, [*date, b"T", *clock], _micros(cells, 5, places), places, b"")

    return encode


def timestamps(places: int) -> ColumnEncoder:
    """Instants in UTC; that of 0 is the zero timestamp."""

    def encode(cells: Cells) -> Fragments:
        seconds, micros = _signed(cells, 4), _micros(cells, 4, places)
        zero = (seconds == 0) & (micros == 0)
        day, second = np.divmod(seconds, 86_400)
        date = [np.where(zero, 0, part) for part in _civil(day)]
        clock = _clock_parts(second // 3600, second // 60 % 60, second % 60)
        parts = [*_date_parts(date[0], date[1], date[2]), b"T", *clock]
        return _moments(cells, parts, micros, places, b"Z")

    return encode


def _civil(day: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Return year, month and day of days that are counted from 1970."""
    found = day.astype("M8[D]")
    months = found.astype("M8[M]")
    of_month = (found - months.astype("M8[D]")).astype(np.int64) + 1
    year, month = np.divmod(months.astype(np.int64), 12)
    return year + 1970, month + 1, of_month


def durations(places: int) -> ColumnEncoder:
    """Durations, with a sign, as microseconds."""
    size = (places + 1) // 2
    middle = 1 << (8 * (3 + size) - 1)

    def encode(cells: Cells) -> Fragments:
        packed = _signed(cells, 3 + size) - middle
        whole, fraction = np.divmod(np.abs(packed), 1 << 8 * size)
        seconds = (whole >> 12 & 1023) * 3600 + (whole >> 6 & 63) * 60 + (whole & 63)
        micros = seconds * 1_000_000 + fraction * (1, 100, 10_000, 1_000_000)[3 - size]
        return with_nulls(cells, Fragments(numbers(np.where(packed < 0, -micros, micros))))

    return encode


# ── texts ───────────────────────────────────────────────────────────────────────────────────


def texts(decode: TextDecoder, *, utf8: bool, of_ascii: bool) -> ColumnEncoder:
    """Texts in a character set.

    Args:
        utf8: The set is UTF-8.
        of_ascii: Bytes below 128 are in this set what they are in ASCII.
    """

    def encode(cells: Cells) -> Fragments:
        if utf8:
            return as_texts(cells)
        column = cells.gathered()
        found = column.to_pylist()
        if of_ascii and all(map(bytes.isascii, found)):
            return as_texts(cells)
        shown = [encode_basestring(decode(data)).encode() for data in found]
        return with_nulls(cells, Fragments(pa.array(shown, pa.binary())))

    return encode


def binaries(width: int = 0) -> ColumnEncoder:
    """Bytes as base64; with a width, the zeros that the server has cut off are put back."""

    def encode(cells: Cells) -> Fragments:
        found = cells.gathered().to_pylist()
        shown = [b2a_base64(data.ljust(width, b"\0"), newline=False) for data in found]
        return with_nulls(cells, Fragments(pa.array(shown, pa.binary()), _QUOTE))

    return encode


def rendered_binaries(width: int, render: Callable[[str], str]) -> ColumnEncoder:
    """Bytes that are no bytes: ``render`` makes the text of their base64."""
    encode_bytes = binaries(width)

    def encode(cells: Cells) -> Fragments:
        there = cells.lengths >= 0
        shown = [
            encode_basestring(render(text.decode())).encode() if is_there else b"null"
            for text, is_there in zip(
                encode_bytes(
                    Cells(cells.buffer, cells.starts, np.maximum(cells.lengths, 0))
                ).column.to_pylist(),
                there.tolist(),
                strict=True,
            )
        ]
        return Fragments(pa.array(shown, pa.binary()))

    return encode


def enums(size: int, labels: Sequence[str]) -> ColumnEncoder:
    """Labels by their numbers; number 0 is the server's value for what was none of them."""
    shown = pa.array([encode_basestring(label).encode() for label in ("", *labels)], pa.binary())

    def encode(cells: Cells) -> Fragments:
        found = _zeroed(cells, lowest_first(cells.buffer, cells.starts, size))
        if (found >= np.uint64(len(shown))).any():
            raise ValueError("a label has a number beyond the last")
        return with_nulls(cells, Fragments(shown.take(pa.array(found))))

    return encode


def one_by_one(read: ValueReader) -> ColumnEncoder:
    """Texts of which ``read`` makes each by itself, of values of a fixed size."""
    return made_of_bytes(lambda data: read(BinlogBuffer(data)))


def made_of_bytes(text_of: Callable[[bytes], str]) -> ColumnEncoder:
    """Texts, each made of the bytes of a value."""

    def encode(cells: Cells) -> Fragments:
        there = (cells.lengths >= 0).tolist()
        shown = [
            encode_basestring(text_of(data)).encode() if is_there else b"null"
            for data, is_there in zip(cells.gathered().to_pylist(), there, strict=True)
        ]
        return Fragments(pa.array(shown, pa.binary()))

    return encode
