"""Column values of row events: for each column type, what reads one value from a row's image.

The layouts are those of MySQL's replication protocol (``Field::pack``), which MariaDB shares. What a value
becomes in JSON is the table in docs/capture-mysql.md. The snapshot renders its values with the same functions,
so that a row reads the same however it was captured.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

from millstream.capture.mysql.buffer import BinlogBuffer

ValueReader: TypeAlias = Callable[[BinlogBuffer], Any]

_DIGITS_PER_WORD = 9
_BYTES_OF_DIGITS = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)  # that many bytes hold 0 to 9 decimal digits


def read_integer(size: int, *, unsigned: bool) -> ValueReader:
    """Read a number of ``size`` bytes, its lowest byte first."""

    def read(reader: BinlogBuffer) -> int:
        return int.from_bytes(reader.take(size), "little", signed=not unsigned)

    return read


def read_float(reader: BinlogBuffer) -> float:
    """Read a number of four bytes; it is written with the fewest digits that give the same four bytes."""
    return shortest_float(struct.unpack("<f", reader.take(4))[0])


def shortest_float(value: float) -> float:
    """Return the number with the fewest digits that is ``value`` when rounded to four bytes."""
    single = struct.pack("<f", value)
    for digits in range(6, 9):
        text = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", text) == single:
                return text
        except OverflowError:  # rounded up past the largest: more digits are needed
            continue
    return float(f"{value:.9g}")


def read_double(reader: BinlogBuffer) -> float:
    """Read a number of eight bytes."""
    value: float = struct.unpack("<d", reader.take(8))[0]
    return value


def read_decimal(precision: int, scale: int) -> ValueReader:
    """Read a decimal number as text with all its decimal places.

    Nine digits are four bytes, its highest byte first; what is left over on either side of the point takes
    fewer. The first bit is the sign, inverted; a negative number has all its bits inverted.
    """
    lengths, decimals = decimal_groups(precision, scale)
    size = decimal_size(precision, scale)

    def read(reader: BinlogBuffer) -> str:
        data = bytearray(reader.take(size))
        negative = not data[0] & 0x80
        data[0] ^= 0x80
        if negative:
            data = bytearray(byte ^ 0xFF for byte in data)
        words = BinlogBuffer(bytes(data))
        before = "".join(_digits(words, *group) for group in lengths).lstrip("0") or "0"
        after = "".join(_digits(words, *group) for group in decimals)
        number = f"{before}.{after}" if after else before
        return f"-{number}" if negative else number

    return read


def decimal_groups(
    precision: int, scale: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the groups of digits before and after the point, each as (digits, bytes); none is empty."""
    whole = precision - scale
    before = [whole % _DIGITS_PER_WORD] + [_DIGITS_PER_WORD] * (whole // _DIGITS_PER_WORD)
    after = [_DIGITS_PER_WORD] * (scale // _DIGITS_PER_WORD) + [scale % _DIGITS_PER_WORD]
    sized = [
        [(length, _BYTES_OF_DIGITS[length]) for length in lengths if length]
        for lengths in (before, after)
    ]
    return sized[0], sized[1]


def decimal_size(precision: int, scale: int) -> int:
    """Return how many bytes a decimal number has."""
    return sum(size for groups in decimal_groups(precision, scale) for _, size in groups)


def _digits(words: BinlogBuffer, length: int, size: int) -> str:
    return str(words.big(size)).zfill(length)


def read_year(reader: BinlogBuffer) -> int:
    """Read a year; the year 0 is the server's zero."""
    value = reader.little(1)
    return value + 1900 if value else 0


def read_date(reader: BinlogBuffer) -> str:
    """Read a date as the server writes it: zero dates and days that no month has stay what they are."""
    value = reader.little(3)
    return f"{value >> 9:04}-{value >> 5 & 15:02}-{value & 31:02}"


def read_timestamp(decimals: int) -> ValueReader:
    """Read an instant, as text in UTC; the zero timestamp is the text ``0000-00-00T00:00:00Z``."""

    def read(reader: BinlogBuffer) -> str:
        seconds = reader.big(4)
        micros = _micros(reader, decimals)
        if not seconds and not micros:
            return f"0000-00-00T00:00:00{_fraction(0, decimals)}Z"
        day, second = divmod(seconds, 86400)
        return f"{_date_of(day)}T{_clock(second)}{_fraction(micros, decimals)}Z"

    return read


def read_datetime(decimals: int) -> ValueReader:
    """Read a date with a time of day, of no time zone, as text; zeros stay zeros."""

    def read(reader: BinlogBuffer) -> str:
        value = reader.big(5) - 0x8000000000
        year, month = divmod(value >> 22, 13)
        time = f"{value >> 12 & 31:02}:{value >> 6 & 63:02}:{value & 63:02}"
        micros = _micros(reader, decimals)
        date = f"{year:04}-{month:02}-{value >> 17 & 31:02}"
        return f"{date}T{time}{_fraction(micros, decimals)}"

    return read


def read_time(decimals: int) -> ValueReader:
    """Read a duration (the server's TIME has a sign, and goes to 838 hours) as microseconds."""
    size = (decimals + 1) // 2
    middle = 1 << (8 * (3 + size) - 1)

    def read(reader: BinlogBuffer) -> int:
        # The fraction is a part of the number whose sign is the duration's: it borrows from the seconds.
        packed = reader.big(3 + size) - middle
        whole, fraction = divmod(abs(packed), 1 << 8 * size)
        seconds = (whole >> 12 & 1023) * 3600 + (whole >> 6 & 63) * 60 + (whole & 63)
        micros = seconds * 1_000_000 + fraction * (1, 100, 10_000, 1_000_000)[3 - size]
        return -micros if packed < 0 else micros

    return read


def _micros(reader: BinlogBuffer, decimals: int) -> int:
    size = (decimals + 1) // 2
    return reader.big(size) * (1, 100, 10_000, 1_000_000)[3 - size] if size else 0


def _fraction(micros: int, decimals: int) -> str:
    return f".{micros:06}"[: decimals + 1] if decimals else ""


def _clock(second: int) -> str:
    return f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"


def _date_of(day: int) -> str:
    """Return the date of a day that is counted from 1970 (Howard Hinnant's civil_from_days)."""
    day += 719468
    era, of_era = divmod(day, 146097)
    year = (of_era - of_era // 1460 + of_era // 36524 - of_era // 146096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    month = (5 * of_year + 2) // 153
    number = month + 3 if month < 10 else month - 9
    return f"{year + era * 400 + (number <= 2):04}-{number:02}-{of_year - (153 * month + 2) // 5 + 1:02}"


def read_bit(bits: int) -> ValueReader:
    """Read bits as text of 0 and 1."""
    size = (bits + 7) // 8

    def read(reader: BinlogBuffer) -> str:
        return f"{reader.big(size):0{bits}b}"

    return read


def read_bytes(length_size: int) -> ValueReader:
    """Read bytes that follow their length."""

    def read(reader: BinlogBuffer) -> bytes:
        return reader.take(reader.little(length_size))

    return read


def read_text(length_size: int, decode: Callable[[bytes], str]) -> ValueReader:
    """Read text that follows its length in bytes."""

    def read(reader: BinlogBuffer) -> str:
        return decode(reader.take(reader.little(length_size)))

    return read


def read_binary(length_size: int, width: int = 0) -> ValueReader:
    """Read bytes as base64; with a width, the zeros that the server has cut off are put back."""

    def read(reader: BinlogBuffer) -> str:
        return encode_binary(reader.take(reader.little(length_size)), width)

    return read


def encode_binary(data: bytes, width: int = 0) -> str:
    """Return bytes as base64, filled with zeros up to ``width``."""
    return base64.b64encode(data.ljust(width, b"\0")).decode()


def read_enum(size: int, labels: tuple[str, ...]) -> ValueReader:
    """Read one of the labels; number 0 is the server's value for what was none of them."""

    def read(reader: BinlogBuffer) -> str:
        number = reader.little(size)
        return labels[number - 1] if number else ""

    return read


def read_set(size: int, labels: tuple[str, ...]) -> ValueReader:
    """Read the labels that are set, with commas between them."""

    def read(reader: BinlogBuffer) -> str:
        bits = reader.little(size)
        return ",".join(label for place, label in enumerate(labels) if bits >> place & 1)

    return read


def decode_binary(encoded: str) -> bytes:
    """Return the bytes of ``encode_binary``."""
    return base64.b64decode(encoded)


def micros_of_time(text: str) -> int:
    """Return the microseconds of a duration as the server writes it: ``-838:59:59.000001``."""
    hours, minutes, seconds = text.lstrip("-").split(":")
    whole, _, fraction = seconds.partition(".")
    micros = (int(hours) * 3600 + int(minutes) * 60 + int(whole)) * 1_000_000
    micros += int(fraction.ljust(6, "0") or "0") if fraction else 0
    return -micros if text.startswith("-") else micros
