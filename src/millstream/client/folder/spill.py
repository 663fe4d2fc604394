"""A queue of batches on disk, where records wait for room in the log; it survives a restart.

Each producer that spills has a folder of its name; ``spill_format`` describes its files. **In**:
:meth:`SpillQueue.append` returns when the batches are on stable storage. **Out**: :meth:`SpillQueue.peek`
gives the oldest batches, :meth:`SpillQueue.mark_done` says that they are in the log. A crash between the two
gives the same batches again, with the same sequences, and the log returns the offset of the first time. It
knows the last five batches of each partition (see ``log.producers``), so no more are drained before they are
recorded; see ``spill_drain``.

At an opening the entries are read from where ``state.json`` says that the queue begins, up to the
first that is not whole and right, at byte ``p``:

====  ============================================================  ============================
case  where                                                         done
====  ============================================================  ============================
A     nothing is wrong                                              keep everything
B     another file follows: this one was synced before that         ``CorruptionError``
C     a later entry says that p was on stable storage               ``CorruptionError``
D     any other: it was never reported as safe                      cut at p; what is cut is kept
                                                                    as ``<file>.<p>.cut``
====  ============================================================  ============================
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from millstream.client.folder.spill_format import (
    Entry,
    SpillState,
    durable_after,
    pack_entry,
    read_entries,
    read_state,
    spill_file_name,
    spill_file_numbers,
    write_state,
)
from millstream.errors import (
    ConfigError,
    CorruptBatchError,
    CorruptionError,
    DiskFullError,
    FencedError,
    FolderOwnedError,
    MillstreamError,
    SyncFailedError,
)
from millstream.log.batch import EncodedBatch
from millstream.log.files import Files, replace_file, write_whole
from millstream.log.lock_file import LockFile
from millstream.log.owner import lock_folder
from millstream.log.producer_identity import ProducerIdentity
from millstream.record import TopicPartition

SEGMENT_BYTES = 16 << 20
_READ_BYTES = 4 << 20
_log = logging.getLogger(__name__)
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


class SpillQueue:
    """The queue in ``folder``. Thread-safe; hold ``lock`` to do several things at once.

    Args:
        name: The name of the producer.
        directory_id: The identity of the log that its records are for.
        register: Gives a producer identity of that log; called once for a folder.

    Raises:
        ConfigError: the folder belongs to another producer or another log.
        FolderOwnedError: another producer uses it now.
        CorruptionError: synced entries are damaged or missing; nothing was changed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        directory_id: str,
        register: Callable[[], ProducerIdentity],
        files: Files,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self._files = files
        self._segment_bytes = segment_bytes
        self._failure: MillstreamError | None = None
        self._tail: int | None = None  # the handle of the file that grows
        self._tail_size = 0
        try:
            files.make_folder(folder)
            self._owned = _lock_folder(folder, name, files)
            try:
                self._state = self._open_state(name, directory_id, register)
                self._numbers = self._open_files()  # of the existing files
            except BaseException:
                self._owned.release()
                raise
        except OSError as error:
            raise ConfigError(
                f"the spill folder {folder} cannot be opened: {error}; check its rights and the "
                "disk, then make the producer again"
            ) from error

    @property
    def count(self) -> int:
        """How many records are in the queue."""
        return self.end - self._state.number

    @property
    def state(self) -> SpillState:
        """Where the queue begins, and the sequences of the records moved to the log."""
        return self._state

    # -- opening ------------------------------------------------------------------------------

    def _open_state(
        self, name: str, directory_id: str, register: Callable[[], ProducerIdentity]
    ) -> SpillState:
        state = read_state(self._files, self.folder)
        if state is None:
            if spill_file_numbers(self._files.names(self.folder)):
                raise CorruptionError(
                    f"{self.folder} holds spilled records but no state.json; restore it from a "
                    "backup, or move the folder away and lose these records"
                )
            # 1. The folder's own name is made durable; a crash leaves an empty folder.
            # 2. An identity is assigned; a crash leaves one that is never used.
            # 3. It is stored. Only then can a record be added.
            for above in (self.folder.parent, self.folder.parent.parent):
                with suppress(PermissionError):
                    self._files.sync_folder(above)
            state = SpillState(directory_id, name, register())
            self._write_state(state)
        if (state.directory_id, state.name) != (directory_id, name):
            raise ConfigError(
                f"{self.folder} belongs to a producer named {state.name!r} of the log "
                f"{state.directory_id}, not to {name!r} of {directory_id}; give another folder"
            )
        return state

    def _open_files(self) -> list[int]:
        """Read the queue, cut a torn tail, and remove what is in the log already.

        The rest is synced: its writer may have died before its sync, and state.json must not refer to bytes
        that can still be lost.
        """
        state, numbers = self._state, spill_file_numbers(self._files.names(self.folder))
        kept = [number for number in numbers if number >= state.segment]
        if kept[:1] != [state.segment] and (kept or state.position):
            raise CorruptionError(
                f"{self.folder / spill_file_name(state.segment)} is missing; restore it from a "
                "backup, or move the folder away and lose the records that wait there"
            )
        self.end, size = state.number, 0
        for number, following in pairwise([*kept, None]):
            assert number is not None, "only the last of the pairs ends in None"
            size = self._check_file(number, following)
        if kept:
            self._tail = self._files.open(self._path(kept[-1]), write=True)
            self._tail_size = size
            self._files.sync(self._tail)
            self._files.sync_folder(self.folder)
        self._remove(numbers, before=state.segment)
        return kept

    def _check_file(self, number: int, following: int | None) -> int:
        """Read a file; return how many of its bytes are whole. Table: see the module."""
        path = self._path(number)
        start = self._state.position if number == self._state.segment else 0
        handle = self._files.open(path, write=True)
        try:
            # From the device: after a failed sync the page cache still has what the disk does not.
            self._files.forget_cached(handle)
            size = self._files.size(handle)
            data = self._files.pread(handle, max(size - start, 0), start)
            good = start
            for entry in read_entries(data, self.end, position=start):
                good = entry.end
                self.end = entry.number + entry.batch.count
            rest = data[good - start :]
            if size < start or (following is not None and following != self.end):
                raise self._damaged(path, good)
            if rest:
                if following is not None or durable_after(rest) > good:
                    raise self._damaged(path, good)
                replace_file(self._files, path.with_name(f"{path.name}.{good}.cut"), rest)
                _log.warning(
                    "cut %d bytes that were never safe off %s at byte %d; they are kept beside it",
                    len(rest),
                    path,
                    good,
                )
                self._files.truncate(handle, good)
        finally:
            self._files.close(handle)
        return good

    # -- in -----------------------------------------------------------------------------------

    def append(self, batches: Sequence[tuple[TopicPartition, EncodedBatch]]) -> list[int]:
        """Add batches at the end; they are on stable storage when this returns their numbers.

        1. Write the entries. A crash leaves a part of them: it is cut, or drained, at the next
           opening; it was never reported as safe.
        2. Sync. A crash leaves all of them.

        Raises:
            DiskFullError: none of them is in the queue.
            SyncFailedError: the disk failed; open the folder again.
        """
        with self.lock:
            self._check()
            if self._tail is None or self._tail_size >= self._segment_bytes:
                self._roll()
            number, numbers, entries = self.end, [], []
            for name, batch in batches:
                entries.append(pack_entry(name, batch, number, self._tail_size))
                numbers.append(number)
                number += batch.count
            self._write(b"".join(entries))
            self.end = number
        return numbers

    def _roll(self) -> None:
        """Begin another file.

        1. Create it. A crash leaves an empty last file, or none.
        2. Sync the folder. Only then is an entry written to it.
        """
        path = self._path(self.end)
        try:
            handle = self._files.open(path, write=True, create=True)
        except OSError as error:
            raise DiskFullError(
                f"{path} could not be made: {error}; nothing was spilled. Make room on the disk"
            ) from error
        try:
            self._files.sync_folder(self.folder)
        except OSError as error:
            # Not retried: the kernel may have dropped what it could not store.
            self._files.close(handle)
            raise self._failed(self.folder, error) from error
        self._close_tail()
        self._tail, self._tail_size = handle, 0
        self._numbers.append(self.end)

    def _write(self, data: bytes) -> None:
        assert self._tail is not None, "there is a file to write to"
        path = self._path(self._numbers[-1])
        try:
            write_whole(self._files, self._tail, data, self._tail_size)
        except OSError as error:
            try:
                self._files.truncate(self._tail, self._tail_size)
            except OSError as second:
                raise self._failed(path, second) from error
            raise DiskFullError(
                f"{path} could not take the records: {error}; make room on the disk"
            ) from error
        try:
            self._files.sync(self._tail)
        except OSError as error:
            raise self._failed(path, error) from error
        self._tail_size += len(data)

    # -- out ----------------------------------------------------------------------------------

    def peek(self, batches_max: int) -> list[Entry]:
        """Return the oldest batches, in order, with at most ``batches_max`` of each partition.

        Raises:
            CorruptBatchError: the oldest is damaged.
            SyncFailedError: the disk failed.
        """
        with self.lock:
            self._check()
            if not self.count:
                return []
        path = self._path(self._state.segment)
        try:
            handle = self._files.open(path)
            try:
                return self._read(handle, path, batches_max)
            finally:
                self._files.close(handle)
        except OSError as error:
            raise self._failed(path, error) from error

    def _read(self, handle: int, path: Path, batches_max: int) -> list[Entry]:
        start = self._state.position
        left = self._file_size(handle) - start
        want = _READ_BYTES
        while True:
            data = self._files.pread(handle, min(want, left), start)
            found: list[Entry] = []
            taken: Counter[TopicPartition] = Counter()
            for entry in read_entries(data, self._state.number, position=start):
                taken[entry.name] += 1
                if taken[entry.name] > batches_max:
                    break
                found.append(entry)
            if found:
                return found
            if want >= left:
                raise self._damaged(path, start)
            want *= 4

    def mark_done(self, last: Entry, sequences: Mapping[TopicPartition, int]) -> None:
        """Remove the batches up to ``last`` from the queue: the log has appended or rejected them.

        1. Replace state.json. A crash before leaves the batches in the queue.
        2. Remove files that hold nothing of the queue. A crash before leaves files that the next
           opening removes.

        Raises:
            DiskFullError: they are still in the queue.
            SyncFailedError: the disk failed; open the folder again.
        """
        with self.lock:
            self._check()
            number, segment, position = (
                last.number + last.batch.count,
                self._state.segment,
                last.end,
            )
            following = [one for one in self._numbers if one > segment]
            if number == self.end:
                segment, position = number, 0  # of a file that does not exist yet
            elif following and number == following[0]:
                segment, position = following[0], 0
            self._write_state(
                replace(
                    self._state,
                    segment=segment,
                    position=position,
                    number=number,
                    sequences=dict(sequences),
                )
            )
            empty = number == self.end
            if empty:
                self._close_tail()
            self._remove(self._numbers, before=segment + empty)
            self._numbers = [one for one in self._numbers if one >= segment + empty]

    def _write_state(self, state: SpillState) -> None:
        try:
            write_state(self._files, self.folder, state)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise DiskFullError(
                    f"{self.folder} has no room to record what was moved to the log: {error}; make "
                    "room on the disk"
                ) from error
            raise self._failed(self.folder / "state.json", error) from error
        self._state = state

    # -- closing ------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the folder; the queue remains there. Calling it again does nothing."""
        with self.lock:
            self._failure = self._failure or FencedError(f"the spill {self.folder} was closed")
            self._close_tail()
            self._owned.release()

    def _close_tail(self) -> None:
        handle, self._tail = self._tail, None
        if handle is not None:
            self._files.close(handle)

    def _remove(self, numbers: Sequence[int], *, before: int) -> None:
        for number in numbers:
            if number < before:
                with suppress(OSError):  # what stays is removed at the next opening
                    self._files.remove(self._path(number))

    # -- the rest -----------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self.folder / spill_file_name(number)

    def _file_size(self, handle: int) -> int:
        with self.lock:
            if self._numbers[-1] == self._state.segment:
                return self._tail_size  # behind it, an entry is being written
        return self._files.size(handle)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _failed(self, path: Path, error: OSError) -> MillstreamError:
        self._failure = SyncFailedError(
            f"the disk failed to keep or to read {path} ({error}); nothing more is spilled. Check "
            "the disk, then make the producer again"
        )
        return self._failure

    def _damaged(self, path: Path, position: int) -> CorruptBatchError:
        return CorruptBatchError(
            f"the spilled records from byte {position} of {path} on are damaged; restore the file "
            "from a backup, or move the folder away and lose the records that wait there",
            path=str(path),
            position=position,
        )


def _lock_folder(folder: Path, name: str, files: Files) -> LockFile:
    try:
        return lock_folder(folder, files)
    except FolderOwnedError as error:
        raise FolderOwnedError(
            f"the spill folder {folder} is in use by another producer named {name!r}; close that "
            "one, or give this one another name"
        ) from error
