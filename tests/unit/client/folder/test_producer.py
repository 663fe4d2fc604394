from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pytest
from example_counts import some
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.client.folder.producers import folder_producer

from millstream.client.folder.producer import FolderProducer
from millstream.errors import (
    ConfigError,
    DiskFullError,
    FencedError,
    MillstreamError,
    OverloadError,
    RecordTooLargeError,
    SyncFailedError,
)
from millstream.log.batch import COMPRESSION_MASK, read_header
from millstream.log.compression import COMPRESSIONS
from millstream.log.files import DiskFiles
from millstream.log.reader import LogReader
from millstream.log.writer import LogWriter

WAIT_S = 60


class FaultyDisk(DiskFiles):
    """The real disk, which can be full, slow or broken for the segments of the log."""

    def __init__(self) -> None:
        self.full = False
        self.broken = False
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.at_gate = threading.Event()
        self._segments: set[int] = set()

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> int:
        handle = super().open(path, write=write, create=create)
        self._segments.discard(handle)
        if path.suffix == ".log":
            self._segments.add(handle)
        return handle

    def pwrite(self, handle: int, data: bytes | memoryview, position: int) -> int:
        if handle in self._segments:
            if self.full:
                raise OSError(errno.ENOSPC, "no space left")
            self.at_gate.set()
            assert self.open_gate.wait(WAIT_S)
        return super().pwrite(handle, data, position)

    def sync(self, handle: int) -> None:
        if self.broken and handle in self._segments:
            raise OSError(errno.EIO, "input/output error")
        super().sync(handle)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def log(tmp_path: Path, disk: FaultyDisk) -> Iterator[LogWriter]:
    with LogWriter(tmp_path, files=disk) as writer:
        writer.create_topic("t")
        yield writer
        disk.open_gate.set()
        disk.full = False


def values(log: LogWriter, topic: str = "t", partition: int = 0) -> list[bytes | None]:
    reader = LogReader(log.folder)
    end = reader.end_offset(topic, partition)
    return [
        value
        for batch in reader.read(topic, partition, 0, end, columns=("value",))
        for value in batch["value"].to_pylist()
    ]


@contextmanager
def held(disk: FaultyDisk, producer: FolderProducer) -> Iterator[None]:
    """Keep the sender in a write, with a record of 1 byte, while the block runs."""
    disk.at_gate.clear()
    disk.open_gate.clear()
    first = producer.send("t", b"0")
    assert disk.at_gate.wait(WAIT_S)
    try:
        yield
    finally:
        disk.open_gate.set()
    first.result(WAIT_S)


# -- settings -----------------------------------------------------------------------------------


def test_a_setting_that_does_not_exist_is_told_with_those_that_do(log: LogWriter) -> None:
    for setting, words in [
        ({"durability": "fsync"}, 'durability is \'fsync\'. Choose "synced", "written" or'),
        ({"compression": "zip"}, "compression is 'zip'. Choose \"none\""),
        ({"overload": "drop"}, 'overload is \'drop\'. Choose "block", "drop_newest"'),
        ({"linger_ms": -1}, "linger_ms is -1"),
        ({"buffer_bytes": 0}, "buffer_bytes is 0"),
        ({"block_timeout": "-1 s"}, "block_timeout is '-1 s'"),
        ({"spill_folder": "x"}, "overload is 'block'"),
        ({"overload": "spill"}, "has no name"),
        ({"overload": "spill", "name": "../x"}, "is not possible"),
        ({"overload": "spill", "name": "a", "transactional_id": "b"}, "is transactional"),
        ({"transactional_id": ""}, "transactional_id is empty"),
        ({"transactional_id": "x", "transaction_timeout": "0 s"}, "timeout of 0 ms"),
    ]:
        with pytest.raises(ConfigError, match=words):
            folder_producer(log, **setting)  # type: ignore[arg-type]


