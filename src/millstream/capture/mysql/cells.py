"""Many rows of one table at once: where their values are in row events, and the block that they are.

Rows are of no fixed length, and nothing says where the next one begins: so each is walked through once, from value to
value, by the lengths alone. From there on all is done by column. What is not plain (an image without some columns,
rows whose key changes, an event that is cut short) is left to the decoder of single rows, ``row_images.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.capture.json_columns import Cells, ColumnEncoder, objects_of
from millstream.capture.mysql.columns import TAIL, lowest_first, rendered_binaries
from millstream.capture.mysql.decoder import RowsEvent, Statement
from millstream.capture.mysql.table_map import BinlogColumn, TableMap
from millstream.capture.units import RowBlock

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_ROWS_MIN = 16  # measured: fewer rows are decoded quicker one by one
_BLOCK_ROWS_MAX = 2000
_RUN_BYTES_MAX = 256 << 10
Renderers: TypeAlias = Mapping[str, Callable[[str], str]]
# How to walk through a row: bytes to pass over and the size of a length, again and again; then the bytes to its end.
_Walk: TypeAlias = tuple[list[tuple[int, int]], int]


def row_runs(
    events: Iterator[TableMap | RowsEvent | Statement],
) -> Iterator[TableMap | Statement | list[RowsEvent]]:
    """Yield events, those together that do the same to rows of one table and follow each other."""
    run: list[RowsEvent] = []
    size = 0
    for event in events:
        if isinstance(event, TableMap) and run and event is run[0].table:
            continue  # it is described anew for the next statement
        more = isinstance(event, RowsEvent) and run and _is_alike(event, run[0])
        if run and (not more or size >= _RUN_BYTES_MAX):
            yield run
            run, size = [], 0
        if isinstance(event, RowsEvent):
            run.append(event)
            size += len(event.body)
        else:
            yield event
    if run:
        yield run


def _is_alike(event: RowsEvent, other: RowsEvent) -> bool:
    return event.table is other.table and event.op == other.op


def row_blocks(events: Sequence[RowsEvent], renderers: Renderers) -> list[RowBlock] | None:
    """Return the rows of a run as blocks; None where they are to be decoded one by one.

    Args:
        renderers: Of columns that are logged as bytes, and are none: what makes their text of base64.
    """
    table, op = events[0].table, events[0].op
    found = _images(events)
    if found is None:
        return None
    data, starts = found
    images = 2 if op == "u" else 1
    if len(starts) < BLOCK_ROWS_MIN * images:
        return None
    buffer = np.frombuffer(data, np.uint8)
    step = _BLOCK_ROWS_MAX * images
    blocks = []
    for first in range(0, len(starts), step):
        try:
            block = _block(table, op, buffer, np.array(starts[first : first + step]), renderers)
        except (ValueError, pa.ArrowException):
            return None  # one by one it is seen which
        if block is None:
            return None
        blocks.append(block)
    return blocks


def _images(events: Sequence[RowsEvent]) -> tuple[bytes, list[int]] | None:
    """Return the images of all rows in one buffer, and where each begins."""
    bodies, ends, size = [], [], 0
    for event in events:
        body = event.whole_images()
        if body is None:
            return None
        bodies.append(body)
        size += len(body)
        ends.append(size)
    data = b"".join([*bodies, TAIL])
    starts: list[int] = []
    walks: dict[bytes, _Walk] = {}
    at = 0
    for end in ends:
        try:
            at = _walk(events[0].table.columns, data, (at, end), starts, walks)
        except IndexError:
            return None
        if at != end or (events[0].op == "u" and len(starts) % 2):
            return None
    return data, starts


def _walk(
    columns: Sequence[BinlogColumn],
    data: bytes,
    span: tuple[int, int],
    starts: list[int],
    walks: dict[bytes, _Walk],
) -> int:
    """Add to ``starts`` where the images of a span begin; return where the last ends."""
    at, end = span
    nulls_size = (len(columns) + 7) // 8
    while at < end:
        starts.append(at)
        nulls = data[at : at + nulls_size]
        walk = walks.get(nulls)
        if walk is None:
            walk = walks[nulls] = _walk_of(columns, nulls)
        at += nulls_size
        for skip, size in walk[0]:
            at += skip
            if size == 1:
                at += 1 + data[at]
            elif size == 2:
                at += 2 + data[at] + (data[at + 1] << 8)
            else:
                at += size + int.from_bytes(data[at : at + size], "little")
        at += walk[1]
    return at


def _walk_of(columns: Sequence[BinlogColumn], nulls: bytes) -> _Walk:
    bits = int.from_bytes(nulls, "little")
    steps, skip = [], 0
    for place, column in enumerate(columns):
        if bits >> place & 1:
            continue
        if column.format.size:
            skip += column.format.size
        else:
            steps.append((skip, column.format.length_size))
            skip = 0
    return steps, skip


def _block(
    table: TableMap,
    op: Literal["c", "u", "d"],
    buffer: NDArray[np.uint8],
    starts: NDArray[np.int64],
    renderers: Renderers,
) -> RowBlock | None:
    encoded = {
        column.name: _encoder(column, renderers)(cells)
        for column, cells in zip(table.columns, _cells(table, buffer, starts), strict=True)
    }
    keys = objects_of(encoded, table.key, len(starts))
    rows = objects_of(encoded, tuple(encoded), len(starts))
    names = frozenset(encoded)
    if op != "u":
        return RowBlock(table.database, table.table, op, names, rows, keys)
    old, new = (pa.array(np.arange(first, len(starts), 2)) for first in (0, 1))
    new_keys = keys.take(new)
    if not pc.all(pc.equal(keys.take(old), new_keys)).as_py():
        return None
    before, after = rows.take(old), rows.take(new)
    return RowBlock(table.database, table.table, op, names, after, new_keys, before)


def _encoder(column: BinlogColumn, renderers: Renderers) -> ColumnEncoder:
    render = renderers.get(column.name)
    if render is None:
        return column.format.encode
    return rendered_binaries(column.format.fixed_width, render)


def _cells(
    table: TableMap, buffer: NDArray[np.uint8], starts: NDArray[np.int64]
) -> Iterator[Cells]:
    """Yield the columns of images that begin at these places."""
    places = starts + (len(table.columns) + 7) // 8
    for place, column in enumerate(table.columns):
        null = (buffer[starts + place // 8] >> (place % 8) & 1).astype(np.bool_)
        size, length_size = column.format.size, column.format.length_size
        lengths = np.full(len(starts), size, np.int64)
        if not size:
            lengths = lowest_first(buffer, places, length_size).astype(np.int64)
        if null.any():
            lengths[null] = -1
            values = places + np.where(null, 0, length_size)
            yield Cells(buffer, values, lengths)
            places = values + np.maximum(lengths, 0)
        else:
            yield Cells(buffer, places + length_size, lengths)
            places = places + length_size + lengths
