"""Rows of a snapshot's chunk by column: what the driver gave, as JSON.

The result is, byte for byte, what the values that :meth:`SchemaColumn.renderer` makes are as JSON. Integers and texts,
which most columns are, are not looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from millstream.capture.envelope import to_json
from millstream.capture.json_columns import Fragments, cells_of, objects_of
from millstream.capture.mysql import columns
from millstream.capture.mysql.charsets import ASCII_CHARSETS, UTF8_CHARSETS, text_decoder
from millstream.capture.mysql.table_schema import SchemaColumn, TableSchema
from millstream.capture.units import RowBlock

_BLOCK_ROWS_MIN = 16  # as of row events: fewer are quicker one by one
_BLOCK_BYTES_MAX = 8 << 20  # larger rows gain nothing, and an array holds no more than 2 GiB


def snapshot_block(schema: TableSchema, found: Sequence[tuple[Any, ...]]) -> RowBlock | None:
    """Return selected rows, of which the first columns are the table's; None where they are to be read one by one."""
    if len(found) < max(1, _BLOCK_ROWS_MIN):
        return None
    selected = zip(*found, strict=True)
    try:
        encoded = {
            column.name: _encoded(schema, column, values)
            for column, values in zip(schema.columns, selected, strict=False)
        }
    except (ValueError, pa.ArrowException):
        return None  # one by one it is seen which
    if sum(one.column.nbytes for one in encoded.values()) > _BLOCK_BYTES_MAX:
        return None
    keys = objects_of(encoded, schema.key, len(found))
    rows = objects_of(encoded, tuple(encoded), len(found))
    return RowBlock(schema.database, schema.table, "r", frozenset(encoded), rows, keys)


def _encoded(
    schema: TableSchema, column: SchemaColumn, values: tuple[str | bytes | None, ...]
) -> Fragments:
    if column.is_integer:
        return _integers(values, unsigned="unsigned" in column.column_type)
    if column.is_text:
        charset = column.charset or "utf8mb4"
        encode = columns.texts(
            text_decoder(charset, f"{schema.name}.{column.name}"),
            utf8=charset in UTF8_CHARSETS,
            of_ascii=charset in ASCII_CHARSETS,
        )
        column = pa.array(values, pa.binary())
        if not isinstance(column, pa.Array):
            raise ValueError("texts have more bytes than one array holds")
        return encode(cells_of(column))
    render = column.renderer(schema.name)
    shown = [b"null" if value is None else to_json(render(value)) for value in values]
    return Fragments(pa.array(shown, pa.binary()))


def _integers(values: tuple[str | bytes | None, ...], *, unsigned: bool) -> Fragments:
    """Numbers, which the server may have written with zeros before them."""
    kind = pa.uint64() if unsigned else pa.int64()
    found = pa.array(values, pa.string()).cast(kind)
    return Fragments(found.cast(pa.string()).fill_null("null").cast(pa.binary()))