def test_written_is_acknowledged_before_it_is_synced_and_read_only_after(tmp_path: Path) -> None:
    with LogWriter(tmp_path, background=False) as log:
        log.create_topic("t")
        for durability in ("written", "periodic"):
            with folder_producer(log, durability=durability) as producer:  # type: ignore[arg-type]
                producer.send("t", durability).result(WAIT_S)
                assert durability.encode() not in values(log)
            log.sync()
            assert durability.encode() in values(log)
        with folder_producer(log) as producer:
            producer.send("t", "synced").result(WAIT_S)
            assert values(log) == [b"written", b"periodic", b"synced"]


@pytest.mark.parametrize("codec", COMPRESSIONS)
def test_batches_are_compressed_as_asked_and_read_back(log: LogWriter, codec: str) -> None:
    sent = [b"value %d " % (n % 7) * 20 for n in range(1000)]
    with folder_producer(log, compression=codec) as producer:  # type: ignore[arg-type]
        for value in sent[:500]:
            producer.send("t", value)
        producer.send_many("t", values=sent[500:])
    assert values(log) == sent
    (segment,) = log.folder.glob("t/*/0/*.log")
    header = read_header(segment.read_bytes(), 0)
    assert COMPRESSIONS[header.attributes & COMPRESSION_MASK] == codec


def test_columns_without_keys_take_turns_among_all_partitions_also_when_sent_one_by_one(
    log: LogWriter,
) -> None:
    log.create_topic("four", partitions=4)
    with folder_producer(log) as producer:
        for number in range(8):
            producer.send_many("four", values=[b"%d" % number]).result(WAIT_S)
    found = [values(log, "four", partition) for partition in range(4)]
    assert found == [[b"%d" % n, b"%d" % (n + 4)] for n in range(4)]


# -- headers ------------------------------------------------------------------------------------


def headers(log: LogWriter) -> list[list[tuple[str, bytes | None]]]:
    reader = LogReader(log.folder)
    end = reader.end_offset("t", 0)
    found = []
    for batch in reader.read("t", 0, 0, end, columns=("headers",)):
        found += [[(h["key"], h["value"]) for h in row] for row in batch["headers"].to_pylist()]
    return found


def test_headers_travel_with_their_record_in_their_order(log: LogWriter) -> None:
    with folder_producer(log, linger_ms=1000) as producer:
        producer.send("t", b"plain")
        producer.send("t", b"1", headers={"trace": b"17", "käse": "brie", "none": None})
        producer.send("t", b"2", headers=[("twice", "a"), ("twice", "b")])
        producer.send("t", b"3", headers=[])
        producer.flush()
        assert headers(log) == [
            [],
            [("trace", b"17"), ("käse", b"brie"), ("none", None)],
            [("twice", b"a"), ("twice", b"b")],
            [],
        ]
        for n in range(1000):
            producer.send("t", b"v", headers={"n": str(n)} if n % 3 == 0 else None)
        producer.flush()
        assert headers(log)[4:] == [[("n", b"%d" % n)] if n % 3 == 0 else [] for n in range(1000)]


def test_a_table_as_it_was_read_is_sent_with_keys_times_and_headers(log: LogWriter) -> None:
    log.create_topic("copy", partitions=3)
    with folder_producer(log) as producer:
        for n in range(50):
            producer.send("t", b"%d" % n, key=n, timestamp_ms=n, headers={"n": str(n)})
        producer.flush()
        columns = ("offset", "timestamp", "key", "value", "headers")
        reader = LogReader(log.folder)
        table = pa.Table.from_batches(reader.read("t", 0, 0, 50, columns=columns))
        assert producer.send_many("copy", table).result(WAIT_S) == 50
    copied = [
        row
        for number, (_, end) in enumerate(reader.offsets("copy"))
        for batch in reader.read("copy", number, 0, end, columns=columns[1:])
        for row in batch.to_pylist()
    ]
    original = table.drop_columns("offset").to_pylist()
    assert sorted(copied, key=lambda row: row["timestamp"]) == original


