"""Values of JSON read where they stand in a block of text: many at once, each from a start to an end.

Each reader gives a column and which of its values are exactly what JSON, and the column's type, say. The others may
still be valid in a form that is rare (``1e3`` for a whole number): they are left to a parser. Numbers are read eight
digits at a time as one word, after D. Lemire, "Quickly parsing eight digits" (2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.kernels.decode.fields import Mask, Positions

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
Words = np.ndarray[tuple[int], np.dtype[np.uint64]]
Block = np.ndarray[tuple[int], np.dtype[np.uint8]]
Texts = np.ndarray[tuple[int, int], np.dtype[np.uint8]]

MARGIN = 32  # bytes before and behind the text that may be read, though they mean nothing

_WORD = 8
_DIGITS_MAX = 18  # more may not fit into 64 bits
_FRACTION_DIGITS = 6
_INLINE = 12  # bytes of a text that Arrow's view of it holds itself
# An exponent of more digits is left: the parser by row may refuse it.
_NUMBER = r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,9})?$"
_VIEW = 16
_ZERO, _MINUS, _ZED, _POINT, _COLON, _TEE, _BLANK = b"0-Z.:T "
# Of a time such as 2026-01-31T12:00: where its digits are, and to what they add, in year, month, day, hour, minute.
_DIGIT_PLACES = [0, 1, 2, 3, 5, 6, 8, 9, 11, 12, 14, 15]
_PLACE_VALUES = np.zeros((len(_DIGIT_PLACES), 5), np.int64)
_PLACE_VALUES[[0, 1, 2, 3], 0] = 1000, 100, 10, 1
_PLACE_VALUES[range(4, 12), [1, 1, 2, 2, 3, 3, 4, 4]] = 10, 1, 10, 1, 10, 1, 10, 1
_MARK_PLACES = [4, 7, 13]
_MARKS = np.frombuffer(b"--:", np.uint8)

_ZEROS = np.uint64(0x3030303030303030)
_HIGH_HALVES = np.uint64(0xF0F0F0F0F0F0F0F0)
_SIXES = np.uint64(0x0606060606060606)
_PAIRS = np.uint64(0x000000FF000000FF)
# By how many digits of a word count, which are its last: the bytes that are kept, and zeros for the others.
_KEPT = np.array([(1 << 64) - (1 << 8 * (_WORD - n)) for n in range(_WORD + 1)], np.uint64)
_FILL = _ZEROS & ~_KEPT
_TENS = 10 ** np.arange(_DIGITS_MAX + 1, dtype=np.int64)
_INLINE_KEPT = np.tril(np.full((_INLINE + 1, _VIEW), 0xFF, np.uint8), 3)


class Text:
    """A block of text, with a margin on both sides. Positions count from its start."""

    def __init__(self, text: Block) -> None:
        self._bytes = np.zeros(len(text) + 2 * MARGIN, np.uint8)
        self._bytes[MARGIN:-MARGIN] = text
        self.bytes = self._bytes[MARGIN:-MARGIN]

    def windows(self, at: Positions, size: int) -> Texts:
        """Copy the ``size`` bytes from each of these positions, which may begin and end in the margins."""
        # Elements of so many bytes: numpy takes half as long for them as for rows of a byte each.
        found: Texts = self._from_each(f"V{size}")[at + MARGIN].view(np.uint8).reshape(-1, size)
        return found

    def at(self, positions: Positions) -> Block:
        """Return the byte at each of these positions, which may be in the margins."""
        return self._bytes[positions + MARGIN]

    def words(self, at: Positions) -> Words:
        """Copy the eight bytes from each of these positions as a word, of which the first is the lowest."""
        found: Words = self._from_each("<u8")[at + MARGIN]
        return found

    def _from_each(self, dtype: str) -> np.ndarray[tuple[int], np.dtype[Any]]:
        """View what starts at every position as elements of a type."""
        count = len(self._bytes) - np.dtype(dtype).itemsize + 1
        return np.ndarray((count,), dtype, self._bytes, 0, (1,))

    def equal(self, at: Positions, text: bytes) -> Mask | None:
        """Return where the text stands at these positions; None if everywhere."""
        same = self.windows(at, len(text)) == np.frombuffer(text, np.uint8)
        return None if same.all() else same.all(axis=1)


@dataclass(frozen=True)
class Spans:
    """Where values stand in a text: half-open ranges."""

    text: Text
    starts: Positions
    ends: Positions

    def __len__(self) -> int:
        return len(self.starts)

    def chosen(self, mask: Mask) -> Spans:
        return Spans(self.text, self.starts[mask], self.ends[mask])

    # ── the columns ─────────────────────────────────────────────────────────────────────────────

    def strings(self) -> tuple[pa.Array, Mask]:
        """Give the texts, which must be UTF-8 without escapes."""
        column = self.series().to_arrow(compat_level=pl.CompatLevel.oldest()).cast(pa.string())
        return column, np.ones(len(self), np.bool_)

    def whole_numbers(self) -> tuple[pa.Array, Mask]:
        """Give whole numbers of up to 18 digits."""
        first, digits = self.text.at(self.starts), self.ends - self.starts
        negative = first == _MINUS
        signed = bool(negative.any())
        if signed:
            digits = digits - negative
            first = self.text.at(self.starts + negative)
        number, exact = _number(self.text, self.ends, digits)
        exact &= (digits > 0) & (digits <= _DIGITS_MAX) & ((first != _ZERO) | (digits == 1))
        return pa.array(np.where(negative, -number, number) if signed else number), exact

    def numbers(self) -> tuple[pa.Array, Mask]:
        """Give numbers of 64 bits, each the nearest one."""
        texts = self.series()
        column = texts.cast(pl.Float64, strict=False).rechunk()
        exact = texts.str.contains(_NUMBER) & column.is_finite().fill_null(value=False)
        return pa.array(column.fill_null(0.0).to_numpy()), exact.to_numpy()

    def are_numbers(self) -> Mask:
        """Return which are numbers as JSON writes them."""
        _, exact = self.whole_numbers()
        left = np.flatnonzero(~exact)
        if len(left):
            exact[left] = self.chosen(~exact).series().str.contains(_NUMBER).to_numpy()
        return exact

    def truths(self) -> tuple[pa.Array, Mask]:
        """Give what is true and what is false."""
        length = self.ends - self.starts
        true = (length == len("true")) & _where(self.text.equal(self.starts, b"true"))
        false = (length == len("false")) & _where(self.text.equal(self.starts, b"false"))
        return pa.array(np.broadcast_to(true, len(self))), np.broadcast_to(true | false, len(self))

    def times(self) -> tuple[pa.Array, Mask]:
        """Give times such as 2026-01-31T12:00:00.5Z, in microseconds; offsets from UTC but Z are left."""
        minutes, exact = self._minutes()
        seconds, two = self._seconds()
        digits = self.ends - self.starts - len("2026-01-31T12:00:00.Z")
        fraction, good = _number(self.text, self.ends - 1, digits)
        exact &= two & good & (self.text.at(self.ends - 1) == _ZED)
        pointed = self.text.at(self.starts + 19) == _POINT
        exact &= (digits == -1) | (pointed & (digits > 0) & (digits <= _FRACTION_DIGITS))
        fraction *= _TENS[_FRACTION_DIGITS - np.clip(digits, 0, _FRACTION_DIGITS)]
        instants = (minutes * 60 + seconds) * 1_000_000 + fraction
        return pa.array(instants).view(pa.timestamp("us", "UTC")), exact

    # ── how they are read ───────────────────────────────────────────────────────────────────────

    def _minutes(self) -> tuple[Numbers, Mask]:
        """Read dates, hours and minutes, as minutes since 1970; once where times beside each other share them."""
        head = self.text.windows(self.starts, 16).view("<u8")
        first = np.ones(len(self), np.bool_)
        first[1:] = (head[1:, 0] != head[:-1, 0]) | (head[1:, 1] != head[:-1, 1])
        runs = np.flatnonzero(first)
        minutes, exact = _minutes_of(head[runs].view(np.uint8))
        which = np.cumsum(first) - 1
        return minutes[which], exact[which]

    def _seconds(self) -> tuple[Numbers, Mask]:
        tens, ones = (self.text.at(self.starts + place) - _ZERO for place in (17, 18))
        exact = (self.text.at(self.starts + 16) == _COLON) & (tens <= 5) & (ones <= 9)
        return tens.astype(np.int64) * 10 + ones, exact

    def series(self) -> pl.Series:
        """Give the texts as views of the block: of each its length and beginning, or all if it is short."""
        lengths = self.ends - self.starts
        views = self.text.windows(self.starts - 4, _VIEW)
        long = lengths > _INLINE
        if not long.all():
            views &= _INLINE_KEPT[np.minimum(lengths, _INLINE)]
        words = views.view(np.uint32)
        words[:, 0] = lengths
        words[long, 2] = 0  # the number of the buffer
        words[long, 3] = self.starts[long]
        buffers = [None, pa.py_buffer(views), pa.py_buffer(self.text.bytes)]
        return pl.Series(pa.Array.from_buffers(pa.string_view(), len(self), buffers))


def _minutes_of(heads: Texts) -> tuple[Numbers, Mask]:
    """Read dates, hours and minutes such as 2026-01-31T12:00, as minutes since 1970."""
    digits = heads[:, _DIGIT_PLACES] - _ZERO
    exact = (digits <= 9).all(axis=1) & (heads[:, _MARK_PLACES] == _MARKS).all(axis=1)
    exact &= (heads[:, 10] == _TEE) | (heads[:, 10] == _BLANK)
    year, month, day, hour, minute = (digits.astype(np.int64) @ _PLACE_VALUES).T
    exact &= (year > 0) & (month > 0) & (month <= 12) & (day > 0) & (hour < 24) & (minute < 60)
    months = (year - 1970) * 12 + month - 1
    first, following = (_day_of(months + n) for n in (0, 1))
    exact &= day <= following - first
    return ((first + day - 1) * 24 + hour) * 60 + minute, exact


def _day_of(months: Numbers) -> Numbers:
    """Give the first day of months since 1970, in days since 1970."""
    return months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)


def _number(text: Text, ends: Positions, digits: Numbers) -> tuple[Numbers, Mask]:
    """Read the ``digits`` digits, up to 18, before each end; none give 0. Return which were digits, too."""
    number = np.zeros(len(ends), np.int64)
    exact = np.ones(len(ends), np.bool_)
    for done in range(0, min(int(digits.max(initial=0)), _DIGITS_MAX), _WORD):
        here = np.clip(digits - done, 0, _WORD)
        word = text.words(ends - done - _WORD) & _KEPT[here] | _FILL[here]
        exact &= (word & _HIGH_HALVES == _ZEROS) & (word + _SIXES & _HIGH_HALVES == _ZEROS)
        number += _eight_digits(word) * _TENS[done]
    return number, exact


def _eight_digits(word: Words) -> Numbers:
    """Give the number that eight digits make, of which the first is the lowest byte."""
    pairs = word - _ZEROS
    pairs = pairs * np.uint64(10) + (pairs >> np.uint64(8))
    fours = (pairs & _PAIRS) * np.uint64(0x000F424000000064)
    fours += (pairs >> np.uint64(16) & _PAIRS) * np.uint64(0x0000271000000001)
    return (fours >> np.uint64(32)).astype(np.int64)


def _where(mask: Mask | None) -> Mask:
    return np.ones(1, np.bool_) if mask is None else mask
