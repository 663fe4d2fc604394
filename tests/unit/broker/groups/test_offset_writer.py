"""Offsets that groups commit together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from millstream.broker.groups.offset_writer import OffsetWriter
from millstream.broker.log_access import LogAccess
from millstream.broker.protocol.error_codes import StorageError
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


def test_an_error_of_the_system_is_that_of_its_group_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = TopicPartition("t", 0)
    one_by_one = LogWriter.commit_offsets

    def refuse(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    def commit_offsets(writer: LogWriter, group: str, *arguments: Any) -> None:
        if group == "b":
            refuse()
        one_by_one(writer, group, *arguments)

    monkeypatch.setattr("millstream.broker.groups.offset_writer.put_offsets", refuse)
    monkeypatch.setattr(LogWriter, "commit_offsets", commit_offsets)

    async def scenario(writer: LogWriter) -> list[object]:
        log = LogAccess(writer, asyncio.get_running_loop(), on_failure=lambda _: None)
        commits = OffsetWriter(log)
        waits = (commits.commit(group, {name: 7}) for group in "abc")
        found = await asyncio.gather(*waits, return_exceptions=True)
        log.close()
        return found

    with LogWriter(tmp_path, background=False) as writer:
        writer.create_topic("t")
        found = asyncio.run(scenario(writer))
        assert [type(one) for one in found] == [type(None), StorageError, type(None)]
        for group in "ac":
            assert committed_offsets(writer.control, group)[name].offset == 7