def test_headers_and_text_that_cannot_be_sent_are_refused(log: LogWriter) -> None:
    with folder_producer(log) as producer:
        for given_headers, words in [
            ({1: b"v"}, "header name 1 is a int"),
            ({"a": 1.5}, "header value 1.5 is a float"),
            (["ab", "cde"], "not pairs"),
            ([("a", "\ud800")], "not valid Unicode"),
            ([("\ud800", "a")], "not valid Unicode"),
        ]:
            with pytest.raises(ConfigError, match=words):
                producer.send("t", b"v", headers=given_headers)  # type: ignore[arg-type]
        for arguments in ({"value": "\ud800"}, {"value": b"", "key": "\ud800"}):
            with pytest.raises(ConfigError, match="not valid Unicode"):
                producer.send("t", **arguments)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="headers is a column of int64"):
            producer.send_many("t", values=["a"], headers=[1])
        with pytest.raises(ConfigError, match="headers has 2 rows"):
            producer.send_many("t", values=["a"], headers=[[], []])
    assert values(log) == []


# -- futures ------------------------------------------------------------------------------------


def test_futures_are_those_of_the_standard_library(log: LogWriter, disk: FaultyDisk) -> None:
    with folder_producer(log, linger_ms=0) as producer:
        called: list[tuple[int, int]] = []
        with held(disk, producer):
            futures = [producer.send("t", b"%d" % n) for n in range(1, 9)]
            assert not futures[0].done()
            assert futures[0].running()
            assert not futures[0].cancel()
            assert not futures[0].cancelled()
            with pytest.raises(TimeoutError):
                futures[0].result(0.01)
            with pytest.raises(TimeoutError):
                futures[0].exception(0)
            futures[1].add_done_callback(lambda future: called.append(future.result()))
            pending = concurrent.futures.wait(futures[2:4], timeout=0).not_done
            assert pending == set(futures[2:4])
            waiting = threading.Thread(target=futures[4].result)
            waiting.start()
        done, pending = concurrent.futures.wait(futures, timeout=WAIT_S)
        assert not pending
        assert [future.result() for future in futures] == [(0, n) for n in range(1, 9)]
        assert set(concurrent.futures.as_completed(futures)) == done == set(futures)
        assert called == [(0, 2)]
        futures[1].add_done_callback(lambda future: called.append(future.result()))
        assert called == [(0, 2), (0, 2)]
        waiting.join(WAIT_S)
        assert futures[0].exception() is None

        async def wait_for_one() -> tuple[int, int]:
            return await asyncio.wrap_future(producer.send("t", b"9"))

        assert asyncio.run(wait_for_one()) == (0, 9)


def test_a_callback_may_send(log: LogWriter) -> None:
    with folder_producer(log, linger_ms=0) as producer:
        answered = threading.Event()

        def answer(_: object) -> None:
            producer.send("t", b"answer")
            answered.set()

        producer.send("t", b"question").add_done_callback(answer)
        assert answered.wait(WAIT_S)
    assert values(log) == [b"question", b"answer"]


# -- overload -----------------------------------------------------------------------------------

RECORD_BYTES = 100  # what a record of 68 bytes counts, with 32 for what is around it
VALUE = b"%068d"


def test_block_waits_for_room_and_then_says_what_was_in_the_way(
    log: LogWriter, disk: FaultyDisk
) -> None:
    with folder_producer(log, linger_ms=0, buffer_bytes=1000, block_timeout="50 ms") as producer:
        with held(disk, producer):
            futures = [producer.send("t", VALUE % n) for n in range(9)]
            with pytest.raises(OverloadError, match=r"933 bytes .* limit is 1,000.* slow down"):
                producer.send("t", VALUE % 9)
            with pytest.raises(OverloadError, match="limit is 1,000"):
                producer.send_many("t", values=[VALUE % 9])
        assert [future.result(WAIT_S) for future in futures] == [(0, n + 1) for n in range(9)]
        assert producer.dropped == 0
    assert values(log) == [b"0", *(VALUE % n for n in range(9))]


