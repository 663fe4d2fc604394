"""The producers of a partition: which of their batches it has, and whose transaction is open.

A producer with an identity (producer id, producer epoch) numbers its records. A batch that is sent again gets
the offset of the first time; a gap is rejected; a batch of an older producer epoch is fenced. The last five
batches of each producer are remembered: a client has at most five in flight.

=====================================  ==========================================================
a batch of producer id p has           result
=====================================  ==========================================================
p not known here                       accepted, whatever its sequence (p may have been forgotten)
a producer epoch below the known one   refused: ``ProducerFencedError``
a producer epoch above the known one   taken if its sequence is 0, else ``OutOfOrderSequenceError``
the sequence that follows the last     taken
exactly one of the last five           not written again; the offset of the first time
any other sequence                     refused: ``OutOfOrderSequenceError``
=====================================  ==========================================================

Everything here is a fold over batch headers, so it is rebuilt from the log; a seal keeps a copy at
the end of each segment, so that only the last segment is read at an opening.

Source: Kafka ``ProducerAppendInfo``, ``ProducerStateManager``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from millstream.errors import OutOfOrderSequenceError, ProducerFencedError
from millstream.log.batch import (
    CONTROL,
    SEQUENCE_MAX,
    TRANSACTIONAL,
    BatchHeader,
    EncodedBatch,
    ProducerStamp,
)
from millstream.record import TopicPartition

BATCHES_KEPT = 5
PRODUCER_EXPIRES_MS = 7 * 86_400_000


class SentBatch(NamedTuple):
    """The offset of one batch of a producer; sequences are inclusive."""

    first_sequence: int
    last_sequence: int
    base_offset: int


@dataclass(frozen=True, slots=True)
class ProducerEntry:
    """One producer in one partition. ``open_since`` is the first offset of its open transaction."""

    producer_epoch: int
    last_used_ms: int
    batches: tuple[SentBatch, ...] = ()
    open_since: int | None = None


class AbortedTransaction(NamedTuple):
    """An aborted transaction: its batches are in [first_offset, last_offset]."""

    producer_id: int
    first_offset: int
    last_offset: int


class ProducerStates:
    """The producers of one partition. Not thread-safe: ``group_commit`` holds the lock."""

    def __init__(self, entries: Mapping[int, ProducerEntry] | None = None) -> None:
        self._entries: dict[int, ProducerEntry] = dict(entries or {})
        # Needed at every commit, where there may be thousands of producers.
        self._open = {
            producer_id
            for producer_id, entry in self._entries.items()
            if entry.open_since is not None
        }
        self._before: dict[int, ProducerEntry | None] = {}  # for a rollback

    def commit(self) -> None:
        """Make everything noted so far permanent."""
        self._before.clear()

    def rollback(self) -> None:
        """Discard everything noted since the last :meth:`commit`: it was not written."""
        for producer_id, entry in self._before.items():
            self._set(producer_id, entry)
        self._before.clear()

    def _put(self, producer_id: int, entry: ProducerEntry) -> None:
        self._before.setdefault(producer_id, self._entries.get(producer_id))
        self._set(producer_id, entry)

    def _set(self, producer_id: int, entry: ProducerEntry | None) -> None:
        if entry is None:
            del self._entries[producer_id]
        else:
            self._entries[producer_id] = entry
        if entry is None or entry.open_since is None:
            self._open.discard(producer_id)
        else:
            self._open.add(producer_id)

    def copy(self) -> ProducerStates:
        """Return an independent copy; entries are immutable."""
        return ProducerStates(self._entries)

    def committed(self) -> ProducerStates:
        """Return a copy without what was noted since the last :meth:`commit`."""
        known = ProducerStates(self._entries)
        known._before = dict(self._before)
        known.rollback()
        return known

    def entries(self) -> Mapping[int, ProducerEntry]:
        """Return the entries by producer id."""
        return self._entries

    def duplicate_of(self, name: TopicPartition, batch: EncodedBatch) -> int | None:
        """Return the offset of a batch that is here already; None for one that may be written.

        Raises:
            ProducerFencedError: a newer producer epoch has written.
            OutOfOrderSequenceError: batches before this one are missing.
        """
        stamp = batch.producer
        entry = self._entries.get(stamp.producer_id)
        if entry is None:
            return None
        if stamp.producer_epoch < entry.producer_epoch:
            raise _fenced(name, stamp, entry)
        if stamp.base_sequence < 0:  # a marker has no sequence
            return None
        if stamp.producer_epoch > entry.producer_epoch or not entry.batches:
            if stamp.base_sequence == 0 or not entry.batches:
                return None
            raise _out_of_order(name, stamp, 0)
        last = (stamp.base_sequence + batch.count - 1) & SEQUENCE_MAX
        for sent in entry.batches:
            if (sent.first_sequence, sent.last_sequence) == (stamp.base_sequence, last):
                return sent.base_offset
        expected = (entry.batches[-1].last_sequence + 1) & SEQUENCE_MAX
        if stamp.base_sequence != expected:
            raise _out_of_order(name, stamp, expected)
        return None

    def add(
        self,
        *,
        base_offset: int,
        count: int,
        attributes: int,
        producer: ProducerStamp,
        used_ms: int,
    ) -> None:
        """Note a batch written at ``base_offset``. Call it in the order of offsets.

        ``used_ms`` is when it was written; its records may be of any age.
        """
        if producer.producer_id < 0 or attributes & CONTROL:
            return
        entry = self._entries.get(producer.producer_id)
        if entry is None or entry.producer_epoch != producer.producer_epoch:
            since = entry.open_since if entry is not None else None
            entry = ProducerEntry(producer.producer_epoch, used_ms, open_since=since)
        last = (producer.base_sequence + count - 1) & SEQUENCE_MAX
        sent = SentBatch(producer.base_sequence, last, base_offset)
        since = entry.open_since
        if attributes & TRANSACTIONAL and since is None:
            since = base_offset
        noted = replace(
            entry,
            last_used_ms=max(used_ms, entry.last_used_ms),
            batches=(*entry.batches, sent)[-BATCHES_KEPT:],
            open_since=since,
        )
        self._put(producer.producer_id, noted)

    def end_transaction(
        self, producer: ProducerStamp, marker_offset: int, *, commit: bool
    ) -> AbortedTransaction | None:
        """Note a marker; return the range that it aborts, if it does."""
        entry = self._entries.get(producer.producer_id)
        if entry is None or producer.producer_epoch < entry.producer_epoch:
            return None  # a marker that was written twice must not end what came after
        since = entry.open_since
        same_life = producer.producer_epoch == entry.producer_epoch
        ended = replace(
            entry,
            producer_epoch=producer.producer_epoch,
            batches=entry.batches if same_life else (),
            open_since=None,
        )
        self._put(producer.producer_id, ended)
        if since is None or commit:
            return None
        return AbortedTransaction(producer.producer_id, since, marker_offset)

    def replay(self, header: BatchHeader, *, commit: bool | None) -> AbortedTransaction | None:
        """Note a batch found in the log; ``commit`` is what a marker says. See the other two."""
        if header.attributes & CONTROL:
            if commit is None:
                return None
            return self.end_transaction(header.producer, header.base_offset, commit=commit)
        self.add(
            base_offset=header.base_offset,
            count=header.last_offset_delta + 1,
            attributes=header.attributes,
            producer=header.producer,
            used_ms=header.max_timestamp_ms,
        )
        return None

    def last_stable(self, end: int) -> int:
        """Return the offset below which every transaction has ended; ``end`` if none is open."""
        return min((first for _, first in self.open_transactions().values()), default=end)

    def end_transactions_below(self, last_stable: int) -> None:
        """Note that every transaction which began below ``last_stable`` has ended.

        That was published, so one that still seems open has lost its marker to damage.
        """
        for producer_id, (_, first) in self.open_transactions().items():
            if first < last_stable:
                entry = self._entries[producer_id]
                later = (sent.base_offset for sent in entry.batches)
                since = min((offset for offset in later if offset >= last_stable), default=None)
                self._set(producer_id, replace(entry, open_since=since))

    def open_transactions(self) -> dict[int, tuple[int, int]]:
        """Return (producer epoch, first offset) of each open transaction, by producer id."""
        found = {}
        for producer_id in sorted(self._open):
            entry = self._entries[producer_id]
            assert entry.open_since is not None, "what is not open is not among the open"
            found[producer_id] = entry.producer_epoch, entry.open_since
        return found

    def touch(self, now_ms: int) -> None:
        """Count every producer as used now: the log does not say when its batches arrived."""
        for producer_id, entry in self._entries.items():
            if entry.last_used_ms < now_ms:
                self._entries[producer_id] = replace(entry, last_used_ms=now_ms)

    def forget_idle(self, before_ms: int) -> int:
        """Remove producers not used since ``before_ms``; return how many. Open ones remain."""
        idle = [
            producer_id
            for producer_id, entry in self._entries.items()
            if entry.open_since is None and entry.last_used_ms < before_ms
        ]
        for producer_id in idle:
            del self._entries[producer_id]
        return len(idle)

    # -- for seals -----------------------------------------------------------------------------

    def to_rows(self) -> list[list[object]]:
        """Return plain values for a seal."""
        return [
            [
                producer_id,
                entry.producer_epoch,
                entry.last_used_ms,
                entry.open_since,
                [list(sent) for sent in entry.batches],
            ]
            for producer_id, entry in sorted(self._entries.items())
        ]

    @classmethod
    def from_rows(cls, rows: Any) -> ProducerStates:
        """Return what :meth:`to_rows` gave. Raises TypeError or ValueError for anything else."""
        entries: dict[int, ProducerEntry] = {}
        for producer_id, producer_epoch, last_ms, since, batches in rows:
            sent = tuple(SentBatch(*map(int, one)) for one in batches)
            open_since = None if since is None else int(since)
            entries[int(producer_id)] = ProducerEntry(
                int(producer_epoch), int(last_ms), sent, open_since
            )
        return cls(entries)


def _fenced(
    name: TopicPartition, stamp: ProducerStamp, entry: ProducerEntry
) -> ProducerFencedError:
    return ProducerFencedError(
        f"producer {stamp.producer_id} wrote to {name} with producer epoch "
        f"{entry.producer_epoch}; this batch has producer epoch {stamp.producer_epoch}: another producer "
        "has taken over, so close this one"
    )


def _out_of_order(
    name: TopicPartition, stamp: ProducerStamp, expected: int
) -> OutOfOrderSequenceError:
    return OutOfOrderSequenceError(
        f"a batch of producer {stamp.producer_id} for {name} begins at "
        f"sequence {stamp.base_sequence}, but {expected} must follow: records between them are "
        "missing. Send those first; if they are lost, begin again with a new producer"
    )
