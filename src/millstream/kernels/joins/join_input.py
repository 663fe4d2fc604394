"""The inputs of a join: their rows as the join keeps and pairs them.

A row has its keys as ``__key0``, ``__key1``, …, which the two inputs have in common, and its columns under the
names that they have in the result. So nothing of the two inputs but the keys has one name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from millstream.kernels.frames import HASH, TIME, WEIGHT

_KEY = "__key"


def key_names(count: int) -> tuple[str, ...]:
    """Return the names of the keys."""
    return tuple(f"{_KEY}{number}" for number in range(count))


@dataclass(frozen=True)
class JoinInput:
    """One input: the columns that are compared, and those that the result has of it.

    ``columns`` has the name in the input, the name in the result, and the type.
    """

    on: tuple[str, ...]
    key_types: tuple[pl.DataType, ...]
    columns: tuple[tuple[str, str, pl.DataType], ...]

    @property
    def columns_read(self) -> set[str]:
        return {*self.on, *(name for name, _, _ in self.columns)}

    @property
    def keys(self) -> tuple[str, ...]:
        return key_names(len(self.on))

    @property
    def names(self) -> list[str]:
        """The names that its columns have in the result."""
        return [name for _, name, _ in self.columns]

    @property
    def copied_keys(self) -> dict[str, str]:
        """The keys that the result has, too, each with the name of that column."""
        names = {name: renamed for name, renamed, _ in self.columns}
        return {key: names[on] for on, key in zip(self.on, self.keys, strict=True) if on in names}

    def project(self, rows: pl.DataFrame, hidden: Sequence[str]) -> pl.DataFrame:
        """Return the keys and columns of rows, and of the hidden columns those that are there."""
        keys = [rows[name].alias(key) for name, key in zip(self.on, self.keys, strict=True)]
        columns = [rows[name].alias(renamed) for name, renamed, _ in self.columns]
        others = [rows[name] for name in hidden if name in rows.columns]
        return pl.DataFrame([*keys, *columns, *others])

    def empty(self, **hidden: pl.DataType) -> pl.DataFrame:
        """Return no rows, with event time and the given hidden columns."""
        keys = dict(zip(self.keys, self.key_types, strict=True))
        columns = {name: dtype for _, name, dtype in self.columns}
        return pl.DataFrame(schema={**keys, **columns, TIME: pl.Int64(), **hidden})


def null_keys(rows: pl.DataFrame, keys: Sequence[str]) -> pl.Series:
    """Return for each row whether one of its keys is null."""
    return rows.select(pl.any_horizontal(pl.col(list(keys)).is_null())).to_series()


def compared(rows: pl.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return the columns by which polars is to join rows whose keys are equal; both sides have ``__hash``.

    Where polars knows of one column of floats that it is sorted, as it does of any single row, it merges, and
    NaN is then not equal to NaN. Of two columns it never does so.
    """
    alone = len(keys) == 1 and rows[keys[0]].dtype.is_float()
    return [*keys, HASH] if alone else list(keys)


@dataclass(frozen=True)
class JoinedColumns:
    """Which columns a joined row has, in their order.

    ``key_columns`` are the columns of the result that are keys, each with its key: a row without a left side
    has its keys there. ``of_both``: the columns of the right input are in the result.
    """

    left: JoinInput
    right: JoinInput
    key_columns: tuple[tuple[str, str], ...]
    of_both: bool = True

    @property
    def types(self) -> dict[str, pl.DataType]:
        right = self.right.columns if self.of_both else ()
        return {name: dtype for _, name, dtype in (*self.left.columns, *right)}

    def of_pairs(self, pairs: pl.DataFrame, *hidden: str) -> pl.DataFrame:
        """Return the joined rows of pairs."""
        return pairs.select(*_columns(pairs, [*self.types, *hidden]))

    def visible(self, pairs: pl.DataFrame) -> pl.DataFrame:
        """Return the columns of pairs over which a condition is, as they were when it was declared."""
        return pairs.select(*_columns(pairs, [*self.left.names, *self.right.names]))

    def of_left_alone(self, rows: pl.DataFrame, *hidden: str) -> pl.DataFrame:
        """Return the joined rows of left rows that have no partner: the right columns are null."""
        return self._extended(rows, {}, hidden)

    def of_right_alone(self, rows: pl.DataFrame, *hidden: str) -> pl.DataFrame:
        """Return the joined rows of right rows that have no partner: of the left there are the keys."""
        return self._extended(rows, dict(self.key_columns), hidden)

    def _extended(
        self, rows: pl.DataFrame, keys: dict[str, str], hidden: tuple[str, ...]
    ) -> pl.DataFrame:
        made = []
        for name, dtype in self.types.items():
            source = keys.get(name, name)
            if source in rows.columns:
                made.append(rows[source].alias(name))
            else:
                made.append(pl.Series(name, [None], dtype=dtype).new_from_index(0, rows.height))
        return pl.DataFrame([*made, *_columns(rows, hidden)])


def _columns(rows: pl.DataFrame, names: Sequence[str]) -> list[pl.Series]:
    return [rows[name] for name in names]


_RIGHT_TIME = "__right_time"
_RIGHT_WEIGHT = "__right_weight"


def pair_weighted(
    left: pl.DataFrame, right: pl.DataFrame, keys: tuple[str, ...], *, nulls_equal: bool
) -> pl.DataFrame:
    """Pair rows with equal keys; a pair's time is the later one, its weight the product."""
    on = compared(left, keys)
    renamed = right.rename({TIME: _RIGHT_TIME, WEIGHT: _RIGHT_WEIGHT})
    renamed = renamed if HASH in on else renamed.drop(HASH)
    pairs = left.join(renamed, on=on, nulls_equal=nulls_equal, maintain_order="left_right")
    return pairs.with_columns(
        pl.max_horizontal(TIME, _RIGHT_TIME).alias(TIME),
        (pl.col(WEIGHT) * pl.col(_RIGHT_WEIGHT)).alias(WEIGHT),
    ).drop(_RIGHT_TIME, _RIGHT_WEIGHT)
