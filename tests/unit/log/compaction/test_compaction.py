"""Compaction against a naive model, through crashes, full disks, damage and readers at work."""

from __future__ import annotations

import copy
import random
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from example_counts import some
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from kafka.record.default_records import DefaultRecordBatch as KafkaBatch
from kafka.record.default_records import DefaultRecordBatchBuilder as KafkaBuilder

from millstream.errors import DiskFullError, OutOfOrderSequenceError, SyncFailedError
from millstream.log import aborted, index, seal
from millstream.log.batch import (
    CONTROL,
    DELETE_HORIZON,
    LOG_APPEND_TIME,
    NO_PRODUCER,
    TRANSACTIONAL,
    BatchHeader,
    EncodedBatch,
    ProducerStamp,
    as_encoded,
    read_header,
    stamp,
    walk,
)
from millstream.log.compaction import cleaner, swap
from millstream.log.compaction.cleaner import compact_partition
from millstream.log.compaction.offset_map import OffsetMap
from millstream.log.compression import COMPRESSIONS, compress
from millstream.log.control import ControlDb
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.files import read_whole
from millstream.log.index import SparseIndex
from millstream.log.partition import Partition
from millstream.log.producer_identity import ProducerIdentity
from millstream.log.producers import PRODUCER_EXPIRES_MS, ProducerStates
from millstream.log.reader import LogReader
from millstream.log.removed_tombstones import Removal, note_removal
from millstream.log.scan import scan_segment
from millstream.log.segment import segment_name, segment_offsets
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition
from millstream.testing.disk import SimulatedCrash, SimulatedDisk

pytestmark = pytest.mark.usefixtures("_close_index_entries")

FOLDER = Path("/log")
T = TopicPartition("t", 0)
RETENTION_MS = 1_000  # of tombstones
LEFTOVERS = (".cleaned", ".merged", ".new")


