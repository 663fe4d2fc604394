"""Fault cases 1 to 13 of docs/fault-cases.md: processes, disks, files and clocks.

What must hold in every case: an acknowledged record is there, whole, at its offset, for ever; no
record is seen that was not sent, none twice; and what cannot be read is reported, never skipped.
"""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import sqlite3
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
from millstream.log import aborted
from millstream.log.batch import EncodedBatch, ProducerStamp, stamp, walk
from millstream.log.control import ControlDb
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.files import DISK, DiskFiles, Files, size_of
from millstream.log.reader import LogReader
from millstream.log.repair.inspection import inspect
from millstream.log.repair.repair import repair
from millstream.log.segment import segment_offsets
from millstream.log.takeover import NEEDS_VERIFY
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition
from millstream.testing.disk import SimulatedCrash, SimulatedDisk

FOLDER = Path("/log")
DAY_MS = 86_400_000
SLOT_BYTES = 128

pytestmark = pytest.mark.filterwarnings("ignore:This process")  # forking is what is tested


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The log reports everything that it repairs, which is a lot here."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def batch_of(*values: bytes, timestamp_ms: int = 1) -> EncodedBatch:
    return encode_records([SimpleRecord(timestamp_ms, b"k", value) for value in values])


def numbered(number: int, *, size: int = 40, producer_id: int = 7) -> EncodedBatch:
    """Return the batch of one record that an idempotent producer sends as its ``number``-th."""
    value = b"%06d" % number + b"x" * size
    return stamp(batch_of(value), ProducerStamp(producer_id, 0, number), transactional=False)


def number_of(value: bytes) -> int:
    return int(value[:6])


def opened(folder: Path, **options: Any) -> LogWriter:
    return LogWriter(folder, background=False, sync_threads=1, **options)


def read(reader: LogReader, topic: str = "t", partition: int = 0) -> dict[int, bytes]:
    """Return every record of a partition by its offset."""
    start, end = reader.offsets(topic)[partition]
    found: dict[int, bytes] = {}
    for batch in reader.read(topic, partition, start, end, columns=("offset", "value")):
        found.update(zip(*(column.to_pylist() for column in batch.columns), strict=True))
    return found


def segments(
    folder: Path, topic: str = "t", partition: int = 0, ending: str = ".log"
) -> list[Path]:
    return sorted(folder.glob(f"t/{topic}.*/{partition}/*{ending}"))


def make_log(folder: Path, *, records: int = 12, segment_bytes: int = 400) -> Path:
    with opened(folder, segment_bytes=segment_bytes) as writer:
        writer.create_topic("t")
        for number in range(records):
            writer.append("t", 0, [numbered(number)])
    return folder


