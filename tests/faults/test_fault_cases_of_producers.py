"""Fault cases 14 to 18, 21 and 22 of docs/fault-cases.md: producers, transactions, records.

Those of consumers, of the wire protocol and of the engine stand with the broker and the engine.
"""

from __future__ import annotations

import copy
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import (
    ConfigError,
    CorruptBatchError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    RecordTooLargeError,
    TransactionAbortedError,
)
from millstream.log import compression
from millstream.log.batch import (
    HEADER_BYTES,
    PREFIX_BYTES,
    RECORD_BYTES_MAX,
    SEQUENCE_MAX,
    EncodedBatch,
    ProducerStamp,
    finish,
    stamp,
)
from millstream.log.compression import COMPRESSIONS, compress
from millstream.log.control import ControlDb
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.groups import committed_offsets, fence_of
from millstream.log.producer_identity import ProducerIdentity
from millstream.log.producers import PRODUCER_EXPIRES_MS
from millstream.log.reader import LogReader
from millstream.log.repair.inspection import inspect
from millstream.log.statistics import measure
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition
from millstream.testing.disk import SimulatedCrash, SimulatedDisk

FOLDER = Path("/log")
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The log reports everything that it repairs, which is a lot here."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def batch_of(*values: bytes | None, timestamp_ms: int = 1) -> EncodedBatch:
    return encode_records([SimpleRecord(timestamp_ms, b"k", value) for value in values])


def sent_by(
    identity: ProducerIdentity | tuple[int, int],
    sequence: int,
    *values: bytes,
    transactional: bool = False,
    timestamp_ms: int = 1,
) -> EncodedBatch:
    batch = batch_of(*(values or (b"%d" % sequence,)), timestamp_ms=timestamp_ms)
    return stamp(batch, ProducerStamp(*identity, sequence), transactional=transactional)


def opened(folder: Path, **options: Any) -> LogWriter:
    return LogWriter(folder, background=False, sync_threads=1, **options)


def read(reader: LogReader, topic: str = "t", partition: int = 0) -> dict[int, bytes | None]:
    """Return every record of a partition by its offset."""
    start, end = reader.offsets(topic)[partition]
    found: dict[int, bytes | None] = {}
    for batch in reader.read(topic, partition, start, end, columns=("offset", "value")):
        found.update(zip(*(column.to_pylist() for column in batch.columns), strict=True))
    return found


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("t/*/*/*.log"))


def restarted(writer: LogWriter, tmp_path: Path, how: str, **options: Any) -> LogWriter:
    """Return the next owner of a folder, after a clean close or on what a killed one leaves."""
    if how == "closed":
        writer.close()
        return opened(writer.folder, **options)
    import shutil

    image = tmp_path / "image"
    shutil.copytree(writer.folder, image)
    writer.close()
    return opened(image, **options)


# -- case 14: idempotent retries -----------------------------------------------------------------


def test_case_14_a_batch_that_comes_again_has_the_offset_of_the_first_time(tmp_path: Path) -> None:
    """case 14: the acknowledgement was lost, so the batch is sent again."""
    with opened(tmp_path) as writer:
        writer.create_topic("t")
        for sequence in range(5):
            assert writer.append("t", 0, [sent_by((7, 0), sequence)]) == [sequence]
        size = bytes_in(tmp_path)
        for sequence in range(5):  # a client has at most five on their way
            assert writer.append("t", 0, [sent_by((7, 0), sequence)]) == [sequence]
        assert bytes_in(tmp_path) == size
        assert len(read(LogReader(tmp_path))) == 5


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_case_14_also_by_the_next_owner(tmp_path: Path, how: str) -> None:
    """case 14: the owner was closed or killed between the sync and the response."""
    writer = opened(tmp_path / "log", segment_bytes=200)
    writer.create_topic("t")
    for sequence in range(7):
        writer.append("t", 0, [sent_by((7, 0), sequence)])
    writer = restarted(writer, tmp_path, how, segment_bytes=200)
    with writer:
        for sequence in range(2, 7):
            assert writer.append("t", 0, [sent_by((7, 0), sequence)]) == [sequence]
        assert writer.append("t", 0, [sent_by((7, 0), 7)]) == [7]
        assert [*read(LogReader(writer.folder)).values()] == [b"%d" % number for number in range(8)]


