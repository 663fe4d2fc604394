"""Process managers: commands that follow from events, at once or when their time has come.

What is due is a projection: a row for each command that an event asks for, kept with its position. A command is
not kept itself; when it is due, the event is read again and asked again. So it must ask for the same, whenever it
is asked. The id of the command is made from the topic and the event, so a command that is sent again after a crash is
handled once, and no two sources have one id:

1. The row is committed with the position of its event. A crash before: the event is read again.
2. The row is deleted, in a transaction that stays open. A crash before the commit: the row is there.
3. The command is handled. A crash after: it is sent again, and is a repeat.
4. The transaction is committed.

Several managers may run, and one may be stopped for hours anywhere. In the transaction of step 2 only one of them can
be; one that wakes after the others have sent a command finds no row, and does not send it. An id alone would not do:
a command that was refused is not remembered, and would be decided again on what has become of the stream since.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from millstream.durations import Duration, to_us
from millstream.errors import CommandRejectedError, ConfigError, FencedError, RetriableError
from millstream.kernels.code_digest import digest
from millstream.sourcing.projection import Projection
from millstream.sourcing.projection_target import ProjectionTables
from millstream.sourcing.store import EventStore
from millstream.sourcing.stored_event import Metadata, SourcedEvent

_DUE = {"due": "partition_number INTEGER, event_offset BIGINT, number INTEGER, due_ms BIGINT"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Send:
    """A command that follows from an event, for the stream ``stream_id``.

    ``after`` is counted from the time of the event: an expiry, a reminder.
    """

    stream_id: str
    command: Any
    after: Duration = "0 seconds"


class ProcessManager:
    """Sends the commands that events of one store ask for, to the same store or another one.

    A command that is refused is not sent again: the refusal is the answer, such as that of an expiry that comes
    after the confirmation. It is logged.

    Args:
        name: Of the process; the identity of what it keeps.
        source: The store whose events are read.
        react: Takes an event; returns the commands that follow. It must depend on nothing but the event.
        state: The SQLite file in which it keeps how far it is, and what is due.
        target: The store that gets the commands; ``source`` if not given.
        clock_ms: Milliseconds since 1970; tests give another clock.
        rebuild: After a change of ``react``: find anew what is due. Commands that had events are repeats.

    Raises:
        ConfigError: what it keeps was made by another ``react``.

    Guarantees: each command is handled once in effect, at its time or later; several processes may run one.
    """

    def __init__(
        self,
        name: str,
        source: EventStore,
        react: Callable[[SourcedEvent], Iterable[Send]],
        *,
        state: str | Path,
        target: EventStore | None = None,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        rebuild: bool = False,
    ) -> None:
        self._name, self._source, self._react = name, source, react
        self._target = target or source
        self._clock_ms = clock_ms
        projection = Projection(name, _DUE, _Asking(react), code=react)
        self._run = source.project(projection, Path(state), rebuild=rebuild)

    def run_due(self) -> int:
        """Read on, and send every command whose time has come; return how many were sent.

        A command that fails is sent again by the next call. Those for other streams are sent nevertheless; those
        behind it, for the same stream, wait for it.

        Raises:
            RetriableError, FencedError: nothing more was sent.
            Exception: the first failure of a command, as it was, with a note that says which command it was, and
                how many others failed.
        """
        self._run.catch_up()
        rows = self._run.query(
            "SELECT partition_number, event_offset, number FROM due WHERE due_ms <= ? "
            "ORDER BY due_ms, partition_number, event_offset, number",
            (self._clock_ms(),),
        )
        sent, failures = 0, _Failures(self._name)
        for row in rows:
            due = None
            try:
                due = self._due(*row)
                if due.stream_id not in failures.streams:
                    sent += self._send(due)
            except (RetriableError, FencedError):
                raise
            except Exception as error:  # noqa: BLE001 - the first one is raised below
                failures.add(row, due, error)
        failures.raise_first(sent)
        return sent

    def next_due_ms(self) -> int | None:
        """Return when the next command is due, in milliseconds since 1970; None if none is."""
        found: int | None = self._run.query("SELECT min(due_ms) FROM due")[0][0]
        return found

    def close(self) -> None:
        """Close what it keeps; the stores stay open."""
        self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _due(self, partition: int, offset: int, number: int) -> _Due:
        """Return the command of a row, which its event is asked for again."""
        folding = self._source.reading(partition)
        raw = next(folding.log.read(offset, offset + 1))
        event = folding.sourced(raw)
        asked = list(self._react(event))
        if number >= len(asked):
            raise ConfigError(
                f"process {self._name!r} asked for command {number + 1} after version {event.version} of "
                f"stream {event.stream_id!r}, and now asks for {len(asked)}: react must depend on nothing "
                "but the event. Correct it, and open the process with rebuild=True"
            )
        cause = f"{event.stream_id}/{event.version}"
        source = digest(f"{self._source.topic_id}/{raw.identity}")
        metadata = Metadata(
            f"{self._name}/{cause}/{number}/{source}",
            causation_id=cause,
            correlation_id=event.metadata.correlation_id,
            who=self._name,
        )
        return _Due((partition, offset, number), asked[number], metadata)

    def _send(self, due: _Due) -> bool:
        """Do steps 2 to 4 of the module; return False if another manager has sent it."""
        with self._run.writing() as tables:
            done = tables.execute(
                "DELETE FROM {due} WHERE partition_number = ? AND event_offset = ? AND number = ?",
                due.row,
            )
            if not done.rowcount:
                return False
            why = due.metadata
            try:
                self._target.handle(
                    due.stream_id,
                    due.send.command,
                    command_id=why.command_id,
                    causation_id=why.causation_id,
                    correlation_id=why.correlation_id,
                    who=why.who,
                )
            except CommandRejectedError as refused:
                _log.info("process %s: after %s: %s", self._name, why.causation_id, refused)
        return True


@dataclass(frozen=True)
class _Due:
    """A command whose time has come, and its row."""

    row: tuple[int, int, int]
    send: Send
    metadata: Metadata

    @property
    def stream_id(self) -> str:
        return self.send.stream_id


class _Failures:
    """The commands of one round that failed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: Exception | None = None
        self._where = ""
        self._count = 0
        self.streams: set[str] = set()

    def add(self, row: tuple[int, int, int], due: _Due | None, error: Exception) -> None:
        """Note a failure; ``due`` is None if the event did not say what to send."""
        where = f"the event at offset {row[1]} of partition {row[0]}"
        if due is not None:
            self.streams.add(due.stream_id)
            where = f"{due.metadata.causation_id}, for stream {due.stream_id!r}"
        _log.warning("process %s: the command after %s failed: %r", self._name, where, error)
        if self._first is None:
            self._first, self._where = error, where
        self._count += 1

    def raise_first(self, sent: int) -> None:
        """Raise the first failure, if there is one."""
        if self._first is not None:
            self._first.add_note(
                f"process {self._name!r}: this is of the command after {self._where}. {self._count} commands "
                f"failed, and are sent again by the next call; {sent} others were sent"
            )
            raise self._first


@dataclass(frozen=True)
class _Asking:
    """Notes what an event asks for."""

    react: Callable[[SourcedEvent], Iterable[Send]] = field(repr=False)

    def __call__(self, event: SourcedEvent, tables: ProjectionTables) -> None:
        at_ms = round(event.recorded_at.timestamp() * 1000)
        offset = event.position.offset - 1
        for number, asked in enumerate(self.react(event)):
            due_ms = at_ms + to_us(asked.after, what="after") // 1000
            row = (event.position.partition, offset, number, due_ms)
            tables.execute("INSERT INTO {due} VALUES (?, ?, ?, ?)", row)
