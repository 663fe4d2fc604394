"""The writer that a producer has: it appends where the owner is, here or in another process.

Nothing of a producer changes when the owner does. Where this process owns the folder, batches go to
the group commit as they are. Where another one does, they go through the gate, and each has a producer
and a sequence by then, so that it can be sent again to whoever owns the folder next:

- batches of a transaction, and of a spill, have their own; all others get those of this writer, which
  registers when it first needs them;
- a partition knows the last five batches of a producer, so a question has at most five for each;
- a batch that was refused was not appended: its sequence goes to the batch behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from millstream.errors import (
    DiskFullError,
    FolderOwnedError,
    MillstreamError,
    OutOfOrderSequenceError,
    ProducerFencedError,
)
from millstream.joining.access import FolderAccess, Line
from millstream.joining.requests import (
    Asked,
    append_outcomes,
    append_question,
    offsets_as_plain,
)
from millstream.log.batch import (
    NO_PRODUCER,
    SEQUENCE_MAX,
    EncodedBatch,
    ProducerStamp,
    stamp,
)
from millstream.log.group_commit import Durability, PendingAppend
from millstream.log.groups import Offsets
from millstream.log.named_producers import TIMEOUT_MS, ProducerIdentity
from millstream.log.producers import BATCHES_KEPT
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

_log = logging.getLogger(__name__)
QUESTION_BYTES_MAX = 8 << 20  # so that answers come, and memory is freed, from time to time


class FolderAppend:
    """One batch on its way into one partition; ``offset`` or ``error`` is set when it is done."""

    __slots__ = ("batch", "error", "name", "offset")

    def __init__(self, name: TopicPartition, batch: EncodedBatch) -> None:
        self.name = name
        self.batch = batch
        self.offset = -1
        self.error: MillstreamError | None = None


class Coordinator:
    """The transactions of one producer, decided by whoever owns the folder; see ``Transactions``."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._transactional_id: str | None = None
        self._timeout_ms = TIMEOUT_MS

    def register(
        self, transactional_id: str | None = None, *, timeout_ms: int = TIMEOUT_MS
    ) -> ProducerIdentity:
        """Return an identity that no living producer has; an older one of this name is fenced.

        Raises:
            ConfigError: the name or the timeout is not possible.
        """
        self._transactional_id, self._timeout_ms = transactional_id, timeout_ms
        args = {"transactional_id": transactional_id, "timeout_ms": timeout_ms}
        return ProducerIdentity(*self._line.ask(Asked("register", args)))

    def begin(self, identity: ProducerIdentity) -> None:
        """Open a transaction; see :meth:`Transactions.begin`."""
        self._line.ask(Asked("begin", {"identity": list(identity)}))

    def end(
        self,
        identity: ProducerIdentity,
        *,
        commit: bool,
        offsets: Mapping[str, Offsets] | None = None,
        fence: tuple[str, int] | None = None,
    ) -> ProducerIdentity:
        """End the open transaction; return the identity for the next: see :meth:`Transactions.end`."""
        args: dict[str, Any] = {
            "identity": list(identity),
            "commit": commit,
            "offsets": [
                [group, offsets_as_plain(given)] for group, given in (offsets or {}).items()
            ],
            "fence": None if fence is None else list(fence),
            "transactional_id": self._transactional_id,
            "timeout_ms": self._timeout_ms,
        }
        return ProducerIdentity(*self._line.ask(Asked("end", args)))


