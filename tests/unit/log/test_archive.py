"""Archives beside segments: what they hold, what takes them along, and what a crash leaves of them."""

from __future__ import annotations

import copy
import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from example_counts import some
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.errors import CorruptionError, DiskFullError
from millstream.kernels.decode.archive_columns import ArchiveColumns
from millstream.kernels.decode.fields import Field
from millstream.kernels.decode.formats import JSON
from millstream.log.archive import METADATA_KEY, RECORD_SCHEMA, ArchiveMetadata
from millstream.log.archiver import PartitionArchive, archive_partitions
from millstream.log.batch import ProducerStamp, stamp
from millstream.log.compression import compress
from millstream.log.control import ControlDb
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.files import read_whole
from millstream.log.reader import LogReader
from millstream.log.repair.inspection import inspect
from millstream.log.repair.repair import repair
from millstream.log.segment import segment_name, segment_offsets
from millstream.log.takeover import NEEDS_VERIFY
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition
from millstream.testing.disk import SimulatedCrash, SimulatedDisk

FOLDER = Path("/log")
T = TopicPartition("t", 0)
SEGMENT_BYTES = 600
FIELDS = (
    Field("n", pa.int64(), required=True),
    Field("text", pa.string(), required=False),
    Field("offset", pa.int64(), required=False),
)
COLUMNS = ArchiveColumns(JSON, FIELDS, RECORD_SCHEMA.names)


def new_control() -> ControlDb:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    return ControlDb(connection, write=True)


def row(number: int, value: bytes | None = b"", key: bytes = b"k") -> SimpleRecord:
    if value == b"":
        value = json.dumps({"n": number, "text": "x" * (number % 7), "offset": -number}).encode()
    headers = ((f"h{number}", b"v"), ("none", None)) if number % 3 == 0 else ()
    return SimpleRecord(1_000 + number, key, value, headers)


class World:
    """A topic with every kind of record, on a simulated disk."""

    def __init__(self, seed: int = 0, **config: str) -> None:
        self.disk = SimulatedDisk(seed)
        self.control = new_control()
        self.writer = self.opened()
        self.writer.create_topic("t", settings=config)

    def opened(self) -> LogWriter:
        return LogWriter(
            FOLDER,
            files=self.disk,
            control=self.control,
            segment_bytes=SEGMENT_BYTES,
            background=False,
            sync_threads=1,
            clock_ms=lambda: 10_000,
        )

    def fill(self, rounds: int = 12) -> None:
        identity = self.writer.transactions.register("p")
        for at in range(rounds):
            number = at * 10
            compression = ("none", "zstd")[at % 2]
            plain = encode_records([row(number), row(number + 1, b"{bad", b"j")])
            plain = compress(plain, compression)
            self.writer.append("t", 0, [plain])
            self.writer.transactions.begin(identity)
            inside = encode_records([row(number + 2), row(number + 3, None)])
            sent = stamp(inside, ProducerStamp(*identity, 0), transactional=True)
            self.writer.append("t", 0, [sent])
            identity = self.writer.transactions.end(identity, commit=at % 3 != 1)

    def archive(self, *, close_active: bool = True) -> PartitionArchive:
        (found,) = archive_partitions(
            self.writer, [self.partition], COLUMNS, close_active=close_active
        )
        return found

    def reopen(self) -> None:
        self.writer = self.opened()

    def copy(self) -> World:
        """Give another world that goes its own way; this one's writer must be closed."""
        twin = copy.copy(self)
        twin.disk = copy.deepcopy(self.disk)
        twin.control = new_control()
        connection, other = (one._connection for one in (self.control, twin.control))
        connection.backup(other)
        twin.writer = twin.opened()
        return twin

    @property
    def partition(self) -> Any:
        return self.writer.partition(T)

    @property
    def folder(self) -> Path:
        (topic,) = self.disk.names(FOLDER / "t")
        return FOLDER / "t" / topic / "0"

    def names(self, ending: str) -> list[str]:
        return [name for name in self.disk.names(self.folder) if name.endswith(ending)]

    def records(self) -> dict[int, dict[str, Any]]:
        """Give what a reader of committed records sees, by offset."""
        reader = LogReader(FOLDER, files=self.disk, control=self.control)
        ((start, end),) = reader.offsets("t")
        columns = ("offset", "timestamp", "key", "headers", "value")
        found = reader.read("t", 0, start, end, columns=columns)
        return {one["offset"]: one for batch in found for one in batch.to_pylist()}

    def archived(self) -> dict[int, tuple[ArchiveMetadata, list[dict[str, Any]]]]:
        """Read each archive as a batch tool would, that knows nothing of the log."""
        found = {}
        for name in self.names(".parquet"):
            content = read_whole(self.disk, self.folder / name)
            file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
            note = ArchiveMetadata.unpack(file.metadata.metadata[METADATA_KEY])
            found[int(name[:20])] = note, file.read().to_pylist()
        return found

    def check(self) -> None:
        """Every archive has the committed records in its range, and no others."""
        records = self.records()
        first = min(records, default=0)
        for base, (note, rows) in self.archived().items():
            assert note.base_offset == base
            there = [at for at in records if base <= at < note.next_offset]
            kept = [one for one in rows if one["offset"] >= first]
            assert [one["offset"] for one in kept] == there
            for one in kept:
                assert one == expected(records[one["offset"]])