def test_block_goes_on_as_soon_as_there_is_room(log: LogWriter, disk: FaultyDisk) -> None:
    with folder_producer(log, linger_ms=0, buffer_bytes=1000) as producer:
        with held(disk, producer):
            for n in range(9):
                producer.send("t", VALUE % n)
            late = threading.Thread(target=producer.send, args=("t", VALUE % 9))
            late.start()
        late.join(WAIT_S)
        producer.flush()
    assert values(log) == [b"0", *(VALUE % n for n in range(10))]


def test_drop_newest_refuses_what_comes(log: LogWriter, disk: FaultyDisk) -> None:
    producer = folder_producer(log, linger_ms=0, buffer_bytes=1000, overload="drop_newest")
    with held(disk, producer):
        futures = [producer.send("t", VALUE % n) for n in range(20)]
        bulk = producer.send_many("t", values=[VALUE % n for n in range(5)])
        assert producer.dropped == 11 + 5
        assert isinstance(futures[9].exception(0), OverloadError)
        assert isinstance(bulk.exception(0), OverloadError)
    with pytest.raises(OverloadError, match="drops the newest"):
        producer.flush()
    producer.flush()
    assert [future.exception() is None for future in futures] == [n < 9 for n in range(20)]
    producer.close()
    assert values(log) == [b"0", *(VALUE % n for n in range(9))]


def test_drop_oldest_lets_queued_records_go_one_by_one(log: LogWriter, disk: FaultyDisk) -> None:
    producer = folder_producer(log, linger_ms=0, buffer_bytes=1000, overload="drop_oldest")
    called: list[int] = []
    with held(disk, producer):
        futures = []
        for n in range(20):
            future = producer.send("t", VALUE % n)
            future.add_done_callback(lambda _, n=n: called.append(n))  # type: ignore[misc]
            futures.append(future)
        assert producer.dropped == 11
        assert called == list(range(11))
        assert isinstance(futures[10].exception(0), OverloadError)
        assert not futures[11].done()
        producer.send("t", b"%0568d" % 0)  # 600 bytes: six others go
        assert producer.dropped == 17
    with pytest.raises(OverloadError, match="drops the oldest"):
        producer.close()
    assert [future.result() for future in futures[17:]] == [(0, 1), (0, 2), (0, 3)]
    assert values(log) == [b"0", *(VALUE % n for n in range(17, 20)), b"%0568d" % 0]


def test_bulk_batches_are_dropped_whole_and_counted_by_record(
    log: LogWriter, disk: FaultyDisk
) -> None:
    producer = folder_producer(log, linger_ms=0, buffer_bytes=1000, overload="drop_oldest")
    with held(disk, producer):
        bulk = producer.send_many("t", values=[VALUE % n for n in range(4)])  # two batches of two
        one = [producer.send("t", VALUE % n) for n in range(9)]
        assert producer.dropped == 4
        assert isinstance(bulk.exception(0), OverloadError)
    assert [future.result(WAIT_S) for future in one] == [(0, n + 1) for n in range(9)]
    with pytest.raises(OverloadError):
        producer.close()


@pytest.mark.parametrize("overload", ["block", "drop_newest", "drop_oldest"])
def test_a_record_larger_than_the_buffer_travels_alone(
    log: LogWriter, disk: FaultyDisk, overload: str
) -> None:
    large = bytes(5000)
    producer = folder_producer(
        log,
        linger_ms=0,
        buffer_bytes=1000,
        block_timeout="100 ms",
        overload=overload,  # type: ignore[arg-type]
    )
    assert producer.send("t", large).result(WAIT_S) == (0, 0)
    assert producer.send_many("t", values=[large]).result(WAIT_S) == 1
    with held(disk, producer):
        queued = producer.send("t", b"queued")
        if overload == "block":
            with pytest.raises(OverloadError):
                producer.send("t", large)
        else:
            assert isinstance(producer.send("t", large).exception(0), OverloadError)
    assert queued.result(WAIT_S) == (0, 3)  # it does not go for one that would not fit
    with suppress(OverloadError):
        producer.close()


