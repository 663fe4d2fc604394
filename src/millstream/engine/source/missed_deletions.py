"""Refuses a table that would keep deleted rows, as compaction removed the deletions before they were read.

The source's offset says which removal of tombstones was the last when the app began to read a partition. What
was removed by then hides nothing: the older records of those keys were gone before. A later removal hides a
deletion that the app had not reached, as it may have read an older record of the key.

The planner asks as a run begins, of partitions of which something was read, so that a run after a long absence
is refused before it reads. A task asks when it has read its records, as compaction may come between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from millstream.client.reader import RecordReader
from millstream.errors import DeletionsLostError
from millstream.kernels.plan import SourcePlan
from millstream.views.runs.control_files import reset_command


def topics_of_tables(sources: Iterable[SourcePlan]) -> list[str]:
    """Return the topics in which a record without a value deletes a row."""
    return sorted({source.topic for source in sources if source.table_key is not None})


def last_removals(log: RecordReader, topic: str, partitions: int) -> tuple[int, ...]:
    """Return the number of the last removal of tombstones in each partition; 0 if there was none."""
    known = log.removed_tombstones(topic)
    return tuple(known[at][-1].number if at in known else 0 for at in range(partitions))


def check_deletions(
    log: RecordReader,
    topic: str,
    positions: Iterable[tuple[int, int]],
    last_known: Sequence[int],
    app_folder: Path,
) -> None:
    """Make sure that no deletion at or behind some positions was removed since the app began to read.

    Args:
        positions: Partitions with the next offset to read.
        last_known: The last removal in each partition when the app began to read it.

    Raises:
        DeletionsLostError: there was one.
    """
    removals = log.removed_tombstones(topic)
    for partition, position in positions:
        known = last_known[partition] if partition < len(last_known) else 0
        missed = max(
            (one.last_offset for one in removals.get(partition, ()) if one.number > known),
            default=-1,
        )
        if position <= missed:
            raise DeletionsLostError(
                f"compaction has removed deletions from topic {topic!r}, partition {partition}, up to "
                f"offset {missed}; the app had come to offset {position}, so its table would "
                "keep rows that were deleted. To build it again from the records that the log holds "
                f"today: {reset_command(app_folder)}, which first lists what it removes; a query of your "
                "own needs another checkpoint. If apps are away for long, raise the topic's "
                "delete.retention.ms"
            )
