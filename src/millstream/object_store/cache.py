"""A bounded cache of objects on this machine's disk, shared by all processes that use the same folder.

Nothing depends on it. A file appears under its name by a rename, so readers see whole files or none; whoever opens
one compares its size and its checksum with what the manifest says. Files may be removed at any time, by another
process or by hand: what is mapped stays readable, the rest is read from the store again. Where the disk is full or
cannot be written, nothing is cached.

The oldest files go first, by the time of their last use (their modification time). A process looks through the
folder once it has added a sixteenth of the size, so the cache may be larger by that much for each process.
"""

from __future__ import annotations

import os
import stat
import tempfile
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_LOOK_AFTER_FILES = 1024  # or earlier, after a sixteenth of the size
_KEPT = 0.9  # of the size, once files have to go
_DRAFT = ".draft"
SIZE_DEFAULT = 10 << 30


def default_cache_folder() -> Path:
    """Return the cache's folder where the user names none: one of this user, for temporary files."""
    return Path(tempfile.gettempdir()) / f"millstream-state-{os.geteuid()}"


@dataclass
class LocalCache:
    """Objects of one store in a folder. ``prefix`` tells them from those of other stores."""

    folder: Path
    size_max: int
    prefix: str
    _added_bytes: int = 0
    _added_files: int = 0
    _usable: bool | None = field(default=None)

    def path(self, name: str) -> Path:
        """Return where an object is, if it is here."""
        return self.folder / f"{self.prefix}-{name.replace('/', '-')}"

    def put(self, name: str, data: memoryview) -> bool:
        """Keep an object; return whether that was possible."""
        if len(data) > self.size_max or not self._is_usable():
            return False
        path = self.path(name)
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_DRAFT}")
        try:
            draft.write_bytes(data)
            draft.rename(path)
        except OSError:  # full, read-only, or removed meanwhile
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            self._usable = None
            return False
        self._added_bytes += len(data)
        self._added_files += 1
        if self._added_bytes > self.size_max // 16 or self._added_files >= _LOOK_AFTER_FILES:
            self._added_bytes = self._added_files = 0
            self.evict()
        return True

    def touch(self, name: str) -> None:
        """Note that an object is used."""
        with suppress(OSError):
            os.utime(self.path(name))

    def remove(self, name: str) -> None:
        """Forget an object."""
        with suppress(OSError):
            self.path(name).unlink(missing_ok=True)

    def evict(self) -> None:
        """Remove the files that were not used for longest, if there are too many bytes."""
        found: list[tuple[float, int, str]] = []
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    about = entry.stat(follow_symlinks=False)
                    found.append((about.st_mtime, about.st_size, entry.path))
        size = sum(each[1] for each in found)
        if size <= self.size_max:
            return
        for _used, size_bytes, path in sorted(found):
            if size <= self.size_max * _KEPT:
                return
            with suppress(OSError):
                Path(path).unlink(missing_ok=True)
                size -= size_bytes

    def _is_usable(self) -> bool:
        """Return whether the folder is there, and nobody else can put files into it."""
        if self._usable is None:
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                about = self.folder.lstat()
            except OSError:
                return False
            self._usable = (
                stat.S_ISDIR(about.st_mode)
                and about.st_uid == os.geteuid()
                and not about.st_mode & 0o022
            )
        return self._usable
