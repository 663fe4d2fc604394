"""Objects as files of a folder.

1. The file is written under its own name, and synced.
2. ``sync`` syncs the folder: from here on the file is there for good. A crash before leaves a file, whole or
   not, which nothing names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from millstream.errors import CorruptionError
from millstream.log.files import DISK
from millstream.object_store.store import Extent, Loaded, RequestCounts, Stored, Write


@dataclass
class FolderStore:
    """A folder of objects, which need not exist yet."""

    folder: Path
    checksums: bool = False
    requests: RequestCounts = field(default_factory=RequestCounts)
    _written: set[Path] = field(default_factory=set)  # folders with names that are not synced

    @property
    def url(self) -> str:
        return str(self.folder)

    def put(self, name: str, write: Write) -> Stored:
        path = self.folder / name
        self._make_folder(path.parent)
        with path.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            size_bytes = file.tell()
        self._written.add(path.parent)
        return Stored(size_bytes)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder; the names of all that were missing have to be synced, too."""
        missing = folder
        while not missing.exists():
            self._written.add(missing.parent)
            missing = missing.parent
        folder.mkdir(parents=True, exist_ok=True)

    def sync(self) -> None:
        while self._written:
            folder = next(iter(self._written))
            DISK.sync_folder(folder)
            self._written.remove(folder)

    def read(self, name: str, extent: Extent) -> Loaded:
        path = self.folder / name
        found = read_extent(path, extent)
        if isinstance(found, int):
            raise wrong_size(str(path), extent, found)
        return found

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def delete_all(self) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def names(self, prefix: str = "") -> Iterator[str]:
        begin = self.folder / prefix
        if not begin.exists():
            return
        for folder, folders, files in os.walk(begin):
            folders.sort()
            for file in sorted(files):
                yield str((Path(folder) / file).relative_to(self.folder))

    def close(self) -> None:
        """Do nothing: files are deleted at once."""


def read_extent(path: Path, extent: Extent) -> Loaded | int:
    """Return bytes of a file; a whole file is mapped. If it has others, return how many bytes it has."""
    try:
        size_bytes = path.stat().st_size
    except FileNotFoundError:
        size_bytes = 0
    if not (size_bytes == extent.end if extent.whole else size_bytes >= extent.end):
        return size_bytes
    if extent.whole:
        return Loaded(pa.memory_map(str(path)).read_buffer(), mapped=True)
    with path.open("rb") as opened:
        opened.seek(extent.start)
        return Loaded(pa.py_buffer(opened.read(extent.size_bytes)), mapped=False)


def wrong_size(where: str, extent: Extent, found: int) -> CorruptionError:
    """Return the error for an object that has fewer bytes than it must have, or more."""
    return CorruptionError(
        f"{where} has {found} bytes; the state needs {extent.size_bytes} of it from byte "
        f"{extent.start} on. Restore the app's whole folder from where you keep copies of it, or "
        "start over from the log: `millstream reset` with the app's name."
    )
