"""Stored transactions of producers in other processes than the owner's.

Such a producer outlives the owner, continues with the next one, and may retry requests that got no response.
So control.db stores for each whether a transaction is open or how the last one ended, and the offsets of
groups to commit with it. Both change in the commit that decides the transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Literal, NamedTuple

from millstream.log.control import ControlDb
from millstream.log.groups import Offsets, offset_and_metadata, translate_missing_topic
from millstream.record import TopicPartition

RemoteState = Literal["open", "committed", "aborted"]


class RemoteTransaction(NamedTuple):
    """The state of the last transaction of a producer, and its producer epoch."""

    producer_epoch: int
    state: RemoteState


def put_open(connection: sqlite3.Connection, producer_id: int, producer_epoch: int) -> None:
    """Store that a transaction is open."""
    connection.execute(
        "INSERT OR REPLACE INTO remote_transactions VALUES (?, ?, 'open')",
        (producer_id, producer_epoch),
    )


def put_in_process(connection: sqlite3.Connection, producer_id: int, *, in_process: bool) -> None:
    """Store whether a producer is in the owner's process."""
    connection.execute(
        "UPDATE producers SET in_process = ? WHERE producer_id = ?", (in_process, producer_id)
    )


def put_pending(
    connection: sqlite3.Connection,
    producer_id: int,
    group: str,
    offsets: Offsets,
    *,
    topic_ids: Mapping[str, str],
) -> None:
    """Store offsets to commit with the open transaction.

    Raises:
        UnknownTopicError: a topic was deleted since its id was looked up.
    """
    rows = []
    for name, given in offsets.items():
        place = (topic_ids[name.topic], name.partition)
        rows.append((producer_id, group, *place, *offset_and_metadata(given)))
    with translate_missing_topic(topic_ids):
        connection.executemany(
            "INSERT OR REPLACE INTO pending_offsets VALUES (?, ?, ?, ?, ?, ?, ?)", rows
        )


def put_end(connection: sqlite3.Connection, producer_id: int, *, commit: bool, now_ms: int) -> None:
    """Store how the open transaction ends, and commit or drop its offsets."""
    if commit:
        connection.execute(
            "INSERT INTO group_offsets SELECT group_name, topic_id, partition, committed_offset, "
            "metadata, leader_epoch, ? FROM pending_offsets WHERE producer_id = ? "
            "ON CONFLICT (group_name, topic_id, partition) DO UPDATE SET "
            "committed_offset = excluded.committed_offset, metadata = excluded.metadata, "
            "leader_epoch = excluded.leader_epoch, committed_ms = excluded.committed_ms",
            (now_ms, producer_id),
        )
    connection.execute("DELETE FROM pending_offsets WHERE producer_id = ?", (producer_id,))
    connection.execute(
        "UPDATE remote_transactions SET state = ? WHERE producer_id = ? AND state = 'open'",
        ("committed" if commit else "aborted", producer_id),
    )


def delete_producers(connection: sqlite3.Connection, producer_ids: list[int]) -> None:
    """Delete producers whose transactions ended long ago."""
    connection.executemany(
        "DELETE FROM remote_transactions WHERE producer_id = ?", [(one,) for one in producer_ids]
    )


def remote_transactions(control: ControlDb) -> dict[int, RemoteTransaction]:
    """Return the last transaction of each such producer, by producer id."""
    rows = control.rows("SELECT producer_id, producer_epoch, state FROM remote_transactions")
    return {producer_id: RemoteTransaction(*rest) for producer_id, *rest in rows}


def remote_transaction(control: ControlDb, producer_id: int) -> RemoteTransaction | None:
    """Return the last transaction of one producer; None if it had none."""
    rows = control.rows(
        "SELECT producer_epoch, state FROM remote_transactions WHERE producer_id = ?",
        (producer_id,),
    )
    return RemoteTransaction(*rows[0]) if rows else None


def pending_partitions(control: ControlDb, group: str) -> set[TopicPartition]:
    """Return the partitions in which an open transaction will commit offsets of a group."""
    rows = control.rows(
        "SELECT name, partition FROM pending_offsets JOIN topics USING (topic_id) "
        "WHERE group_name = ? AND deleted = 0",
        (group,),
    )
    return {TopicPartition(name, number) for name, number in rows}
