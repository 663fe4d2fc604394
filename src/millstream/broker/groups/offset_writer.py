"""Writes the offsets that groups commit: commits at the same time share one commit of control.db."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from millstream.broker.log_access import LogAccess, storage_errors
from millstream.errors import MillstreamError
from millstream.log.clocks import wall_clock_ms
from millstream.log.groups import Offsets, put_offsets
from millstream.log.writer import LogWriter


@dataclass(slots=True)
class _Commit:
    group: str
    offsets: Offsets
    done: asyncio.Future[MillstreamError | None]
    error: MillstreamError | None = None


class OffsetWriter:
    """Writes committed offsets; requests that arrive during a commit share the next one."""

    def __init__(self, log: LogAccess) -> None:
        self._log = log
        self._waiting: list[_Commit] = []
        self._at_work: asyncio.Task[None] | None = None

    async def commit(self, group: str, offsets: Offsets) -> MillstreamError | None:
        """Return when the offsets are durable; or why they are not."""
        done: asyncio.Future[MillstreamError | None] = self._log.loop.create_future()
        self._waiting.append(_Commit(group, offsets, done))
        if self._at_work is None or self._at_work.done():
            self._at_work = self._log.loop.create_task(self._work())
        return await done

    async def _work(self) -> None:
        while self._waiting:
            commits, self._waiting = self._waiting, []
            try:
                await self._log.run_write(partial(_write, self._log.writer, commits))
            except MillstreamError as error:
                for commit in commits:
                    commit.error = commit.error or error
            except Exception as error:
                for commit in commits:  # whatever the error is, they must not wait for ever
                    if not commit.done.done():
                        commit.done.set_exception(error)
                raise
            for commit in commits:
                if not commit.done.done():
                    commit.done.set_result(commit.error)


def _write(writer: LogWriter, commits: Sequence[_Commit]) -> None:
    """Write all in one commit; if that fails, each by itself, so that each has its own error."""
    try:
        topic_ids = writer.topic_ids(
            sorted({name.topic for one in commits for name in one.offsets})
        )
        with storage_errors(), writer.control.commit() as connection:
            for one in commits:
                put_offsets(
                    connection, one.group, one.offsets, topic_ids=topic_ids, now_ms=wall_clock_ms()
                )
    except MillstreamError:  # a topic was deleted just now, for example
        for one in commits:
            try:
                with storage_errors():
                    writer.commit_offsets(one.group, one.offsets)
            except MillstreamError as error:
                one.error = error
