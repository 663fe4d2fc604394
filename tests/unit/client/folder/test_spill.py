from __future__ import annotations

import errno
import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import pytest
from example_counts import some
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.client.folder.producers import folder_producer

from millstream.client.folder.producer import FolderProducer
from millstream.client.folder.spill import SpillQueue
from millstream.client.folder.spill_drain import drain
from millstream.client.folder.spill_format import Entry, spill_file_name
from millstream.errors import (
    ConfigError,
    CorruptBatchError,
    CorruptionError,
    DiskFullError,
    FencedError,
    FolderOwnedError,
    MillstreamError,
    OutOfOrderSequenceError,
    OverloadError,
    SyncFailedError,
    UnknownTopicError,
)
from millstream.log.batch import EncodedBatch
from millstream.log.compression import compress
from millstream.log.control import ControlDb
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.files import DISK, DiskFiles, Files
from millstream.log.owner import read_format
from millstream.log.producer_identity import ProducerIdentity
from millstream.log.producers import BATCHES_KEPT
from millstream.log.reader import LogReader
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition
from millstream.testing.disk import SimulatedCrash, SimulatedDisk

WAIT_S = 60
IDENTITY = ProducerIdentity(7, 0)


def batch(*values: bytes | None, key: bytes | None = None) -> EncodedBatch:
    return encode_records([SimpleRecord(0, key, value) for value in values])


def open_spill(
    folder: Path,
    *,
    files: Files = DISK,
    name: str = "p",
    directory_id: str = "d",
    segment_bytes: int = 1 << 20,
) -> SpillQueue:
    return SpillQueue(
        folder,
        name=name,
        directory_id=directory_id,
        register=lambda: IDENTITY,
        files=files,
        segment_bytes=segment_bytes,
    )


def everything(spill: SpillQueue) -> list[Entry]:
    """Take all out of the queue."""
    found: list[Entry] = []
    while entries := spill.peek(BATCHES_KEPT):
        found += entries
        spill.mark_done(entries[-1], {})
    return found


# -- the queue on disk --------------------------------------------------------------------------

batches = st.builds(
    lambda values, key, codec: compress(batch(*values, key=key), codec),
    st.lists(st.none() | st.binary(max_size=300), min_size=1, max_size=4),
    st.none() | st.just(b"k"),
    st.sampled_from(["none", "lz4"]),
)
named = st.tuples(
    st.builds(TopicPartition, st.sampled_from(["a", "b-" + "x" * 200]), st.integers(0, 3)), batches
)


