"""``<base offset>.parquet``: a copy of the records of a closed segment, as columns.

An archive is made from its segment and from a schema that the log does not know (see ``archiver``).
It holds every committed record with its offset, partition, timestamp, key and headers, and the columns
of its value; two marks tell a *tombstone* (a value that is null) from an *undecodable* record (one
that does not fit the schema, whose bytes only the segment has). In both, the value's columns are null.

It is a copy, so it may be missing, can be deleted at any time and rebuilt. It is valid only while the segment
is the one that it was made from: same offsets, same size, same chain of batch headers, which have the
checksums of all that is in the batches. The file has these, and what each column was made of, under the key
``millstream`` of its Parquet metadata.

Pages have checksums in Parquet, and the footer, which describes them, has none. So four bytes lie between the
last page and the footer, where no Parquet reader looks: the CRC-32C of everything after them, little-endian.
"""

from __future__ import annotations

import io
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import google_crc32c
import numpy as np
import pyarrow as pa

from millstream.log import seal
from millstream.log.checked_json import pack_checked, unpack_checked
from millstream.log.decoding import SCHEMA
from millstream.log.files import Files, size_of

if TYPE_CHECKING:
    from millstream.log.seal import Seal

SUFFIX = ".parquet"
METADATA_KEY = b"millstream"
ROWS_PER_GROUP = 16_384  # a split that begins within a group reads all of it
UNREADABLE = (OSError, ValueError, pa.ArrowException)  # what a missing or damaged archive raises
_GROUPS_PER_READ = 8
_VERSION = 1
_CRC = _LENGTH = struct.Struct("<I")
_TAIL_BYTES = 8  # of every Parquet file: the length of the footer, and "PAR1"

RECORD_SCHEMA = pa.schema(
    [
        SCHEMA.field("offset"),
        pa.field("partition", pa.int32(), nullable=False),
        SCHEMA.field("timestamp"),
        SCHEMA.field("key"),
        SCHEMA.field("headers"),
        pa.field("tombstone", pa.bool_(), nullable=False),
        pa.field("undecodable", pa.bool_(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class ArchiveMetadata:
    """The metadata of an archive.

    ``made_of`` has a text for each column of the value that identifies how it was decoded, and one under the
    empty name for the format: a reader that would decode in the same way may read the archive instead.
    ``groups`` has the first offset of each row group.
    """

    topic: str
    partition: int
    base_offset: int
    next_offset: int
    segment_bytes: int
    segment_chain: int
    rows: int
    undecodable: int
    made_of: Mapping[str, str]
    groups: Sequence[int]

    def matches(self, base_offset: int, found: Seal) -> bool:
        """Return whether a segment with this seal is the one that the archive was made from."""
        return not found.damaged and (
            (self.base_offset, self.next_offset, self.segment_bytes, self.segment_chain)
            == (base_offset, found.next_offset, found.size, found.chain)
        )

    def pack(self) -> bytes:
        """Return the metadata as stored in the file."""
        return pack_checked(asdict(self), version=_VERSION)

    @classmethod
    def unpack(cls, content: bytes | None) -> ArchiveMetadata:
        """Read a note back.

        Raises:
            ValueError: there is none, it is damaged, or of another version.
        """
        if content is None:
            raise ValueError("the file has no note of Millstream's")
        try:
            return cls(**unpack_checked(content, version=_VERSION))
        except (KeyError, TypeError) as error:
            raise ValueError(f"the file's note is another one: {error}") from error


class ArchiveFile:
    """An archive, open for reading. Leaving the context closes it.

    Raises:
        One of UNREADABLE: there is none, or it cannot be read.
    """

    def __init__(self, files: Files, path: Path) -> None:
        import pyarrow.parquet as pq  # noqa: PLC0415 - few logs have archives, and it takes its time

        self.path = path
        self._source = _Source(files, path)
        try:
            _check_footer(self._source)
            self._parquet: Any = pq.ParquetFile(
                pa.PythonFile(self._source, "r"), page_checksum_verification=True
            )
            self.note = ArchiveMetadata.unpack(
                (self._parquet.metadata.metadata or {}).get(METADATA_KEY)
            )
        except BaseException:
            self._source.close()
            raise

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._source.size

    def read(self, start: int, end: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the columns of the records with offsets in [start, end), in offset order.

        Raises:
            One of UNREADABLE: the file is damaged. What was yielded is right: every page's checksum is
            verified.
        """
        groups = self.note.groups
        first, last = max(bisect_right(groups, start) - 1, 0), bisect_left(groups, end)
        wanted = list(dict.fromkeys(("offset", *columns)))
        for at in range(first, last, _GROUPS_PER_READ):
            some = list(range(at, min(at + _GROUPS_PER_READ, last)))
            table = self._parquet.read_row_groups(some, columns=wanted, use_threads=False)
            for batch in table.select(wanted).combine_chunks().to_batches():
                low, high = np.searchsorted(batch.column(0).to_numpy(), [start, end])
                if low < high:
                    yield batch.select(list(columns)).slice(int(low), int(high - low))

    def close(self) -> None:
        """Let go of the file."""
        self._parquet.close(force=True)
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_fitting(files: Files, path: Path, base_offset: int) -> ArchiveFile | None:
    """Open the archive beside the segment at ``path``, if it was made from this very segment.

    Raises:
        One of UNREADABLE: there is none, or it cannot be read.
    """
    # First the archive, then the seal: compaction removes both before it replaces the segment, so a seal that
    # is found here is that of the archive's segment, or does not match it.
    found = ArchiveFile(files, path.with_suffix(SUFFIX))
    known = seal.read(files, path, size_of(files, path))
    if known is not None and found.note.matches(base_offset, known):
        return found
    found.close()
    return None


def with_checksum(end: bytes) -> bytes:
    """Put the checksum of the footer into the last bytes of a Parquet file."""
    at = len(end) - _footer_bytes(end)
    return end[:at] + _CRC.pack(google_crc32c.value(end[at:])) + end[at:]


def _footer_bytes(end: bytes) -> int:
    """Return the size of the footer, with its length and the mark at the end of the file."""
    (size,) = _LENGTH.unpack_from(end, len(end) - _TAIL_BYTES)
    return int(size) + _TAIL_BYTES


def _check_footer(source: _Source) -> None:
    """Verify the checksum of the footer.

    Raises:
        ValueError: it is another one, or there is none.
    """
    source.seek(max(source.size - _TAIL_BYTES, 0))
    tail = source.read()
    at = source.size - _CRC.size - (_footer_bytes(tail) if len(tail) == _TAIL_BYTES else 0)
    if len(tail) < _TAIL_BYTES or at < 0:
        raise ValueError("it is too short")
    source.seek(at)
    content = source.read()
    if _CRC.unpack_from(content)[0] != google_crc32c.value(content[_CRC.size :]):
        raise ValueError("its footer does not match its CRC-32C")
    source.seek(0)


class _Source(io.RawIOBase):
    """A file of the log, with the interface that Arrow reads."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._handle = files.open(path)
        self._position = 0
        self.size = files.size(self._handle)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = origin + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        wanted = self.size - self._position if size is None or size < 0 else size
        data = self._files.pread(self._handle, wanted, self._position) if wanted > 0 else b""
        self._position += len(data)
        return data

    def close(self) -> None:
        if not self.closed:
            self._files.close(self._handle)
        super().close()