def test_a_record_sent_to_a_batch_whose_oldest_was_dropped_has_its_own_offset(
    log: LogWriter, disk: FaultyDisk
) -> None:
    log.create_topic("m", partitions=2)
    producer = folder_producer(log, linger_ms=0, buffer_bytes=2000, overload="drop_oldest")
    with held(disk, producer):
        # The oldest leaves more room than the record for which it is dropped needs.
        oldest, kept = (producer.send("m", text, partition=0) for text in (bytes(300), b"kept"))
        while not oldest.done():
            producer.send("m", bytes(50), partition=1)
        late = producer.send("m", b"late", partition=0)
    with suppress(OverloadError):
        producer.close()
    assert isinstance(oldest.exception(0), OverloadError)
    assert values(log, "m", 0) == [b"kept", b"late"]
    assert [future.result(0).offset for future in (kept, late)] == [0, 1]


@settings(
    max_examples=some(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    overload=st.sampled_from(["drop_newest", "drop_oldest"]),
    limit=st.integers(50, 2000),
    sends=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 400), st.integers(1, 6), st.booleans()),
        max_size=40,
    ),
)
def test_every_record_is_appended_in_order_or_dropped_and_counted(
    log: LogWriter,
    disk: FaultyDisk,
    overload: str,
    limit: int,
    sends: list[tuple[int, int, int, bool]],
) -> None:
    log.create_topic("m", partitions=2)
    producer = folder_producer(
        log,
        linger_ms=0,
        buffer_bytes=limit,
        overload=overload,  # type: ignore[arg-type]
    )
    futures = []
    numbers = iter(range(10_000))
    bulk: list[concurrent.futures.Future[int]] = []
    offered = 0
    with held(disk, producer):
        for partition, size, count, many in sends:
            texts = [b"%d:" % next(numbers) + bytes(size) for _ in range(count)]
            offered += count
            if many:
                bulk.append(producer.send_many("m", values=texts))
            else:
                futures += [(text, producer.send("m", text, partition=partition)) for text in texts]
    with suppress(OverloadError):
        producer.close()
    found = {number: values(log, "m", number) for number in range(2)}
    places = {}
    for text, future in futures:
        if future.exception(0) is None:
            places[text] = future.result()
    for text, (partition, offset) in places.items():
        assert found[partition][offset] == text
    everything = [int(text.split(b":")[0]) for part in found.values() for text in part if text]
    assert len(set(everything)) == len(everything)
    assert offered == len(everything) + producer.dropped
    for part in found.values():
        order = [int(text.split(b":")[0]) for text in part if text]
        assert order == sorted(order)
    assert all(future.done() for future in bulk)
    log.delete_topic("m")


