"""Share groups with confluent-kafka's ShareConsumer, a preview as yet."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from broker.broker_process import InProcess
from broker.share_member import prepare, start_and_lag

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")
from confluent_kafka import AcknowledgeType, Producer, ShareConsumer

pytestmark = pytest.mark.client("confluent-kafka")


def consumer(broker: InProcess, mode: str) -> ShareConsumer:
    made = ShareConsumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": "g",
            "share.acknowledgement.mode": mode,
            "log_level": 0,
        }
    )
    made.subscribe(["t"])
    return made


def test_share_consumers_take_each_record_once_and_release_some(broker: InProcess) -> None:
    prepare(broker.address)
    producer = Producer({"bootstrap.servers": broker.address, "log_level": 0})
    for number in range(300):
        producer.produce("t", b"%d" % number)
    producer.flush()
    workers = [consumer(broker, "explicit") for _ in range(2)]
    got: Counter[bytes] = Counter()
    end_s = time.monotonic() + 60
    while len(got) < 300 or start_and_lag(broker.address) != (300, 0):
        assert time.monotonic() < end_s
        for worker in workers:
            for one in worker.poll(0.2):
                got[one.value()] += 1
                again = int(one.value()) % 10 == 0 and got[one.value()] == 1
                kind = AcknowledgeType.RELEASE if again else AcknowledgeType.ACCEPT
                worker.acknowledge(one, kind)
            worker.commit_sync()
    for worker in workers:
        worker.close()
    assert got == {b"%d" % number: 1 + (number % 10 == 0) for number in range(300)}


def test_a_share_consumer_accepts_what_it_was_given_before(broker: InProcess) -> None:
    prepare(broker.address, *(b"%d" % number for number in range(50)))
    worker = consumer(broker, "implicit")
    got: list[bytes] = []
    end_s = time.monotonic() + 60
    while start_and_lag_if_begun(broker) != (50, 0):
        assert time.monotonic() < end_s
        got += [one.value() for one in worker.poll(0.2)]
    worker.close()
    assert got == [b"%d" % number for number in range(50)]


def start_and_lag_if_begun(broker: InProcess) -> tuple[int, int]:
    try:
        return start_and_lag(broker.address)
    except IndexError:
        return (-1, -1)
