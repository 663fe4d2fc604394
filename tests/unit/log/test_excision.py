"""Values are replaced, and nothing else: against a plain list, through crashes, full disks and readers at work."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import DiskFullError, SyncFailedError
from millstream.log.batch import ProducerStamp, stamp
from millstream.log.compression import COMPRESSIONS, compress
from millstream.log.control import ControlDb
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.excision import excise_values
from millstream.log.files import read_whole
from millstream.log.group_commit import PendingAppend
from millstream.log.reader import LogReader
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition
from millstream.testing.disk import SimulatedCrash, SimulatedDisk

FOLDER = Path("/log")
T = TopicPartition("t", 0)
ALL = ("offset", "timestamp", "key", "value", "headers")


class World:
    """A log of one partition on a simulated disk, and what it must hold: a row for each offset."""

    def __init__(self, segment_bytes: int = 700) -> None:
        self.disk = SimulatedDisk(1)
        self.db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.rows: list[tuple[int, bytes | None, bytes | None, list]] = []
        self.sent: list[PendingAppend] = []
        self.open()
        self.writer.create_topic("t", settings={"segment.bytes": str(segment_bytes)})

    def open(self) -> None:
        control = ControlDb(self.db, write=True, before_commit=self.disk.step)
        self.writer = LogWriter(
            FOLDER, files=self.disk, control=control, sync_threads=1, background=False
        )

    def append(self, records: list[SimpleRecord], codec: str = "none") -> None:
        sequence = len(self.rows)
        batch = stamp(encode_records(records), ProducerStamp(7, 0, sequence), transactional=False)
        one = PendingAppend(T, compress(batch, codec))
        self.writer.commit([one])
        assert one.error is None
        assert one.offset == sequence
        self.sent.append(one)
        self.rows += [(at, key, value, list(headers)) for at, key, value, headers in records]

    def excise(self, values: dict[int, bytes]):
        return excise_values(self.writer, self.writer.partition(T), values)

    def replace(self, values: dict[int, bytes]) -> None:
        """Do the same to the rows."""
        for offset, value in values.items():
            at, key, _, headers = self.rows[offset]
            self.rows[offset] = at, key, value, headers

    def read(self) -> list[tuple]:
        control = ControlDb(self.db, write=False)
        reader = LogReader(FOLDER, files=self.disk, control=control)
        start, end = reader.bounds("t", 0)
        return rows_of(reader.read("t", 0, start, end, columns=ALL)) if end else []

    def check(self) -> None:
        assert self.read() == self.rows

    def bytes_on_disk(self) -> bytes:
        folder = self.writer.partition(T).folder
        return b"".join(read_whole(self.disk, folder / name) for name in self.disk.names(folder))


def rows_of(batches) -> list[tuple]:
    found = []
    for batch in batches:
        for row in batch.to_pylist():
            at = round(row["timestamp"].timestamp() * 1000)
            headers = [(one["key"], one["value"]) for one in row["headers"]]
            found.append((at, row["key"], row["value"], headers))
    return found


def filled() -> World:
    world = World()
    for at in range(6):
        world.append(
            [
                SimpleRecord(at * 10 + n, b"key", b"secret-%d-%d" % (at, n), [("h", b"x")])
                for n in range(4)
            ],
            "gzip" if at == 3 else "none",
        )
    return world


SOME = {0: b"gone", 1: b"", 9: b"a value that is longer than the one before" * 3, 23: b"secret-x-y"}
values = st.binary(max_size=40)
records = st.builds(
    SimpleRecord,
    st.integers(0, 10_000),
    st.none() | values,
    st.none() | values,
    st.lists(st.tuples(st.text(max_size=5), st.none() | values), max_size=2),
)
batches = st.lists(
    st.tuples(st.lists(records, min_size=1, max_size=5), st.sampled_from(COMPRESSIONS)),
    min_size=1,
    max_size=8,
)


@given(batches, st.integers(100, 2000), st.data())
@settings(max_examples=some(60))
def test_any_values_are_replaced_and_nothing_else(sent, segment_bytes: int, data) -> None:
    world = World(segment_bytes)
    for rows, codec in sent:
        world.append(rows, codec)
    count = len(world.rows)
    wanted = data.draw(st.dictionaries(st.integers(0, count + 2), values, max_size=6))
    others = {at: one for at, one in wanted.items() if at < count and world.rows[at][2] != one}
    report = world.excise(wanted)
    world.replace({at: one for at, one in wanted.items() if at < count})
    assert report.values == len(others)
    assert not report.left
    world.check()
    assert world.excise(wanted).segments == 0
    for one in world.sent:  # what a producer sends again is still known
        again = PendingAppend(T, one.batch)
        world.writer.commit([again])
        if again.error is None:
            assert again.offset == one.offset
    world.append([SimpleRecord(1, b"k", b"after")])
    world.check()
    world.writer.close()
    world.disk.restart(power_lost=True)
    world.open()
    world.check()


@pytest.mark.parametrize("power_lost", [False, True])
def test_a_crash_at_any_operation_leaves_old_or_new_values_and_is_repeated(
    power_lost: bool,
) -> None:
    died = 0
    for step in range(1, 300):
        world = filled()
        world.disk.steps, world.disk.crash_at = 0, step
        try:
            world.excise(SOME)
        except SimulatedCrash:
            died += 1
        else:
            break
        world.disk.restart(power_lost=power_lost)
        before = list(world.rows)
        for opened in (False, True):
            if opened:
                world.open()
            for offset, row in enumerate(world.read()):
                new = (*before[offset][:2], SOME.get(offset), before[offset][3])
                assert row == before[offset] or (offset in SOME and row == new), f"step {step}"
        assert b".excised" not in b" ".join(
            name.encode() for name in world.disk.names(world.writer.partition(T).folder)
        )
        world.excise(SOME)
        world.replace(SOME)
        world.check()
        for secret in (b"secret-0-0", b"secret-0-1", b"secret-2-1", b"secret-5-3"):
            assert secret not in world.bytes_on_disk(), f"step {step}"
        assert b"secret-0-2" in world.bytes_on_disk()
        world.append([SimpleRecord(1, b"k", b"after")])
        world.check()
    assert died > 25


def test_a_full_disk_leaves_the_segments_and_excising_again_does_the_rest() -> None:
    refused = 0
    for room in range(0, 1500, 50):
        world = filled()
        world.disk.capacity_bytes = world.disk._used() + room
        try:
            world.excise(SOME)
        except DiskFullError as error:
            assert "Make room" in str(error)
            refused += 1
        world.read()
        world.disk.capacity_bytes = None
        world.excise(SOME)
        world.replace(SOME)
        world.check()
    assert refused > 3


def test_a_disk_that_fails_a_sync_loses_nothing() -> None:
    failed = 0
    for step in range(1, 120, 3):
        world = filled()
        world.disk.steps = 0
        world.disk.fail_sync_at = step
        try:
            world.excise(SOME)
        except (DiskFullError, SyncFailedError):
            failed += 1
        world.disk.restart(power_lost=True)
        world.open()
        world.excise(SOME)
        world.replace(SOME)
        world.check()
    assert failed > 3


def test_a_segment_with_damage_is_named_and_left() -> None:
    world = filled()
    partition = world.writer.partition(T)
    first = partition.path_of(partition.sealed[0])
    world.disk.damage(first, 70, b"\xff\xff")
    report = world.excise(SOME)
    assert len(report.left) == 1
    assert "00000000000000000000.log" in report.left[0]
    readable = [at for at in SOME if at >= partition.sealed[0].seal.next_offset]
    assert report.values == len(readable) > 0


def test_two_at_once_lose_nothing_of_each_other() -> None:
    world = filled()
    halves = [dict.fromkeys(range(0, 24, 2), b"one"), dict.fromkeys(range(1, 24, 2), b"other")]
    running = [threading.Thread(target=world.excise, args=(half,)) for half in halves]
    for one in running:
        one.start()
    for one in running:
        one.join()
    for half in halves:
        world.excise(half)  # one of them may have been asked to try again
        world.replace(half)
    world.check()


def test_a_reader_that_is_in_the_middle_reads_each_record_once() -> None:
    world = filled()
    reader = LogReader(FOLDER, files=world.disk, control=ControlDb(world.db, write=False))
    reading = reader.read("t", 0, 0, 24, columns=ALL, bytes_max=200)
    found = rows_of([next(reading)])
    world.excise(SOME)
    found += rows_of(reading)
    assert [row[0] for row in found] == [row[0] for row in world.rows]
