"""The state of share groups in control.db: the progress of each, record by record, and its settings.

For each partition that a share group reads: the first offset that is not done, and after it spans of records
that were delivered or are done out of order. Each span is a row, so a commit writes those that changed, and
adjacent records in the same state are one row. They belong to the topic's id, and are deleted with the topic.

::

    commit                                   what a crash just before it leaves
    ---------------------------------------  ------------------------------------------------------
    deliveries are counted, before records   the records as they were; no member received them
    are sent
    acknowledgements, before the response    the records as delivered: they are delivered again,
                                             and no member got a response
    records are archived, together with the  the records as rejected or exhausted, and no copy: the
    decision of the transaction that holds   transaction is aborted, and it is repeated
    their copies
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from millstream.log.control import ControlDb, corruption_if_unreadable
from millstream.record import TopicPartition

_STARTS = (
    "SELECT group_name, name, partition, start_offset FROM share_partitions "
    "JOIN topics USING (topic_id)"
)
_SPANS = (
    "SELECT group_name, name, partition, first_offset, end_offset, state, delivery_count "
    "FROM share_spans JOIN topics USING (topic_id)"
)
_EVERY = "WHERE deleted = 0"
_OF_GROUP = f"{_EVERY} AND group_name = ?"


class RecordState(StrEnum):
    """The state of a record in a share group; see ``broker.share.partition``."""

    AVAILABLE = "available"
    ACQUIRED = "acquired"
    ACKNOWLEDGED = "acknowledged"
    ARCHIVED = "archived"
    REJECTED = "rejected"
    EXHAUSTED = "exhausted"


class ShareKey(NamedTuple):
    """Which partition of which group."""

    group: str
    topic_id: str
    partition: int


class SpanRow(NamedTuple):
    """Records [first, end) that have the same state."""

    first: int
    end: int
    state: RecordState
    delivery_count: int


class ShareState(NamedTuple):
    """The progress of a share group in a partition."""

    start: int
    spans: tuple[SpanRow, ...] = ()


class ShareMember(NamedTuple):
    """A member of a share group, as its broker last stored it; ``assignment`` by topic."""

    member_id: str
    client_id: str
    client_host: str
    assignment: Mapping[str, Sequence[int]]


def put_share(
    connection: sqlite3.Connection, key: ShareKey, before: ShareState | None, after: ShareState
) -> None:
    """Replace the stored state ``before`` by ``after``, within a commit of control.db.

    Raises:
        sqlite3.IntegrityError: the topic is gone.
    """
    if before is None or before.start != after.start:
        connection.execute(
            "INSERT INTO share_partitions VALUES (?, ?, ?, ?) "
            "ON CONFLICT (group_name, topic_id, partition) DO UPDATE SET "
            "start_offset = excluded.start_offset",
            (*key, after.start),
        )
    old = frozenset(before.spans if before else ())
    new = frozenset(after.spans)
    connection.executemany(
        "DELETE FROM share_spans WHERE group_name = ? AND topic_id = ? AND partition = ? "
        "AND first_offset = ?",
        [(*key, one.first) for one in sorted(old - new)],
    )
    connection.executemany(
        "INSERT INTO share_spans VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(*key, *one) for one in sorted(new - old)],
    )


def _span_row(first: int, end: int, state: str, delivery_count: int) -> SpanRow:
    return SpanRow(first, end, RecordState(state), delivery_count)


def share_states(
    control: ControlDb, group: str | None = None
) -> dict[str, dict[TopicPartition, ShareState]]:
    """Return the progress of share groups, in topics that exist, by group."""
    values = () if group is None else (group,)
    found: dict[str, dict[TopicPartition, ShareState]] = {}
    meant = _EVERY if group is None else _OF_GROUP
    for name, topic, number, start in control.rows(f"{_STARTS} {meant} ORDER BY 1, 2, 3", values):
        found.setdefault(name, {})[TopicPartition(topic, number)] = ShareState(start)
    for name, topic, number, *span in control.rows(f"{_SPANS} {meant} ORDER BY 1, 2, 3, 4", values):
        place = TopicPartition(topic, number)
        state = found.get(name, {}).get(place)
        if state is not None:  # else it was written between the two queries
            found[name][place] = ShareState(state.start, (*state.spans, _span_row(*span)))
    return found


def share_state(control: ControlDb, key: ShareKey) -> ShareState | None:
    """Return the progress of a group in a partition; None if it has not begun."""
    rows = control.rows(
        "SELECT start_offset FROM share_partitions "
        "WHERE group_name = ? AND topic_id = ? AND partition = ?",
        key,
    )
    if not rows:
        return None
    spans = control.rows(
        "SELECT first_offset, end_offset, state, delivery_count FROM share_spans "
        "WHERE group_name = ? AND topic_id = ? AND partition = ? ORDER BY 1",
        key,
    )
    return ShareState(rows[0][0], tuple(_span_row(*one) for one in spans))


def share_names(control: ControlDb) -> list[str]:
    """Return every share group that has begun with a partition, or has settings, sorted."""
    return [
        name
        for (name,) in control.rows(
            "SELECT group_name FROM share_partitions UNION SELECT group_name FROM share_members "
            "UNION SELECT group_name FROM group_settings ORDER BY 1"
        )
    ]


def is_share_group(control: ControlDb, group: str) -> bool:
    """Return whether a share group of this name has begun with a partition."""
    return bool(
        control.rows("SELECT 1 FROM share_partitions WHERE group_name = ? LIMIT 1", (group,))
    )


def delete_share_state(control: ControlDb, group: str) -> int:
    """Delete the progress of a share group, and its settings; return of how many partitions."""
    with control.commit() as connection:
        connection.execute("DELETE FROM group_settings WHERE group_name = ?", (group,))
        connection.execute("DELETE FROM share_members WHERE group_name = ?", (group,))
        return connection.execute(
            "DELETE FROM share_partitions WHERE group_name = ?", (group,)
        ).rowcount


def delete_share_topics(control: ControlDb, group: str, topic_ids: Iterable[str]) -> None:
    """Delete the progress of a share group in some topics."""
    with control.commit() as connection:
        connection.executemany(
            "DELETE FROM share_partitions WHERE group_name = ? AND topic_id = ?",
            [(group, topic_id) for topic_id in topic_ids],
        )


# -- settings and members ---------------------------------------------------------------------


def group_settings(control: ControlDb, group: str) -> dict[str, str]:
    """Return the explicit settings of a group."""
    return dict(
        control.rows(
            "SELECT name, value FROM group_settings WHERE group_name = ? ORDER BY 1", (group,)
        )
    )


def put_group_settings(control: ControlDb, group: str, changes: Mapping[str, str | None]) -> None:
    """Change settings of a group; None removes one."""
    with control.commit() as connection:
        for name, value in changes.items():
            if value is None:
                connection.execute(
                    "DELETE FROM group_settings WHERE group_name = ? AND name = ?", (group, name)
                )
            else:
                connection.execute(
                    "INSERT OR REPLACE INTO group_settings VALUES (?, ?, ?)", (group, name, value)
                )


def put_members(control: ControlDb, group: str, members: Iterable[ShareMember]) -> None:
    """Store the members of a share group, for other processes."""
    with control.commit() as connection:
        connection.execute("DELETE FROM share_members WHERE group_name = ?", (group,))
        connection.executemany(
            "INSERT INTO share_members VALUES (?, ?, ?, ?, ?)",
            [(group, *one[:3], json.dumps(one.assignment)) for one in members],
        )


def delete_members(control: ControlDb) -> None:
    """Delete the members of all share groups: the broker has just started."""
    if control.rows("SELECT 1 FROM share_members LIMIT 1"):
        with control.commit() as connection:
            connection.execute("DELETE FROM share_members")


def share_members(control: ControlDb, group: str) -> list[ShareMember]:
    """Return the members of a share group, as its broker last stored them."""
    rows = control.rows(
        "SELECT member_id, client_id, client_host, assignment FROM share_members "
        "WHERE group_name = ? ORDER BY 1",
        (group,),
    )
    with corruption_if_unreadable("who is in a share group"):
        return [ShareMember(row[0], row[1], row[2], json.loads(row[3])) for row in rows]
