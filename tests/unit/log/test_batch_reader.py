"""Batches as they lie on disk, for clients that decode them themselves."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from millstream.errors import (
    ConfigError,
    CorruptBatchError,
    OffsetOutOfRangeError,
    UnknownTopicError,
)
from millstream.log.batch import HEADER_BYTES, EncodedBatch, ProducerStamp, stamp, walk
from millstream.log.batch_reader import BatchReader, FetchedBatches
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.files import DiskFiles
from millstream.log.producers import AbortedTransaction
from millstream.log.signal import signal_of
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition


def batch(*values: bytes, at_ms: int = 0) -> EncodedBatch:
    return encode_records([SimpleRecord(at_ms + n, b"k", value) for n, value in enumerate(values)])


@pytest.fixture
def writer(tmp_path: Path):
    with LogWriter(tmp_path, segment_bytes=2000, background=False) as opened:
        opened.create_topic("t")
        yield opened


def offsets(found: FetchedBatches, first: int) -> list[int]:
    return [header.base_offset for _, header in walk(b"".join(found.parts), first)]


def take(tmp_path: Path, start: int, *, committed: bool = False, **options) -> FetchedBatches:
    options = {"bytes_max": 1 << 20, **options}
    isolation = "read_committed" if committed else "read_uncommitted"
    return BatchReader(tmp_path).fetch("t", 0, start, isolation=isolation, **options)


def test_batches_are_given_as_they_were_written_over_segments(writer, tmp_path) -> None:
    sent = [batch(b"x" * 100, b"y") for _ in range(50)]
    writer.append("t", 0, sent)
    assert len(list((tmp_path / "t").rglob("*.log"))) > 3
    found = take(tmp_path, 0)
    assert offsets(found, 0) == list(range(0, 100, 2))
    assert found.next_offset == 100
    data = b"".join(found.parts)
    assert found.size == len(data)
    for (at, header), one in zip(walk(data, 0), sent, strict=True):
        assert data[at + 17 : at + header.size] == one.tail
    assert offsets(take(tmp_path, 51), 50) == list(range(50, 100, 2))
    assert take(tmp_path, 100) == FetchedBatches([], 0, 100, [])


def test_as_much_is_given_as_was_asked_for_and_one_batch_at_least(writer, tmp_path) -> None:
    writer.append("t", 0, [batch(b"x") for _ in range(9)])
    size = batch(b"x").size
    for limit, count in [(1, 1), (size, 1), (2 * size, 2), (2 * size + 1, 2)]:
        assert offsets(take(tmp_path, 3, bytes_max=limit), 3) == list(range(3, 3 + count))
    nothing = take(tmp_path, 3, bytes_max=size - 1, first_whole=False)
    assert (nothing.parts, nothing.next_offset) == ([], 3)
    assert take(tmp_path, 3, bytes_max=0).parts == []


class CountedReads(DiskFiles):
    """Counts the bytes that are read of segments."""

    def __init__(self) -> None:
        self.segments: set[int] = set()
        self.bytes_read = 0

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> int:
        handle = super().open(path, write=write, create=create)
        if path.suffix == ".log":
            self.segments.add(handle)
        return handle

    def close(self, handle: int) -> None:
        self.segments.discard(handle)
        super().close(handle)

    def pread(self, handle: int, size: int, position: int) -> bytes:
        data = super().pread(handle, size, position)
        self.bytes_read += len(data) if handle in self.segments else 0
        return data


@pytest.mark.parametrize(("batch_bytes", "batches"), [(300_000, 15), (20_000, 100), (200, 3000)])
@pytest.mark.parametrize("bytes_max", [100_000, 1 << 20])
def test_little_more_is_read_than_is_given_wherever_it_begins(
    tmp_path: Path, batch_bytes: int, batches: int, bytes_max: int
) -> None:
    files = CountedReads()
    one = batch(bytes(batch_bytes))
    with LogWriter(tmp_path, background=False) as writer:
        writer.create_topic("t")
        group = max(1, 30_000 // one.size)
        for at in range(0, batches, group):
            writer.append("t", 0, [one] * min(group, batches - at))
        reader = BatchReader(tmp_path, files=files)
        for start in (0, 1, batches // 3, batches // 2, batches - 2, batches - 1):
            files.bytes_read = 0
            found = reader.fetch("t", 0, start, isolation="read_uncommitted", bytes_max=bytes_max)
            assert found.next_offset == start + found.size // one.size
            assert found.size >= min(bytes_max, (batches - start) * one.size) - one.size
            assert files.bytes_read <= found.size + 2 * one.size + 4 * 64 * 1024
        reader.close()


@pytest.mark.not_in_lane("thresholds", "it counts the bytes of one read, which is several there")
def test_who_reads_on_where_it_ended_reads_nothing_again(tmp_path: Path) -> None:
    files, one = CountedReads(), batch(b"x" * 50)
    with LogWriter(tmp_path, background=False) as writer:
        writer.create_topic("t")
        reader = BatchReader(tmp_path, files=files)
        writer.append("t", 0, [one] * 300)
        at = reader.fetch("t", 0, 0, isolation="read_uncommitted", bytes_max=1 << 20).next_offset
        for _ in range(5):
            writer.append("t", 0, [one] * 3)
            files.bytes_read = 0
            found = reader.fetch("t", 0, at, isolation="read_uncommitted", bytes_max=1 << 20)
            at = found.next_offset
            assert found.size == 3 * one.size
            assert files.bytes_read <= found.size + HEADER_BYTES
        reader.close()


def test_reading_goes_on_in_a_segment_that_was_replaced(writer, tmp_path) -> None:
    """Compaction moves batches forward, and merges: where a reader ended is no place any more."""
    writer.append("t", 0, [batch(b"x" * 100) for _ in range(12)])
    reader = BatchReader(tmp_path)
    size = batch(b"x" * 100).size
    found = reader.fetch("t", 0, 0, isolation="read_uncommitted", bytes_max=3 * size)
    assert found.next_offset == 3
    path = next((tmp_path / "t").rglob(f"{0:020d}.log"))
    kept = [header.base_offset for _, header in walk(path.read_bytes(), 0)]
    for value in (b"", b"y" * 160):
        shorter = [batch(value) for _ in kept]
        data = b"".join(one.prefix(at, 1) + one.tail for at, one in zip(kept, shorter, strict=True))
        path.with_suffix(".new").write_bytes(data)
        path.with_suffix(".new").rename(path)
        found = reader.fetch("t", 0, 3, isolation="read_uncommitted", bytes_max=2 * shorter[0].size)
        assert b"".join(found.parts) == data[3 * shorter[0].size : 5 * shorter[0].size]
        found = reader.fetch("t", 0, 5, isolation="read_uncommitted", bytes_max=1 << 20)
        assert offsets(found, 5) == list(range(5, 12))
        reader.fetch("t", 0, 0, isolation="read_uncommitted", bytes_max=3 * shorter[0].size)


def test_aborted_transactions_are_told_of_and_open_ones_end_the_committed(writer, tmp_path) -> None:
    transactions = writer.transactions
    identity = transactions.register("x", in_process=False)

    def append(sequence: int, value: bytes) -> None:
        data = stamp(batch(value), ProducerStamp(*identity, sequence), transactional=True)
        writer.append("t", 0, [data])

    transactions.begin(identity)
    append(0, b"back")
    writer.append("t", 0, [batch(b"plain")])
    transactions.end(identity, commit=False, raise_epoch=False)
    transactions.begin(identity)
    append(1, b"open")
    back = AbortedTransaction(identity.producer_id, 0, 2)
    assert take(tmp_path, 0).next_offset == 4
    found = take(tmp_path, 0, committed=True)
    assert (offsets(found, 0), found.aborted) == ([0, 1, 2], [back])
    assert take(tmp_path, 1, committed=True).aborted == [back]
    assert take(tmp_path, 0).aborted == []
    assert take(tmp_path, 3, committed=True) == FetchedBatches([], 0, 3, [])
    transactions.end(identity, commit=True, raise_epoch=False)
    found = take(tmp_path, 3, committed=True)
    assert (offsets(found, 3), found.aborted) == ([3, 4], [])


def test_outside_of_what_is_there_the_bounds_are_told(writer, tmp_path) -> None:
    writer.append("t", 0, [batch(b"x") for _ in range(5)])
    writer.delete_records(TopicPartition("t", 0), 2)
    for start in (1, 6, -1):
        with pytest.raises(OffsetOutOfRangeError) as caught:
            take(tmp_path, start)
        assert (caught.value.start, caught.value.end) == (2, 5)
    with pytest.raises(UnknownTopicError):
        BatchReader(tmp_path).state("nope", 0)
    with pytest.raises(ConfigError):
        BatchReader(tmp_path).state("t", 1)


def test_damage_ends_what_is_given_and_is_told_at_its_place(writer, tmp_path) -> None:
    writer.append("t", 0, [batch(b"x" * 50) for _ in range(6)])
    path = next((tmp_path / "t").rglob("*.log"))
    data = bytearray(path.read_bytes())
    data[3 * batch(b"x" * 50).size + 70] ^= 1
    path.write_bytes(data)
    assert offsets(take(tmp_path, 0), 0) == [0, 1, 2]
    with pytest.raises(CorruptBatchError) as caught:
        take(tmp_path, 3)
    assert (caught.value.start, caught.value.end) == (3, 4)
    assert offsets(take(tmp_path, 4), 4) == [4, 5]


def test_a_record_is_found_by_its_time(writer, tmp_path) -> None:
    for number in range(40):
        writer.append("t", 0, [batch(b"x" * 100, b"y", at_ms=1000 * number)])
    reader = BatchReader(tmp_path)
    assert reader.first_since("t", 0, 0) == (0, 0)
    assert reader.first_since("t", 0, 7001) == (15, 7001)
    assert reader.first_since("t", 0, 7002) == (16, 8000)
    assert reader.first_since("t", 0, 39_002) is None


def test_a_listener_is_told_which_partitions_were_committed_to(writer, tmp_path) -> None:
    changes: list[object] = []
    came = threading.Event()

    def listen(changed) -> None:
        changes.append(list(changed))
        came.set()

    with signal_of(tmp_path).subscribe(listen):
        writer.append("t", 0, [batch(b"x")])
        assert changes == [[TopicPartition("t", 0)]]
        writer.create_topic("u")
        assert changes[1:] == [[TopicPartition("u", 0)], []]
    writer.append("t", 0, [batch(b"x")])
    assert len(changes) == 3
    assert came.is_set()
