"""The topics, the folders of their partitions, and the leader epoch; stored in control.db.

A topic is created with one commit, after its folders are durable, and deleted in three steps, which the next
opening and maintenance can finish (see :meth:`Catalog.mark_deleted`).
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from millstream.choices import did_you_mean
from millstream.errors import (
    ConfigError,
    TopicExistsError,
    TopicRecreatedError,
    UnknownTopicError,
)
from millstream.log.config import TopicConfig
from millstream.log.control import ControlDb, corruption_if_unreadable
from millstream.log.state_file import SLOTS_MAX
from millstream.record import TopicInfo

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")
_TOPIC_ID = re.compile(r"[0-9a-f]{32}\Z")


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """A topic as the catalog knows it; ``slots[p]`` is where state.mm keeps partition p.

    ``settings`` holds the explicit ones, under Kafka's names; ``config`` the effective ones.
    """

    name: str
    topic_id: str
    slots: tuple[int, ...]
    settings: Mapping[str, str]

    @property
    def config(self) -> TopicConfig:
        """The settings as values, with the defaults."""
        return TopicConfig.parse(self.settings)

    @property
    def folder_name(self) -> str:
        """Name of its folder under ``t/``: at most 255 characters, which file systems allow."""
        return f"{self.name[:240]}.{self.topic_id[:8]}"

    @property
    def info(self) -> TopicInfo:
        """The public form."""
        return TopicInfo(self.name, self.topic_id, len(self.slots))


def partition_folder(folder: Path, topic: TopicMetadata, partition: int) -> Path:
    """Return the folder of a partition's segments."""
    return folder / "t" / topic.folder_name / str(partition)


def check_topic_name(name: str) -> None:
    """Reject topic names that Kafka would reject.

    Raises:
        ConfigError: use 1 to 249 letters, digits, dots, dashes or underscores.
    """
    if not _NAME.match(name) or name in {".", ".."}:
        raise ConfigError(
            f"topic name {name!r} is not possible; use 1 to 249 of the characters "
            "A-Z a-z 0-9 . _ - (and not . or .. alone)"
        )


def unknown_topic(name: str, known: Mapping[str, object]) -> UnknownTopicError:
    """Return the error for an unknown topic, with the known names."""
    there = ", ".join(sorted(known)[:10]) or "none yet"
    return UnknownTopicError(
        f"there is no topic {name!r} (topics: {there}); create it, or correct the name."
        f"{did_you_mean(name, known)}"
    )


def check_topic_id(name: str, expected: str | None, found: str) -> None:
    """Check that a topic is the one that a position belongs to; None: any.

    Raises:
        TopicRecreatedError: it was deleted and created again.
    """
    if expected not in (None, found):
        raise TopicRecreatedError(
            f"topic {name!r} was deleted and created again: its id was {expected}, and is {found}, so "
            "positions in the old one mean nothing in the new; delete them, and start over"
        )


def topic_exists(name: str) -> TopicExistsError:
    """Return the error for a name that is taken."""
    return TopicExistsError(f"there is a topic {name!r} already; use it, or choose another name")


def fewer_partitions(topic: str, count: int, wanted: int) -> ConfigError:
    """Return the error for a topic of ``count`` partitions that is to have fewer."""
    return ConfigError(
        f"topic {topic!r} has {count} partitions and cannot have {wanted}: they can be added, not removed; "
        "make another topic and copy the records"
    )


def no_partition(topic: str, partition: int, count: int) -> ConfigError:
    """Return the error for a partition that a topic of ``count`` partitions does not have."""
    return ConfigError(
        f"topic {topic!r} has no partition {partition}; choose one of 0 to {count - 1}"
    )


