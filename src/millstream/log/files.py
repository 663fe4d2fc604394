"""Every operation on files that the log makes, as one small interface.

The log never calls the operating system directly; it is handed a :class:`Files`. ``DISK`` is the
real one. ``millstream.testing.disk`` has one that crashes at any operation, drops or tears what was
not synced, writes short, and fails as a full or broken disk does.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from millstream.errors import SyncFailedError


class Mapping(Protocol):
    """A file mapped into memory: bytes assigned to a slice are seen by every process at once."""

    def __getitem__(self, part: slice, /) -> bytes: ...
    def __setitem__(self, part: slice, data: bytes, /) -> None: ...
    def flush(self) -> object: ...
    def close(self) -> object: ...


class Files(Protocol):
    """The file operations of the log. Handles are small integers; failures raise OSError."""

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> int: ...
    def close(self, handle: int) -> None: ...
    def size(self, handle: int) -> int: ...
    def pread(self, handle: int, size: int, position: int) -> bytes: ...
    def pwrite(self, handle: int, data: bytes | memoryview, position: int) -> int:
        """Return how many bytes were written: fewer than given is not an error here."""

    def truncate(self, handle: int, size: int) -> None: ...
    def sync(self, handle: int) -> None:
        """Return when all data of the file, and its size, are on stable storage."""

    def forget_cached(self, handle: int) -> None:
        """Drop clean cached pages, so that the next read comes from the device."""

    def sync_folder(self, path: Path) -> None:
        """Return when names created in or removed from the folder are on stable storage."""

    def make_folder(self, path: Path) -> None: ...
    def names(self, path: Path) -> list[str]:
        """Return the names in a folder, sorted; empty when there is no folder."""

    def exists(self, path: Path) -> bool: ...
    def rename(self, source: Path, target: Path) -> None: ...
    def remove(self, path: Path) -> None: ...
    def remove_folder(self, path: Path) -> None: ...
    def map(self, path: Path, size: int, *, write: bool) -> Mapping:
        """Return the first ``size`` bytes of a file; with ``write`` it is extended to that size first."""

    def lock(self, path: Path) -> int:
        """Return a handle that holds the file's lock; BlockingIOError if another process does."""

    def unlock(self, handle: int) -> None:
        """Release the lock that :meth:`lock` took, also for copies of the handle in other processes."""

    def boot_id(self) -> bytes:
        """Return 16 bytes that change whenever the machine starts: cached writes died with it."""


class DiskFiles:
    """The real file system."""

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> int:
        flags = os.O_RDWR if write else os.O_RDONLY
        return os.open(path, flags | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)

    def close(self, handle: int) -> None:
        os.close(handle)

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def pread(self, handle: int, size: int, position: int) -> bytes:
        data = os.pread(handle, size, position)
        if len(data) == size or not data:
            return data
        parts = [data]  # one call moves at most 2 GiB
        while data:
            position += len(data)
            size -= len(data)
            data = os.pread(handle, size, position)
            parts.append(data)
        return b"".join(parts)

    def pwrite(self, handle: int, data: bytes | memoryview, position: int) -> int:
        return os.pwrite(handle, data, position)

    def truncate(self, handle: int, size: int) -> None:
        os.ftruncate(handle, size)

    def sync(self, handle: int) -> None:
        os.fdatasync(handle)

    def forget_cached(self, handle: int) -> None:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync_folder(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def names(self, path: Path) -> list[str]:
        try:
            return sorted(os.listdir(path))  # noqa: PTH208 - faster with thousands of files
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self, path: Path) -> bool:
        return path.exists()

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        if path.exists():
            shutil.rmtree(path)

    def map(self, path: Path, size: int, *, write: bool) -> Mapping:
        handle = self.open(path, write=write, create=write)
        try:
            if write and os.fstat(handle).st_size < size:
                os.ftruncate(handle, size)
            access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
            return mmap.mmap(handle, size, access=access)
        finally:
            os.close(handle)

    def lock(self, path: Path) -> int:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # flock, not lockf: a POSIX lock vanishes when any handle on the file is closed.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(handle)
            raise
        return handle

    def unlock(self, handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_UN)

    def boot_id(self) -> bytes:
        try:
            text = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
        except OSError:
            return bytes(16)  # unknown: treated as another start of the machine
        return bytes.fromhex(text.strip().replace("-", ""))


DISK: Files = DiskFiles()


def write_whole(files: Files, handle: int, data: bytes | memoryview, position: int) -> None:
    """Write all of ``data``; a short write is followed by another for the rest.

    Raises:
        OSError: the disk is full or broken; some of the bytes may be in the file.
    """
    rest = memoryview(data)
    while rest:
        taken = files.pwrite(handle, rest, position)
        if taken <= 0:
            raise OSError(f"the disk took {taken} of {len(rest)} bytes")
        position += taken
        rest = rest[taken:]


class NewFile:
    """A file that is written from its start; its previous content is removed.

    Leaving the context closes it. Errors are the disk's: OSError.
    """

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._handle = files.open(path, write=True, create=True)
        self.size = 0
        try:
            files.truncate(self._handle, 0)
        except BaseException:
            files.close(self._handle)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close(self._handle)

    def write(self, data: bytes) -> None:
        """Add ``data`` at the end."""
        write_whole(self._files, self._handle, data, self.size)
        self.size += len(data)

    def sync(self) -> None:
        """Return when all of it is on stable storage."""
        self._files.sync(self._handle)


def numbered(names: Sequence[str], suffix: str) -> list[int]:
    """Return the numbers of the files named by 20 digits and ``suffix`` among some, ascending."""
    return sorted(
        int(name[:20])
        for name in names
        if len(name) == 20 + len(suffix) and name.endswith(suffix) and name[:20].isdigit()
    )


def read_whole(files: Files, path: Path) -> bytes:
    """Return all bytes of a file."""
    handle = files.open(path)
    try:
        return files.pread(handle, files.size(handle), 0)
    finally:
        files.close(handle)


def size_of(files: Files, path: Path) -> int:
    """Return how many bytes a file has; 0 if there is none."""
    try:
        handle = files.open(path)
    except FileNotFoundError:
        return 0
    try:
        return files.size(handle)
    finally:
        files.close(handle)


def sync_names(files: Files, folder: Path) -> None:
    """Return when names created in or removed from the folder are on stable storage.

    Every sync of names goes through here, so that a failure is never treated as a full disk and retried: the
    kernel may have dropped what it could not store, and the next sync would succeed without it.

    Raises:
        SyncFailedError: the disk failed; the writer must stop.
    """
    try:
        files.sync_folder(folder)
    except OSError as error:
        raise SyncFailedError(
            f"the disk failed to keep the names of the files in {folder} ({error}); nothing more is "
            "accepted. Check the disk, then open the folder again: it will be verified"
        ) from error


def replace_file(files: Files, path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` so that a crash leaves the old file or the new one, never a mix.

    1. Write ``<name>.new`` and sync it. A crash leaves a stray .new file, which nothing reads.
    2. Rename. A crash may leave the old file or the new one: both are whole.
    3. Sync the folder. From here on the new file is there for good.

    Raises:
        OSError: the old file is there.
        SyncFailedError: step 3 failed: see :func:`sync_names`.
    """
    fresh = path.with_name(path.name + ".new")
    with NewFile(files, fresh) as file:
        file.write(data)
        file.sync()
    files.rename(fresh, path)
    sync_names(files, path.parent)
