"""Frames: tables on the wire between the parts of a running job, as Arrow IPC streams.

An edge of a job carries rows of ``(port, bucket, frame)``: the port says what the frame is for, the
bucket which hash range of keys it belongs to. Columns whose names begin with ``__`` are ours and travel
with the user's: see the constants.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl
import pyarrow as pa

TIME = "__time"  # Int64: event time, microseconds since 1970 UTC
SPLIT = "__split"  # Int64: which split of which partition of which source a row was read from
WATERMARK_SEEN = "__watermark"  # Int64: the watermark in its split before it: see kernels/late.py
ORDER = "__order"  # Int64: its log order, see kernels/time/log_order.py
UNPLACED = "__unplaced"  # Int64: the position of rows without a log order among others, by time
ARRIVED = "__arrived"  # Int64: when the record came into the log, microseconds since 1970 UTC
RELEASED = "__released"  # Int64: the time in whose order rows that waited go to sinks
RELEASED_TIE = "__released_tie"  # Int64: ... and the order of those of one time
DIFF = "__diff"  # Int8: +1, or -1 for a retraction
WEIGHT = "__weight"  # Int64: the sum of ``__diff`` of equal rows, or of the rows of a key
DIFF_COLUMN = "_diff"  # ... as those see it who take a stream out
REPLACED = "__replaced"  # Boolean: a retraction, and a row of the same window and key comes with it
DELETED = "__deleted"  # Boolean: the row says that its key is no longer in the table
KIND = "__kind"  # String: what a captured change does to its table, see kernels/decode/captured.py
EXTRA = "__extra"  # Boolean: a row besides the one that its record counts as, or of a dead record
WINDOW = "__window"  # Int64: label of the window, microseconds since 1970 UTC: see WindowAssigner
ROWS = "__rows"  # Int64: how many events a partial aggregate stands for
HASH = "__hash"  # UInt64: keyhash of the operator's key
ANSWER = "__answer"  # String: the answer to a request, as JSON
HIDDEN_PREFIX = "__"

PORT_TIME = 0
PORT_LEDGER = 1
PORT_DEAD_LETTERS = 2
PORT_FIRST = 8  # operators and sinks are numbered from here


# An array of the JVM has less than 2 GiB, and an executor that keeps a frame holds it several times meanwhile.
FRAME_BYTES_MAX = 16 << 20

# Bytes, or what shows bytes of a file that is mapped into memory.
Frame = bytes | memoryview


# Rows that were taken out of a table still show all of its text, as views, and a frame would carry it.
# Where it would be so much more than its own, the text is copied together.
_SPARE = 1.25
_SPARE_BYTES = 4 << 10
_NESTED = frozenset(
    dtype.id
    for dtype in (
        pa.struct([]),
        pa.list_(pa.null()),
        pa.list_(pa.null(), 1),
        pa.large_list(pa.null()),
    )
)


class FrameRow(NamedTuple):
    """One row of an edge. ``frame`` is an Arrow IPC stream, or JSON on the time and ledger ports."""

    port: int
    bucket: int
    frame: Frame


def cut_for_frames(table: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield a table in slices of which each is small enough for a frame, or is one row."""
    return sliced(table, FRAME_BYTES_MAX)


def sliced(table: pl.DataFrame, bytes_max: int) -> Iterator[pl.DataFrame]:
    """Yield a table in slices that take no more memory than is allowed, or are one row."""
    if table.height <= 1 or table.estimated_size() <= bytes_max:
        yield table
        return
    half = table.height // 2
    yield from sliced(table[:half], bytes_max)
    yield from sliced(table[half:], bytes_max)


def encode_frame(table: pl.DataFrame) -> Frame:
    """Encode a table as an uncompressed Arrow IPC stream."""
    try:
        # A third of the CPU that polars' own writer takes, and a frame that needs no copy to be read.
        plain = arrow_table(table, pl.CompatLevel.newest())
        if plain.get_total_buffer_size() > _SPARE * table.estimated_size() + _SPARE_BYTES:
            plain = arrow_table(table, pl.CompatLevel.oldest())
    except pa.ArrowInvalid:  # integers of 128 bits: Arrow has none
        stream = io.BytesIO()
        table.write_ipc_stream(stream, compression="uncompressed")
        return stream.getvalue()
    # Arrow's own buffer grows while it is written, which copies it several times; so its size is found first.
    size = pa.MockOutputStream()
    _write_stream(plain, size)
    buffer = pa.allocate_buffer(size.size())
    _write_stream(plain, pa.FixedSizeBufferWriter(buffer))
    return memoryview(buffer).cast("B")


