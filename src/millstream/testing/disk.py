"""A file system in memory that fails as disks do, for testing what the log promises.

It implements ``millstream.log.files.Files``. What it can do to a program, all from one seed:

- stop it at any operation (``crash_at``), a write or a sync then being done in part, whole or not;
- ``restart(power_lost=False)``: as after ``kill -9``: what was written is there, synced or not;
- ``restart(power_lost=True)``: every page that was not synced keeps any one of the contents that it
  had since the last sync, independently of the others, the file ends anywhere between its synced
  and its last size, and names made without syncing the folder may be gone;
- take fewer bytes than given (``short_writes``), be full (``capacity_bytes``), fail a write or a read
  (``fail_write_at``, ``fail_read_at``), fail to remove a file (``fail_remove_at``), and fail a sync of a
  file, a mapping or a folder (``fail_sync_at``, ``fail_flush_at``, ``fail_folder_sync_at``): the kernel
  then forgets what was to be written, but still shows it.

Not simulated: sectors that change by themselves (tests damage bytes with :meth:`damage`), and
folders: they are as durable as the files in them.
"""

from __future__ import annotations

import errno
import random
from pathlib import Path

_PAGE_BYTES = 4096


class SimulatedCrash(BaseException):  # not an Exception: no handler of errors may survive a crash
    """The process is dead from this operation on, until ``restart``."""


