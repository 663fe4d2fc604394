"""The latest offset of each key: compaction needs it to decide what to remove.

Keys are kept whole, so two keys are never confused. It works on columns: records are added block by block and
gathered, and merged with the map once they are as many as its keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.log.varint import Int64s

if TYPE_CHECKING:
    from numpy.typing import NDArray

Number = TypeVar("Number", np.int32, np.int64)
_GATHER_BYTES = 16 * 1024 * 1024  # below this, merging does not pay
_KEY_END_BYTES = 4  # overhead of a key in a column


# Not numpy.asarray(): of Arrow's arrays it makes arrays by way of pandas, where that is installed.


def numbers(array: pa.Array, kind: type[Number]) -> NDArray[Number]:
    """Return an array without nulls, of numbers of this kind."""
    first = array.offset
    if not len(array):
        return np.empty(0, kind)
    return np.frombuffer(array.buffers()[1], kind)[first : first + len(array)]


def present(array: pa.Array) -> NDArray[np.bool_]:
    """Return which elements of an array are not null."""
    bits = array.buffers()[0]
    if bits is None:
        return np.ones(len(array), bool)
    first = array.offset
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return flags[first : first + len(array)].view(bool)


class OffsetMap:
    """The latest offset of each key among the records added.

    Args:
        keys_max: With more keys than this the map is full.
        key_bytes_max: The same for the bytes of all keys together.
    """

    def __init__(self, *, keys_max: int, key_bytes_max: int) -> None:
        self._keys_max = keys_max
        self._key_bytes_max = key_bytes_max
        self._keys = pa.nulls(0, pa.binary())  # each once; its offset is at the same place
        self._offsets: Int64s = np.empty(0, np.int64)
        self._added: list[tuple[pa.Array, Int64s]] = []
        self._added_count = 0
        self._added_bytes = 0

    def add(self, keys: pa.Array, offsets: Int64s) -> None:
        """Add records, in the order of offsets, and after all before. Those without a key are left out."""
        if keys.null_count:
            keys, offsets = keys.drop_null(), offsets[present(keys)]
        if not len(keys):
            return
        self._added.append((keys, offsets))
        self._added_count += len(keys)
        self._added_bytes += keys.nbytes
        if self._added_bytes > max(_GATHER_BYTES, self._keys.nbytes):
            self._merge()

    @property
    def full(self) -> bool:
        """Whether it holds more than its limits; it may be True up to a fifth too early."""
        if self._holds_too_much() and 4 * self._added_bytes > self._keys.nbytes:
            self._merge()  # a key that was known already takes no more room
        return self._holds_too_much()

    def latest(self, keys: pa.ChunkedArray) -> Int64s:
        """Return the latest offset of each of these keys; -1 for one that is not known, or null.

        Takes time for every key in the map, so ask for many at once.
        """
        if self._added:
            self._merge()
        found = np.full(len(keys), -1, np.int64)
        at = 0
        for places in pc.index_in(keys, value_set=self._keys).chunks:
            part = found[at : at + len(places)]
            part[present(places)] = self._offsets[numbers(places.drop_null(), np.int32)]
            at += len(places)
        return found

    def _merge(self) -> None:
        columns = [self._keys, *(keys for keys, _ in self._added)]
        encoded = pa.chunked_array(columns, pa.binary()).dictionary_encode()
        codes = np.concatenate([numbers(chunk.indices, np.int32) for chunk in encoded.chunks])
        self._keys = encoded.chunk(encoded.num_chunks - 1).dictionary  # the last one has them all
        latest = np.empty(len(self._keys), np.int64)
        # Of several offsets for one key the last one wins, and that is the latest.
        latest[codes] = np.concatenate([self._offsets, *(offsets for _, offsets in self._added)])
        self._offsets = latest
        self._added, self._added_count, self._added_bytes = [], 0, 0

    def _holds_too_much(self) -> bool:
        count = len(self._keys) + self._added_count
        size = self._keys.nbytes + self._added_bytes - count * _KEY_END_BYTES
        return bool(count > self._keys_max or size > self._key_bytes_max)
