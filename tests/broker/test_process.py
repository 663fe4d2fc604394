"""The broker as its users start it: ready, killed, started again, and ended in order."""

from __future__ import annotations

import mmap
import platform
import signal
import subprocess
import time
from pathlib import Path

import pytest
from after_main_thread import run_after_the_main_thread
from broker.broker_process import MILLSTREAM, WAIT_S, AsProcess
from broker.raw_client import RawClient, batch, create, fetch, fetched, produce

import millstream as ms
from millstream.errors import FolderOwnedError

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

SILENT = {"log_level": 0}


def make(address: str, *names: str) -> None:
    client = AdminClient({"bootstrap.servers": address, **SILENT})
    for made in client.create_topics([NewTopic(name, 1, 1) for name in names]).values():
        made.result(WAIT_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_when_it_is_ready_and_ends_in_order(folder, number) -> None:
    with AsProcess(folder) as broker:
        make(broker.address, "t")
        Producer({"bootstrap.servers": broker.address, **SILENT}).flush(1)
        code, out, err = broker.stop(number)
    assert (code, err) == (0, "")
    assert out == f"Kafka clients reach {folder} at {broker.address} (Ctrl-C ends it)\n"
    assert not broker.ready_file.exists()
    with ms.connect(folder) as log:  # the folder is free, and was closed cleanly
        assert list(log.topics()) == ["t"]
        log.create_topic("u")


def test_the_folder_has_one_owner(folder) -> None:
    with AsProcess(folder):
        done = subprocess.run(
            [*MILLSTREAM, "broker", str(folder), "--listen", "127.0.0.1:0"],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    assert done.returncode == 1
    assert "owned by process" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "0.0.0.0:0"], "--insecure"),
        (["--listen", "nowhere"], "HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "HOST:PORT"),
        (["--offsets-retention", "soon"], "--offsets-retention"),
    ],
)
def test_a_wrong_call_is_one_sentence(folder, options, message) -> None:
    done = subprocess.run(
        [*MILLSTREAM, "broker", str(folder), *options],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert not folder.exists()


def test_a_port_that_is_taken_is_named(folder, tmp_path) -> None:
    with AsProcess(folder) as broker:
        done = subprocess.run(
            [*MILLSTREAM, "broker", str(tmp_path / "other"), "--listen", broker.address],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    assert done.returncode == 2
    assert "taken" in done.stderr


@pytest.mark.client("confluent-kafka")
def test_this_machine_reads_the_folder_beside_it(folder) -> None:
    with AsProcess(folder) as broker, ms.connect(folder) as log:
        make(broker.address, "t")
        made = Producer({"bootstrap.servers": broker.address, "compression.type": "lz4", **SILENT})
        for number in range(100):
            made.produce("t", b"%d" % number, key=b"k", headers=[("a", b"1")])
        assert made.flush(WAIT_S) == 0
        with log.consumer("t", group="beside", follow=False) as found:
            records = list(found)
        assert [one.value for one in records] == [b"%d" % number for number in range(100)]
        assert records[0].headers == (("a", b"1"),)
        reader = Consumer({"bootstrap.servers": broker.address, "group.id": "beside", **SILENT})
        (at,) = reader.committed([TopicPartition("t", 0)], WAIT_S)
        reader.close()
        assert at.offset == 100  # what one side commits, the other goes on with
        with pytest.raises(FolderOwnedError, match="owned by process"):
            log.acquire_ownership()
        log.create_topic("u")  # through the broker, as everything that is written
        with log.producer() as beside:
            assert beside.send("t", b"beside").result(WAIT_S) == (0, 100)
        assert log.read("t", 0, 100)["value"].to_pylist() == [b"beside"]


def test_it_takes_the_folder_over_from_a_program_which_goes_on_through_it(folder) -> None:
    with ms.connect(folder) as log, log.producer(linger_ms=0) as producer:
        log.create_topic("t")
        producer.send("t", b"owner").result(WAIT_S)
        with AsProcess(folder) as broker:
            producer.send("t", b"guest").result(WAIT_S)
            with pytest.raises(FolderOwnedError):
                log.acquire_ownership()
            made = Producer({"bootstrap.servers": broker.address, **SILENT})
            made.produce("t", b"client")
            assert made.flush(WAIT_S) == 0
        producer.send("t", b"owner again").result(WAIT_S)
        log.acquire_ownership()
        found = [record.value for record in log.consumer("t", follow=False)]
    assert found == [b"owner", b"guest", b"client", b"owner again"]


def pages_mapped(pid: int) -> int:
    """Return how many pages a process had to be given, from its start on."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_answers_come_and_go_in_the_same_memory(folder) -> None:
    with AsProcess(folder) as broker, RawClient(broker.address) as client:
        client.request("CreateTopics", 5, create())
        big = batch(bytes(1 << 20))
        for _ in range(4):
            client.request("Produce", 8, produce(big))

        def read() -> None:
            response = fetched(client.request("Fetch", 11, fetch(0, max_bytes=1 << 30)))
            assert response["records"].count(big[17:]) == 4

        for _ in range(3):
            read()
        before = pages_mapped(broker.process.pid)
        for _ in range(10):
            read()
        # Half of what was read: a thread that reads for the first time has to be given its pages.
        assert pages_mapped(broker.process.pid) - before < 5 * 4 * len(big) // mmap.PAGESIZE


@pytest.mark.client("confluent-kafka")
def test_nothing_acknowledged_is_lost_when_it_is_killed_in_the_middle(folder) -> None:
    """Three times, while an idempotent producer sends: each record is there once, in order."""
    with AsProcess(folder) as broker:
        listen = broker.address
        make(listen, "t")
    acknowledged: list[bytes] = []
    sent = 0
    made = Producer(
        {
            "bootstrap.servers": listen,
            "enable.idempotence": True,
            "linger.ms": 1,
            "reconnect.backoff.max.ms": 100,
            **SILENT,
        }
    )

    def on_delivery(error, message) -> None:
        assert error is None, error
        acknowledged.append(message.value())

    for _ in range(3):
        with AsProcess(folder, listen=listen) as broker:
            goal = len(acknowledged) + 300
            while len(acknowledged) < goal:
                if sent - len(acknowledged) < 200:
                    made.produce("t", b"%d" % sent, on_delivery=on_delivery)
                    sent += 1
                    made.poll(0)
                else:
                    made.poll(0.05)
            broker.kill()
        for _ in range(50):
            made.produce("t", b"%d" % sent, on_delivery=on_delivery)
            sent += 1
    with AsProcess(folder, listen=listen):
        assert made.flush(WAIT_S) == 0
        assert len(acknowledged) == sent
        reader = Consumer({"bootstrap.servers": listen, "group.id": "g", **SILENT})
        reader.assign([TopicPartition("t", 0, 0)])
        found: list[bytes] = []
        deadline_s = time.monotonic() + WAIT_S
        while len(found) < sent:
            assert time.monotonic() < deadline_s
            found += [one.value() for one in reader.consume(1000, 0.2)]
        reader.close()
    assert found == [b"%d" % number for number in range(sent)]


@pytest.mark.client("confluent-kafka")
def test_a_transaction_goes_on_with_the_next_broker(folder) -> None:
    """Killed between the records, the offsets and the commit; all of it counts, once."""
    with AsProcess(folder) as broker:
        listen = broker.address
        make(listen, "in", "out")
        made = Producer(
            {
                "bootstrap.servers": listen,
                "transactional.id": "x",
                "reconnect.backoff.max.ms": 100,
                **SILENT,
            }
        )
        made.init_transactions(WAIT_S)
        group = Consumer({"bootstrap.servers": listen, "group.id": "g", **SILENT})
        made.begin_transaction()
        made.produce("out", b"before")
        assert made.flush(WAIT_S) == 0
        made.send_offsets_to_transaction(
            [TopicPartition("in", 0, 7)], group.consumer_group_metadata(), WAIT_S
        )
        broker.kill()
    with AsProcess(folder, listen=listen) as broker:
        made.produce("out", b"after")
        assert made.flush(WAIT_S) == 0
        made.commit_transaction(WAIT_S)
        (at,) = group.committed([TopicPartition("in", 0)], WAIT_S)
        group.close()
        assert at.offset == 7
        assert broker.stop()[0] == 0
    with ms.connect(folder) as log, log.consumer("out", follow=False) as found:
        assert [one.value for one in found] == [b"before", b"after"]


def test_one_in_a_program_whose_main_thread_has_ended_answers_and_ends_in_order(folder) -> None:
    run_after_the_main_thread(
        """
        import asyncio
        import millstream as ms
        from millstream.broker.security.authentication import Authenticator
        from millstream.broker.server import serve
        from millstream.broker.security.users import UsersFile

        def send(address):
            with ms.connect(f"kafka://{address}") as log, log.producer() as producer:
                log.create_topic("t", partitions=1)
                assert producer.send("t", b"v").result().offset == 0
                read = log.consumer("t", start="earliest", follow=False)
                assert [record.value for record in read] == [b"v"]

        async def let_in():
            users = UsersFile(sys.argv[2])
            users.put("ada", "a password")
            door = Authenticator(users)
            await door.check("127.0.0.1", "ada", "a password")
            door.close()

        async def main():
            await let_in()
            async with serve(sys.argv[1], listen="127.0.0.1:0") as broker:
                address = f"{broker.host}:{broker.port}"
                client = threading.Thread(target=send, args=(address,))
                client.start()
                while client.is_alive():
                    await asyncio.sleep(0.01)

        asyncio.run(main())
        """,
        folder,
        folder.parent / "users",
    )
    with ms.connect(folder) as log:  # the folder is free, and was closed cleanly
        assert log.offsets("t")[0][1] == 1
