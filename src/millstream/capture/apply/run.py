"""Applying a captured database to a target: whole transactions, in order, each once.

A batch is as many transactions as there are, up to a number of changes. Its rows and the state after it are
committed by the target at once, so the target knows how far it is:

=====================================  ==================================================================
stopped                                the next run
=====================================  ==================================================================
before the target's commit             finds the state before the batch, and applies the batch again
after it                               goes on after the batch
another one has begun meanwhile        the commit of the older is refused: FencedError
=====================================  ==================================================================

The log is only read. So any number of targets are applied to from one capture, each at its own place.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from millstream.capture.apply.applied_table import AppliedTable, RowBatch
from millstream.capture.apply.batch_writer import BatchWriter
from millstream.capture.apply.change_stream import ChangeStream, SourceTransaction
from millstream.capture.apply.target import ApplyTarget
from millstream.capture.retry_wait import RetryWait
from millstream.capture.table_patterns import TablePatterns
from millstream.choices import choose
from millstream.errors import ConfigError, ConflictError, CorruptionError, RetriableError

ApplyUntil = Literal["stopped", "caught-up"]
ApplyState = Literal["applying", "idle", "retrying"]
STATE_VERSION = 1
BATCH_CHANGES = 50_000  # a batch that has so many is not extended
BATCH_S = 1.0  # nor one that has taken so long
_IDLE_S = 0.2


@dataclass(frozen=True)
class ApplyStatus:
    """How far a target is. What it says is durable there.

    Attributes:
        state: "applying", "idle" when the log had nothing more, "retrying" when target or log did not respond.
        transactions: Transactions of the source, in all runs, that changed tables that are applied.
        changes: Changes of rows, in all runs.
        done: The part of the log that was applied, 0 to 1.
        lag_s: How old the last transaction was when it was durable; None before the first of this run.
        problem: Why it is retrying.
    """

    state: ApplyState
    transactions: int = 0
    changes: int = 0
    done: float = 0.0
    lag_s: float | None = None
    problem: str = ""


@dataclass
class AppliedState:
    """What a target keeps beside its rows: how far they go.

    ``tables`` are the offsets of the definitions that the target's tables have, ``holding`` of those that rows have
    from here on, where they are others: a table that was made anew is so in the target with its first row.
    """

    patterns: str
    positions: dict[str, list[int]] = field(default_factory=dict)
    topic_ids: dict[str, str] = field(default_factory=dict)
    tables: dict[str, int] = field(default_factory=dict)
    transactions: int = 0
    changes: int = 0
    end_offset: int = -1
    position: str = ""
    holding: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the state as targets keep it."""
        return json.dumps({"version": STATE_VERSION, **self.__dict__})


def read_state(text: str | None, patterns: str, shown: str) -> AppliedState:
    """Return the state of a target; at the beginning where it has none.

    Raises:
        ConflictError: it is of another version.
        ConfigError: it is of other tables.
        CorruptionError: it is not one.
    """
    if text is None:
        return AppliedState(patterns)
    try:
        found: dict[str, Any] = json.loads(text)
        version = found.pop("version")
        if version == STATE_VERSION:
            state = AppliedState(**found)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(
            f"the state in {shown} is not one of `millstream apply` ({error}). Apply into an empty target."
        ) from error
    if version != STATE_VERSION:
        raise ConflictError(
            f"{shown} was applied to by another version of Millstream (format {version}, here {STATE_VERSION}). Use "
            "that version, or apply into an empty target."
        )
    if state.patterns != patterns:
        raise ConfigError(
            f"{shown} has the tables {state.patterns}, and now {patterns} are to be applied: rows from before would be "
            "missing. Apply the same tables, or others into another target."
        )
    return state


