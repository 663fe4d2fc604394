"""Large frames lie in files, and only their names go through Spark.

Between two Python processes Spark carries bytes through its JVM, which copies them several times
over, hashes and compresses them for a shuffle, and pickles them for the driver: a microsecond for a
row of 200 bytes. All processes of a job share the app's folder, so a frame of some size is written
there by the task that made it, and read, mapped into memory, by what takes it.

A frame belongs to its batch. It is whole before its name is told, and it is removed when the batch is
committed; what a batch left that was not is removed when the next run begins. A file's name is unique
to the attempt that wrote it, so a task that is tried again takes nothing from its first attempt.
Nothing is synced to disk: after a power failure the batch is run again, and makes its frames again.
"""

from __future__ import annotations

import mmap
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from millstream.kernels.frames import Frame, FrameRow

# Below this, what Spark does with the bytes costs less than a file does, about 0.1 ms.
_BYTES_MIN = 64 << 10
_FILE_PREFIX = b"\0file "  # a frame begins with 0xFF, a message with "{"


@dataclass(frozen=True)
class FrameFiles:
    """The folder of one run of an app; None where all frames go through Spark."""

    folder: Path | None

    def put(self, row: FrameRow) -> FrameRow:
        """Give the row that goes through Spark for this one, with a frame of bytes."""
        if self.folder is None or len(row.frame) < _BYTES_MIN:
            return row._replace(frame=bytes(row.frame))
        name = uuid.uuid4().hex
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(row.frame)
        return row._replace(frame=_FILE_PREFIX + f"{name} {len(row.frame)}".encode())

    def get(self, row: FrameRow) -> FrameRow:
        """Give the row that :meth:`put` was given; the frame is a view of the file."""
        return row._replace(frame=self.open(row.frame))

    def open(self, frame: Frame) -> Frame:
        """Give the frame of a row that :meth:`put` was given."""
        named = self._named(frame)
        if named is None:
            return frame
        assert self.folder is not None
        with (self.folder / named[0]).open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def size_bytes(self, frame: Frame) -> int:
        """Tell the size of a frame as it was given to :meth:`put`."""
        named = self._named(frame)
        return len(frame) if named is None else named[1]

    def _named(self, frame: Frame) -> tuple[str, int] | None:
        """Give the name of the frame's file and its size; None for a frame that is here itself."""
        if self.folder is None or bytes(frame[: len(_FILE_PREFIX)]) != _FILE_PREFIX:
            return None
        name, size_bytes = bytes(frame[len(_FILE_PREFIX) :]).decode().split()
        return name, int(size_bytes)

    def remove_batch(self) -> None:
        """Remove the frames of a batch that is committed; nothing else is being made meanwhile."""
        if self.folder is not None:
            for path in self.folder.glob("*"):
                path.unlink(missing_ok=True)

    def remove_earlier_runs(self) -> None:
        """Remove what earlier runs left."""
        if self.folder is not None:
            shutil.rmtree(self.folder.parent, ignore_errors=True)
