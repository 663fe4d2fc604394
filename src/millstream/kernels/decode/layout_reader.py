"""JSON objects that have one layout, read without parsing: only what differs between them is looked at.

A block's quotes are found at once. In an object of the layout their number is known, so each is known to open or close
a certain key or text, and numbers lie between them. What is between the values has to be, byte by byte, what the
layout says; what the values are is checked by column. An object of which any of this does not hold is left to a
parser: nothing is decided about it here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from millstream.kernels import jit
from millstream.kernels.decode.fields import Mask, Positions
from millstream.kernels.decode.json_layout import Kind, Layout, layout_of
from millstream.kernels.decode.layout_scanner import LayoutScanner
from millstream.kernels.decode.text_spans import Block, Spans, Text

Quotes = np.ndarray[tuple[int, int], np.dtype[np.int64]]  # of each object, where they are

_WORTHWHILE = 1024  # objects: for fewer, a parser is as quick
_SAMPLE = 256
# In a process. With numpy, this many take longer by about as much as loading numba does.
COMPILED_OBJECTS_MIN = 1_000_000
_CHUNK_BYTES = 1 << 21  # what is made of it should stay in a core's cache
_QUOTE, _ESCAPE, _SPACE = b'"\\ '

_seen = 0  # objects, by this process

_READERS: dict[pa.DataType, tuple[Kind, Callable[[Spans], tuple[pa.Array, Mask]]]] = {
    pa.string(): ("text", Spans.strings),
    pa.int64(): ("number", Spans.whole_numbers),
    pa.float64(): ("number", Spans.numbers),
    pa.bool_(): ("truth", Spans.truths),
    pa.timestamp("us", "UTC"): ("text", Spans.times),
}
_CHECKS: dict[Kind, Callable[[Spans], Mask]] = {
    "number": Spans.are_numbers,
    "truth": lambda spans: spans.truths()[1],
}


def read_alike(objects: pa.Array, schema: pa.Schema) -> tuple[pa.Table, Mask] | None:
    """Read many objects that have the layout of the first one, if most are seen to have it; None if not.

    The objects are binary, each from ``{`` to ``}``, none of them null. The result is that of `LayoutReader.read`.
    """
    if len(objects) < _WORTHWHILE:
        return None
    layout = layout_of(objects[0].as_py())
    if layout is None or not _are_utf8(objects):
        return None
    reader = LayoutReader(layout, schema)
    if not reader.can_read:
        return None
    read_objects = LayoutScanner(layout, schema).read if _compiles(objects) else reader.read
    _, read = read_objects(objects[:_SAMPLE])
    return read_objects(objects) if read.sum() * 2 > len(read) else None


def _compiles(objects: pa.Array) -> bool:
    """Return whether the compiled scanner reads these objects: once so many were read as would have paid for it."""
    global _seen  # noqa: PLW0603 - what is loaded is the process's, too
    _seen += len(objects)
    return _seen >= COMPILED_OBJECTS_MIN and jit.is_available()


def _are_utf8(objects: pa.Array) -> bool:
    try:
        objects.cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True


@dataclass(frozen=True)
class LayoutReader:
    """Reads the members wanted, of objects of one layout, as the types of ``schema``."""

    layout: Layout
    schema: pa.Schema

    @cached_property
    def can_read(self) -> bool:
        """Whether the layout has all members that are wanted, each of a kind that its type can be read from."""
        kinds = {member.key: member.kind for member in self.layout.members}
        return all(
            field.type in _READERS and kinds.get(field.name) == _READERS[field.type][0]
            for field in self.schema
        )

    def read(self, objects: pa.Array) -> tuple[pa.Table, Mask]:
        """Read objects: binary that is valid UTF-8, each from ``{`` to ``}``, none of them null.

        Returns:
            The members wanted of the objects that were read, and which these are.
        """
        batches: list[pa.RecordBatch] = []
        masks: list[Mask] = [np.zeros(0, np.bool_)]
        for data, offsets in _chunks(objects):
            batch, read = self._chunk(Text(data), offsets)
            batches.append(batch)
            masks.append(read)
        return pa.Table.from_batches(batches, self.schema).combine_chunks(), np.concatenate(masks)

    def _chunk(self, text: Text, offsets: Positions) -> tuple[pa.RecordBatch, Mask]:
        quotes, read = self._quotes(text, offsets)
        objects = Spans(text, offsets[:-1][read], offsets[1:][read])
        values = self._values(objects, quotes)
        good = self._have_lengths(objects, values)
        if not good.all():
            read[read] = good
            objects, values = objects.chosen(good), [place.chosen(good) for place in values]
        good = self._are_laid_out(objects, values)
        columns: dict[str, pa.Array] = {}
        for member, place in zip(self.layout.members, values, strict=True):
            wanted = self.schema.get_field_index(member.key)
            if wanted >= 0:
                columns[member.key], exact = _READERS[self.schema.field(wanted).type][1](place)
                good &= exact
            elif member.kind in _CHECKS:
                good &= _CHECKS[member.kind](place)
        batch = pa.RecordBatch.from_arrays(
            [columns[f.name] for f in self.schema], schema=self.schema
        )
        if not good.all():
            batch = batch.filter(pa.array(good))
            read[read] = good
        return batch, read

    def _quotes(self, text: Text, offsets: Positions) -> tuple[Quotes, Mask]:
        """Find the quotes of the objects that have as many as the layout, and no escape or control character.

        Returns:
            A row of positions for each of these objects, and which they are.
        """
        count = self.layout.quotes
        read = np.ones(len(offsets) - 1, np.bool_)
        for odd in _odd(text.bytes):
            read[np.searchsorted(offsets, odd, "right") - 1] = False
        quotes = np.flatnonzero(text.bytes == _QUOTE)
        if len(quotes) == len(read) * count and read.all():
            every = quotes.reshape(-1, count)
            if (every[:, 0] >= offsets[:-1]).all() and (every[:, -1] < offsets[1:]).all():
                return every, read
        first = np.searchsorted(quotes, offsets)
        read &= np.diff(first) == count
        return quotes[first[:-1][read][:, None] + np.arange(count)], read

    def _values(self, objects: Spans, quotes: Quotes) -> list[Spans]:
        """Say where the values are if the objects are laid out so; anywhere else if they are not."""
        starts: list[Positions] = []
        ends: list[Positions] = []
        seen = 0
        for member in self.layout.members:
            if starts:
                ends.append(quotes[:, seen] - member.before.index(b'"'))
            seen += member.before.count(b'"')
            behind = len(member.before) - member.before.rindex(b'"')
            starts.append(quotes[:, seen - 1] + behind)
        ends.append(objects.ends - len(self.layout.after))
        return [Spans(objects.text, *both) for both in zip(starts, ends, strict=True)]

    def _have_lengths(self, objects: Spans, values: list[Spans]) -> Mask:
        """Return in which objects all that is around the values has the layout's lengths.

        So the values of these lie within them.
        """
        good = np.ones(len(objects), np.bool_)
        at = objects.starts
        for member, place in zip(self.layout.members, values, strict=True):
            good &= (place.starts - at == len(member.before)) & (place.ends >= place.starts)
            at = place.ends
        return good

    def _are_laid_out(self, objects: Spans, values: list[Spans]) -> Mask:
        """Return in which objects all that is around the values is as the layout says."""
        good = np.ones(len(objects), np.bool_)
        starts = [objects.starts, *(place.ends for place in values)]
        around = [*(member.before for member in self.layout.members), self.layout.after]
        for start, between in zip(starts, around, strict=True):
            same = objects.text.equal(start, between)
            if same is not None:
                good &= same
        return good


def _odd(data: Block) -> Iterator[Positions]:
    """Give where escapes and control characters are."""
    escapes = data == _ESCAPE
    if escapes.any():
        yield np.flatnonzero(escapes)
    if len(data) and data.min() < _SPACE:
        yield np.flatnonzero(data < _SPACE)


def _chunks(objects: pa.Array) -> Iterator[tuple[Block, Positions]]:
    """Divide objects into chunks: their bytes, and where in these each begins and the last ends."""
    _, places, data = objects.buffers()
    offsets = np.frombuffer(places, np.int32)[objects.offset :][: len(objects) + 1]
    everything = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    start = 0
    while start < len(objects):
        end = int(np.searchsorted(offsets, offsets[start] + _CHUNK_BYTES, "right")) - 1
        end = min(max(end, start + 1), len(objects))
        part = offsets[start : end + 1].astype(np.int64)
        yield everything[part[0] : part[-1]], part - part[0]
        start = end
