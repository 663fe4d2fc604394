"""JSON values, decoded in blocks by Arrow's reader and, where its result may differ, by row.

A whole block is read at once, and only the fields wanted. What Arrow rejects is found by bisection; what it
read is checked column by column (`columns.py`). Records that remain undecided are read by row, which gives
their value or the decode error. The result for a record depends on the record alone, not on its block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from millstream.kernels.decode.columns import ambiguous, converted, found_in, inexact_decimals
from millstream.kernels.decode.decode_error import DecodeError
from millstream.kernels.decode.fields import (
    Decoded,
    Field,
    Mask,
    Positions,
    decimal_keys,
    json_type,
    table_schema,
)
from millstream.kernels.decode.layout_reader import read_alike
from millstream.kernels.decode.row_decoder import decode_rows, merged, rows_without_columns
from millstream.kernels.decode.row_reader import RowReader, parse_json

_BLOCK_BYTES = 8 << 20
# A call of Arrow's reader costs as much as reading about 40 values by row, or 400 in its block.
_BY_ROW_MAX = 128
_PARTS = 16
_STRETCH_MIN = 64  # values that are copied together more quickly than one by one
_OPEN, _CLOSE = ord("{"), ord("}")
_NO_FIELD = "__none"  # read where no field is wanted, so that values are looked at and counted


@dataclass(frozen=True)
class JsonDecoder:
    """Decodes JSON objects into the given fields; others are skipped over.

    Whitespace around an object does not matter. Nothing is converted: ``"7"`` is no number.
    """

    fields: tuple[Field, ...]

    def decode(self, values: pa.Array) -> Decoded:
        """Decode a batch of values (binary). Rows come in the order of the values."""
        if self._block_schema is None:
            return decode_rows(values, np.arange(len(values)), self.fields, self._read)
        in_braces = _in_braces(values)
        # A value that is cut short is read by row; its block need not be divided to find it.
        at = np.flatnonzero(in_braces)
        objects = values if len(at) == len(values) else _without(values, ~in_braces)
        parts: list[tuple[pa.Table, Positions]] = []
        undecided: list[Positions] = [np.flatnonzero(~in_braces)]

        def take(table: pa.Table, values: pa.Array, start: int, positions: Positions) -> None:
            plain, bad = self._plain(table, values, start)
            if bad is not None and bad.any():
                undecided.append(positions[bad])
                plain, positions = plain.filter(pa.array(~bad)), positions[~bad]
            parts.append((plain, positions))

        alike = read_alike(objects, self._block_schema)
        if alike is not None:
            table, read = alike
            take(table, objects, 0, at[read])
            at, objects = at[~read], _without(objects, read)
        blocks, refused = self._read_blocks(objects, self._block_schema)
        undecided += [at[part] for part in refused]
        for table, start in blocks:
            take(table, objects, start, at[start : start + table.num_rows])
        left = np.sort(np.concatenate(undecided))
        if not len(left) and len(parts) == 1:
            return Decoded(*parts[0], [])
        return merged(parts, decode_rows(values, left, self.fields, self._read))

    def _read(self, value: bytes | None) -> dict[str, Any]:
        """Read one value by row.

        Raises:
            DecodeError: it cannot be decoded.
        """
        try:
            found = parse_json(value)
        except DecodeError:
            # Arrow is less strict about fields that are not wanted, and its result holds in any block.
            row = self._read_alone(value)
            if row is None:
                raise
            return row
        return RowReader().read(self.fields, found)

    def _read_alone(self, value: bytes | None) -> dict[str, Any] | None:
        """Read one value as a block of its own; None if it remains undecided."""
        if self._block_schema is None:
            return None
        values = pa.array([value], pa.binary())
        if not _in_braces(values).all():
            return None
        try:
            table, undecided = self._plain(_parse(values, self._block_schema), values, 0)
        except (pa.ArrowInvalid, ValueError):
            return None
        if undecided is not None and undecided.any():
            return None
        row: dict[str, Any] = table.to_pylist()[0] if self.fields else {}
        return row

    @cached_property
    def _block_schema(self) -> pa.Schema | None:
        """The schema that Arrow's reader reads; None if it cannot read all the fields."""
        types = [(field.key, json_type(field.value_shape)) for field in self.fields]
        if any(kind is None for _, kind in types):
            return None
        return pa.schema(types or [(_NO_FIELD, pa.null())])

    @cached_property
    def _inexact(self) -> str | None:
        """The pattern of values that hold decimals which Arrow may read wrongly."""
        keys = set[str]().union(
            *(decimal_keys(field.value_shape, field.key) for field in self.fields)
        )
        return inexact_decimals(keys) if keys else None

    def _read_blocks(
        self, values: pa.Array, schema: pa.Schema
    ) -> tuple[list[tuple[pa.Table, int]], list[Positions]]:
        """Read all values; narrow what Arrow rejects down to short ranges, to be read by row.

        Returns:
            Tables, each with the position of its first row, and the positions to be read by row.
        """
        blocks: list[tuple[pa.Table, int]] = []
        refused: list[Positions] = []
        ranges = [(0, len(values))] if len(values) else []
        while ranges:
            start, end = ranges.pop()
            try:
                blocks.append((_parse(values[start:end], schema), start))
            except (pa.ArrowInvalid, ValueError):
                if end - start <= _BY_ROW_MAX:
                    refused.append(np.arange(start, end))
                else:
                    ranges += _divided(start, end)
        return blocks, refused

    def _plain(self, table: pa.Table, values: pa.Array, start: int) -> tuple[pa.Table, Mask | None]:
        """Turn what Arrow read into the fields' columns; return which rows are undecided too."""
        columns: list[pa.Array] = []
        undecided: Mask | None = None
        if self._inexact is not None:
            undecided = found_in(values[start:][: table.num_rows], self._inexact)
        for number, field in enumerate(self.fields):
            column, bad = converted(_whole(table.column(number)), field.value_shape)
            if column.null_count:
                if ambiguous(field):
                    column, unclear = _with_default(column, field, values[start:][: len(column)])
                    bad = unclear if bad is None else bad | unclear
                elif field.required:
                    nulls = column.is_null().to_numpy(zero_copy_only=False)
                    bad = nulls if bad is None else bad | nulls
            columns.append(column)
            if bad is not None:
                undecided = bad if undecided is None else undecided | bad
        if not columns:
            return rows_without_columns(table.num_rows), None
        return pa.Table.from_arrays(columns, schema=table_schema(self.fields)), undecided


