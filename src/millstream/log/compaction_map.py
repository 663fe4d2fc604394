"""The latest offset of each key: what compaction must know before it can remove anything.

Keys are kept whole, so two keys are never taken for one. Everything is done on columns: records are
added block by block, gathered, and grouped by key when as much has gathered as there is already.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.log.varint import Int64s

_GATHER_BYTES = 16 * 1024 * 1024  # not worth grouping before
_ROW_BYTES = 12  # what a row takes besides its key: the offset, and where the key ends
_SCHEMA = pa.schema([("key", pa.binary()), ("offset", pa.int64())])


class LatestOffsets:
    """The latest offset of each key among the records added.

    Args:
        keys_max: With more keys than this the map is full.
        key_bytes_max: The same for the bytes of all keys together.
    """

    def __init__(self, *, keys_max: int, key_bytes_max: int) -> None:
        self._keys_max = keys_max
        self._key_bytes_max = key_bytes_max
        self._grouped = _SCHEMA.empty_table()
        self._added: list[pa.RecordBatch] = []
        self._added_rows = 0
        self._added_bytes = 0

    def add(self, keys: pa.Array, offsets: pa.Array) -> None:
        """Note records, in any order. Those without a key are left out: they are nobody's latest."""
        batch = pa.RecordBatch.from_arrays([keys, offsets], schema=_SCHEMA)
        if keys.null_count:
            batch = batch.filter(keys.is_valid())
        self._added.append(batch)
        self._added_rows += batch.num_rows
        self._added_bytes += batch.nbytes
        if self._added_bytes > max(_GATHER_BYTES, self._grouped.nbytes):
            self._group()

    @property
    def full(self) -> bool:
        """Whether it holds more than it may; it may say so up to a fifth too early."""
        if self._holds_too_much() and 4 * self._added_bytes > self._grouped.nbytes:
            self._group()  # a key that was known already takes no more room
        return self._holds_too_much()

    def latest(self, keys: pa.ChunkedArray) -> Int64s:
        """Return the latest offset of each of these keys; -1 for one that is not known, or null.

        Takes time for every key in the map, so ask for many at once.
        """
        if self._added:
            self._group()
        places = pc.index_in(keys, value_set=self._grouped["key"])
        found = np.full(len(keys), -1, np.int64)
        offsets = np.asarray(self._grouped["offset"])
        found[np.asarray(places.is_valid())] = offsets[np.asarray(places.drop_null())]
        return found

    def _group(self) -> None:
        table = pa.concat_tables([self._grouped, pa.Table.from_batches(self._added, _SCHEMA)])
        grouped = table.group_by("key", use_threads=False).aggregate([("offset", "max")])
        self._grouped = grouped.rename_columns(["key", "offset"])
        self._added, self._added_rows, self._added_bytes = [], 0, 0

    def _holds_too_much(self) -> bool:
        keys = self._grouped.num_rows + self._added_rows
        size = self._grouped.nbytes + self._added_bytes - keys * _ROW_BYTES
        return bool(keys > self._keys_max or size > self._key_bytes_max)