def _write_stream(table: pa.Table, sink: pa.NativeFile) -> None:
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def rows_digest(table: pl.DataFrame) -> str:
    """Return a text that says which rows a table has, and in which order."""
    return hashlib.sha256(encode_frame(table)).hexdigest()


def decode_frame(frame: Frame) -> pl.DataFrame:
    """Decode what :func:`encode_frame` made; the table may use the frame's memory."""
    source = pa.py_buffer(frame)
    try:
        return polars_table(pa.ipc.open_stream(source).read_all())
    except pa.ArrowNotImplementedError:
        return pl.read_ipc_stream(io.BytesIO(source.to_pybytes()))


def encode_message(message: Mapping[str, Any]) -> bytes:
    """Encode a message of the time or ledger port."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode_message(frame: Frame) -> dict[str, Any]:
    """Decode what :func:`encode_message` made."""
    message: dict[str, Any] = json.loads(bytes(frame))
    return message


def in_one_chunk(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Return tables of the same columns as one, to take rows from it in another order.

    From several chunks polars takes texts by copying each, which costs six times as much.
    """
    return pl.concat(tables).rechunk()


def arrow_table(rows: pl.DataFrame, layout: pl.CompatLevel) -> pa.Table:
    """Return a polars table as an Arrow one that can be written, without copying where layouts agree.

    If an array has no values, as where all lists of a group are empty, polars may still give it an offset
    above 0, and no bytes. Arrow would then write a negative length, and read everything after it in the
    table from a wrong position.
    """
    table = rows.to_arrow(compat_level=layout)
    displaced = [
        number
        for number, dtype in enumerate(table.schema.types)
        if (dtype.id in _NESTED or not rows.height)
        and any(map(_is_displaced, table.column(number).chunks))
    ]
    if displaced:
        table = rows.to_arrow(compat_level=pl.CompatLevel.oldest())  # of which Arrow can gather all
        everything = pa.array(range(rows.height), pa.int64())
        for number in displaced:
            gathered = table.column(number).take(everything)
            table = table.set_column(number, table.schema.field(number), gathered)
    return table


def _is_displaced(array: pa.Array) -> bool:
    """Return whether an array, or one inside it, has no values and still an offset above 0."""
    if not len(array) and array.offset:
        return True
    dtype = array.type
    if dtype.id not in _NESTED:
        return False
    if pa.types.is_struct(dtype):
        return any(_is_displaced(array.field(number)) for number in range(dtype.num_fields))
    return _is_displaced(array.values)


def polars_table(table: pa.Table) -> pl.DataFrame:
    """Return an Arrow table as a polars one, without copying where layouts agree."""
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def plain_schema(columns: Mapping[str, pl.DataType]) -> pa.Schema:
    """Return the Arrow schema of polars columns in the plain layouts that every Arrow reader knows."""
    table = pl.DataFrame(schema=columns).to_arrow(compat_level=pl.CompatLevel.oldest())
    return pa.schema([(field.name, _plain(field.type)) for field in table.schema])


def _plain(dtype: pa.DataType) -> pa.DataType:
    if pa.types.is_large_string(dtype):
        return pa.string()
    if pa.types.is_large_binary(dtype):
        return pa.binary()
    if pa.types.is_large_list(dtype):
        return pa.list_(_plain(dtype.value_type))
    if pa.types.is_struct(dtype):
        return pa.struct([(field.name, _plain(field.type)) for field in dtype])
    return dtype


def to_datetimes(microseconds: pl.Series) -> pl.Series:
    """Return times, in microseconds since 1970 UTC, as UTC datetimes."""
    return microseconds.cast(pl.Datetime("us", "UTC"))


def visible(names: list[str]) -> list[str]:
    """Leave out the columns that are ours."""
    return [name for name in names if not name.startswith(HIDDEN_PREFIX)]


def nulls_like(column: pl.Series) -> pl.Series:
    """Return as many nulls of a column's name and type."""
    return pl.Series(column.name, [None], dtype=column.dtype).new_from_index(0, len(column))
