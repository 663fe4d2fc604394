"""Loops over JSON objects of one layout: what stands around the values is compared, and each value read where it begins.

It is written in the part of Python that numba compiles, and run compiled (:mod:`millstream.kernels.decode.layout_scanner`).
Each reader of a value returns where it ends, or -1 for what it does not read: the object is then left to a parser.
That what follows is not part of the value is not looked at here: it must be what the layout says, which begins with
a quote, a blank, a comma or a brace.

Bytes are looked at eight at a time, as a word whose lowest byte is the first, wherever as many are left in the object.
Arithmetic with words wraps around.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Int = int | np.int64

# How a value is read. Of a NUMBER, as of a TEXT, it is known where it is; a WHOLE is one of up to 18 digits.
TEXT, NUMBER, WHOLE, TRUTH, TIME = range(5)

_WORD = 8
_DIGITS_MAX = 18  # more may not fit into 64 bits
_FRACTION_DIGITS = 6
_EXPONENT_DIGITS = 9  # what has more, the parser by row may refuse
_QUOTE, _ESCAPE, _BLANK = 0x22, 0x5C, 0x20
_ZERO, _NINE, _MINUS, _PLUS, _POINT, _COLON = 0x30, 0x39, 0x2D, 0x2B, 0x2E, 0x3A
_SMALL_E, _LARGE_E, _TEE, _ZED = 0x65, 0x45, 0x54, 0x5A
_TRUE, _FALSE = np.frombuffer(b"true", np.uint8), np.frombuffer(b"false", np.uint8)
_NOT_READ = -1
_NO_TIME = -(1 << 63)

_ONES = np.uint64(0x01_01_01_01_01_01_01_01)
# Of each byte the first bit, and the others.
_HIGHS, _REST = np.uint64(0x80) * _ONES, np.uint64(0x7F) * _ONES
_QUOTES, _ESCAPES, _BLANKS = (np.uint64(byte) * _ONES for byte in (_QUOTE, _ESCAPE, _BLANK))
_ZEROS, _DIGIT_BITS = np.uint64(_ZERO) * _ONES, np.uint64(0x0F) * _ONES
_BEYOND_NINE = np.uint64(0x80 - 10) * _ONES  # what makes the first bit of what is more than nine
_OF_FOUR = np.uint64(0x0000_00FF_0000_00FF)


class ScanLayout(NamedTuple):
    """A layout as arrays. Before value n stands ``around[places[n]:places[n + 1]]``, and behind the last one the rest.

    ``actions`` says how each value is read, ``columns`` where it is put: -1 is nowhere.
    """

    around: Array
    places: Array
    actions: Array
    columns: Array


def scan_objects(
    data: Array, offsets: Array, layout: ScanLayout, cells: Array, ends: Array, read: Array
) -> Int:
    """Read the objects that lie between the offsets; return how many were.

    Args:
        cells: A row for each column, with a place for each object. Of those that were read it has, one behind another,
            the number, the time in microseconds since 1970, 1 for true and 0 for false, or where a text begins;
        ends: where the value ends.
        read: Set to which objects were read.
    """
    around, places, actions, columns = layout
    row = 0
    for number in range(len(read)):
        at: Int = np.int64(offsets[number])
        end = np.int64(offsets[number + 1])
        for member in range(len(actions)):
            at = behind(data, at, end, around, places[member], places[member + 1])
            if at >= 0:
                at, value = scan_value(data, at, end, actions[member])
            if at < 0:
                break
            column = columns[member]
            if column >= 0:
                cells[column, row] = value
                ends[column, row] = at
        if at >= 0:
            at = behind(data, at, end, around, places[-2], places[-1])
        read[number] = at == end
        row += at == end
    return row


def behind(data: Array, at: Int, end: Int, around: Array, start: Int, stop: Int) -> Int:
    """Return where ``around[start:stop]`` ends, if it is there."""
    if at + stop - start > end:
        return _NOT_READ
    size = stop - start
    n = np.int64(0)
    while n + _WORD <= size:
        if word_at(data, at + n) != word_at(around, start + n):
            return _NOT_READ
        n += _WORD
    while n < size:
        if data[np.uint64(at + n)] != around[np.uint64(start + n)]:
            return _NOT_READ
        n += 1
    return at + size


def scan_value(data: Array, at: Int, end: Int, action: Int) -> tuple[Int, Int]:
    """Do with a value what is to be done; return where it ends, and what it is."""
    if action == TEXT:
        return text_end(data, at, end), at
    if action == WHOLE:
        return scan_whole(data, at, end)
    if action == TIME:
        return scan_time(data, at, end)
    if action == TRUTH:
        return scan_truth(data, at, end)
    return number_end(data, at, end), at


def text_end(data: Array, at: Int, end: Int) -> Int:
    """Return where there is a quote, an escape or a control character."""
    while at + _WORD <= end:
        word = word_at(data, at)
        quotes, escapes = word ^ _QUOTES, word ^ _ESCAPES
        # The first bit of each byte that is zero, or less than a blank: right for the lowest such byte.
        found = (quotes - _ONES) & ~quotes | (escapes - _ONES) & ~escapes
        found = (found | (word - _BLANKS) & ~word) & _HIGHS
        if found != 0:
            return at + bytes_below(found)
        at += _WORD
    while at < end and data[at] >= _BLANK and data[at] != _QUOTE and data[at] != _ESCAPE:
        at += 1
    return at


def word_at(data: Array, at: Int) -> np.uint64:
    """Return the eight bytes at a place, the first of them lowest."""
    place = np.uint64(at)  # numba would ask of what has a sign whether it counts from the end
    word = np.uint64(data[place])
    for n in range(1, _WORD):
        word |= np.uint64(data[place + np.uint64(n)]) << np.uint64(8 * n)
    return word


def bytes_below(highs: np.uint64) -> Int:
    """Return how many bytes are below the lowest that is marked by its first bit; one is."""
    lowest = highs & (~highs + np.uint64(1))
    return np.int64(((lowest - np.uint64(1)) & _ONES) * _ONES >> np.uint64(56)) - 1


def digits_in(word: np.uint64) -> Int:
    """Return how many of the first bytes of a word are digits."""
    values = word ^ _ZEROS
    other = (values | (values & _REST) + _BEYOND_NINE) & _HIGHS
    return bytes_below(other) if other != 0 else np.int64(_WORD)


def number_of(word: np.uint64) -> np.int64:
    """Return the number of eight digits.

    Source: D. Lemire, "Quickly parsing eight digits": pairs are put together, and then all four of them.
    """
    digits = word & _DIGIT_BITS
    pairs = digits * np.uint64(10) + (digits >> np.uint64(8))
    odd = (pairs & _OF_FOUR) * np.uint64(100 + (1_000_000 << 32))
    even = (pairs >> np.uint64(16) & _OF_FOUR) * np.uint64(1 + (10_000 << 32))
    return np.int64(odd + even >> np.uint64(32))


def digits_end(data: Array, at: Int, end: Int) -> Int:
    """Return where there is no digit."""
    while at < end and _ZERO <= data[at] <= _NINE:
        at += 1
    return at


def number_end(data: Array, at: Int, end: Int) -> Int:
    """Return where a number as JSON writes it ends."""
    if at < end and data[at] == _MINUS:
        at += 1
    first, at = at, digits_end(data, at, end)
    if at == first or (at > first + 1 and data[first] == _ZERO):
        return _NOT_READ
    if at < end and data[at] == _POINT:
        first, at = at + 1, digits_end(data, at + 1, end)
        if at == first:
            return _NOT_READ
    if at < end and (data[at] == _SMALL_E or data[at] == _LARGE_E):
        at += 1
        if at < end and (data[at] == _MINUS or data[at] == _PLUS):
            at += 1
        first, at = at, digits_end(data, at, end)
        if at == first or at > first + _EXPONENT_DIGITS:
            return _NOT_READ
    return at


def scan_whole(data: Array, at: Int, end: Int) -> tuple[Int, Int]:
    """Read a whole number of up to 18 digits."""
    negative = at < end and data[at] == _MINUS
    if negative:
        at += 1
    first, number = at, np.int64(0)
    end = min(end, first + _DIGITS_MAX)
    if at + _WORD <= end:
        word = word_at(data, at)
        count = digits_in(word)
        if count > 0:
            number = number_of(word << np.uint64(8 * (_WORD - count)))
        at += count
    while at < end and _ZERO <= data[at] <= _NINE:
        number = number * 10 + (np.int64(data[at]) - _ZERO)
        at += 1
    if at == first or (at > first + 1 and data[first] == _ZERO):
        return _NOT_READ, 0
    return at, -number if negative else number


def scan_truth(data: Array, at: Int, end: Int) -> tuple[Int, Int]:
    """Read ``true`` or ``false``."""
    if at + 5 > end:  # what is true has more behind it, too
        return _NOT_READ, 0
    true = data[at] == _TRUE[0]
    for n in range(4 if true else 5):
        if data[at + n] != (_TRUE[n] if true else _FALSE[n]):
            return _NOT_READ, 0
    return at + (4 if true else 5), 1 if true else 0


def scan_time(data: Array, at: Int, end: Int) -> tuple[Int, Int]:
    """Read a time such as 2026-01-31T12:00:00.5Z; offsets from UTC but Z are not read."""
    if at + len("2026-01-31T12:00:00Z") > end:
        return _NOT_READ, 0
    seconds = seconds_of(data, at)
    if seconds == _NO_TIME:
        return _NOT_READ, 0
    at += len("2026-01-31T12:00:00")
    fraction, scale = np.int64(0), 1_000_000
    if data[at] == _POINT:
        first = at + 1
        at = min(digits_end(data, first, end), first + _FRACTION_DIGITS)
        if at == first:
            return _NOT_READ, 0
        for n in range(first, at):
            scale //= 10
            fraction += (np.int64(data[n]) - _ZERO) * scale
    if at >= end or data[at] != _ZED:
        return _NOT_READ, 0
    return at + 1, seconds * 1_000_000 + fraction


def seconds_of(data: Array, at: Int) -> Int:
    """Read a date and a time of day to the second, as seconds since 1970."""
    if data[at + 4] != _MINUS or data[at + 7] != _MINUS:
        return _NO_TIME
    if data[at + 13] != _COLON or data[at + 16] != _COLON:
        return _NO_TIME
    if data[at + 10] != _TEE and data[at + 10] != _BLANK:
        return _NO_TIME
    century, year = two_digits(data, at), two_digits(data, at + 2)
    month, day = two_digits(data, at + 5), two_digits(data, at + 8)
    hour, minute = two_digits(data, at + 11), two_digits(data, at + 14)
    second = two_digits(data, at + 17)
    if min(century, year, hour, minute, second) < 0 or hour > 23 or minute > 59 or second > 59:
        return _NO_TIME
    year += 100 * century
    if year < 1 or month < 1 or month > 12 or day < 1 or day > days_in(year, month):
        return _NO_TIME
    return ((day_of(year, month, day) * 24 + hour) * 60 + minute) * 60 + second


def two_digits(data: Array, at: Int) -> Int:
    """Read a number of two digits; -1 if they are none."""
    tens, ones = np.int64(data[at]) - _ZERO, np.int64(data[at + 1]) - _ZERO
    return tens * 10 + ones if 0 <= tens <= 9 and 0 <= ones <= 9 else -1


def days_in(year: Int, month: Int) -> Int:
    """Give the days of a month."""
    if month == 2:
        return 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    return 30 if month in (4, 6, 9, 11) else 31


def day_of(year: Int, month: Int, day: Int) -> Int:
    """Give the number of a day since 1970, in years that begin in March, as leap days then end them.

    Source: H. Hinnant, "chrono-Compatible Low-Level Date Algorithms", days_from_civil.
    """
    if month <= 2:
        year, month = year - 1, month + 12
    leap_days = year // 4 - year // 100 + year // 400
    return year * 365 + leap_days + (153 * (month - 3) + 2) // 5 + day - 1 - 719_468


def copy_texts(
    data: Array,
    starts: Array,
    ends: Array,
    words: Array,
    out: Array,
    out_words: Array,
    offsets: Array,
) -> None:
    """Copy texts one behind another, and say where each begins and the last one ends.

    A word at a time, where there is room for it: what it has too much, the next text is written over. ``words`` and
    ``out_words`` have what begins at each byte of ``data`` and ``out``.
    """
    to = 0
    for row in range(len(starts)):
        start, size = starts[row], ends[row] - starts[row]
        if start + size <= len(words) and to + size <= len(out_words):
            for n in range(0, size, _WORD):
                out_words[to + n] = words[start + n]
        else:
            for n in range(size):
                out[to + n] = data[start + n]
        to += size
        offsets[row + 1] = to
