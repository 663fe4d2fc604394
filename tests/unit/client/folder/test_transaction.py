from __future__ import annotations

import errno
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from unit.client.folder.producers import folder_producer

from millstream.client.folder.producer import FolderProducer
from millstream.errors import (
    ConfigError,
    DiskFullError,
    FencedError,
    FencePassedError,
    OverloadError,
    ProducerFencedError,
    TransactionAbortedError,
    UnknownTopicError,
)
from millstream.log.control import ControlDb
from millstream.log.files import DiskFiles
from millstream.log.groups import committed_offsets
from millstream.log.reader import LogReader
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

WAIT_S = 60
TOPICS = {"a": 2, "b": 1}


class Clock:
    now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


class FullDisk(DiskFiles):
    full = False

    def __init__(self) -> None:
        self._segments: set[int] = set()

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> int:
        handle = super().open(path, write=write, create=create)
        (self._segments.add if path.suffix == ".log" else self._segments.discard)(handle)
        return handle

    def pwrite(self, handle: int, data: bytes | memoryview, position: int) -> int:
        if self.full and handle in self._segments:
            raise OSError(errno.ENOSPC, "no space left")
        return super().pwrite(handle, data, position)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def disk() -> FullDisk:
    return FullDisk()


@pytest.fixture
def log(tmp_path: Path, clock: Clock, disk: FullDisk) -> Iterator[LogWriter]:
    with LogWriter(tmp_path, clock_ms=clock, files=disk, background=False) as writer:
        for topic, partitions in TOPICS.items():
            writer.create_topic(topic, partitions=partitions)
        yield writer
        disk.full = False


def seen(log: LogWriter, isolation: str = "read_committed") -> list[bytes]:
    """Everything that a reader sees, topic by topic and partition by partition."""
    reader = LogReader(log.folder, isolation=isolation)  # type: ignore[arg-type]
    found: list[bytes] = []
    for topic in reader.topics():
        for number, (start, end) in enumerate(reader.offsets(topic)):
            for batch in reader.read(topic, number, start, end, columns=("value",)):
                found += batch["value"].to_pylist()
    return found


def offset_of(log: LogWriter, group: str, topic: str, partition: int) -> int | None:
    found = committed_offsets(log.control, group).get(TopicPartition(topic, partition))
    return None if found is None else found.offset


def send_everywhere(producer: FolderProducer, text: str) -> list[bytes]:
    sent = []
    for topic, partitions in TOPICS.items():
        for number in range(partitions):
            sent.append(f"{text}:{topic}{number}")
            producer.send(topic, sent[-1], partition=number)
    return [value.encode() for value in sent]


# -- what a transaction is ----------------------------------------------------------------------


def test_records_offsets_and_fence_become_true_together(log: LogWriter) -> None:
    with folder_producer(log, transactional_id="x") as producer:
        with producer.transaction() as t:
            sent = send_everywhere(producer, "1")
            t.commit_offsets("g", {TopicPartition("a", 0): 17})
            t.commit_offsets("g", {TopicPartition("a", 1): (18, "note")})
            t.commit_offsets("h", {TopicPartition("b", 0): 1})
            t.fence("w", batch_id=7)
            producer.flush()
            assert seen(log) == []
            assert seen(log, "read_uncommitted") == sent
            assert offset_of(log, "g", "a", 0) is None
        assert seen(log) == sent
        assert offset_of(log, "g", "a", 0) == 17
        assert offset_of(log, "g", "a", 1) == 18
        assert offset_of(log, "h", "b", 0) == 1
        with (
            pytest.raises(FencePassedError, match="is at batch 7") as caught,
            producer.transaction() as t,
        ):
            send_everywhere(producer, "again")
            t.commit_offsets("g", {TopicPartition("a", 0): 99})
            t.fence("w", batch_id=7)
        assert caught.value.batch_id == 7
        assert seen(log) == sent
        assert offset_of(log, "g", "a", 0) == 17
        with producer.transaction() as t:
            more = send_everywhere(producer, "2")
            t.fence("w", batch_id=8)
        assert sorted(seen(log)) == sorted(sent + more)


def test_what_the_block_raises_takes_everything_back(log: LogWriter) -> None:
    with folder_producer(log, transactional_id="x", linger_ms=60_000) as producer:
        with pytest.raises(ZeroDivisionError), producer.transaction():
            queued = producer.send("b", b"queued")
            raise ZeroDivisionError
        assert isinstance(queued.exception(0), TransactionAbortedError)
        assert seen(log, "read_uncommitted") == []
        with pytest.raises(ZeroDivisionError), producer.transaction() as t:
            sent = send_everywhere(producer, "sent")
            producer.flush()
            t.commit_offsets("g", {TopicPartition("a", 0): 17})
            t.fence("w", batch_id=1)
            raise ZeroDivisionError
        assert seen(log) == []
        assert seen(log, "read_uncommitted") == sent
        assert offset_of(log, "g", "a", 0) is None
        producer.flush()  # the block has told; there is nothing more to tell
        with producer.transaction() as t:
            sent = send_everywhere(producer, "next")
            t.fence("w", batch_id=1)
        assert seen(log) == sent


