"""The files of a folder, and the objects under a URL: which there are, and what is in one."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from stat import S_ISREG
from typing import IO, Protocol, cast

import pyarrow as pa

from millstream.errors import RetriableError
from millstream.object_store.client import ObjectClient

_HIDDEN = (".", "_")  # as Spark and Hive leave out what begins so
_UNFINISHED = (".tmp", ".part", ".partial", ".filepart", ".crdownload")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file as it was found. ``inode`` and ``mtime_ns`` are 0 of an object, which has neither."""

    path: str
    size: int
    mtime_ns: int = 0
    inode: int = 0


class FilePlace(Protocol):
    """Where files are."""

    @property
    def shown(self) -> str:
        """What it is called."""
        ...

    def files(self) -> Iterator[FoundFile]:
        """Yield the files that may be read, in any order.

        Raises:
            RetriableError: the place does not respond.
        """
        ...

    def open(self, path: str) -> IO[bytes]:
        """Open a file.

        Raises:
            FileNotFoundError: there is none.
            RetriableError: the place does not respond.
        """
        ...

    def found(self, path: str) -> FoundFile | None:
        """Return a file as it is now; None if there is none, or where that cannot change."""
        ...


def is_read(path: str, pattern: str) -> bool:
    """Whether a file is to be read: it fits the pattern, is not hidden, and does not say that it is unfinished."""
    name = path.rpartition("/")[2]
    return (
        fnmatchcase(name, pattern)
        and not any(part.startswith(_HIDDEN) for part in path.split("/"))
        and not name.endswith(_UNFINISHED)
    )


@dataclass(frozen=True)
class LocalFolder:
    """A folder of this machine, with the folders in it."""

    folder: Path
    pattern: str

    @property
    def shown(self) -> str:
        return str(self.folder)

    def files(self) -> Iterator[FoundFile]:
        """Yield files; see :class:`FilePlace`. A link to a folder is not followed."""

        def failed(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError) or Path(error.filename) == self.folder:
                raise RetriableError(f"the folder {self.folder} cannot be listed: {error}")

        for folder, folders, names in os.walk(self.folder, onerror=failed):
            folders[:] = [name for name in folders if not name.startswith(_HIDDEN)]
            for name in names:
                path = Path(folder, name).relative_to(self.folder).as_posix()
                if is_read(path, self.pattern) and (found := self.found(path)) is not None:
                    yield found

    def found(self, path: str) -> FoundFile | None:
        """Return a file as it is now; None if there is none. A pipe or a socket is no file: opening one may wait for ever."""
        try:
            stat = (self.folder / path).stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RetriableError(f"{self.folder / path} cannot be looked at: {error}") from error
        if not S_ISREG(stat.st_mode):
            return None
        return FoundFile(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)

    def open(self, path: str) -> IO[bytes]:
        """Open a file; see :class:`FilePlace`."""
        return (self.folder / path).open("rb", buffering=1 << 18)


@dataclass(frozen=True)
class ObjectFolder:
    """The objects under a URL. An object is whole as soon as it is there; the one that is read is in memory."""

    client: ObjectClient
    pattern: str

    @property
    def shown(self) -> str:
        return self.client.url

    def files(self) -> Iterator[FoundFile]:
        """Yield objects; see :class:`FilePlace`."""
        for name, size in self.client.objects():
            if is_read(name, self.pattern):
                yield FoundFile(name, size)

    def found(self, path: str) -> FoundFile | None:  # noqa: ARG002 - of the protocol
        """Return None: an object that is being read does not change."""
        return None

    def open(self, path: str) -> IO[bytes]:
        """Open an object; see :class:`FilePlace`."""
        return io.BufferedReader(cast("io.RawIOBase", pa.BufferReader(self.client.get(path))))
