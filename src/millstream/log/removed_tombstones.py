"""Which tombstones compaction has removed, so that a table can be told of deletions that it missed.

A reader that has read older records of a key, and comes back after its tombstone is gone, never learns of
the deletion. So the removals of each partition are numbered, and the highest offset of the tombstones of each is
kept in control.db. A reader remembers the last number from when it began to read. It has missed a deletion if a
removal with a higher number was of an offset that it had not reached.

It is committed before the segment is replaced. A crash between the two leaves a removal of tombstones that are
still there, which the next pass removes; never a removal that is not known.

A removal is kept until a later one has the same offset or a higher one, as that says more. So there are few:
offsets fall as the numbers rise, and compaction removes tombstones mostly in the order of their offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from millstream.log.control import ControlDb
from millstream.record import TopicPartition


class Removal(NamedTuple):
    """A removal of tombstones: its number in its partition, and the highest offset among them."""

    number: int
    last_offset: int


Removals = Mapping[int, tuple[Removal, ...]]
"""The removals of a topic by partition, in the order of their numbers."""


def note_removal(control: ControlDb, name: TopicPartition, last_offset: int) -> None:
    """Note that tombstones of a partition are about to be removed; durable on return.

    Raises:
        RetriableError, DiskFullError, CorruptionError: see ``ControlDb.commit``; nothing is noted.
    """
    with control.commit() as connection:
        connection.execute(
            "INSERT INTO removed_tombstones SELECT topic_id, :partition, 1 + coalesce(("
            "SELECT max(removal) FROM removed_tombstones AS known "
            "WHERE known.topic_id = topics.topic_id AND known.partition = :partition), 0), :offset "
            "FROM topics WHERE name = :topic",
            {"partition": name.partition, "offset": last_offset, "topic": name.topic},
        )
        connection.execute(
            "DELETE FROM removed_tombstones AS older WHERE EXISTS ("
            "SELECT 1 FROM removed_tombstones AS newer WHERE newer.topic_id = older.topic_id "
            "AND newer.partition = older.partition AND newer.removal > older.removal "
            "AND newer.last_offset >= older.last_offset)"
        )


def removals_of(control: ControlDb, topic_id: str) -> Removals:
    """Return the removals of a topic that are still of use.

    Raises:
        RetriableError, CorruptionError: see ``ControlDb.rows``.
    """
    # The owner makes the table as it opens the folder, and readers need no owner.
    if not control.rows("SELECT 1 FROM sqlite_master WHERE name = 'removed_tombstones'"):
        return {}
    found: dict[int, tuple[Removal, ...]] = {}
    for partition, number, last_offset in control.rows(
        "SELECT partition, removal, last_offset FROM removed_tombstones WHERE topic_id = ? "
        "ORDER BY partition, removal",
        (topic_id,),
    ):
        found[partition] = (*found.get(partition, ()), Removal(number, last_offset))
    return found
