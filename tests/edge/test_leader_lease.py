"""Several webhooks of one group: one delivers, the others stand by, and one of them takes over."""

from __future__ import annotations

import json
import signal
import threading
import time
from contextlib import contextmanager
from typing import NamedTuple

import pytest
from broker.broker_process import InProcess
from edge.edge_process import Process
from webhook_receiver import Receiver

import millstream as ms


@pytest.fixture(params=["folder", "kafka"])
def address(request, tmp_path):
    """The address of a log with topics, of each kind."""
    if request.param == "kafka":
        pytest.importorskip("confluent_kafka")
        with InProcess(tmp_path / "data") as broker:
            at = f"kafka://{broker.address}"
            make_topics(at, 1)  # with more, a newcomer may be given the duty
            yield at
    else:
        make_topics(tmp_path / "data", 2)
        yield tmp_path / "data"


def make_topics(at, partitions):
    with ms.connect(at) as log:
        log.create_topic("clicks", partitions=partitions)
        log.create_topic("dead")


@contextmanager
def webhook(address, url, folder, name):
    """A webhook whose requests bear its name."""
    headers = folder / f"{name}.headers"
    headers.write_text(f"X-From: {name}\n")
    with Process(
        folder / f"{name}.ready",
        *("webhook", "clicks", url, "--group", "g", "--dead", "dead", "--log", address),
        *("--header-file", headers),
    ) as up:
        yield up


class Flow:
    """Sends numbers, some each moment, until the block ends."""

    def __init__(self, address):
        self.address, self.sent, self.ended = address, 0, threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        with ms.connect(self.address) as log, log.producer(linger_ms=0) as producer:
            while not self.ended.wait(0.01):
                producer.send("clicks", self.sent, key=f"k{self.sent % 7}").result()
                self.sent += 1

    def __enter__(self):
        self.thread.start()
        return self

    def end(self):
        self.ended.set()
        self.thread.join()

    def __exit__(self, *_):
        self.end()


def until(condition):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def committed(address):
    with ms.connect(address) as log:
        return sum(at.offset for at in log.committed_offsets("g").values())


def values(requests):
    return [json.loads(request["body"])["value"] for request in requests]


def more(receiver, name, count=20):
    """Wait until so many more requests have come from the webhook of this name."""

    def came():
        return sum(request["x-from"] == name for request in list(receiver.requests))

    wanted = came() + count
    until(lambda: came() >= wanted)


@pytest.fixture
def two(address, tmp_path):
    """Two webhooks, records that flow, and who of the two delivers them when both have been up for a while."""
    with (
        Receiver() as receiver,
        Flow(address) as flow,
        webhook(address, receiver.url, tmp_path, "one") as one,
    ):
        receiver.wait(20)
        with webhook(address, receiver.url, tmp_path, "other") as other:
            came = receiver.wait(len(receiver.requests) + 50)
            assert {request["x-from"] for request in came} == {"one"}
            assert len({request["idempotency-key"] for request in came}) == len(came)
            yield Two(receiver, flow, one, other)


class Two(NamedTuple):
    receiver: Receiver
    flow: Flow
    delivers: Process
    stands_by: Process

    def ended(self, address):
        """Let the other one deliver the rest and end; return all values that came, and what it said."""
        more(self.receiver, "other")
        self.flow.end()
        until(lambda: committed(address) == self.flow.sent)
        code, out, err = self.stands_by.stop()
        assert code == 0
        return values(self.receiver.requests), out, err


def test_when_the_one_that_delivers_is_killed_the_other_leaves_nothing_out(two, address):
    two.delivers.kill()
    came, out, _ = two.ended(address)
    assert set(came) == set(range(two.flow.sent))
    assert out.startswith("Delivering clicks to ")


def test_who_ends_in_order_hands_over_and_nothing_comes_twice(two, address):
    code, out, _ = two.delivers.stop()
    assert (code, "0 dead-lettered, 0 attempts failed" in out) == (0, True)
    came, _, err = two.ended(address)
    assert sorted(came) == list(range(two.flow.sent))
    assert "on standby until it ends\n" in err


def test_behind_a_broker_the_duty_may_pass_while_both_live_and_nothing_comes_twice(tmp_path):
    """Of several partitions a newcomer is given some, and with one of them the duty."""
    pytest.importorskip("confluent_kafka")
    with InProcess(tmp_path / "data") as broker, Receiver() as receiver:
        address = f"kafka://{broker.address}"
        make_topics(address, 4)
        with (
            Flow(address) as flow,
            webhook(address, receiver.url, tmp_path, "one") as one,
        ):
            more(receiver, "one")
            with webhook(address, receiver.url, tmp_path, "other") as other:
                more(receiver, "other")
                assert other.stop()[0] == 0
            more(receiver, "one")
            flow.end()
            until(lambda: committed(address) == flow.sent)
            assert one.stop()[0] == 0
        assert sorted(values(receiver.requests)) == list(range(flow.sent))


def test_one_that_is_held_up_and_taken_for_dead_stands_by_when_it_goes_on(tmp_path):
    """Behind a broker only: on a folder it stays on duty."""
    pytest.importorskip("confluent_kafka")
    with InProcess(tmp_path / "data") as broker, Receiver() as receiver:
        address = f"kafka://{broker.address}"
        make_topics(address, 1)
        with (
            Flow(address) as flow,
            webhook(address, receiver.url, tmp_path, "one") as one,
        ):
            more(receiver, "one", 10)
            one.process.send_signal(signal.SIGSTOP)
            with webhook(address, receiver.url, tmp_path, "other") as other:
                more(receiver, "other", 10)
                one.process.send_signal(signal.SIGCONT)
                assert b"Another webhook of group 'g' delivers" in one.process.stderr.readline()
                more(receiver, "other", 10)
                flow.end()
                until(lambda: committed(address) == flow.sent)
                assert (one.stop()[0], other.stop()[0]) == (0, 0)
        assert set(values(receiver.requests)) == set(range(flow.sent))
