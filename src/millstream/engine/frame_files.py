"""Large frames are files, and only their names go through Spark.

Between two Python processes Spark carries bytes through its JVM, which copies them several times,
hashes and compresses them for a shuffle, and pickles them for the driver: a microsecond for a row of 200
bytes. All processes of a job share the app's folder, so the task that makes a large frame writes it there,
and its reader reads it there.

A frame belongs to its batch. It is written completely before its name is sent, and removed when the batch
is committed; the next run removes the frames of batches that were not committed. A file's name is unique
to the attempt that wrote it, so a task that is tried again uses nothing of its first attempt. Nothing is
synced to disk: after a power failure the batch is run again, and writes its frames again.

On one machine, the next batch writes its frames over those of the last one: writing into memory that the
kernel must find first, and a hypervisor below it, takes up to ten times as long as writing into what the
file has. The name of a file says who may do what with it:

========================  =================================  ==================  ==============================
name                      what it is                         who writes into it  what the commit makes of it
========================  =================================  ==================  ==============================
``<name>.part``           an attempt writes a frame into it  that attempt        removed: nobody was told of it
``<name>``                a frame                            nobody              ``.spare``; removed if the driver
                                                                                 still has a view of it
``<name>.<size>.spare``   a frame of an earlier batch        nobody              removed: a batch did without it
========================  =================================  ==================  ==============================

A task looks through all spare files for each frame that it writes, so there are few, the largest of the batch, and
their names say how large they are. An attempt takes a spare file by renaming it, which only one can do. An attempt
that wakes up after the commit of its batch has no file any more, under whichever name. Tasks copy what they read, so
that rows which a function of the user's keeps do not change; the driver, which maps frames into its memory, knows
which of them are still in use.
"""

from __future__ import annotations

import mmap
import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from millstream.errors import CorruptionError
from millstream.kernels.frames import Frame, FrameRow

# Below this, what Spark does with the bytes costs less than a file does, about 0.1 ms.
_BYTES_MIN = 64 << 10
_FILE_PREFIX = b"\0file "  # a frame begins with 0xFF, a message with "{"
_PART, _SPARE = ".part", ".spare"
_SPARE_BYTES_MAX = 1 << 30  # of all spare files together, and no more than a batch had
_SPARE_FILES_MAX = 128  # looking through them takes about 0.1 ms, less than most of them save
_SPARE_RATIO_MAX = 4  # a file is not taken for a frame that needs less than this part of it


