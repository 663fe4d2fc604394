"""A partition behind brokers, with a producer that fails; ``tests/contract`` has it with real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import millstream as ms
from millstream.log.encoding import SimpleRecord
from millstream.sourcing.kafka_partition import KafkaPartition
from millstream.sourcing.partition_log import Append


class Interrupted:
    """A producer that is interrupted at its commit, and cannot be closed properly."""

    closed = False

    @contextmanager
    def transaction(self) -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    def send(self, *_: Any, **__: Any) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True
        raise ms.MillstreamError("no broker responds")


def test_an_interrupt_at_a_commit_is_raised_whatever_becomes_of_the_producer() -> None:
    producers: list[Interrupted] = []

    def producer(**_: Any) -> Interrupted:
        producers.append(Interrupted())
        return producers[-1]

    reader = SimpleNamespace(topic_id=lambda topic: "id")
    log: Any = SimpleNamespace(reader=lambda topics: reader, producer=producer)
    partition = KafkaPartition(log, "ledger", 0, "id")
    assert partition.acquire()
    with pytest.raises(KeyboardInterrupt):
        partition.append_all([Append(partition, [SimpleRecord(0, b"k", b"v")], 0)])
    assert producers[0].closed
    assert partition.acquire()  # the next command has a producer of its own
