"""The plan of cleaning: what is retained of each batch of a segment.

==================================  ============================================================
of                                  retained
==================================  ============================================================
a record                            if no later record of its key is known
a record of an aborted transaction  nothing
a tombstone                         until the horizon of its batch has passed; the first cleaning
                                    that keeps it sets the horizon
a marker                            while a transaction is open that it ends; then like a tombstone
a batch without records             nothing but its offsets, unless its producer is known and may
                                    send it again: then its header, as one that is in no transaction
==================================  ============================================================

The horizon is ``delete.retention.ms`` away, so that a running reader that has seen older records of a key
also sees its tombstone; and one that skips an aborted transaction finds its end. When a horizon is set, all
older records of the key are gone: segments are cleaned from the first on.

Whether a marker is still needed is found by replaying what is retained of the log, as recovery does. So a log
that lost its seals reads as before: a transaction that had ended is not open again.

Source: Kafka ``LogCleaner``, ``DefaultRecordBatch`` (delete horizon).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from millstream.log.aborted import AbortedTransactions
from millstream.log.batch import CONTROL, DELETE_HORIZON, TRANSACTIONAL, BatchHeader
from millstream.log.decoding import Block
from millstream.log.markers import is_commit
from millstream.log.producers import ProducerStates
from millstream.log.varint import Int64s

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RecordFlags(NamedTuple):
    """One element for each record of a segment, in order; markers and aborted records left out."""

    offset: Int64s
    stale: NDArray[np.bool_]
    tombstone: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CleaningTerms:
    """The rules for every batch.

    Args:
        horizon_ms: Until when tombstones found now are kept; None if they must stay, because older records of
            their keys may be in bytes that could not be read.
        resent: Base offsets of the batches that their producers may send again.
    """

    now_ms: int
    horizon_ms: int | None
    resent: frozenset[int]
    aborted: AbortedTransactions


class BatchRetention(Enum):
    """What is retained of a batch."""

    WHOLE = "every byte"
    RECORDS = "some records, or all of them with a horizon"
    HEADER = "its offsets and its producer"
    OFFSETS = "its offsets"


class BatchPlan(NamedTuple):
    """What is retained of the batch at ``at``. Only RECORDS has ``keep`` and ``horizon_ms``."""

    at: int
    header: BatchHeader
    retention: BatchRetention
    keep: NDArray[np.bool_] | None = None
    horizon_ms: int | None = None

    @property
    def changes(self) -> bool:
        """Whether the segment must be rewritten for it. Adjacent fillers are no reason."""
        if self.retention is BatchRetention.OFFSETS:
            return not _is_filler(self.header)
        return self.retention is not BatchRetention.WHOLE


def retain_whole(at: int, header: BatchHeader) -> BatchPlan:
    """Return the plan for a batch of which nothing is removed."""
    return BatchPlan(
        at, header, BatchRetention.OFFSETS if _is_filler(header) else BatchRetention.WHOLE
    )


def _is_filler(header: BatchHeader) -> bool:
    return not header.record_count and header.producer_id < 0


_ONE_RECORD = np.ones(1, bool)


class SegmentPlan:
    """Decides about the batches of one segment, in order.

    ``horizon_ms`` is the last of the horizons after which more can be removed; ``states`` are the producers
    after the batches decided so far, as retained; ``removed_offset`` is the highest offset of the tombstones
    whose horizon has passed.
    """

    def __init__(self, terms: CleaningTerms, facts: RecordFlags, states: ProducerStates) -> None:
        self._terms = terms
        self._facts = facts
        self._seen = 0  # records, as the facts count them
        self.horizon_ms: int | None = None
        self.removed_offset: int | None = None
        self.states = states.copy()

    def decide(self, block: Block) -> Iterator[BatchPlan]:
        """Yield what is retained of each batch of the block."""
        counts = [self._records_of(header) for _, header in block.batches]
        live, tombstones = self._sums(counts)
        for (at, header), count, alive, dead in zip(
            block.batches, counts, live, tombstones, strict=True
        ):
            if header.attributes & CONTROL:
                batch_plan = self._marker(block.data, at, header)
            else:
                batch_plan = self._records(at, header, count, alive, dead)
                self._replay(batch_plan)
            self._seen += count
            yield batch_plan
        self.states.commit()

    def _records_of(self, header: BatchHeader) -> int:
        """Return how many records of a batch are in the facts."""
        if header.attributes & CONTROL or self._terms.aborted.covers(header):
            return 0
        return header.record_count

    def _sums(self, counts: list[int]) -> tuple[list[int], list[int]]:
        """Return for each batch how many of its records are not stale, and not stale tombstones."""
        stop = self._seen + sum(counts)
        alive = ~self._facts.stale[self._seen : stop]
        dead = alive & self._facts.tombstone[self._seen : stop]
        ends = np.cumsum(counts)
        return _sums_up_to(alive, ends), _sums_up_to(dead, ends)

    def _records(
        self, at: int, header: BatchHeader, count: int, alive: int, tombstones: int
    ) -> BatchPlan:
        if tombstones:
            return self._with_tombstones(at, header, count)
        if alive == header.record_count and alive:
            return BatchPlan(at, header, BatchRetention.WHOLE)
        if alive:
            keep = ~self._facts.stale[self._seen : self._seen + count]
            return BatchPlan(at, header, BatchRetention.RECORDS, keep)
        return self._empty(at, header)

    def _with_tombstones(self, at: int, header: BatchHeader, count: int) -> BatchPlan:
        terms, part = self._terms, slice(self._seen, self._seen + count)
        keep = ~self._facts.stale[part]
        horizon_ms: int | None = None
        if not header.attributes & DELETE_HORIZON:
            horizon_ms = terms.horizon_ms
            self._note(horizon_ms)
        elif header.base_timestamp_ms > terms.now_ms:
            self._note(header.base_timestamp_ms)
        else:
            tombstone = self._facts.tombstone[part]
            self.removed_offset = int(self._facts.offset[part][keep & tombstone][-1])
            keep &= ~tombstone
        if not keep.any():
            return self._empty(at, header)
        if keep.all() and horizon_ms is None:
            return BatchPlan(at, header, BatchRetention.WHOLE)
        return BatchPlan(at, header, BatchRetention.RECORDS, keep, horizon_ms)

    def _empty(self, at: int, header: BatchHeader) -> BatchPlan:
        if header.base_offset not in self._terms.resent:
            return BatchPlan(at, header, BatchRetention.OFFSETS)
        if header.record_count or header.attributes & TRANSACTIONAL:
            return BatchPlan(at, header, BatchRetention.HEADER)
        return BatchPlan(at, header, BatchRetention.WHOLE)

    def _marker(self, data: bytes, at: int, header: BatchHeader) -> BatchPlan:
        commit = is_commit(data, at, header)
        before = self.states.entries().get(header.producer_id)
        self.states.replay(header, commit=commit)
        ends_nothing = before is None or (
            before.open_since is None and header.producer_epoch <= before.producer_epoch
        )
        if commit is None or not ends_nothing or self._terms.horizon_ms is None:
            return BatchPlan(at, header, BatchRetention.WHOLE)
        if not header.attributes & DELETE_HORIZON:
            self._note(self._terms.horizon_ms)
            return BatchPlan(
                at, header, BatchRetention.RECORDS, _ONE_RECORD, self._terms.horizon_ms
            )
        if header.base_timestamp_ms > self._terms.now_ms:
            self._note(header.base_timestamp_ms)
            return BatchPlan(at, header, BatchRetention.WHOLE)
        return BatchPlan(at, header, BatchRetention.OFFSETS)

    def _replay(self, batch_plan: BatchPlan) -> None:
        header = batch_plan.header
        if header.producer_id < 0 or batch_plan.retention is BatchRetention.OFFSETS:
            return
        if batch_plan.retention is BatchRetention.HEADER:
            header = header._replace(attributes=0)
        self.states.replay(header, commit=None)

    def _note(self, horizon_ms: int | None) -> None:
        if horizon_ms is not None:
            self.horizon_ms = max(horizon_ms, self.horizon_ms or horizon_ms)


def known_at_end(before: ProducerStates, replayed: ProducerStates) -> ProducerStates:
    """Return the producers for a cleaned segment's seal.

    They are those at its end ``before``, including batches that the log no longer has. But a transaction is
    open only if it is in the log as retained: its marker may be gone.
    """
    entries = {}
    for producer_id, entry in before.entries().items():
        shown = replayed.entries().get(producer_id)
        since = None if shown is None else shown.open_since
        entries[producer_id] = replace(entry, open_since=since)
    return ProducerStates(entries)


def _sums_up_to(flags: NDArray[np.bool_], ends: Int64s) -> list[int]:
    """Return how many flags are set between each end and the one before it."""
    totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(flags)])[ends]
    sums: list[int] = np.diff(totals, prepend=0).tolist()
    return sums