@dataclass(frozen=True)
class FrameFiles:
    """The folder of one run of an app; None where all frames go through Spark.

    ``rewrites``: files of committed batches are written again, as all processes are on one machine.
    """

    folder: Path | None
    rewrites: bool = False

    def put(self, row: FrameRow) -> FrameRow:
        """Return the row that goes through Spark for this one, with a frame of bytes."""
        if self.folder is None or len(row.frame) < _BYTES_MIN:
            return row._replace(frame=bytes(row.frame))
        name = uuid.uuid4().hex
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f"{name}{_PART}"
        with part.open("r+b" if self._take_spare(part, len(row.frame)) else "xb") as file:
            file.write(row.frame)
        part.rename(self.folder / name)
        return row._replace(frame=_FILE_PREFIX + f"{name} {len(row.frame)}".encode())

    def get(self, row: FrameRow) -> FrameRow:
        """Return the row that :meth:`put` was given, with a copy of its frame."""
        return row._replace(frame=self.open(row.frame))

    def open(self, frame: Frame) -> Frame:
        """Return a copy of the frame of a row that :meth:`put` was given.

        Raises:
            CorruptionError: its file has fewer bytes.
        """
        named = self.named(frame)
        if named is None:
            return frame
        assert self.folder is not None
        name, size_bytes = named
        copy = memoryview(pa.allocate_buffer(size_bytes)).cast("B")  # as Arrow wants it aligned
        with (self.folder / name).open("rb", buffering=0) as file:
            read = 0
            while read < size_bytes and (more := file.readinto(copy[read:])):
                read += more
        if read < size_bytes:
            raise CorruptionError(
                f"{self.folder / name} has {read} bytes, and {size_bytes} were written into it. Nothing of this batch was "
                "committed. Run the app again: it writes its frames anew."
            )
        return copy

    def size_bytes(self, frame: Frame) -> int:
        """Return the size of a frame as it was given to :meth:`put`."""
        named = self.named(frame)
        return len(frame) if named is None else named[1]

    def named(self, frame: Frame) -> tuple[str, int] | None:
        """Return the name of the frame's file and its size; None for a frame that is not in a file."""
        if self.folder is None or bytes(frame[: len(_FILE_PREFIX)]) != _FILE_PREFIX:
            return None
        name, size_bytes = bytes(frame[len(_FILE_PREFIX) :]).decode().split()
        return name, int(size_bytes)

    def remove_batch(self, in_use: Collection[str] = ()) -> None:
        """Remove the frames of a committed batch, or make spare files of them; no other batch is running.

        ``in_use`` are the names of those that must not change.
        """
        if self.folder is None:
            return
        spare = dict(self._to_keep(in_use))
        for path in self.folder.glob("*"):
            # Whoever was given up may take, rename or make a file meanwhile: then it is for the next commit.
            with suppress(FileNotFoundError):
                if path.name in spare:
                    path.rename(path.with_name(f"{path.name}.{spare[path.name]}{_SPARE}"))
                else:
                    path.unlink()

    def _to_keep(self, in_use: Collection[str]) -> Iterator[tuple[str, int]]:
        """Yield the names of the frames that become spare files, the largest, and their sizes."""
        assert self.folder is not None
        if not self.rewrites:
            return
        frames = (path for path in self.folder.glob("*") if not path.suffix)
        sizes = {path.name: _size_bytes(path) for path in frames if path.name not in in_use}
        left = _SPARE_BYTES_MAX
        for name in sorted(sizes, key=sizes.__getitem__, reverse=True)[:_SPARE_FILES_MAX]:
            if sizes[name] <= left:
                left -= sizes[name]
                yield name, sizes[name]

    def remove_all(self) -> None:
        """Remove all files: the run has ended."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def remove_earlier_runs(self) -> None:
        """Remove the frames of earlier runs."""
        if self.folder is not None:
            shutil.rmtree(self.folder.parent, ignore_errors=True)

    def _take_spare(self, part: Path, size_bytes: int) -> bool:
        """Rename a spare file of a fitting size, if there is one: the least that is enough, or else the largest."""
        if not self.rewrites:
            return False
        sizes = {
            name: int(name.removesuffix(_SPARE).rpartition(".")[2])
            for name in os.listdir(part.parent)  # noqa: PTH208 - for each frame, so no object for each name
            if name.endswith(_SPARE)
        }
        fitting = [name for name, size in sizes.items() if size <= _SPARE_RATIO_MAX * size_bytes]
        fitting.sort(key=lambda name: (sizes[name] < size_bytes, abs(sizes[name] - size_bytes)))
        return any(_renamed(part.with_name(name), part) for name in fitting)


def _size_bytes(path: Path) -> int:
    """Return the size of a file; 0 if it is gone meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _renamed(path: Path, to: Path) -> bool:
    """Rename a file, unless another task has taken it meanwhile."""
    try:
        path.rename(to)
    except FileNotFoundError:
        return False
    return True


@dataclass
class MappedFrames:
    """The frames of a batch that the driver has mapped into memory."""

    files: FrameFiles
    _maps: dict[str, mmap.mmap] = field(default_factory=dict)

    def get(self, row: FrameRow) -> FrameRow:
        """Return the row that :meth:`FrameFiles.put` was given; its frame is a view of the file."""
        named = self.files.named(row.frame)
        if named is None:
            return row
        assert self.files.folder is not None
        name, size_bytes = named
        if name not in self._maps:
            with (self.files.folder / name).open("rb") as file:
                self._maps[name] = mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ)
        return row._replace(frame=memoryview(self._maps[name]))

    def close(self) -> set[str]:
        """Forget the frames; return the names of those of which there are still views."""
        maps, self._maps = self._maps, {}
        return {name for name, mapped in maps.items() if not _is_closed(mapped)}


def _is_closed(mapped: mmap.mmap) -> bool:
    """Close a map unless something still shows its bytes."""
    try:
        mapped.close()
    except BufferError:
        return False
    return True
