"""In which order a job has read the records of its log: what it had read before each of some records.

A batch reads a range of each partition, and takes the records of its ranges in the order of the log. So what was read before
a record is known where the history of batches has its batch, and all batches before that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RecordId = tuple[str, int, int]
Starts = Mapping[str, Sequence[int]]  # topic → where the log of each partition begins


@dataclass(frozen=True)
class ReadAt:
    """The batch that has read a record, and the next offsets of all partitions just before the record.

    ``before`` is None where the history no longer has all batches up to that one.
    """

    batch_id: int
    before: dict[str, list[int]] | None


def reading_order(
    history: Sequence[Mapping[str, Any]], starts: Starts, records: Iterable[RecordId]
) -> dict[RecordId, ReadAt]:
    """Return when each of some records was read; those are left out whose batch the history does not have.

    ``history`` are the batches that are known, in their order.
    """
    whole = bool(history) and history[0]["batch_id"] == 0
    left, found, known = set(records), dict[RecordId, ReadAt](), set[tuple[str, int]]()
    begin = {(topic, n): start for topic, at in starts.items() for n, start in enumerate(at)}
    for batch in history:
        read = {
            (topic, int(number)): max(next_offset, begin.get((topic, int(number)), 0))
            for topic, partitions in batch["ends"].items()
            for number, next_offset in partitions.items()
        }
        end = begin | read
        for record in [one for one in left if read.get(one[:2], 0) > one[2]]:
            left.remove(record)
            if whole or record[:2] in known:  # otherwise an earlier batch may have read it
                before = _before(record, begin, end, starts) if whole else None
                found[record] = ReadAt(batch["batch_id"], before)
        if not left:
            break
        begin, known = end, known | read.keys()
    return found


def _before(
    record: RecordId,
    begin: Mapping[tuple[str, int], int],
    end: Mapping[tuple[str, int], int],
    starts: Starts,
) -> dict[str, list[int]]:
    """Return the next offsets of all partitions before a record of a batch, which reads from ``begin`` to ``end``."""
    order = record[:2]
    found = {
        topic: [(end if (topic, n) < order else begin)[topic, n] for n in range(len(at))]
        for topic, at in starts.items()
    }
    found[record[0]][record[1]] = record[2]
    return found