class _File:
    """One file: what programs see, what is on the disk, and the writes between the two."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.stored = bytearray()
        self.waiting: list[tuple[int, bytes | None]] = []  # (position, data) or (new size, None)

    def write(self, position: int, data: bytes) -> None:
        _apply(self.seen, position, data)
        self.waiting.append((position, data))

    def truncate(self, size: int) -> None:
        _apply(self.seen, size, None)
        self.waiting.append((size, None))

    def sync(self) -> None:
        for position, data in self.waiting:
            _apply(self.stored, position, data)
        self.waiting.clear()

    def lose_power(self, rng: random.Random) -> None:
        """Keep of each page one of the contents that it had since the last sync."""
        sizes = [len(self.stored)]
        touched: set[int] = set()
        for position, data in self.waiting:
            end = max(sizes) if data is None else position + len(data)
            touched.update(range(position // _PAGE_BYTES, -(-end // _PAGE_BYTES)))
            sizes.append(position if data is None else max(sizes[-1], end))
        size = rng.choice([rng.choice(sizes), rng.randint(min(sizes), max(sizes))])
        kept = self.stored[:size] + bytes(max(size - len(self.stored), 0))
        for page in sorted(touched):
            start = page * _PAGE_BYTES
            content = self.stored[start : start + _PAGE_BYTES].ljust(_PAGE_BYTES, b"\0")
            for position, data in self.waiting[: rng.randint(0, len(self.waiting))]:
                _apply_to_page(content, position - start, data)
            kept[start : start + _PAGE_BYTES] = content[: max(size - start, 0)]
        self.stored, self.seen = kept, bytearray(kept)
        self.waiting.clear()


class SimulatedMapping:
    """A mapped file: assignments are seen at once, and stored when flushed, or whenever."""

    def __init__(self, disk: SimulatedDisk, file: _File) -> None:
        self._disk = disk
        self._file = file

    def __getitem__(self, part: slice) -> bytes:
        return bytes(self._file.seen[part])

    def __setitem__(self, part: slice, data: bytes) -> None:
        self._disk.step()
        self._file.write(part.start, data)

    def flush(self) -> None:
        self._disk.step()
        if self._disk.fails("fail_flush_at"):
            self._file.waiting.clear()
            raise OSError(errno.EIO, "input/output error")
        self._file.sync()

    def close(self) -> None:
        pass


class SimulatedDisk:
    """See the module. Deterministic for one seed and one sequence of calls; not thread-safe."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - reproducible on purpose
        self._names: dict[str, _File] = {}  # paths as text: they are looked up all the time
        self._stored_names: dict[str, _File] = {}
        self._handles: dict[int, _File] = {}
        self._next_handle = 3
        self._boot = 1
        self._dead = False
        self.steps = 0
        self.crash_at: int | None = None
        self._forgotten: dict[str, _File] = {}  # names that no later sync will store
        self.fail_sync_at: int | None = None
        self.fail_flush_at: int | None = None
        self.fail_folder_sync_at: int | None = None
        self.fail_remove_at: int | None = None
        self.fail_write_at: int | None = None
        self.fail_read_at: int | None = None
        self.reads_failed = 0
        self.short_writes = 0.0
        self.capacity_bytes: int | None = None

    # -- what tests do to it ------------------------------------------------------------------

    def restart(self, *, power_lost: bool) -> None:
        """Let the next process begin, on what the last one left; faults are switched off."""
        self._dead = False
        self._handles.clear()
        self.steps, self.crash_at, self.fail_sync_at = 0, None, None
        self.fail_write_at = self.fail_read_at = self.fail_remove_at = None
        self.fail_flush_at = self.fail_folder_sync_at = None
        self.short_writes, self.capacity_bytes = 0.0, None
        if not power_lost:
            return
        self._boot += 1
        for path, file in list(self._names.items()):
            lost = self._forgotten.get(path) is file or self._rng.random() < 0.5
            if self._stored_names.get(path) is not file and lost:
                del self._names[path]
        self._forgotten.clear()
        for path, file in self._stored_names.items():
            self._names.setdefault(path, file)
        self._stored_names = dict(self._names)
        for file in self._names.values():
            file.lose_power(self._rng)

    def damage(self, path: Path, position: int, data: bytes) -> None:
        """Change bytes on the disk behind everybody's back."""
        file = self._names[str(path)]
        file.seen[position : position + len(data)] = data
        file.stored[position : position + len(data)] = data

    def step(self) -> None:
        """Count one operation; the process may die here."""
        if self._dead:
            raise SimulatedCrash
        self.steps += 1
        if self.steps == self.crash_at:
            self._dead = True
            raise SimulatedCrash

    def fails(self, fault: str) -> bool:
        """Return whether this is the operation that ``fault`` is set for; it fails once."""
        at = getattr(self, fault)
        if at is None or self.steps < at:
            return False
        setattr(self, fault, None)
        return True

    # -- Files --------------------------------------------------------------------------------

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> int:
        if self._dead:
            raise SimulatedCrash
        name = str(path)
        if name not in self._names:
            if not (write and create):
                raise FileNotFoundError(errno.ENOENT, "no such file", name)
            self.step()
            self._names[name] = _File()
        self._next_handle += 1
        self._handles[self._next_handle] = self._names[name]
        return self._next_handle

    def close(self, handle: int) -> None:
        self._handles.pop(handle, None)

    def size(self, handle: int) -> int:
        return len(self._handles[handle].seen)

    def pread(self, handle: int, size: int, position: int) -> bytes:
        if self.fail_read_at is not None and self.steps >= self.fail_read_at:
            self.fail_read_at = None
            self.reads_failed += 1
            raise OSError(errno.EIO, "input/output error")
        return bytes(self._handles[handle].seen[position : position + size])

    def pwrite(self, handle: int, data: bytes | memoryview, position: int) -> int:
        content = bytes(data)
        file = self._handle(handle)
        try:
            self.step()
        except SimulatedCrash:
            file.write(position, content[: self._rng.randint(0, len(content))])
            raise
        if self.fail_write_at is not None and self.steps >= self.fail_write_at:
            self.fail_write_at = None
            file.write(position, content[: self._rng.randint(0, len(content))])
            raise OSError(errno.EIO, "input/output error")
        if self.capacity_bytes is not None:
            room = self.capacity_bytes - self._used()
            if room <= 0:
                raise OSError(errno.ENOSPC, "no space left")
            content = content[:room]
        if len(content) > 1 and self._rng.random() < self.short_writes:
            content = content[: self._rng.randint(1, len(content))]
        file.write(position, content)
        return len(content)

    def truncate(self, handle: int, size: int) -> None:
        file = self._handle(handle)
        self.step()
        file.truncate(size)

    def sync(self, handle: int) -> None:
        file = self._handle(handle)
        try:
            self.step()
        except SimulatedCrash:
            if self._rng.random() < 0.5:
                file.sync()
            raise
        if self.fails("fail_sync_at"):
            # What the kernel does: the pages count as clean from now on, though nothing was stored.
            file.waiting.clear()
            raise OSError(errno.EIO, "input/output error")
        file.sync()

    def forget_cached(self, handle: int) -> None:
        file = self._handle(handle)
        file.seen = bytearray(file.stored)
        for position, data in file.waiting:
            _apply(file.seen, position, data)

    def sync_folder(self, path: Path) -> None:
        self.step()
        folder = str(path)
        fresh = {
            name: file for name, file in self._names.items() if name.rpartition("/")[0] == folder
        }
        if self.fails("fail_folder_sync_at"):
            known = self._stored_names
            self._forgotten |= {n: file for n, file in fresh.items() if known.get(n) is not file}
            raise OSError(errno.EIO, "input/output error")
        for name, file in fresh.items():
            if self._forgotten.get(name) is not file:
                self._stored_names[name] = file
        for name in [one for one in self._stored_names if one.rpartition("/")[0] == folder]:
            if name not in self._names:
                del self._stored_names[name]

    def make_folder(self, path: Path) -> None:
        pass

    def names(self, path: Path) -> list[str]:
        start = len(str(path)) + 1
        return sorted({name[start:].partition("/")[0] for name in self._below(path)})

    def exists(self, path: Path) -> bool:
        return str(path) in self._names or bool(self._below(path))

    def rename(self, source: Path, target: Path) -> None:
        self.step()
        self._names[str(target)] = self._names.pop(str(source))

    def remove(self, path: Path) -> None:
        self.step()
        if self.fails("fail_remove_at"):
            raise OSError(errno.EIO, "input/output error")
        self._names.pop(str(path), None)

    def remove_folder(self, path: Path) -> None:
        self.step()
        for name in self._below(path):
            del self._names[name]
            self._stored_names.pop(name, None)

    def map(self, path: Path, size: int, *, write: bool) -> SimulatedMapping:
        handle = self.open(path, write=write, create=write)
        file = self._handles.pop(handle)
        if write and len(file.seen) < size:
            self.step()
            file.truncate(size)
        return SimulatedMapping(self, file)

    def lock(self, path: Path) -> int:
        return self.open(path, write=True, create=True)

    def unlock(self, handle: int) -> None:
        """Do nothing: there is only one process."""

    def boot_id(self) -> bytes:
        return self._boot.to_bytes(16, "big")

    def _below(self, folder: Path) -> list[str]:
        start = f"{folder}/"
        return [name for name in self._names if name.startswith(start)]

    def _handle(self, handle: int) -> _File:
        if self._dead:
            raise SimulatedCrash
        return self._handles[handle]

    def _used(self) -> int:
        return sum(len(file.seen) for name, file in self._names.items() if not name.endswith(".mm"))


def _apply(content: bytearray, position: int, data: bytes | None) -> None:
    """Write ``data`` at ``position``; without data, make ``position`` the size."""
    if data is None:
        del content[position:]
        content.extend(bytes(position - len(content)))
        return
    if position > len(content):
        content.extend(bytes(position - len(content)))
    content[position : position + len(data)] = data


def _apply_to_page(page: bytearray, position: int, data: bytes | None) -> None:
    """Apply to one page a write or a truncation whose position counts from the page's start."""
    if data is None:
        data, position = bytes(_PAGE_BYTES), max(position, 0)
    begin, fresh = max(position, 0), data[max(-position, 0) :]
    end = min(begin + len(fresh), _PAGE_BYTES)
    if begin < end:
        page[begin:end] = fresh[: end - begin]