def test_case_14_sequences_go_on_at_0_after_the_highest(tmp_path: Path) -> None:
    """case 14: the sequence wraps at 2^31, within a batch and between two."""
    with opened(tmp_path) as writer:
        writer.create_topic("t")
        within = sent_by((7, 0), SEQUENCE_MAX - 1, b"a", b"b", b"c", b"d")  # ends with sequence 1
        assert writer.append("t", 0, [within]) == [0]
        assert writer.append("t", 0, [sent_by((7, 0), 2, b"e")]) == [4]
        assert writer.append("t", 0, [within]) == [0]
        assert writer.append("t", 0, [sent_by((8, 0), SEQUENCE_MAX, b"f")]) == [5]
        assert writer.append("t", 0, [sent_by((8, 0), 0, b"g")]) == [6]
        assert writer.append("t", 0, [sent_by((8, 0), SEQUENCE_MAX, b"f")]) == [5]
        with pytest.raises(OutOfOrderSequenceError):
            writer.append("t", 0, [sent_by((8, 0), 2, b"gap")])
    with opened(tmp_path) as writer:
        assert writer.append("t", 0, [sent_by((7, 0), 3, b"h")]) == [7]
    assert b"".join(value or b"" for value in read(LogReader(tmp_path)).values()) == b"abcdefgh"


def test_case_14_a_gap_is_refused_and_a_forgotten_producer_begins_anywhere(tmp_path: Path) -> None:
    """case 14: out of order; and after the producer was forgotten for its silence."""
    now_ms = 1_000_000

    def clock() -> int:
        return now_ms

    with opened(tmp_path, clock_ms=clock) as writer:
        writer.create_topic("t")
        writer.append("t", 0, [sent_by((7, 0), 0, timestamp_ms=now_ms)])
        size = bytes_in(tmp_path)
        for sequence in (2, 500, SEQUENCE_MAX):
            with pytest.raises(OutOfOrderSequenceError, match="1 must follow"):
                writer.append("t", 0, [sent_by((7, 0), sequence)])
        assert bytes_in(tmp_path) == size
        writer.maintenance.run_pass(now_ms, running_ms=0)
        now_ms += PRODUCER_EXPIRES_MS + 1
        writer.maintenance.run_pass(now_ms, running_ms=PRODUCER_EXPIRES_MS + 1)
        assert writer.append("t", 0, [sent_by((7, 0), 500, timestamp_ms=now_ms)]) == [1]
        with pytest.raises(OutOfOrderSequenceError):
            writer.append("t", 0, [sent_by((7, 0), 502, timestamp_ms=now_ms)])


# -- cases 15 and 16: producers of another time --------------------------------------------------


def test_case_15_a_producer_that_was_replaced_can_neither_write_nor_end(tmp_path: Path) -> None:
    """case 15: two producers with one transactional id; the first one is slow."""
    with opened(tmp_path) as writer:
        writer.create_topic("t")
        transactions = writer.transactions
        zombie = transactions.register("p")
        transactions.begin(zombie)
        writer.append("t", 0, [sent_by(zombie, 0, b"of the zombie", transactional=True)])
        fresh = transactions.register("p")
        size = bytes_in(tmp_path)
        with pytest.raises(ProducerFencedError):
            writer.append("t", 0, [sent_by(zombie, 1, transactional=True)])
        for commit in (True, False):
            with pytest.raises(ProducerFencedError):
                transactions.end(zombie, commit=commit)
        with pytest.raises(ProducerFencedError):
            transactions.begin(zombie)
        assert bytes_in(tmp_path) == size
        transactions.begin(fresh)
        writer.append("t", 0, [sent_by(fresh, 0, b"kept", transactional=True)])
        transactions.end(fresh, commit=True)
        assert [*read(LogReader(tmp_path)).values()] == [b"kept"]
    with opened(tmp_path) as writer, pytest.raises(ProducerFencedError):
        writer.append("t", 0, [sent_by(zombie, 1, transactional=True)])