def test_threads_with_a_small_buffer_lose_nothing_and_keep_their_order(log: LogWriter) -> None:
    log.create_topic("p", partitions=3)
    with folder_producer(log, linger_ms=0, buffer_bytes=2000) as producer:

        def work(me: int) -> None:
            for n in range(400):
                producer.send("p", b"%d:%d" % (me, n), partition=me % 3)

        threads = [threading.Thread(target=work, args=(me,)) for me in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    found = [value for partition in range(3) for value in values(log, "p", partition)]
    for me in range(6):
        mine = [int(value.split(b":")[1]) for value in found if value.startswith(b"%d:" % me)]
        assert mine == list(range(400))


# -- a full or broken disk ----------------------------------------------------------------------


def test_block_tries_again_when_the_disk_was_full_and_keeps_the_order(
    log: LogWriter, disk: FaultyDisk
) -> None:
    with folder_producer(log, linger_ms=50) as producer:
        disk.full = True
        futures, bulk = [], []
        for n in range(0, 100, 10):  # many batches for one partition, taken together
            futures.append(producer.send("t", b"%d" % n))
            bulk.append(producer.send_many("t", values=[b"%d" % (n + k) for k in range(1, 10)]))
        with pytest.raises(TimeoutError):
            futures[0].result(0.2)
        disk.full = False
        futures.append(producer.send("t", b"100"))
        assert [future.result(WAIT_S)[1] for future in futures] == list(range(0, 101, 10))
        assert [future.result(WAIT_S) for future in bulk] == [9] * 10
        assert producer.dropped == 0
    assert values(log) == [b"%d" % n for n in range(101)]


def test_block_gives_up_after_its_timeout_and_tells_everybody(
    log: LogWriter, disk: FaultyDisk
) -> None:
    producer = folder_producer(log, linger_ms=0, block_timeout="50 ms")
    disk.full = True
    future = producer.send("t", b"lost")
    assert isinstance(future.exception(WAIT_S), DiskFullError)
    assert producer.dropped == 1
    with pytest.raises(DiskFullError):
        producer.flush()
    disk.full = False
    assert producer.send("t", b"kept").result(WAIT_S) == (0, 0)
    producer.close()


@pytest.mark.not_in_lane("thresholds", "two values are two parts there, counted one by one")
@pytest.mark.parametrize("overload", ["drop_newest", "drop_oldest"])
def test_who_drops_does_not_wait_for_a_full_disk(
    log: LogWriter, disk: FaultyDisk, overload: str
) -> None:
    producer = folder_producer(log, linger_ms=0, overload=overload)  # type: ignore[arg-type]
    disk.full = True
    assert isinstance(producer.send("t", b"a").exception(WAIT_S), DiskFullError)
    assert isinstance(producer.send_many("t", values=["a", "b"]).exception(WAIT_S), DiskFullError)
    assert producer.dropped == 3
    disk.full = False
    with pytest.raises(DiskFullError):
        producer.close()


def test_a_broken_disk_ends_the_producer_and_is_told_once(log: LogWriter, disk: FaultyDisk) -> None:
    producer = folder_producer(log, linger_ms=0)
    disk.broken = True
    future = producer.send("t", b"v")
    assert isinstance(future.exception(WAIT_S), SyncFailedError)
    with pytest.raises(SyncFailedError):
        producer.flush()
    with pytest.raises(SyncFailedError):
        producer.send("t", b"v")
    producer.close()
    with pytest.raises(FencedError, match="was closed"):
        producer.flush()


def test_a_batch_that_is_refused_fails_alone(log: LogWriter) -> None:
    log.create_topic("keyed", settings={"cleanup.policy": "compact"})
    producer = folder_producer(log, linger_ms=1000)
    refused, kept = producer.send("keyed", b"v"), producer.send("t", b"v")
    with pytest.raises(ConfigError, match="without a key"):
        producer.flush()
    assert isinstance(refused.exception(0), ConfigError)
    assert kept.result(0) == (0, 0)
    with pytest.raises(RecordTooLargeError):
        producer.send("t", bytes(64 * 1024 * 1024))
    producer.close()


def test_a_forked_child_cannot_send_what_is_its_parents(log: LogWriter) -> None:
    with folder_producer(log, linger_ms=60_000) as producer:
        producer.send("t", b"the parent's")
        child = os.fork()
        if child == 0:
            code = 1
            with suppress(BaseException):
                for call in (producer.flush, lambda: producer.send("t", b"the child's")):
                    try:
                        call()
                    except FencedError:
                        code += 1
                producer.close()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 3
    assert values(log) == [b"the parent's"]


def test_random_faults_leave_every_future_with_an_outcome(log: LogWriter, disk: FaultyDisk) -> None:
    rng = random.Random(5)
    appended: dict[bytes, tuple[int, int]] = {}
    for life in range(8):
        producer = folder_producer(log, linger_ms=0, block_timeout="20 ms", buffer_bytes=3000)
        futures = {}
        for n in range(rng.randint(20, 200)):
            disk.full = rng.random() < 0.1 or (disk.full and rng.random() < 0.9)
            with suppress(MillstreamError):
                futures[b"%d:%d" % (life, n)] = producer.send("t", b"%d:%d" % (life, n))
        disk.full = False
        with suppress(MillstreamError):
            producer.close()
        failed = 0
        for value, future in futures.items():
            assert future.done()
            failed += future.exception() is not None
            if future.exception() is None:
                appended[value] = future.result()
        assert failed == producer.dropped
    found = values(log)
    assert {value: (0, offset) for offset, value in enumerate(found)} == appended