class FolderWriter:
    """What one producer writes through. One thread at a time commits; the rest is thread-safe."""

    def __init__(self, access: FolderAccess) -> None:
        self.folder: Path = access.folder
        self._access = access
        self._line = Line(access)
        self.transactions = Coordinator(self._line)
        self.partition_count = access.partition_count
        self._own: ProducerIdentity | None = None
        self._sequences: dict[TopicPartition, int] = {}

    def partition(self, name: TopicPartition) -> None:
        """Make sure that a partition is there.

        Raises:
            UnknownTopicError, ConfigError: it is not.
        """
        self._access.check_place(name)

    def pending(self, topic: str, partition: int, batch: EncodedBatch) -> FolderAppend:
        """Return an append to hand to :meth:`commit`, together with others."""
        return FolderAppend(TopicPartition(topic, partition), batch)

    def commit(self, appends: Sequence[FolderAppend], durability: Durability = "synced") -> None:
        """Return when each append has its offset, or its ``error``; see ``group_commit``.

        While the owner cannot be reached, stopped or of a kind that lets nobody in, this waits: what
        was asked may have been done, and only the next owner knows.

        Raises:
            MillstreamError: the log takes nothing any more.
        """
        if self._committed_here(appends, durability):
            return
        left = list(appends)
        while left:
            left = self._commit_some(left, durability)

    def close(self) -> None:
        """Close the connection to the owner, if there is one."""
        self._line.hang_up()

    # -- here ---------------------------------------------------------------------------------

    def _committed_here(self, appends: Sequence[FolderAppend], durability: Durability) -> bool:
        """Commit in this process, if it is the owner; the batches need no sequences then."""
        with self._access.writing() as writer:
            if writer is None:
                return False
            _commit_in(writer, appends, durability)
        return True

    # -- wherever the owner is ----------------------------------------------------------------

    def _commit_some(self, left: list[FolderAppend], durability: Durability) -> list[FolderAppend]:
        """Commit what one question may have; return what is still to be committed."""
        chosen, rest = _one_question(left)
        sequences = dict(self._sequences)
        stamped = [self._stamped(append, sequences) for append in chosen]
        names = [append.name for append in chosen]
        asked = append_question(zip(names, stamped, strict=True), durability)
        outcomes = append_outcomes(self._answer(asked))
        again: list[FolderAppend] = []
        refused: set[TopicPartition] = set()
        for append, batch, outcome in zip(chosen, stamped, outcomes, strict=True):
            own = append.batch.producer == NO_PRODUCER
            if isinstance(outcome, int):
                append.offset = outcome
                if own:
                    self._sequences[append.name] = _next_sequence(batch)
            elif own and append.name in refused and isinstance(outcome, OutOfOrderSequenceError):
                again.append(append)  # the sequence before it was not used
            else:
                append.error = outcome
                refused.add(append.name)
                if own and isinstance(outcome, OutOfOrderSequenceError | ProducerFencedError):
                    self._own, self._sequences = None, {}  # a new one knows no gap
                if isinstance(outcome, DiskFullError):
                    rest = _refuse_behind(append, rest)
        return again + rest

    def _answer(self, asked: Asked) -> Any:
        while True:
            try:
                return self._line.ask(asked)
            except FolderOwnedError as error:
                _log.warning("records wait for the owner of the folder: %s", error)
            asked = replace(asked, again=True)

    def _stamped(self, append: FolderAppend, sequences: dict[TopicPartition, int]) -> EncodedBatch:
        if append.batch.producer != NO_PRODUCER:
            return append.batch
        if self._own is None:
            args = {"transactional_id": None, "timeout_ms": TIMEOUT_MS}
            self._own = ProducerIdentity(*self._answer(Asked("register", args)))
        sequence = sequences.get(append.name, 0)
        batch = stamp(append.batch, ProducerStamp(*self._own, sequence), transactional=False)
        sequences[append.name] = _next_sequence(batch)
        return batch


def _next_sequence(batch: EncodedBatch) -> int:
    return (batch.producer.base_sequence + batch.count) & SEQUENCE_MAX


def _one_question(left: Sequence[FolderAppend]) -> tuple[list[FolderAppend], list[FolderAppend]]:
    """Return what can be asked at once, in its order, and the rest."""
    counts: dict[TopicPartition, int] = {}
    size = 0
    chosen: list[FolderAppend] = []
    rest: list[FolderAppend] = []
    for append in left:
        count = counts.get(append.name, 0)
        full = count >= BATCHES_KEPT or (chosen and size + append.batch.size > QUESTION_BYTES_MAX)
        counts[append.name] = BATCHES_KEPT if full else count + 1  # nothing overtakes it
        if full:
            rest.append(append)
        else:
            chosen.append(append)
            size += append.batch.size
    return chosen, rest


def _refuse_behind(refused: FolderAppend, rest: list[FolderAppend]) -> list[FolderAppend]:
    """Refuse, for want of room, what is behind a refused append in its partition too."""
    for append in rest:
        if append.name == refused.name:
            append.error = refused.error
    return [append for append in rest if append.error is None]


def _commit_in(writer: LogWriter, appends: Sequence[FolderAppend], durability: Durability) -> None:
    taken: list[tuple[FolderAppend, PendingAppend]] = []
    for append in appends:
        try:
            taken.append((append, writer.pending(*append.name, append.batch)))
        except MillstreamError as error:
            append.error = error
    writer.commit([pending for _, pending in taken], durability)
    for append, pending in taken:
        append.offset, append.error = pending.offset, pending.error