@pytest.fixture(scope="module")
def _close_index_entries():
    """Let segments of a few hundred bytes have an index, as those of many megabytes do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "INDEX_BYTES", 100)
        yield


@dataclass(frozen=True)
class Sent:
    """One record as the model knows it. ``passes`` counts those before it was appended."""

    timestamp_ms: int
    key: bytes
    value: bytes | None
    transaction: int | None
    passes: int


class HookedDisk(SimulatedDisk):
    """Calls ``hook`` after every operation that changes something."""

    hook: Callable[[], None] | None = None

    def step(self) -> None:
        super().step()
        if self.hook is not None:
            self.hook()


class World:
    """A compacted topic on a simulated disk, and a model of it that is too simple to be wrong."""

    def __init__(self, segment_bytes: int = 500, **settings: str) -> None:
        self.disk = HookedDisk(0)
        self.control = new_control()
        self.now_ms = 1_000_000
        self.sent: dict[int, Sent] = {}
        self.committed: dict[int, bool | None] = {}  # by transaction; None while it is open
        self.passes: list[int] = []
        self.named: ProducerIdentity | None = None
        self.open: int | None = None
        self.sequence: dict[ProducerIdentity, int] = {}
        self.last: dict[ProducerIdentity, list[tuple[EncodedBatch, int]]] = {}
        self.writer = self.opened()
        self.writer.create_topic(
            "t",
            settings={
                "cleanup.policy": "compact",
                "segment.bytes": str(segment_bytes),
                "min.cleanable.dirty.ratio": "0",
                "delete.retention.ms": str(RETENTION_MS),
                **{name.replace("_", "."): value for name, value in settings.items()},
            },
        )

    def opened(self) -> LogWriter:
        return LogWriter(
            FOLDER,
            files=self.disk,
            control=self.control,
            clock_ms=lambda: self.now_ms,
            sync_threads=1,
            background=False,
        )

    def copy(self) -> World:
        """Return a closed world's twin."""
        twin = copy.copy(self)
        twin.disk = copy.deepcopy(self.disk)
        twin.control = new_control()
        self.control._connection.backup(twin.control._connection)
        for name in ("sent", "committed", "passes", "sequence", "last"):
            setattr(twin, name, copy.copy(getattr(self, name)))
        twin.writer = twin.opened()
        return twin

    @property
    def partition(self) -> Partition:
        return self.writer.partition(T)

    @property
    def folder(self) -> Path:
        return self.partition.folder

    # -- what happens -------------------------------------------------------------------------

    def append(self, rows: list[SimpleRecord], compression: str = "none", **how: Any) -> int:
        return self.append_batch(compress(encode_records(rows), compression), rows, **how)

    def append_batch(
        self, batch: EncodedBatch, rows: list[SimpleRecord], transaction: int | None = None
    ) -> int:
        (offset,) = self.writer.append("t", 0, [batch])
        for place, row in enumerate(rows):
            assert offset + place not in self.sent
            self.sent[offset + place] = Sent(*row[:3], transaction, len(self.passes))
        return offset

    def append_as(
        self, identity: ProducerIdentity, rows: list[SimpleRecord], compression: str
    ) -> None:
        """Append as an idempotent producer; inside the open transaction if it is the named one."""
        sequence = self.sequence.get(identity, 0)
        inside = identity == self.named
        batch = compress(encode_records(rows), compression)
        made = stamp(batch, ProducerStamp(*identity, sequence), transactional=inside)
        offset = self.append_batch(made, rows, self.open if inside else None)
        self.sequence[identity] = sequence + len(rows)
        self.last[identity] = [*self.last.get(identity, []), (made, offset)][-5:]

    def begin(self) -> None:
        if self.named is None:
            self.named = self.writer.transactions.register("named")
        self.writer.transactions.begin(self.named)
        self.open = len(self.committed)
        self.committed[self.open] = None

    def end(self, *, commit: bool) -> None:
        assert self.open is not None
        self.named = self.writer.transactions.end(self.named, commit=commit)
        self.committed[self.open] = commit
        self.open = None

    def roll(self) -> None:
        def roll() -> None:
            if self.partition.active_size:
                self.partition.roll()

        self.writer.exclusively(roll)

    def compact(self, **limits: int) -> int:
        self.passes.append(self.now_ms)
        return compact_partition(self.writer, self.partition, self.now_ms, **limits)

    def restart(self, *, how: str, drop_seals: bool = False) -> None:
        if how == "close":
            self.writer.close()
        if drop_seals:
            for name in self.disk.names(self.folder):
                if name.endswith(seal.SUFFIX):
                    self.disk.remove(self.folder / name)
            self.disk.sync_folder(self.folder)
        self.disk.restart(power_lost=how == "power")
        self.reopen()

    def reopen(self) -> None:
        self.writer = self.opened()
        if self.open is not None:  # its producer lived in the owner's process
            self.committed[self.open] = False
        self.named = self.open = None

    # -- what must hold -----------------------------------------------------------------------

    def is_visible(self, sent: Sent) -> bool:
        return sent.transaction is None or self.committed[sent.transaction] is True

    def may_be_gone(self, sent: Sent) -> bool:
        """Return whether a tombstone has been met by one pass, and its horizon by a later one."""
        later = self.passes[sent.passes :]
        return sent.value is None and bool(later) and later[-1] - later[0] >= RETENTION_MS

    def latest(self, end: int) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for offset, sent in sorted(self.sent.items()):
            if offset < end and self.is_visible(sent):
                found[sent.key] = offset
        return found

    def check(self) -> None:
        reader = LogReader(FOLDER, files=self.disk, control=self.control)
        ((start, end),) = reader.offsets("t")
        assert start == 0
        found = self.check_rows(list(reader.read("t", 0, 0, end)), end)
        self.check_removals(reader, found, end)
        self.check_look_ups(reader, found, end)

    def check_rows(self, batches: list[pa.RecordBatch], end: int) -> list[int]:
        """Check what was read of [0, end); return the offsets."""
        rows = [row for batch in batches for row in rows_of(batch)]
        offsets = [offset for offset, *_ in rows]
        assert offsets == sorted(set(offsets))
        left: dict[bytes, int] = {}
        for offset, timestamp_ms, key, value in rows:
            sent = self.sent[offset]
            assert self.is_visible(sent), f"offset {offset} was taken back"
            assert (timestamp_ms, key, value) == (sent.timestamp_ms, sent.key, sent.value)
            left[key] = offset
        for key, offset in self.latest(end).items():
            if not self.may_be_gone(self.sent[offset]):
                assert offset in offsets, f"the latest record of {key!r} is lost"
            # Without its tombstone, no older record of a key may be there.
            assert left.get(key, offset) == offset, f"{key!r} has come back"
        return offsets

    def check_removals(self, reader: LogReader, offsets: list[int], end: int) -> None:
        """Check that it is noted which deletions no reader sees any more."""
        removals = reader.removed_tombstones("t").get(0, ())
        numbers, noted = [number for number, _ in removals], [at for _, at in removals]
        assert (numbers, noted) == (sorted(set(numbers)), sorted(set(noted), reverse=True))
        gone = set(self.latest(end).values()) - set(offsets)
        assert max(gone, default=-1) <= max(noted, default=-1)
        assert all(self.may_be_gone(self.sent[at]) for at in noted)

    def check_look_ups(self, reader: LogReader, offsets: list[int], end: int) -> None:
        rng = random.Random(end)
        for _ in range(3):
            low = rng.randint(0, end)
            high, reported = rng.randint(low, end), []
            part = list(reader.read("t", 0, low, high, columns=("offset",), tally=reported.append))
            seen = [offset for batch in part for offset in batch["offset"].to_pylist()]
            assert seen == [offset for offset in offsets if low <= offset < high]
            assert sum(reported) == len(seen)
            if offsets and False not in self.committed.values():
                timestamp_ms = self.sent[rng.choice(offsets)].timestamp_ms + rng.choice([0, 1])
                first = (one for one in offsets if self.sent[one].timestamp_ms >= timestamp_ms)
                assert reader.offset_for_time("t", 0, timestamp_ms) == next(first, end)

    def check_files(self, *, opened: bool = True) -> None:
        """Check every file by itself: strict continuity, Kafka's reader, and no seal that lies."""
        names = self.disk.names(self.folder)
        if opened:
            assert not [name for name in names if name.endswith(LEFTOVERS)]
        bases = segment_offsets(names)
        for base, following in zip(bases, [*bases[1:], None], strict=True):
            path = self.folder / segment_name(base)
            data = read_whole(self.disk, path)
            headers = list(walk(data, base))
            assert sum(header.size for _, header in headers) == len(data)
            for at, header in headers:
                self.check_batch(data[at : at + header.size], header)
            found = seal.read(self.disk, path, len(data))
            if found:
                self.check_seal(found, path, base)
                assert not opened or found.aborted == len(aborted.read(self.disk, path))
            if opened and following is not None:
                assert headers[-1][1].next_offset == following
                self.check_index(path, base, dict(headers))

    def check_seal(self, found: seal.Seal, path: Path, base: int) -> None:
        scan = scan_segment(self.disk, path, base, ProducerStates())
        assert (found.next_offset, found.chain) == (scan.end_offset, scan.index.chain)

    def check_index(self, path: Path, base: int, headers: dict[int, BatchHeader]) -> None:
        entries = SparseIndex(read_whole(self.disk, path.with_suffix(".idx")), base)
        assert entries.plausible
        for place in range(len(entries)):
            offset, position = entries._entry(place)
            assert headers[position].base_offset == offset

    def check_batch(self, data: bytes, header: BatchHeader) -> None:
        batch = KafkaBatch(data)
        assert batch.validate_crc()
        records = list(batch)
        assert len(records) == header.record_count
        if header.attributes & CONTROL:
            return
        for record in records:
            sent = self.sent[record.offset]
            assert (record.timestamp, record.key, record.value) == (
                sent.timestamp_ms,
                sent.key,
                sent.value,
            )

    def check_producers(self, before: dict[int, Any]) -> None:
        after = self.partition.producers.entries()
        for producer_id, entry in before.items():
            assert after[producer_id].producer_epoch == entry.producer_epoch
            assert after[producer_id].batches == entry.batches
            assert after[producer_id].open_since is None

    def check_complete(self) -> None:
        """Two passes, far enough apart, over everything leave the latest values and nothing else."""
        self.writer.alter_topic("t", settings={"min.cleanable.dirty.ratio": "0"})
        self.roll()
        self.compact()
        self.now_ms += RETENTION_MS
        self.compact()
        self.check()
        self.check_files()
        reader = LogReader(FOLDER, files=self.disk, control=self.control)
        ((_, end),) = reader.offsets("t")
        latest = self.latest(end)
        live = sorted(offset for offset in latest.values() if self.sent[offset].value is not None)
        assert end == self.partition.log_end_offset
        found = reader.read("t", 0, 0, end, columns=("offset",))
        assert [offset for batch in found for offset in batch["offset"].to_pylist()] == live