class Catalog:
    """Topics and the leader epoch. Safe to use from many threads."""

    def __init__(self, control: ControlDb) -> None:
        self._control = control

    def next_leader_epoch(self) -> int:
        """Return the leader epoch of a new owner: one more than the last, from 1."""
        with self._control.commit() as connection:
            rows = connection.execute(
                "INSERT INTO folder VALUES ('leader_epoch', 1) "
                "ON CONFLICT (key) DO UPDATE SET value = value + 1 RETURNING value"
            ).fetchall()
        return int(rows[0][0])

    def topics(self) -> dict[str, TopicMetadata]:
        """Return the topics that exist, by name, in the order of names."""
        return self._select(deleted=False)

    def deleted_topics(self) -> dict[str, TopicMetadata]:
        """Return the topics whose files are still to be removed."""
        return self._select(deleted=True)

    def free_slots(self, count: int) -> tuple[int, ...]:
        """Return ``count`` free slots of state.mm.

        Raises:
            ConfigError: the folder would hold more than 8,160 partitions; use another folder.
        """
        used = {row[0] for row in self._control.rows("SELECT slot FROM partitions")}
        free = tuple(islice((slot for slot in range(SLOTS_MAX) if slot not in used), count))
        if len(free) < count:
            raise ConfigError(
                f"{count} partitions do not fit: a log folder holds {SLOTS_MAX} and "
                f"{len(used)} are taken; use fewer partitions or another folder"
            )
        return free

    def insert(self, topic: TopicMetadata) -> None:
        """Create a topic, in one commit. Its folders must be on stable storage already.

        Raises:
            TopicExistsError: the name is taken.
        """
        try:
            with self._control.commit() as connection:
                connection.execute(
                    "INSERT INTO topics (name, topic_id, config) VALUES (?, ?, ?)",
                    (topic.name, topic.topic_id, json.dumps(dict(topic.settings))),
                )
                _insert_partitions(connection, topic, 0)
        except sqlite3.IntegrityError:
            raise topic_exists(topic.name) from None

    def update(self, topic: TopicMetadata, *, partitions_before: int) -> None:
        """Store changed settings and added partitions, in one commit."""
        with self._control.commit() as connection:
            connection.execute(
                "UPDATE topics SET config = ? WHERE topic_id = ?",
                (json.dumps(dict(topic.settings)), topic.topic_id),
            )
            _insert_partitions(connection, topic, partitions_before)

    def mark_deleted(self, topic: TopicMetadata) -> None:
        """Delete a topic, in one commit; its files and its row go afterwards.

        1. This commit: the topic is deleted, whatever becomes of the next steps. A crash leaves its files
           and its row: the next opening continues with step 2.
        2. Remove the folder. A crash, or a disk that refuses, leaves some of the files, and the row: every
           pass of maintenance, and the next opening, repeat this step.
        3. :meth:`delete`. A failure leaves the row: steps 2 and 3 are repeated. Only after it may the slots
           in state.mm be given to another topic.
        """
        with self._control.commit() as connection:
            # The name is free at once: a deleted row carries the id in its place.
            connection.execute(
                "UPDATE topics SET deleted = 1, name = name || '/' || topic_id WHERE topic_id = ?",
                (topic.topic_id,),
            )

    def delete(self, topic_id: str) -> None:
        """Remove the row of a deleted topic."""
        with self._control.commit() as connection:
            connection.execute("DELETE FROM topics WHERE topic_id = ?", (topic_id,))

    def _select(self, *, deleted: bool) -> dict[str, TopicMetadata]:
        rows = self._control.rows(
            "SELECT name, topics.topic_id, config, slot FROM topics "
            "JOIN partitions USING (topic_id) WHERE deleted = ? ORDER BY name, partition",
            (int(deleted),),
        )
        slots: dict[tuple[str, str, str], list[int]] = {}
        for name, topic_id, config, slot in rows:
            shown = name.partition("/")[0] if deleted else name
            slots.setdefault((shown, topic_id, config), []).append(slot)
        with corruption_if_unreadable("which topics there are"):
            return {
                (topic_id if deleted else name): _checked(
                    TopicMetadata(name, topic_id, tuple(places), json.loads(config))
                )
                for (name, topic_id, config), places in slots.items()
            }


def _checked(topic: TopicMetadata) -> TopicMetadata:
    """Return a topic whose values are valid; its name and id become those of folders."""
    check_topic_name(topic.name)
    if not _TOPIC_ID.match(topic.topic_id):
        raise ValueError(f"{topic.topic_id!r} is no topic id")
    if not all(0 <= slot < SLOTS_MAX for slot in topic.slots):
        raise ValueError(f"topic {topic.name!r} has slots that state.mm does not have")
    assert topic.config  # it raises ConfigError, which is a ValueError
    return topic


def _insert_partitions(connection: sqlite3.Connection, topic: TopicMetadata, first: int) -> None:
    connection.executemany(
        "INSERT INTO partitions VALUES (?, ?, ?)",
        [
            (topic.topic_id, number, slot)
            for number, slot in enumerate(topic.slots)
            if number >= first
        ],
    )


@contextmanager
def catalog_of(folder: Path, control: ControlDb | None = None) -> Iterator[Catalog]:
    """Yield the catalog of a folder, to read; ``control`` is a connection, if there is one already.

    Raises:
        ConfigError: there is no control.db, or it cannot be opened.
    """
    if control is not None:
        yield Catalog(control)
        return
    opened = ControlDb.open(folder, write=False)
    try:
        yield Catalog(opened)
    finally:
        opened.close()
