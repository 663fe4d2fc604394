"""HyperLogLog: how many different values, approximately.

With ``lg_k`` = 12 the relative standard error is 1.04 / sqrt(2^12) = 1.6 %, and a sketch is 4 KiB at
most; each step of ``lg_k`` up halves the square of the error and doubles the size. (Flajolet and others,
"HyperLogLog", 2007; DataSketches adds a better estimate for few values, exact up to some hundreds in
practice.)

A sketch is the set of what its values hash to, so merging in any grouping gives the same, and a value
seen again changes nothing. DataSketches besides keeps an estimate that depends on the order of
arrival, and lists few values in the order of arrival; both are left out here, as DataSketches itself
does when it merges, so that equal sets have equal bytes, and equal results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import polars as pl

from millstream.kernels.aggregates.bags import distinct_values
from millstream.kernels.aggregates.groups import (
    Lengths,
    flat,
    grouped,
    over_groups,
    over_rows,
    without_nulls,
)
from millstream.kernels.aggregates.sketches.sketch import Sketch, datasketches

LG_K_MIN, LG_K_MAX = 4, 21

# The preamble of a sketch; DataSketches' PreambleUtil says what its bytes are.
_LG_K_BYTE, _FLAGS_BYTE, _LEAST_BYTE, _MODE_BYTE = 3, 5, 6, 7
_OUT_OF_ORDER = 16
_LIST, _SET = 0, 1
_COUPONS_START = {_LIST: 8, _SET: 12}
_ARRIVAL_ESTIMATE, _COUNT_OF_LEAST = slice(8, 16), slice(32, 36)


@dataclass(frozen=True)
class Hll(Sketch):
    """The number of different values. The empty text is not counted, as in Spark's functions.

    Whole numbers, floats and text hash as in Spark and DataSketches; dates, times and durations as
    their number of days or microseconds, booleans as 0 and 1, Decimals as their text.
    """

    lg_k: int = 12
    display_name: ClassVar[str] = "HLL"
    exact_alternative: ClassVar[str] = 'ms.distinct with method="exact"'
    accepted_types: ClassVar[str] = "numbers, booleans, text, dates, times and durations"

    @property
    def kind(self) -> str:
        return f"hll{self.lg_k}"

    @property
    def result_type(self) -> pl.DataType:
        return pl.Int64()

    def accepts(self, dtype: pl.DataType) -> bool:
        return dtype.is_numeric() or dtype.is_temporal() or dtype in (pl.Boolean, pl.String)

    def sketch_input(self) -> pl.Expr:
        dtype = self.dtype
        assert dtype is not None
        if dtype == pl.String or dtype.is_decimal():
            return self.value.cast(pl.String)
        if dtype.is_float():
            return self.value.cast(pl.Float64)
        if isinstance(dtype, pl.Datetime):
            return self.value.dt.epoch("us")
        if dtype == pl.Duration:
            return self.value.dt.total_microseconds()
        return self.value.to_physical().cast(pl.Int64)

    def partial(self, name: str) -> list[pl.Expr]:
        if self.of_sketches:
            made = over_groups(self.value, lambda lists: self._merged(name, lists), pl.Binary())
        else:
            made = over_groups(self.sketch_input(), self._made, pl.Binary())
        return [made.alias(self._column(name))]

    def merge(self, name: str) -> list[pl.Expr]:
        column = pl.col(self._column(name))
        return [over_groups(column, lambda lists: self._merged(name, lists), pl.Binary())]

    def result(self, name: str) -> pl.Expr:
        sketches = pl.col(self._column(name))
        if self.as_sketch:
            return sketches.alias(name)
        return over_rows(sketches, self.read, self.result_type).alias(name)

    def _made(self, lists: pl.Series) -> pl.Series:
        return pl.Series(self.sketches_of(*without_nulls(*flat(lists))), dtype=pl.Binary)

    def _merged(self, name: str, lists: pl.Series) -> pl.Series:
        sketches, lengths = without_nulls(*flat(lists))
        return pl.Series(
            [self._one(name, group) for group in grouped(sketches.to_list(), lengths)],
            dtype=pl.Binary,
        )

    def _one(self, name: str, sketches: list[bytes]) -> bytes:
        if len(sketches) == 1 and not self.of_sketches:
            return sketches[0]
        return self._or_error(name, lambda: self.merged(sketches))

    def sketches_of(self, values: pl.Series, lengths: Lengths) -> Iterable[bytes]:
        library = datasketches()
        different, counts = distinct_values(values, lengths)
        for group in grouped(different.to_list(), counts):
            sketch = library.hll_sketch(self.lg_k, library.HLL_8)
            deque(map(sketch.update, group), maxlen=0)
            yield canonical(sketch.serialize_compact())

    def merged(self, sketches: list[bytes]) -> bytes:
        library = datasketches()
        union = library.hll_union(self.lg_k)
        for image in sketches:
            if image[_LG_K_BYTE] != self.lg_k:
                raise ValueError(f"lg_k is {image[_LG_K_BYTE]} there and {self.lg_k} here")
            union.update(library.hll_sketch.deserialize(image))
        return canonical(union.get_result(library.HLL_8).serialize_compact())

    def read(self, sketches: pl.Series) -> pl.Series:
        read = datasketches().hll_sketch.deserialize
        estimates = [_rounded(read(image).get_estimate()) for image in sketches.to_list()]
        return pl.Series(estimates, dtype=pl.Int64)


def _rounded(estimate: float) -> int:
    return int(estimate + 0.5)  # as Java's Math.round does, and so Spark


def canonical(image: bytes) -> bytes:
    """Take out of a compact sketch of type HLL_8 what depends on the order of arrival."""
    plain = bytearray(image)
    mode = plain[_MODE_BYTE] & 3
    if mode in _COUPONS_START:
        plain[_FLAGS_BYTE] &= ~_OUT_OF_ORDER
        start = _COUPONS_START[mode]
        coupons: Any = np.frombuffer(image, "<u4", offset=start)
        plain[start:] = np.sort(coupons).tobytes()
    else:
        plain[_FLAGS_BYTE] |= _OUT_OF_ORDER
        plain[_ARRIVAL_ESTIMATE] = bytes(8)
        if plain[_LEAST_BYTE]:  # the least register may be counted, or how many are zero: here none
            plain[_LEAST_BYTE] = 0
            plain[_COUNT_OF_LEAST] = bytes(4)
    return bytes(plain)