@settings(
    max_examples=some(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    groups=st.lists(st.lists(named, min_size=1, max_size=6), max_size=6),
    segment_bytes=st.sampled_from([1, 500, 1 << 20]),
    reopen=st.booleans(),
)
def test_what_goes_in_comes_out_in_order_and_whole(
    tmp_path_factory: pytest.TempPathFactory,
    groups: list[list[tuple[TopicPartition, EncodedBatch]]],
    segment_bytes: int,
    reopen: bool,
) -> None:
    folder = tmp_path_factory.mktemp("spill")
    spill = open_spill(folder, segment_bytes=segment_bytes)
    numbers = [number for group in groups for number in spill.append(group)]
    expected = [entry for group in groups for entry in group]
    assert spill.count == sum(batch.count for _, batch in expected)
    if reopen:
        spill.close()
        spill = open_spill(folder, segment_bytes=segment_bytes)
    found = everything(spill)
    assert [entry.number for entry in found] == numbers
    for entry, (name, sent) in zip(found, expected, strict=True):
        assert (entry.name, entry.batch) == (name, sent)
    assert spill.count == 0
    assert not list(folder.glob("*.spill"))
    again = spill.append([(TopicPartition("a", 0), batch(b"v"))])
    assert again == [sum(batch.count for _, batch in expected)]
    spill.close()
    spill = open_spill(folder)
    assert [entry.batch for entry in everything(spill)] == [batch(b"v")]
    spill.close()


@pytest.mark.not_in_lane("thresholds", "what is read at once is less there")
def test_no_more_of_a_partition_is_given_out_than_the_log_can_recognise(tmp_path: Path) -> None:
    spill = open_spill(tmp_path)
    a, b = TopicPartition("a", 0), TopicPartition("b", 0)
    spill.append([(a, batch(b"%d" % n)) for n in range(4)])
    spill.append([(b, batch(b"x"))])
    spill.append([(a, batch(b"%d" % n)) for n in range(4, 9)])
    assert [entry.name for entry in spill.peek(5)] == [a, a, a, a, b, a]
    spill.close()


@pytest.mark.parametrize("cut", [True, False])
def test_a_torn_tail_is_cut_at_every_byte_and_what_is_cut_is_kept(
    tmp_path: Path, *, cut: bool
) -> None:
    name = TopicPartition("a", 0)
    spill = open_spill(tmp_path / "whole")
    spill.append([(name, batch(b"first"))])
    path = tmp_path / "whole" / spill_file_name(0)
    durable = path.stat().st_size
    spill.append([(name, batch(b"second")), (name, batch(b"third"))])
    spill.close()
    content = path.read_bytes()
    state = (tmp_path / "whole" / "state.json").read_bytes()
    third = content.rindex(b"MSE1")
    for place in range(durable, len(content)):
        folder = tmp_path / f"{place}"
        folder.mkdir()
        (folder / "state.json").write_bytes(state)
        if cut:
            data = content[:place]
        else:
            data = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        (folder / spill_file_name(0)).write_bytes(data)
        spill = open_spill(folder)
        kept = 1 + (place >= third)
        assert spill.count == kept
        end = third if kept == 2 else durable
        cut_off = list(folder.glob("*.cut"))
        if data[end:]:
            assert [one.read_bytes() for one in cut_off] == [data[end:]]
        else:
            assert not cut_off
        spill.append([(name, batch(b"next"))])
        spill.close()
        spill = open_spill(folder)
        whole = [batch(b"first"), batch(b"second")][:kept]
        assert [entry.batch for entry in everything(spill)] == [*whole, batch(b"next")]
        spill.close()


def test_damage_to_what_was_safe_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    name = TopicPartition("a", 0)
    spill = open_spill(tmp_path, segment_bytes=400)
    for n in range(8):
        spill.append([(name, batch(b"%d" % n * 100))])
    spill.close()
    paths = sorted(tmp_path.glob("*.spill"))
    assert len(paths) > 2
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents, strict=True):
        last = path == paths[-1]
        for place in range(0, len(content) // 2 if last else len(content), 7):
            damaged = bytearray(content)
            damaged[place] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(CorruptBatchError, match="restore"):
                open_spill(tmp_path)
            assert path.read_bytes() == damaged
        if not last:
            path.write_bytes(content[:-10])
            with pytest.raises(CorruptBatchError):
                open_spill(tmp_path)
            path.unlink()
            with pytest.raises(CorruptionError):
                open_spill(tmp_path)
        path.write_bytes(content)
    spill = open_spill(tmp_path)
    paths[0].write_bytes(bytes(len(contents[0])))  # under the feet of the one who uses it
    with pytest.raises(CorruptBatchError):
        spill.peek(5)
    spill.close()
    assert not list(tmp_path.glob("*.cut"))


def test_a_folder_that_is_not_ones_own_is_refused(tmp_path: Path) -> None:
    spill = open_spill(tmp_path)
    with pytest.raises(FolderOwnedError, match="another producer named 'p'"):
        open_spill(tmp_path)
    spill.append([(TopicPartition("a", 0), batch(b"v"))])
    spill.close()
    spill.close()
    with pytest.raises(FencedError):
        spill.append([(TopicPartition("a", 0), batch(b"v"))])
    with pytest.raises(ConfigError, match="a producer named 'p'"):
        open_spill(tmp_path, name="q")
    with pytest.raises(ConfigError, match="of the log d"):
        open_spill(tmp_path, directory_id="e")
    state = tmp_path / "state.json"
    content = state.read_bytes()
    for damaged in (b"", content[:-3], content.replace(b'"number":0', b'"number":1')):
        state.write_bytes(damaged)
        with pytest.raises(CorruptionError, match="CRC"):
            open_spill(tmp_path)
    state.unlink()
    with pytest.raises(CorruptionError, match="no state"):
        open_spill(tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_spill(file)


# -- through crashes and power cuts -------------------------------------------------------------

LOG, SPILL = Path("/log"), Path("/spill")
NAMES = [TopicPartition("t", 0), TopicPartition("t", 1)]


class History:
    """A log and a spill on one disk; what goes into the spill must come out once, in order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = SimulatedDisk(seed)
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.control = ControlDb(connection, write=True)
        self.safe: set[bytes] = set()  # the spill said that it has them
        self.sent: list[bytes] = []
        self.appended: dict[bytes, tuple[TopicPartition, int]] = {}

    def open(self) -> tuple[LogWriter, SpillQueue]:
        writer = LogWriter(
            LOG,
            files=self.disk,
            control=self.control,
            segment_bytes=3000,
            sync_threads=1,
            background=False,
        )
        if "t" not in writer.topics():
            writer.create_topic("t", partitions=2)
        directory_id = read_format(LOG, self.disk)
        assert directory_id is not None
        spill = SpillQueue(
            SPILL,
            name="p",
            directory_id=directory_id,
            register=writer.transactions.register,
            files=self.disk,
            segment_bytes=700,
        )
        return writer, spill

    def put(self, spill: SpillQueue) -> None:
        group = []
        for _ in range(self.rng.randint(1, 8)):
            values = [
                b"%d:" % (len(self.sent) + n) + bytes(self.rng.choice([0, 90]))
                for n in range(self.rng.randint(1, 3))
            ]
            self.sent += values
            group.append((self.rng.choice(NAMES), values))
        with suppress(DiskFullError):
            spill.append([(name, batch(*values)) for name, values in group])
            self.safe |= {value for _, values in group for value in values}

    def take(self, writer: LogWriter, spill: SpillQueue) -> bool:
        drained = drain(spill, writer)
        assert not drained.refused
        for entry, offset in drained.appended:
            known = self.appended.setdefault(entry.batch.tail, (entry.name, offset))
            assert known == (entry.name, offset), "another offset than the first time"
        return drained.no_room is None

    def work(self) -> None:
        writer, spill = self.open()
        for _ in range(self.rng.randint(8, 16)):
            what = self.rng.random()
            if what < 0.4:
                self.put(spill)
            elif what < 0.9:
                self.take(writer, spill)
            else:
                with suppress(DiskFullError):  # somebody else writes there too
                    writer.append(*self.rng.choice(NAMES), [batch(b"other")])
        spill.close()
        writer.close()

    def check(self) -> None:
        """Drain everything on a disk without faults, and look."""
        writer, spill = self.open()
        while spill.count:
            assert self.take(writer, spill)
        reader = LogReader(LOG, files=self.disk, control=self.control)
        found: list[bytes] = []
        for name in NAMES:
            values = [
                value
                for part in reader.read(*name, 0, reader.end_offset(*name), columns=("value",))
                for value in part["value"].to_pylist()
                if value != b"other"
            ]
            order = [int(value.split(b":")[0]) for value in values]
            assert order == sorted(order), "another order than they went in"
            found += values
        assert len(found) == len(set(found)), "there twice"
        assert self.safe <= set(found) <= set(self.sent), "lost, or never sent"
        spill.close()
        writer.close()
        self.disk.restart(power_lost=False)


def run_to_crash(seed: int, crash_at: int, *, power_lost: bool) -> bool:
    """Live once, crashing at an operation; return whether it came so far."""
    history = History(seed)
    history.disk.crash_at = crash_at
    try:
        history.work()
    except SimulatedCrash:
        crashed = True
    else:
        crashed = False
    history.disk.restart(power_lost=power_lost)
    try:
        history.check()
        history.work()
        history.check()
    except CorruptionError:
        # The log may not guess after a power cut; the spill never has to.
        assert power_lost
        with pytest.raises(CorruptionError, match="/log"):
            history.open()
    except AssertionError as error:
        raise AssertionError(f"{seed=} {crash_at=} {power_lost=}: {error}") from error
    return crashed


@pytest.mark.parametrize("power_lost", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_crash_at_any_operation_loses_nothing_that_was_safe_and_doubles_nothing(
    seed: int, *, power_lost: bool
) -> None:
    crash_at = 1
    while run_to_crash(seed, crash_at, power_lost=power_lost):
        crash_at += 1
    assert crash_at > 80, "the history did too little to mean anything"


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("operation", range(1, 5))  # create, sync the folder, write, sync
def test_what_a_killed_producer_left_unsynced_is_safe_once_it_was_opened(
    operation: int, *, goes_on: bool
) -> None:
    name = TopicPartition("t", 0)
    for seed in range(20):
        disk = SimulatedDisk(seed)
        spill = open_spill(SPILL, files=disk)
        disk.crash_at = disk.steps + operation
        with pytest.raises(SimulatedCrash):
            spill.append([(name, batch(b"1")), (name, batch(b"2"))])
        disk.restart(power_lost=False)
        spill = open_spill(SPILL, files=disk)
        found = spill.peek(1)
        if found:
            spill.mark_done(found[0], {})
        if goes_on:
            spill.append([(name, batch(b"3"))])
        left = [entry.batch for entry in spill.peek(5)]
        disk.restart(power_lost=True)
        spill = open_spill(SPILL, files=disk)
        assert [entry.batch for entry in spill.peek(5)] == left


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_many_crashes_short_writes_full_and_broken_disks_one_after_another(first: int) -> None:
    safe = refused = 0
    for seed in range(first, first + 40):
        history = History(seed)
        rng = random.Random(seed)
        try:
            for _ in range(8):
                history.disk.crash_at = rng.choice([None, rng.randint(1, 150)])
                history.disk.short_writes = rng.choice([0.0, 0.5])
                history.disk.fail_sync_at = rng.choice([None, None, rng.randint(20, 150)])
                if rng.random() < 0.4:
                    history.disk.capacity_bytes = rng.randint(500, 15_000)
                power_lost = False
                try:
                    history.work()
                except SimulatedCrash:
                    power_lost = rng.random() < 0.5
                except (DiskFullError, ConfigError, SyncFailedError):
                    pass  # too full even to begin, or broken: reported as it should be
                history.disk.restart(power_lost=power_lost)
                if rng.random() < 0.4:
                    history.check()
            history.check()
        except CorruptionError as error:
            if "/log" not in str(error):
                raise AssertionError(f"{seed=}: the spill has to guess") from error
            refused += 1
        except AssertionError as error:
            raise AssertionError(f"{seed=}: {error}") from error
        safe += len(history.safe)
    assert safe > 1000, "the histories did too little to mean anything"
    assert refused <= 4


# -- from the spill to the log ------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogWriter]:
    with LogWriter(tmp_path / "log", background=False) as writer:
        yield writer


def spill_for(log: LogWriter, folder: Path) -> SpillQueue:
    directory_id = read_format(log.folder, DISK)
    assert directory_id is not None
    return SpillQueue(
        folder,
        name="p",
        directory_id=directory_id,
        register=log.transactions.register,
        files=DISK,
    )


def values(log: LogWriter, topic: str = "t", partition: int = 0) -> list[bytes | None]:
    reader = LogReader(log.folder)
    end = reader.end_offset(topic, partition)
    return [
        value
        for part in reader.read(topic, partition, 0, end, columns=("value",))
        for value in part["value"].to_pylist()
    ]


def test_a_batch_that_the_log_refuses_for_good_does_not_stop_those_behind_it(
    log: LogWriter, tmp_path: Path
) -> None:
    log.create_topic("t")
    log.create_topic("keyed", settings={"cleanup.policy": "compact"})
    spill = spill_for(log, tmp_path / "spill")
    t, keyed, gone = TopicPartition("t", 0), TopicPartition("keyed", 0), TopicPartition("gone", 0)
    spill.append([(keyed, batch(b"1", key=b"k"))])
    drain(spill, log)
    spill.append(
        [
            (keyed, batch(b"no key")),
            (t, batch(b"2")),
            (keyed, batch(b"3", key=b"k")),
            (gone, batch(b"no topic")),
            (keyed, batch(b"no key")),
            (keyed, batch(b"4", b"5", key=b"k")),
            (t, batch(b"6")),
        ]
    )
    refused = []
    while spill.count:
        refused += drain(spill, log).refused
    assert [entry.name for entry, _ in refused] == [keyed, gone, keyed]
    assert isinstance(refused[1][1], UnknownTopicError)
    assert values(log) == [b"2", b"6"]
    assert values(log, "keyed") == [b"1", b"3", b"4", b"5"]
    spill.append([(keyed, batch(b"7", key=b"k"))])
    drain(spill, log)
    assert values(log, "keyed")[-1] == b"7"
    spill.close()


def test_a_spill_that_the_log_does_not_recognise_is_told_and_kept(
    log: LogWriter, tmp_path: Path
) -> None:
    log.create_topic("t")
    folder = tmp_path / "spill"
    spill = spill_for(log, folder)
    for n in range(8):
        spill.append([(TopicPartition("t", 0), batch(b"%d" % n))])
    spill.close()
    old = {path: path.read_bytes() for path in folder.iterdir()}
    spill = spill_for(log, folder)
    while spill.count:
        drain(spill, log)
    spill.close()
    for path, content in old.items():
        path.write_bytes(content)  # somebody restores an old copy of the folder
    spill = spill_for(log, folder)
    with pytest.raises(OutOfOrderSequenceError):
        drain(spill, log)
    assert spill.count == 8
    assert values(log) == [b"%d" % n for n in range(8)]
    spill.close()


# -- a producer that spills ---------------------------------------------------------------------


class FaultyDisk(DiskFiles):
    """The real disk, which can be full for the log, full or broken for the spill, or slow."""

    def __init__(self) -> None:
        self.log_full = self.spill_full = self.spill_broken = False
        self.names_lost = 0  # how many syncs of the spill's folder fail from now on
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.at_gate = threading.Event()
        self._suffix: dict[int, str] = {}

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> int:
        handle = super().open(path, write=write, create=create)
        self._suffix[handle] = path.suffix
        return handle

    def pwrite(self, handle: int, data: bytes | memoryview, position: int) -> int:
        suffix = self._suffix.get(handle)
        if suffix == ".log":
            self.at_gate.set()
            assert self.open_gate.wait(WAIT_S)
        if (self.log_full and suffix == ".log") or (self.spill_full and suffix == ".spill"):
            raise OSError(errno.ENOSPC, "no space left")
        return super().pwrite(handle, data, position)

    def sync(self, handle: int) -> None:
        if self.spill_broken and self._suffix.get(handle) == ".spill":
            raise OSError(errno.EIO, "input/output error")
        super().sync(handle)

    def sync_folder(self, path: Path) -> None:
        if self.names_lost and any(path.glob("*.spill")):
            self.names_lost -= 1
            raise OSError(errno.EIO, "input/output error")
        super().sync_folder(path)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def faulty(tmp_path: Path, disk: FaultyDisk) -> Iterator[LogWriter]:
    with LogWriter(tmp_path / "log", files=disk, background=False) as writer:
        writer.create_topic("t")
        yield writer
        disk.open_gate.set()
        disk.log_full = disk.spill_full = disk.spill_broken = False


def spilling(log: LogWriter, disk: FaultyDisk, **settings: object) -> FolderProducer:
    return folder_producer(log, linger_ms=0, overload="spill", name="p", files=disk, **settings)  # type: ignore[arg-type]


def send_until(error: type[Exception], producer: FolderProducer) -> list[Future[tuple[int, int]]]:
    """Send b"0", b"1" and so on, until a send raises."""
    futures = []
    for n in range(10_000):
        try:
            futures.append(producer.send("t", b"%d" % n))
        except error:
            return futures
    raise AssertionError("everything was taken")


def test_while_the_disk_of_the_log_is_full_records_wait_in_the_spill(
    faulty: LogWriter, disk: FaultyDisk
) -> None:
    with spilling(faulty, disk, compression="lz4") as producer:
        disk.log_full = True
        futures = [producer.send("t", b"%d" % n) for n in range(300)]
        bulk = producer.send_many("t", values=[b"%d" % n for n in range(300, 600)])
        producer.flush()
        assert producer.spilled == 600
        assert not futures[0].done()
        more = producer.send("t", b"600")
        producer.flush()
        assert producer.spilled == 601
        disk.log_full = False
        producer.flush()
        assert producer.spilled == 0
        assert [future.result(0) for future in [*futures, more]] == [
            (0, offset) for offset in [*range(300), 600]
        ]
        assert bulk.result(0) == 300
        assert producer.dropped == 0
        assert not list((faulty.folder / "spill" / "p").glob("*.spill"))
        assert producer.send("t", b"601").result(WAIT_S) == (0, 601)
    assert values(faulty) == [b"%d" % n for n in range(602)]


def test_what_is_spilled_when_the_producer_closes_is_appended_by_the_next_of_its_name(
    faulty: LogWriter, disk: FaultyDisk, tmp_path: Path
) -> None:
    folder = tmp_path / "elsewhere"
    disk.log_full = True
    with spilling(faulty, disk, spill_folder=folder) as producer:
        futures = [producer.send("t", b"%d" % n) for n in range(50)]
        with pytest.raises(FolderOwnedError):
            spilling(faulty, disk, spill_folder=folder)
    for future in futures:
        assert isinstance(future.exception(0), FencedError)
    with pytest.raises(FencedError, match="do not send it again"):
        futures[0].result()
    disk.log_full = False
    with spilling(faulty, disk, spill_folder=folder) as producer:
        for n in range(50, 100):
            producer.send("t", b"%d" % n)
    assert values(faulty) == [b"%d" % n for n in range(100)]


def test_what_finds_no_room_in_memory_follows_into_the_spill_in_order(
    faulty: LogWriter, disk: FaultyDisk
) -> None:
    faulty.create_topic("u", partitions=2)
    with spilling(faulty, disk, buffer_bytes=2000) as producer:
        disk.at_gate.clear()
        disk.open_gate.clear()
        futures = [producer.send("t", b"0")]
        assert disk.at_gate.wait(WAIT_S)
        for n in range(1, 400):
            futures.append(producer.send("t", b"%d" % n))
            producer.send("u", b"%d" % n, partition=n % 2)
        bulk = producer.send_many("t", values=[b"%d" % n for n in range(400, 800)])
        assert producer.spilled > 1000
        disk.open_gate.set()
        assert [future.result(WAIT_S) for future in futures] == [(0, n) for n in range(400)]
        assert bulk.result(WAIT_S) == 400
    assert values(faulty) == [b"%d" % n for n in range(800)]
    for number in range(2):
        assert values(faulty, "u", number) == [b"%d" % n for n in range(1, 400) if n % 2 == number]


def test_where_neither_disk_has_room_a_producer_that_spills_blocks(
    faulty: LogWriter, disk: FaultyDisk
) -> None:
    producer = spilling(faulty, disk, buffer_bytes=1000, block_timeout="100 ms")
    disk.log_full = disk.spill_full = True
    futures = send_until(OverloadError, producer)
    assert producer.spilled == producer.dropped == 0
    disk.spill_full = False
    futures.append(producer.send("t", b"%d" % len(futures)))
    producer.flush()
    assert producer.spilled == len(futures)
    disk.spill_full = True
    lost = [producer.send("t", b"lost"), producer.send("t", b"lost")]
    with pytest.raises(DiskFullError):
        producer.flush()
    assert [type(future.exception(0)) for future in lost] == [DiskFullError] * 2
    assert producer.dropped == 2
    disk.log_full = False
    producer.close()
    assert values(faulty) == [b"%d" % n for n in range(len(futures))]


def test_what_the_sender_holds_when_the_disk_fills_up_stays_before_what_was_spilled(
    faulty: LogWriter, disk: FaultyDisk
) -> None:
    with spilling(faulty, disk, buffer_bytes=1000) as producer:
        disk.at_gate.clear()
        disk.open_gate.clear()
        futures = [producer.send("t", b"0")]
        assert disk.at_gate.wait(WAIT_S)
        futures += [producer.send("t", b"%d" % n) for n in range(1, 100)]
        assert producer.spilled
        disk.log_full = True
        disk.open_gate.set()
        with pytest.raises(TimeoutError):
            futures[0].result(0.1)
        disk.log_full = False
        assert [future.result(WAIT_S) for future in futures] == [(0, n) for n in range(100)]
    assert values(faulty) == [b"%d" % n for n in range(100)]


def test_records_of_a_topic_that_goes_while_they_wait_are_told_and_counted(
    faulty: LogWriter, disk: FaultyDisk
) -> None:
    faulty.create_topic("u")
    producer = spilling(faulty, disk)
    disk.log_full = True
    lost = [producer.send("u", b"v") for _ in range(3)]
    kept = producer.send("t", b"v")
    producer.flush()
    faulty.delete_topic("u")
    disk.log_full = False
    with pytest.raises(UnknownTopicError):
        producer.flush()
    assert [type(future.exception(0)) for future in lost] == [UnknownTopicError] * 3
    assert kept.result(0) == (0, 0)
    assert producer.dropped == 3
    producer.close()


def test_a_spill_whose_disk_breaks_ends_the_producer_and_every_future(
    faulty: LogWriter, disk: FaultyDisk
) -> None:
    producer = spilling(faulty, disk, buffer_bytes=1000)
    disk.at_gate.clear()
    disk.open_gate.clear()
    first = producer.send("t", b"first")
    assert disk.at_gate.wait(WAIT_S)
    disk.spill_broken = True
    futures = send_until(SyncFailedError, producer)
    disk.open_gate.set()
    with suppress(MillstreamError):
        producer.close()
    assert first.result(WAIT_S) == (0, 0)
    assert futures
    assert all(isinstance(future.exception(WAIT_S), SyncFailedError) for future in futures)


def test_a_name_that_the_disk_failed_to_keep_is_not_tried_again(
    faulty: LogWriter, disk: FaultyDisk
) -> None:
    producer = spilling(faulty, disk)
    disk.log_full, disk.names_lost = True, 1
    futures = [producer.send("t", b"v")]
    with pytest.raises(SyncFailedError, match="input/output error"):
        producer.flush()
    with pytest.raises(
        SyncFailedError
    ):  # the disk would do it now, and what it lost would not be there
        futures += [producer.send("t", b"v") for _ in range(100)]
    with suppress(MillstreamError):
        producer.close()
    assert all(isinstance(future.exception(WAIT_S), SyncFailedError) for future in futures)


# -- the death of the process -------------------------------------------------------------------

# One process that loads the program once and forks a child for each life; a child sends from two
# threads, says which records are acknowledged and which are safe, and is killed.
LIVES = """
import errno, os, random, signal, sys, threading, time
from millstream.client.folder.producer import FolderProducer
from millstream.client.producer import ProducerSettings
from millstream.log.files import DiskFiles
from millstream.log.writer import LogWriter

folder, seed, lives = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

class Disk(DiskFiles):
    def __init__(self, rng):
        self.rng, self.full, self.segments = rng, False, set()
    def open(self, path, *, write=False, create=False):
        handle = super().open(path, write=write, create=create)
        (self.segments.add if path.suffix == ".log" else self.segments.discard)(handle)
        return handle
    def pwrite(self, handle, data, position):
        if handle in self.segments:
            if self.rng.random() < 0.2:
                self.full = not self.full
            if self.full:
                raise OSError(errno.ENOSPC, "no space left")
        return super().pwrite(handle, data, position)

def live(number, out):
    rng = random.Random(f"{seed}:{number}")
    disk = Disk(rng)
    with LogWriter(folder, segment_bytes=30_000, background=False,
            files=DiskFiles() if number == lives else disk) as log:
        if "t" not in log.topics():
            log.create_topic("t", partitions=2)
        settings = ProducerSettings(overload="spill", name="p", linger_ms=rng.choice([0, 1]),
            buffer_bytes=rng.choice([1000, 5000, 100_000]))
        producer = FolderProducer(log, settings, files=disk)
        if number == lives:
            producer.close()
            return
        sent = []
        for n in range(100_000):
            text = b"%d:%d" % (number, n)
            sent.append((text, producer.send("t", text, partition=n % 2)))
            if rng.random() < 0.02:
                producer.flush()
                os.write(out, b"".join(b"%s safe\\n" % text for text, _ in sent))
                sent = [one for one in sent if not one[1].done()]
            elif sent[0][1].done():
                text, future = sent.pop(0)
                os.write(out, b"%s %d %d\\n" % (text, *future.result()))

for number in range(lives + 1):
    rng = random.Random(f"{seed}.{number}")
    inside, out = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(inside)
        try:
            live(number, out)
        except BaseException as error:
            os.write(out, b"died of %r\\n" % error)
        os._exit(0)
    os.close(out)
    said, lines = b"", rng.randint(1, 1500)
    while chunk := os.read(inside, 4096):
        said += chunk
        if number < lives and said.count(b"\\n") >= lines:
            time.sleep(rng.random() * 0.02)
            os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(inside)
    sys.stdout.buffer.write(said[: said.rfind(b"\\n") + 1])
"""


def test_after_kill_9_what_was_acknowledged_or_safe_is_in_the_log_once_and_in_order(
    tmp_path: Path,
) -> None:
    lives, seed = 20, 3
    said = subprocess.run(
        [sys.executable, "-c", LIVES, str(tmp_path), str(seed), str(lives)],
        capture_output=True,
        timeout=280,
        check=True,
    ).stdout
    assert b"died" not in said, said[said.index(b"died") :][:500]
    acknowledged, safe = {}, set()
    for line in said.splitlines():
        text, *place = line.split()
        if place == [b"safe"]:
            safe.add(text)
        else:
            acknowledged[text] = (int(place[0]), int(place[1]))
    assert len({text.split(b":")[0] for text in safe | acknowledged.keys()}) == lives
    assert len(safe - acknowledged.keys()) > 100
    reader = LogReader(tmp_path)
    found = {}
    for number, (_, end) in enumerate(reader.offsets("t")):
        texts = [
            text
            for part in reader.read("t", number, 0, end, columns=("value",))
            for text in part["value"].to_pylist()
        ]
        order = [tuple(map(int, text.split(b":"))) for text in texts]
        assert order == sorted(set(order)), "twice, or out of order"
        found |= {text: (number, offset) for offset, text in enumerate(texts)}
    assert safe <= found.keys()
    assert acknowledged.items() <= found.items()
