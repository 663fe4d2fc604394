"""Reading a topic record by record: an iterator that waits at the end until more is committed.

Within a partition records come in offset order; between partitions no order is promised. A consumer
of a group continues where the group has committed; records handed out and not yet committed are handed out
again after a crash (at least once). For whole columns at once use ``EventLog.read``.

This module has positions, seeking and commits; ``folder.consumer`` and ``kafka.consumer`` fetch the records.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Self

from millstream.choices import choose
from millstream.client.groups import GroupOffsetStore
from millstream.client.reader import Reader
from millstream.client.start_position import StartPosition, check_offset, start_offsets
from millstream.errors import ConfigError, OffsetOutOfRangeError
from millstream.log.groups import check_offsets
from millstream.record import Record, TopicPartition

COMMIT_EVERY_S = 1.0
CLOSED_CHECK_S = 0.2  # how often a waiting consumer checks whether it was closed


class Consumer(ABC):
    """An iterator of :class:`~millstream.record.Record`; see ``EventLog.consumer``.

    It reads the topic with ``topic_id``. If that is deleted and recreated, it ends with TopicRecreatedError,
    and commits nothing for the new one.

    Guarantees: belongs to one thread; :meth:`close` may be called from any.
    """

    def __init__(
        self,
        reader: Reader,
        topic: str,
        *,
        group: str | None,
        offsets: GroupOffsetStore,
        start: StartPosition,
        commit: Literal["auto", "manual"],
        follow: bool,
        partitions: Sequence[int] | None = None,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        choose("commit", commit, ("auto", "manual"))
        if group is not None:
            check_offsets(group, {})
        self._topic = topic
        self.topic_id = reader.topic_id(topic)
        self._reader = reader = reader.pinned({topic: self.topic_id})
        self._group = group
        self._offsets = offsets
        self._clock_ms = clock_ms
        self._automatic = group is not None and commit == "auto"
        bounds = reader.offsets(topic)
        chosen = _chosen_partitions(topic, len(bounds), partitions, start)
        self._next = start_offsets(reader, topic, start, chosen, "start")
        committed = {} if group is None else self._committed_positions(group, bounds, chosen)
        self._next |= committed
        self._grows = partitions is None and not isinstance(start, Mapping) and follow
        self._stop = None if follow else {number: bounds[number][1] for number in self._next}
        self._fetched: Iterator[Record] = iter(())
        self._positions = dict(self._next)
        # Read, and not yet committed. The start offset of a group is committed too, so that its lag is known
        # for partitions without records yet.
        self._done = {n: offset for n, offset in self._next.items() if n not in committed}
        self._read_any = False
        self._in_hand: tuple[int, int] | None = None  # (partition, next offset)
        self._commit_due_s = time.monotonic() + COMMIT_EVERY_S
        self._closed = False

    @property
    def positions(self) -> dict[int, int]:
        """The next offset of each partition: one past the last record that was handed out."""
        return dict(self._positions)

    def seek(self, positions: Mapping[int, int]) -> None:
        """Continue at these offsets; other partitions continue where they are.

        Raises:
            ConfigError: the consumer does not read such a partition.
            OffsetOutOfRangeError: an offset is gone or not yet there.
        """
        bounds = self._reader.offsets(self._topic)
        for number, offset in positions.items():
            if number not in self._next:
                raise ConfigError(
                    f"partition {number} is not read by this consumer, which reads "
                    f"{sorted(self._next)}; seek in one of these"
                )
            check_offset(self._topic, number, bounds[number], offset, "start")
        self._mark_read()
        # Records fetched and not handed out are fetched again.
        self._next = dict(self._positions) | dict(positions)
        self._positions = dict(self._next)
        self._done |= positions
        self._fetched = iter(())

    def commit(self) -> None:
        """Commit, for the group, everything that was handed out so far. Durable on return.

        Raises:
            ConfigError: the consumer has no group.
        """
        if self._group is None:
            raise ConfigError("this consumer has no group; give consumer(..., group='name')")
        self._mark_read()
        self._commit_read()

    def close(self) -> None:
        """End the iteration, at the latest 0.2 s later if it waits; the last record counts as read.

        With automatic commits, what was read is committed.
        """
        if not self._closed:
            self._closed = True
            if self._automatic:
                self._mark_read()
                self._commit_read()

    def __iter__(self) -> Iterator[Record]:
        return self

    def __next__(self) -> Record:
        self._mark_read()
        while not self._closed:
            record = next(self._fetched, None)
            if record is not None:
                self._positions[record.partition] = record.offset + 1
                self._in_hand = (record.partition, record.offset + 1)
                self._commit_if_due()
                return record
            if not self._fetch():
                self._commit_if_due()
                if self._stop is not None:
                    break
                self._wait()
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._in_hand = None  # it was being processed: it will be handed out again
        self.close()

    # -- committing ---------------------------------------------------------------------------

    def _committed_positions(
        self, group: str, bounds: Sequence[tuple[int, int]], chosen: Sequence[int]
    ) -> dict[int, int]:
        found: dict[int, int] = {}
        for name, committed in self._offsets.committed(group).items():
            number = name.partition
            if name.topic != self._topic or number not in chosen:
                continue
            low, end = bounds[number]
            if committed.offset < low:
                raise OffsetOutOfRangeError(
                    f"group {group!r} has read {self._topic}/{number} up to offset "
                    f"{committed.offset}, but it now begins at {low}: {low - committed.offset} "
                    "records were removed unread. To go on without them, commit a later offset "
                    "(commit_offsets, or `millstream group reset`)",
                    start=low,
                    end=end,
                )
            found[number] = committed.offset
        return found

    def _mark_read(self) -> None:
        """Count the last record as read: its user asks for the next one."""
        if self._in_hand is not None:
            partition, offset = self._in_hand
            self._done[partition] = offset
            self._in_hand, self._read_any = None, True

    def _commit_if_due(self) -> None:
        if (
            self._automatic
            and self._read_any
            and self._done
            and time.monotonic() >= self._commit_due_s
        ):
            self._commit_read()

    def _commit_read(self) -> None:
        self._commit_due_s = time.monotonic() + COMMIT_EVERY_S
        if self._group is None or not self._done:
            return
        offsets = {
            TopicPartition(self._topic, number): offset for number, offset in self._done.items()
        }
        self._offsets.commit(self._group, offsets, reader=self._reader, now_ms=self._clock_ms())
        self._done = {}

    # -- fetching -----------------------------------------------------------------------------

    @abstractmethod
    def _fetch(self) -> bool:
        """Read some records into ``_fetched``; False if there is none now."""

    @abstractmethod
    def _wait(self) -> None:
        """Wait until there may be more records, at most ``CLOSED_CHECK_S``."""

    def _add_partitions(self, bounds: Sequence[tuple[int, int]]) -> list[int]:
        """Begin to read partitions that were added to the topic, from their start; return these."""
        added = [number for number in range(len(bounds)) if number not in self._next]
        for number in added:
            self._next[number] = self._positions[number] = bounds[number][0]
        return added


def _chosen_partitions(
    topic: str, count: int, partitions: Sequence[int] | None, start: StartPosition
) -> Sequence[int]:
    """Return which partitions are read."""
    if partitions is None:
        partitions = list(start) if isinstance(start, Mapping) else range(count)
    for number in partitions:
        if not 0 <= number < count:
            raise ConfigError(
                f"topic {topic!r} has no partition {number}; choose of 0 to {count - 1}"
            )
    return partitions