def _divided(start: int, end: int) -> list[tuple[int, int]]:
    """Divide a range with a rejected value: into many parts while it is large, then in two."""
    parts = _PARTS if end - start > _PARTS * _BY_ROW_MAX else 2
    step = -(-(end - start) // parts)
    return [(at, min(at + step, end)) for at in range(start, end, step)]


def _with_default(column: pa.Array, field: Field, values: pa.Array) -> tuple[pa.Array, Mask]:
    """Put the default where the field is missing. Undecided is where it may be there as null.

    A value in whose text the field's name does not occur does not have it, unless the name was
    written with escapes.
    """
    nulls = column.is_null()
    at = np.flatnonzero(nulls.to_numpy(zero_copy_only=False))
    texts = values.take(pa.array(at))
    mentioned = pc.or_(
        pc.match_substring(texts, f'"{field.key}"'), pc.match_substring(texts, "\\u")
    ).to_numpy(zero_copy_only=False)
    unclear: Mask = np.zeros(len(column), np.bool_)
    unclear[at if field.required else at[mentioned]] = True
    if not field.required and field.default is not None:
        column = pc.if_else(nulls, pa.array([field.default], field.type)[0], column)
    return column, unclear


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _parse(values: pa.Array, schema: pa.Schema) -> pa.Table:
    """Parse all values, or raise because of at least one of them.

    Each value begins with ``{`` and ends with ``}``. So no object can span two lines (in
    JSON nothing may follow ``}`` that begins with ``{``, and no string holds a raw line
    break), each value gives at least one row, and as many rows as values means one each.
    """
    if not len(values):
        return schema.empty_table()
    lines = pc.binary_join_element_wise(values, pa.scalar(b"\n"), pa.scalar(b""))
    offsets = np.frombuffer(lines.buffers()[1], np.int32)[lines.offset :]
    start, end = int(offsets[0]), int(offsets[len(lines)])
    table = pj.read_json(
        pa.BufferReader(lines.buffers()[2].slice(start, end - start)),
        read_options=pj.ReadOptions(
            use_threads=False, block_size=max(_BLOCK_BYTES, 2 * (end - start))
        ),
        parse_options=pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )
    if table.num_rows != len(values):
        raise ValueError("the value holds more than one JSON object")
    table.validate(full=True)  # Arrow's JSON reader takes text for UTF-8 without a look
    return table


def _without(values: pa.Array, left_out: Mask) -> pa.Array:
    """Leave values out. Where they are few, what lies between is copied in stretches."""
    cuts = np.flatnonzero(left_out).tolist()
    if len(cuts) * _STRETCH_MIN > len(values):
        return values.filter(pa.array(~left_out))
    starts, stops = [0, *(at + 1 for at in cuts)], [*cuts, len(values)]
    return pa.concat_arrays(
        [values.slice(a, b - a) for a, b in zip(starts, stops, strict=True) if a < b]
        or [values.slice(0, 0)]
    )


def _in_braces(values: pa.Array) -> Mask:
    """Return which values begin with ``{`` and end with ``}``."""
    offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset :][: len(values) + 1]
    data = np.frombuffer(values.buffers()[2] or b"", np.uint8)
    if not len(data):
        return np.zeros(len(values), np.bool_)
    begins = np.minimum(offsets[:-1], len(data) - 1)  # what is empty may stand at the very end
    found: Mask = (data[begins] == _OPEN) & (data[offsets[1:] - 1] == _CLOSE)
    found &= np.diff(offsets) >= len("{}")
    if values.null_count:
        found &= values.is_valid().to_numpy(zero_copy_only=False)
    return found
