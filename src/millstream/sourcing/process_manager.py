"""Process managers: commands that follow from events, at once or when their time has come.

What is due is a projection: a row for each command that an event asks for, kept with its position. A command is
not kept itself; when it is due, the event is read again and asked again. So it must ask for the same, whenever it
is asked. The id of the command is made from the event, so a command that is sent again after a crash is
handled once:

1. The row is committed with the position of its event. A crash before: the event is read again.
2. The command is handled. A crash after: it is sent again, and is a repeat.
3. The row is deleted.
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
from millstream.errors import CommandRejectedError, ConfigError
from millstream.sourcing.projection import Projection
from millstream.sourcing.projection_target import ProjectionTables
from millstream.sourcing.store import EventStore
from millstream.sourcing.stored_event import SourcedEvent

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

        Raises:
            MillstreamError: a command could not be handled; it is sent again by the next call.
        """
        self._run.catch_up()
        rows = self._run.query(
            "SELECT partition_number, event_offset, number FROM due WHERE due_ms <= ? "
            "ORDER BY due_ms, partition_number, event_offset, number",
            (self._clock_ms(),),
        )
        for partition, offset, number in rows:
            self._send(partition, offset, number)
        return len(rows)

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

    def _send(self, partition: int, offset: int, number: int) -> None:
        folding = self._source.reading(partition)
        event = folding.sourced(next(folding.log.read(offset, offset + 1)))
        asked = list(self._react(event))
        if number >= len(asked):
            raise ConfigError(
                f"process {self._name!r} asked for command {number + 1} after version {event.version} of "
                f"stream {event.stream_id!r}, and now asks for {len(asked)}: react must depend on nothing "
                "but the event. Correct it, and open the process with rebuild=True"
            )
        cause = f"{event.stream_id}/{event.version}"
        try:
            self._target.handle(
                asked[number].stream_id,
                asked[number].command,
                command_id=f"{self._name}/{cause}/{number}",
                causation_id=cause,
                correlation_id=event.metadata.correlation_id,
                who=self._name,
            )
        except CommandRejectedError as refused:
            _log.info("process %s: after %s: %s", self._name, cause, refused)
        self._run.execute(
            "DELETE FROM {due} WHERE partition_number = ? AND event_offset = ? AND number = ?",
            (partition, offset, number),
        )


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
