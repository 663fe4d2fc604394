"""Moves batches from the spill to the log: each once and in order, with a crash at any point.

A spill has its own producer identity, which lives as long as its folder; its batches are stamped with the
sequences in ``state.json``. One group at a time:

1. Take the oldest batches, five of a partition at most, and append them, synced. A crash leaves
   some of them in the log, all of them in the spill: the next owner appends the same group with
   the same sequences, and the log, which knows the last five batches of each partition, returns
   those that it has with the offset of the first time.
2. Note, durably, that they are done, and the sequences that follow. A crash leaves files that hold
   nothing more of the queue.

Batches are stamped in step 1, and not when they are spilled: a batch that the log rejects for good (its topic
was deleted, a record has no key in a compacted topic) takes no sequence, so that those after it follow
without a gap.

==================================================  =============================================
the log's response to a batch of the group          done
==================================================  =============================================
an offset                                           recorded as done
no room                                             it and all behind it: retried later
refused for good (``ConfigError``)                  recorded as done, reported, counted
a gap (``OutOfOrderSequenceError``), and one of     it and all behind it: retried, once that is recorded,
its partition before it was refused for good        with the sequences that are right then
any other error                                     raised: the producer stops
==================================================  =============================================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from millstream.client.folder.spill import SpillQueue
from millstream.client.folder.spill_format import Entry
from millstream.client.folder.writer import ProducerWriter
from millstream.errors import (
    ConfigError,
    DiskFullError,
    MillstreamError,
    OutOfOrderSequenceError,
)
from millstream.log.batch import SEQUENCE_MAX, ProducerStamp, stamp
from millstream.log.group_commit import PendingAppend
from millstream.log.producers import BATCHES_KEPT
from millstream.record import TopicPartition


@dataclass(slots=True)
class DrainResult:
    """The result of one group; entries in neither list are still in the spill."""

    appended: list[tuple[Entry, int]] = field(default_factory=list)  # with their offsets
    refused: list[tuple[Entry, MillstreamError]] = field(default_factory=list)
    no_room: DiskFullError | None = None


class _StampedEntry(NamedTuple):
    entry: Entry
    append: PendingAppend
    next_sequence: int


def drain(spill: SpillQueue, writer: ProducerWriter) -> DrainResult:
    """Move the oldest batches to the log; see the module for the steps.

    Raises:
        MillstreamError: the log or the spill accepts nothing any more.
    """
    tries = _stamp(spill)
    writer.commit([one.append for one in tries], "synced")
    sequences = dict(spill.state.sequences)
    drained, last = DrainResult(), None
    refused: set[TopicPartition] = set()
    for one in tries:
        name = one.entry.name
        error = one.append.error
        if error is None:
            drained.appended.append((one.entry, one.append.offset))
            sequences[name] = one.next_sequence
        elif isinstance(error, DiskFullError):
            drained.no_room = error
            break
        elif isinstance(error, ConfigError):
            drained.refused.append((one.entry, error))
            refused.add(name)
        elif isinstance(error, OutOfOrderSequenceError) and name in refused:
            break
        else:
            raise error
        last = one.entry
    if last is not None:
        try:
            spill.mark_done(last, sequences)
        except DiskFullError as error:
            return DrainResult(no_room=error)
    return drained


def _stamp(spill: SpillQueue) -> list[_StampedEntry]:
    """Return the oldest batches, each ready to be appended with its sequence."""
    identity, sequences = spill.state.identity, dict(spill.state.sequences)
    tries = []
    for entry in spill.peek(BATCHES_KEPT):
        sequence = sequences.get(entry.name, 0)
        sequences[entry.name] = (sequence + entry.batch.count) & SEQUENCE_MAX
        stamped = stamp(entry.batch, ProducerStamp(*identity, sequence), transactional=False)
        append = PendingAppend(entry.name, stamped)
        tries.append(_StampedEntry(entry, append, sequences[entry.name]))
    return tries
