"""Frequent items: the most frequent values, approximately.

A sketch counts 0.75 · 2^lg_size values at a time. While there are no more different ones it is exact;
beyond, each count is out by at most 3.5 / 2^lg_size of all values, 0.34 % with ``lg_size`` = 10, always:
``count_min`` ≤ true count ≤ ``count``, and every value more frequent than that is found.
(DataSketches' ``ItemsSketch``; Anderson and others, "A High-Performance Algorithm for Identifying
Frequent Items in Data Streams", 2017.) Which other values are found, and how near the counts are, may
depend within these bounds on where batches end; a batch that is repeated gives the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from millstream.kernels.aggregates.sketches.deferred import DeferredSketch
from millstream.kernels.aggregates.sketches.sketch import datasketches

LG_SIZE_MIN, LG_SIZE_MAX = 3, 26


@dataclass(frozen=True)
class FrequentItems(DeferredSketch):
    """The k most frequent values with bounds of their counts, most frequent first; ties by value."""

    k: int = 10
    lg_size: int = 10
    items: pl.DataType | None = None  # of what the sketches are, where values are sketches
    display_name: ClassVar[str] = "frequent-items"
    exact_alternative: ClassVar[str] = 'ms.top_k with method="exact"'
    accepted_types: ClassVar[str] = "text and whole numbers"

    @property
    def kind(self) -> str:
        return f"frequent_{'text' if self._text else 'whole'}{self.lg_size}"

    @property
    def _text(self) -> bool:
        return (self.items if self.of_sketches else self.dtype) == pl.String

    @property
    def result_type(self) -> pl.DataType:
        value = pl.String() if self._text else pl.Int64()
        return pl.List(pl.Struct({"value": value, "count": pl.Int64, "count_min": pl.Int64}))

    @property
    def deferred_type(self) -> pl.DataType:
        return pl.String() if self._text else pl.Int64()

    def accepts(self, dtype: pl.DataType) -> bool:
        return dtype == pl.String or dtype.is_integer()

    def sketch_input(self) -> pl.Expr:
        return self.value if self._text else self.value.cast(pl.Int64)

    def _new(self) -> Any:
        library = datasketches()
        kind = library.frequent_strings_sketch if self._text else library.frequent_items_sketch
        return kind(self.lg_size)

    def _write(self, sketch: Any) -> bytes:
        written: bytes = (
            sketch.serialize() if self._text else sketch.serialize(datasketches().PyLongsSerDe())
        )
        return written

    def _read(self, image: bytes) -> Any:
        library = datasketches()
        if self._text:
            return library.frequent_strings_sketch.deserialize(image)
        return library.frequent_items_sketch.deserialize(image, library.PyLongsSerDe())

    def build(self, sketches: Sequence[bytes], table: pl.DataFrame) -> bytes:
        whole = self._new()
        for image in sketches:
            whole.merge(self._read(image))
        for value, count in table.iter_rows():
            whole.update(value, count)
        return self._write(whole)

    def read(self, sketches: pl.Series) -> pl.Series:
        return pl.Series([self._top(image) for image in sketches.to_list()], dtype=self.result_type)

    def _top(self, image: bytes) -> list[dict[str, Any]]:
        complete = datasketches().frequent_items_error_type.NO_FALSE_NEGATIVES
        found = self._read(image).get_frequent_items(complete)
        ranked = sorted(found, key=lambda item: (-item[1], item[0]))[: self.k]
        return [
            {"value": value, "count": most, "count_min": least} for value, _, least, most in ranked
        ]