def test_a_transaction_without_records_commits_its_offsets(log: LogWriter) -> None:
    with folder_producer(log, transactional_id="x") as producer:
        with producer.transaction():
            pass
        with producer.transaction() as t:
            t.commit_offsets("g", {TopicPartition("a", 0): 3})
    assert offset_of(log, "g", "a", 0) == 3
    assert seen(log, "read_uncommitted") == []


def test_many_transactions_over_many_batches_keep_their_order(log: LogWriter) -> None:
    sent: list[bytes] = []
    with folder_producer(log, transactional_id="x", linger_ms=0, compression="lz4") as producer:
        for number in range(20):
            keep = number % 3 != 0
            with suppress(ZeroDivisionError), producer.transaction():
                values = [b"%d:%d" % (number, n) for n in range(200)]
                for value in values[:100]:
                    producer.send("b", value)
                producer.send_many("b", values=values[100:])
                if not keep:
                    producer.flush()
                    raise ZeroDivisionError
            sent += values if keep else []
    assert seen(log) == sent


def test_threads_may_send_into_one_transaction(log: LogWriter) -> None:
    with folder_producer(log, transactional_id="x", linger_ms=0, buffer_bytes=3000) as producer:
        with producer.transaction():

            def work(me: int) -> None:
                for n in range(200):
                    producer.send("a", b"%d:%d" % (me, n), partition=me % 2)

            threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert seen(log) == []
        found = seen(log)
    for me in range(4):
        mine = [int(value.split(b":")[1]) for value in found if value.startswith(b"%d:" % me)]
        assert mine == list(range(200))


# -- misuse -------------------------------------------------------------------------------------


def test_misuse_is_told_with_the_way_out(log: LogWriter) -> None:
    with folder_producer(log) as plain, pytest.raises(ConfigError, match="no transactional_id"):
        plain.transaction()
    producer = folder_producer(log, transactional_id="x")
    for call in (
        lambda: producer.send("b", b"v"),
        lambda: producer.send_many("b", values=["v"]),
    ):
        with pytest.raises(ConfigError, match="no transaction is open"):
            call()
    producer.flush()
    with producer.transaction() as t:
        with pytest.raises(ConfigError, match="open already"), producer.transaction():
            pass
        for call, words in [
            (lambda: t.commit_offsets("", {}), "the group"),
            (lambda: t.commit_offsets("g", {TopicPartition("a", 0): -1}), "negative"),
            (lambda: t.commit_offsets("g", {TopicPartition("a", 9): 0}), "no partition 9"),
            (lambda: t.fence("", batch_id=0), "not possible"),
            (lambda: t.fence("w", batch_id=-1), "not possible"),
        ]:
            with pytest.raises(ConfigError, match=words):
                call()
        with pytest.raises(UnknownTopicError):
            t.commit_offsets("g", {TopicPartition("z", 0): 0})
        t.fence("w", batch_id=1)
        t.fence("w", batch_id=1)
        with pytest.raises(ConfigError, match="has the fence"):
            t.fence("w", batch_id=2)
        producer.send("b", b"kept")
    with pytest.raises(ConfigError, match="no transaction is open"):
        producer.send("b", b"v")
    producer.close()
    with pytest.raises(FencedError, match="was closed"), producer.transaction():
        pass
    assert seen(log) == [b"kept"]


# -- failures -----------------------------------------------------------------------------------


def test_a_send_that_failed_takes_the_transaction_back_even_if_a_flush_told_it(
    log: LogWriter,
) -> None:
    log.create_topic("keyed", settings={"cleanup.policy": "compact"})
    with folder_producer(log, transactional_id="x") as producer:
        for flush in (False, True):
            with pytest.raises(ConfigError, match="without a key"), producer.transaction():
                send_everywhere(producer, "lost")
                producer.send("keyed", b"v")
                if flush:
                    with pytest.raises(ConfigError, match="without a key"):
                        producer.flush()
                producer.send("keyed", b"v", key="k")
            assert seen(log) == []
        producer.flush()
        with producer.transaction():
            sent = send_everywhere(producer, "kept")
            producer.send("keyed", b"v", key="k")
        assert seen(log) == [*sent, b"v"]


