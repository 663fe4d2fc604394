"""A 64-bit hash of key columns that never changes: not with the machine, version or batch.

It chooses a key's bucket and its place in the sorted runs, both of which outlive the process. The
hashes that polars and Python offer are stable only within one version, so this one is written out:
SplitMix64's finaliser over the eight-byte words of a value, vectorised.

Keys come from outside, and the finaliser can be undone. So an app has a seed of its own, drawn when
its state is created and kept with it: without it nobody can construct keys that share a hash or a bucket.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (the
finaliser is Stafford's Mix13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

Hashes = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0x6E756C6C6E756C6C)
_SAMPLE = 1024  # hashes: of a share of a half, the sample's deviates by 0.016
_NEARLY = 0.9
_WORD_BYTES = 8
# Codes differ from process to process, and 128 bits are more than one word.
_BY_TEXT = {"Categorical", "Enum", "Int128", "UInt128"}
_WHOLE = {pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64}
_TAIL_MASKS = np.array([(1 << (8 * n)) - 1 for n in range(_WORD_BYTES)] + [2**64 - 1], np.uint64)


@dataclass(frozen=True)
class Buckets:
    """How many buckets keys are divided into, and the seed by which keys are hashed."""

    count: int
    seed: int = 0

    @property
    def numbers(self) -> range:
        """The buckets: ``[0, count)``."""
        return range(self.count)


def hash_columns(frame: pl.DataFrame, names: tuple[str, ...], seed: int = 0) -> Hashes:
    """Return one hash per row over the named columns, in the order of the names.

    Equal keys have equal hashes, and so may others: it says where to look, and keys are compared
    there. Null is a value like any other; -0.0 equals 0.0. No columns at all is one key: every row has
    the same hash. Nested columns cannot be keys. Hashes of the same keys with different seeds are
    independent of one another.
    """
    return digest_columns(frame, names, seed)


def tells_keys_apart(frame: pl.DataFrame, names: Sequence[str]) -> bool:
    """Return whether no two keys of one type share a hash, so that none need be compared: each step of hashing can be undone.

    Such are those of one column of whole numbers of up to 64 bits without nulls.
    """
    if len(names) != 1:
        return False
    column = frame[names[0]]
    return column.dtype in _WHOLE and not column.null_count()


def digest_columns(frame: pl.DataFrame, names: tuple[str, ...], seed: int = 0) -> Hashes:
    """Return one hash per row, as :func:`hash_columns` does, where it stands for the row itself."""
    scale = np.uint64((2 * seed + 1) % 2**64)
    start = _GOLDEN ^ mix(np.array([seed % 2**64], np.uint64))[0] if seed else _GOLDEN
    hashes = np.full(frame.height, start, np.uint64)
    for name in names:
        hashes = mix(hashes ^ _scaled(_column_words(frame[name], scale), scale))
    return hashes


def buckets_of(hashes: Hashes, bucket_count: int) -> npt.NDArray[np.int64]:
    """Return the bucket, in ``[0, bucket_count)``, of each hash: its place in the hash's range."""
    return ((hashes >> np.uint64(32)) * np.uint64(bucket_count) >> np.uint64(32)).astype(np.int64)


def frequent_hash(hashes: Hashes, share: float) -> tuple[int, int] | None:
    """Return the hash that this share of all or more have, a half at least, and how often; None if there is none.

    A sample decides whether it is worth counting, so one that is just above the share may be missed.
    """
    assert share >= 0.5
    sample = hashes[:: max(1, len(hashes) // _SAMPLE)]
    found, counts = np.unique(sample, return_counts=True)
    if not len(sample) or counts.max() < _NEARLY * share * len(sample):
        return None
    frequent = found[counts.argmax()]
    count = int((hashes == frequent).sum())
    return (int(frequent), count) if count >= share * len(hashes) else None


def mix(words: Hashes) -> Hashes:
    """Scatter words over all 64 bits; different words remain different."""
    with np.errstate(over="ignore"):
        words = words + _GOLDEN
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return words ^ (words >> np.uint64(31))


def _scaled(words: Hashes, scale: np.uint64) -> Hashes:
    # By an odd number, so that no two words become one. Mixing a seed in by exclusive or would not
    # do: two words that differ by just that would change places, and collide under both seeds.
    with np.errstate(over="ignore"):
        return words * scale


def _column_words(column: pl.Series, scale: np.uint64) -> Hashes:
    column = column.alias("0")  # polars takes a name such as "^a.*$" for a pattern
    if column.dtype in (pl.String, pl.Binary):
        words = _hash_bytes(column, scale)
    elif column.dtype.is_float():
        # Adding 0.0 turns -0.0 into 0.0; one NaN stands for all.
        floats = _filled(column.cast(pl.Float64), 0.0).to_numpy() + 0.0
        words = np.where(np.isnan(floats), np.nan, floats).view(np.uint64)
    elif column.dtype.is_decimal() or type(column.dtype).__name__ in _BY_TEXT:
        words = _hash_bytes(column.cast(pl.String), scale)
    elif column.dtype == pl.UInt64:
        words = _filled(column, 0).to_numpy()
    else:
        # The cast is all that whole numbers need, and is no query of polars; neither is what has no nulls.
        whole = column if column.dtype in _WHOLE else column.to_physical()
        words = _filled(whole.cast(pl.Int64), 0).to_numpy().view(np.uint64)
    if column.null_count():
        words = np.where(column.is_null().to_numpy(), _NULL, words)
    return words


def _filled(column: pl.Series, value: float | str | bytes) -> pl.Series:
    return column.fill_null(value) if column.null_count() else column


def _hash_bytes(column: pl.Series, scale: np.uint64) -> Hashes:
    """Hash values of any length: every word is mixed into the length."""
    array = _filled(column, "" if column.dtype == pl.String else b"").to_arrow()
    array = array.cast(pa.large_binary())
    _, offsets_buffer, data = array.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[array.offset : array.offset + len(array) + 1]
    lengths = np.diff(offsets)
    words = _words_view(data, int(offsets[-1]) if len(offsets) else 0)
    hashes = lengths.astype(np.uint64)
    shortest = int(lengths.min() if len(lengths) else 0) // _WORD_BYTES * _WORD_BYTES
    for done in range(0, shortest, _WORD_BYTES):  # the words that all have, whole
        hashes = mix(hashes ^ _scaled(words[offsets[:-1] + done], scale))
    for done in range(shortest, int(lengths.max(initial=0)), _WORD_BYTES):
        rows = np.flatnonzero(lengths > done)
        word = words[offsets[rows] + done]
        word &= _TAIL_MASKS[np.minimum(lengths[rows] - done, _WORD_BYTES)]
        hashes[rows] = mix(hashes[rows] ^ _scaled(word, scale))
    return hashes


def _words_view(data: pa.Buffer | None, used: int) -> Hashes:
    """View the eight bytes that start at every position, as little-endian words."""
    padded = np.zeros(used + _WORD_BYTES, np.uint8)
    if data is not None:
        padded[:used] = np.frombuffer(data, np.uint8, used)
    return np.ndarray((used + 1,), "<u8", padded.data, strides=(1,))
