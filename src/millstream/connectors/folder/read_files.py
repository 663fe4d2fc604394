"""ReadFiles: which files were read, and how far; what became of them since; which are to be read next.

====================================  ===================================================================
a file that is found                  is
====================================  ===================================================================
under a new name                      new: read once it has not changed for a while
so, with the inode, size and time of  renamed: it has been read as far as that one was
one that is no longer found
under a name that was read, the same  done; or read on, if it was not read to its end
under a name that was read, of        changed: ``changed`` says whether the source stops, it is passed over
another size, time or inode           or read whole
under a name that was gone meanwhile  new, unless it is what it was: a disk may be away for a while
not, that was read                    gone: it is forgotten after a week
not, that was read in part            missed: tried again, until it is there
====================================  ===================================================================

Of an object only the name and the size are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from millstream.connectors.connector import Position
from millstream.connectors.folder.found_files import FoundFile
from millstream.connectors.folder.row_format import RowPosition
from millstream.errors import ConflictError, RetriableError

Changed = Literal["stop", "skip", "read"]
_FORGET_MS = 7 * 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A file, as it was when it was read; ``at`` is how far it was read, None to its end; ``gone_ms`` since when it is gone."""

    size: int
    mtime_ns: int
    inode: int
    at: RowPosition | None
    gone_ms: int | None = None

    def is_of(self, file: FoundFile) -> bool:
        """Whether this is what the file still is."""
        return (self.size, self.mtime_ns, self.inode) == (file.size, file.mtime_ns, file.inode)

    def to_position(self) -> Position:
        """Return it as JSON."""
        return {name: value for name, value in asdict(self).items() if name != "gone_ms" or value}


def read_file(file: FoundFile, at: RowPosition | None) -> ReadFile:
    """Return what is kept of a file that was read so far."""
    return ReadFile(file.size, file.mtime_ns, file.inode, at)


@dataclass
class ReadFiles:
    """The files that were read, by path. ``positions`` are to be stored: what has changed since they were taken."""

    changed: Changed
    settled_s: float
    clock_ms: Callable[[], int]
    monotonic_s: Callable[[], float]
    known: dict[str, ReadFile]
    positions: dict[str, Position] = field(default_factory=dict)
    passed_over: str = ""
    _seen: dict[str, tuple[FoundFile, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, positions: Any, **settings: Any) -> ReadFiles:
        """Return those of stored positions.

        Raises:
            ConflictError: they are none of a folder.
        """
        try:
            known = {
                path: ReadFile(**{"gone_ms": None, **entry}) for path, entry in positions.items()
            }
        except TypeError as error:
            raise ConflictError(
                f"the positions are not those of a folder: {error}. Give the source another name."
            ) from error
        return cls(known=known, **settings)

    def note(self, path: str, entry: ReadFile | None) -> None:
        """Keep how far a file was read; None forgets it."""
        if entry is None:
            del self.known[path]
            self.positions[path] = None
        else:
            self.known[path] = entry
            self.positions[path] = entry.to_position()

    def next_files(self, files: Iterable[FoundFile]) -> tuple[list[FoundFile], bool]:
        """Take what is there now; return what is to be read, in order, and whether more waits until it is settled.

        Raises:
            ConflictError: a file has changed, and the source is to stop.
            RetriableError: a file is missing that was not read to its end.
        """
        there = {file.path: file for file in files}
        self._rename(there)
        self._note_gone(there)
        wanted = [file for file in there.values() if self._is_wanted(file)]
        settled = [file for file in wanted if self._is_settled(file)]
        self._seen = {path: seen for path, seen in self._seen.items() if path in there}
        settled.sort(key=lambda file: (file.path not in self.known, file.mtime_ns, file.path))
        return settled, len(settled) < len(wanted)

    def _rename(self, there: dict[str, FoundFile]) -> None:
        lost = {
            (entry.inode, entry.size, entry.mtime_ns): path
            for path, entry in self.known.items()
            if entry.inode and (path not in there or not entry.is_of(there[path]))
        }
        moves: dict[str, tuple[str, ReadFile]] = {}
        for path, file in there.items():
            before = lost.get((file.inode, file.size, file.mtime_ns))
            known = self.known.get(path)
            if before is None or before == path or (known is not None and known.is_of(file)):
                continue
            moves[path] = (before, self.known[before])
            del lost[(file.inode, file.size, file.mtime_ns)]
        left = {before for before, _ in moves.values()}
        for path in moves:
            self._refuse_if_unread(path, there[path], left)
        # All leave before any arrives: a rotation moves a file to the name of another one that moves, too.
        for path in left:
            self.note(path, None)
        for path, (_, entry) in moves.items():
            self.note(path, replace(entry, gone_ms=None))

    def _refuse_if_unread(self, path: str, file: FoundFile, left: set[str]) -> None:
        """Refuse a renamed file in the place of one that was read in part, and is nowhere now."""
        entry = self.known.get(path)
        if entry is None or entry.at is None or path in left:
            return
        if self.changed == "stop":
            raise self._has_changed(entry, file)
        self.passed_over = f"{path} was replaced before it was read to its end"

    def _note_gone(self, there: dict[str, FoundFile]) -> None:
        now_ms = self.clock_ms()
        for path, entry in list(self.known.items()):
            if path in there:
                continue
            if entry.at is not None and entry.gone_ms is None and self.changed != "skip":
                raise RetriableError(
                    f"{path} is not there, and was not read to its end: {entry.at}. Put it back; or give changed='skip', to "
                    "go on without the rest of it."
                )
            if entry.gone_ms is None:
                self.note(path, replace(entry, gone_ms=now_ms))
                if entry.at is not None:
                    self.passed_over = f"{path} was removed before it was read to its end"
            elif now_ms - entry.gone_ms > _FORGET_MS:
                self.note(path, None)

    def _is_wanted(self, file: FoundFile) -> bool:
        """Return whether a file is to be read, or read on."""
        entry = self.known.get(file.path)
        if entry is None:
            return True
        if entry.is_of(file):
            if entry.gone_ms is not None:
                self.note(file.path, replace(entry, gone_ms=None))
            return entry.at is not None
        if entry.gone_ms is not None or self.changed == "read":
            self.note(file.path, None)
            return True
        if self.changed == "stop":
            raise self._has_changed(entry, file)
        self.note(file.path, read_file(file, None))
        self.passed_over = f"{file.path} has changed since it was read, and was passed over"
        return False

    def _has_changed(self, entry: ReadFile, file: FoundFile) -> ConflictError:
        return ConflictError(
            f"{file.path} has changed since it was read: it had {entry.size:,} bytes, and has {file.size:,}, or it was "
            "written again. Give changed='skip', and it stays as it was read; changed='read', and all of it is read "
            "again. Files that grow should be complete before they are put there, under a new name."
        )

    def _is_settled(self, file: FoundFile) -> bool:
        """Return whether a file has stood still: by its own time, else by how long it is seen as it is."""
        if not file.inode:
            return True
        age_s = self.clock_ms() / 1000 - file.mtime_ns / 1e9
        now_s = self.monotonic_s()
        before, since_s = self._seen.get(file.path, (None, now_s))
        if before != file:
            since_s = now_s
        self._seen[file.path] = (file, since_s)
        return age_s >= self.settled_s or now_s - since_s >= self.settled_s
