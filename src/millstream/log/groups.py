"""Committed offsets: how far each group has read each partition; kept in control.db.

A committed offset is the next offset that the group will read. It belongs to the topic's id, so a
recreated topic under the same name has none. Offsets are committed by any process on the
machine, alone or together with a transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from millstream.errors import ConfigError, FencePassedError, UnknownTopicError
from millstream.log.control import ControlDb
from millstream.record import TopicPartition

METADATA_CHARACTERS_MAX = 4096


class CommittedOffset(NamedTuple):
    """The committed offset of a group in one partition: the next to read, its metadata, and when.

    ``leader_epoch`` is that of the record before it, as a client of the broker gave it; -1 if none did.
    """

    offset: int
    metadata: str
    committed_ms: int
    leader_epoch: int = -1


class OffsetAndMetadata(NamedTuple):
    """An offset to commit, and its metadata. Once committed it has a time: see :class:`CommittedOffset`."""

    offset: int
    metadata: str = ""
    leader_epoch: int = -1


Offsets = Mapping[TopicPartition, int | tuple[int, str] | OffsetAndMetadata]


def offset_and_metadata(given: int | tuple[int, str] | OffsetAndMetadata) -> OffsetAndMetadata:
    """Return an offset to commit with its metadata."""
    return OffsetAndMetadata(*given) if isinstance(given, tuple) else OffsetAndMetadata(given)


def check_offsets(group: str, offsets: Offsets) -> None:
    """Check the offsets of a commit.

    Raises:
        ConfigError: the group has no name, an offset is negative, or metadata is too long.
    """
    if not group:
        raise ConfigError("the group has no name; give one such as 'billing'")
    if not group.isprintable():
        raise ConfigError(
            f"the group {group!r} has characters that cannot be printed; give a name such as "
            "'billing'"
        )
    for name, given in offsets.items():
        offset, metadata, _ = offset_and_metadata(given)
        if offset < 0:
            raise ConfigError(
                f"offset {offset} of {name} is negative; commit the next offset to read, 0 or more"
            )
        if len(metadata) > METADATA_CHARACTERS_MAX:
            raise ConfigError(
                f"metadata of {len(metadata)} characters; at most {METADATA_CHARACTERS_MAX} are kept"
            )


def put_offsets(
    connection: sqlite3.Connection,
    group: str,
    offsets: Offsets,
    *,
    topic_ids: Mapping[str, str],
    now_ms: int,
) -> None:
    """Write offsets within a commit of control.db. ``topic_ids`` has every topic named.

    Raises:
        UnknownTopicError: one of them was deleted since.
    """
    rows = []
    for name, given in offsets.items():
        rows.append(
            (group, topic_ids[name.topic], name.partition, *offset_and_metadata(given), now_ms)
        )
    with translate_missing_topic(topic_ids):
        connection.executemany(
            "INSERT INTO group_offsets VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (group_name, topic_id, partition) DO UPDATE SET "
            "committed_offset = excluded.committed_offset, metadata = excluded.metadata, "
            "leader_epoch = excluded.leader_epoch, committed_ms = excluded.committed_ms",
            rows,
        )


@contextmanager
def translate_missing_topic(names: Iterable[str]) -> Iterator[None]:
    """Translate the IntegrityError of writing offsets: a topic was deleted after its id was looked up.

    Raises:
        UnknownTopicError: one of ``names`` was deleted.
    """
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise UnknownTopicError(
            f"offsets of {', '.join(map(repr, sorted(names)))} could not be committed, as a topic was deleted "
            "meanwhile; nothing was committed. Commit offsets of existing topics"
        ) from error


def committed_offsets(control: ControlDb, group: str) -> dict[TopicPartition, CommittedOffset]:
    """Return what a group has committed, of topics that exist; empty for an unknown group."""
    rows = control.rows(
        "SELECT name, partition, committed_offset, metadata, committed_ms, leader_epoch "
        "FROM group_offsets JOIN topics USING (topic_id) WHERE group_name = ? AND deleted = 0 "
        "ORDER BY name, partition",
        (group,),
    )
    return {TopicPartition(name, number): CommittedOffset(*rest) for name, number, *rest in rows}


def offsets_by_partition(
    control: ControlDb, below: Mapping[TopicPartition, int]
) -> dict[TopicPartition, dict[str, int]]:
    """Return what groups have committed of these partitions ``below`` an offset of each; by group."""
    found: dict[TopicPartition, dict[str, int]] = {}
    rows = control.rows(
        "SELECT name, partition, group_name, committed_offset FROM group_offsets "
        "JOIN topics USING (topic_id) WHERE deleted = 0 AND committed_offset < ? "
        "ORDER BY group_name",
        (max(below.values()),),
    )
    for name, number, group, offset in rows:
        place = TopicPartition(name, number)
        if offset < below.get(place, 0):
            found.setdefault(place, {})[group] = offset
    return found


def group_names(control: ControlDb) -> list[str]:
    """Return every group that has committed something, sorted."""
    return [
        name for (name,) in control.rows("SELECT DISTINCT group_name FROM group_offsets ORDER BY 1")
    ]


def delete_offsets(control: ControlDb, group: str, topic: str | None = None) -> int:
    """Delete the committed offsets of a group, of one topic or of all; return how many."""
    with control.commit() as connection:
        if topic is None:
            cursor = connection.execute("DELETE FROM group_offsets WHERE group_name = ?", (group,))
        else:
            cursor = connection.execute(
                "DELETE FROM group_offsets WHERE group_name = ? AND topic_id IN "
                "(SELECT topic_id FROM topics WHERE name = ?)",
                (group, topic),
            )
        return cursor.rowcount


def delete_partition_offsets(
    control: ControlDb, group: str, places: Iterable[TopicPartition]
) -> None:
    """Delete the committed offsets of a group in these partitions."""
    with control.commit() as connection:
        connection.executemany(
            "DELETE FROM group_offsets WHERE group_name = ? AND partition = ? AND topic_id IN "
            "(SELECT topic_id FROM topics WHERE name = ?)",
            [(group, place.partition, place.topic) for place in places],
        )


def expire_groups(control: ControlDb, before_ms: int, *, keep: Iterable[str]) -> list[str]:
    """Delete the offsets of groups that have committed nothing since ``before_ms``; return the groups.

    Args:
        keep: Groups that are in use, whenever they committed.
    """
    kept = set(keep)
    with control.commit() as connection:
        rows = connection.execute(
            "SELECT group_name FROM group_offsets GROUP BY group_name "
            "HAVING max(committed_ms) < ? ORDER BY 1",
            (before_ms,),
        ).fetchall()
        silent = [name for (name,) in rows if name not in kept]
        connection.executemany(
            "DELETE FROM group_offsets WHERE group_name = ?", [(name,) for name in silent]
        )
    return silent


def fences_from(control: ControlDb, prefix: str) -> dict[str, int]:
    """Return the batch ids of the fences of all writers whose names begin with ``prefix``."""
    rows = control.rows(
        "SELECT writer, batch_id FROM fences WHERE substr(writer, 1, ?) = ?", (len(prefix), prefix)
    )
    return {str(writer): int(batch_id) for writer, batch_id in rows}


def delete_fences(control: ControlDb, prefix: str) -> int:
    """Delete the fences of all writers whose names begin with ``prefix``; return how many."""
    with control.commit() as connection:
        return connection.execute(
            "DELETE FROM fences WHERE substr(writer, 1, ?) = ?", (len(prefix), prefix)
        ).rowcount


def fence_of(control: ControlDb, writer: str) -> int | None:
    """Return the batch id of the fence of ``writer``; None if it has none."""
    rows = control.rows("SELECT batch_id FROM fences WHERE writer = ?", (writer,))
    return int(rows[0][0]) if rows else None


def advance_fence(connection: sqlite3.Connection, writer: str, batch_id: int) -> None:
    """Move the fence of ``writer`` to ``batch_id`` within a commit of control.db.

    Raises:
        FencePassedError: it is there already, or beyond.
    """
    execute = connection.execute
    row = execute("SELECT batch_id FROM fences WHERE writer = ?", (writer,)).fetchone()
    if row is not None and row[0] >= batch_id:
        raise FencePassedError(
            f"the fence of {writer!r} is at batch {row[0]}, so batch {batch_id} is committed "
            "already; skip it",
            batch_id=row[0],
        )
    execute("INSERT OR REPLACE INTO fences VALUES (?, ?)", (writer, batch_id))
