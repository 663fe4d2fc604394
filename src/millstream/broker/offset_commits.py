"""Writing down how far groups have read: many commits at the same time cost one of control.db."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from millstream.errors import MillstreamError
from millstream.log.clocks import wall_clock_ms
from millstream.log.groups import Offsets, put_offsets
from millstream.log.writer import LogWriter

Change: TypeAlias = Callable[[Callable[[], None]], Awaitable[None]]


@dataclass(slots=True)
class _Commit:
    group: str
    offsets: Offsets
    done: asyncio.Future[MillstreamError | None]
    error: MillstreamError | None = None


class OffsetCommits:
    """Writes what groups commit; those who come while it is at work share the next commit."""

    def __init__(self, loop: asyncio.AbstractEventLoop, change: Change, writer: LogWriter) -> None:
        self._loop = loop
        self._change = change
        self._writer = writer
        self._waiting: list[_Commit] = []
        self._at_work: asyncio.Task[None] | None = None

    async def commit(self, group: str, offsets: Offsets) -> MillstreamError | None:
        """Return when the offsets are durable; or why they are not."""
        done: asyncio.Future[MillstreamError | None] = self._loop.create_future()
        self._waiting.append(_Commit(group, offsets, done))
        if self._at_work is None or self._at_work.done():
            self._at_work = self._loop.create_task(self._work())
        return await done

    async def _work(self) -> None:
        while self._waiting:
            commits, self._waiting = self._waiting, []
            try:
                await self._change(partial(_write, self._writer, commits))
            except MillstreamError as error:
                for commit in commits:
                    commit.error = commit.error or error
            except Exception as error:
                for commit in commits:  # whatever it is: they must not wait for ever
                    if not commit.done.done():
                        commit.done.set_exception(error)
                raise
            for commit in commits:
                if not commit.done.done():
                    commit.done.set_result(commit.error)


def _write(writer: LogWriter, commits: Sequence[_Commit]) -> None:
    """Write all in one go; if that fails, each by itself, so that each has its own error."""
    try:
        topic_ids = writer.topic_ids(
            sorted({name.topic for one in commits for name in one.offsets})
        )
        with writer.control.commit() as connection:
            for one in commits:
                put_offsets(
                    connection, one.group, one.offsets, topic_ids=topic_ids, now_ms=wall_clock_ms()
                )
    except MillstreamError:  # some topic has just been deleted, say
        for one in commits:
            try:
                writer.commit_offsets(one.group, one.offsets)
            except MillstreamError as error:
                one.error = error