def test_a_dropped_record_takes_the_transaction_back(log: LogWriter) -> None:
    producer = folder_producer(
        log, transactional_id="x", linger_ms=60_000, buffer_bytes=100, overload="drop_newest"
    )
    with producer:
        with pytest.raises(OverloadError), producer.transaction():
            for _ in range(9):
                producer.send("b", b"v")
        assert producer.dropped == 9 - 3
        assert seen(log) == []
        with producer.transaction():
            producer.send("b", b"kept")
    assert seen(log) == [b"kept"]


def test_a_full_disk_is_waited_for_and_given_up_in_time(log: LogWriter, disk: FullDisk) -> None:
    with folder_producer(
        log, transactional_id="x", linger_ms=0, block_timeout="200 ms"
    ) as producer:
        with producer.transaction():
            disk.full = True
            late = producer.send("b", b"late")
            with pytest.raises(TimeoutError):
                late.result(0.05)
            disk.full = False
        with pytest.raises(DiskFullError), producer.transaction():
            producer.send("a", b"lost", partition=0)
            producer.flush()
            disk.full = True
            producer.send("b", b"lost")
        disk.full = False
        with pytest.raises(ZeroDivisionError), producer.transaction():
            disk.full = True
            producer.send("b", b"lost")
            raise ZeroDivisionError
        disk.full = False
        with producer.transaction():
            producer.send("b", b"kept")
    assert seen(log) == [b"late", b"kept"]


def test_an_end_that_could_not_be_noted_is_made_up_for(tmp_path: Path) -> None:
    fail = [0]

    def before_commit() -> None:
        if fail[0]:
            fail[0] -= 1
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    control = ControlDb(connection, write=True, before_commit=before_commit)
    with LogWriter(tmp_path, control=control, background=False) as log:
        log.create_topic("t")
        with folder_producer(log, transactional_id="x") as producer:
            for failures in (1, 2):  # the commit; the commit and the abort
                with pytest.raises(DiskFullError), producer.transaction():
                    producer.send("t", b"lost")
                    fail[0] = failures
                assert log.transactions.open_count() == failures - 1
                with producer.transaction():
                    producer.send("t", b"kept")
        reader = LogReader(tmp_path, control=control)
        (end,) = [end for _, end in reader.offsets("t")]
        found = [v for b in reader.read("t", 0, 0, end) for v in b["value"].to_pylist()]
        assert found == [b"kept", b"kept"]


# -- fencing and timeouts -----------------------------------------------------------------------


def test_a_newer_producer_of_the_same_id_fences_the_older(log: LogWriter) -> None:
    old = folder_producer(log, transactional_id="x")
    with pytest.raises(ProducerFencedError, match="replaced by a newer one"), old.transaction():
        send_everywhere(old, "old")
        old.flush()
        new = folder_producer(log, transactional_id="x")
        old.send("b", b"zombie")
    for call in (
        lambda: old.send("b", b"zombie"),
        old.flush,
        lambda: old.transaction().__enter__(),
    ):
        with pytest.raises(ProducerFencedError):
            call()
    old.close()
    with new.transaction():
        sent = send_everywhere(new, "new")
    new.close()
    assert seen(log) == sent


def test_a_producer_that_was_fenced_between_transactions_learns_it_at_the_next(
    log: LogWriter,
) -> None:
    old = folder_producer(log, transactional_id="x")
    with folder_producer(log, transactional_id="x") as new:
        with pytest.raises(ProducerFencedError), old.transaction():
            raise AssertionError("the block must not begin")
        old.close()
        with new.transaction():
            new.send("b", b"v")
    assert seen(log) == [b"v"]


def test_a_transaction_that_is_open_for_too_long_is_aborted_and_the_next_one_works(
    log: LogWriter, clock: Clock
) -> None:
    with folder_producer(
        log, transactional_id="x", transaction_timeout="5 s", linger_ms=0
    ) as producer:
        with (
            pytest.raises(TransactionAbortedError, match="timeout of 5000 ms"),
            producer.transaction(),
        ):
            send_everywhere(producer, "slow")
            producer.flush()
            clock.now_ms += 5001
            assert log.transactions.expire() == 1
        with (
            pytest.raises(TransactionAbortedError, match="timeout of 5000 ms"),
            producer.transaction(),
        ):
            clock.now_ms += 5001
            assert log.transactions.expire() == 1
            late = producer.send("b", b"late")
            assert isinstance(late.exception(WAIT_S), TransactionAbortedError)
        with pytest.raises(ZeroDivisionError), producer.transaction():
            clock.now_ms += 5001
            assert log.transactions.expire() == 1
            raise ZeroDivisionError
        with producer.transaction():
            sent = send_everywhere(producer, "quick")
    assert seen(log) == sent