def expected(record: dict[str, Any]) -> dict[str, Any]:
    """Give the row of a record, found the plain way."""
    value = record["value"]
    try:
        found = None if value is None else json.loads(value)
    except ValueError:
        found = None
    return {
        **{name: record[name] for name in ("offset", "timestamp", "key", "headers")},
        "partition": 0,
        "tombstone": value is None,
        "undecodable": value is not None and found is None,
        "n": found and found["n"],
        "text": found and found["text"],
        "value.offset": found and found["offset"],
    }


def test_an_archive_holds_the_committed_records_of_its_segment():
    world = World()
    world.fill()
    report = world.archive()
    archived = world.archived()
    assert sorted(archived) == segment_offsets(world.disk.names(world.folder))[:-1]
    assert len(archived) > 3
    world.check()
    rows = [one for _, found in archived.values() for one in found]
    assert [one["offset"] for one in rows] == list(world.records())
    assert (report.segments, report.made) == (len(archived), len(archived))
    assert report.rows == len(rows)
    assert report.undecodable == sum(one["undecodable"] for one in rows) > 3
    assert sum(one["tombstone"] for one in rows) > 3
    assert any(one["headers"] for one in rows)
    again = world.archive()
    assert (again.segments, again.made, again.rows) == (report.segments, 0, report.rows)


def test_a_polars_program_reads_it_as_it_is(tmp_path):
    world = World()
    world.fill()
    world.archive()
    for name in world.names(".parquet"):
        (tmp_path / name).write_bytes(read_whole(world.disk, world.folder / name))
    rows = pl.scan_parquet(tmp_path / "*.parquet").sort("offset").collect()
    records = world.records()
    assert rows["offset"].to_list() == list(records)
    assert rows["n"].to_list() == [expected(one)["n"] for one in records.values()]
    assert rows["timestamp"].to_list() == [one["timestamp"] for one in records.values()]


def test_only_columns_that_repeat_their_values_have_dictionaries():
    world = World()
    world.writer.append("t", 0, [encode_records([row(number) for number in range(100)])])
    world.archive()
    (name,) = world.names(".parquet")
    file = pq.ParquetFile(pa.BufferReader(read_whole(world.disk, world.folder / name)))
    group = file.metadata.row_group(0)
    chunks = [group.column(place) for place in range(group.num_columns)]
    found = {one.path_in_schema for one in chunks if one.has_dictionary_page}
    assert {"n", "offset", "value.offset", "timestamp"}.isdisjoint(found)
    assert {"text", "key", "partition", "headers.list.element.key"} <= found
    assert file.read(["n"]).column("n").to_pylist() == list(range(100))


def test_only_what_is_closed_and_settled_is_archived():
    world = World()
    identity = world.writer.transactions.register("p")
    for number in range(8):
        world.writer.append("t", 0, [encode_records([row(number), row(number)])])
    settled = world.archive(close_active=False)
    assert 0 < settled.segments < len(segment_offsets(world.disk.names(world.folder)))
    world.writer.transactions.begin(identity)
    sent = stamp(encode_records([row(9)]), ProducerStamp(*identity, 0), transactional=True)
    world.writer.append("t", 0, [sent])
    for number in range(8):
        world.writer.append("t", 0, [encode_records([row(number), row(number)])])
    held = world.archive()
    world.check()
    assert max(note.next_offset for note, _ in world.archived().values()) <= 16
    world.writer.transactions.end(identity, commit=False)
    assert world.archive().segments > held.segments
    world.check()
    assert 16 not in world.records()


def test_another_schema_makes_it_anew():
    world = World()
    world.fill(4)
    made = world.archive().made
    narrow = ArchiveColumns(JSON, FIELDS[:1], RECORD_SCHEMA.names)
    (found,) = archive_partitions(world.writer, [world.partition], narrow)
    assert found.made == found.segments == made
    columns = [list(rows[0]) for _, rows in world.archived().values() if rows]
    assert columns
    assert all(one == [*RECORD_SCHEMA.names, "n"] for one in columns)


