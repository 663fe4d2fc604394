"""Large frames are files, and only their names go through Spark.

Between two Python processes Spark carries bytes through its JVM, which copies them several times,
hashes and compresses them for a shuffle, and pickles them for the driver: a microsecond for a row of 200
bytes. All processes of a job share the app's folder, so the task that makes a large frame writes it there,
and its reader maps it into memory.

A frame belongs to its batch. It is written completely before its name is sent, and removed when the batch
is committed; the next run removes the frames of batches that were not committed. A file's name is unique
to the attempt that wrote it, so a task that is tried again uses nothing of its first attempt. Nothing is
synced to disk: after a power failure the batch is run again, and writes its frames again.
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
        """Return the row that goes through Spark for this one, with a frame of bytes."""
        if self.folder is None or len(row.frame) < _BYTES_MIN:
            return row._replace(frame=bytes(row.frame))
        name = uuid.uuid4().hex
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(row.frame)
        return row._replace(frame=_FILE_PREFIX + f"{name} {len(row.frame)}".encode())

    def get(self, row: FrameRow) -> FrameRow:
        """Return the row that :meth:`put` was given; the frame is a view of the file."""
        return row._replace(frame=self.open(row.frame))

    def open(self, frame: Frame) -> Frame:
        """Return the frame of a row that :meth:`put` was given."""
        named = self._named(frame)
        if named is None:
            return frame
        assert self.folder is not None
        with (self.folder / named[0]).open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def size_bytes(self, frame: Frame) -> int:
        """Return the size of a frame as it was given to :meth:`put`."""
        named = self._named(frame)
        return len(frame) if named is None else named[1]

    def _named(self, frame: Frame) -> tuple[str, int] | None:
        """Return the name of the frame's file and its size; None for a frame that is not in a file."""
        if self.folder is None or bytes(frame[: len(_FILE_PREFIX)]) != _FILE_PREFIX:
            return None
        name, size_bytes = bytes(frame[len(_FILE_PREFIX) :]).decode().split()
        return name, int(size_bytes)

    def remove_batch(self) -> None:
        """Remove the frames of a committed batch; no other batch is running."""
        if self.folder is not None:
            for path in self.folder.glob("*"):
                path.unlink(missing_ok=True)

    def remove_earlier_runs(self) -> None:
        """Remove the frames of earlier runs."""
        if self.folder is not None:
            shutil.rmtree(self.folder.parent, ignore_errors=True)
