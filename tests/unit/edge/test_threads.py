"""Threads of the edge that die say so to whoever would wait for them."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from millstream.edge.http.topic_watcher import TopicWatcher
from millstream.edge.statsd.listener import StatsdListener
from millstream.errors import MillstreamError
from millstream.record import TopicInfo

TOPIC = TopicInfo("t", "an id", 1)


@pytest.mark.parametrize("where", ["when it opens", "when it looks"])
def test_whoever_follows_a_topic_is_told_that_nobody_looks_any_more(where: str) -> None:
    class Reader:
        def pinned(self, _topic_ids: object) -> Reader:
            return self

        def wait(self, *_: object) -> bool:
            raise OSError(24, "too many open files")

    def open_reader() -> Reader:
        if where == "when it opens":
            raise OSError(24, "too many open files")
        return Reader()

    async def run() -> None:
        watching = TopicWatcher(open_reader)  # type: ignore[arg-type]
        with watching.watch(TOPIC, [0]) as followed:
            assert followed.failure is not None or await followed.wait_for_change(30)
            assert isinstance(followed.failure, MillstreamError)
            assert "too many open files" in str(followed.failure)

    asyncio.run(run())


def test_datagrams_that_nobody_takes_any_more_are_a_failure() -> None:
    failures: list[MillstreamError] = []
    called = threading.Event()

    def on_failure(error: MillstreamError) -> None:
        failures.append(error)
        called.set()

    class Producer:
        def send(self, *_: object, **__: object) -> None:
            raise ZeroDivisionError("what nobody expected")

    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    bound.bind(("127.0.0.1", 0))
    listener = StatsdListener(bound, Producer(), "metrics", None, on_failure)  # type: ignore[arg-type]
    listener.start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"requests:1|c", bound.getsockname())
    assert called.wait(30)
    listener.close()
    assert "what nobody expected" in str(failures[0])
