"""Transactions at the log: all or nothing, fenced, and alive after any crash."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from millstream.errors import (
    ConfigError,
    FencePassedError,
    ProducerFencedError,
    TransactionAbortedError,
    UnknownTopicError,
)
from millstream.log.batch import EncodedBatch, ProducerStamp, stamp
from millstream.log.control import ControlDb
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.groups import committed_offsets, fence_of
from millstream.log.producer_identity import PRODUCER_EPOCH_MAX, ProducerIdentity
from millstream.log.reader import LogReader
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition
from millstream.testing.disk import SimulatedCrash, SimulatedDisk

IN = TopicPartition("in", 0)


def batch(identity: ProducerIdentity, sequence: int, *values: bytes) -> EncodedBatch:
    rows = [SimpleRecord(0, b"k", value) for value in values]
    return stamp(encode_records(rows), ProducerStamp(*identity, sequence), transactional=True)


def plain(*values: bytes) -> EncodedBatch:
    return encode_records([SimpleRecord(0, b"k", value) for value in values])


def values(reader: LogReader, topic: str = "a", partition: int = 0) -> list[bytes]:
    start, end = reader.offsets(topic)[partition]
    found = reader.read(topic, partition, start, end, columns=("value",))
    return [value for part in found for value in part["value"].to_pylist()]


def make(writer: LogWriter) -> None:
    for name in ("a", "b", "in"):
        writer.create_topic(name, partitions=2)
    writer.append("in", 0, [plain(b"1", b"2", b"3")])


@pytest.fixture
def writer(tmp_path: Path):
    with LogWriter(tmp_path) as opened:
        make(opened)
        yield opened


def test_nothing_is_seen_before_the_commit_and_everything_after(
    writer: LogWriter, tmp_path: Path
) -> None:
    seen, everything = LogReader(tmp_path), LogReader(tmp_path, isolation="read_uncommitted")
    transactions = writer.transactions
    one = transactions.register("x")
    transactions.begin(one)
    writer.append("a", 0, [batch(one, 0, b"a1")])
    writer.append("b", 1, [batch(one, 0, b"b1")])
    writer.append("a", 0, [plain(b"other")])
    assert (values(seen, "a"), values(seen, "b", 1)) == ([], [])
    assert seen.offsets("a")[0] == (0, 0)
    assert values(everything, "a") == [b"a1", b"other"]
    after = transactions.end(one, commit=True, offsets={"g": {IN: 2}}, fence=("w", 7))
    assert after == ProducerIdentity(one.producer_id, one.producer_epoch + 1)
    assert (values(seen, "a"), values(seen, "b", 1)) == ([b"a1", b"other"], [b"b1"])
    assert committed_offsets(writer.control, "g")[IN].offset == 2
    assert fence_of(writer.control, "w") == 7


def test_an_aborted_transaction_leaves_nothing_to_be_seen(
    writer: LogWriter, tmp_path: Path
) -> None:
    transactions = writer.transactions
    identity = transactions.register("x")
    for commit in (False, True, False):
        transactions.begin(identity)
        writer.append("a", 0, [batch(identity, 0, b"%d" % commit)])
        writer.append("a", 0, [plain(b"between")])
        offsets = {"g": {IN: 3}} if not commit else None
        identity = transactions.end(identity, commit=commit, offsets=offsets, fence=None)
    assert values(LogReader(tmp_path)) == [b"between", b"1", b"between", b"between"]
    assert len(values(LogReader(tmp_path, isolation="read_uncommitted"))) == 6
    assert committed_offsets(writer.control, "g") == {}
    for start in range(9):
        read = LogReader(tmp_path).read("a", 0, start, 9, columns=("value",))
        found = [value for part in read for value in part["value"].to_pylist()]
        assert b"0" not in found


def test_a_passed_fence_aborts(writer: LogWriter, tmp_path: Path) -> None:
    transactions = writer.transactions
    identity = transactions.register("x")
    for batch_id, stands in [(1, 1), (5, 5), (5, 5), (3, 5), (6, 6)]:
        transactions.begin(identity)
        writer.append("a", 0, [batch(identity, 0, b"%d" % batch_id)])
        if batch_id == stands and fence_of(writer.control, "w") != stands:
            identity = transactions.end(identity, commit=True, fence=("w", batch_id))
        else:
            with pytest.raises(FencePassedError, match="is at batch 5") as caught:
                transactions.end(identity, commit=True, fence=("w", batch_id))
            assert caught.value.batch_id == 5
            identity = transactions.register("x")
        assert fence_of(writer.control, "w") == stands
    assert values(LogReader(tmp_path)) == [b"1", b"5", b"6"]


def test_a_newer_producer_fences_the_older_and_takes_its_open_transaction_back(
    writer: LogWriter, tmp_path: Path
) -> None:
    transactions = writer.transactions
    old = transactions.register("x")
    transactions.begin(old)
    writer.append("a", 0, [batch(old, 0, b"zombie")])
    new = transactions.register("x")
    assert new.producer_id == old.producer_id
    assert new.producer_epoch > old.producer_epoch
    with pytest.raises(ProducerFencedError, match="'x' has been replaced"):
        writer.append("a", 0, [batch(old, 1, b"zombie")])
    with pytest.raises(ProducerFencedError):
        transactions.end(old, commit=True)
    transactions.begin(new)
    writer.append("a", 0, [batch(new, 0, b"new")])
    transactions.end(new, commit=True)
    assert values(LogReader(tmp_path)) == [b"new"]


def test_without_an_open_transaction_nothing_is_taken(writer: LogWriter) -> None:
    transactions = writer.transactions
    one = transactions.register("x")
    with pytest.raises(TransactionAbortedError, match="begin one before you send"):
        writer.append("a", 0, [batch(one, 0, b"x")])
    with pytest.raises(TransactionAbortedError, match="begin one before you end"):
        transactions.end(one, commit=True)
    transactions.begin(one)
    with pytest.raises(ConfigError, match="open already"):
        transactions.begin(one)
    with pytest.raises(UnknownTopicError):
        transactions.end(one, commit=True, offsets={"g": {TopicPartition("none", 0): 1}})
    two = transactions.end(one, commit=True)
    with pytest.raises(ProducerFencedError):
        transactions.end(one, commit=True)
    transactions.begin(two)
    with pytest.raises(ProducerFencedError, match="not known"):
        transactions.begin(ProducerIdentity(999, 0))
    with pytest.raises(ConfigError, match="timeout of 0 ms"):
        transactions.register("y", timeout_ms=0)
    with pytest.raises(ConfigError, match="empty"):
        transactions.register("")


def test_an_append_that_was_delayed_cannot_get_into_the_next_transaction(
    writer: LogWriter, tmp_path: Path
) -> None:
    transactions = writer.transactions
    one = transactions.register("x")
    transactions.begin(one)
    delayed = batch(one, 0, b"delayed")
    two = transactions.end(one, commit=True)
    transactions.begin(two)
    with pytest.raises(ProducerFencedError):
        writer.append("a", 0, [delayed])
    transactions.end(two, commit=True)
    assert values(LogReader(tmp_path)) == []


def test_a_transaction_is_aborted_when_its_time_is_over(tmp_path: Path) -> None:
    now_ms = [1000]
    with LogWriter(tmp_path, clock_ms=lambda: now_ms[0], background=False) as writer:
        make(writer)
        transactions = writer.transactions
        one = transactions.register("x", timeout_ms=500)
        transactions.begin(one)
        writer.append("a", 0, [batch(one, 0, b"slow")])
        writer.append("a", 0, [plain(b"waits")])
        now_ms[0] = 1500
        assert writer.run_maintenance().transactions_aborted == 0
        assert values(LogReader(tmp_path)) == []
        now_ms[0] = 1501
        assert writer.run_maintenance().transactions_aborted == 1
        assert values(LogReader(tmp_path)) == [b"waits"]
        with pytest.raises(TransactionAbortedError, match="timeout of 500 ms"):
            transactions.end(one, commit=True)
        again = transactions.register("x", timeout_ms=500)
        transactions.begin(again)
        transactions.end(again, commit=True)


def test_epochs_that_run_out_are_followed_by_a_new_producer_id(writer: LogWriter) -> None:
    transactions = writer.transactions
    one = transactions.register("x")
    transactions._producers[one.producer_id].producer_epoch = PRODUCER_EPOCH_MAX - 2
    last = ProducerIdentity(one.producer_id, PRODUCER_EPOCH_MAX - 2)
    transactions.begin(last)
    fresh = transactions.end(last, commit=True)
    assert (fresh.producer_id > one.producer_id, fresh.producer_epoch) == (True, 0)
    transactions.begin(fresh)
    with pytest.raises(ProducerFencedError):
        transactions.begin(last)


@pytest.mark.parametrize("in_process", [True, False])
def test_what_was_open_at_a_crash_is_aborted_unless_its_producer_may_live(
    tmp_path: Path, in_process: bool
) -> None:
    folder, disk = Path("/log"), SimulatedDisk(1)
    control = ControlDb(
        sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False), write=True
    )

    def opened() -> LogWriter:
        return LogWriter(folder, files=disk, control=control, sync_threads=1, background=False)

    writer = opened()
    make(writer)
    one = writer.transactions.register("x", in_process=in_process)
    writer.transactions.begin(one)
    writer.append("a", 0, [batch(one, 0, b"before")])
    disk.restart(power_lost=True)
    writer = opened()
    reader = LogReader(folder, files=disk, control=control)
    assert values(reader) == []
    if in_process:
        assert reader.offsets("a")[0] == (0, 2)
        with pytest.raises(TransactionAbortedError):
            writer.append("a", 0, [batch(one, 1, b"after")])
        writer.transactions.begin(writer.transactions.register("x"))
    else:
        assert reader.offsets("a")[0] == (0, 0)
        writer.append("a", 0, [batch(one, 1, b"after")])
        writer.transactions.end(one, commit=True)
        assert values(reader) == [b"before", b"after"]


@pytest.mark.parametrize("power_lost", [False, True])
@pytest.mark.parametrize("commit", [False, True])
def test_a_crash_at_any_step_of_the_end_leaves_all_or_nothing(
    commit: bool, power_lost: bool
) -> None:
    folder, outcomes = Path("/log"), set()
    for step in range(1, 90):
        disk = SimulatedDisk(step)
        control = ControlDb(
            sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False),
            write=True,
            before_commit=disk.step,
        )

        def opened(disk: SimulatedDisk = disk, control: ControlDb = control) -> LogWriter:
            return LogWriter(folder, files=disk, control=control, sync_threads=1, background=False)

        writer = opened()
        make(writer)
        one = writer.transactions.register("x")
        writer.transactions.begin(one)
        for topic in ("a", "b"):
            for partition in (0, 1):
                writer.append(topic, partition, [batch(one, 0, b"v")])
        disk.steps, disk.crash_at = 0, step
        ended = False
        try:
            writer.transactions.end(one, commit=commit, offsets={"g": {IN: 1}}, fence=("w", 1))
            ended = True
        except SimulatedCrash:
            pass
        disk.restart(power_lost=power_lost)
        opened()
        reader = LogReader(folder, files=disk, control=control)
        found = [values(reader, topic, number) for topic in ("a", "b") for number in (0, 1)]
        offset = committed_offsets(control, "g").get(IN)
        fence = fence_of(control, "w")
        outcome = (len(found[0]), offset is not None, fence is not None)
        assert found in ([[b"v"]] * 4, [[]] * 4), f"step {step}: {found}"
        assert outcome in ((1, True, True), (0, False, False)), f"step {step}: {outcome}"
        if ended:
            assert outcome[0] == commit
        outcomes.add(outcome[0])
        if ended:
            break
    assert ended
    assert outcomes == ({0, 1} if commit else {0})


def test_a_time_is_looked_up_over_aborted_records(writer: LogWriter, tmp_path: Path) -> None:
    identity = writer.transactions.register("x")
    writer.transactions.begin(identity)
    writer.append("a", 0, [batch(identity, 0, b"taken back")])
    writer.transactions.end(identity, commit=False)
    reader = LogReader(tmp_path)
    assert reader.offset_for_time("a", 0, 0) == reader.end_offset("a", 0)
    writer.append("a", 0, [encode_records([SimpleRecord(5, b"k", b"v")])])
    assert reader.offset_for_time("a", 0, 1) == 2


def test_a_clock_that_jumps_ends_no_transaction_and_holds_none_up(tmp_path: Path) -> None:
    now_ms, running_ms = [1_000_000_000], [5_000]
    with LogWriter(
        tmp_path,
        background=False,
        clock_ms=lambda: now_ms[0],
        running_ms=lambda: running_ms[0],
    ) as writer:
        make(writer)
        one = writer.transactions.register("x", timeout_ms=60_000)
        writer.transactions.begin(one)
        writer.append("a", 0, [batch(one, 0, b"v")])
        for jump_ms in (10 * 86_400_000, -20 * 86_400_000):
            now_ms[0] += jump_ms
            running_ms[0] += 1_000
            assert writer.run_maintenance().transactions_aborted == 0
            assert writer.transactions.expire() == 0
        one = writer.transactions.end(one, commit=True)
        writer.transactions.begin(one)
        running_ms[0] += 60_001  # while the clock stands still
        assert writer.transactions.expire() == 1