def test_a_timed_out_producer_does_not_fence_the_one_that_took_over(
    log: LogWriter, clock: Clock
) -> None:
    old = folder_producer(log, transactional_id="x", transaction_timeout="5 s")
    with pytest.raises(TransactionAbortedError), old.transaction():
        old.send("b", b"old")
        clock.now_ms += 5001
        log.transactions.expire()
        new = folder_producer(log, transactional_id="x")
    with new.transaction():
        with pytest.raises(ProducerFencedError), old.transaction():
            old.send("b", b"zombie")
        new.send("b", b"new")
    new.close()
    old.close()
    assert seen(log) == [b"new"]


def test_closing_takes_an_open_transaction_back(log: LogWriter) -> None:
    producer = folder_producer(log, transactional_id="x", linger_ms=60_000)
    with pytest.raises(TransactionAbortedError, match="closed"), producer.transaction():
        queued = producer.send("b", b"v")
        producer.close()
        with pytest.raises(FencedError):
            producer.send("b", b"v")
    assert isinstance(queued.exception(0), TransactionAbortedError)
    assert log.transactions.open_count() == 0
    assert seen(log, "read_uncommitted") == []


# -- the death of the process -------------------------------------------------------------------

# One process that loads the program once and forks a child for each life; a child says what it
# begins and what is committed, until it is killed.
LIVES = """
import os, random, signal, sys, time
from millstream.client.folder.producer import FolderProducer
from millstream.client.producer import ProducerSettings
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

folder, seed, lives = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def live(number, out):
    rng = random.Random(f"{seed}:{number}")
    with LogWriter(folder, segment_bytes=20_000) as log:
        for topic in ("a", "b"):
            if topic not in log.topics():
                log.create_topic(topic, partitions=2)
        producer = FolderProducer(log, ProducerSettings(transactional_id="x",
            linger_ms=rng.choice([0, 1]), durability=rng.choice(["synced", "written", "periodic"])))
        for n in range(number * 10_000, number * 10_000 + 5000):
            os.write(out, b"begin %d\\n" % n)
            try:
                with producer.transaction() as t:
                    for place in [("a", 0), ("a", 1), ("b", 0), ("b", 1)]:
                        many = rng.choice([1, 3])
                        for k in range(many):
                            producer.send(place[0], b"%d:%d:%d" % (n, k, many), partition=place[1])
                    if rng.random() < 0.3:
                        producer.flush()
                    t.commit_offsets("g", {TopicPartition("a", 0): n})
                    t.fence("w", batch_id=n)
                    if rng.random() < 0.2:
                        raise ZeroDivisionError
                os.write(out, b"committed %d\\n" % n)
            except ZeroDivisionError:
                os.write(out, b"aborted %d\\n" % n)

for number in range(lives):
    rng = random.Random(f"{seed}.{number}")
    inside, out = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(inside)
        try:
            live(number, out)
        except BaseException as error:
            os.write(out, b"died of %r\\n" % error)
        os._exit(1)
    os.close(out)
    said = b""
    lines = rng.randint(1, 40)
    while said.count(b"\\n") < lines:
        said += os.read(inside, 1)
    time.sleep(rng.random() * 0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(inside, 4096):
        said += more
    os.close(inside)
    sys.stdout.buffer.write(said if said.endswith(b"\\n") else said[: said.rfind(b"\\n") + 1])
"""


def test_after_kill_9_every_transaction_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    lives, seed = 20, 11
    said = subprocess.run(
        [sys.executable, "-c", LIVES, str(tmp_path), str(seed), str(lives)],
        capture_output=True,
        timeout=250,
        check=True,
    ).stdout.decode()
    assert "died" not in said, said
    told = [line.split() for line in said.splitlines()]
    committed = {int(number) for what, number in told if what == "committed"}
    aborted = {int(number) for what, number in told if what == "aborted"}
    begun = {int(number) for what, number in told if what == "begin"}
    assert len({number // 10_000 for number in begun}) == lives
    with LogWriter(tmp_path) as log:
        reader = LogReader(tmp_path)
        by_place = []
        for topic in ("a", "b"):
            for number, (start, end) in enumerate(reader.offsets(topic)):
                found = [
                    tuple(map(int, value.split(b":")))
                    for batch in reader.read(topic, number, start, end, columns=("value",))
                    for value in batch["value"].to_pylist()
                ]
                whole = {(n, many) for n, _, many in found}
                assert found == [(n, k, many) for n, many in sorted(whole) for k in range(many)]
                by_place.append({n for n, _ in whole})
        visible = by_place[0]
        assert all(place == visible for place in by_place)
        assert committed <= visible <= begun - aborted
        assert log.transactions.open_count() == 0
        assert offset_of(log, "g", "a", 0) == max(visible)
        rows = log.control.rows("SELECT batch_id FROM fences WHERE writer = 'w'")
        assert rows == [(max(visible),)]
