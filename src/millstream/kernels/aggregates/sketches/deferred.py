"""Sketches whose bytes depend on what is merged when: values wait until a batch's state is stored.

How the rows of a batch are divided among tasks and tables may change when it is repeated. So a batch's
values wait in a bag, which is the same however it is put together, and become a sketch where the state
is stored. From there on what is merged with what hangs on the state alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import polars as pl

from millstream.kernels.aggregates.bags import bag, bag_type, merged_bags
from millstream.kernels.aggregates.groups import flat, grouped, over_groups, over_rows
from millstream.kernels.aggregates.sketches.sketch import Sketch


@dataclass(frozen=True)
class DeferredSketch(Sketch):
    """A sketch in two columns: what was stored (null: nothing was), and the bag of what waits."""

    def partial(self, name: str) -> list[pl.Expr]:
        waits = self.value if self.of_sketches else self.sketch_input()
        if self.of_sketches:  # here a row can still be identified
            waits = over_rows(waits, lambda images: self._checked(name, images), pl.Binary())
        return [
            over_groups(self.value, _nulls, pl.Binary()).alias(self._column(name)),
            bag(waits, self._deferred, signed=False).alias(self._deferred_column(name)),
        ]

    def merge(self, name: str) -> list[pl.Expr]:
        return [
            over_groups(
                pl.col(self._column(name)), lambda lists: self._joined(name, lists), _IMAGE
            ),
            merged_bags(pl.col(self._deferred_column(name)), self._deferred),
        ]

    def result(self, name: str) -> pl.Expr:
        if self.as_sketch:
            return self._whole(name).alias(name)
        return over_rows(self._whole(name), self.read, self.result_type).alias(name)

    def for_state(self, name: str) -> list[pl.Expr]:
        """Expressions over merged partials that give them as state is to keep them."""
        nothing = pl.lit(pl.Series([[]], dtype=bag_type(self._deferred))).first()
        return [
            self._whole(name).alias(self._column(name)),
            nothing.alias(self._deferred_column(name)),
        ]

    @property
    def _deferred(self) -> pl.DataType:
        return pl.Binary() if self.of_sketches else self.deferred_type

    def _deferred_column(self, name: str) -> str:
        return f"{self._column(name)}.deferred"

    def _whole(self, name: str) -> pl.Expr:
        columns = pl.struct(
            pl.col(self._column(name)).alias("stored"),
            pl.col(self._deferred_column(name)).alias("waits"),
        )
        return over_rows(columns, lambda rows: self._put_together(name, rows), _IMAGE)

    def _put_together(self, name: str, rows: pl.Series) -> pl.Series:
        values, lengths = flat(rows.struct.field("waits"))
        bags = grouped(values.struct.unnest(), lengths)
        images = rows.struct.field("stored").to_list()
        made = [self._with(name, image, waits) for image, waits in zip(images, bags, strict=True)]
        return pl.Series(made, dtype=_IMAGE)

    def _with(self, name: str, image: bytes | None, waits: pl.DataFrame) -> bytes:
        if image is not None and not waits.height:
            return image
        stored = [] if image is None else [image]
        if not self.of_sketches:
            return self._or_error(name, lambda: self.build(stored, waits))
        for value, count in waits.iter_rows():
            stored += [value] * count
        return self._or_error(name, lambda: self.merged(sorted(stored)))

    def _joined(self, name: str, lists: pl.Series) -> pl.Series:
        images, lengths = flat(lists)
        return pl.Series(
            [self._one_of(name, group) for group in grouped(images.to_list(), lengths)],
            dtype=_IMAGE,
        )

    def _one_of(self, name: str, images: Sequence[bytes | None]) -> bytes | None:
        found = sorted(image for image in images if image is not None)
        if len(found) <= 1:
            return next(iter(found), None)
        return self._or_error(name, lambda: self.merged(found))

    def _checked(self, name: str, images: pl.Series) -> pl.Series:
        for image in images.unique().drop_nulls().to_list():
            self._or_error(name, partial(self.merged, [image]))
        return images

    def merged(self, sketches: list[bytes]) -> bytes:
        nothing = pl.Series(dtype=bag_type(self.deferred_type)).explode().struct.unnest()
        return self.build(sketches, nothing)

    # ── what a kind of sketch is ────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def deferred_type(self) -> pl.DataType:
        """The type of values as the sketch is to see them."""

    @abstractmethod
    def build(self, sketches: Sequence[bytes], table: pl.DataFrame) -> bytes:
        """Make one sketch of some, in this order, and of values with their counts, rising."""


_IMAGE = pl.Binary()


def _nulls(lists: pl.Series) -> pl.Series:
    return pl.Series([None], dtype=_IMAGE).new_from_index(0, len(lists))
