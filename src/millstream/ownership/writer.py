"""The writer of a producer: it appends in this process if that is the owner, else through the owner.

A producer does not notice a change of owner. Where this process owns the folder, batches go to the
group commit unchanged. Where another one does, they go to the owner's server. Each is stamped with a
producer and a sequence first, so that it can be sent again to the next owner:

- batches of a transaction, and of a spill, have their own; all others get those of this writer, which
  registers when it first needs them;
- a partition remembers the last five batches of a producer, so a request has at most five for each;
- a rejected batch was not appended: its sequence goes to the batch after it.
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
    OutOfOrderSequenceError,
    ProducerFencedError,
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
from millstream.log.producer_identity import TIMEOUT_MS, ProducerIdentity
from millstream.log.producers import BATCHES_KEPT
from millstream.ownership.access import FolderAccess
from millstream.ownership.client import OwnerClient
from millstream.ownership.requests import (
    OwnerRequest,
    append_request,
    append_results,
    offsets_as_plain,
)
from millstream.record import TopicPartition

_log = logging.getLogger(__name__)
REQUEST_BYTES_MAX = 8 << 20  # so that results arrive, and memory is freed, from time to time


class RemoteCoordinator:
    """The transactions of one producer, decided by the owner; see ``TransactionCoordinator``."""

    def __init__(self, client: OwnerClient) -> None:
        self._client = client
        self._transactional_id: str | None = None
        self._timeout_ms = TIMEOUT_MS

    def register(
        self, transactional_id: str | None = None, *, timeout_ms: int = TIMEOUT_MS
    ) -> ProducerIdentity:
        """Return an identity that no running producer has; an older one of this name is fenced.

        Raises:
            ConfigError: the name or the timeout is invalid.
        """
        self._transactional_id, self._timeout_ms = transactional_id, timeout_ms
        args = {"transactional_id": transactional_id, "timeout_ms": timeout_ms}
        return ProducerIdentity(*self._client.call(OwnerRequest("register", args)))

    def begin(self, identity: ProducerIdentity) -> None:
        """Open a transaction; see :meth:`TransactionCoordinator.begin`."""
        self._client.call(OwnerRequest("begin", {"identity": list(identity)}))

    def end(
        self,
        identity: ProducerIdentity,
        *,
        commit: bool,
        offsets: Mapping[str, Offsets] | None = None,
        fence: tuple[str, int] | None = None,
    ) -> ProducerIdentity:
        """End the open transaction; return the identity for the next: see :meth:`TransactionCoordinator.end`."""
        args: dict[str, Any] = {
            "identity": list(identity),
            "commit": commit,
            "offsets": [
                [group, offsets_as_plain(of_group)] for group, of_group in (offsets or {}).items()
            ],
            "fence": None if fence is None else list(fence),
            "transactional_id": self._transactional_id,
            "timeout_ms": self._timeout_ms,
        }
        return ProducerIdentity(*self._client.call(OwnerRequest("end", args)))


class FolderWriter:
    """The writer of one producer. One thread at a time commits; the rest is thread-safe."""

    def __init__(self, access: FolderAccess) -> None:
        self.folder: Path = access.folder
        self._access = access
        self._client = OwnerClient(access)
        self.transactions = RemoteCoordinator(self._client)
        self.partition_count = access.partition_count
        self._identity: ProducerIdentity | None = None
        self._sequences: dict[TopicPartition, int] = {}

    def partition(self, name: TopicPartition) -> None:
        """Check that a partition exists.

        Raises:
            UnknownTopicError, ConfigError: it does not.
        """
        self._access.check_partition(name)

    def commit(self, appends: Sequence[PendingAppend], durability: Durability = "synced") -> None:
        """Return when each append has its offset, or its ``error``; see ``group_commit``.

        While the owner cannot be reached, because it is stopped or serves no other process, this
        waits: a request may have been handled, and only the next owner knows.

        Raises:
            MillstreamError: the log accepts no more appends.
        """
        if self._committed_here(appends, durability):
            return
        remaining = list(appends)
        while remaining:
            remaining = self._commit_some(remaining, durability)

    def close(self) -> None:
        """Close the connection to the owner, if there is one."""
        self._client.close()

    # -- in this process ----------------------------------------------------------------------

    def _committed_here(self, appends: Sequence[PendingAppend], durability: Durability) -> bool:
        """Commit in this process if it is the owner; the batches then need no sequences."""
        with self._access.use_writer() as writer:
            if writer is None:
                return False
            writer.commit(appends, durability)
        return True

    # -- through the owner --------------------------------------------------------------------

    def _commit_some(
        self, remaining: list[PendingAppend], durability: Durability
    ) -> list[PendingAppend]:
        """Commit as many appends as fit in one request; return the remaining ones."""
        chosen, rest = _one_request(remaining)
        sequences = dict(self._sequences)
        stamped = [self._stamped(append, sequences) for append in chosen]
        names = [append.name for append in chosen]
        ends = [append.expected_end for append in chosen]
        ids = [append.topic_id for append in chosen]
        request = append_request(zip(names, stamped, strict=True), durability, ends, ids)
        results = append_results(self._call(request))
        retried: list[PendingAppend] = []
        rejected: set[TopicPartition] = set()
        for append, batch, result in zip(chosen, stamped, results, strict=True):
            unstamped = append.batch.producer == NO_PRODUCER
            if isinstance(result, int):
                append.offset = result
                if unstamped:
                    self._sequences[append.name] = _next_sequence(batch)
            elif (
                unstamped
                and append.name in rejected
                and isinstance(result, OutOfOrderSequenceError)
            ):
                retried.append(append)  # the sequence before it was not used
            else:
                append.error = result
                rejected.add(append.name)
                if unstamped and isinstance(result, OutOfOrderSequenceError | ProducerFencedError):
                    self._identity, self._sequences = None, {}  # a new producer has no gap
                if isinstance(result, DiskFullError):
                    rest = _reject_following(append, rest)
        return retried + rest

    def _call(self, request: OwnerRequest) -> Any:
        while True:
            try:
                return self._client.call(request)
            except FolderOwnedError as error:
                _log.warning("records wait for the owner of the folder: %s", error)
            request = replace(request, retry=True)

    def _stamped(self, append: PendingAppend, sequences: dict[TopicPartition, int]) -> EncodedBatch:
        if append.batch.producer != NO_PRODUCER:
            return append.batch
        if self._identity is None:
            args = {"transactional_id": None, "timeout_ms": TIMEOUT_MS}
            self._identity = ProducerIdentity(*self._call(OwnerRequest("register", args)))
        sequence = sequences.get(append.name, 0)
        batch = stamp(append.batch, ProducerStamp(*self._identity, sequence), transactional=False)
        sequences[append.name] = _next_sequence(batch)
        return batch


def _next_sequence(batch: EncodedBatch) -> int:
    return (batch.producer.base_sequence + batch.count) & SEQUENCE_MAX


def _one_request(
    remaining: Sequence[PendingAppend],
) -> tuple[list[PendingAppend], list[PendingAppend]]:
    """Return the appends that fit in one request, in their order, and the rest."""
    counts: dict[TopicPartition, int] = {}
    size = 0
    chosen: list[PendingAppend] = []
    rest: list[PendingAppend] = []
    for append in remaining:
        count = counts.get(append.name, 0)
        full = count >= BATCHES_KEPT or (chosen and size + append.batch.size > REQUEST_BYTES_MAX)
        counts[append.name] = BATCHES_KEPT if full else count + 1  # nothing overtakes it
        if full:
            rest.append(append)
        else:
            chosen.append(append)
            size += append.batch.size
    return chosen, rest


def _reject_following(rejected: PendingAppend, rest: list[PendingAppend]) -> list[PendingAppend]:
    """Reject the appends after a rejected one in its partition too: the disk is full."""
    for append in rest:
        if append.name == rejected.name:
            append.error = rejected.error
    return [append for append in rest if append.error is None]
