"""aiokafka: the clients of asyncio programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import ProducerFenced
from broker.broker_process import InProcess

WAIT_S = 60

pytestmark = [
    pytest.mark.client("aiokafka"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:aiokafka"),
]


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await story()

    asyncio.run(bounded())


@asynccontextmanager
async def started(client: Any) -> AsyncIterator[Any]:
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


async def make(broker: InProcess, partitions: int = 2) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.address)
    await admin.start()
    try:
        await admin.create_topics([NewTopic("t", partitions, 1)])
        assert await admin.list_topics() == ["t"]
    finally:
        await admin.close()


def producer(broker: InProcess, **options: Any) -> Any:
    return started(AIOKafkaProducer(bootstrap_servers=broker.address, **options))


def consumer(broker: InProcess, *topics: str, **options: Any) -> Any:
    return started(
        AIOKafkaConsumer(
            *topics,
            bootstrap_servers=broker.address,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            **options,
        )
    )


async def take(made: Any, count: int) -> list[Any]:
    return [await made.getone() for _ in range(count)]


async def shared(*members: Any) -> None:
    """Return when each member has a partition; there is no event to wait for."""
    sizes = [0]
    while sizes != [1] * len(members):
        sizes = [len(one.assignment()) for one in members]
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("compression", [None, "gzip", "snappy", "lz4", "zstd"])
def test_records_come_back_as_they_were_sent(broker, compression) -> None:
    async def story() -> None:
        await make(broker)
        options = {"compression_type": compression, "enable_idempotence": True}
        async with producer(broker, **options) as made:
            sent = [
                await made.send("t", b"%d" % n * 20, partition=1, headers=[("a", b"1")])
                for n in range(200)
            ]
            assert [(await one).offset for one in sent] == list(range(200))
        async with consumer(broker) as made:
            made.assign([TopicPartition("t", 1)])
            found = await take(made, 200)
        assert [one.value for one in found] == [b"%d" % n * 20 for n in range(200)]
        assert found[0].headers == (("a", b"1"),)

    run(story)


def test_a_group_shares_a_topic_and_goes_on_where_it_committed(broker) -> None:
    async def story() -> None:
        await make(broker)
        async with producer(broker) as made:
            for number in range(20):
                await made.send_and_wait("t", b"%d" % number, partition=number % 2)
        options = {"group_id": "g", "heartbeat_interval_ms": 300}
        async with consumer(broker, "t", **options) as first:
            assert len(await take(first, 20)) == 20
            await first.commit()
            async with consumer(broker, "t", **options) as second:
                await shared(first, second)
                async with producer(broker) as made:
                    for partition in (0, 1):
                        await made.send_and_wait("t", b"new", partition=partition)
                both = await asyncio.gather(take(first, 1), take(second, 1))
                assert [one.value for found in both for one in found] == [b"new", b"new"]

    run(story)


def test_a_transaction_is_seen_whole_or_not_at_all(broker) -> None:
    async def story() -> None:
        await make(broker)
        place = TopicPartition("t", 0)
        async with producer(broker, transactional_id="x") as made:
            for number, commit in enumerate((True, False, True)):
                await made.begin_transaction()
                for _ in range(3):
                    await made.send("t", b"%d" % number, partition=0)
                await made.send_offsets_to_transaction({place: number + 1}, "g")
                await (made.commit_transaction() if commit else made.abort_transaction())
        async with consumer(broker, isolation_level="read_committed", group_id="g") as made:
            made.assign([place])
            assert await made.committed(place) == 3
            made.seek(place, 0)
            assert [one.value for one in await take(made, 6)] == [b"0"] * 3 + [b"2"] * 3

    run(story)


def test_a_fenced_producer_is_told_so(broker) -> None:
    async def story() -> None:
        await make(broker)
        old = AIOKafkaProducer(bootstrap_servers=broker.address, transactional_id="x")
        await old.start()
        await old.begin_transaction()
        async with producer(broker, transactional_id="x"):
            with pytest.raises(ProducerFenced):
                await old.send_and_wait("t", b"zombie")
        with suppress(ProducerFenced):  # told again, or not
            await old.stop()

    run(story)