def test_case_16_what_was_delayed_out_of_one_transaction_cannot_get_into_the_next(
    tmp_path: Path,
) -> None:
    """case 16: an append and an end of transaction n arrive during transaction n + 1."""
    with opened(tmp_path) as writer:
        writer.create_topic("t")
        transactions = writer.transactions
        first = transactions.register("p")
        transactions.begin(first)
        writer.append("t", 0, [sent_by(first, 0, b"first", transactional=True)])
        second = transactions.end(first, commit=True)
        transactions.begin(second)
        writer.append("t", 0, [sent_by(second, 0, b"second", transactional=True)])
        for commit in (True, False):
            with pytest.raises(ProducerFencedError):
                transactions.end(first, commit=commit)
        with pytest.raises(ProducerFencedError):
            writer.append("t", 0, [sent_by(first, 1, b"delayed", transactional=True)])
        transactions.end(second, commit=False)
        assert [*read(LogReader(tmp_path)).values()] == [b"first"]


# -- case 17: killed at every step of a commit ---------------------------------------------------


class Simulated:
    """A log on a disk that crashes, with a transaction about to be ended."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk(5)
        self._open_control(None)
        with self.writer() as writer:
            writer.create_topic("t", partitions=2)
            writer.append("t", 0, [batch_of(b"plain")])
        self.disk.restart(power_lost=False)

    def _open_control(self, before: sqlite3.Connection | None) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        if before is not None:
            before.backup(self.connection)
        self.control = ControlDb(self.connection, write=True, before_commit=self.disk.step)

    def copy(self) -> Simulated:
        same = copy.copy(self)
        same.disk = copy.deepcopy(self.disk)
        same._open_control(self.connection)
        same.disk.restart(power_lost=False)
        return same

    def writer(self) -> LogWriter:
        return opened(FOLDER, files=self.disk, control=self.control, clock_ms=lambda: 1000)

    def reader(self) -> LogReader:
        return LogReader(FOLDER, files=self.disk, control=self.control)

    def work(self, *, commit: bool) -> None:
        """Append to two partitions in a transaction, and end it with an offset and a fence."""
        writer = self.writer()
        identity = writer.transactions.register("p")
        writer.transactions.begin(identity)
        for number in range(2):
            batch = sent_by(identity, number, b"in the transaction", transactional=True)
            writer.append(
                "t", number, [stamp(batch, ProducerStamp(*identity, 0), transactional=True)]
            )
        writer.transactions.end(
            identity, commit=commit, offsets={"group": {T0: 1}}, fence=("query", 3)
        )
        self.ended = True
        for number in range(2):
            writer.append("t", number, [batch_of(b"behind")])

    ended = False


@pytest.mark.parametrize("power_lost", [False, True])
@pytest.mark.parametrize("commit", [True, False])
def test_case_17_a_transaction_is_wholly_there_or_not_at_all_wherever_it_was_killed(
    commit: bool, power_lost: bool
) -> None:
    """case 17: killed at every write, sync, publication and commit of a transaction."""
    template = Simulated()
    whole = template.copy()
    whole.work(commit=commit)
    outcomes = set()
    for crash_at in range(1, whole.disk.steps + 1):
        log = template.copy()
        log.disk.crash_at = crash_at
        with pytest.raises(SimulatedCrash):
            log.work(commit=commit)
        log.disk.restart(power_lost=power_lost)
        where = f"killed at {crash_at}"
        with log.writer() as writer:
            reader = log.reader()
            seen = [
                b"in the transaction" in read(reader, "t", number).values() for number in (0, 1)
            ]
            offset = committed_offsets(log.control, "group").get(T0)
            fence = fence_of(log.control, "query")
            assert seen[0] == seen[1], where
            assert (offset is not None) == seen[0], where
            assert (fence is not None) == seen[0], where
            assert not log.ended or seen[0] == commit, where
            outcomes.add(seen[0])
            # Nothing is left that would hold readers up: the producer died with its owner.
            for number in (0, 1):
                end = reader.high_watermark("t", number)
                assert reader.end_offset("t", number) == end, where
                assert writer.append("t", number, [batch_of(b"next")]) == [end], where
                assert list(read(reader, "t", number).values())[-1] == b"next", where
        found = inspect(FOLDER, log.disk, control=log.control, owner_lives=lambda _: False)
        assert {one.kind for one in found} <= {"quarantine"}, where
    assert outcomes == ({True, False} if commit else {False})


# -- case 18: transactions that hang -------------------------------------------------------------


@pytest.mark.parametrize("how", ["closed", "killed", "same owner"])
def test_case_18_a_transaction_whose_producer_died_is_aborted_by_its_timeout(
    tmp_path: Path, how: str
) -> None:
    """case 18: a producer of another process dies in the middle of its transaction."""
    now_ms = 1_000_000

    def clock() -> int:
        return now_ms

    writer = opened(tmp_path / "log", clock_ms=clock)
    writer.create_topic("t")
    identity = writer.transactions.register("p", timeout_ms=60_000, in_process=False)
    writer.transactions.begin(identity)
    writer.append("t", 0, [sent_by(identity, 0, b"hanging", transactional=True)])
    writer.append("t", 0, [batch_of(b"behind it")])
    if how != "same owner":
        writer = restarted(writer, tmp_path, how, clock_ms=clock)
    with writer:
        reader = LogReader(writer.folder)
        writer.maintenance.run_pass(now_ms, running_ms=0)
        assert read(reader) == {}, "held up at the first offset of what is open"
        assert reader.high_watermark("t", 0) - reader.end_offset("t", 0) == 2
        assert measure(writer.folder)[0].open_transactions == 1
        now_ms += 61_000
        report = writer.maintenance.run_pass(now_ms, running_ms=61_000)
        assert report.transactions_aborted == 1
        assert [*read(reader).values()] == [b"behind it"]
        assert measure(writer.folder)[0].open_transactions == 0
        for late in (
            lambda: writer.append("t", 0, [sent_by(identity, 1, b"late", transactional=True)]),
            lambda: writer.transactions.end(identity, commit=True),
        ):
            with pytest.raises((TransactionAbortedError, ProducerFencedError)):
                late()
        assert [*read(reader).values()] == [b"behind it"]


# -- case 21: consumers that come too late -------------------------------------------------------


def test_case_21_a_reader_behind_retention_is_told_and_never_moved_silently(tmp_path: Path) -> None:
    """case 21: a group had read up to 3 when retention removed what follows."""
    settings = {"retention.bytes": "600", "segment.bytes": "300"}
    with opened(tmp_path, clock_ms=lambda: 1000) as writer:
        writer.create_topic("t", settings=settings)
        for number in range(20):
            writer.append("t", 0, [batch_of(b"%02d" % number * 20, timestamp_ms=1000)])
        writer.commit_offsets("slow", {T0: 3})
        reader = LogReader(tmp_path)
        report = writer.run_maintenance(1000)
        start, end = reader.offsets("t")[0]
        assert start > 3
        with pytest.raises(OffsetOutOfRangeError, match="were removed by retention") as caught:
            list(reader.read("t", 0, 3, end))
        assert (caught.value.start, caught.value.end) == (start, end)
        (risk,) = report.risks
        assert (risk.group, risk.committed_offset, risk.records_lost) == ("slow", 3, start - 3)
        # A reader that ran meanwhile gets the error as well.
        reading = reader.read("t", 0, start, end, bytes_max=1)
        next(reading)
        writer.delete_records(T0, end)
        with pytest.raises(OffsetOutOfRangeError):
            list(reading)


def test_case_21_a_reader_goes_over_what_compaction_removed_in_the_order_of_offsets(
    tmp_path: Path,
) -> None:
    """case 21: a reader behind compaction sees the last record of every key, at its offset."""
    settings = {"cleanup.policy": "compact", "segment.bytes": "400"}
    with opened(tmp_path, clock_ms=lambda: 1000) as writer:
        writer.create_topic("t", settings=settings)
        for number in range(40):
            writer.append(
                "t",
                0,
                [encode_records([SimpleRecord(1, b"%d" % (number % 3), b"%02d" % number * 9)])],
            )
        sealed = writer.partitions()[0].active_base
        writer.run_maintenance(1000)
        found = read(LogReader(tmp_path))
        assert list(found) == sorted(found)
        assert len([offset for offset in found if offset < sealed]) <= 3
        assert {
            offset: value for offset, value in found.items() if value != b"%02d" % offset * 9
        } == {}
        (batch,) = LogReader(tmp_path).read("t", 0, 39, 40)
        assert batch.num_rows == 1


def test_case_21_offsets_of_a_topic_do_not_apply_to_one_of_the_same_name(tmp_path: Path) -> None:
    """case 21: a topic is deleted and made again; group, producer and reader begin anew."""
    with opened(tmp_path) as writer:
        writer.create_topic("t")
        for sequence in range(5):
            writer.append("t", 0, [sent_by((7, 0), sequence)])
        writer.commit_offsets("group", {T0: 4})
        reader = LogReader(tmp_path)
        reading = reader.read("t", 0, 0, 5, bytes_max=1)
        writer.delete_topic("t")
        writer.create_topic("t")
        assert committed_offsets(writer.control, "group") == {}
        assert reader.offsets("t") == [(0, 0)]
        with pytest.raises((OffsetOutOfRangeError, CorruptBatchError)):
            list(reading)
        assert writer.append("t", 0, [sent_by((7, 0), 3, b"any sequence")]) == [0]
        assert [*read(reader).values()] == [b"any sequence"]


# -- case 22: strange records --------------------------------------------------------------------


def test_case_22_a_record_that_is_too_large_is_refused_before_a_byte_is_written(
    tmp_path: Path,
) -> None:
    """case 22: larger than the topic allows, and than any batch may be."""
    with opened(tmp_path) as writer:
        writer.create_topic("t", settings={"max.message.bytes": "1000"})
        writer.append("t", 0, [batch_of(b"before")])
        size = bytes_in(tmp_path)
        with pytest.raises(RecordTooLargeError, match="1,000"):
            writer.append("t", 0, [batch_of(b"x" * 2000)])
        with pytest.raises(RecordTooLargeError, match="67,108,864"):
            batch_of(bytes(RECORD_BYTES_MAX))
        assert bytes_in(tmp_path) == size
        assert writer.append("t", 0, [batch_of(b"after")]) == [1]


def test_case_22_null_and_empty_keys_and_values_stay_what_they_are(tmp_path: Path) -> None:
    """case 22: empty value, null value, empty key, null key, in one batch."""
    rows = [SimpleRecord(1, key, value) for key in (None, b"", b"k") for value in (None, b"", b"v")]
    with opened(tmp_path) as writer:
        writer.create_topic("t")
        writer.append("t", 0, [encode_records(rows)])
        writer.create_topic("c", settings={"cleanup.policy": "compact"})
        with pytest.raises(ConfigError, match="without a key"):
            writer.append("c", 0, [encode_records(rows)])
        assert writer.append("c", 0, [encode_records(rows[3:])]) == [0]
    (batch,) = LogReader(tmp_path).read("t", 0, 0, len(rows))
    assert batch["key"].to_pylist() == [row.key for row in rows]
    assert batch["value"].to_pylist() == [row.value for row in rows]


def test_case_22_a_batch_without_records_is_refused_before_a_byte_is_written(
    tmp_path: Path,
) -> None:
    """case 22: a batch of 0 offsets would hide the one behind it."""
    with opened(tmp_path) as writer:
        writer.create_topic("t")
        writer.append("t", 0, [batch_of(b"before")])
        size = bytes_in(tmp_path)
        with pytest.raises(ConfigError, match="a batch of 0 offsets"):
            writer.append("t", 0, [finish(b"", records=0, timestamps_ms=(0, 0))])
        assert bytes_in(tmp_path) == size
        assert writer.append("t", 0, [batch_of(b"after")]) == [1]
    assert [*read(LogReader(tmp_path)).values()] == [b"before", b"after"]


@pytest.mark.parametrize("codec", COMPRESSIONS)
def test_case_22_ten_thousand_headers_of_one_record_come_back(tmp_path: Path, codec: Any) -> None:
    """case 22: 10,000 headers, some null, some empty, some with the same name."""
    headers = tuple(
        (f"h{number % 5000}", None if number % 7 == 0 else b"v" * (number % 3))
        for number in range(10_000)
    )
    rows = [
        SimpleRecord(1, b"k", b"plain"),
        SimpleRecord(1, b"k", b"rich", headers),
        SimpleRecord(1, b"k", b"plain"),
    ]
    with opened(tmp_path) as writer:
        writer.create_topic("t")
        writer.append("t", 0, [compress(encode_records(rows), codec)])
    (batch,) = LogReader(tmp_path).read("t", 0, 0, 3, columns=("value", "headers"))
    plain, rich, last = batch["headers"].to_pylist()
    assert [(one["key"], one["value"]) for one in rich] == list(headers)
    assert plain == last == []
    assert not list(inspect(tmp_path))


@pytest.mark.not_in_lane("thresholds", "it knows the size of blocks")
@pytest.mark.parametrize("codec", COMPRESSIONS[1:])
def test_case_22_a_compression_bomb_is_refused_with_its_offset_and_harms_no_neighbour(
    tmp_path: Path, codec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """case 22: few bytes that stand for more than a batch may hold."""
    monkeypatch.setattr(compression, "DECOMPRESSED_BYTES_MAX", 1 << 20)
    bomb = compress(batch_of(bytes(4 << 20)), codec)
    assert bomb.size < 1 << 19
    with opened(tmp_path) as writer:
        writer.create_topic("t")
        for batch in (batch_of(b"before"), bomb, batch_of(b"after")):
            writer.append("t", 0, [batch])
    reader = LogReader(tmp_path)
    with pytest.raises(CorruptBatchError, match="offset 1 or after"):
        read(reader)
    for start, value in ((0, b"before"), (2, b"after")):
        (batch,) = reader.read("t", 0, start, start + 1)
        assert batch["value"].to_pylist() == [value]


@pytest.mark.parametrize("records", [1, 3, 5])
def test_case_22_a_batch_that_lies_about_its_records_is_told_and_harms_no_neighbour(
    tmp_path: Path, records: int
) -> None:
    """case 22: a count that the records do not bear out, in a batch whose CRC is right."""
    body = encode_records([SimpleRecord(1, b"k", b"%d" % number) for number in range(4)])
    lying = finish(
        body.tail[HEADER_BYTES - PREFIX_BYTES :], records=records, count=5, timestamps_ms=(1, 1)
    )
    with opened(tmp_path) as writer:
        writer.create_topic("t")
        for batch in (batch_of(b"before"), lying, batch_of(b"after")):
            writer.append("t", 0, [batch])
    reader = LogReader(tmp_path)
    with pytest.raises(CorruptBatchError):
        read(reader)
    for start, value in ((0, b"before"), (6, b"after")):
        (batch,) = reader.read("t", 0, start, start + 1)
        assert batch["value"].to_pylist() == [value]