def new_control() -> ControlDb:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    return ControlDb(connection, write=True)


def rows_of(batch: pa.RecordBatch) -> list[tuple[int, int, bytes, bytes]]:
    times = batch["timestamp"].cast(pa.int64()).to_pylist()
    columns = (batch["offset"].to_pylist(), times)
    return list(zip(*columns, batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True))


def headers_in(world: World) -> list[BatchHeader]:
    found = []
    for base in segment_offsets(world.disk.names(world.folder)):
        data = read_whole(world.disk, world.folder / segment_name(base))
        found += [header for _, header in walk(data, base)]
    return found


# -- against the model ----------------------------------------------------------------------------


KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"", b"long" * 30])
VALUES = st.none() | st.sampled_from([b"", b"x", b"y" * 40, b"z" * 300])
RECORDS = st.lists(
    st.builds(SimpleRecord, st.integers(900_000, 1_100_000), KEYS, VALUES), min_size=1, max_size=6
)


class CompactedTopic(RuleBasedStateMachine):
    """Any history of appends, transactions, passes and restarts."""

    @initialize(
        segment_bytes=st.sampled_from([200, 500, 2000]), ratio=st.sampled_from(["0", "0.5"])
    )
    def start(self, segment_bytes: int, ratio: str) -> None:
        self.world = World(segment_bytes, min_cleanable_dirty_ratio=ratio)
        self.producer = self.world.writer.transactions.register()

    @rule(rows=RECORDS, compression=st.sampled_from(COMPRESSIONS))
    def append(self, rows: list[SimpleRecord], compression: str) -> None:
        self.world.append(rows, compression)

    @rule(rows=RECORDS)
    def append_idempotently(self, rows: list[SimpleRecord]) -> None:
        self.world.append_as(self.producer, rows, "none")

    @precondition(lambda self: self.world.open is None)
    @rule()
    def begin(self) -> None:
        self.world.begin()

    @precondition(lambda self: self.world.open is not None)
    @rule(rows=RECORDS, compression=st.sampled_from(["none", "zstd"]))
    def append_to_the_transaction(self, rows: list[SimpleRecord], compression: str) -> None:
        self.world.append_as(self.world.named, rows, compression)

    @precondition(lambda self: self.world.open is not None)
    @rule(commit=st.booleans())
    def end(self, commit: bool) -> None:
        self.world.end(commit=commit)

    @rule()
    def roll(self) -> None:
        self.world.roll()

    @rule(
        after_ms=st.sampled_from([0, RETENTION_MS // 2, RETENTION_MS]),
        keys_max=st.sampled_from([1, 1000]),
    )
    def compact(self, after_ms: int, keys_max: int) -> None:
        self.world.now_ms += after_ms
        self.world.compact(keys_max=keys_max)
        self.world.check()
        self.world.check_files()

    @rule(how=st.sampled_from(["close", "kill", "power"]), drop_seals=st.booleans())
    def restart(self, how: str, drop_seals: bool) -> None:
        before = dict(self.world.partition.producers.entries())
        self.world.restart(how=how, drop_seals=drop_seals)
        self.world.check_producers(before)
        self.world.check()

    @precondition(lambda self: self.world.last.get(self.producer))
    @rule()
    def send_again(self) -> None:
        end = self.world.partition.log_end_offset
        for batch, offset in self.world.last[self.producer]:
            assert self.world.writer.append("t", 0, [batch]) == [offset]
        assert self.world.partition.log_end_offset == end

    def teardown(self) -> None:
        if hasattr(self, "world"):
            if self.world.open is not None:
                self.world.end(commit=False)
            self.world.check_complete()


CompactedTopic.TestCase.settings = settings(
    deadline=None,
    max_examples=some(60),
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
)
test_whatever_happens_the_last_record_of_each_key_stays_at_its_offset = CompactedTopic.TestCase


# -- crashes --------------------------------------------------------------------------------------


def eventful(seed: int, appends: int = 4) -> World:
    """Return a world with everything that a pass can meet; it has had one pass already."""
    rng = random.Random(seed)
    world = World(400)
    producer = world.writer.transactions.register()

    def rows() -> list[SimpleRecord]:
        return [
            SimpleRecord(
                world.now_ms,
                b"k%d" % rng.randrange(6),
                rng.choice([None, b"v%d" % rng.randrange(100), b"w" * 90]),
            )
            for _ in range(rng.randint(1, 3))
        ]

    for round_ in range(2):
        for _ in range(appends):
            world.now_ms += 10
            world.append(rows(), rng.choice(["none", "gzip"]))
            world.append_as(producer, rows(), "none")
            if world.open is None:
                world.begin()
            world.append_as(world.named, rows(), "none")
            if rng.random() < 0.5:
                world.end(commit=rng.random() < 0.5)
        if world.open is not None:
            world.end(commit=True)
        world.roll()
        if round_ == 0:
            assert world.compact() > 1
            world.now_ms += RETENTION_MS
    return world


@pytest.fixture(scope="module")
def closed() -> World:
    world = eventful(1)
    world.writer.close()
    world.check_files()
    return world


def crash(closed: World, step: int, *, power_lost: bool, luck: int = 0) -> bool:
    """Let a pass crash at its n-th operation, and see that nothing is lost; False if it has no n."""
    world = closed.copy()
    world.disk._rng = random.Random(luck)
    before = dict(world.partition.producers.entries())
    world.disk.crash_at = world.disk.steps + step
    try:
        world.compact()
    except SimulatedCrash:
        pass
    else:
        return False
    world.disk.restart(power_lost=power_lost)
    world.check()  # before anybody has opened it for writing
    world.check_files(opened=False)
    world.reopen()
    world.check_producers(before)
    world.check()
    world.check_files()
    world.check_complete()
    return True


def test_a_crash_in_a_pass_leaves_old_or_new_segments_and_no_mixture(closed: World) -> None:
    step = 1
    while crash(closed, step, power_lost=bool(step % 2), luck=step):
        step += 7
    assert step > 100


@pytest.mark.thorough
@pytest.mark.parametrize("first", [1, 2])
def test_a_crash_at_every_operation_of_a_pass_leaves_old_or_new_segments_and_no_mixture(
    first: int,
) -> None:
    """At the odd ones of one world the program dies; at the even ones of another power is lost, too."""
    world = eventful(first, 5)
    world.writer.close()
    step = first
    while crash(world, step, power_lost=first == 2, luck=step):
        step += 2
    assert step > 200


def test_a_seal_is_never_believed_of_a_file_that_merely_has_its_size() -> None:
    world = World(10_000)
    world.append([row(b"a", b"vv")])
    world.append([row(b"abcde"[n : n + 1], None) for n in range(5)])
    world.roll()
    world.writer.close()
    for luck in range(6):
        step = 1
        while crash(world, step, power_lost=luck > 0, luck=luck):
            step += 1
    assert step > 10
    world.reopen()
    size = world.partition.sealed[0].seal.size
    assert world.compact() == 1
    assert world.partition.sealed[0].seal.size == size


def test_a_crash_while_segments_are_opened_after_a_crash_is_survived_as_well(
    closed: World,
) -> None:
    for step in range(3, 100, 16):
        world = closed.copy()
        world.disk.crash_at = world.disk.steps + step
        with pytest.raises(SimulatedCrash):
            world.compact()
        world.disk.restart(power_lost=True)
        for again in range(1, 40, 3):
            world.disk.crash_at = again
            try:
                world.reopen()
            except SimulatedCrash:
                world.disk.restart(power_lost=True)
                world.check()
            else:
                break
        world.disk.crash_at = None
        world.restart(how="kill")
        world.check()
        world.check_files()


def test_a_full_disk_leaves_the_segments_and_is_told_and_a_later_pass_goes_on(
    closed: World,
) -> None:
    reported = 0
    for room in range(0, 300, 10):
        world = closed.copy()
        world.disk.capacity_bytes = world.disk._used() + room
        try:
            world.compact()
        except DiskFullError as error:
            assert str(world.folder) in str(error)
            reported += 1
        world.check()
        world.check_files()
        world.disk.capacity_bytes = None
        world.check_complete()
        world.restart(how="kill")
        world.check()
        world.check_files()
    assert 3 < reported < 30


def test_a_disk_that_fails_a_sync_loses_nothing(closed: World) -> None:
    reported = 0
    for step in range(1, 150, 4):
        world = closed.copy()
        world.disk.fail_sync_at = world.disk.steps + step
        try:
            world.compact()
        except DiskFullError:
            reported += 1
        world.check()
        world.disk.restart(power_lost=True)
        world.reopen()
        world.check()
        world.check_files()
    assert reported > 3


def test_nothing_is_compacted_after_a_sync_of_the_log_failed(closed: World) -> None:
    world = closed.copy()
    world.disk.fail_sync_at = world.disk.steps
    with pytest.raises(SyncFailedError):
        world.append([row(b"a")])
    before = headers_in(world)
    with pytest.raises(SyncFailedError):
        world.compact()
    assert headers_in(world) == before


def test_what_a_pass_could_not_remove_is_written_over_by_the_next(closed: World) -> None:
    world = closed.copy()
    for segment in world.partition.sealed:
        for ending in LEFTOVERS[:2]:
            path = world.partition.path_of(segment).with_suffix(ending)
            handle = world.disk.open(path, write=True, create=True)
            world.disk.pwrite(handle, b"x" * 5000, 0)
    world.compact()
    world.check()
    for segment in world.partition.sealed:
        assert segment.seal.size <= 400


def test_a_folder_that_cannot_be_synced_during_the_swap_stops_the_log(closed: World) -> None:
    world = closed.copy()
    renamed = []

    def rename(source: Path, target: Path) -> None:
        SimulatedDisk.rename(world.disk, source, target)
        renamed.append(target)

    def sync_folder(path: Path) -> None:
        if renamed and renamed[-1].suffix == ".log":
            raise OSError(5, "input/output error")
        SimulatedDisk.sync_folder(world.disk, path)

    world.disk.rename, world.disk.sync_folder = rename, sync_folder
    with pytest.raises(SyncFailedError, match="failed to keep the names of the files"):
        world.compact()
    with pytest.raises(SyncFailedError):
        world.append([SimpleRecord(0, b"a", b"b")])
    world.check()


# -- readers --------------------------------------------------------------------------------------


def test_what_is_read_at_any_moment_of_a_pass_is_right() -> None:
    world = eventful(2)
    steps = []

    def look() -> None:
        steps.append(world.disk.steps)
        world.check()

    world.disk.hook = look
    assert world.compact() > 3
    world.disk.hook = None
    assert len(steps) > 100


class Meddling:
    """A file system on which something happens before the n-th operation of its user."""

    def __init__(self, files: SimulatedDisk, at: int, happening: Callable[[], object]) -> None:
        self._files = files
        self._left = at
        self._happening = happening

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._files, name)

        def call(*values: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self._happening()
            return method(*values, **named)

        return call

    @property
    def happened(self) -> bool:
        return self._left <= 0


def test_a_pass_at_any_moment_of_a_reader_is_not_noticed(closed: World) -> None:
    for at in range(1, 10_000):
        world = closed.copy()
        files = Meddling(world.disk, at, world.compact)
        reader = LogReader(FOLDER, files=files, control=world.control)
        ((_, end),) = reader.offsets("t")
        world.passes.append(world.now_ms)  # it may be at any moment of what follows
        world.check_rows(list(reader.read("t", 0, 0, end, bytes_max=200)), end)
        if not files.happened:
            break
    assert at > 30


def test_what_was_aborted_in_a_segment_that_cannot_be_cleaned_stays_hidden() -> None:
    world = World(10_000)
    world.begin()
    world.append_as(world.named, [row(b"aborted")], "none")
    world.append([row(b"to be damaged")])
    world.roll()
    world.append([row(b"b")])
    world.roll()
    world.end(commit=False)
    world.roll()
    damage(world, 0, 150)
    world.restart(how="kill", drop_seals=True)
    assert world.partition.sealed[0].seal.damaged == ((1, 2),)
    world.writer.close()
    for at in range(1, 10_000):
        twin = world.copy()
        files = Meddling(twin.disk, at, twin.compact)
        reader = LogReader(FOLDER, files=files, control=twin.control)
        assert reader.offsets("t") == [(0, 4)]
        assert list(reader.read("t", 0, 0, 1)) == []
        if not files.happened:
            break
    assert at > 10


def test_a_slow_reader_sees_every_offset_once_in_order_through_passes_and_merges() -> None:
    world = World(400)
    for number in range(120):
        world.append([row(b"k%d" % (number % (number % 50 + 1)), b"x" * 60)])
    reader = LogReader(FOLDER, files=world.disk, control=world.control)
    ((_, end),) = reader.offsets("t")
    segments = len(world.partition.sealed)
    seen: list[pa.RecordBatch] = []
    for number, batch in enumerate(reader.read("t", 0, 0, end, bytes_max=100)):
        seen.append(batch)
        world.append([row(b"new%d" % number, b"x" * 90)])
        world.compact()
    assert number > 20
    assert sum(segment.base_offset < end for segment in world.partition.sealed) < segments - 9
    world.check_rows(seen, end)


# -- what goes when -------------------------------------------------------------------------------


def offsets_in(world: World) -> list[int]:
    reader = LogReader(FOLDER, files=world.disk, control=world.control)
    ((start, end),) = reader.offsets("t")
    found = reader.read("t", 0, start, end, columns=("offset",))
    return [offset for batch in found for offset in batch["offset"].to_pylist()]


def row(key: bytes, value: bytes | None = b"v", timestamp_ms: int = 5) -> SimpleRecord:
    return SimpleRecord(timestamp_ms, key, value)


def test_a_tombstone_stays_until_its_horizon_and_then_goes_with_a_pass_of_its_own() -> None:
    world = World()
    world.append([row(b"a"), row(b"b")])
    world.append([row(b"a", None, 7), row(b"b", b"w", 9)])
    world.roll()
    world.compact()
    assert offsets_in(world) == [2, 3]
    (header,) = [one for one in headers_in(world) if one.record_count]
    horizon_ms = world.now_ms + RETENTION_MS
    assert header.attributes & DELETE_HORIZON
    assert (header.base_timestamp_ms, header.max_timestamp_ms) == (horizon_ms, 9)
    assert world.partition.sealed[0].seal.horizon_ms == horizon_ms
    for wait_ms, left in ((RETENTION_MS - 1, [2, 3]), (1, [3])):
        world.now_ms += wait_ms
        assert world.compact() == (left == [3])
        assert offsets_in(world) == left
    world.now_ms += 10 * RETENTION_MS
    assert world.compact() == 0
    assert world.partition.sealed[0].seal.horizon_ms is None
    world.check()


def test_removals_of_tombstones_are_numbered_and_those_kept_that_no_later_one_covers() -> None:
    world = World(10_000)

    def noted() -> dict[int, tuple[Removal, ...]]:
        reader = LogReader(FOLDER, files=world.disk, control=world.control)
        return dict(reader.removed_tombstones("t"))

    note_removal(world.control, TopicPartition("t", 1), 3)
    for offset, kept in (
        (7, [(1, 7)]),
        (5, [(1, 7), (2, 5)]),
        (5, [(1, 7), (3, 5)]),
        (6, [(1, 7), (4, 6)]),
        (9, [(5, 9)]),
    ):
        note_removal(world.control, T, offset)
        assert noted() == {0: tuple(Removal(*one) for one in kept), 1: (Removal(1, 3),)}
    world.writer.delete_topic("t")
    world.writer.create_topic("t")
    assert noted() == {}
    note_removal(world.control, TopicPartition("other", 0), 3)  # deleted meanwhile
    assert noted() == {}


def test_a_folder_that_its_owner_has_not_opened_since_tells_of_no_removal() -> None:
    world = World(10_000)
    with world.control.commit() as connection:
        connection.execute("DROP TABLE removed_tombstones")
    reader = LogReader(FOLDER, files=world.disk, control=world.control)
    assert reader.removed_tombstones("t") == {}


def test_a_tombstone_goes_only_once_that_is_noted() -> None:
    world = World()
    world.append([row(b"a"), row(b"b")])
    world.append([row(b"a", None), row(b"b", b"w"), row(b"c", None), row(b"d", b"x")])
    world.roll()
    world.compact()
    world.now_ms += RETENTION_MS
    world.check()
    reader = LogReader(FOLDER, files=world.disk, control=world.control)
    with pytest.MonkeyPatch.context() as patch:

        def fail(*_: object) -> None:
            raise DiskFullError("no room")

        patch.setattr(swap, "note_removal", fail)
        with pytest.raises(DiskFullError):
            world.compact()
    assert (offsets_in(world), reader.removed_tombstones("t")) == ([2, 3, 4, 5], {})
    world.check_files()

    def die() -> None:
        raise SimulatedCrash

    for before_commit, noted in ((die, {}), (lambda: None, {0: (Removal(1, 4),)})):
        world.control._before_commit = before_commit
        if before_commit is die:
            with pytest.raises(SimulatedCrash):
                world.compact()
        else:
            world.compact()
        assert reader.removed_tombstones("t") == noted
        assert offsets_in(world) == ([3, 5] if noted else [2, 3, 4, 5])
        world.check()
        world.check_files()


def test_a_pass_begins_when_enough_is_dirty() -> None:
    world = World(10_000, min_cleanable_dirty_ratio="0.5")
    for _ in range(2):
        world.append([row(b"k%d" % number, b"x" * 50) for number in range(20)])
        world.roll()
        assert world.compact() in (0, 1)  # all of it is dirty; the first has nothing to lose
    clean = world.partition.contents().size_bytes
    world.append([row(b"k1", b"x" * (clean // 3))])
    world.roll()
    assert world.compact() == 0
    world.append([row(b"k2", b"x" * clean)])
    world.roll()
    assert world.compact() == 1
    world.check()


def test_segments_that_are_young_or_hold_an_open_transaction_and_those_behind_stay() -> None:
    world = World(min_compaction_lag_ms="100")
    world.append([row(b"a", timestamp_ms=world.now_ms - 200)])
    world.append([row(b"a", timestamp_ms=world.now_ms - 150)])
    world.roll()
    world.append([row(b"a", timestamp_ms=world.now_ms)])
    world.roll()
    world.compact()
    assert offsets_in(world) == [1, 2]
    world.now_ms += 100
    world.compact()
    assert offsets_in(world) == [2]
    world.begin()
    world.append_as(world.named, [row(b"a")], "none")
    world.append([row(b"a")])
    world.roll()
    world.now_ms += 1000
    world.compact()
    assert offsets_in(world) == [2]
    world.end(commit=False)
    world.compact()
    assert offsets_in(world) == [4]
    world.check()


def test_small_neighbours_are_merged_up_to_the_size_of_a_segment() -> None:
    world = World(1000)
    for number in range(40):
        world.append([row(b"k%d" % (number % 7), b"x" * 200)])
    world.roll()
    assert len(world.partition.sealed) > 9
    world.compact()
    sealed = world.partition.sealed
    assert [segment.seal.size <= 1000 for segment in sealed] == [True] * len(sealed)
    assert len(sealed) < 5
    world.check()
    world.check_files()
    world.restart(how="close")
    assert [one.seal for one in world.partition.sealed] == [one.seal for one in sealed]


def test_a_map_that_is_full_leaves_the_rest_for_later_passes() -> None:
    world = World(300)
    for number in range(60):
        world.append([row(b"k%d" % (number % 30), b"x" * 40)])
    world.roll()
    passes = 0
    while any(segment.seal.cleaned_ms is None for segment in world.partition.sealed):
        world.compact(keys_max=3, key_bytes_max=1000)
        world.check()
        passes += 1
    assert passes > 5
    assert offsets_in(world) == list(range(30, 60))


def test_a_pass_that_is_told_to_stop_leaves_whole_segments() -> None:
    world = eventful(4)
    for allowed in range(12):
        wanted_keys = iter(range(allowed))
        compact_partition(
            world.writer,
            world.partition,
            world.now_ms,
            stopped=lambda wanted_keys=wanted_keys: next(wanted_keys, None) is None,
        )
        world.passes.append(world.now_ms)
        world.check()
        world.check_files()
    world.check_complete()


def test_housekeeping_compacts() -> None:
    world = World(300)
    for number in range(20):
        world.append([row(b"k", b"%d" % number * 40)])
    report = world.writer.maintenance.run_pass(world.now_ms, running_ms=0)
    assert report.segments_compacted > 3
    assert len(offsets_in(world)) < 5


# -- transactions and producers -------------------------------------------------------------------


def test_markers_go_when_their_records_are_gone_and_a_horizon_has_passed() -> None:
    world = World(10_000)
    for commit in (True, False):
        world.begin()
        world.append_as(world.named, [row(b"a"), row(b"b")], "none")
        world.end(commit=commit)
    world.roll()
    world.compact()

    def left() -> list[tuple[bool, bool, int]]:
        return [
            (
                bool(header.attributes & CONTROL),
                bool(header.attributes & DELETE_HORIZON),
                header.record_count,
            )
            for header in headers_in(world)
        ]

    # What was committed stays with its marker. The end of what was aborted ends nothing any more;
    # its batch stays empty because its producer may send it again.
    assert left() == [(False, False, 2), (True, False, 1), (False, False, 0), (True, True, 1)]
    assert not world.disk.exists(world.folder / f"{0:020d}.aborted")
    world.append([row(b"a"), row(b"b")])
    world.roll()
    for _ in range(2):
        world.now_ms += RETENTION_MS
        world.compact()
    assert left() == [(False, False, 0), (False, False, 0), (False, False, 0), (False, False, 2)]
    world.restart(how="kill", drop_seals=True)
    assert world.partition.producers.open_transactions() == {}
    world.check()
    world.begin()
    world.append_as(world.named, [row(b"c")], "none")
    world.end(commit=True)
    world.check()


def test_a_transaction_over_several_segments_is_ended_also_when_only_some_of_it_is_left() -> None:
    for commit in (True, False):
        world = World(10_000)
        world.begin()
        world.append_as(world.named, [row(b"a")], "none")
        world.roll()
        world.append_as(world.named, [row(b"b")], "none")
        world.roll()
        world.end(commit=commit)
        world.append([row(b"a")])
        world.roll()
        for _ in range(3):
            world.compact()
            world.now_ms += RETENTION_MS
            world.check()
            for drop_seals in (False, True):
                world.restart(how="kill", drop_seals=drop_seals)
                assert world.partition.producers.open_transactions() == {}
                world.check()
        expected = [1, 3] if commit else [3]
        assert offsets_in(world) == expected


@pytest.mark.parametrize("commit", [False, True])
def test_the_end_of_a_transaction_in_another_segment_goes_in_its_time_but_no_sooner(
    commit: bool,
) -> None:
    world = World(60)  # nothing fits together
    world.begin()
    for key in (b"a", b"b"):
        world.append_as(world.named, [row(key)], "none")
    world.end(commit=commit)
    world.roll()
    for _ in range(2):
        world.append([row(b"a")])
        world.roll()
        world.compact()
        world.now_ms += RETENTION_MS
    marked = TRANSACTIONAL | CONTROL if commit else 0
    assert [header.attributes for header in headers_in(world)] == [
        0,
        TRANSACTIONAL if commit else 0,
        marked,
        0,
        0,
    ]
    world.restart(how="kill", drop_seals=True)
    assert world.partition.producers.open_transactions() == {}
    world.check()


def test_a_producer_is_known_though_retention_removed_what_it_sent() -> None:
    world = World(10_000, cleanup_policy="compact,delete")
    producer = world.writer.transactions.register()
    world.append_as(producer, [row(b"a")], "none")
    world.roll()
    for _ in range(2):
        world.append([row(b"b")])
    world.roll()
    world.writer.delete_records(T, 1)
    assert world.compact() == 1
    world.restart(how="kill")
    ((batch, offset),) = world.last[producer]
    assert world.writer.append("t", 0, [batch]) == [offset]


def test_a_batch_that_comes_again_is_known_without_its_records_and_without_seals() -> None:
    world = World(300)
    producer = world.writer.transactions.register()
    for number in range(8):
        world.append_as(producer, [row(b"a", b"%d" % number), row(b"b")], "gzip")
    world.append([row(b"a"), row(b"b")])
    world.roll()
    world.compact()
    assert offsets_in(world) == [16, 17]
    kept = [header for header in headers_in(world) if header.producer_id >= 0]
    assert [header.base_offset for header in kept] == [6, 8, 10, 12, 14]
    for drop_seals in (False, True):
        world.restart(how="kill", drop_seals=drop_seals)
        for batch, offset in world.last[producer]:
            assert world.writer.append("t", 0, [batch]) == [offset]
    with pytest.raises(OutOfOrderSequenceError):
        world.sequence[producer] += 1
        world.append_as(producer, [row(b"c")], "none")


def test_what_was_kept_for_a_producer_goes_when_the_producer_is_forgotten() -> None:
    world = World(10_000)
    producer = world.writer.transactions.register()
    world.append_as(producer, [row(b"a")], "none")
    world.append([row(b"a", timestamp_ms=world.now_ms)])
    world.roll()
    world.compact()
    assert sum(header.producer_id >= 0 for header in headers_in(world)) == 1
    world.now_ms += 2 * PRODUCER_EXPIRES_MS
    world.partition.producers.forget_idle(world.now_ms - PRODUCER_EXPIRES_MS)
    world.append([row(b"a", timestamp_ms=world.now_ms)])
    world.roll()
    world.compact()
    assert [header.producer_id for header in headers_in(world)] == [-1, -1]
    world.check()


# -- records --------------------------------------------------------------------------------------


def test_codec_timestamps_headers_and_leader_epoch_of_what_stays_are_kept() -> None:
    world = World(100_000)
    builder = KafkaBuilder(2, 0, 0, -1, -1, -1, 10_000)
    for offset in range(6):
        headers = [(f"h{offset}", b"x"), ("null", None)]
        value = None if offset == 1 else b"v%d" % offset
        builder.append(offset, 50 + offset, b"k%d" % (offset % 4), value, headers)
    data = bytes(builder.build())
    with_headers = as_encoded(data, 0, read_header(data, 0))
    first = [
        SimpleRecord(50 + n, b"k%d" % (n % 4), None if n == 1 else b"v%d" % n) for n in range(6)
    ]
    world.append_batch(with_headers, first)
    second = [SimpleRecord(90 - n, b"z%d" % (n % 30), b"long" * 20) for n in range(50)]
    world.append(second, "zstd")
    third = [SimpleRecord(20, b"a", None), SimpleRecord(30, b"b", b"same")]
    appended = encode_records(third)
    by_append = bytearray(appended.tail)
    by_append[5] |= LOG_APPEND_TIME
    stamped = stamp(
        EncodedBatch(bytes(by_append), 2, 30, LOG_APPEND_TIME), NO_PRODUCER, transactional=False
    )
    world.append_batch(stamped, [row._replace(timestamp_ms=30) for row in third])
    world.append([row(b"k0", b"last")])
    epoch = world.writer.leader_epoch
    world.restart(how="close")
    world.roll()
    world.compact()
    world.check()
    world.check_files()
    expected = [2, 3, 5, *range(26, 56), 56, 57, 58]
    assert offsets_in(world) == expected
    found = {header.base_offset: header for header in headers_in(world)}
    assert found[6].attributes & 7 == COMPRESSIONS.index("zstd")
    assert found[6].max_timestamp_ms == 70
    assert found[56].attributes == LOG_APPEND_TIME | DELETE_HORIZON
    assert {header.leader_epoch for header in found.values()} == {epoch}
    data = read_whole(world.disk, world.folder / segment_name(0))
    kept = {
        record.offset: record.headers for record in KafkaBatch(data[: read_header(data, 0).size])
    }
    assert kept == {n: [(f"h{n}", b"x"), ("null", None)] for n in (2, 3, 5)}


def test_segments_of_many_blocks_are_cleaned_like_small_ones() -> None:
    world = World(11 * 1024 * 1024)
    for number in range(60):
        width = 700 if number % 3 else 1
        rows = [row(b"%d" % (n * number % 900), bytes([number]) * 900) for n in range(width)]
        world.append(rows, "lz4" if number % 5 == 0 else "none")
    world.roll()
    assert max(segment.seal.size for segment in world.partition.sealed) > 10 * 1024 * 1024
    assert world.compact() == 2
    world.check()
    world.check_files()
    world.restart(how="kill")
    world.check()


def test_headers_stay_where_timestamps_are_counted_anew() -> None:
    world = World()
    builder = KafkaBuilder(2, 1, 0, -1, -1, -1, 10_000)
    for offset in range(30):
        builder.append(offset, 2_000_000 - offset, b"%d" % offset, None, [("h", b"x" * offset)])
    data = bytes(builder.build())
    rows = [SimpleRecord(2_000_000 - offset, b"%d" % offset, None) for offset in range(30)]
    world.append_batch(as_encoded(data, 0, read_header(data, 0)), rows)
    world.roll()
    assert world.compact() == 1
    world.check_files()
    data = read_whole(world.disk, world.folder / segment_name(0))
    header = read_header(data, 0)
    assert header.base_timestamp_ms == world.now_ms + RETENTION_MS
    assert [one.headers for one in KafkaBatch(data)] == [[("h", b"x" * n)] for n in range(30)]


def test_a_record_without_a_key_that_is_there_already_stays() -> None:
    world = World(cleanup_policy="delete")
    for _ in range(2):
        world.writer.append(
            "t", 0, [encode_records([SimpleRecord(0, None, b"a"), SimpleRecord(0, b"k", b"a")])]
        )
    world.writer.alter_topic("t", settings={"cleanup.policy": "compact"})
    world.roll()
    world.compact()
    assert offsets_in(world) == [0, 2, 3]


@pytest.mark.not_in_lane("thresholds", "one takes few offsets there")
def test_adjacent_batches_without_records_become_one_of_61_bytes_that_no_look_up_meets() -> None:
    world = World(10_000)
    for number in range(20):
        world.append([row(b"k", b"v", 1000 - number)])
    world.roll()
    world.compact()
    filler, last = headers_in(world)
    assert (filler.base_offset, filler.last_offset_delta, filler.size) == (0, 18, 61)
    assert (filler.record_count, filler.attributes, filler.max_timestamp_ms) == (0, 0, -1)
    assert last.base_offset == 19
    reader = LogReader(FOLDER, files=world.disk, control=world.control)
    assert [reader.offset_for_time("t", 0, when) for when in (0, 981, 982, 1000)] == [
        19,
        19,
        20,
        20,
    ]


@given(
    blocks=st.lists(st.lists(st.sampled_from([None, b"", b"a", b"b", b"c"]), max_size=5)),
    keys_max=st.integers(0, 4),
)
def test_the_map_knows_the_latest_offset_of_every_key(
    blocks: list[list[bytes | None]], keys_max: int
) -> None:
    latest = OffsetMap(keys_max=keys_max, key_bytes_max=1 << 20)
    model: dict[bytes, int] = {}
    offset = 0
    for keys in blocks:
        latest.add(pa.array(keys, pa.binary()), np.arange(offset, offset + len(keys)))
        model.update({key: offset + place for place, key in enumerate(keys) if key is not None})
        offset += len(keys)
        if len(model) > keys_max:
            assert latest.full
    wanted_keys = [None, b"unknown", *model]
    found = latest.latest(pa.chunked_array([wanted_keys[:3], wanted_keys[3:]], pa.binary()))
    assert found.tolist() == [-1, -1, *model.values()]
    assert latest.full == (len(model) > keys_max)


# -- damage and removal ---------------------------------------------------------------------------


def damage(world: World, base: int, at: int) -> None:
    path = world.folder / segment_name(base)
    byte = read_whole(world.disk, path)[at]
    world.disk.damage(path, at, bytes([byte ^ 1]))


def test_a_segment_found_damaged_is_left_and_no_tombstone_behind_it_goes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(100)
    world.append([row(b"a"), row(b"b")])
    world.roll()
    world.append([row(b"a"), row(b"b")])
    world.roll()
    world.append([row(b"a", None), row(b"b")])
    world.roll()
    damage(world, 2, 70)
    data = read_whole(world.disk, world.folder / segment_name(2))
    for _ in range(4):
        world.compact()
        world.now_ms += RETENTION_MS
    assert caplog.text.count("is not compacted") == 1
    assert read_whole(world.disk, world.folder / segment_name(2)) == data
    reader = LogReader(FOLDER, files=world.disk, control=world.control)
    rows = [one for batch in reader.read("t", 0, 4, 6) for one in rows_of(batch)]
    assert [(offset, key) for offset, _, key, _ in rows] == [(4, b"a"), (5, b"b")]
    assert headers_in_segment(world, 0) == [(0, 2, 0)]
    # Mended from a backup, it is cleaned like any other, and the tombstone goes in its time.
    damage(world, 2, 70)
    world.restart(how="kill")
    world.check_complete()


def headers_in_segment(world: World, base: int) -> list[tuple[int, int, int]]:
    data = read_whole(world.disk, world.folder / segment_name(base))
    return [(one.base_offset, one.next_offset, one.record_count) for _, one in walk(data, base)]


def test_a_segment_known_as_damaged_is_left_and_its_neighbours_are_cleaned() -> None:
    world = World(150)
    for _ in range(4):
        world.append([row(b"a"), row(b"b")])
        world.roll()
    damage(world, 2, 70)
    world.restart(how="kill", drop_seals=True)
    assert world.partition.sealed[1].seal.damaged == ((2, 4),)
    for _ in range(3):
        world.compact()
        world.now_ms += RETENTION_MS
    assert [one.base_offset for one in world.partition.sealed] == [0, 2, 4]
    assert headers_in_segment(world, 0) == [(0, 2, 0)]
    assert headers_in_segment(world, 4) == [(4, 6, 0), (6, 8, 2)]


def test_a_segment_that_would_outgrow_its_index_is_left_like_a_damaged_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(100)
    world.append([row(b"a"), row(b"%d" % (1 << 60))])
    world.roll()
    world.append([row(b"a", None)])
    world.roll()
    monkeypatch.setattr(cleaner, "SEGMENT_BYTES_LIMIT", 80)
    for _ in range(3):
        world.compact()
        world.check()
        world.now_ms += RETENTION_MS
    assert offsets_in(world) == [0, 1, 2]
    assert caplog.text.count("it would grow to 88 bytes") == 1


def test_nothing_is_compacted_while_aborted_transactions_are_not_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    world.append([row(b"a")])
    world.begin()
    world.append_as(world.named, [row(b"a")], "none")
    world.end(commit=False)
    world.roll()
    world.disk.remove(world.folder / f"{0:020d}.aborted")
    assert world.compact() == 0
    assert "Open the folder again" in caplog.text
    world.restart(how="kill")
    assert world.compact() == 1
    world.check()


def test_topics_deleted_and_records_removed_at_any_moment_of_a_pass_end_it(closed: World) -> None:
    def delete_topic(world: World) -> None:
        world.writer.delete_topic("t")

    def delete_records(world: World) -> None:
        world.writer.delete_records(T, world.partition.sealed[2].base_offset)

    for action in (delete_topic, delete_records):
        for at in range(1, 10_000, 5):
            world = closed.copy()
            partition = world.partition
            disturbed = Disturbance(world, at, lambda world=world, act=action: act(world))
            compact_partition(world.writer, partition, world.now_ms)
            names = world.disk.names(partition.folder)
            assert not [name for name in names if name.endswith(LEFTOVERS)]
            if not disturbed.done:
                break
            world.disk.restart(power_lost=False)
            world.writer = world.opened()
            if action is delete_records:
                reader = LogReader(FOLDER, files=world.disk, control=world.control)
                assert reader.bounds("t", 0)[0] > 0
                assert set(offsets_in(world)) <= set(world.sent)
        assert at > 30


class Disturbance:
    """Does something as soon as a pass has let go of the lock after the n-th operation."""

    def __init__(self, world: World, at: int, action: Callable[[], None]) -> None:
        self.done = False
        self._at = world.disk.steps + at
        self._world = world
        self._action = action
        self._exclusively = world.writer.exclusively
        world.writer.exclusively = self  # type: ignore[method-assign]

    def __call__(self, action: Callable[[], None]) -> None:
        if not self.done and self._world.disk.steps >= self._at:
            self.done = True
            self._action()
        self._exclusively(action)
