"""Room for requests: who waits for whom, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from millstream.broker.memory import SMALL_BYTES_MAX, RequestMemory

MIB = 1 << 20
LONG_S = 3600.0


def memory(*, contended_s: float = LONG_S) -> RequestMemory:
    return RequestMemory(4 * MIB, whole_s=LONG_S, contended_s=contended_s)


async def settled(task: asyncio.Task[None]) -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return task.done()


def test_small_requests_never_wait_for_large_ones() -> None:
    async def scenario() -> None:
        room = memory()
        await room.reserve(3 * MIB)
        large = asyncio.create_task(room.reserve(2 * MIB))
        assert not await settled(large)
        for _ in range(MIB // SMALL_BYTES_MAX):
            assert await settled(asyncio.create_task(room.reserve(SMALL_BYTES_MAX)))
        small = asyncio.create_task(room.reserve(1))
        assert not await settled(small)
        room.release(SMALL_BYTES_MAX)
        assert await settled(small)
        assert not large.done()
        room.release(3 * MIB)
        assert await settled(large)

    asyncio.run(scenario())


def test_large_requests_take_room_in_their_order() -> None:
    async def scenario() -> None:
        room = memory()
        await room.reserve(2 * MIB)
        first = asyncio.create_task(room.reserve(2 * MIB))
        second = asyncio.create_task(room.reserve(MIB))  # for which there would be room
        assert not await settled(second)
        room.release(2 * MIB)
        assert await settled(first)
        assert await settled(second)

    asyncio.run(scenario())


def test_a_half_request_has_less_time_from_when_others_wait_for_room() -> None:
    async def scenario() -> None:
        room = memory(contended_s=0.01)

        async def half() -> None:
            async with room.receive_deadline():
                await asyncio.Event().wait()

        await room.reserve(3 * MIB)
        began_alone = asyncio.create_task(half())
        assert not await settled(began_alone)
        waits = asyncio.create_task(room.reserve(MIB))
        assert not await settled(waits)
        for task in (began_alone, asyncio.create_task(half())):
            with pytest.raises(TimeoutError):
                await task
        room.release(3 * MIB)
        await waits
        alone = asyncio.create_task(half())
        assert not await settled(alone)
        alone.cancel()

    asyncio.run(scenario())


def test_who_goes_while_it_waits_gives_its_place_to_the_next() -> None:
    async def scenario() -> None:
        room = memory()
        await room.reserve(2 * MIB)
        first = asyncio.create_task(room.reserve(3 * MIB))
        second = asyncio.create_task(room.reserve(MIB))
        assert not await settled(second)
        first.cancel()
        assert await settled(second)

    asyncio.run(scenario())


def test_who_comes_while_a_half_request_is_being_refused_waits_like_others() -> None:
    async def scenario() -> None:
        room = memory(contended_s=0.0)

        async def half() -> None:
            async with room.receive_deadline():
                await asyncio.Event().wait()

        async def comes_after(turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            await room.reserve(2 * MIB)

        await room.reserve(3 * MIB)
        refused = asyncio.create_task(half())
        assert not await settled(refused)
        waiting = [asyncio.create_task(comes_after(turns)) for turns in range(5)]
        with pytest.raises(TimeoutError):
            await refused
        room.release(3 * MIB)
        for task in waiting:
            await task
            room.release(2 * MIB)

    asyncio.run(scenario())