def test_retention_and_deleting_take_archives_along():
    world = World()
    world.fill()
    world.archive()
    bases = segment_offsets(world.disk.names(world.folder))
    world.writer.delete_records(T, bases[3] + 1)
    assert [int(name[:20]) for name in world.names(".parquet")] == bases[3:-1]
    world.check()
    assert not inspected(world)
    world.writer.delete_topic("t")
    assert not world.disk.names(FOLDER / "t")


def inspected(world: World) -> list[str]:
    found = inspect(FOLDER, world.disk, control=world.control, owner_lives=lambda _: False)
    return [f"{one.kind}: {one.where}: {one.text}" for one in found]


def test_an_archive_without_a_segment_goes_at_the_next_opening():
    world = World()
    world.fill()
    world.archive()
    bases = segment_offsets(world.disk.names(world.folder))
    stray = read_whole(world.disk, world.folder / f"{bases[0]:020d}.parquet")
    world.writer.delete_records(T, bases[2])
    put(world, bases[0], stray)
    world.writer.close()
    assert inspected(world)
    world.reopen()
    assert [int(name[:20]) for name in world.names(".parquet")] == bases[2:-1]
    # Where the segment is not gone but missing, its archive may be the only copy.
    world.writer.close()
    world.disk.remove(world.folder / segment_name(bases[3]))
    world.reopen()
    assert bases[3] in world.archived()


def put(world: World, base: int, content: bytes) -> None:
    handle = world.disk.open(world.folder / f"{base:020d}.parquet", write=True, create=True)
    world.disk.pwrite(handle, content, 0)
    world.disk.close(handle)


def fitting(world: World) -> list[int]:
    reader = LogReader(FOLDER, files=world.disk, control=world.control)
    ((start, end),) = reader.offsets("t")
    return [one.note.base_offset for one in reader.archives("t", 0, start, end)]


def test_verifying_everything_keeps_archives_and_a_changed_segment_loses_its_own():
    world = World()
    world.fill()
    world.archive()
    bases = sorted(world.archived())
    world.writer.close()
    world.disk.close(world.disk.open(FOLDER / NEEDS_VERIFY, write=True, create=True))
    world.reopen()
    assert fitting(world) == bases
    # A segment from a backup that holds something else: same name, other batches.
    world.writer.close()
    twin = World(1)
    twin.fill()
    path = world.folder / segment_name(bases[1])
    other = read_whole(world.disk, path)
    swapped = bytearray(other)
    swapped[12:16] = b"\0\0\0\x63"  # the leader epoch of its first batch: no checksum covers it
    world.disk.damage(path, 0, bytes(swapped))
    world.disk.close(world.disk.open(FOLDER / NEEDS_VERIFY, write=True, create=True))
    world.reopen()
    assert fitting(world) == sorted(set(bases) - {bases[1]})
    assert sorted(world.archived()) == fitting(world)
    assert world.archive().made == 1
    world.check()


def test_a_damaged_segment_is_left_out_and_a_repair_keeps_its_archive_aside():
    world = World()
    world.fill()
    bases = segment_offsets(world.disk.names(world.folder))
    world.disk.damage(world.folder / segment_name(bases[1]), 100, b"????")
    report = world.archive()
    assert len(report.left_out) == 1
    assert "cannot be read" in report.left_out[0]
    assert bases[1] not in world.archived()
    world.archive()
    world.disk.damage(world.folder / segment_name(bases[2]), 100, b"????")
    world.writer.close()
    rows = world.archived()[bases[2]][1]
    repair(FOLDER, files=world.disk, control=world.control, clock_ms=lambda: 1)
    world.reopen()
    assert bases[2] not in world.archived()
    (kept,) = [n for n in world.disk.names(FOLDER / "quarantine") if n.endswith(".parquet")]
    content = read_whole(world.disk, FOLDER / "quarantine" / kept)
    assert pq.read_table(pa.BufferReader(content)).to_pylist() == rows
    assert world.archive().made == 2
    world.check()
    world.writer.close()
    assert all(found.startswith("quarantine") for found in inspected(world))


@pytest.mark.parametrize("power_lost", [False, True])
def test_a_crash_at_every_operation_leaves_whole_archives_or_none(power_lost):
    template = World()
    template.fill(4)
    template.writer.close()
    before = template.records()
    crash_at = 0
    while True:
        crash_at += 1
        world = template.copy()
        world.disk._rng = random.Random(crash_at)
        world.disk.steps, world.disk.crash_at = 0, crash_at
        try:
            world.archive()
        except SimulatedCrash:
            pass
        else:
            break
        world.disk.restart(power_lost=power_lost)
        assert world.records() == before
        world.check()  # before anybody has opened it for writing
        there = fitting(world)
        assert there == sorted(world.archived())
        world.reopen()
        assert not world.names(".new")
        assert fitting(world) == there
        done = world.archive()
        assert done.segments - done.made == len(there)
        world.check()
        assert world.records() == before
        world.writer.close()
        assert not inspected(world)
    assert crash_at > 30


