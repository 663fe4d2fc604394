"""The broker's maintenance: it uses the time that passes, and never ends silently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from millstream.broker import maintenance
from millstream.broker.maintenance import refresh_certificate, run_maintenance
from millstream.broker.node import BrokerNode
from millstream.broker.settings import BrokerSettings
from millstream.errors import MillstreamError, SyncFailedError
from millstream.log.groups import committed_offsets
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

DAY_MS = 86_400_000
PLACE = TopicPartition("t", 0)


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "TIMEOUTS_EVERY_S", 0.0)
    monkeypatch.setattr(maintenance, "OFFSETS_EVERY_S", 0.0)


@asynccontextmanager
async def node_on(folder: Path, failures: list[MillstreamError]) -> AsyncIterator[BrokerNode]:
    with LogWriter(folder, background=False) as writer:
        writer.create_topic("t")
        settings = BrokerSettings(offsets_retention_ms=7 * DAY_MS, certificate_every_s=0.0)
        node = BrokerNode(writer, settings, on_failure=failures.append)
        node.start()
        try:
            yield node
        finally:
            await node.drain()
            node.close()


async def rounds(node: BrokerNode, count: int, step: Callable[[int], None]) -> None:
    """Run so many rounds of maintenance; ``step`` is called before each."""
    expire, done = node.log.writer.transactions.expire, [0]
    enough = asyncio.Event()

    def counted() -> int:
        done[0] += 1
        if done[0] > count:
            node.loop.call_soon_threadsafe(enough.set)
        step(done[0])
        return expire()

    node.log.writer.transactions.expire = counted  # type: ignore[method-assign]
    task = asyncio.create_task(run_maintenance(node))
    await asyncio.wait(
        {task, waiting := asyncio.create_task(enough.wait())},
        timeout=30,
        return_when=asyncio.FIRST_COMPLETED,
    )
    for one in (task, waiting):
        one.cancel()
        with suppress(asyncio.CancelledError):
            await one


def test_a_clock_that_jumps_ahead_costs_no_group_its_offsets(tmp_path: Path) -> None:
    async def run() -> None:
        async with node_on(tmp_path, []) as node:
            node.log.writer.commit_offsets("idle", {PLACE: 7})
            clock_ms = node.log.clock_ms

            def jump(number: int) -> None:
                node.log.clock_ms = lambda: clock_ms() + number * 10 * DAY_MS

            await rounds(node, 5, jump)
            assert committed_offsets(node.log.writer.control, "idle")[PLACE].offset == 7

    asyncio.run(run())


def test_offsets_that_are_old_when_the_broker_starts_are_forgotten(tmp_path: Path) -> None:
    async def run() -> None:
        async with node_on(tmp_path, []) as node:
            node.log.writer.commit_offsets("idle", {PLACE: 7})
            clock_ms = node.log.clock_ms
            node.log.clock_ms = lambda: clock_ms() + 8 * DAY_MS
            await rounds(node, 2, lambda _: None)
            assert committed_offsets(node.log.writer.control, "idle") == {}

    asyncio.run(run())


@pytest.mark.parametrize(
    "error", [OSError(5, "input/output error"), ZeroDivisionError(), MillstreamError("once")]
)
def test_a_round_that_fails_is_said_and_the_next_one_is_done(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    later: list[int] = []

    def fail_once(number: int) -> None:
        if number == 1:
            raise error
        later.append(number)

    async def run() -> None:
        async with node_on(tmp_path, []) as node:
            await rounds(node, 3, fail_once)

    asyncio.run(run())
    assert len(later) >= 2
    assert "maintenance failed" in caplog.text


def test_a_log_that_takes_nothing_any_more_ends_the_broker(tmp_path: Path) -> None:
    failures: list[MillstreamError] = []
    failed = SyncFailedError("the disk failed")

    async def run() -> None:
        async with node_on(tmp_path, failures) as node:

            def fail(_: int) -> None:
                with node.log.writer._commit.stopping():
                    raise failed

            await rounds(node, 3, fail)

    asyncio.run(run())
    assert failures == [failed]


def test_a_certificate_that_cannot_be_looked_at_is_looked_at_again(tmp_path: Path) -> None:
    class Certificate:
        looks = 0

        def refresh(self) -> None:
            self.looks += 1
            if self.looks < 3:
                raise OSError(24, "too many open files")
            enough.set()

    async def run() -> None:
        async with node_on(tmp_path, []) as node:
            task = asyncio.create_task(refresh_certificate(node, Certificate()))  # type: ignore[arg-type]
            await asyncio.wait_for(enough.wait(), 30)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    enough = asyncio.Event()
    asyncio.run(run())
