"""Offsets that groups commit together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from millstream.broker.groups.offset_writer import OffsetWriter
from millstream.broker.log_access import LogAccess
from millstream.log.groups import committed_offsets
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

T = TypeVar("T")


def test_whatever_fails_nobody_waits_for_ever_and_the_next_commit_is_made(tmp_path: Path) -> None:
    name = TopicPartition("t", 0)

    async def scenario(writer: LogWriter) -> None:
        fails = [True]

        class FailingLog(LogAccess):
            async def run_write(self, work: Callable[[], T]) -> T:
                if fails.pop():
                    raise ZeroDivisionError
                return work()

        log = FailingLog(writer, asyncio.get_running_loop(), on_failure=lambda _: None)
        commits = OffsetWriter(log)
        for group in ("a", "b"):
            fails.append(group == "a")
            waits = asyncio.gather(
                *(commits.commit(f"{group}{one}", {name: 7}) for one in range(2)),
                return_exceptions=True,
            )
            found = await asyncio.wait_for(waits, 30)
            assert [type(one) for one in found] == [
                ZeroDivisionError if group == "a" else type(None)
            ] * 2
        log.close()

    with LogWriter(tmp_path, background=False) as writer:
        writer.create_topic("t")
        asyncio.run(scenario(writer))
        assert committed_offsets(writer.control, "b1")[name].offset == 7
        assert committed_offsets(writer.control, "a1") == {}
