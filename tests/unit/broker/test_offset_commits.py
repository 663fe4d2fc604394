"""Offsets that groups commit together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from millstream.broker.offset_commits import OffsetCommits
from millstream.log.groups import committed_offsets
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition


def test_whatever_fails_nobody_waits_for_ever_and_the_next_commit_is_made(tmp_path: Path) -> None:
    place = TopicPartition("t", 0)

    async def scenario(writer: LogWriter) -> None:
        fails = [True]

        async def change(work: Callable[[], None]) -> None:
            if fails.pop():
                raise ZeroDivisionError
            work()

        commits = OffsetCommits(asyncio.get_running_loop(), change, writer)
        for group in ("a", "b"):
            fails.append(group == "a")
            waits = asyncio.gather(
                *(commits.commit(f"{group}{one}", {place: 7}) for one in range(2)),
                return_exceptions=True,
            )
            found = await asyncio.wait_for(waits, 30)
            assert [type(one) for one in found] == [
                ZeroDivisionError if group == "a" else type(None)
            ] * 2

    with LogWriter(tmp_path, background=False) as writer:
        writer.create_topic("t")
        asyncio.run(scenario(writer))
        assert committed_offsets(writer.control, "b1")[place].offset == 7
        assert committed_offsets(writer.control, "a1") == {}