@dataclass
class Apply:
    """Applies a captured database to a target: made by :func:`apply`.

    Guarantees: the target has whole transactions of the source, in their order, each once, whatever is killed. One
    of a name applies to a target at a time: a later one stops the earlier.
    """

    name: str
    log: Path | str
    target: Callable[[], ApplyTarget]
    wanted: TablePatterns
    batch_changes: int = BATCH_CHANGES
    batch_s: float = BATCH_S
    clock_ms: Callable[[], int] = field(default=lambda: time.time_ns() // 1_000_000)
    monotonic_s: Callable[[], float] = time.monotonic
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    _stop: threading.Event = field(default_factory=threading.Event)
    _acquired: bool = False

    def stop(self) -> None:
        """Make :meth:`run` return after the batch that it has begun. From any thread."""
        self._stop.set()

    def run(
        self,
        *,
        until: ApplyUntil = "stopped",
        on_status: Callable[[ApplyStatus], None] = lambda _: None,
    ) -> ApplyStatus:
        """Apply, from where the target is; the first time from the beginning of the capture.

        Args:
            until: ``"stopped"``: until :meth:`stop`. ``"caught-up"``: until the log has nothing more.
            on_status: Called after each batch, while there is nothing to do, and before waiting to try again.

        Returns:
            The status at the end.

        Raises:
            ConfigError: a table or a value does not fit the target; the message says what to do.
            ConflictError: the log no longer has what follows the target's state.
            FencedError: another one applies to the target.
        """
        choose("until", until, get_args(ApplyUntil))
        retry, status = RetryWait(self._stop), ApplyStatus("applying")
        while not self._stop.is_set():
            try:
                with ApplySession(self) as session:
                    while not self._stop.is_set():
                        status = session.step()
                        retry.succeeded()
                        on_status(status)
                        if status.state == "idle" and until == "caught-up":
                            return status
                        if status.state == "idle":
                            session.stream.wait(_IDLE_S)
                        elif until == "stopped" and status.done == 1:
                            self._stop.wait(session.target.batch_s)
            except RetriableError as error:
                status = replace(status, state="retrying", problem=str(error))
                on_status(status)
                retry.wait()
        return status

    def acquire(self, target: ApplyTarget) -> str | None:
        """Become the one that applies to the target, and return its state."""
        found = target.acquire(self.name, self.token, again=self._acquired)
        self._acquired = True
        return found


class ApplySession:
    """A target that was acquired, and the stream from where it is; use it in ``with``, in one thread.

    ``before``: of a transaction, whether it is still to be applied. At the first that is not, the stream ends.
    """

    def __init__(
        self, run: Apply, before: Callable[[SourceTransaction], bool] = lambda _: True
    ) -> None:
        self._run = run
        self._before = before
        self._held: SourceTransaction | None = None
        self._lag_s: float | None = None
        self.ended = False

    def __enter__(self) -> Self:
        run = self._run
        self.target = run.target()
        try:
            text = run.acquire(self.target)
            self.state = read_state(text, str(run.wanted), self.target.shown)
            self.stream = ChangeStream(
                run.log,
                run.name,
                run.wanted,
                self.state.positions,
                self.state.topic_ids,
                run.monotonic_s,
            )
        except BaseException:
            self.target.close()
            raise
        try:
            versions = self.stream.versions
            self._tables = {
                name: versions.resume(name, offset) for name, offset in self.state.tables.items()
            }
            for name, offset in self.state.holding.items():
                versions.resume(name, offset)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        self.target.close()

    @property
    def passed(self) -> str:
        """The position of the last transaction that was applied, or has no tables that are."""
        read = self.stream.passed if self._held is None else self._held.before
        return read or self.state.position

    def step(self) -> ApplyStatus:
        """Apply one batch, and return the status after it."""
        first = self._next()
        if first is None:
            return self._status("idle")
        self.target.begin()
        try:
            self._apply(first)
        except BaseException:
            self.target.rollback()
            raise
        return self._status("applying")

    def _next(self) -> SourceTransaction | None:
        """Return the next transaction; None where there is none, or it is not to be applied."""
        if self._held is None:
            self._held = self.stream.next()
        self.ended = self._held is not None and not self._before(self._held)
        if self._held is None or self.ended:
            return None
        found, self._held = self._held, None
        return found

    def _apply(self, first: SourceTransaction) -> None:
        begun_s = self._run.monotonic_s()
        tables = dict(self._tables)
        writer = BatchWriter(self.target, self.stream.versions, tables)
        count, one = 0, first
        while True:
            writer.apply(one.changes)
            count, last = count + 1, one
            positions, holding = self.stream.position(), self.stream.versions.holding()
            if writer.changes >= self._run.batch_changes:
                break
            if self._run.monotonic_s() - begun_s >= self._run.batch_s:
                break
            following = self._next()
            if following is None:
                break
            one = following
        writer.flush()
        offsets = {name: table.offset for name, table in tables.items()}
        state = AppliedState(
            self.state.patterns,
            positions,
            dict(self.stream.topic_ids),
            offsets,
            self.state.transactions + count,
            self.state.changes + writer.changes,
            last.end_offset,
            last.position,
            {name: offset for name, offset in holding.items() if offsets.get(name) != offset},
        )
        self.target.commit(state.to_json())
        self.state, self._tables = state, tables
        self._lag_s = (self._run.clock_ms() - last.timestamp_ms) / 1000

    def there(self, table: AppliedTable) -> AppliedTable:
        """Return a table as the target has it, where it has it: it is altered there with the first row."""
        return self._tables.get(table.collection, table)

    def correct(self, batch: RowBatch) -> None:
        """Write rows that the target should have, and leave it where it is."""
        table, known = batch.table, self._tables.get(batch.table.collection)
        tables = {**self._tables, table.collection: table}
        self.target.begin()
        try:
            self.target.define(table, known)
            self.target.write(batch)
            offsets = {name: one.offset for name, one in tables.items()}
            state = replace(self.state, tables=offsets)
            self.target.commit(state.to_json())
        except BaseException:
            self.target.rollback()
            raise
        self.state, self._tables = state, tables

    def _status(self, state: ApplyState) -> ApplyStatus:
        read, end = self.stream.behind()
        done = 1.0 if not end else min(1.0, read / end)
        return ApplyStatus(state, self.state.transactions, self.state.changes, done, self._lag_s)


def apply(
    name: str,
    to: Path | str,
    *,
    tables: str | Sequence[str] = "*",
    log: Path | str = "./data",
) -> Apply:
    """Apply a captured database to a target. Call :meth:`Apply.run` on the result.

    ::

        copy = ms.apply("shop", "sqlite:///copy.db", log="./data")
        copy.run(until="caught-up")

    Args:
        name: The name of the capture, which its topics begin with.
        to: The target, by its URL: docs/apply.md lists them. A password in a URL is seen by others on the machine:
            leave it to the variable MILLSTREAM_APPLY_PASSWORD.
        tables: Which tables: ``schema.table`` or ``database.table``, with ``*`` and ``?``. The same ones in each run.
        log: The log that the capture writes to: a folder, or ``kafka://host:port``.

    Raises:
        ConfigError: the URL is of no target, its driver is not installed, or a pattern has no name.
    """
    from millstream.capture.apply.targets import target_of  # noqa: PLC0415 - drivers are extras

    patterns = (tables,) if isinstance(tables, str) else tuple(tables)
    if not name:
        raise ConfigError("the capture's name is empty. Give what its topics begin with.")
    return Apply(name, log, target_of(str(to)), TablePatterns(patterns, "*"))
