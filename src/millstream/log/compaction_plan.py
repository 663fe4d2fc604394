"""What stays of a segment when it is cleaned, batch by batch.

==================================  ============================================================
of                                  stays
==================================  ============================================================
a record                            if no later record of its key is known
a record of an aborted transaction  nothing
a tombstone                         until the horizon of its batch has passed; the first cleaning
                                    that keeps it sets the horizon
a marker                            while a transaction is open that it ends; then like a tombstone
a batch without records             nothing but its offsets, unless its producer is known and may
                                    send it again: then its header, as one that is in no transaction
==================================  ============================================================

The horizon is ``delete.retention.ms`` away, so that a reader at work, who has met the older records
of a key, also meets its tombstone; and one that passes over an aborted transaction meets its end.
When a horizon is set, everything older of the key is gone: segments are cleaned from the first on.

Whether a marker is still needed is found by replaying what stays of the log, as recovery does. So a
log that lost its seals is understood as before: no transaction is open that had ended.

Source: Kafka ``LogCleaner``, ``DefaultRecordBatch`` (delete horizon).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from millstream.log.aborted import AbortedRanges
from millstream.log.batch import CONTROL, DELETE_HORIZON, TRANSACTIONAL, BatchHeader
from millstream.log.decoding import Block
from millstream.log.markers import is_commit
from millstream.log.producers import ProducerStates
from millstream.log.varint import Int64s

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RecordFacts(NamedTuple):
    """One element for each record of a segment, in order; markers and aborted records left out."""

    stale: NDArray[np.bool_]
    tombstone: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Terms:
    """What decides about every batch.

    Args:
        horizon_ms: Until when tombstones found now are kept; None if they must not go, because
            there may be older records of their keys that could not be read.
        resent: Base offsets of the batches that their producers may send again.
    """

    now_ms: int
    horizon_ms: int | None
    resent: frozenset[int]
    aborted: AbortedRanges


class Stays(Enum):
    """What stays of a batch."""

    WHOLE = "every byte"
    RECORDS = "some records, or all of them with a horizon"
    HEADER = "its offsets and its producer"
    OFFSETS = "its offsets"


class Verdict(NamedTuple):
    """What stays of the batch at ``at``. ``keep`` and ``horizon_ms`` are told with RECORDS only."""

    at: int
    header: BatchHeader
    stays: Stays
    keep: NDArray[np.bool_] | None = None
    horizon_ms: int | None = None

    @property
    def changes(self) -> bool:
        """Whether this is reason to write the segment anew. Fillers that could be one are not."""
        if self.stays is Stays.OFFSETS:
            return not _is_filler(self.header)
        return self.stays is not Stays.WHOLE


def as_it_is(at: int, header: BatchHeader) -> Verdict:
    """Return the verdict on a batch of which nothing is taken away."""
    return Verdict(at, header, Stays.OFFSETS if _is_filler(header) else Stays.WHOLE)


def _is_filler(header: BatchHeader) -> bool:
    return not header.record_count and header.producer_id < 0


_ONE_RECORD = np.ones(1, bool)


class SegmentPlan:
    """Decides about the batches of one segment, in order.

    ``horizon_ms`` is the last of the horizons after which something more will go; ``states`` is
    what the batches decided so far tell of producers, as they will be.
    """

    def __init__(self, terms: Terms, facts: RecordFacts, states: ProducerStates) -> None:
        self._terms = terms
        self._facts = facts
        self._seen = 0  # records, as they are counted in the facts
        self.horizon_ms: int | None = None
        self.states = states.copy()

    def decide(self, block: Block) -> Iterator[Verdict]:
        """Yield what stays of each batch of the block."""
        counts = [self._records_of(header) for _, header in block.batches]
        live, tombstones = self._sums(counts)
        for (at, header), count, alive, dead in zip(
            block.batches, counts, live, tombstones, strict=True
        ):
            if header.attributes & CONTROL:
                verdict = self._marker(block.data, at, header)
            else:
                verdict = self._records(at, header, count, alive, dead)
                self._replay(verdict)
            self._seen += count
            yield verdict
        self.states.keep()

    def _records_of(self, header: BatchHeader) -> int:
        """Return how many records of a batch the facts speak of."""
        if header.attributes & CONTROL or self._terms.aborted.cover(header):
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
    ) -> Verdict:
        if tombstones:
            return self._with_tombstones(at, header, count)
        if alive == header.record_count and alive:
            return Verdict(at, header, Stays.WHOLE)
        if alive:
            keep = ~self._facts.stale[self._seen : self._seen + count]
            return Verdict(at, header, Stays.RECORDS, keep)
        return self._empty(at, header)

    def _with_tombstones(self, at: int, header: BatchHeader, count: int) -> Verdict:
        terms, part = self._terms, slice(self._seen, self._seen + count)
        keep = ~self._facts.stale[part]
        horizon_ms: int | None = None
        if not header.attributes & DELETE_HORIZON:
            horizon_ms = terms.horizon_ms
            self._note(horizon_ms)
        elif header.base_timestamp_ms > terms.now_ms:
            self._note(header.base_timestamp_ms)
        else:
            keep &= ~self._facts.tombstone[part]
        if not keep.any():
            return self._empty(at, header)
        if keep.all() and horizon_ms is None:
            return Verdict(at, header, Stays.WHOLE)
        return Verdict(at, header, Stays.RECORDS, keep, horizon_ms)

    def _empty(self, at: int, header: BatchHeader) -> Verdict:
        if header.base_offset not in self._terms.resent:
            return Verdict(at, header, Stays.OFFSETS)
        if header.record_count or header.attributes & TRANSACTIONAL:
            return Verdict(at, header, Stays.HEADER)
        return Verdict(at, header, Stays.WHOLE)

    def _marker(self, data: bytes, at: int, header: BatchHeader) -> Verdict:
        commit = is_commit(data, at, header)
        before = self.states.entries().get(header.producer_id)
        self.states.replay(header, commit=commit)
        ends_nothing = before is None or (
            before.open_since is None and header.producer_epoch <= before.producer_epoch
        )
        if commit is None or not ends_nothing or self._terms.horizon_ms is None:
            return Verdict(at, header, Stays.WHOLE)
        if not header.attributes & DELETE_HORIZON:
            self._note(self._terms.horizon_ms)
            return Verdict(at, header, Stays.RECORDS, _ONE_RECORD, self._terms.horizon_ms)
        if header.base_timestamp_ms > self._terms.now_ms:
            self._note(header.base_timestamp_ms)
            return Verdict(at, header, Stays.WHOLE)
        return Verdict(at, header, Stays.OFFSETS)

    def _replay(self, verdict: Verdict) -> None:
        header = verdict.header
        if header.producer_id < 0 or verdict.stays is Stays.OFFSETS:
            return
        if verdict.stays is Stays.HEADER:
            header = header._replace(attributes=0)
        self.states.replay(header, commit=None)

    def _note(self, horizon_ms: int | None) -> None:
        if horizon_ms is not None:
            self.horizon_ms = max(horizon_ms, self.horizon_ms or horizon_ms)


def known_at_end(before: ProducerStates, replayed: ProducerStates) -> ProducerStates:
    """Return what a cleaned segment's seal says of producers.

    That is what was known at its end ``before``: it includes batches that the log no longer shows.
    But a transaction counts as open only if the log, replayed, shows it: its marker may be gone.
    """
    entries = {}
    for producer_id, entry in before.entries().items():
        shown = replayed.entries().get(producer_id)
        since = None if shown is None else shown.open_since
        entries[producer_id] = replace(entry, open_since=since)
    return ProducerStates(entries)


def _sums_up_to(flags: NDArray[np.bool_], ends: Int64s) -> list[int]:
    """Return how many flags are set before each end and behind the one before it."""
    totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(flags)])[ends]
    sums: list[int] = np.diff(totals, prepend=0).tolist()
    return sums
