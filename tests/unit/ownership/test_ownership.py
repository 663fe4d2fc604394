"""Two processes write to one folder, and continue when the owner dies, closes or is stopped."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from millstream.client import EventLog, connect
from millstream.errors import (
    ConfigError,
    FencedError,
    FolderOwnedError,
    TopicExistsError,
    TransactionAbortedError,
)
from millstream.log.owner import SOCKET_NAME
from millstream.log.writer import LogWriter
from millstream.ownership import access, frames
from millstream.record import TopicPartition

WAIT_S = 30


def values(log: EventLog, topic: str = "t") -> list[bytes | None]:
    return [record.value for record in log.consumer(topic, follow=False)]


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.005)


class Boom(Exception):
    pass


def do_everything(log: EventLog) -> dict[str, object]:
    """Send every kind of request that a client has; return all results."""
    results: dict[str, object] = {}
    results["created"] = log.create_topic("created", settings={"retention.ms": "5000"}).partitions
    results["altered"] = log.alter_topic("created", partitions=3).partitions
    with log.producer(linger_ms=0) as producer:
        results["positions"] = [
            producer.send("t", b"%d" % n, partition=0).result() for n in range(4)
        ]
        results["start"] = log.delete_records("t", 0, 1)
    with log.producer(linger_ms=0, transactional_id="x") as producer:
        with producer.transaction() as transaction:
            producer.send("t", b"in", partition=0)
            producer.send("t", b"in too", partition=1)
            transaction.commit_offsets("g", {TopicPartition("t", 0): (3, "note")})
            transaction.fence("w", 7)
        with suppress(Boom), producer.transaction():
            producer.send("t", b"out", partition=0).result()
            raise Boom
        with producer.transaction():
            producer.send("t", b"last", partition=1)
    log.delete_topic("created")
    results["values"] = sorted(values(log))
    results["offsets"] = log.offsets("t")
    found = log.committed_offsets("g")[TopicPartition("t", 0)]
    results["rest"] = (list(log.topics()), log.fences(), found.offset, found.metadata)
    return results


def test_whenever_the_owner_dies_a_client_continues_as_if_it_had_not(
    tmp_path: Path, owners
) -> None:
    """At every request, before it is handled and after it, when only the response is lost."""
    owners.start(tmp_path / "whole")
    with connect(tmp_path / "whole") as log:
        wanted = do_everything(log)
    assert wanted["values"] == [b"1", b"2", b"3", b"in", b"in too", b"last"]
    died = 0
    for at in range(1, 40):
        for when in ("before", "after"):
            folder = tmp_path / f"{at}-{when}"
            owner = owners.start(folder, at=at, when=when)
            with connect(folder) as log:
                assert do_everything(log) == wanted, (at, when)
                with suppress(FolderOwnedError):
                    log.acquire_ownership()
                    died += 1
            with suppress(ProcessLookupError):
                os.kill(owner, signal.SIGKILL)
        if died < 2 * at:
            break
    assert died >= 2 * 19
    assert died == 2 * (at - 1)  # the owner died at every request, both times


def test_the_owners_transaction_dies_with_it_and_a_clients_continues(
    tmp_path: Path, owners
) -> None:
    owner = owners.start(tmp_path, "open")
    with connect(tmp_path) as log, log.producer(linger_ms=0, transactional_id="mine") as producer:
        with producer.transaction():
            producer.send("t", b"before", partition=1).result()
            os.kill(owner, signal.SIGKILL)
            producer.send("t", b"after", partition=1).result()
        assert values(log) == [b"before", b"after"]
        log.acquire_ownership()
        assert log.read("t", 0, isolation="read_uncommitted")["value"].to_pylist() == [b"never"]


def test_the_transaction_of_a_client_that_dies_is_aborted_at_once(tmp_path: Path, owners) -> None:
    with connect(tmp_path) as log, log.producer(linger_ms=0) as producer:
        log.create_topic("t")
        client = owners.start(tmp_path, "client")
        until(lambda: log.read("t", 0, isolation="read_uncommitted").num_rows == 1)
        producer.send("t", b"after it").result()
        assert values(log) == []
        os.kill(client, signal.SIGKILL)
        until(lambda: values(log) == [b"after it"])  # its timeout is a minute


def test_an_owner_that_closes_hands_over_cleanly(tmp_path: Path, owners) -> None:
    owner = owners.start(tmp_path)
    with connect(tmp_path) as log, log.producer(linger_ms=0, transactional_id="x") as producer:
        with producer.transaction():
            producer.send("t", b"1", partition=0).result()
            os.kill(owner, signal.SIGTERM)
            until(lambda: not (tmp_path / SOCKET_NAME).exists())
            producer.send("t", b"2", partition=0).result()
        assert values(log) == [b"1", b"2"]
        log.acquire_ownership()
        assert stat.S_IMODE((tmp_path / SOCKET_NAME).stat().st_mode) == 0o600
    assert not (tmp_path / SOCKET_NAME).exists()


def test_a_stopped_owner_still_owns_and_its_clients_wait(tmp_path: Path, owners) -> None:
    owner = owners.start(tmp_path)
    with connect(tmp_path) as log, log.producer(linger_ms=0) as producer:
        producer.send("t", b"1", partition=0).result()
        owners.stop(owner)
        future = producer.send("t", b"2", partition=0)
        with pytest.raises(TimeoutError):
            future.result(0.3)
        os.kill(owner, signal.SIGCONT)
        assert future.result(WAIT_S).offset == 1
        with pytest.raises(FolderOwnedError, match=f"owned by process {owner};"):
            log.acquire_ownership()


def test_a_folder_can_be_requested_and_its_owner_becomes_a_client(tmp_path: Path, owners) -> None:
    owners.start(tmp_path)
    with connect(tmp_path) as log, log.producer(linger_ms=0) as producer:
        producer.send("t", b"1", partition=0).result()
        assert log.archive("t", None, close_active=False) is not None  # only the owner can
        log.acquire_ownership()
        producer.send("t", b"2", partition=0).result()
        assert values(log) == [b"1", b"2"]


def test_a_folder_is_not_handed_over_in_the_middle_of_a_transaction(
    tmp_path: Path, owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "HAND_OVER_S", 0.1)
    monkeypatch.setattr(access, "RESERVED_S", 0.0)
    with connect(tmp_path) as log, log.producer(linger_ms=0, transactional_id="x") as producer:
        log.create_topic("t")
        of_folder = _access(tmp_path)
        with producer.transaction():
            producer.send("t", b"1").result()
            with pytest.raises(FolderOwnedError, match="in the middle"):
                of_folder.hand_over()
            producer.send("t", b"2").result()
        assert values(log) == [b"1", b"2"]
        of_folder.hand_over()
        of_folder.hand_over()  # harmless
        with producer.transaction():  # this process owns the folder again
            producer.send("t", b"3")
        assert values(log) == [b"1", b"2", b"3"]


def _access(folder: Path) -> access.FolderAccess:
    from millstream.client.folder import log

    return log._accesses[os.path.realpath(folder)][0]


def test_an_owner_that_serves_no_other_process_is_named(tmp_path: Path, owners) -> None:
    owner = owners.start(tmp_path, "without socket")
    with connect(tmp_path) as log:
        with pytest.raises(FolderOwnedError, match=f"owned by process {owner};"):
            log.create_topic("u")
        os.kill(owner, signal.SIGKILL)
        until(lambda: "u" in log.topics() or log.create_topic("u") is not None)


def test_the_socket_of_a_dead_owner_is_removed_by_one_that_serves_no_other_process(
    tmp_path: Path, owners
) -> None:
    owner = owners.start(tmp_path)
    os.kill(owner, signal.SIGKILL)
    (tmp_path / SOCKET_NAME).stat()
    until(lambda: _opens(tmp_path))
    assert not (tmp_path / SOCKET_NAME).exists()


def _opens(folder: Path) -> bool:
    try:
        LogWriter(folder).close()
    except FolderOwnedError:
        return False
    return True


def test_the_owner_of_a_folder_with_a_long_path_serves_others_too(tmp_path: Path, owners) -> None:
    folder = tmp_path / ("a" * 100) / ("b" * 100)
    folder.mkdir(parents=True)
    owners.start(folder)
    with connect(folder) as log, log.producer() as producer:
        assert producer.send("t", b"v", partition=0).result() == (0, 0)
        assert (folder / SOCKET_NAME).exists()


def test_a_child_of_the_owner_does_not_keep_clients_waiting_when_it_dies(
    tmp_path: Path, owners
) -> None:
    owner = owners.start(tmp_path / "data", "forking")
    with connect(tmp_path / "data") as log, log.producer(linger_ms=0) as producer:
        producer.send("t", b"1", partition=0).result()
        os.kill(owner, signal.SIGKILL)
        assert producer.send("t", b"2", partition=0).result(4).offset == 1
    (tmp_path / "stop").touch()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_of_a_client_is_no_client(tmp_path: Path, owners) -> None:
    owners.start(tmp_path)
    with connect(tmp_path) as log, log.producer(linger_ms=0) as producer:
        producer.send("t", b"1", partition=0).result()
        child = os.fork()
        if child == 0:
            code = 1
            with suppress(BaseException):
                with pytest.raises(FencedError):
                    log.create_topic("u")
                with connect(tmp_path) as own, own.producer(linger_ms=0) as fresh:
                    fresh.send("t", b"2", partition=0).result()
                code = 0
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        producer.send("t", b"3", partition=0).result()
        assert values(log) == [b"1", b"2", b"3"]


def test_another_version_is_refused_by_name(
    tmp_path: Path, owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners.start(tmp_path)
    monkeypatch.setattr(frames, "PROTOCOL", 3)
    with connect(tmp_path) as log, pytest.raises(ConfigError, match="versions 2 and 3"):
        log.create_topic("u")


def test_many_batches_of_a_producer_keep_their_order_and_a_rejected_one_leaves_no_gap(
    tmp_path: Path, owners
) -> None:
    owners.start(tmp_path)
    with connect(tmp_path) as log:
        log.create_topic("c", cleanup="compact")
        with log.producer(linger_ms=1000, buffer_bytes=4000) as producer:
            futures = [
                producer.send("c", b"x" * 700, key=None if n % 7 == 3 else b"%d" % n)
                for n in range(60)
            ]
            with suppress(ConfigError):
                producer.flush()
        kept = [n for n, future in enumerate(futures) if future.exception() is None]
        assert {n % 7 for n in range(60)} - {n % 7 for n in kept} <= {3}
        records = list(log.consumer("c", follow=False))
        assert [record.key for record in records] == [b"%d" % n for n in kept]
        assert [futures[n].result().offset for n in kept] == [r.offset for r in records]


def test_several_threads_and_connections_of_a_client_write_at_once(tmp_path: Path, owners) -> None:
    owner = owners.start(tmp_path)
    with connect(tmp_path) as one, connect(tmp_path) as two:
        logs = [one, two]

        def write(number: int) -> None:
            with logs[number % 2].producer(linger_ms=0) as producer:
                for n in range(25):
                    producer.send("t", b"%d/%d" % (number, n), partition=number % 2).result(WAIT_S)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: sum(end for _, end in one.offsets("t")) > 20)
        os.kill(owner, signal.SIGKILL)
        for thread in threads:
            thread.join()
        found = values(one)
        assert sorted(found) == sorted(b"%d/%d" % (m, n) for m in range(4) for n in range(25))
        with pytest.raises(TopicExistsError):
            two.create_topic("t")


def test_a_transaction_that_was_too_slow_is_aborted_for_a_client_too(
    tmp_path: Path, owners
) -> None:
    owners.start(tmp_path)
    with (
        connect(tmp_path) as log,
        log.producer(linger_ms=0, transactional_id="x", transaction_timeout="50 ms") as producer,
    ):
        with pytest.raises(TransactionAbortedError), producer.transaction():
            producer.send("t", b"1", partition=0).result()
            time.sleep(0.1)
            until(lambda: log.run_maintenance().transactions_aborted == 1)
        with producer.transaction():
            producer.send("t", b"2", partition=0)
        assert values(log) == [b"2"]
