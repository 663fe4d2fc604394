"""Decoding by row: each value by itself, then columns of the decoded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.kernels.decode.decode_error import DecodeError
from millstream.kernels.decode.fields import Decoded, Field, Positions, table_schema

ReadRow = Callable[[bytes | None], dict[str, Any]]


def decode_rows(
    values: pa.Array, positions: Positions, fields: tuple[Field, ...], read: ReadRow
) -> Decoded:
    """Decode the values at these positions by ``read``, which raises DecodeError where it cannot."""
    rows: list[dict[str, Any]] = []
    good: list[int] = []
    errors: list[tuple[int, str]] = []
    chosen = values.take(pa.array(positions)) if len(positions) < len(values) else values
    for position, value in zip(positions.tolist(), chosen.to_pylist(), strict=True):
        try:
            rows.append(read(value))
            good.append(position)
        except DecodeError as error:
            errors.append((position, error.reason()))
    if not fields:
        return Decoded(rows_without_columns(len(rows)), np.array(good, np.int64), errors)
    columns = [pa.array([row[field.name] for row in rows], field.type) for field in fields]
    table = pa.Table.from_arrays(columns, schema=table_schema(fields))
    return Decoded(table, np.array(good, np.int64), errors)


def merged(parts: Sequence[tuple[pa.Table, Positions]], by_row: Decoded) -> Decoded:
    """Put together what was decoded in blocks and by row, in the order of positions."""
    filled = [(table, at) for table, at in parts if len(at)]
    if len(by_row.good) or not filled:
        filled.append((by_row.table, by_row.good))
    good = np.concatenate([at for _, at in filled])
    order = np.argsort(good, kind="stable")
    if not filled[0][0].num_columns:
        return Decoded(rows_without_columns(len(good)), good[order], by_row.errors)
    table = pa.concat_tables([part for part, _ in filled])
    if (order[1:] < order[:-1]).any():  # a part need not be in order itself
        table = table.take(pa.array(order))
    return Decoded(table, good[order], by_row.errors)


def rows_without_columns(rows: int) -> pa.Table:
    """Make a table that has rows, though no columns; Arrow counts them by a column."""
    return pa.table({"": pa.nulls(rows)}).select([])
