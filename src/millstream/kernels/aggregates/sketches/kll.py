"""KLL: quantiles, approximately.

With ``k`` = 200 the rank of a result is within 1.33 % of the one asked for, in 99 of 100 sketches
(DataSketches' ``normalized_rank_error``; Karnin, Lang and Liberty, "Optimal Quantile Approximation in
Streams", 2016), and a sketch is about 3 KiB. Up to ``k`` values the result is exact. Beyond, a sketch
throws coins to choose which values it keeps. They are hashes of the values (see :mod:`.kll_levels`), and
the values of a batch are kept as they are until its state is stored: so a batch that is repeated gives
the same result. It depends, within that error, on where batches end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import polars as pl

from millstream.kernels.aggregates.protocol import is_number
from millstream.kernels.aggregates.sketches.deferred import DeferredSketch
from millstream.kernels.aggregates.sketches.kll_levels import Levels
from millstream.kernels.aggregates.sketches.sketch import datasketches

K_MIN, K_MAX = 8, 65535


@dataclass(frozen=True)
class Kll(DeferredSketch):
    """Quantiles of numbers, as floats, by the nearest rank. What is not a number is left out."""

    k: int = 200
    shares: tuple[float, ...] = ()
    several: bool = False
    display_name: ClassVar[str] = "KLL"
    exact_alternative: ClassVar[str] = 'ms.quantile or ms.quantiles with method="exact"'
    accepted_types: ClassVar[str] = "numbers and Decimals"

    @property
    def kind(self) -> str:
        return f"kll{self.k}"

    @property
    def result_type(self) -> pl.DataType:
        return pl.List(pl.Float64) if self.several else pl.Float64()

    @property
    def deferred_type(self) -> pl.DataType:
        return pl.Float64()

    def accepts(self, dtype: pl.DataType) -> bool:
        return is_number(dtype)

    def sketch_input(self) -> pl.Expr:
        return self.value.cast(pl.Float64)

    def build(self, sketches: Sequence[bytes], table: pl.DataFrame) -> bytes:
        whole = Levels(self.k)
        for image in sketches:
            part = Levels.read(image)
            if part.k != self.k:
                raise ValueError(f"k is {part.k} there and {self.k} here")
            whole.merge(part)
        values = np.repeat(table["value"].to_numpy(), table["count"].to_numpy())
        whole.take(values[~np.isnan(values)])
        return whole.written()

    def read(self, sketches: pl.Series) -> pl.Series:
        read = datasketches().kll_doubles_sketch.deserialize
        results = []
        for image in sketches.to_list():
            sketch = read(image)
            found = [] if sketch.is_empty() else sketch.get_quantiles(list(self.shares), True)
            results.append(found if self.several else next(iter(found), None))
        return pl.Series(results, dtype=self.result_type)