def test_short_writes_full_and_failing_disks_cost_archives_and_nothing_else():
    template = World()
    template.fill(6)
    template.writer.close()
    before = template.records()
    report = 0
    for step in range(1, 60, 3):
        world = template.copy()
        world.disk.short_writes = 0.5
        if step % 2:
            world.disk.fail_write_at = world.disk.steps + step
        else:
            world.disk.capacity_bytes = world.disk._used() + step * 300
        try:
            world.archive()
        except (DiskFullError, CorruptionError) as error:
            report += 1
            assert "archive again" in str(error) or "Make room" in str(error)
        assert not world.names(".parquet.new")
        world.check()
        world.disk.capacity_bytes = None
        world.archive()
        world.check()
        assert world.records() == before
    assert report > 5


# -- compaction -----------------------------------------------------------------------------------


def compacted_world(appends: int = 30) -> World:
    world = World(
        **{
            "cleanup.policy": "compact",
            "min.cleanable.dirty.ratio": "0",
            "delete.retention.ms": "0",
        }
    )
    for number in range(appends):
        rows = [row(number, key=b"%d" % (number % 4)), row(number + 1, b"{bad", key=b"bad")]
        world.writer.append("t", 0, [encode_records(rows)])
    world.archive()
    return world


def test_compaction_takes_the_archives_of_what_it_writes_anew():
    world = compacted_world()
    before = len(world.archived())
    world.writer.run_maintenance(20_000)
    world.check()
    assert len(world.archived()) < before
    assert world.archive().made > 0
    assert fitting(world) == sorted(world.archived())
    world.check()


def test_a_crash_in_compaction_leaves_no_archive_that_tells_of_other_records():
    template = compacted_world(12)
    template.writer.close()
    crash_at = 0
    while True:
        crash_at += 1
        world = template.copy()
        world.disk._rng = random.Random(crash_at)
        world.disk.steps, world.disk.crash_at = 0, crash_at
        try:
            world.writer.run_maintenance(20_000)
        except SimulatedCrash:
            pass
        else:
            break
        world.disk.restart(power_lost=crash_at % 2 == 0)
        world.check()
        world.reopen()
        world.check()
        assert fitting(world) == sorted(world.archived())
    assert crash_at > 40


# -- any history ----------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["append", "begin", "end", "archive", "roll", "delete", "restart", "house"]
        ),
        st.integers(0, 99),
    ),
    max_size=25,
)


class Story:
    """A history of one partition, with one producer that has transactions."""

    def __init__(self, policy: str) -> None:
        self.world = World(**{"cleanup.policy": policy, "min.cleanable.dirty.ratio": "0"})
        self.identity = self.world.writer.transactions.register("p")
        self.inside: int | None = None

    def append(self, luck: int) -> None:
        rows = [row(luck + n, (b"", b"{", None)[(luck + n) % 3]) for n in range(luck % 5 + 1)]
        batch = encode_records(rows)
        if self.inside is not None and luck % 2:
            batch = stamp(batch, ProducerStamp(*self.identity, self.inside), transactional=True)
            self.inside += len(rows)
        self.world.writer.append("t", 0, [batch])

    def begin(self, luck: int) -> None:
        if self.inside is None:
            self.world.writer.transactions.begin(self.identity)
            self.inside = 0

    def end(self, luck: int) -> None:
        if self.inside is not None:
            ended = self.world.writer.transactions.end(self.identity, commit=bool(luck % 2))
            self.identity, self.inside = ended, None

    def archive(self, luck: int) -> None:
        self.world.archive(close_active=bool(luck % 2))

    def roll(self, luck: int) -> None:
        if self.world.partition.active_size:
            self.world.writer.exclusively(self.world.partition.roll)

    def delete(self, luck: int) -> None:
        partition = self.world.partition
        end = partition.producers.last_stable(partition.log_end_offset)
        self.world.writer.delete_records(T, end * luck // 100)

    def restart(self, luck: int) -> None:
        if self.inside is None:
            self.world.writer.close()
            self.world.disk.restart(power_lost=bool(luck % 2))
            self.world.reopen()

    def house(self, luck: int) -> None:
        self.world.writer.run_maintenance(20_000 + luck)


@settings(max_examples=some(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ACTIONS, st.sampled_from(["delete", "compact"]))
def test_whatever_happens_archives_tell_of_the_records_in_their_range(actions, policy):
    story = Story(policy)
    for action, luck in actions:
        getattr(story, action)(luck)
        story.world.check()
    assert fitting(story.world) == sorted(story.world.archived())
