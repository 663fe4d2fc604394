"""FileContent: the bytes of a file, uncompressed, from any place on."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import IO, Literal, cast

import pyarrow as pa

Compression = Literal["", "gz", "zst"]
LINE_BYTES_MAX = 16 << 20  # a longer line is a dead letter; it bounds memory
_SKIP_BYTES = 1 << 20


class UnreadableFileError(ValueError):
    """From here on a file cannot be read: it becomes a dead letter, and the next file is read. The message says why."""


@dataclass(frozen=True)
class FileContent:
    """A file that can be opened. ``path`` is what it is called in dead letters."""

    path: str
    open_raw: Callable[[], IO[bytes]]
    compression: Compression = ""

    @contextmanager
    def open(self, offset: int = 0) -> Iterator[IO[bytes]]:
        """Open it ``offset`` bytes behind its beginning, uncompressed.

        Raises:
            UnreadableFileError: its compression is damaged; also within the block.
            OSError: the disk fails.
        """
        with closing(self.open_raw()) as raw:
            if not self.compression:
                self.pass_over(raw, offset)
                yield raw
                return
            try:
                with closing(_uncompressed(raw, self.compression)) as stream:
                    self.pass_over(stream, offset)
                    yield stream
            except (EOFError, zlib.error, pa.ArrowInvalid, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:  # the disk's
                    raise
                raise UnreadableFileError(f"its compression is damaged: {error}") from error

    def pass_over(self, stream: IO[bytes], count: int) -> None:
        """Go on in an open stream of it by so many bytes, or to its end."""
        if not self.compression:
            stream.seek(count, io.SEEK_CUR)
            return
        while count and (passed := len(stream.read(min(count, _SKIP_BYTES)))):
            count -= passed


def _uncompressed(raw: IO[bytes], compression: Compression) -> IO[bytes]:
    if compression == "gz":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    compressed = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
    return io.BufferedReader(compressed, 1 << 18)


@dataclass
class FileLines:
    """The lines of a stream. ``offset`` and ``number`` are those of the next line; numbers begin with 0."""

    stream: IO[bytes]
    offset: int = 0
    number: int = 0
    is_cut: bool = False
    """Whether the last line was longer than may be: what was returned are its first bytes."""

    def next(self) -> bytes | None:
        """Return the next line with its end; None at the end of the file."""
        line = self.stream.readline(LINE_BYTES_MAX + 1)
        if not line:
            return None
        self.offset += len(line)
        self.number += 1
        self.is_cut = len(line) > LINE_BYTES_MAX and not line.endswith(b"\n")
        if self.is_cut:
            self._pass_over()
        return line

    def _pass_over(self) -> None:
        while rest := self.stream.readline(_SKIP_BYTES):
            self.offset += len(rest)
            if rest.endswith(b"\n"):
                return