def flip(path: Path, position: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


def in_child(action: Callable[[], None]) -> int:
    """Run ``action`` in a forked process; return its status from ``os.waitpid``."""
    child = os.fork()
    if not child:
        try:
            action()
        except BaseException:  # noqa: BLE001 - the parent sees it by the exit code
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


class Simulated:
    """A log on a simulated disk; what control.db commits is atomic and durable."""

    def __init__(self, seed: int = 0, disk: SimulatedDisk | None = None) -> None:
        self.disk = disk or SimulatedDisk(seed)
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.control = ControlDb(connection, write=True, before_commit=self.disk.step)

    def writer(self, **options: Any) -> LogWriter:
        return opened(FOLDER, files=self.disk, control=self.control, **options)

    def reader(self) -> LogReader:
        return LogReader(FOLDER, files=self.disk, control=self.control)

    def segments(self) -> list[Path]:
        (topic,) = self.disk.names(FOLDER / "t")
        folder = FOLDER / "t" / topic / "0"
        return [folder / f"{base:020d}.log" for base in segment_offsets(self.disk.names(folder))]


# -- case 01: kill -9 at every step of an append -------------------------------------------------


class DoomedMapping:
    """A mapped file whose process is killed before one of its assignments."""

    def __init__(self, mapping: Any, step: Callable[[], None]) -> None:
        self._mapping = mapping
        self._step = step

    def __getitem__(self, part: slice) -> bytes:
        return bytes(self._mapping[part])

    def __setitem__(self, part: slice, data: bytes) -> None:
        self._step()
        self._mapping[part] = data

    def flush(self) -> None:
        self._step()
        self._mapping.flush()

    def close(self) -> None:
        self._mapping.close()


class Doomed(DiskFiles):
    """The real disk, in a process that kills itself with SIGKILL at its n-th operation.

    A write that is the n-th is done by half, or not at all.
    """

    def __init__(self, kill_at: int, *, by_half: bool) -> None:
        self._left = kill_at
        self._by_half = by_half

    def _step(self) -> None:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> int:
        if create:
            self._step()
        return super().open(path, write=write, create=create)

    def pwrite(self, handle: int, data: bytes | memoryview, position: int) -> int:
        if self._left == 1 and self._by_half:
            super().pwrite(handle, data[: len(data) // 2], position)
        self._step()
        return super().pwrite(handle, data, position)

    def truncate(self, handle: int, size: int) -> None:
        self._step()
        super().truncate(handle, size)

    def sync(self, handle: int) -> None:
        self._step()
        super().sync(handle)

    def sync_folder(self, path: Path) -> None:
        self._step()
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)

    def map(self, path: Path, size: int, *, write: bool) -> Any:
        return DoomedMapping(super().map(path, size, write=write), self._step)


def _append_and_report(folder: Path, files: Files, numbers: range, write_end: int) -> None:
    with opened(folder, files=files) as writer:
        for number in numbers:
            (offset,) = writer.append("t", 0, [numbered(number)])
            os.write(write_end, struct.pack("<qq", number, offset))


@pytest.mark.parametrize("by_half", [False, True])
def test_case_01_killed_at_any_operation_nothing_acknowledged_is_lost_or_doubled(
    tmp_path: Path, by_half: bool
) -> None:
    """case 01: kill -9 at every operation of opening, appending, rolling and closing."""
    with opened(tmp_path) as writer:
        writer.create_topic("t", settings={"segment.bytes": "250"})
    where: dict[int, int] = {}
    sent, kill_at, killed = 0, 0, True
    while killed:
        kill_at += 1
        assert kill_at < 400, "the child never came to its end"
        read_end, write_end = os.pipe()
        numbers, sent = range(sent, sent + 3), sent + 3
        files = Doomed(kill_at, by_half=by_half)
        status = in_child(lambda: _append_and_report(tmp_path, files, numbers, write_end))  # noqa: B023
        killed = os.WIFSIGNALED(status)
        assert killed or status == 0
        os.close(write_end)
        responses = os.read(read_end, 1 << 16)
        os.close(read_end)
        where.update(struct.iter_unpack("<qq", responses))
        with opened(tmp_path) as writer:
            found = read(LogReader(tmp_path))
            for number, offset in where.items():
                assert number_of(found[offset]) == number, "an acknowledged record is lost or moved"
            # What was not acknowledged may be there or not; sent again, it is there once.
            for number in numbers:
                (offset,) = writer.append("t", 0, [numbered(number)])
                assert where.setdefault(number, offset) == offset
    assert kill_at > 30
    found = read(LogReader(tmp_path))
    assert [number_of(value) for value in found.values()] == list(range(sent))
    assert not [one for one in inspect(tmp_path) if one.kind != "quarantine"]


# -- case 02: torn tails -------------------------------------------------------------------------


class AfterPowerCut(DiskFiles):
    """The real disk, on a machine that has been started again."""

    def boot_id(self) -> bytes:
        return b"another start..."


def image_of_a_crash(tmp_path: Path) -> tuple[Path, int]:
    """Return a log as a killed owner leaves it, and where its last batch, unpublished, begins."""
    live = tmp_path / "live"
    writer = opened(live)
    writer.create_topic("t")
    for number in range(4):
        writer.append("t", 0, [numbered(number)])
    state = (live / "state.mm").read_bytes()
    (path,) = segments(live)
    size = path.stat().st_size
    writer.append("t", 0, [numbered(4)])
    image = tmp_path / "image"
    shutil.copytree(live, image)
    (image / "state.mm").write_bytes(state)
    writer.close()
    return image, size


@pytest.mark.parametrize("files", [DISK, AfterPowerCut()], ids=["killed", "power lost"])
def test_case_02_a_last_batch_cut_at_any_byte_is_cut_off_and_its_offset_given_to_the_next(
    tmp_path: Path, files: Files
) -> None:
    """case 02: a torn tail, cut at every byte of the last batch."""
    image, size = image_of_a_crash(tmp_path)
    (path,) = segments(image)
    data = path.read_bytes()
    for cut in range(size, len(data)):
        folder = tmp_path / "cut"
        shutil.copytree(image, folder)
        (path,) = segments(folder)
        path.write_bytes(data[:cut])
        with opened(folder, files=files) as writer:
            assert path.stat().st_size == size
            assert writer.append("t", 0, [batch_of(b"next")]) == [4]
        kept = [one.read_bytes() for one in folder.glob("quarantine/*")]
        assert kept == ([data[size:cut]] if cut > size else [])
        assert [*read(LogReader(folder)).values()][-1] == b"next"
        shutil.rmtree(folder)


@pytest.mark.parametrize("files", [DISK, AfterPowerCut()], ids=["killed", "power lost"])
@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\xa5garbage" * 512, b"", b"stale"])
def test_case_02_zeros_garbage_and_stale_bytes_behind_the_last_batch_are_cut_off(
    tmp_path: Path, files: Files, tail: bytes
) -> None:
    """case 02: a zero-filled tail, garbage, and bytes of an older batch with a wrong offset."""
    image, size = image_of_a_crash(tmp_path)
    (path,) = segments(image)
    data = path.read_bytes()
    if tail == b"stale":
        tail = data[:size]  # whole batches, but their offsets cannot follow
    path.write_bytes(data + tail)
    with opened(image, files=files) as writer:
        assert path.stat().st_size == len(data), "the whole batch, though never published, stays"
        assert writer.append("t", 0, [batch_of(b"next")]) == [5]
    assert [one.read_bytes() for one in image.glob("quarantine/*")] == ([tail] if tail else [])
    assert [number_of(value) for value in [*read(LogReader(image)).values()][:5]] == [0, 1, 2, 3, 4]


# -- case 03: power loss -------------------------------------------------------------------------


def test_case_03_power_loss_takes_only_what_was_never_synced() -> None:
    """case 03: unsynced writes dropped, torn and reordered; the file size ahead of the data."""
    lost = 0
    for seed in range(150):
        log = Simulated(seed)
        writer = log.writer(segment_bytes=3000)
        writer.create_topic("t")
        synced: dict[int, int] = {}
        written: dict[int, int] = {}
        seen: dict[int, bytes] = {}
        for number in range(20):
            durability = "synced" if number % 4 == 0 else "written"
            batch = numbered(number, size=50 * (seed % 30))
            (offset,) = writer.append("t", 0, [batch], durability=durability)  # type: ignore[arg-type]
            written[number] = offset
            if durability == "synced":
                synced.update(written)  # a sync covers all that was written before it
            if number == 13:
                seen = read(log.reader())
        log.disk.restart(power_lost=True)
        writer = log.writer(segment_bytes=3000)
        found = read(log.reader())
        numbers = [number_of(value) for value in found.values()]
        assert all(number_of(found[offset]) == number for number, offset in synced.items()), seed
        assert numbers == list(range(len(numbers))), f"seed {seed}: more than a suffix was lost"
        assert len(numbers) > 16, f"seed {seed}: what was only written is lost since the last sync"
        assert seen.items() <= found.items(), f"seed {seed}: a reader saw what is gone"
        lost += 20 - len(numbers)
    assert lost > 50, "the power cuts did too little"


# -- case 04: names that power loss takes away ---------------------------------------------------


def test_case_04_a_topic_is_wholly_there_or_not_at_all() -> None:
    """case 04: power is lost at every step of making a topic; names not synced may vanish."""
    outcomes = set()
    for seed in range(3):
        crash_at = 0
        while True:
            crash_at += 1
            log = Simulated(seed + 10 * crash_at)
            writer = log.writer()
            writer.create_topic("before")
            writer.append("before", 0, [batch_of(b"kept")])
            log.disk.steps, log.disk.crash_at = 0, crash_at
            try:
                writer.create_topic("t", partitions=2)
                writer.append("t", 1, [batch_of(b"acknowledged")])
            except SimulatedCrash:
                pass
            else:
                break
            log.disk.restart(power_lost=True)
            with log.writer() as writer:
                assert read(log.reader(), "before") == {0: b"kept"}
                there = "t" in writer.topics()
                outcomes.add(there)
                if not there:
                    writer.create_topic("t", partitions=2)
                for partition in range(2):
                    end = log.reader().offsets("t")[partition][1]
                    assert writer.append("t", partition, [batch_of(b"next")]) == [end]
            found = inspect(FOLDER, log.disk, control=log.control)
            assert {one.kind for one in found} <= {"quarantine"}
        assert crash_at > 10
    assert outcomes == {True, False}


def test_case_04_a_new_segment_whose_name_was_lost_takes_no_record_with_it() -> None:
    """case 04: power is lost at every step of rolling to a new segment."""
    for seed in range(3):
        crash_at = 0
        while True:
            crash_at += 1
            log = Simulated(seed + 10 * crash_at)
            writer = log.writer(segment_bytes=300)
            writer.create_topic("t")
            acknowledged = []
            log.disk.steps, log.disk.crash_at = 0, crash_at
            try:
                for number in range(8):
                    writer.append("t", 0, [numbered(number)])
                    acknowledged.append(number)
            except SimulatedCrash:
                pass
            else:
                break
            log.disk.restart(power_lost=True)
            with log.writer(segment_bytes=300):
                numbers = [number_of(value) for value in read(log.reader()).values()]
                assert numbers[: len(acknowledged)] == acknowledged
                assert len(numbers) <= len(acknowledged) + 1
        assert crash_at > 40


# -- case 05: a sync that fails ------------------------------------------------------------------


class FailingSyncs(SimulatedDisk):
    """Every sync fails from some moment on, as on a dying disk; counts how often it was tried."""

    failing = False
    tried = 0

    def sync(self, handle: int) -> None:
        if self.failing:
            self.tried += 1
            self._handles[handle].waiting.clear()  # the kernel takes the pages for clean
            raise OSError(errno.EIO, "input/output error")
        super().sync(handle)


@pytest.mark.parametrize("power_lost", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_case_05_after_a_failed_sync_nothing_is_acknowledged_and_it_is_not_tried_again(
    power_lost: bool, persistent: bool
) -> None:
    """case 05: fsync fails with EIO, once or from then on."""
    disk = FailingSyncs(3)
    log = Simulated(disk=disk)
    writer = log.writer()
    writer.create_topic("t")
    for number in range(3):
        writer.append("t", 0, [numbered(number)])
    if persistent:
        disk.failing = True
    else:
        disk.fail_sync_at = 1
    with pytest.raises(SyncFailedError, match="nothing more is accepted"):
        writer.append("t", 0, [numbered(3)])
    tried = disk.tried
    for _ in range(3):
        with pytest.raises(SyncFailedError):
            writer.append("t", 0, [numbered(4)])
    with pytest.raises(SyncFailedError):
        writer.create_topic("u")
    assert disk.tried == tried, "a failed sync is never tried again"
    assert [number_of(value) for value in read(log.reader()).values()] == [0, 1, 2]
    writer.close()
    disk.failing = False
    assert persistent or disk.exists(FOLDER / NEEDS_VERIFY)
    disk.restart(power_lost=power_lost)
    with log.writer() as writer:
        # The client sends again what was not acknowledged: it is there once, whatever the disk kept.
        for number in (3, 4):
            assert writer.append("t", 0, [numbered(number)]) == [number]
        assert [number_of(value) for value in read(log.reader()).values()] == [0, 1, 2, 3, 4]
    assert not disk.exists(FOLDER / NEEDS_VERIFY)


class BrokenOnce(DiskFiles):
    """The real disk; one fdatasync fails."""

    fail_next = False

    def sync(self, handle: int) -> None:
        if self.fail_next:
            self.fail_next = False
            raise OSError(errno.EIO, "input/output error")
        super().sync(handle)


def test_case_05_on_a_real_disk_the_next_owner_verifies_everything(tmp_path: Path) -> None:
    """case 05: fsync fails once, on the real file system."""
    files = BrokenOnce()
    writer = opened(tmp_path, files=files)
    writer.create_topic("t")
    writer.append("t", 0, [numbered(0)])
    files.fail_next = True
    with pytest.raises(SyncFailedError):
        writer.append("t", 0, [numbered(1)])
    writer.close()
    assert (tmp_path / NEEDS_VERIFY).exists()
    assert "unverified" in {one.kind for one in inspect(tmp_path)}
    with opened(tmp_path) as writer:
        assert writer.append("t", 0, [numbered(1)]) == [1]
    assert len(read(LogReader(tmp_path))) == 2
    assert not list(inspect(tmp_path))


# -- case 06: a full disk ------------------------------------------------------------------------


@pytest.mark.parametrize("room", range(0, 200, 13))
def test_case_06_a_write_that_does_not_fit_is_taken_back_and_may_be_sent_again(room: int) -> None:
    """case 06: no space for a part of an append, at any byte."""
    log = Simulated(room)
    writer = log.writer()
    writer.create_topic("t")
    writer.append("t", 0, [numbered(0)])
    (path,) = log.segments()
    before = size_of(log.disk, path)
    log.disk.capacity_bytes = log.disk._used() + room
    big = numbered(1, size=1000)
    for _ in range(2):
        with pytest.raises(DiskFullError, match="Make room"):
            writer.append("t", 0, [big])
        assert size_of(log.disk, path) == before
        assert len(read(log.reader())) == 1
    log.disk.capacity_bytes = None
    assert writer.append("t", 0, [big]) == [1]
    assert [number_of(value) for value in read(log.reader()).values()] == [0, 1]
    writer.close()


class FullAtSync(SimulatedDisk):
    """A file system that finds room only when it stores, and then finds none."""

    full = False

    def sync(self, handle: int) -> None:
        if self.full:
            self._handles[handle].waiting.clear()
            raise OSError(errno.ENOSPC, "no space left on device")
        super().sync(handle)


def test_case_06_no_room_at_the_sync_counts_as_a_failed_sync() -> None:
    """case 06: ENOSPC from fsync: what was written may be gone, so nothing is acknowledged."""
    disk = FullAtSync(0)
    log = Simulated(disk=disk)
    writer = log.writer()
    writer.create_topic("t")
    writer.append("t", 0, [numbered(0)])
    disk.full = True
    with pytest.raises(SyncFailedError):
        writer.append("t", 0, [numbered(1)])
    disk.full = False
    writer.close()
    disk.restart(power_lost=True)
    with log.writer() as writer:
        assert writer.append("t", 0, [numbered(1)]) == [1]
        assert len(read(log.reader())) == 2


def test_case_06_no_room_for_control_db_changes_nothing_and_passes(tmp_path: Path) -> None:
    """case 06: SQLite finds the disk full in the middle of a commit."""
    with opened(tmp_path) as writer:
        writer.create_topic("t")
        connection = writer.control._connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        offsets = {TopicPartition("t", 0): (0, "m" * 4000)}
        refused = 0
        for number in range(30):
            try:
                writer.commit_offsets(f"group {number}", offsets)
            except DiskFullError as error:
                refused += 1
                assert "nothing has changed" in str(error)
        assert refused
        with pytest.raises(DiskFullError):
            for number in range(30):
                writer.create_topic(f"{'n' * 200}{number}")
        assert writer.append("t", 0, [numbered(0)]) == [0]
        connection.execute("PRAGMA max_page_count = 1000000")
        writer.commit_offsets("group", offsets)
        writer.create_topic("later")
    with opened(tmp_path) as writer:
        assert {"t", "later"} <= set(writer.topics())
    assert not list(inspect(tmp_path))


def _append_under_a_limit(folder: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with opened(folder, segment_bytes=1 << 26) as writer:
        (path,) = segments(folder)
        limit = path.stat().st_size + 1000
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(limit, 1 << 21), hard))
        number, refused = 1, None
        while refused is None:
            try:
                writer.append("t", 0, [numbered(number, size=100_000)])
                number += 1
            except DiskFullError as error:
                refused = error
        assert len(read(LogReader(folder))) == number
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert writer.append("t", 0, [numbered(number, size=100_000)]) == [number]


def test_case_06_a_real_short_write_is_noticed_and_cut_back(tmp_path: Path) -> None:
    """case 06: the kernel takes a part of a write and then none (RLIMIT_FSIZE)."""
    make_log(tmp_path, records=1)
    assert in_child(lambda: _append_under_a_limit(tmp_path)) == 0
    numbers = [number_of(value) for value in read(LogReader(tmp_path)).values()]
    assert numbers == list(range(len(numbers)))
    assert not list(inspect(tmp_path))


class NoRoomForTheIndex(DiskFiles):
    """The real disk, on which no index finds room."""

    def pwrite(self, handle: int, data: bytes | memoryview, position: int) -> int:
        if str(Path(f"/proc/self/fd/{handle}").readlink()).endswith(".idx"):
            raise OSError(errno.ENOSPC, "no space left on device")
        return super().pwrite(handle, data, position)


def test_case_06_no_room_for_the_index_fails_no_append(tmp_path: Path) -> None:
    """case 06: ENOSPC at the index, which is a hint."""
    with opened(tmp_path, files=NoRoomForTheIndex(), segment_bytes=60_000) as writer:
        writer.create_topic("t")
        for number in range(150):
            assert writer.append("t", 0, [numbered(number, size=1000)]) == [number]
    reader = LogReader(tmp_path)
    assert len(read(reader)) == 150
    (batch,) = reader.read("t", 0, 149, 150)
    assert batch.num_rows == 1
    assert {(one.kind, one.severity) for one in inspect(tmp_path)} == {("index", "harmless")}
    repair(tmp_path)
    assert not list(inspect(tmp_path))


# -- case 07: reads that fail --------------------------------------------------------------------


class Unreadable(DiskFiles):
    """The real disk, on which one file cannot be read."""

    def __init__(self, path: Path, *, at_open: bool) -> None:
        self._path = path
        self._at_open = at_open
        self._bad: set[int] = set()

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> int:
        if path == self._path and self._at_open:
            raise PermissionError(errno.EACCES, "permission denied", str(path))
        handle = super().open(path, write=write, create=create)
        self._bad.discard(handle)
        if path == self._path:
            self._bad.add(handle)
        return handle

    def pread(self, handle: int, size: int, position: int) -> bytes:
        if handle in self._bad:
            raise OSError(errno.EIO, "input/output error")
        return super().pread(handle, size, position)


@pytest.mark.parametrize("at_open", [False, True], ids=["EIO", "EACCES"])
def test_case_07_an_unreadable_segment_is_named_with_its_offsets_and_harms_no_other(
    tmp_path: Path, at_open: bool
) -> None:
    """case 07: EIO or EACCES on reading a closed segment."""
    with opened(tmp_path, segment_bytes=400) as writer:
        writer.create_topic("t", partitions=2)
        for number in range(12):
            for partition in range(2):
                writer.append("t", partition, [numbered(number)])
    first, bad, after, *_ = segments(tmp_path)
    files = Unreadable(bad, at_open=at_open)
    reader = LogReader(tmp_path, files=files)
    with pytest.raises(CorruptionError) as caught:
        read(reader)
    assert str(bad) in str(caught.value)
    assert f"offsets [{int(bad.stem)}, {int(after.stem)})" in str(caught.value)
    assert len(read(reader, partition=1)) == 12
    for start, end in [(0, int(bad.stem)), (int(after.stem), 12)]:
        got = sum(batch.num_rows for batch in reader.read("t", 0, start, end))
        assert got == end - start
    (found,) = inspect(tmp_path, files)
    assert (found.kind, found.start, found.end) == ("unreadable", int(bad.stem), int(after.stem))
    assert first != bad


def test_case_07_an_owner_that_need_not_read_the_bad_segment_goes_on(tmp_path: Path) -> None:
    """case 07: the owner opens and appends while a closed segment gives EIO."""
    make_log(tmp_path)
    files = Unreadable(segments(tmp_path)[1], at_open=False)
    with opened(tmp_path, files=files) as writer:
        assert writer.append("t", 0, [numbered(12)]) == [12]


# -- case 08: a changed bit in the middle --------------------------------------------------------


@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize("which", [0, -1], ids=["closed", "growing"])
@pytest.mark.parametrize("place", [17, 21, 40, 61, 75, 100])
def test_case_08_a_changed_bit_is_told_with_its_offsets_and_nothing_is_cut_off(
    tmp_path: Path, place: int, which: int, crashed: bool
) -> None:
    """case 08: a bit flips in a closed segment, or in the durable part of the growing one."""
    make_log(tmp_path)
    before = read(LogReader(tmp_path))
    path = segments(tmp_path)[which]
    at, header = next(walk(path.read_bytes(), int(path.stem)))
    flip(path, at + place)
    damaged = path.read_bytes()
    if crashed:
        path.with_suffix(".seal").unlink()
    bad = range(header.base_offset, header.next_offset)
    with opened(tmp_path, segment_bytes=400) as writer:
        assert writer.append("t", 0, [numbered(12)]) == [12]
        assert path.read_bytes()[: len(damaged)] == damaged
        reader = LogReader(tmp_path)
        with pytest.raises(CorruptBatchError) as caught:
            read(reader)
        assert (caught.value.start, caught.value.end) == (bad.start, bad.stop)
        # To read on behind it is the reader's own decision.
        rest = reader.read("t", 0, caught.value.end, 13)
        assert sum(batch.num_rows for batch in rest) == 13 - bad.stop
    (found,) = (one for one in inspect(tmp_path) if one.lost)
    assert (found.kind, found.start, found.end) == ("damage", bad.start, bad.stop)
    repair(tmp_path)
    wanted = {offset: value for offset, value in before.items() if offset not in bad}
    after = read(LogReader(tmp_path))
    assert number_of(after.pop(12)) == 12
    assert after == wanted


# -- case 09: a changed bit that no CRC covers ---------------------------------------------------


def test_case_09_every_bit_of_the_unprotected_header_is_caught(tmp_path: Path) -> None:
    """case 09: each bit of bytes 0 to 16 flips: base offset, length, leader epoch, magic."""
    make_log(tmp_path)
    before = read(LogReader(tmp_path))
    path = segments(tmp_path)[1]
    whole = path.read_bytes()
    _, (at, header), *_ = walk(whole, int(path.stem))
    for bit in range(17 * 8):
        flip(path, at + bit // 8, 1 << bit % 8)
        reader = LogReader(tmp_path)
        found = list(inspect(tmp_path))
        if bit // 8 in range(12, 16):
            # The leader epoch says who wrote it: the record is whole, the seal finds the change.
            assert read(reader) == before
            assert {one.kind for one in found} >= {"seal"}
        else:
            with pytest.raises(CorruptBatchError) as caught:
                read(reader)
            assert (caught.value.start, caught.value.end) == (
                header.base_offset,
                header.next_offset,
            )
            assert [(one.kind, one.start) for one in found] == [("damage", header.base_offset)]
        path.write_bytes(whole)


@pytest.mark.parametrize("length", [(1 << 31) - 1, -1, -(1 << 31), 48, 1 << 30])
def test_case_09_a_length_that_lies_costs_no_memory(tmp_path: Path, length: int) -> None:
    """case 09: a batch length of 2 GiB is not allocated, a negative one not believed."""
    make_log(tmp_path)
    path = segments(tmp_path)[1]
    data = bytearray(path.read_bytes())
    data[8:12] = struct.pack(">i", length)
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBatchError):
            read(LogReader(tmp_path))
        assert any(one.kind == "damage" for one in inspect(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_case_09_a_base_offset_that_lies_behind_damage_costs_no_other_segment(
    tmp_path: Path,
) -> None:
    """case 09: behind a damaged batch the last one claims an offset far above the next segments."""
    make_log(tmp_path)
    first, *others = segments(tmp_path)
    *_, (before, _), (last, _) = walk(first.read_bytes(), 0)
    flip(first, before + 100)
    flip(first, last + 4)
    (tmp_path / NEEDS_VERIFY).touch()
    contents = {path: path.read_bytes() for path in others[:-1]}
    opened(tmp_path).close()
    assert {path: path.read_bytes() for path in contents} == contents
    reader = LogReader(tmp_path)
    with pytest.raises(CorruptBatchError):
        read(reader)
    rest = reader.read("t", 0, int(others[0].stem), 12)
    assert sum(batch.num_rows for batch in rest) == 12 - int(others[0].stem)


@pytest.mark.parametrize("behind", ["nothing", "damage"])
def test_case_09_a_base_offset_that_was_zeroed_shows_no_record_at_another_offset(
    tmp_path: Path, behind: str
) -> None:
    """case 09: zeros over the first batch of a log and the base offset of the next one."""
    records = 2 if behind == "nothing" else 3
    make_log(tmp_path, records=records)
    (path,) = segments(tmp_path)
    _, (at, _), *_ = walk(path.read_bytes(), 0)
    data = bytearray(path.read_bytes())
    data[: at + 8] = bytes(at + 8)
    if records == 3:
        data[-2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptBatchError) as caught:
        read(LogReader(tmp_path))
    assert (caught.value.start, caught.value.end) == (0, records)
    repair(tmp_path)
    assert read(LogReader(tmp_path)) == {}


# -- case 10: files beside the segments ----------------------------------------------------------


def make_rich_log(folder: Path) -> dict[int, bytes]:
    """Make a log with transactions of both outcomes and a deleted beginning; return what is seen."""
    with opened(folder, segment_bytes=9000, clock_ms=lambda: 1) as writer:
        writer.create_topic("t")
        identity = writer.transactions.register("p")
        for number in range(60):
            writer.append("t", 0, [numbered(number, size=500)])
            if number % 6 == 0:
                writer.transactions.begin(identity)
                batch = stamp(batch_of(b"in one"), ProducerStamp(*identity, 0), transactional=True)
                writer.append("t", 0, [batch])
                identity = writer.transactions.end(identity, commit=number % 12 == 0)
        writer.delete_records(TopicPartition("t", 0), 5)
    return read(LogReader(folder))


def _missing(path: Path, _: bytes) -> None:
    path.unlink()


def _empty(path: Path, _: bytes) -> None:
    path.write_bytes(b"")


def _garbage(path: Path, _: bytes) -> None:
    path.write_bytes(bytes(range(256)) * 40)


def _zeroed(path: Path, content: bytes) -> None:
    path.write_bytes(bytes(len(content)))


def _half(path: Path, content: bytes) -> None:
    path.write_bytes(content[: len(content) // 2])


def _flipped(path: Path, content: bytes) -> None:
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:] if content else b"\1")


SPOILED = [_missing, _empty, _garbage, _zeroed, _half, _flipped]


@pytest.mark.parametrize("spoil", SPOILED)
@pytest.mark.parametrize("ending", [".idx", ".seal", ".aborted"])
def test_case_10_what_lies_beside_segments_is_made_again_with_the_same_answers(
    tmp_path: Path, ending: str, spoil: Callable[[Path, bytes], None]
) -> None:
    """case 10: index, seal and aborted transactions missing, empty, garbage, cut, changed."""
    seen = make_rich_log(tmp_path)
    for path in segments(tmp_path, ending=ending):
        spoil(path, path.read_bytes())
    if ending != ".aborted":
        assert read(LogReader(tmp_path)) == seen, "even before anything is made again"
    opened(tmp_path, segment_bytes=9000).close()
    assert read(LogReader(tmp_path)) == seen
    repair(tmp_path)
    assert read(LogReader(tmp_path)) == seen
    assert not list(inspect(tmp_path))


@pytest.mark.parametrize("shift", [-8192, -60, -1, 1, 30, 8192, None])
def test_case_10_an_index_that_points_a_little_beside_changes_no_answer(
    tmp_path: Path, shift: int | None
) -> None:
    """case 10: every position in every index is wrong by some bytes, or at the very beginning."""
    seen = make_rich_log(tmp_path)
    for path in segments(tmp_path, ending=".idx"):
        data = bytearray(path.read_bytes())
        for at in range(4, len(data), 20):
            (position,) = struct.unpack_from("<I", data, at)
            wrong = at if shift is None else max(position + shift, 0)
            struct.pack_into("<I", data, at, wrong)
        path.write_bytes(data)
    reader = LogReader(tmp_path)
    assert read(reader) == seen
    for start, end in [(5, 20), (20, 21), (30, 61), (60, 62)]:
        wanted = [value for offset, value in seen.items() if start <= offset < end]
        got = [
            value
            for batch in reader.read("t", 0, start, end, columns=("value",))
            for value in batch["value"].to_pylist()
        ]
        assert got == wanted


@pytest.mark.parametrize("bytes_max", [1, 60, 61, 62, 1000])
def test_case_10_however_few_bytes_a_reader_asks_for_it_finds_no_damage(
    tmp_path: Path, bytes_max: int
) -> None:
    """case 10: a reader that asks for less than a header is given whole batches all the same."""
    make_log(tmp_path)
    batches = LogReader(tmp_path).read("t", 0, 0, 12, bytes_max=bytes_max)
    assert sum(batch.num_rows for batch in batches) == 12


@pytest.mark.parametrize("ending", [".idx", ".seal", ".aborted"])
def test_case_10_older_and_foreign_copies_beside_segments_change_no_answer(
    tmp_path: Path, ending: str
) -> None:
    """case 10: files of another segment, and those of a time when the segment was shorter."""
    seen = make_rich_log(tmp_path)
    paths = segments(tmp_path, ending=ending)
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)
    opened(tmp_path, segment_bytes=9000).close()
    assert read(LogReader(tmp_path)) == seen


@pytest.mark.parametrize("spoil", SPOILED)
@pytest.mark.parametrize("crashed", [False, True])
def test_case_10_state_mm_is_made_again_with_the_same_end(
    tmp_path: Path, crashed: bool, spoil: Callable[[Path, bytes], None]
) -> None:
    """case 10: state.mm missing, empty, garbage, cut or changed."""
    seen = make_rich_log(tmp_path)
    if crashed:
        segments(tmp_path)[-1].with_suffix(".seal").unlink()
    path = tmp_path / "state.mm"
    spoil(path, path.read_bytes())
    with opened(tmp_path, segment_bytes=9000) as writer:
        found = read(LogReader(tmp_path))
        # Where records below it are still in the first segment, the log start is forgotten.
        assert {offset: found[offset] for offset in seen} == seen
        end = writer.partitions()[0].log_end_offset
        assert writer.append("t", 0, [batch_of(b"next")]) == [end]


def test_case_10_an_older_state_mm_hides_and_loses_nothing(tmp_path: Path) -> None:
    """case 10: state.mm of an earlier time, with a lower high watermark."""
    with opened(tmp_path, segment_bytes=400) as writer:
        writer.create_topic("t")
        for number in range(12):
            writer.append("t", 0, [numbered(number)])
            if number == 2:
                older = (tmp_path / "state.mm").read_bytes()
    (tmp_path / "state.mm").write_bytes(older)
    with opened(tmp_path) as writer:
        assert len(read(LogReader(tmp_path))) == 12
        assert writer.append("t", 0, [numbered(12)]) == [12]


def test_case_10_a_state_mm_ahead_of_the_log_is_told_and_no_offset_used_again(
    tmp_path: Path,
) -> None:
    """case 10: the segments are of an earlier time than state.mm."""
    make_log(tmp_path, segment_bytes=1 << 20)
    (path,) = segments(tmp_path)
    size = path.stat().st_size
    with opened(tmp_path) as writer:
        writer.append("t", 0, [numbered(12)])
        writer.append("t", 0, [numbered(13)])
    os.truncate(path, size)
    (found,) = (one for one in inspect(tmp_path) if one.lost)
    assert (found.start, found.end) == (12, 14)
    with opened(tmp_path) as writer:
        assert writer.append("t", 0, [batch_of(b"next")]) == [14]
    with pytest.raises(CorruptBatchError, match=r"\[12, 14\) cannot be read"):
        read(LogReader(tmp_path))


def test_case_10_a_first_segment_that_is_missing_is_told_and_not_taken_for_retention(
    tmp_path: Path,
) -> None:
    """case 10: the oldest file is gone though nothing was to be removed."""
    make_log(tmp_path)
    first, second, *_ = segments(tmp_path)
    first.unlink()
    opened(tmp_path).close()
    assert LogReader(tmp_path).offsets("t") == [(0, 12)]
    with pytest.raises(CorruptionError, match="offset 0, which was committed"):
        read(LogReader(tmp_path))
    assert {(one.start, one.end) for one in inspect(tmp_path) if one.lost} == {
        (0, int(second.stem))
    }


@pytest.mark.parametrize("content", [None, b"", b"garbage" * 1000])
def test_case_10_without_control_db_nothing_is_removed_and_a_backup_of_it_is_enough(
    tmp_path: Path, content: bytes | None
) -> None:
    """case 10: control.db is missing, empty or garbage."""
    with opened(tmp_path) as writer:
        writer.create_topic("a")  # without a record
        writer.create_topic("t")
        writer.append("t", 0, [numbered(0)])
    backup = (tmp_path / "control.db").read_bytes()
    for path in segments(tmp_path, "a", ending=".seal"):
        path.unlink()  # so that its folder looks like that of a topic that was never made
    for name in ("control.db", "control.db-wal", "control.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / "control.db").write_bytes(content)
    before = sorted(tmp_path.glob("t/**/*"))
    with pytest.raises(MillstreamError):
        opened(tmp_path)
    with pytest.raises(MillstreamError):
        LogReader(tmp_path).offsets("t")
    assert sorted(tmp_path.glob("t/**/*")) == before
    for name in ("control.db", "control.db-wal", "control.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / "control.db").write_bytes(backup)
    with opened(tmp_path) as writer:
        assert set(writer.topics()) == {"a", "t"}
        assert writer.append("a", 0, [numbered(0)]) == [0]
        assert writer.append("t", 0, [numbered(1)]) == [1]


@pytest.mark.parametrize("commits", [(True, False), (False, True), (True, True), (False, False)])
def test_case_10_a_lost_marker_changes_the_fate_of_no_transaction(
    tmp_path: Path, commits: tuple[bool, bool]
) -> None:
    """case 10: the entries of `.aborted` outlive the markers that they were made from."""
    with opened(tmp_path, clock_ms=lambda: 1) as writer:
        writer.create_topic("t")
        identity = writer.transactions.register("p")
        for number, commit in enumerate(commits):
            writer.transactions.begin(identity)
            batch = stamp(batch_of(b"%d" % number), ProducerStamp(*identity, 0), transactional=True)
            writer.append("t", 0, [batch])
            identity = writer.transactions.end(identity, commit=commit)
    seen = read(LogReader(tmp_path))
    (path,) = segments(tmp_path)
    _, (at, header), *_ = walk(path.read_bytes(), 0)
    assert header.base_offset == 1
    flip(path, at + 70)
    (tmp_path / NEEDS_VERIFY).touch()
    opened(tmp_path).close()
    reader = LogReader(tmp_path)
    parts = [batch for part in ((0, 1), (2, 4)) for batch in reader.read("t", 0, *part)]
    values = [value for batch in parts for value in batch["value"].to_pylist()]
    assert values == list(seen.values())
    assert len(aborted.read(DISK, path)) == sum(not commit for commit in commits)


# -- case 11: two owners -------------------------------------------------------------------------


def _own(folder: Path, write_end: int) -> None:
    for _ in range(20):
        try:
            with opened(folder) as writer:
                os.write(write_end, b"(")
                writer.append("t", 0, [batch_of(b"%d" % os.getpid())])
                os.write(write_end, b")")
        except FolderOwnedError:
            os.write(write_end, b".")


def test_case_11_of_processes_that_race_for_a_folder_one_writes_at_a_time(tmp_path: Path) -> None:
    """case 11: owners start together, again and again."""
    make_log(tmp_path, records=0)
    read_end, write_end = os.pipe()
    children = []
    for _ in range(4):
        child = os.fork()
        if not child:
            try:
                _own(tmp_path, write_end)
            finally:
                os._exit(0)
        children.append(child)
    os.close(write_end)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    story = b""
    while part := os.read(read_end, 1 << 16):
        story += part
    os.close(read_end)
    turns = story.replace(b".", b"")
    assert turns == b"()" * (len(turns) // 2), "two owners at once"
    assert len(read(LogReader(tmp_path))) == len(turns) // 2 > 0
    assert not list(inspect(tmp_path))


def _own_until_signalled(folder: Path, read_end: int, write_end: int) -> None:
    with opened(folder) as writer:
        os.write(write_end, b"o")
        os.read(read_end, 1)
        os.write(write_end, b"%d" % writer.append("t", 0, [numbered(12)])[0])


def test_case_11_a_stopped_owner_still_owns_and_goes_on_when_it_is_resumed(tmp_path: Path) -> None:
    """case 11: the owner is stopped with SIGSTOP; nobody takes over; it is resumed."""
    make_log(tmp_path)
    (read_end, say), (listen, write_end) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        try:
            _own_until_signalled(tmp_path, read_end, write_end)
        finally:
            os._exit(0)
    try:
        assert os.read(listen, 1) == b"o"
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        with pytest.raises(FolderOwnedError, match=f"process {child};"):
            opened(tmp_path)
        assert len(read(LogReader(tmp_path))) == 12, "readers need no owner"
        assert not list(inspect(tmp_path))
    finally:
        os.kill(child, signal.SIGCONT)
        os.write(say, b"g")
        assert os.read(listen, 10) == b"12"
        os.waitpid(child, 0)
        for handle in (read_end, say, listen, write_end):
            os.close(handle)
    assert len(read(LogReader(tmp_path))) == 13


def test_case_11_a_forked_child_cannot_write_and_does_not_keep_the_lock(tmp_path: Path) -> None:
    """case 11: fork after open; the child outlives its parent's ownership."""
    make_log(tmp_path)
    writer = opened(tmp_path)
    read_end, say = os.pipe()
    child = os.fork()
    if not child:
        refused = 1
        try:
            writer.append("t", 0, [numbered(12)])
        except FencedError:
            refused = 0
        os.read(read_end, 1)
        os._exit(refused)
    assert writer.append("t", 0, [numbered(12)]) == [12]
    writer.close()
    with opened(tmp_path) as other:  # though the child lives
        assert other.append("t", 0, [numbered(13)]) == [13]
    os.write(say, b"g")
    assert os.waitpid(child, 0)[1] == 0
    os.close(read_end)
    os.close(say)


def test_case_11_programs_that_an_owner_starts_do_not_inherit_the_lock(tmp_path: Path) -> None:
    """case 11: a child program outlives its owner."""
    make_log(tmp_path)
    context = multiprocessing.get_context("spawn")
    with opened(tmp_path):
        sleeper = context.Process(target=signal.pause)
        sleeper.start()
    try:
        opened(tmp_path).close()
    finally:
        sleeper.kill()
        sleeper.join()


# -- case 12: copies and mixtures of folders -----------------------------------------------------


@pytest.mark.parametrize("order", [["state.mm", "t"], ["t", "state.mm"]])
def test_case_12_a_copy_of_a_living_folder_opens_and_tells_what_it_lacks(
    tmp_path: Path, order: list[str]
) -> None:
    """case 12: cp -r of a folder that is being written to.

    A copy whose state.mm is older than its segments is whole up to some moment. One whose state.mm
    is newer lacks records that state.mm knows of: an opening names them, and uses no offset again.
    """
    live, copy = tmp_path / "live", tmp_path / "copy"
    with opened(live, segment_bytes=400) as writer:
        writer.create_topic("t")
        for number in range(6):
            writer.append("t", 0, [numbered(number)])
        copy.mkdir()
        for name in ("FORMAT", "LOCK", "control.db", "control.db-wal"):
            if (live / name).exists():
                shutil.copy(live / name, copy / name)
        for step, name in enumerate(order):
            if (live / name).is_dir():
                shutil.copytree(live / name, copy / name)
            else:
                shutil.copy(live / name, copy / name)
            if not step:
                for number in range(6, 12):
                    writer.append("t", 0, [numbered(number)])
    lost = [(one.start, one.end) for one in inspect(copy) if one.lost]
    with opened(copy) as writer:
        assert writer.append("t", 0, [batch_of(b"next")]) == [12]
    if order[0] == "t":
        assert lost == [(6, 12)]
        with pytest.raises(CorruptBatchError, match=r"\[6, 12\) cannot be read"):
            read(LogReader(copy))
        repair(copy)
    else:
        assert lost == []
    found = read(LogReader(copy))
    assert found.pop(12) == b"next"
    assert [number_of(value) for value in found.values()] == list(range(6 if lost else 12))


def test_case_12_parts_of_two_folders_are_refused(tmp_path: Path) -> None:
    """case 12: state.mm, or topics, of another folder."""
    one, two = make_log(tmp_path / "one"), make_log(tmp_path / "two")
    state = (one / "state.mm").read_bytes()
    shutil.copy(two / "state.mm", one / "state.mm")
    for use in (opened, lambda folder: LogReader(folder).topics(), repair):
        with pytest.raises(ConfigError, match="belongs to log"):
            use(one)
    (one / "state.mm").write_bytes(state)
    for topic in (two / "t").iterdir():
        shutil.copytree(topic, one / "t" / topic.name)
    for use in (opened, repair):
        with pytest.raises(CorruptionError, match=r"control\.db knows no such topic"):
            use(one)
    assert "unknown folder" in {finding.kind for finding in inspect(one)}
    assert len(read(LogReader(one))) == 12


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (99, "made by a newer version of Millstream .log format 99; .* Read it with that version$"),
        (
            2,
            "made by an earlier version of Millstream .log format 2; .* that version, or begin in a new folder",
        ),
    ],
)
def test_case_12_another_format_is_refused_and_not_touched(
    tmp_path: Path, version: int, message: str
) -> None:
    """case 12: a folder that another version of Millstream has written."""
    make_log(tmp_path)
    content = {"version": version, "directory_id": "0" * 32}
    (tmp_path / "FORMAT").write_text(json.dumps(content) + "\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    uses: list[Callable[[Path], object]] = [
        opened,
        lambda folder: LogReader(folder).topics(),
        lambda folder: list(inspect(folder)),
        repair,
    ]
    for use in uses:
        with pytest.raises(ConfigError, match=message):
            use(tmp_path)
    assert {path: path.read_bytes() for path in before} == before


# -- case 13: clocks -----------------------------------------------------------------------------


class Clock:
    """A wall clock that is set at will, and the running time, which is not."""

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.running_ms = 5_000

    def __call__(self) -> int:
        return self.now_ms

    def pass_(self, duration_ms: int) -> None:
        self.now_ms += duration_ms
        self.running_ms += duration_ms


def run_maintenance(writer: LogWriter, clock: Clock) -> Any:
    return writer.maintenance.run_pass(clock.now_ms, running_ms=clock.running_ms)


def test_case_13_a_clock_that_jumps_ten_days_ahead_empties_no_topic(tmp_path: Path) -> None:
    """case 13: +10 days, with records kept for a day."""
    clock = Clock(100 * DAY_MS)
    with opened(tmp_path, clock_ms=clock, segment_bytes=400) as writer:
        writer.create_topic("t", settings={"retention.ms": str(DAY_MS)})
        for number in range(40):
            batch = batch_of(b"%06d" % number + b"x" * 40, timestamp_ms=clock.now_ms)
            writer.append("t", 0, [batch])
        run_maintenance(writer, clock)
        clock.now_ms += 10 * DAY_MS
        for _ in range(20):
            clock.pass_(30_000)
            assert run_maintenance(writer, clock).segments_removed == 0
        assert len(read(LogReader(tmp_path))) == 40
        # Even when the time has really passed, a pass removes a part only.
        clock.pass_(2 * DAY_MS)
        held = len(writer.partitions()[0].sealed)
        assert 0 < run_maintenance(writer, clock).segments_removed <= max(1, (held + 1) // 10)


@pytest.mark.parametrize("jump_ms", [-10 * DAY_MS, 0])
def test_case_13_a_clock_that_goes_back_or_stands_still_changes_neither_offsets_nor_reading(
    tmp_path: Path, jump_ms: int
) -> None:
    """case 13: -10 days, a clock that stands still, equal timestamps."""
    clock = Clock(100 * DAY_MS)
    with opened(tmp_path, clock_ms=clock, segment_bytes=1000) as writer:
        writer.create_topic("t")
        times = []
        for number in range(60):
            if number == 30:
                clock.now_ms += jump_ms
            times.append(clock.now_ms)
            batch = batch_of(b"%06d" % number, timestamp_ms=clock.now_ms)
            assert writer.append("t", 0, [batch]) == [number]
            if jump_ms:
                clock.now_ms += 1
        assert run_maintenance(writer, clock).segments_removed == 0
    reader = LogReader(tmp_path)
    assert len(read(reader)) == 60
    for moment in {times[0] - 1, times[0], times[29], times[30], max(times), max(times) + 1}:
        wanted = next((at for at, time in enumerate(times) if time >= moment), 60)
        assert reader.offset_for_time("t", 0, moment) == wanted
    opened(tmp_path).close()
    assert not list(inspect(tmp_path))


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("jump_ms", [10 * DAY_MS, -10 * DAY_MS])
def test_case_13_a_transaction_times_out_by_running_time_whatever_the_clock_shows(
    tmp_path: Path, jump_ms: int, when: str
) -> None:
    """case 13: the wall clock jumps before or during a transaction of ten minutes at most."""
    clock = Clock(100 * DAY_MS)
    with opened(tmp_path, clock_ms=clock, running_ms=lambda: clock.running_ms) as writer:
        writer.create_topic("t")
        run_maintenance(writer, clock)
        identity = writer.transactions.register("p", timeout_ms=600_000)
        if when == "before":
            clock.now_ms += jump_ms
        writer.transactions.begin(identity)
        batch = stamp(batch_of(b"open"), ProducerStamp(*identity, 0), transactional=True)
        writer.append("t", 0, [batch])
        if when == "during":
            clock.now_ms += jump_ms
        clock.pass_(120_000)
        assert run_maintenance(writer, clock).transactions_aborted == 0, (
            "two of ten minutes have passed"
        )
        clock.pass_(700_000)
        assert run_maintenance(writer, clock).transactions_aborted == 1
