"""JSON objects that have one layout, read by a compiled scanner: the same as `layout_reader.py`, in one pass over the bytes.

An object that the scanner does not read is left to a parser, as there: nothing is decided about it here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.kernels import jit
from millstream.kernels.decode import layout_scan
from millstream.kernels.decode.fields import Mask
from millstream.kernels.decode.json_layout import Kind, Layout
from millstream.kernels.decode.layout_scan import Array, ScanLayout

_ACTIONS: dict[pa.DataType, int] = {
    pa.string(): layout_scan.TEXT,
    pa.int64(): layout_scan.WHOLE,
    pa.float64(): layout_scan.NUMBER,
    pa.bool_(): layout_scan.TRUTH,
    pa.timestamp("us", "UTC"): layout_scan.TIME,
}
_UNWANTED: dict[Kind, int] = {
    "text": layout_scan.TEXT,
    "number": layout_scan.NUMBER,
    "truth": layout_scan.TRUTH,
}


@dataclass(frozen=True)
class LayoutScanner:
    """Reads the members wanted, of objects of one layout, as the types of ``schema``.

    The layout has all of these, each of a kind that its type can be read from.
    """

    layout: Layout
    schema: pa.Schema

    def read(self, objects: pa.Array) -> tuple[pa.Table, Mask]:
        """Read objects: binary that is valid UTF-8, each from ``{`` to ``}``, none of them null.

        Returns:
            The members wanted of the objects that were read, and which these are.
        """
        _, places, content = objects.buffers()
        offsets = _fixed(np.frombuffer(places, np.int32)[objects.offset :][: len(objects) + 1])
        data = _fixed(np.frombuffer(content or b"", np.uint8))
        cells = np.empty((len(self.schema), len(objects)), np.int64)
        ends = np.empty_like(cells)
        read: Mask = np.zeros(len(objects), np.bool_)
        scan = jit.compiled(layout_scan.scan_objects, layout_scan, allocates=False)
        rows = scan(data, offsets, self._arrays, cells, ends, read)
        columns = [
            _column(data, field.type, cells[number, :rows], ends[number, :rows])
            for number, field in enumerate(self.schema)
        ]
        return _finite(pa.Table.from_arrays(columns, schema=self.schema), read)

    @cached_property
    def _arrays(self) -> ScanLayout:
        around = [*(member.before for member in self.layout.members), self.layout.after]
        columns = [self.schema.get_field_index(member.key) for member in self.layout.members]
        actions = [
            _UNWANTED[member.kind] if column < 0 else _ACTIONS[self.schema.field(column).type]
            for member, column in zip(self.layout.members, columns, strict=True)
        ]
        return ScanLayout(
            np.frombuffer(b"".join(around), np.uint8),
            np.cumsum([0, *map(len, around)], dtype=np.int64),
            np.array(actions, np.int64),
            np.array(columns, np.int64),
        )


def _column(data: Array, kind: pa.DataType, cells: Array, ends: Array) -> pa.Array:
    """Make a column of what the scanner found."""
    if kind == pa.string():
        return _texts(data, cells, ends)
    if kind == pa.float64():
        return pa.array(pl.Series(_texts(data, cells, ends)).cast(pl.Float64).to_numpy())
    if kind == pa.bool_():
        return pa.array(cells != 0)
    return pa.Array.from_buffers(kind, len(cells), [None, pa.py_buffer(cells)])


def _texts(data: Array, starts: Array, ends: Array) -> pa.Array:
    buffer = pa.allocate_buffer(int((ends - starts).sum()))
    out, offsets = np.frombuffer(buffer, np.uint8), np.zeros(len(starts) + 1, np.int32)
    copy = jit.compiled(layout_scan.copy_texts, layout_scan, allocates=False)
    copy(data, starts, ends, _words(data), out, _words(out), offsets)
    return pa.Array.from_buffers(pa.string(), len(starts), [None, pa.py_buffer(offsets), buffer])


def _finite(table: pa.Table, read: Mask) -> tuple[pa.Table, Mask]:
    """Leave out the objects with a number that is too large for 64 bits."""
    good: Mask = np.ones(table.num_rows, np.bool_)
    for field in table.schema:
        if field.type == pa.float64():
            good &= np.isfinite(table.column(field.name).to_numpy())
    if good.all():
        return table, read
    read[read] = good
    return table.filter(pa.array(good)), read


def _words(data: Array) -> Array:
    """View the eight bytes that begin at each one."""
    return np.ndarray((max(len(data) - 7, 0),), np.uint64, data, 0, (1,))


def _fixed(array: Array) -> Array:
    """Forbid writing, whoever owns the memory: numba compiles a function for each."""
    array.flags.writeable = False
    return array
